"""Many experts asked at once: who is waited for, who is lost, and what gradients there are."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.distributed.moe import RemoteSwitchMixtureOfExperts, call_many
from aiograd.errors import ArgumentError, ArgumentTypeError, DeadlineError, ExpertLostError
from aiograd.testing import simulated_run
from aiograd.testing.virtual_clock import VirtualClock
from tests.support import cancel, custom_function


class Expert:
    """x * factor, after a while, forward and backward; perhaps never, or wrongly."""

    def __init__(self, factor: float, *, delay: float = 0.0, backward_delay: float = 0.0, error: Exception | None = None) -> None:
        self.factor = factor
        self.delay = delay
        self.backward_delay = backward_delay
        self.error = error
        self.backward_error: Exception | None = None
        self.calls = self.cancelled = self.backwards = 0
        self.seen: list[np.ndarray[Any, Any]] = []

    async def __call__(self, x: Any) -> Any:
        self.calls += 1
        self.seen.append(x.detach().numpy().copy())
        try:
            await asyncio.sleep(self.delay)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        return Scale.apply(x, self)


class Scale(ag.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, expert: Expert) -> Any:
        ctx.expert = expert
        return x * expert.factor

    @staticmethod
    async def backward(ctx: Any, g: Any) -> Any:
        await asyncio.sleep(ctx.expert.backward_delay)
        if ctx.expert.backward_error is not None:
            raise ctx.expert.backward_error
        ctx.expert.backwards += 1
        return g * ctx.expert.factor, None

    inline = True


def batch(rows: int) -> Any:
    return ag.tensor(np.arange(1.0, 2 * rows + 1).reshape(rows, 2), requires_grad=True)


async def test_masks_outputs_and_gradients_are_those_of_direct_calls() -> None:
    e = [Expert(float(i + 1)) for i in range(5)]
    bad = Expert(0, error=ValueError("broken"))
    x = batch(4)
    result = await call_many([[e[0], e[1], e[2]], [e[2], e[4]], [e[1], bad, e[3]], []], x, on_expert_loss="drop")
    np.testing.assert_array_equal(result.mask, [[1, 1, 1], [1, 1, 0], [1, 0, 1], [0, 0, 0]])
    factors = np.array([[1, 2, 3], [3, 5, 0], [2, 0, 4], [0, 0, 0]], float)
    np.testing.assert_array_equal(result.outputs.detach().numpy(), factors[:, :, None] * x.detach().numpy()[:, None])
    assert [(loss.sample, loss.position, loss.reason) for loss in result.lost] == [(2, 1, "failed")]
    assert "broken" in str(result.lost[0].error)
    weights = ag.tensor(np.random.default_rng(0).integers(1, 5, size=(4, 3, 2)).astype(float))
    before = x.detach().numpy().copy()
    await (result.outputs * weights).sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), (factors[:, :, None] * weights.numpy()).sum(axis=1))
    np.testing.assert_array_equal(x.detach().numpy(), before)


async def test_rows_of_one_expert_travel_in_one_request_each_way() -> None:
    e = [Expert(float(i + 1)) for i in range(3)]
    asked = [[e[0], e[1]], [e[1]], [], [e[2], e[0], e[1]]]

    async def run(**options: Any) -> tuple[Any, Any, Any]:
        x = batch(4)
        result = await call_many(asked, x, **options)
        await (result.outputs * weights).sum().backward()
        return result, result.outputs.detach().numpy(), x.grad.numpy()

    weights = ag.tensor(np.random.default_rng(0).normal(size=(4, 3, 2)))
    together, outputs, grad = await run()
    assert together.requests == 3
    assert [(expert.calls, expert.backwards) for expert in e] == [(1, 1)] * 3
    x = batch(4).detach().numpy()
    assert [[rows.tolist() for rows in expert.seen] for expert in e] == [[x[[0, 3]].tolist()], [x[[0, 1, 3]].tolist()], [x[[3]].tolist()]]
    alone, outputs_alone, grad_alone = await run(max_rows=1)
    assert alone.requests == 6
    np.testing.assert_array_equal(together.mask, alone.mask)
    np.testing.assert_array_equal(outputs, outputs_alone)  # to the bit, since these experts compute each row by itself
    np.testing.assert_array_equal(grad, grad_alone)


async def test_what_is_together_does_not_depend_on_who_is_quick_and_rows_agree_to_rounding() -> None:
    generator = ag.Generator(0)
    modules = [ag.nn.Linear(6, 5, generator=generator) for _ in range(3)]

    def expert(module: Any) -> Any:
        async def run(x: Any) -> Any:
            await asyncio.sleep(random.exponential(1e-4))
            return module(x)

        return run

    random = np.random.default_rng(1)
    experts = [expert(module) for module in modules]
    asked = [[experts[j] for j in random.choice(3, 2, replace=False)] for _ in range(9)]
    values = random.normal(size=(9, 6)).astype(np.float32)

    async def run(**options: Any) -> list[np.ndarray[Any, Any]]:
        x = ag.tensor(values, requires_grad=True)
        parameters = [parameter for module in modules for parameter in module.parameters()]
        result = await call_many(asked, x, **options)
        return [result.outputs.detach().numpy(), *(g.numpy() for g in await ag.grad((result.outputs**2).sum(), [x, *parameters]))]

    first, second, alone = await run(), await run(), await run(max_rows=1)
    for a, b, c in zip(first, second, alone, strict=True):
        assert a.tobytes() == b.tobytes()
        np.testing.assert_allclose(a, c, rtol=1e-5, atol=1e-6)


async def test_a_request_that_is_lost_is_lost_for_each_of_its_samples() -> None:
    good, bad = Expert(1), Expert(0, error=ValueError("broken"))
    result = await call_many([[good, bad], [good], [bad, good], [bad]], batch(4), on_expert_loss="drop", k_min=0)
    np.testing.assert_array_equal(result.mask, [[1, 0], [1, 0], [0, 1], [0, 0]])
    assert [(loss.sample, loss.position, loss.reason) for loss in result.lost] == [(0, 1, "failed"), (2, 0, "failed"), (3, 0, "failed")]
    assert bad.calls == 1
    with pytest.raises(ExpertLostError, match=r"sample 0 \(and of 2 others\) failed: ValueError: broken"):
        await call_many([[good, bad], [good], [bad, good], [bad]], batch(4))
    with pytest.raises(ExpertLostError, match=r"of sample 3 failed: ValueError: broken"):  # which needs one answer, and asked nobody else
        await call_many([[good, bad], [good], [bad, good], [bad]], batch(4), on_expert_loss="drop")


async def test_a_request_that_is_late_is_late_for_each_of_its_samples(virtual_clock: VirtualClock) -> None:
    quick, slow = Expert(2, delay=1), Expert(3, delay=9)
    result = await call_many([[quick, slow], [slow, quick], [quick]], batch(3), timeout_after_k_min=1)
    assert asyncio.get_running_loop().time() == 2 and slow.cancelled == 1
    assert [(loss.sample, loss.position, loss.reason) for loss in result.lost] == [(0, 1, "late"), (1, 0, "late")]


async def test_an_expert_that_a_sample_asks_twice_answers_twice() -> None:
    expert, x = Expert(3), batch(2)
    result = await call_many([[expert, expert], [expert]], x)
    await result.outputs.sum().backward()
    assert expert.calls == 1 and result.mask.sum() == 3
    np.testing.assert_array_equal(x.grad.numpy(), [[6, 6], [3, 3]])


async def test_an_expert_that_writes_into_its_rows_writes_into_its_own() -> None:
    async def rude(x: Any) -> Any:
        x.numpy()[...] = 0
        return x + 1

    x = batch(3).detach()
    await call_many([[rude]] * 3, x)
    np.testing.assert_array_equal(x.numpy(), batch(3).detach().numpy())


async def test_by_default_a_loss_is_an_error_that_names_sample_and_expert() -> None:
    good, bad = Expert(1), Expert(0, error=ValueError("broken"))
    with pytest.raises(ExpertLostError, match=r"sample 1 failed: ValueError: broken") as caught:
        await call_many([[good], [good, bad]], batch(2))
    assert (caught.value.sample, caught.value.position) == (1, 1)


def test_everybody_is_waited_for_and_stragglers_only_so_long() -> None:
    async def main(**options: Any) -> tuple[Any, float, Expert]:
        slow, quick = Expert(2, delay=10), Expert(3, delay=1)
        result = await call_many([[quick, slow], [quick]], batch(2), **options)
        return result, asyncio.get_running_loop().time(), slow

    result, time, slow = simulated_run(main).value
    assert time == 10 and result.mask.sum() == 3
    result, time, slow = simulated_run(lambda: main(timeout_after_k_min=0.5)).value
    assert time == 1.5 and slow.cancelled == 1
    np.testing.assert_array_equal(result.mask, [[True, False], [True, False]])
    assert [(loss.position, loss.reason) for loss in result.lost] == [(1, "late")]
    result, time, slow = simulated_run(lambda: main(forward_timeout=4)).value
    assert time == 4 and slow.cancelled == 1


async def test_k_min_counts_for_each_sample(virtual_clock: VirtualClock) -> None:
    quick, slow = Expert(1, delay=1), Expert(1, delay=100)
    with pytest.raises(DeadlineError, match="sample 1 answered within 10 s"):
        await call_many([[quick, quick, quick], [slow, slow]], batch(2), k_min=1, timeout_after_k_min=0.1, forward_timeout=10)


async def test_too_many_losses_of_one_sample_are_an_error_at_once(virtual_clock: VirtualClock) -> None:
    bad, slow = Expert(0, error=ValueError("broken")), Expert(1, delay=100)
    with pytest.raises(ExpertLostError):
        await call_many([[slow], [bad, slow]], batch(2), k_min=2, on_expert_loss="drop")
    assert asyncio.get_running_loop().time() < 1


async def test_all_run_at_the_same_time_forward_and_backward(virtual_clock: VirtualClock) -> None:
    loop = asyncio.get_running_loop()
    experts = [Expert(1, delay=1, backward_delay=2) for _ in range(4)]
    x = batch(8)
    result = await call_many([experts] * 8, x)
    forward = loop.time()
    await result.outputs.sum().backward()
    assert (forward, loop.time() - forward) == (1, 2)


async def test_an_expert_lost_in_backward_is_an_error_or_its_share_is_taken_by_the_others(virtual_clock: VirtualClock) -> None:
    async def run(on_loss: str) -> Any:
        good, bad = Expert(3), Expert(5)
        x = batch(2)
        result = await call_many([[good, bad], [good]], x, on_expert_loss=on_loss)
        bad.backward_error = ValueError("gone")
        await result.outputs.sum().backward()
        return x.grad.numpy(), result

    grad, result = await run("drop")
    np.testing.assert_array_equal(grad, [[6, 6], [3, 3]])
    assert [(loss.sample, loss.position) for loss in result.lost_in_backward] == [(0, 1)]
    with pytest.raises(ExpertLostError, match="gone"):
        await run("raise")


async def test_shares_are_taken_over_only_for_samples_that_lost_somebody_in_backward(virtual_clock: VirtualClock) -> None:
    experts = [Expert(factor) for factor in (1.0, 2.0, 4.0)]
    x = batch(4)
    result = await call_many([experts, experts[:2], [experts[2], experts[0]], [experts[1]]], x, on_expert_loss="drop")
    experts[2].backward_error = ValueError("gone")
    weights = np.arange(1.0, 25.0).reshape(4, 3, 2)
    await (result.outputs * ag.tensor(weights)).sum().backward()
    factors = np.array([[1, 2, 0], [1, 2, 0], [0, 1, 0], [2, 0, 0]])
    scale = np.array([3 / 2, 1, 2, 1])
    np.testing.assert_allclose(x.grad.numpy(), scale[:, None] * (factors[:, :, None] * weights).sum(axis=1))
    assert [(loss.sample, loss.position) for loss in result.lost_in_backward] == [(0, 2), (2, 0)]


async def test_backward_needs_its_answers_for_each_sample(virtual_clock: VirtualClock) -> None:
    async def run(k_min: int) -> Any:
        good, bad = Expert(1), Expert(2)
        x = batch(2)
        result = await call_many([[good, bad], [bad]], x, on_expert_loss="drop", backward_k_min=k_min)
        bad.backward_error = ValueError("gone")
        await result.outputs.sum().backward()
        return x.grad.numpy()

    with pytest.raises(ExpertLostError, match="sample 1 failed: ValueError: gone"):
        await run(1)
    np.testing.assert_array_equal(await run(0), [[2, 2], [0, 0]])


def test_stragglers_of_backward() -> None:
    async def main(**options: Any) -> tuple[Any, float]:
        quick, slow = Expert(3, backward_delay=1), Expert(5, backward_delay=50)
        x = batch(1)
        result = await call_many([[quick, slow]], x, **options)
        begun = asyncio.get_running_loop().time()
        await result.outputs.sum().backward()
        return x.grad.numpy(), asyncio.get_running_loop().time() - begun

    grad, time = simulated_run(lambda: main(backward_timeout=10)).value
    assert time == 10
    np.testing.assert_array_equal(grad, [[6, 6]])
    with pytest.raises(DeadlineError, match="backward of call_many"):
        simulated_run(lambda: main(backward_timeout=10, backward_k_min=2))


@pytest.mark.parametrize("value", [np.nan, np.inf])
async def test_anomalies_are_failures(value: float) -> None:
    good, bad = Expert(1), Expert(value)
    x = batch(1)
    result = await call_many([[good, bad]], x, on_expert_loss="drop", detect_anomalies=True)
    np.testing.assert_array_equal(result.mask, [[True, False]])
    with pytest.raises(ArgumentError, match="nothing was sent"):
        await call_many([[good]], ag.tensor([[value, 1.0]]), detect_anomalies=True)
    assert good.calls == 1
    carried = await call_many([[bad]], x)
    assert not np.isfinite(carried.outputs.detach().numpy()).all()


async def test_samples_whose_answers_are_not_finite_leave_the_others_of_their_request_alone() -> None:
    weight = ag.tensor([1.0, 2.0], requires_grad=True)
    seen = []

    async def inverse(x: Any) -> Any:
        seen.append(x.shape[0])
        with np.errstate(divide="ignore"):
            return weight / x

    good, x = Expert(1), ag.tensor([[1.0, 2.0], [0.0, 1.0], [4.0, 8.0]], requires_grad=True)
    asked = [[good, inverse], [inverse, good], [inverse]]
    result = await call_many(asked, x, on_expert_loss="drop", detect_anomalies=True)
    np.testing.assert_array_equal(result.mask, [[True, True], [False, True], [True, False]])
    assert [(loss.sample, loss.position, loss.reason) for loss in result.lost] == [(1, 0, "failed")]
    assert "not finite" in str(result.lost[0].error) and seen == [3, 2]
    await result.outputs.sum().backward()
    np.testing.assert_array_equal(weight.grad.numpy(), [1.25, 0.625])
    np.testing.assert_array_equal(x.grad.numpy(), [[0, 0.5], [1, 1], [-1 / 16, -1 / 32]])
    with pytest.raises(ExpertLostError, match=r"sample 0 \(and of 2 others\) failed: ArithmeticError: its answer has values that are not finite"):
        await call_many(asked, x, detect_anomalies=True)
    assert seen == [3, 2, 3]
    with pytest.raises(ExpertLostError, match=r"of sample 0 failed: ArithmeticError"):  # which asked nobody else
        await call_many([[inverse], [inverse]], x[1:], on_expert_loss="drop", detect_anomalies=True)


async def test_gradients_of_the_outputs_that_are_not_finite_are_not_sent() -> None:
    expert = Expert(2)
    result = await call_many([[expert], []], batch(2), detect_anomalies=True)
    with pytest.raises(ArgumentError, match="gradient of its outputs has values that are not finite; nothing was sent"):
        await result.outputs.backward(ag.tensor(np.array([[[1.0, np.nan]], [[0.0, 0.0]]])), retain_graph=True)
    assert expert.backwards == 0
    await result.outputs.backward(ag.tensor(np.array([[[1.0, 1.0]], [[np.nan, np.nan]]])))  # of a sample that nobody was asked for
    assert expert.backwards == 1


@custom_function(lambda x, weight: x + 0 * weight, inline=True, saves=True)
def Diverges(ctx: Any, g: Any) -> Any:
    """Gradients that are infinite where the input is 0, and where the weight is."""
    x, weight = (tensor.numpy() for tensor in ctx.saved_tensors)
    return ag.tensor(np.where(x == 0, np.inf, g.numpy())), ag.tensor(np.where(weight == 0, np.inf, 1.0))


@pytest.mark.parametrize(("value", "lost"), [(1.0, [(1, 0)]), (0.0, [(0, 1), (1, 0), (2, 0)])])
async def test_gradients_that_are_not_finite_are_losses(value: float, lost: list[tuple[int, int]]) -> None:
    weight = ag.tensor([value], requires_grad=True)

    async def diverges(x: Any) -> Any:
        return Diverges.apply(x, weight)

    good, x = Expert(2), ag.tensor([[1.0], [0.0], [4.0]], requires_grad=True)
    result = await call_many([[good, diverges], [diverges, good], [diverges]], x, on_expert_loss="drop", detect_anomalies=True, backward_k_min=0)
    await result.outputs.sum().backward()
    assert [(loss.sample, loss.position) for loss in result.lost_in_backward] == lost
    np.testing.assert_array_equal(x.grad.numpy(), [[3], [4], [1]] if value else [[4], [4], [0]])
    assert (weight.grad is None) == (not value)


async def test_experts_whose_answers_do_not_fit_are_lost() -> None:
    async def two(x: Any) -> Any:
        return x, x

    async def longer(x: Any) -> Any:
        return ag.concat([x, x], axis=0)

    async def wider(x: Any) -> Any:
        return ag.concat([x, x], axis=1)

    async def number(x: Any) -> Any:
        return 3

    good = Expert(1)
    result = await call_many([[good, two, longer, wider, number]], batch(1), on_expert_loss="drop")
    assert result.mask[0, 0] and result.mask.sum() == 1


async def test_several_inputs_and_no_samples() -> None:
    async def add(x: Any, y: Any) -> Any:
        return x + y * 2

    x, y = batch(2), batch(2)
    result = await call_many([[add], [add]], (x, y))
    await result.outputs.sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), np.ones((2, 2)))
    np.testing.assert_array_equal(y.grad.numpy(), np.full((2, 2), 2.0))
    empty = await call_many([[], []], x)
    assert empty.mask.shape == (2, 0)


async def test_wrong_arguments() -> None:
    with pytest.raises(ArgumentError, match="one row for each of the 2 lists"):
        await call_many([[], []], batch(3))
    with pytest.raises(ArgumentError, match="on_expert_loss"):
        await call_many([[]], batch(1), on_expert_loss="ignore")
    with pytest.raises(ArgumentError, match="k_min"):
        await call_many([[]], batch(1), k_min=-1)
    with pytest.raises(ArgumentError, match="max_rows=0"):
        await call_many([[]], batch(1), max_rows=0)
    with pytest.raises(ArgumentError, match="empty tuple"):
        await call_many([], ())


async def test_cancelling_cancels_all_calls(virtual_clock: VirtualClock) -> None:
    slow = [Expert(1, delay=100) for _ in range(3)]
    task = asyncio.ensure_future(call_many([slow[:2], slow[1:]], batch(2)))
    await asyncio.sleep(1)
    await cancel(task)
    assert [expert.cancelled for expert in slow] == [1, 1, 1]


async def test_an_expert_that_does_not_stop_holds_nobody_up_for_long(virtual_clock: VirtualClock) -> None:
    loop = asyncio.get_running_loop()
    reports: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: reports.append(context))

    async def stubborn(x: Any) -> Any:
        try:
            await asyncio.sleep(100)
        finally:
            await asyncio.sleep(20)

    result = await call_many([[Expert(1, delay=1), stubborn]], batch(1), timeout_after_k_min=1)
    np.testing.assert_array_equal(result.mask, [[True, False]])
    assert loop.time() == 3  # a second for it to answer, and one to stop
    (report,) = reports
    assert "stubborn" in report["message"] and "did not stop within 1 s" in report["message"]
    await asyncio.sleep(30)

    task = asyncio.ensure_future(call_many([[Expert(1), stubborn]], batch(1), forward_timeout=1))
    await asyncio.sleep(1.5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):  # though the call was about to return
        await task
    await asyncio.sleep(30)


@pytest.mark.parametrize("name", ["timeout_after_k_min", "forward_timeout", "backward_timeout"])
@pytest.mark.parametrize(("value", "error"), [(float("nan"), ArgumentError), (-1, ArgumentError), ("1", ArgumentTypeError)])
async def test_timeouts_are_numbers_from_0(name: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=name):
        await call_many([[ag.nn.ReLU()]], ag.ones(1, 2), **{name: value})


@pytest.mark.parametrize("name", ["k_min", "backward_k_min", "max_rows"])
async def test_numbers_of_answers_and_rows_are_ints(name: str) -> None:
    options: dict[str, Any] = {name: 1.5}
    with pytest.raises(ArgumentTypeError, match=name):
        await call_many([[ag.nn.ReLU()]], ag.ones(1, 2), **options)


async def test_a_switch_takes_a_batch_without_rows() -> None:
    mixture = RemoteSwitchMixtureOfExperts(4, (2,), {"e.0": ag.nn.ReLU()}, prefix="e.")
    output, loss = await mixture(ag.ones(0, 4))
    assert output.shape == (0, 4) and loss.item() == 0
    assert mixture.utilization[0].tolist() == [0.5, 0.5]
    await (output.sum() + loss).backward()


async def test_experts_that_are_no_lists_are_refused() -> None:
    expert = ag.nn.ReLU()
    for experts, found in ((None, "NoneType"), ([expert, expert], "ReLU"), (["ab", [expert]], "str")):
        with pytest.raises(ArgumentTypeError, match=f"for each sample a list of experts, found {found}"):
            await call_many(experts, batch(2))

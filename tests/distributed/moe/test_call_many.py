"""Many experts asked at once: who is waited for, who is lost, and what gradients there are."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.distributed.moe import call_many
from aiograd.errors import ArgumentError, DeadlineError, ExpertLostError
from aiograd.testing import simulated_run


class Expert:
    """x * factor, after a while, forward and backward; perhaps never, or wrongly."""

    def __init__(self, factor: float, *, delay: float = 0.0, backward_delay: float = 0.0, error: Exception | None = None) -> None:
        self.factor = factor
        self.delay = delay
        self.backward_delay = backward_delay
        self.error = error
        self.backward_error: Exception | None = None
        self.calls = self.cancelled = self.backwards = 0

    async def __call__(self, x: Any) -> Any:
        self.calls += 1
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


def test_k_min_counts_for_each_sample() -> None:
    async def main() -> None:
        quick, slow = Expert(1, delay=1), Expert(1, delay=100)
        await call_many([[quick, quick, quick], [slow, slow]], batch(2), k_min=1, timeout_after_k_min=0.1, forward_timeout=10)

    with pytest.raises(DeadlineError, match="sample 1 answered within 10 s"):
        simulated_run(main)


def test_too_many_losses_of_one_sample_are_an_error_at_once() -> None:
    async def main() -> float:
        bad, slow = Expert(0, error=ValueError("broken")), Expert(1, delay=100)
        with pytest.raises(ExpertLostError):
            await call_many([[slow], [bad, slow]], batch(2), k_min=2, on_expert_loss="drop")
        return asyncio.get_running_loop().time()

    assert simulated_run(main).value < 1


def test_all_run_at_the_same_time_forward_and_backward() -> None:
    async def main() -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        experts = [Expert(1, delay=1, backward_delay=2) for _ in range(4)]
        x = batch(8)
        result = await call_many([experts] * 8, x)
        forward = loop.time()
        await result.outputs.sum().backward()
        return forward, loop.time() - forward

    assert simulated_run(main).value == (1, 2)


def test_an_expert_lost_in_backward_is_an_error_or_its_share_is_taken_by_the_others() -> None:
    async def main(on_loss: str) -> Any:
        good, bad = Expert(3), Expert(5)
        x = batch(2)
        result = await call_many([[good, bad], [good]], x, on_expert_loss=on_loss)
        bad.backward_error = ValueError("gone")
        await result.outputs.sum().backward()
        return x.grad.numpy(), result

    grad, result = simulated_run(lambda: main("drop")).value
    np.testing.assert_array_equal(grad, [[6, 6], [3, 3]])
    assert [(loss.sample, loss.position) for loss in result.lost_in_backward] == [(0, 1)]
    with pytest.raises(ExpertLostError, match="gone"):
        simulated_run(lambda: main("raise"))


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


def test_cancelling_cancels_all_calls() -> None:
    async def main() -> None:
        slow = Expert(1, delay=100)
        task = asyncio.ensure_future(call_many([[slow, slow], [slow]], batch(2)))
        await asyncio.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert slow.cancelled == 3

    assert not simulated_run(main).leftover_tasks

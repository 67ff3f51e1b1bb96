"""Task pools, expert backends, remote experts and mixtures of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import distributed as dist
from aiograd.distributed import moe
from aiograd.errors import ArgumentError, ArgumentTypeError, DistributedError, ExpertLostError, NotExposedError, RemoteError, ShapeError
from aiograd.testing import simulated_run
from aiograd.testing.virtual_clock import VirtualClock
from tests.distributed.memory import Switchboard
from tests.distributed.workers import echo
from tests.support import assert_raises
from tests.tolerance import assert_close, tolerance


def rows(*values: float) -> Any:
    return ag.tensor([[value] for value in values])


# ---------------------------------------------------------------- task pools


def noting(seen: list[Any], note: Callable[[Any], Any] = lambda x: x.shape[0]) -> Callable[[Any], Awaitable[Any]]:
    """A function that doubles its argument in a second, and notes something of it."""

    async def double(x: Any) -> Any:
        seen.append(note(x))
        await asyncio.sleep(1)
        if 13.0 in x.numpy():
            raise ValueError("thirteen")
        return x * 2

    return double


async def test_rows_of_callers_that_meet_run_in_one_batch_and_come_back_in_order(virtual_clock: VirtualClock) -> None:
    sizes: list[int] = []
    pool = moe.TaskPool(noting(sizes), 4)
    answers = await asyncio.gather(*(pool.submit(rows(*range(i, i + n))) for i, n in ((0, 1), (10, 2), (20, 2), (30, 1))))
    assert [answer.numpy()[:, 0].tolist() for answer in answers] == [[0], [20, 22], [40, 42], [60]]
    assert sizes == [3, 3] and pool.batches == 2
    await pool.aclose()


async def test_a_batch_waits_for_its_least_size(virtual_clock: VirtualClock) -> None:
    loop = asyncio.get_running_loop()
    pool = moe.TaskPool(echo, 4, min_batch_size=2)
    first = asyncio.ensure_future(pool.submit(rows(1)))
    await asyncio.sleep(5)
    assert not first.done()
    await pool.submit(rows(2))
    await first
    assert loop.time() == 5 and pool.batches == 1
    await pool.aclose()


async def test_a_batch_that_the_next_task_would_overfill_waits_for_nobody(virtual_clock: VirtualClock) -> None:
    seen: list[int] = []

    def same(x: Any) -> Any:
        seen.append(x.shape[0])
        return x

    pool = moe.TaskPool(same, 4, min_batch_size=3)
    await asyncio.gather(pool.submit(rows(1, 2)), pool.submit(rows(1, 2, 3)))
    assert seen == [2, 3]


async def test_a_task_is_not_split_and_too_large_ones_are_refused(virtual_clock: VirtualClock) -> None:
    pool = moe.TaskPool(lambda x: x, 2)
    with pytest.raises(ArgumentError, match="3 rows; a task is not split"):
        await pool.submit(rows(1, 2, 3))
    with pytest.raises(ArgumentError, match="same number of rows"):
        await pool.submit(rows(1), rows(1, 2))
    await pool.aclose()
    with pytest.raises(DistributedError, match="closed"):
        await pool.submit(rows(1))
    with pytest.raises(ArgumentError):
        moe.TaskPool(lambda x: x, 2, 3)


async def test_an_error_is_that_of_its_batch_and_cancelled_tasks_are_not_in_one(virtual_clock: VirtualClock) -> None:
    seen: list[list[float]] = []
    pool = moe.TaskPool(noting(seen, lambda x: x.numpy()[:, 0].tolist()), 2)
    tasks = [asyncio.ensure_future(pool.submit(rows(value))) for value in (1, 13, 3, 4, 5)]
    await asyncio.sleep(0.5)
    tasks[2].cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result).__name__ for result in results] == ["ValueError", "ValueError", "CancelledError", "Tensor", "Tensor"]
    assert seen == [[1, 13], [4, 5]]
    await pool.aclose()


async def test_a_cancelled_task_between_others_is_left_out(virtual_clock: VirtualClock) -> None:
    seen: list[int] = []
    pool = moe.TaskPool(noting(seen), 4)
    tasks = [asyncio.ensure_future(pool.submit(ag.ones((n, 3)))) for n in (4, 1, 1, 1)]
    await asyncio.sleep(0.5)
    tasks[2].cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result).__name__ for result in results] == ["Tensor", "Tensor", "CancelledError", "Tensor"]
    assert seen == [4, 2]


async def test_rows_of_other_widths_and_dtypes_run_in_batches_of_their_own(virtual_clock: VirtualClock) -> None:
    async def narrow(x: Any) -> Any:
        await asyncio.sleep(1)
        if x.shape[1] != 2:
            raise ValueError(f"expected 2 columns, found {x.shape[1]}")
        return x + 1

    pool = moe.TaskPool(narrow, 8)
    single, double = ag.ones((1, 2)), ag.tensor(np.ones((1, 2)))
    assert (single.dtype, double.dtype) == (np.float32, np.float64)
    results = await asyncio.gather(*map(pool.submit, (single, double, ag.ones((1, 11)), single, double)), return_exceptions=True)
    assert isinstance(results[2], ValueError)
    assert [result.dtype for result in results if result is not results[2]] == [np.float32, np.float64] * 2
    assert pool.batches == 3


async def test_of_batches_that_are_due_the_one_with_the_oldest_task_runs(virtual_clock: VirtualClock) -> None:
    seen: list[tuple[int, ...]] = []
    pool = moe.TaskPool(noting(seen, lambda x: x.shape), 3, min_batch_size=2)
    first = asyncio.ensure_future(pool.submit(ag.ones((1, 1))))  # waits for another of its kind
    await asyncio.gather(*(pool.submit(ag.ones((n, width))) for n, width in ((1, 2), (2, 3), (1, 2))))
    assert seen == [(2, 2), (2, 3)] and not first.done()
    first.cancel()
    await asyncio.sleep(1)


async def test_a_function_that_gives_back_other_rows_is_an_error_of_its_callers(virtual_clock: VirtualClock) -> None:
    pool = moe.TaskPool(lambda x: x[:1], 4)
    results = await asyncio.gather(pool.submit(rows(1)), pool.submit(rows(2)), return_exceptions=True)
    assert all(isinstance(result, ArgumentError) for result in results)
    await pool.aclose()


# ---------------------------------------------------------------- backends


async def test_a_backend_answers_without_a_graph_and_learns_from_each_backward() -> None:
    ag.seed(0)
    module = ag.nn.Linear(3, 2)
    backend = moe.ExpertBackend(module, ag.optim.SGD(module.parameters(), lr=0.5))
    x, g = ag.tensor(np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)), ag.ones((4, 2))
    output = await backend.forward(x)
    assert not output.requires_grad
    leaf = x.clone().requires_grad_()
    want_x, want_w = await ag.grad(module(leaf), [leaf, module.weight], g)
    before = module.weight.detach().clone().numpy()
    (got,) = await backend.backward([x], g)
    np.testing.assert_array_equal(got.numpy(), want_x.numpy())
    np.testing.assert_allclose(module.weight.detach().numpy(), before - 0.5 * want_w.numpy(), rtol=tolerance(np.float32))
    assert backend.updates == 1 and module.weight.grad is None and not x.requires_grad


async def test_integer_inputs_get_none_unused_ones_zeros_and_errors_change_nothing() -> None:
    weight = ag.tensor([1.0, 2.0, 3.0], requires_grad=True)

    def pick(index: Any, x: Any, unused: Any) -> Any:
        if x.shape[0] == 3:
            raise ValueError("three")
        return weight[index] * x

    backend = moe.ExpertBackend(pick, ag.optim.SGD([weight], lr=1.0))
    inputs = [ag.tensor([0, 2]), ag.tensor([1.0, 1.0]), ag.tensor([5.0, 5.0])]
    found = await backend.backward(inputs, [ag.tensor([1.0, 1.0])])
    assert found[0] is None
    np.testing.assert_array_equal(found[1].numpy(), [1, 3])
    np.testing.assert_array_equal(found[2].numpy(), [0, 0])
    np.testing.assert_array_equal(weight.detach().numpy(), [0, 2, 2])
    with pytest.raises(ValueError, match="three"):
        await backend.backward([ag.tensor([0, 1, 2]), ag.ones(3), ag.ones(3)], [ag.ones(3)])
    with pytest.raises(ArgumentError, match="2 gradients for 1 outputs"):
        await backend.backward(inputs, [ag.ones(2), ag.ones(2)])
    assert backend.updates == 1
    np.testing.assert_array_equal(weight.detach().numpy(), [0, 2, 2])


async def test_a_backend_goes_on_from_its_state() -> None:
    def made() -> moe.ExpertBackend:
        ag.seed(1)
        module = ag.nn.Linear(2, 2)
        optimizer = ag.optim.Adam(module.parameters(), lr=0.1)
        return moe.ExpertBackend(module, optimizer)

    x, g = ag.ones((1, 2)), ag.ones((1, 2))
    first, second = made(), made()
    await first.backward([x], g)
    second.load_state_dict(first.state_dict())
    await first.backward([x], g)
    await second.backward([x], g)
    np.testing.assert_array_equal(first.module.weight.detach().numpy(), second.module.weight.detach().numpy())
    assert second.updates == 2


async def test_a_backend_goes_on_with_its_schedule() -> None:
    def made() -> moe.ExpertBackend:
        ag.seed(1)
        module = ag.nn.Linear(2, 2)
        optimizer = ag.optim.Adam(module.parameters(), lr=0.1)
        return moe.ExpertBackend(module, optimizer, ag.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5))

    x = ag.ones((1, 2))
    first, second = made(), made()
    for _ in range(3):
        await first.backward([x], x)
    second.load_state_dict(first.state_dict())
    for backend in (first, second):
        for _ in range(2):
            await backend.backward([x], x)
    assert first.optimizer.param_groups[0]["lr"] == second.optimizer.param_groups[0]["lr"] == 0.025
    np.testing.assert_array_equal(first.module.weight.detach().numpy(), second.module.weight.detach().numpy())
    earlier = {name: value for name, value in first.state_dict().items() if name != "scheduler"}
    made().load_state_dict(earlier)


async def test_what_is_no_expert_is_refused() -> None:
    module = ag.nn.Linear(1, 1)
    for given in ((None,), (module, 5), (module, ag.optim.SGD(module.parameters(), lr=0.1), 5)):
        assert_raises(ArgumentTypeError, "ExpertBackend", moe.ExpertBackend, *given)
    for experts in (None, [1], {"ffn.0": module}):
        assert_raises(ArgumentTypeError, "expected a dict of ExpertBackends", moe.serve_experts, dist.Service(), experts)
    assert_raises(ArgumentTypeError, "expected this process's dist.Worker", moe.RemoteExpert, None, "left", "ffn.0")
    for peers in (None, "left"):
        with pytest.raises(ArgumentTypeError, match="expected a list of names"):
            await moe.find_experts(None, peers)  # type: ignore[arg-type]


@pytest.mark.parametrize("frozen", [1, 2])
async def test_a_backend_trains_the_parameters_that_are_not_frozen(frozen: int) -> None:
    module = ag.nn.Sequential(ag.nn.Linear(2, 2), ag.nn.Linear(2, 2))
    backend = moe.ExpertBackend(module, ag.optim.SGD(module.parameters(), lr=0.1))
    for layer in list(module)[:frozen]:
        for parameter in layer.parameters():
            parameter.requires_grad_(False)
    before = [parameter.detach().numpy().copy() for parameter in module.parameters()]
    (grad,) = await backend.backward([ag.ones((1, 2))], ag.ones((1, 2)))
    changed = [not np.array_equal(old, parameter.detach().numpy()) for old, parameter in zip(before, module.parameters(), strict=True)]
    assert changed == [False, False, frozen == 1, frozen == 1] and grad.numpy().any()


async def test_the_next_request_waits_for_the_update_of_one_that_was_cancelled() -> None:
    begun, may_end = asyncio.Event(), asyncio.Event()

    class Slow(ag.optim.SGD):
        async def astep(self, gradients: Any = None) -> None:
            begun.set()
            await may_end.wait()
            self.step(gradients)

    module = ag.nn.Linear(1, 1, bias=False)
    backend = moe.ExpertBackend(module, Slow(module.parameters(), lr=1.0))
    expected = (module.weight.detach() - 1).numpy().copy()
    one = ag.ones((1, 1))
    cancelled = asyncio.ensure_future(backend.backward([one], one))
    await begun.wait()
    cancelled.cancel()
    following = asyncio.ensure_future(backend.forward(one))
    await asyncio.wait([cancelled])
    for _ in range(10):
        await asyncio.sleep(0)
    assert cancelled.cancelled() and not following.done() and backend.updates == 0
    may_end.set()
    np.testing.assert_array_equal((await following).numpy(), expected)
    assert backend.updates == 1


def test_states_that_no_backend_has_are_refused() -> None:
    module = ag.nn.Linear(1, 1)
    backend = moe.ExpertBackend(module, ag.optim.SGD(module.parameters(), lr=1.0))
    for state in ({"module": module.state_dict(), "updates": 0}, None, {}):
        assert_raises(ArgumentError, r"expected a dict with \['module', 'optimizer', 'updates'\]", backend.load_state_dict, state)


# ---------------------------------------------------------------- across workers


class Setting:
    """A worker with a gate, and workers with experts of a 2 × 2 grid."""

    def __init__(self, board: Switchboard, *, learns: bool = True, max_batch_size: int = 4096, delay: float = 0.0) -> None:
        ag.seed(0)
        self.modules = {f"ffn.{i}.{j}": ag.nn.Linear(4, 4) for i in range(2) for j in range(2)}
        self.backends = {
            uid: moe.ExpertBackend(self.slowly(uid, delay), ag.optim.SGD(module.parameters(), lr=0.05) if learns else None)
            for uid, module in self.modules.items()
        }
        #: rows of each batch that an expert ran forward, by uid
        self.sizes: dict[str, list[int]] = {uid: [] for uid in self.modules}
        self.max_batch_size = max_batch_size
        self.board = board

    def slowly(self, uid: str, delay: float) -> Any:
        async def run(x: Any) -> Any:
            self.sizes[uid].append(x.shape[0])
            await asyncio.sleep(delay)
            return self.modules[uid](x)

        return run

    async def __aenter__(self) -> dict[str, moe.RemoteExpert]:
        self.workers = []
        for i in range(2):
            service = dist.Service()
            own = {uid: backend for uid, backend in self.backends.items() if uid.startswith(f"ffn.{i}.")}
            moe.serve_experts(service, own, max_batch_size=self.max_batch_size)
            self.workers.append(dist.Worker(f"w{i}", service=service, transport=self.board.transport(f"w{i}")))
        self.gate = dist.Worker("gate", transport=self.board.transport("gate"))
        for worker in (*self.workers, self.gate):
            await worker.__aenter__()
        for worker in self.workers:
            self.gate.add_peer(worker.name, worker.url)
        return await moe.find_experts(self.gate, ["w0", "w1"])

    async def __aexit__(self, *_: object) -> None:
        for worker in (self.gate, *self.workers):
            await worker.aclose()


def data(batch: int = 6) -> Any:
    return ag.tensor(np.random.default_rng(3).normal(size=(batch, 4)).astype(np.float32), requires_grad=True)


async def test_a_remote_expert_is_the_module_it_serves() -> None:
    setting = Setting(Switchboard(), learns=False)
    async with setting as experts:
        assert sorted(experts) == sorted(setting.modules)
        x = data()
        got = await experts["ffn.1.0"](x)
        want = setting.modules["ffn.1.0"](x)
        np.testing.assert_array_equal(got.detach().numpy(), want.detach().numpy())
        assert_close((await experts["ffn.1.0"](x[2:4])).detach().numpy(), got[2:4].detach().numpy())  # other shapes, other kernels
        await (got * got).sum().backward()
        (grad,) = await ag.grad((want * want).sum(), [x])
        np.testing.assert_array_equal(x.grad.numpy(), grad.numpy())


async def test_an_expert_learns_also_where_no_input_needs_a_gradient() -> None:
    setting = Setting(Switchboard())
    async with setting as experts:
        output = await experts["ffn.0.1"](data().detach())
        assert setting.backends["ffn.0.1"].updates == 0
        await output.sum().backward()
        assert setting.backends["ffn.0.1"].updates == 1


async def test_an_empty_batch_is_answered_and_teaches_nothing() -> None:
    pool = moe.TaskPool(lambda x: x * 2, 4, min_batch_size=3)
    assert (await pool.submit(ag.zeros((0, 2)))).shape == (0, 2)
    await pool.aclose()
    setting = Setting(Switchboard())
    async with setting as experts:
        before = {name: value.numpy().copy() for name, value in setting.modules["ffn.0.0"].state_dict().items()}
        x = data(0)
        got = await experts["ffn.0.0"](x)
        assert got.shape == (0, 4)
        await got.sum().backward()
        assert x.grad.shape == (0, 4)
        assert setting.backends["ffn.0.0"].updates == 0
        for name, value in setting.modules["ffn.0.0"].state_dict().items():
            np.testing.assert_array_equal(value.numpy(), before[name])


async def test_requests_that_make_no_sense_leave_the_server_serving() -> None:
    async with Setting(Switchboard()) as experts:
        with pytest.raises(RemoteError, match="11"):
            await experts["ffn.0.0"](ag.zeros((2, 11)))
        with pytest.raises(NotExposedError, match=r"ffn\.7\.7"):
            await moe.RemoteExpert(experts["ffn.0.0"].worker, "w0", "ffn.7.7")(ag.zeros((1, 4)))
        assert (await experts["ffn.0.0"](ag.zeros((1, 4)))).shape == (1, 4)


async def test_rows_of_one_expert_make_one_request_and_one_step_of_its_optimizer(virtual_clock: VirtualClock) -> None:
    setting = Setting(Switchboard())
    async with setting as experts:
        first, second = experts["ffn.0.0"], experts["ffn.1.0"]
        result = await moe.call_many([[first, second], [second], [first], [first, second]], data(4))
        assert result.requests == 2
        await result.outputs.sum().backward()
        assert {uid: backend.updates for uid, backend in setting.backends.items()} == {"ffn.0.0": 1, "ffn.0.1": 0, "ffn.1.0": 1, "ffn.1.1": 0}


async def test_requests_of_callers_that_meet_still_run_in_one_batch_whose_size_is_in_rows(virtual_clock: VirtualClock) -> None:
    setting = Setting(Switchboard(), max_batch_size=8, delay=1)
    async with setting as experts:
        expert = experts["ffn.0.0"]
        calls = [moe.call_many([[expert]] * rows, data(rows)) for rows in (8, 3, 4, 2)]
        for result, rows in zip(await asyncio.gather(*calls), (8, 3, 4, 2), strict=True):
            want = setting.modules["ffn.0.0"](data(rows))
            np.testing.assert_allclose(result.outputs[:, 0].detach().numpy(), want.detach().numpy(), rtol=1e-5)
        assert setting.sizes["ffn.0.0"] == [8, 7, 2]


async def test_a_request_of_more_rows_than_a_batch_holds_runs_as_several(virtual_clock: VirtualClock) -> None:
    setting = Setting(Switchboard(), learns=False, max_batch_size=3)
    async with setting as experts:
        x = data(8)
        result = await moe.call_many([[experts["ffn.0.1"]]] * 8, x)
        want = setting.modules["ffn.0.1"](x)
        np.testing.assert_allclose(result.outputs[:, 0].detach().numpy(), want.detach().numpy(), rtol=tolerance(np.float32))
        assert result.requests == 1 and setting.sizes["ffn.0.1"] == [3, 3, 2]
        (grad,) = await ag.grad((want * want).sum(), [x])
        await (result.outputs * result.outputs).sum().backward()
        np.testing.assert_allclose(x.grad.numpy(), grad.numpy(), rtol=1e-5)
        with pytest.raises(RemoteError, match="same number of rows"):
            await experts["ffn.0.1"](data(8), data(2))


def test_a_mixture_that_nobody_answers_gives_zeros_and_goes_on() -> None:
    async def main(answered_before: bool) -> None:
        delay = 0.0

        async def expert(x: Any) -> Any:
            await asyncio.sleep(delay)
            return ag.concat([x, x], axis=1)

        mixture = moe.RemoteMixtureOfExperts(
            4, (2,), {"e.0": expert, "e.1": expert}, prefix="e.", k_best=2, k_min=0, forward_timeout=0.1, on_expert_loss="drop",
            allow_zero_outputs=True,
        )  # fmt: skip
        x = data(3)
        if answered_before:
            assert (await mixture(x)).shape == (3, 8)
        delay = 0.5
        for _ in range(3):
            output = await mixture(x)
            np.testing.assert_array_equal(output.detach().numpy(), np.zeros((3, 8 if answered_before else 4)))
            await output.sum().backward()
        assert np.isfinite(mixture.weight.grad.numpy()).all()
        assert mixture.last is not None and {loss.reason for loss in mixture.last.lost} == {"late"}

    simulated_run(lambda: main(True))
    simulated_run(lambda: main(False))


async def test_a_switch_that_nobody_answers_is_its_residual(virtual_clock: VirtualClock) -> None:
    async def expert(x: Any) -> Any:
        raise ValueError("gone")

    switch = moe.RemoteSwitchMixtureOfExperts(4, (2,), {"e.0": expert, "e.1": expert}, prefix="e.")
    x = data(3)
    output, balance = await switch(x)
    np.testing.assert_array_equal(output.detach().numpy(), x.detach().numpy())
    await (output.sum() + balance).backward()
    np.testing.assert_array_equal(x.grad.numpy() != 0, np.ones((3, 4), bool))


async def test_a_mixture_is_the_weighted_sum_of_its_experts_and_trains() -> None:
    setting = Setting(Switchboard())
    async with setting as experts:
        mixture = moe.RemoteMixtureOfExperts(4, (2, 2), experts, prefix="ffn.", k_best=4)
        x = data()
        scores = (x.detach() @ mixture.weight.detach().T + mixture.bias.detach()).numpy()
        logits = np.stack([scores[:, i] + scores[:, 2 + j] for i in range(2) for j in range(2)], axis=1)
        weights = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        outputs = np.stack([module(x.detach()).detach().numpy() for module in setting.modules.values()], axis=1)
        got = await mixture(x)
        np.testing.assert_allclose(got.detach().numpy(), (weights[:, :, None] * outputs).sum(axis=1), rtol=1e-5, atol=1e-6)
        optimizer = ag.optim.SGD(mixture.parameters(), lr=0.05)
        losses = []
        for _ in range(15):
            optimizer.zero_grad()
            loss = ((await mixture(x) - 1.0) ** 2).mean()
            await loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < 0.5 * losses[0]
        assert all(backend.updates for backend in setting.backends.values())


async def test_a_mixture_goes_on_without_a_lost_worker_where_it_may() -> None:
    setting = Setting(Switchboard(), learns=False)
    async with setting as experts:
        careful = moe.RemoteMixtureOfExperts(4, (2, 2), experts, prefix="ffn.", k_best=4)
        tolerant = moe.RemoteMixtureOfExperts(4, (2, 2), experts, prefix="ffn.", k_best=4, on_expert_loss="drop")
        await setting.workers[1].aclose()
        with pytest.raises(ExpertLostError):
            await careful(data())
        x = data()
        got = await tolerant(x)
        assert tolerant.last is not None and tolerant.last.mask.sum() == 12 and len(tolerant.last.lost) == 12
        assert np.isfinite(got.detach().numpy()).all()
        await got.sum().backward()
        assert np.isfinite(x.grad.numpy()).all()


async def test_a_switch_keeps_its_experts_busy_and_its_input_as_it_is() -> None:
    setting = Setting(Switchboard())
    async with setting as experts:
        switch = moe.RemoteSwitchMixtureOfExperts(4, (2, 2), experts, prefix="ffn.", seed=1)
        optimizer = ag.optim.SGD(switch.parameters(), lr=0.3)
        x = data(32)
        before = x.detach().numpy().copy()
        for _ in range(20):
            optimizer.zero_grad()
            output, balance = await switch(x)
            await (((output - x.detach()) ** 2).mean() * 0.1 + balance).backward()
            optimizer.step()
        np.testing.assert_array_equal(x.detach().numpy(), before)
        assert min(share.min() for share in switch.utilization) > 1 / (2 * 2)
        assert balance.item() == pytest.approx(2, rel=0.05)
        switch.training = False
        first, second = (await switch(x))[0], (await switch(x))[0]
        assert first.shape == second.shape == x.shape


async def test_a_gate_takes_arrays_as_its_state_and_a_graph_notices_new_values() -> None:
    async def expert(x: Any) -> Any:
        return x * 2.0

    mixture = moe.RemoteMixtureOfExperts(4, (2,), {"ffn.0": expert, "ffn.1": expert}, prefix="ffn.", k_best=2)
    x = ag.ones((3, 4)).requires_grad_()
    y = await mixture(x)
    mixture.load_state_dict({"weight": np.ones((2, 4), np.float32), "bias": np.zeros(2)})
    np.testing.assert_array_equal(mixture.weight.detach().numpy(), np.ones((2, 4)))
    with pytest.raises(ag.errors.ModifiedError):  # the saved scores are those of other weights
        await y.sum().backward()


async def test_the_gate_of_a_switch_sees_integers_with_jitter() -> None:
    async def expert(x: Any) -> Any:
        return x * 2.0

    chosen = []
    for x in (ag.tensor(np.arange(12).reshape(3, 4)), ag.tensor(np.arange(12.0).reshape(3, 4))):
        switch = moe.RemoteSwitchMixtureOfExperts(4, (2,), {"ffn.0": expert, "ffn.1": expert}, prefix="ffn.", jitter=0.1)
        chosen.append((await switch(x))[0].detach().numpy())
    np.testing.assert_array_equal(*chosen)


async def test_mixtures_that_cannot_be() -> None:
    async def expert(x: Any) -> Any:
        return x

    with pytest.raises(ArgumentError, match=r"begins with 'other\.'"):
        moe.RemoteMixtureOfExperts(4, (2,), {"ffn.0": expert}, prefix="other.", k_best=1)
    with pytest.raises(ArgumentError, match="does not fit"):
        moe.RemoteMixtureOfExperts(4, (2,), {"ffn.2": expert}, prefix="ffn.", k_best=1)
    with pytest.raises(ArgumentError, match="k_best"):
        moe.RemoteMixtureOfExperts(4, (2,), {"ffn.0": expert}, prefix="ffn.", k_best=0)
    mixture = moe.RemoteMixtureOfExperts(4, (2,), {"ffn.0": expert}, prefix="ffn.", k_best=1)
    with pytest.raises(ArgumentError, match=r"expected \(batch, \.\.\., 4\)"):
        await mixture(ag.zeros((2, 3)))
    for wrong_input in (None, [[1.0] * 4]):
        with pytest.raises(ArgumentTypeError, match=r"expected a Tensor of shape \(batch, \.\.\., 4\)"):
            await mixture(wrong_input)
    for state in ({}, None, {"weight": mixture.weight}):
        assert_raises(ArgumentError, "expected a dict with 'weight' and 'bias'", mixture.load_state_dict, state)
    others = ((5, ShapeError, "bias has shape"), (ag.zeros(2, dtype=ag.complex64), ArgumentTypeError, "complex64"), ("ab", ArgumentTypeError, "<U2"))
    for bias, kind, text in others:
        assert_raises(kind, text, mixture.load_state_dict, {"weight": mixture.weight, "bias": bias})
    made = {"in_features": 4, "grid_size": (2,), "experts": {"ffn.0": expert}, "prefix": "ffn.", "k_best": 1}
    for wrong, text in (
        ({"k_best": "a"}, "k_best"), ({"experts": None}, "by uid"), ({"experts": {0: expert}}, "by uid"), ({"beam": "a"}, "beam"),
        ({"grid_size": 2}, "tuple of ints"), ({"grid_size": "ab"}, "tuple of ints"), ({"grid_size": (2.0,)}, "tuple of ints"),
    ):  # fmt: skip
        assert_raises(ArgumentTypeError, text, moe.RemoteMixtureOfExperts, **{**made, **wrong})
    assert_raises(ArgumentError, "unknown options foo; expected some of .*k_min", moe.RemoteMixtureOfExperts, **made, foo=2)
    made.pop("k_best")
    for wrong, kind in (({"jitter": "a"}, ArgumentTypeError), ({"grid_dropout": None}, ArgumentTypeError), ({"k_best": 2}, ArgumentError)):
        assert_raises(kind, next(iter(wrong)), moe.RemoteSwitchMixtureOfExperts, **{**made, **wrong})
    for sizes in (("x",), (None,), (2.5,), (4, 1.0)):
        assert_raises(ArgumentTypeError, "expected ints", moe.TaskPool, echo, *sizes)
    with pytest.raises(ArgumentError, match="no experts"):
        moe.serve_experts(dist.Service(), {})

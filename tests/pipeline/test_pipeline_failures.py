"""A stage fails, or the step is cancelled: everybody stops, one error says where, and no gradient has changed."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.errors import LoopError, PipelineError
from aiograd.pipeline import Pipeline, Schedule, Stage, make_schedule
from aiograd.testing import simulated_run
from aiograd.testing.virtual_clock import VirtualClock
from tests.pipeline.models import LATE_WEIGHTS, ONE_FORWARD_ONE_BACKWARD, TURN, ZERO_BUBBLE, blocks, data, gradients, mean_square, schedule, serial
from tests.support import cancel


class Trap(ag.Function):
    """The identity, whose halves call what they are given."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, on_backward: Callable[[bool, bool], None]) -> Any:
        ctx.on_backward = on_backward
        return x + weight

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        needs = ctx.needs_input_grad
        ctx.on_backward(needs[0], needs[1])
        return grad if needs[0] else None, grad.sum(0) if needs[1] else None, None


class Trapped(ag.nn.Module):
    """Fails in the call number `at` of its forward ("F"), of a backward to its input ("I"), or to its weight ("W")."""

    def __init__(self, inner: Any, kind: str, at: int, error: BaseException) -> None:
        self.inner = inner
        self.weight = ag.nn.Parameter(ag.tensor(np.zeros(5, np.float32)))
        self.left = {kind: at}
        self.error = error

    def note(self, *kinds: str) -> None:
        for kind in kinds:
            if kind in self.left:
                self.left[kind] -= 1
                if self.left[kind] < 0:
                    del self.left[kind]
                    raise self.error

    def on_backward(self, to_input: bool, to_weight: bool) -> None:
        self.note(*(["I"] if to_input else []), *(["W"] if to_weight else []))

    def forward(self, x: Any) -> Any:
        self.note("F")
        return self.inner(Trap.apply(x, self.weight, self.on_backward))


FAILURES = [
    (ONE_FORWARD_ONE_BACKWARD, 1, "F", 2, "1F2"),
    (ONE_FORWARD_ONE_BACKWARD, 0, "F", 0, "0F0"),
    (ONE_FORWARD_ONE_BACKWARD, 1, "I", 1, "1B1"),
    (ONE_FORWARD_ONE_BACKWARD, 0, "W", 3, "0B3"),
    (ZERO_BUBBLE, 1, "I", 3, "1I3"),
    (ZERO_BUBBLE, 1, "W", 3, "1W3"),
    (LATE_WEIGHTS, 0, "W", 0, "0W2"),
    (LATE_WEIGHTS, 1, "W", 2, "1W0"),
    (TURN, 2, "F", 1, "2F1"),
    (TURN, 1, "I", 1, "1B1"),
    (make_schedule("DualPipeV", 2, 4, 2), 1, "F", 2, "1F2"),
]


@pytest.mark.parametrize(("order", "stage", "kind", "at", "action"), FAILURES)
async def test_a_failure_names_stage_microbatch_and_action(order: Schedule, stage: int, kind: str, at: int, action: str) -> None:
    error = ZeroDivisionError("by nought\nand more")
    modules = blocks(order.num_stages)
    trapped = list(modules)
    trapped[stage] = Trapped(modules[stage], kind, at, error)
    pipe = Pipeline(trapped, order, loss_fn=mean_square)
    x, target = data(2 * order.num_microbatches)
    with pytest.raises(PipelineError, match=rf"pipeline action {action} failed .*: ZeroDivisionError: by nought$") as caught:
        await pipe.step(x, target)
    failure = caught.value
    assert (failure.stage, failure.action, failure.microbatch) == (stage, action, int(action[-1])) and failure.rank == order.stage_to_rank[stage]
    assert failure.__cause__ is error and not failure.committed
    assert gradients(trapped) == [None] * len(gradients(trapped))
    await pipe.step(x, target)  # the trap is spent
    alone = blocks(order.num_stages)
    await serial(alone, order.num_microbatches, x, target)
    assert gradients(modules) == gradients(alone)


async def test_a_pipeline_within_a_stage_fails() -> None:
    inner = Pipeline([blocks(1)[0], Trapped(blocks(1)[0], "F", 2, ZeroDivisionError("by nought"))], make_schedule("GPipe", 2, 4))

    async def evaluates(x: Any) -> Any:
        await inner.eval(x)
        return x

    with pytest.raises(PipelineError, match="pipeline action 0F0 failed .*PipelineError: pipeline action 1F") as caught:
        await Pipeline([evaluates, blocks(1)[0]], make_schedule("GPipe", 2, 2), loss_fn=mean_square).step(*data(16))
    assert (caught.value.stage, caught.value.microbatch, caught.value.rank) == (0, 0, 0)
    within = caught.value.__cause__
    assert isinstance(within, PipelineError) and (within.stage, within.rank) == (1, 1) and isinstance(within.__cause__, ZeroDivisionError)


async def test_the_loss_fails() -> None:
    modules = blocks(2)
    for loss_fn in (lambda y, t: 1 / 0, lambda y: y):
        with pytest.raises(PipelineError, match="1F0 failed"):
            await Pipeline(modules, ZERO_BUBBLE, loss_fn=loss_fn).step(*data(8))
    assert gradients(modules) == [None] * 4


async def test_the_other_ranks_stop() -> None:
    modules = blocks(3)
    running: list[str] = []

    async def waits(x: Any) -> Any:
        running.append("began")
        try:
            await asyncio.Event().wait()
        finally:
            running.append("ended")

    async def fails(x: Any) -> Any:
        while len(running) < 1:
            await asyncio.sleep(0)
        raise ValueError("now")

    order = schedule("0F0 0F1 0B0 0B1 / 1F0 1F1 1B0 1B1 / 2F0 2F1 2B0 2B1")
    calls = 0

    async def first(x: Any) -> Any:
        nonlocal calls
        calls += 1
        return await waits(x) if calls == 2 else modules[0](x)

    with pytest.raises(PipelineError, match="1F0 failed"):
        await Pipeline([first, fails, modules[2]], order, loss_fn=mean_square).step(*data(4))
    assert running == ["began", "ended"]


async def test_a_stage_that_cancels_itself() -> None:
    modules = blocks(2)

    async def fails(x: Any) -> Any:
        raise asyncio.CancelledError

    with pytest.raises(PipelineError, match="rank 1 of a pipeline was cancelled by its own code, in 1F0"):
        await Pipeline([modules[0], fails], ZERO_BUBBLE, loss_fn=mean_square).step(*data(8))


def test_a_step_needs_a_loop() -> None:
    with pytest.raises(LoopError):
        Pipeline(blocks(2), ZERO_BUBBLE, loss_fn=mean_square).step(*data(8)).send(None)


# ---------------------------------------------------------------- cancelled at any moment


@pytest.mark.parametrize("order", [make_schedule("1F1B", 2, 2), make_schedule("ZB-H1", 2, 2), make_schedule("ZBVZeroBubble", 2, 3, 2)])
@pytest.mark.parametrize("where", ["loop", "executor"])
def test_cancelled_at_every_step_of_the_loop(order: Schedule, where: Any) -> None:
    """Either the step was carried out, or nothing has changed; and the pipeline works afterwards."""
    x, target = data(6)
    expected: list[Any] = []
    outcomes: set[str] = set()

    async def stage(module: Any, x: Any) -> Any:
        await asyncio.sleep(0)
        return module(x)

    def stages(modules: list[Any]) -> list[Any]:
        if where == "executor":
            return modules
        return [lambda x, module=module: stage(module, x) for module in modules]

    async def alone() -> None:
        modules = blocks(order.num_stages)
        await serial(modules, order.num_microbatches, x, target)
        expected.extend(gradients(modules))

    simulated_run(alone)

    async def main(modules: list[Any]) -> None:
        listed = stages(modules)
        pipe = Pipeline([Stage(each, where=where) for each in listed], order, loss_fn=mean_square)
        try:
            await pipe.step(x, target)
        except asyncio.CancelledError:
            assert gradients(modules) == [None] * len(expected)
            assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            outcomes.add("cancelled")
            await pipe.step(x, target)
        assert gradients(modules) == expected

    steps = simulated_run(main, blocks(order.num_stages)).steps
    for at in range(2, steps + 1):
        run = simulated_run(main, blocks(order.num_stages), cancel_at=at)
        assert not run.leftover_tasks
    assert outcomes == {"cancelled"}


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_events_gives_the_same_gradients(seed: int) -> None:
    order = make_schedule("ZBVZeroBubble", 2, 4, 2)
    x, target = data(9)

    async def main() -> list[Any]:
        modules, alone = blocks(4), blocks(4)
        await Pipeline(modules, order, loss_fn=mean_square).step(x, target)
        await serial(alone, 4, x, target)
        assert gradients(modules) == gradients(alone)
        return gradients(modules)

    simulated_run(main, seed=seed, order="permuted")


async def test_a_stage_that_does_not_stop(virtual_clock: VirtualClock) -> None:
    reported: list[Any] = []
    began, release = asyncio.Event(), asyncio.Event()

    async def stubborn(x: Any) -> Any:
        began.set()
        while not release.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await release.wait()
        raise asyncio.CancelledError

    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context["message"]))
    running = asyncio.ensure_future(Pipeline([blocks(2)[0], stubborn], ZERO_BUBBLE, loss_fn=mean_square).step(*data(8)))
    await began.wait()
    await cancel(running)
    assert virtual_clock.time() == 1.0
    release.set()
    await asyncio.sleep(1)
    assert len(reported) == 1 and "rank 1 did not stop within 1 s" in reported[0]


# ---------------------------------------------------------------- memory


class Watched(ag.nn.Module):
    """Notes how many of the arrays that its backward needs are alive when its forward is called."""

    def __init__(self, inner: Any, fails_at: int = -1) -> None:
        self.inner = inner
        self.arrays: list[weakref.ref[Any]] = []
        self.alive: list[int] = []
        self.fails_at = fails_at

    def count(self) -> int:
        return sum(array() is not None for array in self.arrays)

    def forward(self, x: Any) -> Any:
        self.alive.append(self.count())
        middle = x.tanh()
        self.arrays.append(weakref.ref(middle._data))
        if len(self.alive) == self.fails_at + 1:
            raise ValueError("enough")
        return self.inner(middle).exp()


@pytest.mark.usefixtures("no_collector")
async def test_activations_live_as_long_as_the_schedule_says() -> None:
    x, target = data(12)
    for name, most in (("1F1B", [2, 1, 0]), ("ZB-H1", [2, 1, 0]), ("GPipe", [5, 5, 5])):
        modules = [Watched(module) for module in blocks(3)]
        await Pipeline(modules, make_schedule(name, 3, 6), loss_fn=mean_square).step(x, target)
        if name == "ZB-H1":  # the inputs of linear layers live until W, which comes one microbatch later per rank
            assert [max(module.alive) for module in modules] == [2, 2, 2]
        else:
            assert [max(module.alive) for module in modules] == most
        assert [module.count() for module in modules] == [0, 0, 0]


@pytest.mark.usefixtures("no_collector")
async def test_what_only_inputs_need_is_freed_before_the_weights_have_their_turn() -> None:
    alive: list[int] = []
    inputs: list[Any] = []

    class Late(ag.nn.Module):
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def forward(self, x: Any) -> Any:
            out = self.inner(x).exp()
            inputs.append(weakref.ref(out._data))
            return out * 1.5

    def build() -> Callable[[], None]:
        return lambda: alive.append(sum(each() is not None for each in inputs))

    modules = blocks(2)
    await Pipeline([modules[0], Stage(Late(modules[1]), weight_backward=build)], LATE_WEIGHTS, loss_fn=mean_square).step(*data(6))
    assert alive == [0, 0, 0] and len(inputs) == 3


@pytest.mark.usefixtures("no_collector")
async def test_outputs_are_not_held_until_backward() -> None:
    outputs: list[Any] = []
    alive: list[int] = []

    class First(ag.nn.Module):
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def forward(self, x: Any) -> Any:
            alive.append(sum(each() is not None for each in outputs))
            out = self.inner(x) + 1
            outputs.append(weakref.ref(out._data))
            return out

    def second(x: Any) -> Any:
        return x.sum() * 2  # needs no values in backward

    module = First(blocks(1)[0])
    order = schedule("0F0 1F0 0F1 1F1 0F2 1F2 1B0 0B0 1B1 0B1 1B2 0B2")
    await Pipeline([module, second], order).step(data(6)[0])
    assert alive == [0, 0, 0] and len(outputs) == 3
    outputs.clear()
    between: list[int] = []

    def third(x: Any) -> Any:
        between.append(sum(each() is not None for each in outputs[: len(between)]))
        return second(x)

    order = schedule("0F0 0F1 0F2 0B0 0B1 0B2 / 1F0 1B0 1F1 1B1 1F2 1B2")
    await Pipeline([module, third], order).step(data(6)[0])
    assert between == [0, 0, 0]  # those of earlier microbatches are not kept for having been sent


@pytest.mark.usefixtures("no_collector")
async def test_microbatches_are_not_held_longer_than_the_first_stage_needs_them() -> None:
    arrays: list[Any] = []
    alive: list[int] = []
    weight = ag.tensor([1.0, 2.0], requires_grad=True)

    def batch() -> list[Any]:
        parts = [(ag.tensor(np.ones((2, 2), np.float32)),) for _ in range(3)]
        arrays.extend(weakref.ref(part._data) for (part,) in parts)
        return parts

    def first(x: Any) -> Any:
        alive.append(sum(each() is not None for each in arrays[: len(alive)]))
        return x.sum(axis=0) + weight

    await Pipeline([first, lambda y: y.sum()], make_schedule("GPipe", 2, 3)).step(arg_mbs=batch())
    assert alive == [0, 0, 0] and len(arrays) == 3


async def abandoned_jobs_ended() -> None:
    """Wait for the jobs that a step has abandoned: they run to their end with their arrays, and the loop drops their results."""
    for thread in threading.enumerate():
        if getattr(thread, "is_retired", False):
            thread.join()
    await asyncio.sleep(0)


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("where", ["loop", "executor"])
async def test_a_step_that_fails_leaves_nothing_behind(where: Any) -> None:
    modules = [Watched(module) for module in blocks(2)]
    modules[1].fails_at = 2
    pipe = Pipeline([Stage(module, where=where) for module in modules], ZERO_BUBBLE, loss_fn=mean_square)
    with pytest.raises(PipelineError):
        await pipe.step(*data(8))
    await abandoned_jobs_ended()
    assert [module.count() for module in modules] == [0, 0]
    assert len(modules[0].arrays) >= 3


class Held(Watched):
    """Waits in its fourth forward until it is let go."""

    def __init__(self, inner: Any, is_held: threading.Event, may_end: threading.Event) -> None:
        super().__init__(inner)
        self.is_held, self.may_end = is_held, may_end

    def forward(self, x: Any) -> Any:
        out = super().forward(x)
        if len(self.alive) == 4:
            self.is_held.set()
            self.may_end.wait()
        return out


@pytest.mark.usefixtures("no_collector")
async def test_a_job_that_a_failed_step_has_abandoned_takes_its_arrays_with_it() -> None:
    first, second = blocks(2)
    is_held, may_end = threading.Event(), threading.Event()

    def fails(x: Any) -> Any:
        if len(modules[1].alive) == 2:
            is_held.wait()
            raise ValueError("enough")
        return modules[1](x)

    modules = [Held(first, is_held, may_end), Watched(second)]
    try:
        with pytest.raises(PipelineError):
            stages = [Stage(module, where="executor") for module in (modules[0], fails)]
            await Pipeline(stages, ZERO_BUBBLE, loss_fn=mean_square).step(*data(8))
        assert [module.count() for module in modules] == [1, 0]
    finally:
        may_end.set()
    await abandoned_jobs_ended()
    assert [module.count() for module in modules] == [0, 0]


@pytest.mark.usefixtures("no_collector")
async def test_a_step_that_is_cancelled_leaves_nothing_behind() -> None:
    modules = [Watched(module) for module in blocks(2)]
    began = asyncio.Event()

    async def last(x: Any) -> Any:
        if len(modules[1].alive) == 2:
            began.set()
            await asyncio.Event().wait()
        return modules[1](x)

    running = asyncio.ensure_future(Pipeline([modules[0], last], ZERO_BUBBLE, loss_fn=mean_square).step(*data(8)))
    await began.wait()
    await cancel(running)
    del running
    await abandoned_jobs_ended()
    assert [module.count() for module in modules] == [0, 0]


@pytest.mark.usefixtures("no_collector")
async def test_steps_leave_no_cycles() -> None:
    pipe = Pipeline(blocks(2), ZERO_BUBBLE, loss_fn=mean_square)
    x, target = data(8)
    await pipe.step(x, target)
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        for _ in range(2):
            await pipe.step(x, target)
        gc.collect()
        left = [item for item in gc.garbage if isinstance(item, (ag.Tensor, np.ndarray, ag.graph.Node))]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    assert not left

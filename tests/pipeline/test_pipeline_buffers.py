"""Running statistics in a pipeline: a step that fails or is cancelled leaves them as they were, wherever the stages are, so it can be taken again."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterable
from typing import Any

import pytest

from aiograd import distributed as dist
from aiograd.errors import DistributedError, PipelineError
from aiograd.pipeline import Pipeline, Schedule, Stage, make_schedule
from tests.distributed.workers import until, workers
from tests.pipeline.models import ONE_FORWARD_ONE_BACKWARD, ZERO_BUBBLE, data, gradients, mean_square
from tests.pipeline.remote import Last, NormBlock, behind
from tests.pipeline.test_pipeline_failures import FAILURES, Trapped
from tests.support import cancel

service = dist.Service()
service.reference(Last)
service.reference(NormBlock)


@service.reference
class TrappedNorm(Trapped):
    """A block that normalises, and fails in a call of its forward or backward."""

    def __init__(self, index: int, kind: str, at: int) -> None:
        super().__init__(NormBlock(index), kind, at, ZeroDivisionError("by nought"))


class Held(NormBlock):
    """A block that normalises on its thread when it is let go."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.begun, self.let_go = threading.Event(), threading.Event()

    def forward(self, x: Any) -> Any:
        self.begun.set()
        self.let_go.wait(60)
        return super().forward(x)


def statistics(modules: Iterable[Any]) -> list[bytes]:
    """The bits of all buffers."""
    return [buffer.numpy().tobytes() for module in modules for buffer in module.buffers()]


async def undone(modules: list[Any], before: list[bytes]) -> None:
    """Wait until the statistics are as before: a stage may run on its thread yet."""
    await until(lambda: statistics(modules) == before, turns=1_000_000)


async def expected(order: Schedule, steps: int = 1) -> tuple[list[Any], list[bytes]]:
    """Gradients and statistics after so many steps."""
    modules = [NormBlock(index) for index in range(order.num_stages)]
    pipe = Pipeline(modules, order, loss_fn=mean_square)
    for _ in range(steps):
        await pipe.step(*data(4 * order.num_microbatches))
    return gradients(modules), statistics(modules)


@pytest.mark.parametrize(("order", "stage", "kind", "at", "action"), FAILURES)
@pytest.mark.parametrize("where", ["executor", "loop"])
async def test_a_step_that_fails_leaves_no_trace(order: Schedule, stage: int, kind: str, at: int, action: str, where: Any) -> None:
    modules = [NormBlock(index) for index in range(order.num_stages)]
    trapped: list[Any] = list(modules)
    trapped[stage] = Trapped(modules[stage], kind, at, ZeroDivisionError("by nought"))
    pipe = Pipeline([Stage(each, where=where) for each in trapped], order, loss_fn=mean_square)
    before = statistics(modules)
    with pytest.raises(PipelineError, match=f"action {action} failed"):
        await pipe.step(*data(4 * order.num_microbatches))
    await pipe._coordinator.local.calls.settled()  # a stage may run on its thread yet
    assert statistics(modules) == before
    await pipe.step(*data(4 * order.num_microbatches))
    assert (gradients(modules), statistics(modules)) == await expected(order)


@pytest.mark.parametrize("order", [ONE_FORWARD_ONE_BACKWARD, ZERO_BUBBLE], ids=["1F1B", "zero bubble"])
@pytest.mark.parametrize("where", ["executor", "loop"])
async def test_a_step_that_is_cancelled_leaves_no_trace(order: Schedule, where: Any) -> None:
    modules = [NormBlock(index) for index in range(order.num_stages)]
    pipe = Pipeline([Stage(each, where=where) for each in modules], order, loss_fn=mean_square)
    before, cancelled = statistics(modules), 0
    for turns in (1, 2, 3, 5, 8, 13, 21, 34):
        step = asyncio.ensure_future(pipe.step(*data(16)))
        for _ in range(turns):
            await asyncio.sleep(0)
        step.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await step
            break  # it had ended
        cancelled += 1
        await pipe._coordinator.local.calls.settled()
        assert statistics(modules) == before
    assert cancelled > 3
    if step.cancelled():
        await pipe.step(*data(16))
    assert (gradients(modules), statistics(modules)) == await expected(order)


async def test_a_call_that_runs_on_is_undone_when_it_ends_and_the_next_step_waits_for_that() -> None:
    order = make_schedule("GPipe", 2, 2)
    modules = [NormBlock(0), Held(1)]
    pipe = Pipeline(modules, order, loss_fn=mean_square)
    first = asyncio.ensure_future(pipe.step(*data(8)))
    await until(modules[1].begun.is_set, turns=1_000_000)
    await cancel(first)
    second = asyncio.ensure_future(pipe.step(*data(8)))
    for _ in range(100):
        await asyncio.sleep(0)
    assert not second.done()
    modules[1].let_go.set()
    await second
    assert (gradients(modules), statistics(modules)) == await expected(order)


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "ZB-H1"])
@pytest.mark.parametrize(("kind", "at"), [("F", 1), ("W", 1)])
async def test_stages_on_workers_that_had_prepared_the_step_take_it_back(name: str, kind: str, at: int) -> None:
    """The last stage is done when the first has its last backward before it."""
    order = make_schedule(name, 2, 2)
    async with workers("driver", "a", "b", service=service) as (driver, *others):
        modules = [await driver.remote_module("a", TrappedNorm, 0, kind, at), await driver.remote_module("b", NormBlock, 1)]
        async with Pipeline(modules, order, loss_fn=mean_square) as pipe:
            held = [behind(module, *others) for module in modules]
            before = statistics(held)
            with pytest.raises((PipelineError, DistributedError), match="by nought"):
                await pipe.step(*data(8))
            await pipe.settle()
            await undone(held, before)
            await pipe.step(*data(8))
            wanted, numbers = await expected(order)
            held[0] = held[0].inner
            assert (gradients(held), statistics(held)) == (wanted, numbers)


async def test_a_state_that_is_loaded_while_a_step_is_prepared_stays() -> None:
    """As after a step that is in doubt, where all workers get the state of a checkpoint."""
    order = make_schedule("GPipe", 2, 2)
    modules = [NormBlock(0), NormBlock(1)]
    checkpoint = [{name: value.numpy() + 1 for name, value in module.state_dict().items()} for module in modules]
    pipe = Pipeline(modules, order, loss_fn=mean_square)
    coordinator = pipe._coordinator

    async def commit(session: Any) -> None:
        for module, state in zip(modules, checkpoint, strict=True):
            module.load_state_dict(state)
        await coordinator.abort(session)
        raise DistributedError("nobody can tell")

    coordinator.commit = commit  # type: ignore[method-assign]
    with pytest.raises(DistributedError, match="nobody can tell"):
        await pipe.step(*data(8))
    loaded = zip(modules, checkpoint, strict=True)
    assert statistics(modules) == [state[name].tobytes() for module, state in loaded for name, _ in module.named_buffers()]


async def test_replicas_whose_step_fails_have_the_statistics_of_before() -> None:
    order = make_schedule("1F1B", 2, 2)
    found = []
    for is_failing in (False, True):
        async with workers("driver", "a0", "a1", "b0", "b1", service=service) as (driver, *others):
            placed = [[await driver.remote_module(f"{name}0", NormBlock, 0), await driver.remote_module(f"{name}1", Last, 1)] for name in "ab"]
            async with Pipeline(placed, order) as pipe:
                held = [behind(module, *others) for replica in placed for module in replica]
                await pipe.step(*data(16))
                before = statistics(held)
                if is_failing:
                    await held[3].fail_at(2)
                    with pytest.raises((PipelineError, DistributedError), match="by nought"):
                        await pipe.step(*data(16, seed=4))
                    await pipe.settle()
                    await undone(held, before)
                await pipe.step(*data(16, seed=4))
                found.append((gradients(held), statistics(held)))
    assert found[0] == found[1] and found[0][1] != before

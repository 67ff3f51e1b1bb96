"""What waits on the workers of a cluster: a scene for each kind of wait, and deadlocks that are cycles of the report."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import distributed as dist
from aiograd.distributed import asking
from aiograd.distributed.rpc.limits import Limits
from aiograd.errors import CollectiveError
from aiograd.pipeline import Pipeline, make_schedule
from tests.distributed.data_parallel.simulated import World, in_world
from tests.distributed.local_steps.simulated import in_world as in_training
from tests.distributed.workers import exposing, leaf, simulate, until, workers
from tests.pipeline.models import mean_square
from tests.pipeline.remote import place
from tests.pipeline.remote import service as stages
from tests.support import run_by

in_time = run_by(lambda test: simulate(test), given=0)
NAMES = ("a", "b", "c")


class Scene:
    """Workers with a lock each, and functions that use them."""

    def __init__(self) -> None:
        self.locks = {name: asyncio.Lock() for name in NAMES}
        self.gate = asyncio.Event()

    @property
    def service(self) -> dist.Service:
        return exposing(self.sleep, self.ask_locked, self.locked, self.hooked, self.work, self.identity)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def identity(self, x: Any) -> Any:
        return x * 2

    async def ask_locked(self, peer: str) -> None:
        """Call a function of another worker while the lock of this one is held."""
        here = dist.current_worker()
        async with self.locks[here.name]:
            await self.gate.wait()
            await asyncio.gather(here.call(peer, "locked", timeout=5.0))

    async def locked(self) -> None:
        async with self.locks[dist.current_worker().name]:
            pass

    async def hooked(self, x: Any, peer: str) -> Any:
        """A value with a hook that calls another worker while the lock of this one is held."""
        here = dist.current_worker()
        y = x * 3

        async def hook(grad: Any) -> None:
            async with self.locks[here.name]:
                await self.gate.wait()
                await here.call_apart(peer, "locked", timeout=5.0)

        y.register_hook(hook)
        return y

    def work(self) -> int:
        return sum(range(10))

    @contextlib.asynccontextmanager
    async def open(self, **options: Any) -> AsyncIterator[tuple[dist.Worker, ...]]:
        async with workers(*NAMES, service=self.service, **options) as opened:
            yield opened


@contextlib.asynccontextmanager
async def under_way(*coroutines: Coroutine[Any, Any, Any]) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """Tasks that are cancelled at the end."""
    tasks = [asyncio.create_task(coroutine, name=f"training {i}") for i, coroutine in enumerate(coroutines)]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def rows(report: dist.WaitReport, worker: str, word: str = "") -> list[dist.Wait]:
    return [wait for wait in report.waits if wait.worker == worker and word in f"{wait.task} {wait.what} {wait.message}"]


def row(report: dist.WaitReport, worker: str, word: str = "") -> dist.Wait:
    found = rows(report, worker, word)
    assert len(found) == 1, str(report)
    return found[0]


# ---------------------------------------------------------------- calls


async def test_a_call_waits_for_its_function_on_any_loop() -> None:
    scene = Scene()
    async with scene.open() as (a, b, _), under_way(a.call("b", "ask_locked", "c")):
        await until(scene.locks["b"].locked)
        report = await a.why()
        call, function = row(report, "a"), row(report, "b")
        assert (call.task, call.on, call.message) == ("task training 0", "b", "answer to call of ask_locked")
        assert (function.task, function.on) == (call.on_task, "") and function.what.endswith("ask_locked") and function.message == "Event.wait"
        assert function.line.startswith("distributed/test_waits_of_workers.py:") and not report.cycles and not report.silent
        assert {wait.worker for wait in report.waits} == {"a", "b"}
        assert [wait.worker for wait in (await a.why("b")).waits] == ["b"] and not (await a.why("c")).waits
        assert [wait.work for wait in (await b.why("b")).waits] == [wait.work for wait in asking.waits(b._core)] == [function.work]


@in_time
async def test_since_when_and_nothing_when_it_has_ended() -> None:
    scene = Scene()
    async with scene.open() as (a, *_):
        async with under_way(a.call("b", "sleep", 5.0)):
            await asyncio.sleep(2.0)
            report = await a.why()
            assert [round(wait.seconds, 1) for wait in report.waits] == [2.0, 2.0] and row(report, "b").message == "sleep"
        await asyncio.sleep(1.0)
        assert await a.why() == dist.WaitReport(seconds=(await a.why()).seconds)


@in_time
async def test_two_services_that_wait_for_each_other_are_a_cycle() -> None:
    scene = Scene()
    async with scene.open() as (a, b, c), under_way(c.call("a", "ask_locked", "b"), c.call("b", "ask_locked", "a")):
        await asyncio.sleep(0.1)
        assert not (await c.why()).cycles
        scene.gate.set()
        await asyncio.sleep(0.1)
        report = await c.why()
        (cycle,) = report.cycles
        assert [worker for worker, _ in cycle] == ["a", "a", "b", "b"] and "cycle 1" in str(report)
        assert {wait.what.rpartition(".")[2] for wait in report.waits if wait.work in cycle} == {"ask_locked", "locked"}
        assert (await a.why()).cycles == (await b.why()).cycles == report.cycles


@in_time
async def test_a_lock_that_is_only_waited_for_is_no_cycle() -> None:
    scene = Scene()
    async with scene.open() as (a, b, c), scene.locks["b"], under_way(a.call("b", "locked"), c.call("b", "locked"), b.call("a", "sleep", 3.0)):
        await asyncio.sleep(0.1)
        report = await a.why()
        assert len(rows(report, "b", "Lock")) == 2 and not report.cycles


@in_time
async def test_calls_of_a_worker_to_itself() -> None:
    scene = Scene()
    async with scene.open() as (a, *_), under_way(a.call("a", "sleep", 3.0)):
        await asyncio.sleep(0.1)
        report = await a.why()
        assert row(report, "a", "training").on_task == row(report, "a", "Scene.sleep").task == "call 1 of a (itself)"


@pytest.mark.parametrize("lock", [asyncio.Lock, lambda: asyncio.Semaphore(1), asyncio.BoundedSemaphore])
@in_time
async def test_a_function_that_waits_for_its_own_lock_is_a_cycle(lock: Any) -> None:
    async def twice() -> None:
        guard = lock()

        @contextlib.asynccontextmanager
        async def guarded() -> AsyncIterator[None]:
            async with guard:
                yield

        async with guarded():
            async with guard:
                pass

    async with workers(*NAMES, service=exposing(twice)) as (a, *_), under_way(a.call("b", "twice")):
        await asyncio.sleep(0.1)
        report = await a.why()
        assert [[worker for worker, _ in cycle] for cycle in report.cycles] == [["b"]], str(report)


@in_time
async def test_a_semaphore_that_several_hold_leads_to_none_of_them() -> None:
    guard = asyncio.Semaphore(2)

    async def guarded() -> None:
        async with guard:
            await asyncio.sleep(5.0)

    async with workers(*NAMES, service=exposing(guarded)) as (a, *_), under_way(*(a.call("b", "guarded") for _ in range(3))):
        await asyncio.sleep(0.1)
        report = await a.why()
        assert [(wait.on, wait.on_task) for wait in rows(report, "b", "Semaphore")] == [("", "")], str(report)


async def _gathered(ask: Any) -> None:
    await asyncio.gather(asyncio.sleep(0.0), ask())


async def _in_a_task_group(ask: Any) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(ask())


async def _shielded(ask: Any) -> None:
    asked = asyncio.ensure_future(ask())
    try:
        await asyncio.shield(asked)
    finally:
        asked.cancel()


async def _with_a_timeout(ask: Any) -> None:
    await asyncio.wait_for(ask(), 4.0)


async def _within_a_timeout(ask: Any) -> None:
    async with asyncio.timeout(4.0):
        await ask()


async def _waited_for(ask: Any) -> None:
    asked = asyncio.ensure_future(ask())
    try:
        await asyncio.wait([asked])
    finally:
        asked.cancel()


async def _generated(ask: Any) -> None:
    async def numbers() -> AsyncIterator[int]:
        await ask()
        yield 1

    async for _ in numbers():
        pass


async def _entered(ask: Any) -> None:
    @contextlib.asynccontextmanager
    async def entered() -> AsyncIterator[None]:
        await ask()
        yield

    async with entered():
        pass


WAYS = [_gathered, _in_a_task_group, _shielded, _with_a_timeout, _within_a_timeout, _waited_for, _generated, _entered]


@pytest.mark.parametrize("way", WAYS)
@in_time
async def test_a_function_is_followed_to_its_request_through_all_ways_to_await(way: Any) -> None:
    scene = Scene()

    async def ask() -> None:
        here = dist.current_worker()
        await way(lambda: here.call("c", "sleep", 3.0))

    async with workers(*NAMES, service=exposing(ask, scene.sleep)) as (a, *_), under_way(way(lambda: a.call("b", "ask"))):
        await asyncio.sleep(0.1)
        report = await a.why()
        own, function, last = row(report, "a"), row(report, "b"), row(report, "c")
        assert own.on_task == function.task and function.on_task == last.task and last.message == "sleep", str(report)
        assert own.task == "task training 0", str(report)
        assert all(wait.line.startswith("distributed/test_waits_of_workers.py:") for wait in report.waits), str(report)


# ---------------------------------------------------------------- passes


@in_time
async def test_two_passes_that_wait_for_each_other_are_a_cycle() -> None:
    scene = Scene()

    async def train(worker: dist.Worker, peer: str, other: str) -> None:
        async with worker.context() as ctx:
            y = await worker.call(peer, "hooked", leaf(1.0), other)
            await ctx.backward(y.sum(), timeout=5.0)

    async with scene.open() as (a, b, c), under_way(train(c, "a", "b"), train(c, "b", "a")):
        await asyncio.sleep(0.1)
        report = await c.why()
        assert len({wait.task for wait in rows(report, "c", "pass")}) == 2 and not report.cycles
        assert row(report, "a", "Event.wait").what.endswith("hook") and row(report, "a", "Event.wait").task.startswith("pass ")
        scene.gate.set()
        await asyncio.sleep(0.1)
        report = await c.why()
        (cycle,) = report.cycles
        assert [worker for worker, _ in cycle] == ["a", "a", "b", "b"] and sum(task.startswith("pass ") for _, task in cycle) == 2
        assert all(("a", each.on_task) in cycle or each.on != "a" for each in report.waits if each.work in cycle and each.on_task.startswith("pass"))


@in_time
async def test_a_pass_has_one_name_on_all_workers() -> None:
    scene = Scene()
    async with scene.open() as (a, b, c), a.context() as ctx:
        y = await a.call("c", "identity", await a.call("b", "hooked", await a.call("c", "identity", leaf(1.0, 2.0)), "c"))

        async with under_way(ctx.backward(y.sum()), ctx.backward(leaf(1.0).sum())):
            await asyncio.sleep(0.5)
            report = await a.why()
            names = {wait.task for wait in report.waits if wait.task.startswith("pass ")}
            assert len(names) == 1 and {wait.worker for wait in report.waits if wait.task in names} == {"a", "b", "c"}, str(report)
            turn = row(report, "a", "the turn in the context")
            assert turn.on == "a" and turn.on_task in names
            assert all(wait.line.startswith("distributed/test_waits_of_workers.py:") for wait in rows(report, "a", "pass"))
            sent = rows(report, "a", "answer to gradient")
            assert {wait.on for wait in sent} == {"b", "c"} and all(wait.on_task in {each.task for each in rows(report, wait.on)} for wait in sent)


@in_time
async def test_a_commit_waits_for_the_hooks_that_follow_it() -> None:
    weight = leaf(3.0)

    async def after(tensor: Any) -> None:
        await asyncio.sleep(3.0)

    weight.register_post_accumulate_grad_hook(after)

    async def weighed(x: Any) -> Any:
        return x * weight

    async with workers(*NAMES, service=exposing(weighed)) as (a, *_), a.context() as ctx:
        y = await a.call("b", "weighed", leaf(2.0))
        async with under_way(ctx.backward(y.sum())) as (backward,):
            await asyncio.sleep(1.0)
            report = await a.why()
            told = row(report, "a", "answer to commit")
            assert told.task.startswith("pass 1 of a") and told.on == "b", str(report)
            assert [wait.on_task for wait in rows(report, "b") if wait.task == told.on_task] == [told.task]
            assert row(report, "b", "sleep").task == told.task and row(report, "b", "sleep").what.endswith("after")
            await backward


# ---------------------------------------------------------------- groups


@in_time
async def test_a_collective_waits_for_the_members_that_have_not_begun() -> None:
    scene = Scene()
    async with scene.open() as opened:
        groups = await asyncio.gather(*(dist.join_group(worker, NAMES) for worker in opened))
        async with under_way(*(group.all_reduce([np.ones(3)]) for group in groups[:2])) as tasks:
            await asyncio.sleep(2.0)
            report = await opened[0].why()
            assert not report.cycles
            for name in "ab":
                waits = [wait for wait in rows(report, name, "all_reduce") if wait.on == "c"]
                assert all(wait.line.startswith("distributed/test_waits_of_workers.py:") for wait in waits)
                assert [(round(wait.seconds), wait.message) for wait in waits] == [(2, "a message of c"), (2, "answer to collective")], str(report)
            assert len({wait.task for wait in report.waits if "all_reduce" in wait.what}) == 1
            assert len(rows(report, "c", "collective")) == 2  # the messages wait for the operation to begin there
            await groups[2].all_reduce([np.ones(3)])
            assert [(await task)[0].tolist() for task in tasks] == [[3.0] * 3] * 2
        async with under_way(*(group.commit(lambda: None) for group in groups[:2])) as tasks:
            await asyncio.sleep(1.0)
            report = await opened[2].why()
            assert row(report, "a", "vote").on == "c" and not report.cycles, str(report)
            name = row(report, "a", "vote").task
            assert name.startswith("commit 1 of group") and row(report, "b").task == name and row(report, "b").on == "a"
            await groups[2].commit(lambda: None)
            await asyncio.gather(*tasks)
        for group in groups:
            await group.aclose()
        with pytest.raises(CollectiveError):
            await groups[0].barrier()


# ---------------------------------------------------------------- steps


SHARDS = [(ag.ones(2, 4) * (i + 1), ag.zeros(2, dtype=np.int64)) for i in range(3)]


@in_world()
async def test_a_step_of_replicas_waits_for_the_slowest(world: World) -> None:
    slow = world.coordinator.remotes[2]
    await slow.module.call("wait", 3.0)
    async with under_way(world.replicas.step(SHARDS)) as (step,):
        await asyncio.sleep(2.0)
        report = await world.driver.why()
        assert not report.cycles and not report.silent
        (name,) = {wait.task for wait in report.waits if wait.task.startswith("step ")}
        assert name.startswith("step 1 of data-parallel replicas (")
        driving = [wait for wait in rows(report, "driver") if wait.task == name]
        assert [wait.on for wait in driving] == ["w0", "w1", "w2"], str(report)
        assert driving[0].message == "answer to call of data_parallel.replica.run"
        for wait in driving:  # the request leads to the step on the member
            assert [each.on_task for each in rows(report, wait.on) if each.task == wait.on_task] == [name]
        assert row(report, "w2", "sleep").task == name and row(report, "w2", "sleep").what.endswith("loss")
        operations = {wait.task for wait in report.waits if "all_reduce" in wait.what}
        assert operations and all(wait.on == "w2" for wait in report.waits if "all_reduce" in wait.what), str(report)
        assert {wait.on_task for name_ in ("w0", "w1") for wait in rows(report, name_) if wait.task == name} <= operations
        await step


@in_world()
async def test_asking_changes_neither_bits_nor_state(world: World) -> None:
    """The same steps with and without questions at every moment."""

    async def ask() -> None:
        while True:
            assert not (await world.driver.why()).cycles
            await asyncio.sleep(0.0005)

    for each in world.coordinator.remotes:
        await each.module.call("wait", 0.01)
    first = world.states[0]
    source = await world.replicas.state_dict()
    await world.replicas.step(SHARDS)
    expected = world.states
    assert expected[0] != first
    await world.replicas.load_state_dict(source)
    optimizer = await world.replicas.optimizer_state_dict()
    assert optimizer
    await world.replicas.aclose()
    async with await dist.DataParallel.create(world.driver, world.first, world.module, **world.options) as world.replicas:
        for each in world.coordinator.remotes:
            await each.module.call("wait", 0.01)
        async with under_way(ask()) as (asking_,):
            await world.replicas.step(SHARDS)
            assert not asking_.done()
        assert world.states == expected
    async with await dist.DataParallel.create(world.driver, world.first, world.module, **world.options) as world.replicas:
        pass


@in_training(patience=None)
async def test_a_round_of_local_steps_waits_for_its_members(world: Any) -> None:
    async with under_way(world.training.round()) as (step,):
        seen: dict[str, int] = {}
        decisions: set[str] = set()
        while not step.done():
            await asyncio.sleep(0.0005)
            report = dist.WaitReport(asking.waits(world.driver._core))
            for wait in rows(report, "driver", "answer to call of"):
                method = wait.message.rpartition(".")[2]
                seen[method] = max(seen.get(method, 0), len(rows(report, "driver", method)))
                if method != "compute":
                    assert wait.task.startswith("step 1 of LocalSteps ("), str(report)
            for name in world.names:
                decisions |= {wait.worker for wait in asking.waits(world.workers[name]._core) if wait.message == "decision" and wait.on == "driver"}
            assert not report.cycles
        assert decisions == {*world.names}
        assert seen.items() >= {"compute": 3, "prepare": 3}.items(), seen
        await step


@in_time
async def test_a_step_of_a_pipeline_waits_for_messages() -> None:
    async with workers("a", "b", "c", service=stages) as (a, b, c):
        parts = await place(a, ["b", "c"], wait=1.0)
        async with Pipeline(parts, make_schedule("1F1B", ranks=2, microbatches=3), loss_fn=mean_square, worker=a) as pipe:
            async with under_way(pipe.step(ag.ones(6, 5), ag.ones(6, 5))) as (step,):
                await asyncio.sleep(0.5)
                report = await a.why()
                (name,) = {wait.task for wait in report.waits if wait.task.startswith("step ")}
                assert name.startswith("step 1 of a pipeline (") and not report.cycles
                waits = row(report, "c", "forward of stage 1, microbatch 0")
                assert (waits.task, waits.on) == (name, "b"), str(report)
                assert row(report, "b", "sleep").task == name and row(report, "b", "sleep").line.startswith("pipeline/remote.py:")
                assert {wait.on for wait in rows(report, "a") if wait.task == name} == {"b", "c"}
                await step


# ---------------------------------------------------------------- queues


async def test_a_queue_for_the_executor() -> None:
    """Functions on threads, and a function that waits for one of them."""
    gate = threading.Event()

    def block() -> None:
        gate.wait()

    try:
        limits = Limits(executor_queue=2, missed_heartbeats=1000)
        async with ag.Engine(threads=1), workers("a", "b", service=exposing(block), limits=limits) as (a, b):
            async with under_way(*(a.call("b", "block") for _ in range(3))) as calls:
                await until(lambda: [wait.message for wait in asking.waits(b._core)].count("the executor") == 2, 1_000_000)
                found = sorted((wait.message, wait.what, wait.line.partition(":")[0]) for wait in rows(await a.why(), "b"))
                assert found == [
                    ("a thread of the executor", "block", "distributed/test_waits_of_workers.py"), *[("the executor", "block", "")] * 2,
                ]  # fmt: skip
                gate.set()
                await asyncio.gather(*calls)
    finally:
        gate.set()


@in_time
async def test_a_queue_for_bytes() -> None:
    scene = Scene()
    async with workers(*NAMES, service=exposing(scene.identity, scene.sleep, hold), limits=Limits(bytes_per_peer=20_000)) as (a, *_):
        async with under_way(a.call("b", "hold", ag.zeros(4000)), a.call("b", "hold", ag.zeros(4000))):
            await asyncio.sleep(1.0)
            report = await a.why()
            assert row(report, "a", "room for 16").on == "b", str(report)


async def hold(x: Any) -> None:
    await asyncio.sleep(5.0)

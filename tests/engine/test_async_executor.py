"""The executor: what runs there, with which context, side by side with what, and what becomes of what is abandoned."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.engine.executors import ComputeExecutor
from aiograd.engine.input_buffer import InputBuffer
from aiograd.errors import EngineClosedError
from aiograd.testing import simulated_run
from aiograd.testing.virtual_clock import VirtualClock
from tests.engine.cases import Switch, function, number, rounds
from tests.support import assert_awaiting_raises, assert_raises, cancel, leaf

USER: contextvars.ContextVar[str] = contextvars.ContextVar("user", default="nobody")


def threads() -> set[str]:
    """Names of the executor threads that are alive."""
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("aiograd-compute")}


# -------------------------------------------------------------------- where code runs


async def test_where_user_code_runs() -> None:
    here = threading.get_ident()
    where: dict[str, bool] = {}

    def note(name: str, result: Any = None) -> Any:
        where[name] = threading.get_ident() == here
        return result

    async def async_rule(ctx: Any, g: Any) -> Any:
        note("async rule")
        await asyncio.sleep(0)
        return note("async rule later", g)

    x = leaf(2.0)
    with ag.graph.saved_tensors_hooks(lambda t: note("pack", t), lambda t: note("unpack", t)):
        y = x * x
    y = function(lambda ctx, g: note("def rule", g))(y)
    y = function(lambda ctx, g: note("inline rule", g), inline=True)(y)
    y = function(async_rule)(y)
    y.register_hook(lambda g: note("hook"))
    y.register_hook(lambda g: ag.graph.queue_callback(lambda: note("callback")))
    y.grad_fn.register_prehook(lambda gs: note("prehook"))
    y.grad_fn.register_hook(lambda gi, go: note("posthook"))
    x.register_post_accumulate_grad_hook(lambda t: note("post-accumulate hook"))
    await y.backward()
    assert {name for name, on_loop in where.items() if not on_loop} == {"def rule"}
    assert len(where) == 11


@pytest.mark.parametrize("simulated", [False, True])
async def test_rules_see_the_context_of_the_caller_and_nobody_sees_theirs(virtual_clock: VirtualClock, simulated: bool) -> None:
    seen: list[str] = []

    def rule(ctx: Any, g: Any) -> Any:
        seen.append(USER.get())
        USER.set("rule")
        return g

    async def async_rule(ctx: Any, g: Any) -> Any:
        seen.append(USER.get())
        return g

    async def one(user: str) -> None:
        USER.set(user)
        x = leaf(1.0)
        y = function(async_rule)(x) + function(rule)(x)
        await (function(rule)(y) + function(async_rule)(x)).backward()
        seen.append(USER.get())

    await asyncio.gather(one("ann"), one("bob"))
    seen.append(USER.get())
    seen = sorted(seen)
    assert seen == ["ann"] * 5 + ["bob"] * 5 + ["nobody"]


async def test_expensive_rows_leave_the_loop_and_cheap_ones_stay() -> None:
    jobs: list[str] = []
    original = ComputeExecutor.submit

    def submit(self: Any, loop: Any, context: Any, function: Any) -> Any:
        jobs.append(str(getattr(function, "args", function)))
        return original(self, loop, context, function)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ComputeExecutor, "submit", submit)
        small = leaf(np.ones((8, 8)))
        await (small @ small).sum().backward()
        assert jobs == []
        large = leaf(np.ones((512, 512)))
        await (large @ large).sum().backward()
        assert any("MatmulBackward" in job for job in jobs)
        jobs.clear()
        async with ag.Engine(inline_ns=float("inf")):
            await (large @ large).sum().backward()
        assert not any("Backward" in job for job in jobs)


async def test_large_sums_are_made_off_the_loop() -> None:
    threads_seen: list[int] = []
    here = threading.get_ident()

    large = np.ones(1 << 18)
    x = leaf(large)

    def rule(ctx: Any, g: Any) -> Any:
        return g * 1.0

    original = InputBuffer._sum

    def watched(self: Any, input_nr: int, grad: Any) -> None:
        if self.sums[input_nr] is not None:
            threads_seen.append(threading.get_ident())
        original(self, input_nr, grad)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InputBuffer, "_sum", watched)
        total = x * 1.0
        for _ in range(5):
            total = total + function(rule)(x)
        await total.sum().backward()
    assert x.grad.numpy()[0] == 6.0
    assert len(threads_seen) == 5 and here not in threads_seen


# -------------------------------------------------------------------- side by side


async def test_independent_rules_run_at_the_same_time() -> None:
    """Each waits for the other: run one after the other they would never end."""
    barrier = threading.Barrier(3)

    def meets(ctx: Any, g: Any) -> Any:
        barrier.wait(timeout=30)
        return g

    x = leaf(1.0)
    async with ag.Engine(threads=3):
        await (function(meets)(x) + function(meets)(x) + function(meets)(x)).backward()
    assert number(x.grad) == 3.0


async def test_two_passes_share_the_executor_at_the_same_time() -> None:
    barrier = threading.Barrier(2)

    def meets(ctx: Any, g: Any) -> Any:
        barrier.wait(timeout=30)
        return g

    x = leaf(1.0)
    async with ag.Engine(threads=2):
        await asyncio.gather(function(meets)(x).backward(), function(meets)(x).backward())
    assert number(x.grad) == 2.0


async def test_a_rule_on_the_executor_overlaps_with_rules_on_the_loop_and_with_hooks() -> None:
    go = threading.Event()
    log: list[str] = []

    def waits(ctx: Any, g: Any) -> Any:
        assert go.wait(timeout=30)
        log.append("executor")
        return g

    async def releases(ctx: Any, g: Any) -> Any:
        log.append("loop")
        await asyncio.sleep(0)
        go.set()
        return g

    x = leaf(1.0)
    await (function(releases)(x) + function(waits)(x)).backward()
    assert log == ["loop", "executor"]


@pytest.mark.parametrize("high", [True, False])
async def test_a_slow_node_with_a_high_number_starts_first_and_overlaps(virtual_clock: VirtualClock, high: bool) -> None:
    """A remote node beside a chain of local ones: with the higher number the pass takes the longer of the two, else their sum."""

    async def remote(ctx: Any, g: Any) -> Any:
        await asyncio.sleep(10)
        return g

    async def local(ctx: Any, g: Any) -> Any:
        await asyncio.sleep(1)
        return g

    x = leaf(1.0)
    slow = function(remote)(x)
    y = x
    for _ in range(8):
        y = function(local)(y)
    loss = slow + y
    if high:
        slow.grad_fn.set_sequence_nr(2**40)
    async with ag.Engine(concurrency=None if high else 1):
        await loss.backward()
    assert number(x.grad) == 2.0
    assert asyncio.get_running_loop().time() == (10 if high else 18)


def test_priority_decides_what_starts_when_only_so_many_may() -> None:
    async def main(order: list[int]) -> list[int]:
        log: list[int] = []

        def rule(i: int) -> Any:
            async def backward(ctx: Any, g: Any) -> Any:
                log.append(i)
                await asyncio.sleep(1)
                return g

            return function(backward)

        x = leaf(1.0)
        parts = [rule(i)(x) for i in range(6)]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        for priority, i in enumerate(reversed(order)):
            parts[i].grad_fn.set_sequence_nr(10**9 + priority)
        # the sum is a chain: everything becomes ready one by one, before anything is waited for
        async with ag.Engine(concurrency=2):
            await total.backward()
        assert number(x.grad) == 6.0
        return log

    assert simulated_run(main, [5, 4, 3, 2, 1, 0]).value == [5, 4, 3, 2, 1, 0]
    assert simulated_run(main, [0, 1, 2, 3, 4, 5]).value[:2] == [5, 4]  # ready first; the limit is reached before the others are


def test_concurrency_limits_how_many_nodes_of_a_pass_are_in_flight() -> None:
    async def main(limit: int | None) -> int:
        inside = most = 0

        async def rule(ctx: Any, g: Any) -> Any:
            nonlocal inside, most
            inside += 1
            most = max(most, inside)
            await asyncio.sleep(1)
            inside -= 1
            return g

        x = leaf(1.0)
        total = function(rule)(x)
        for _ in range(9):
            total = total + function(rule)(x)
        async with ag.Engine(concurrency=limit):
            await total.backward()
        return most

    assert [simulated_run(main, limit).value for limit in (1, 2, 5, None)] == [1, 2, 5, 10]


# -------------------------------------------------------------------- abandoned jobs


async def test_a_stuck_rule_ends_with_the_timeout_and_later_passes_find_a_thread() -> None:
    stuck, release, late = threading.Event(), threading.Event(), threading.Event()

    def rule(ctx: Any, g: Any) -> Any:
        stuck.set()
        assert release.wait(timeout=60)
        late.set()
        return g * 100.0

    x = leaf(1.0, grad=1.0)
    async with ag.Engine(threads=1) as engine:
        task = asyncio.create_task(function(rule)(x).backward())
        while not stuck.is_set():
            await asyncio.sleep(0)
        queued = asyncio.create_task(function(lambda ctx, g: g * 3.0)(x).backward())  # has a job waiting behind the stuck one
        await rounds(3)
        await cancel(task)
        await queued
        await function(lambda ctx, g: g * 5.0)(x).backward()
        assert number(x.grad) == 9.0
        release.set()
        while not late.is_set():
            await asyncio.sleep(0)
        await rounds(5)
        assert number(x.grad) == 9.0, "the late result was used"
        await function(lambda ctx, g: g * 1.0)(x).backward()
        assert sum(not thread.is_retired for thread in engine.executor._threads) == 1
    assert number(x.grad) == 10.0


async def test_many_abandoned_jobs_leave_no_threads() -> None:
    release = threading.Event()
    before = threads()

    def rule(ctx: Any, g: Any) -> Any:
        assert release.wait(timeout=60)
        return g

    x = leaf(1.0)
    async with ag.Engine(threads=2):
        for _ in range(10):
            y = function(rule)(x) + function(rule)(x) + function(rule)(x)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.002):
                    await y.backward()
        release.set()
        await function(lambda ctx, g: g)(x).backward()
    assert threads() == before
    assert number(x.grad) == 1.0


async def test_a_job_that_has_not_started_is_never_run() -> None:
    release = threading.Event()
    ran: list[str] = []
    x = leaf(1.0)

    def waits(ctx: Any, g: Any) -> Any:
        assert release.wait(timeout=60)
        return g

    def never(ctx: Any, g: Any) -> Any:
        ran.append("never")
        return g

    async with ag.Engine(threads=1):
        busy = asyncio.create_task(function(waits)(x).backward())
        await rounds(3)
        queued = asyncio.create_task(function(never)(x).backward(retain_graph=True))
        await rounds(3)
        await cancel(queued)
        release.set()
        await busy
    assert ran == []


async def test_what_an_abandoned_job_makes_is_not_kept() -> None:
    """Nor can it be seen: it writes nowhere that others look."""
    started, release, done = threading.Event(), threading.Event(), threading.Event()
    made: list[weakref.ref[Any]] = []

    class Array(np.ndarray):
        pass

    def rule(ctx: Any, g: Any) -> Any:
        started.set()
        assert release.wait(timeout=60)
        result = np.ones(3).view(Array)
        made.append(weakref.ref(result))
        done.set()
        return ag.asarray(result)

    x = leaf(np.ones(3), grad=np.zeros(3))
    before = x.grad
    task = asyncio.create_task(function(rule)(x).sum().backward())
    while not started.is_set():
        await asyncio.sleep(0)
    await cancel(task)
    release.set()
    while not done.is_set():
        await asyncio.sleep(0)
    del task
    await ag.aclose_default_engine()
    gc.collect()
    assert made[0]() is None
    assert x.grad is before and before.numpy().tolist() == [0.0, 0.0, 0.0]


# -------------------------------------------------------------------- threads


async def test_threads_start_when_needed_and_end_with_the_engine() -> None:
    before = threads()
    x = leaf(1.0)
    async with ag.Engine(threads=4):
        await (x * 2.0).backward()
        assert threads() == before
        for _ in range(5):
            await function(lambda ctx, g: g)(x).backward()
        assert 1 <= len(threads() - before) <= 4
    assert threads() == before


def test_an_executor_that_nobody_refers_to_ends_its_threads() -> None:
    before = threads()

    async def main() -> None:
        executor = ComputeExecutor(2)
        loop = asyncio.get_running_loop()
        results = await asyncio.gather(*(executor.submit(loop, contextvars.copy_context(), threading.get_ident) for _ in range(4)))
        assert threading.get_ident() not in results
        ended = [thread for thread in executor._threads]
        del executor
        gc.collect()
        for thread in ended:
            await asyncio.to_thread(thread.join, 30)
        assert threads() == before

    asyncio.run(main())


def test_a_loop_that_ends_with_its_default_engine_open_leaves_no_threads() -> None:
    before = threads()

    async def main() -> list[threading.Thread]:
        x = leaf(1.0)
        await function(lambda ctx, g: g)(x).backward()
        assert threads() != before
        return list(ag.current_engine().executor._threads)

    started = asyncio.run(main())  # knows nothing of aiograd
    gc.collect()
    for thread in started:
        thread.join(30)
    assert threads() == before


async def test_submitting_to_a_closed_executor() -> None:
    executor = ComputeExecutor(1)
    executor.close()
    assert_raises(EngineClosedError, None, lambda: executor.submit(asyncio.get_running_loop(), contextvars.copy_context(), int))


async def test_results_belong_to_the_loop_alone_when_they_arrive() -> None:
    """No reference stays in the thread, so whether a gradient has to be copied into its leaf does not depend on timing."""
    for _ in range(200):
        addresses: list[int] = []

        def rule(ctx: Any, g: Any, addresses: list[int] = addresses) -> Any:
            result = np.full(64, 2.0)
            addresses.append(result.__array_interface__["data"][0])
            return ag.asarray(result)

        x = leaf(np.ones(64))
        await function(rule)(x).sum().backward()
        assert x.grad.numpy().__array_interface__["data"][0] == addresses[0]


async def test_offload_runs_a_forward_with_the_callers_context_and_modes() -> None:
    USER.set("ann")
    x = leaf(2.0)

    def forward(factor: float) -> tuple[Any, str, int]:
        return x * x * factor, USER.get(), threading.get_ident()

    offload: Callable[..., Any] = ag.current_engine().offload
    y, user, thread = await offload(lambda: forward(3.0))
    assert user == "ann" and thread != threading.get_ident()
    await y.backward()
    assert number(x.grad) == 12.0
    with ag.no_grad():
        y, _, _ = await offload(lambda: forward(3.0))
    assert not y.requires_grad


async def test_errors_of_any_kind_come_back_from_a_thread() -> None:
    class Stop(BaseException):
        pass

    x = leaf(1.0, grad=1.0)
    for error in (ValueError("a"), Stop("b"), KeyboardInterrupt("c"), SystemExit("d"), MemoryError("e")):

        def rule(ctx: Any, g: Any, error: BaseException = error) -> Any:
            raise error

        raised = await assert_awaiting_raises(type(error), None, function(rule)(x).backward())
        assert raised is error
    assert number(x.grad) == 1.0


async def test_the_loop_turns_while_a_rule_sleeps_in_its_thread() -> None:
    waiting, release = Switch(), threading.Event()

    def rule(ctx: Any, g: Any) -> Any:
        loop.call_soon_threadsafe(waiting.on)
        assert release.wait(timeout=60)  # stands for a kernel
        return g

    loop = asyncio.get_running_loop()
    x = leaf(1.0)
    task = asyncio.create_task(function(rule)(x).backward())
    await waiting
    for _ in range(10):
        assert not task.done()
        await asyncio.sleep(0)
    release.set()
    await task

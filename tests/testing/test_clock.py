"""The simulated loop: its clock, its orders, its deadlocks, and the private names it leans on."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from aiograd.errors import ArgumentError, ArgumentTypeError, LoopError
from aiograd.testing import DeadlockError, SimulatedLoop, clock, jobs, owner, simulated_run, steps
from aiograd.testing.virtual_clock import VirtualClock
from tests.support import assert_awaiting_raises, assert_raises

# ---- the clock


def test_a_sleep_takes_virtual_time_only() -> None:
    async def main() -> float:
        await asyncio.sleep(3600)
        return asyncio.get_running_loop().time()

    run = simulated_run(main)
    assert run.value == run.time == 3600


@pytest.mark.parametrize("start", [0.0, 0.1, 1e6, 1e9, 2.0**52])
async def test_timers_fire_at_their_time_exactly_and_in_order(virtual_clock: VirtualClock, start: float) -> None:
    loop = asyncio.get_running_loop()
    fired: list[tuple[str, float]] = []
    done = asyncio.Event()
    times = {"a": start + 3, "b": start + 1, "c": start + 1, "d": start + 2}
    for name, when in times.items():
        loop.call_at(when, lambda name=name: fired.append((name, loop.time())))
    loop.call_at(start + 4, done.set)
    await done.wait()
    assert fired == [("b", start + 1), ("c", start + 1), ("d", start + 2), ("a", start + 3)]


async def test_timers_a_nanosecond_apart_are_two_moments(virtual_clock: VirtualClock) -> None:
    loop = asyncio.get_running_loop()
    seen: list[float] = []
    done = asyncio.Event()
    loop.call_at(1.0, lambda: seen.append(loop.time()))
    loop.call_at(1.0 + 1e-9, lambda: (seen.append(loop.time()), done.set()))
    await done.wait()
    assert seen == [1.0, 1.0 + 1e-9]


async def test_timeouts_fire_in_virtual_time(virtual_clock: VirtualClock) -> None:
    loop = asyncio.get_running_loop()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(30):
            await asyncio.sleep(31)
    first = loop.time()
    await assert_awaiting_raises(TimeoutError, None, asyncio.wait_for(asyncio.Event().wait(), 12))
    assert await asyncio.wait_for(asyncio.sleep(5, "in time"), 6) == "in time"
    assert (first, loop.time()) == (30, 47)


async def test_advance_moves_the_clock_and_runs_nothing(virtual_clock: VirtualClock) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimulatedLoop)
    fired: list[float] = []
    loop.call_later(5, lambda: fired.append(loop.time()))
    loop.advance(8)
    assert loop.time() == 8 and fired == []
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert fired == [8]
    for wrong in (-1, float("nan"), float("inf")):
        assert_raises(ArgumentError, "only moves forward", loop.advance, wrong)


# ---- deadlocks


def test_a_deadlock_names_each_task_and_where_it_waits() -> None:
    async def starve(event: asyncio.Event) -> None:
        await event.wait()

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(starve(asyncio.Event()), name="first")
            group.create_task(asyncio.sleep(2), name="second")

    caught = assert_raises(DeadlockError, r"at virtual time 2 s .*seed=7", simulated_run, main, seed=7)
    assert "first (test_a_deadlock_names_each_task_and_where_it_waits.<locals>.starve) waits at locks.py" in str(caught)
    assert "second" not in str(caught)
    assert isinstance(caught, RuntimeError)


def test_waiting_for_ever_is_a_deadlock() -> None:
    async def main() -> None:
        await asyncio.sleep(float("inf"))

    assert_raises(DeadlockError, None, simulated_run, main)


def test_the_loop_still_unwinds_after_a_deadlock() -> None:
    unwound: list[str] = []

    async def main() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await asyncio.sleep(1)
            unwound.append("yes")

    assert_raises(DeadlockError, None, simulated_run, main)
    assert unwound == ["yes"]


# ---- orders and replays


def test_what_is_no_coroutine_function_is_refused() -> None:
    """A coroutine is closed, so that Python does not warn that it was never awaited."""
    coroutine: Any = _race()
    assert_raises(ArgumentTypeError, "found the coroutine _race, made by a call: pass the function", simulated_run, coroutine)
    assert inspect.getcoroutinestate(coroutine) == inspect.CORO_CLOSED
    assert_raises(ArgumentTypeError, "expected a coroutine function, found int", simulated_run, 3)
    assert_raises(ArgumentTypeError, "returned int; expected a coroutine function", simulated_run, lambda: 3)


async def _race(callbacks: int = 8) -> list[int]:
    ran: list[int] = []
    async with asyncio.TaskGroup() as group:
        for number in range(callbacks):
            group.create_task(_append(ran, number))
    return ran


async def _append(ran: list[int], number: int) -> None:
    await asyncio.sleep(0)
    ran.append(number)


def test_fifo_is_the_order_of_asyncio() -> None:
    assert simulated_run(_race, seed=1).value == asyncio.run(_race()) == list(range(8))


def test_permuted_orders_differ_by_seed_and_lose_nothing() -> None:
    orders = {tuple(simulated_run(_race, seed=seed, order="permuted").value) for seed in range(20)}
    assert len(orders) > 15
    assert all(sorted(order) == list(range(8)) for order in orders)


async def _busy() -> list[int]:
    ran = await _race()
    await asyncio.gather(*(asyncio.to_thread(ran.append, 100 + number) for number in range(5)))
    await asyncio.sleep(2.5)
    return ran


@pytest.mark.parametrize("order", ["fifo", "permuted"])
def test_equal_seeds_give_equal_runs_and_others_do_not(order: clock.Order) -> None:
    first, again, other = (simulated_run(_busy, seed=seed, order=order) for seed in (1, 1, 2))
    assert first == again
    assert first.trace_hash != other.trace_hash and first.time != other.time


@pytest.mark.proc
def test_the_hash_is_the_same_in_every_process() -> None:
    script = (
        "import asyncio\nfrom aiograd.testing import simulated_run\n"
        "async def main():\n await asyncio.gather(*(asyncio.to_thread(int) for _ in {'a', 'b', 'c'}))\n"
        "print(simulated_run(main, seed=5, order='permuted').trace_hash)\n"
    )
    hashes = set()
    for hash_seed in ("1", "2"):
        environment = {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": "."}
        hashes.add(subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True).stdout)
    assert len(hashes) == 1 and len(hashes.pop().strip()) == 32


def test_streams_are_independent_and_need_a_seed() -> None:
    def take(loop: SimulatedLoop, name: str) -> list[float]:
        source = loop.stream(name)
        return [source.random() for _ in range(3)]

    first, second, unseeded = SimulatedLoop(1), SimulatedLoop(2), SimulatedLoop()
    try:
        assert take(first, "net") == take(first, "net")
        assert len({tuple(take(loop, name)) for loop in (first, second) for name in ("net", "sched")}) == 4
        assert_raises(ArgumentError, "without a seed", unseeded.stream, "net")
    finally:
        for loop in (first, second, unseeded):
            loop.close()


# ---- cancelling at every step


def test_cancel_at_reaches_every_step() -> None:
    entered: list[int] = []
    left: list[int] = []

    async def main() -> str:
        entered.append(1)
        try:
            await _race(3)
            await asyncio.to_thread(int)
            await asyncio.sleep(1)
            return "done"
        finally:
            left.append(1)

    steps = simulated_run(main).steps
    outcomes = []
    for step in range(1, steps + 1):
        try:
            outcomes.append(simulated_run(main, cancel_at=step).value)
        except asyncio.CancelledError as error:
            outcomes.append("cancelled")
            assert f"cancel_at={step}" in error.__notes__[0]
    ended = outcomes.index("done")
    assert set(outcomes[:ended]) == {"cancelled"} and ended > 10, "every step before the end can be cancelled at"
    assert set(outcomes[ended:]) == {"done"}, "after the end there is nothing to cancel"
    assert len(entered) == len(left) == steps, "cancelled before the first step it never starts; else it always unwinds"


async def test_at_step_calls_right_before_that_step(virtual_clock: VirtualClock) -> None:
    seen: list[int] = []
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimulatedLoop)
    loop.at_step(loop.steps + 2, lambda: seen.append(loop.steps))
    loop.at_step(loop.steps + 2, lambda: seen.append(-1))
    before = loop.steps
    await asyncio.sleep(0)
    assert seen == []
    await asyncio.sleep(0)
    assert seen == [before + 2, -1]
    assert_raises(ArgumentError, "has begun already", loop.at_step, loop.steps, int)


# ---- real threads


def test_a_thread_takes_no_virtual_time() -> None:
    async def main() -> int:
        async with asyncio.timeout(1e-6):
            return await asyncio.to_thread(lambda: (sum(range(300_000)), threading.get_ident())[1])

    run = simulated_run(main, executor="threads")
    assert run.value != threading.get_ident()
    assert run.time == 0


def test_a_stuck_thread_is_a_deadlock_after_patience() -> None:
    release = threading.Event()

    async def main() -> None:
        try:
            await asyncio.to_thread(release.wait)
        finally:
            release.set()

    loop = SimulatedLoop(executor="threads", patience=0.02)
    with asyncio.Runner(loop_factory=lambda: loop) as runner, pytest.raises(DeadlockError, match=r"threads .* within 0\.02 s .*\(1 expected\)"):
        runner.run(main())


async def test_announced_threads_are_waited_for(virtual_clock: VirtualClock) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimulatedLoop)
    answer = loop.create_future()
    thread = threading.Thread(target=lambda: (sum(range(300_000)), loop.call_soon_threadsafe(answer.set_result, "hello")))
    with loop.external_work():
        thread.start()
        async with asyncio.timeout(1e-6):
            await answer
    thread.join()
    assert answer.result() == "hello"


# ---- what surrounds it


def test_an_error_says_how_to_repeat_the_run() -> None:
    async def main() -> None:
        await asyncio.sleep(1)
        raise ValueError("boom")

    caught = assert_raises(ValueError, "boom", simulated_run, main, seed=11, order="permuted")
    note = caught.__notes__[0]
    assert "seed=11" in note and "order='permuted'" in note and "trace hash" in note
    assert f"Python {sys.version_info[0]}.{sys.version_info[1]}" in note


def test_tasks_left_behind_are_reported_and_cancelled() -> None:
    left: list[asyncio.Task[Any]] = []

    async def main() -> None:
        left.append(asyncio.create_task(asyncio.Event().wait(), name="forgotten"))
        await asyncio.sleep(0)

    run = simulated_run(main)
    assert len(run.leftover_tasks) == 1 and run.leftover_tasks[0].startswith("forgotten (Event.wait) waits at locks.py")
    assert left[0].cancelled()
    assert simulated_run(_race).leftover_tasks == ()


def test_async_generators_and_debug_mode_work_as_on_any_loop() -> None:
    closed: list[bool] = []

    async def numbers() -> Any:
        try:
            for number in range(3):
                yield number
        finally:
            closed.append(True)

    async def main() -> int:
        asyncio.get_running_loop().set_debug(True)
        async for number in numbers():
            if number == 1:
                break
        return number

    assert simulated_run(main).value == 1
    assert closed == [True]


async def test_what_cannot_be_repeated_is_refused(virtual_clock: VirtualClock) -> None:
    loop = asyncio.get_running_loop()
    with pytest.raises(LoopError, match="create_connection: a simulated loop opens no sockets"):
        await loop.create_connection(asyncio.Protocol, "127.0.0.1", 1)
    await assert_awaiting_raises(LoopError, "subprocess_exec", asyncio.create_subprocess_exec("true"))
    assert_raises(LoopError, "getaddrinfo", lambda: loop.getaddrinfo("localhost", 1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"order": "lifo"}, "expected 'fifo' or 'permuted'"),
        ({"order": "permuted"}, "drawn from a seed"),
        ({"executor": "processes"}, "expected 'inline'"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    assert_raises(ArgumentError, message, lambda: SimulatedLoop(**arguments))


# ---- Note [Which private names]

PRIVATE_NAMES = {
    "_ready", "_scheduled", "_selector", "_clock_resolution", "_process_events", "_write_to_self", "_asyncgens", "_asyncgen_firstiter_hook",
    "_callback", "_context",  # of Handle
    "_log_destroy_pending", "_log_traceback",  # of Task and Future
    "_unregister_task",  # of asyncio.tasks, documented for those who write tasks of their own
    "_set_running_loop",  # of asyncio.events
}  # fmt: skip


def test_no_other_private_name_is_used() -> None:
    used: set[str] = set()
    for module in (clock, jobs, owner, steps):
        tree = ast.parse(Path(inspect.getfile(module)).read_text())
        attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and re.match("_[^_]", node.attr)]
        methods = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assigned = {node.attr for node in attributes if isinstance(node.ctx, ast.Store)}
        used |= {node.attr for node in attributes} - ((methods | assigned) - PRIVATE_NAMES)
        used |= methods & PRIVATE_NAMES
    assert used == PRIVATE_NAMES


def test_this_python_has_the_private_names() -> None:
    base = asyncio.BaseEventLoop()
    try:
        source = inspect.getsource(asyncio.BaseEventLoop._run_once)  # type: ignore[attr-defined]
        for name in ("_ready", "_scheduled", "_clock_resolution"):
            assert hasattr(base, name) and f"self.{name}" in source
        assert "self._ready.popleft()" in source and "self._selector.select(timeout)" in source and "self._process_events(" in source
        assert "self._write_to_self()" in inspect.getsource(asyncio.BaseEventLoop.call_soon_threadsafe)
        assert "self._asyncgens.add(agen)" in inspect.getsource(asyncio.BaseEventLoop._asyncgen_firstiter_hook)  # type: ignore[attr-defined]
        handle = base.call_soon(int)
        assert hasattr(handle, "_callback") and hasattr(handle, "_context")
        assert hasattr(asyncio.Task, "_log_destroy_pending") and hasattr(asyncio.Future, "_log_traceback")
        assert callable(asyncio.events._set_running_loop)
    finally:
        base._selector = None  # type: ignore[attr-defined]
        base.close()

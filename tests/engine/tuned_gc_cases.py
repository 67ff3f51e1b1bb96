"""ag.tuned_gc: short collections, full ones when nothing else is to be done or memory asks, and everything put back at the end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

import aiograd as ag
from aiograd.engine.run.paced_collector import (
    FROZEN_BY_PYTHON,
    GROWTH_BYTES,
    LARGE_TABLE,
    PROMOTED,
    THRESHOLDS,
    WORTHWHILE,
    WORTHWHILE_SHARE,
    PacedCollector,
)
from aiograd.engine.run.tuned_gc import IDLE_SHARE, INTERVAL
from aiograd.errors import LoopError
from aiograd.testing import simulated_run
from tests.support import assert_awaiting_raises, assert_raises, custom_function

MIB = 1 << 20


@pytest.fixture(autouse=True)
def settings_stay(thawed: None) -> Iterator[None]:
    """Each test leaves the collector as it found it, and begins with thresholds that are nobody's default."""
    found = gc.get_threshold()
    gc.set_threshold(901, 11, 12)
    before = settings()
    try:
        yield
        assert settings() == before
    finally:
        gc.enable()
        gc.set_threshold(*found)


def settings() -> tuple[Any, ...]:
    return gc.isenabled(), gc.get_threshold(), gc.get_freeze_count() > FROZEN_BY_PYTHON, [*gc.callbacks]


class Cycle:
    """Garbage that only a collector finds."""

    def __init__(self) -> None:
        self.me = self


class Memory:
    """A process as the collector sees it."""

    def __init__(self) -> None:
        self.bytes = 100 * MIB

    def __call__(self) -> int:
        return self.bytes


def grow_old() -> None:
    """Allocate, with nothing collectable among it, until the oldest generation has been collected."""
    seen: list[int] = []
    callback = lambda phase, info: seen.append(info["generation"]) if phase == "stop" else None  # noqa: E731
    gc.callbacks.append(callback)
    kept: list[list[int]] = []
    while 2 not in seen:
        kept.append([])
    gc.callbacks.remove(callback)


@contextlib.contextmanager
def paced(memory: Memory | None = None) -> Iterator[PacedCollector]:
    collector = PacedCollector(memory or Memory())
    collector.acquire()
    collector.rearm()
    try:
        yield collector
    finally:
        collector.release()


# -------------------------------------------------------------------- the collector


def test_survivors_of_the_oldest_generation_are_looked_at_no_more() -> None:
    with paced() as collector:
        alive = Cycle()
        grow_old()
        assert not any(alive is other for other in gc.get_objects()), "frozen objects are in no generation"
        assert collector.full_collections == 0


def test_no_automatic_collection_looks_at_more_than_what_is_young() -> None:
    looked_at: list[int] = []
    kept: list[list[int]] = []

    def count(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            looked_at.append(sum(len(gc.get_objects(generation)) for generation in range(info["generation"] + 1)))

    with paced():
        gc.callbacks.append(count)
        while len(kept) < 20 * PROMOTED:
            kept.append([])
        gc.callbacks.remove(count)
    assert len(looked_at) > 100
    assert max(looked_at) <= 1.01 * PROMOTED, "however many are alive"


def test_young_garbage_is_collected_all_the_time() -> None:
    with paced() as collector:
        seen = [weakref.ref(Cycle()) for _ in range(20_000)]
        assert sum(ref() is not None for ref in seen) <= 2 * THRESHOLDS[0]
        assert collector.full_collections == 0


def test_garbage_that_was_frozen_alive_is_collected_when_memory_has_grown() -> None:
    memory = Memory()
    with paced(memory) as collector:
        for _ in range(3):
            full = collector.full_collections
            old = Cycle()
            grow_old()
            ref = weakref.ref(old)
            del old
            grow_old()
            assert ref() is not None, "memory has not asked"
            memory.bytes *= 2
            grow_old()
            assert ref() is None
            collector.rearm()
            grow_old()
            assert collector.full_collections == full + 1, "one is enough until it has grown again"


def test_memory_is_bounded_although_what_is_freed_is_not_given_back() -> None:
    """Cycles that live for a while each, as requests do: each is frozen alive, dies, and holds memory that only a full collection frees."""
    memory, in_use, live = Memory(), 100 * MIB, 20 * MIB
    in_flight: list[Held] = []

    class Held(Cycle):
        def __init__(self) -> None:
            nonlocal in_use
            super().__init__()
            self.parts: list[list[int]] = [[] for _ in range(100)]
            in_use += MIB
            memory.bytes = max(memory.bytes, in_use)

        def __del__(self) -> None:
            nonlocal in_use
            in_use -= MIB

    with paced(memory) as collector:
        between = int(WORTHWHILE_SHARE * gc.get_freeze_count() / PROMOTED) + 2
        for _ in range(6 * between + 30):
            in_flight.extend(Held() for _ in range(10))
            grow_old()
            collector.rearm()
            del in_flight[:-10]
        assert collector.full_collections >= 3
        most = memory.bytes
        in_flight.clear()
        gc.collect()
    assert most <= 100 * MIB + GROWTH_BYTES + live + between * 10 * MIB


def test_collect_called_by_user_code_is_a_full_collection() -> None:
    with paced() as collector:
        old = Cycle()
        grow_old()
        ref = weakref.ref(old)
        del old
        gc.collect(1)
        assert ref() is not None
        gc.collect()
        assert ref() is None and collector.full_collections == 1


def test_settings_that_somebody_else_has_changed_meanwhile_stay() -> None:
    found = gc.get_threshold()
    with paced():
        gc.set_threshold(123, 4, 5)
    assert gc.get_threshold() == (123, 4, 5)
    gc.set_threshold(*found)


def test_what_was_frozen_before_stays_frozen() -> None:
    gc.freeze()
    try:
        with paced():
            pass
        assert gc.get_freeze_count() > 1000
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("switched_off_by", ["disable", "threshold"])
def test_a_collector_that_is_switched_off_stays_so(switched_off_by: str) -> None:
    found = gc.get_threshold()
    if switched_off_by == "disable":
        gc.disable()
    else:
        gc.set_threshold(0)
    off = gc.isenabled(), gc.get_threshold()[0]
    with paced() as collector:
        assert (gc.isenabled(), gc.get_threshold()[0]) == (off if switched_off_by == "threshold" else (False, THRESHOLDS[0]))
        collector._promoted = 10 * WORTHWHILE
        assert not collector.is_worthwhile()
    gc.enable()
    gc.set_threshold(*found)


def test_holders_on_several_threads_share_one_setting() -> None:
    before = settings()
    inside, leave = threading.Barrier(5), threading.Event()

    async def main() -> None:
        async with ag.tuned_gc():
            inside.wait()
            await asyncio.to_thread(leave.wait)

    threads = [threading.Thread(target=asyncio.run, args=(main(),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    inside.wait()
    assert gc.get_threshold() == THRESHOLDS and len(gc.callbacks) == len(before[3]) + 1
    leave.set()
    for thread in threads:
        thread.join()
    assert settings() == before


# -------------------------------------------------------------------- when the process is idle


class Cpu:
    """CPU time of the process."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def simulated(main: Any) -> Any:
    return simulated_run(main).value


def with_old_garbage(collector: PacedCollector) -> weakref.ref[Cycle]:
    """Garbage that has been frozen alive, and enough other objects that a full collection is worthwhile."""
    old = Cycle()
    while not collector.is_worthwhile():
        grow_old()
    return weakref.ref(old)


def test_an_idle_process_collects_everything_and_a_busy_one_does_not() -> None:
    async def main() -> None:
        cpu, collector = Cpu(), PacedCollector(Memory())
        async with ag.tuned_gc(cpu_time=cpu, collector=collector):
            ref = with_old_garbage(collector)
            for _ in range(20):
                cpu.seconds += 2 * IDLE_SHARE * INTERVAL
                await asyncio.sleep(INTERVAL / 2)
            assert ref() is not None and collector.full_collections == 0
            await asyncio.sleep(3 * INTERVAL)
            assert ref() is None and collector.full_collections == 1
            await asyncio.sleep(20 * INTERVAL)
            assert collector.full_collections == 1, "nothing has been frozen since"

    simulated(main)


def test_a_pass_in_flight_is_not_idle() -> None:
    @custom_function(lambda x: x * 2.0)
    async def Waits(ctx: Any, grad: ag.Tensor) -> ag.Tensor:
        await asyncio.sleep(10 * INTERVAL)
        return grad * 2.0

    async def main() -> None:
        collector = PacedCollector(Memory())
        x = ag.tensor([1.0], requires_grad=True)
        async with ag.tuned_gc(cpu_time=Cpu(), collector=collector):
            ref = with_old_garbage(collector)
            await Waits.apply(x).sum().backward()
            assert ref() is not None and collector.full_collections == 0
            await asyncio.sleep(3 * INTERVAL)
            assert ref() is None and collector.full_collections == 1

    simulated(main)


def test_no_collection_goes_through_the_table_of_a_large_pass() -> None:
    largest: list[int] = []

    def measure(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            young = [each for generation in range(info["generation"] + 1) for each in gc.get_objects(generation)]
            largest.append(max((len(each) for each in young if type(each) is dict), default=0))

    async def main() -> None:
        y = x = ag.tensor([1.0], requires_grad=True)
        for _ in range(LARGE_TABLE):
            y = y * 0.5
        kept: list[list[int]] = []
        y.register_hook(lambda grad: kept.extend([] for _ in range(PROMOTED)))  # when the pass knows the graph, and before it has run the nodes
        # one that never pauses, however slow the machine: a pause in the middle of the walk allocates, before the pass can say how large its table is
        async with ag.tuned_gc(), ag.Engine(budget=1e9):
            gc.callbacks.append(measure)
            await y.sum().backward()
            gc.callbacks.remove(measure)
        assert x.grad is not None

    asyncio.run(main())
    assert len(largest) > 3
    assert max(largest) < LARGE_TABLE


# -------------------------------------------------------------------- who sets it


def test_blocks_are_nested_and_the_last_one_puts_everything_back() -> None:
    async def main() -> None:
        before = settings()
        async with ag.tuned_gc() as outer:
            await assert_awaiting_raises(LoopError, "open already", outer.__aenter__())
            async with ag.tuned_gc():
                assert gc.get_threshold() == THRESHOLDS
            assert gc.get_threshold() == THRESHOLDS and gc.get_freeze_count()
        assert settings() == before
        async with outer:
            assert gc.get_threshold() == THRESHOLDS
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0), ag.tuned_gc():
                await asyncio.sleep(2.0)
        assert settings() == before

    simulated(main)


def test_run_sets_it_unless_told_not_to() -> None:
    async def main() -> tuple[int, ...]:
        return gc.get_threshold()

    async def fails() -> None:
        raise ValueError("boom")

    before = settings()
    assert ag.run(main()) == THRESHOLDS
    assert settings() == before
    assert ag.run(main(), tune_gc=False) == (901, 11, 12)
    assert_raises(ValueError, "boom", lambda: ag.run(fails()))
    assert settings() == before


@pytest.mark.proc
def test_an_import_sets_nothing() -> None:
    program = (
        "import gc; before = gc.isenabled(), gc.get_threshold(), gc.get_freeze_count(), [*gc.callbacks]; import aiograd, aiograd.distributed; "
        "assert before == (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count(), [*gc.callbacks])"
    )
    subprocess.run([sys.executable, "-c", program], check=True)

"""Event loops that are held up: told to peers, which keep the worker, and to the log. A process that is stopped is lost all the same."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiograd import distributed as dist
from aiograd.distributed.rpc.peer_session import PeerSession
from aiograd.distributed.watchdog import EVERY, PAUSE, WARN, LoopLook, LoopWatch, WatchedLoop, pulses_of
from aiograd.errors import WorkerLostError
from tests.distributed.test_peer_session import SILENCE, Two, in_two, now
from tests.distributed.workers import SECRET

LATE = SILENCE / 6
#: a worker that is lost for want of frames is lost long after a test has ended
PATIENT = dist.Limits(missed_heartbeats=1000)

# -------------------------------------------------------------------- the rule


def watched(holds: list[tuple[float, float]], until: float, silence: float = SILENCE) -> list[tuple[float, LoopLook]]:
    """What a loop's watch says that is held up from each of these times for so many seconds."""
    watch, said, tick, at = LoopWatch(silence, 0.0), [], 0.0, 0.0
    while at < until:
        while tick <= at:  # ticks that were due in a hold come when it is over
            held = next((begin + seconds for begin, seconds in holds if begin <= tick < begin + seconds), tick)
            if held > at:
                break
            watch.tick(held)
            tick = held + watch.period
        look = watch.look(at)
        if look is not None:
            said.append((at, look))
        assert watch.due > at
        at = watch.due
    return said


def test_a_loop_in_time_is_never_held_up() -> None:
    assert watched([(second, 0.9 * LATE) for second in range(100)], 100.0) == []


@given(st.floats(0.0, 3.0), st.floats(1.2 * LATE, 20.0))
def test_a_hold_is_told_in_time_and_each_half_second(begin: float, seconds: float) -> None:
    said = watched([(begin, seconds)], begin + seconds + 3.0)
    tells = [at for at, look in said if look.tells]
    watch = LoopWatch(SILENCE, 0.0)
    if seconds > LATE + watch.period:
        assert begin + LATE - watch.period <= tells[0] <= begin + LATE + watch.period
        assert tells[0] - begin < SILENCE / 3 - 0.1, "a peer that counts from a heartbeat before it still waits"
    for before, after in itertools.pairwise(tells):
        assert EVERY <= after - before < EVERY + 2 * watch.period
    for at, look in said:
        assert begin <= at <= begin + seconds + watch.period and abs(look.seconds - (at - begin)) <= 2 * watch.period


def test_the_log_has_each_hold_once_and_one_each_five_seconds() -> None:
    said = watched([(10.0, 20.0), (31.0, 1.0), (33.0, 1.0), (40.0, 0.2)], 50.0)
    warned = [at for at, look in said if look.warns]
    assert len(warned) == 2 and 10.0 + WARN <= warned[0] <= 10.5 and 31.0 + WARN <= warned[1] <= 31.5
    assert warned[1] - warned[0] >= PAUSE


@pytest.mark.parametrize("seconds", [2.0, 100.0])
def test_a_look_that_is_late_itself_tells_no_peer(seconds: float) -> None:
    """The process was stopped, or its code kept the interpreter's lock: the loop may be about to go on."""
    watch = LoopWatch(SILENCE, 0.0)
    watch.tick(0.0)
    assert watch.look(watch.period) is None
    look = watch.look(seconds)
    assert look is not None and look.warns and not look.tells
    again = watch.look(watch.due)
    assert again is not None and again.tells and not again.warns, "it has not gone on"
    watch.tick(seconds + 1.5 * watch.period)
    assert watch.look(seconds + 2 * watch.period) is None


# -------------------------------------------------------------------- on a simulated network


def session_of(worker: dist.Worker) -> PeerSession:
    (session,) = worker.endpoint.sessions()
    return session


class Watching:
    """The watchdogs of both workers of a simulated network, in its time; `hold` has loops held up that a thread would see."""

    def __init__(self, two: Two, a: dist.Worker, latency: float = 0.03) -> None:
        self.two = two
        self.workers = {"a": a, "b": two.b}
        self.latency = latency
        a_session, b_session = session_of(a), session_of(two.b)
        self.others = {"a": b_session, "b": a_session}

    def greet(self) -> None:
        """First pulses arrive."""
        for name in self.workers:
            self._tell(name, 0.0, "")

    def hold(self, name: str, seconds: float, line: str = "app/train.py:7", *, stops_after: float = float("inf")) -> None:
        """Hold a loop up from now on; after `stops_after` the process is stopped as well."""
        watch, began = LoopWatch(SILENCE, now()), now()
        self.two.network.freeze(name, seconds)

        def look() -> None:
            at = self.two.network.loop.time()
            if at < began + min(seconds, stops_after):
                found = watch.look(at)
                if found is not None and found.tells:
                    self._tell(name, found.seconds, line)
                self.two.later(watch.due - at, look)

        look()

    def _tell(self, name: str, seconds: float, line: str) -> None:
        for pulses, url, pulse in pulses_of(self.workers[name].endpoint, seconds, line):
            assert url == {"a": "sim://b", "b": "sim://a"}[name]
            message, other = pulses.make(pulse), self.workers["ab".replace(name, "")]
            self.two.later(self.latency, functools.partial(other.endpoint.pulse, message))


def lost(*workers: dist.Worker) -> int:
    return sum(worker.endpoint.statistics().lost for worker in workers)


async def acquainted(two: Two, a: dist.Worker) -> Watching:
    """Both workers have told that they can tell, and have heard each other for a while."""
    watching = Watching(two, a)
    await asyncio.sleep(2.0)
    watching.greet()
    await a.call("b", "work", 1000, 20.0)
    assert not session_of(a).detector.is_patient and not session_of(two.b).detector.is_patient
    return watching


@pytest.mark.parametrize("held", ["a", "b"])
@pytest.mark.parametrize("seconds", [0.6, 1.0, 3.0, 10.0, 29.0])
@in_two
async def test_a_loop_that_is_held_up_is_not_a_lost_worker(two: Two, a: dist.Worker, seconds: float, held: str) -> None:
    """Whenever it begins: since the last heartbeat or just before the next one."""
    watching = await acquainted(two, a)
    for number in range(1, 11):
        working = asyncio.ensure_future(a.call("b", "work", number, 1.0, timeout=300))
        await asyncio.sleep(0.2 + 0.027 * number)
        watching.hold(held, seconds)
        assert await working == number
        await asyncio.sleep(1.0)
    assert not two.cancelled and not lost(a, two.b)
    assert session_of(a).detector.held_at is session_of(two.b).detector.held_at is None


@in_two
async def test_it_is_named_within_a_second_and_lost_after_its_time(two: Two, a: dist.Worker) -> None:
    watching = await acquainted(two, a)
    began, detector = now(), session_of(a).detector
    working = asyncio.ensure_future(a.call("b", "note", 1, timeout=300))
    watching.hold("b", 1000.0)
    await asyncio.sleep(0.5)
    assert detector.held_line == "app/train.py:7" and detector.held_at is not None and detector.held_at < began + 0.45
    with pytest.raises(WorkerLostError, match=r"its event loop was held up for 30\.\d s at app/train\.py:7 \(Limits\.held=30\)"):
        await working
    assert 29.5 < now() - began < 31.0


@in_two
async def test_without_pulses_a_silent_worker_is_lost_sooner_than_before(two: Two, a: dist.Worker) -> None:
    await acquainted(two, a)
    working = asyncio.ensure_future(a.call("b", "work", 1, 100.0, timeout=300))
    await asyncio.sleep(5.0)
    began = now()
    two.network.freeze("b", 50.0)
    with pytest.raises(WorkerLostError, match="nothing was heard from it for"):
        await working
    assert SILENCE / 2 - 0.25 <= now() - began <= 0.75 * SILENCE
    await asyncio.sleep(60.0)


@in_two
async def test_a_worker_that_has_not_shown_that_it_can_tell_has_the_whole_silence(two: Two, a: dist.Worker) -> None:
    working = asyncio.ensure_future(a.call("b", "work", 1, 100.0, timeout=300))
    await asyncio.sleep(20.0)
    began = now()
    two.network.freeze("b", 50.0)
    with pytest.raises(WorkerLostError):
        await working
    assert SILENCE - 0.3 <= now() - began <= SILENCE + 0.1
    await asyncio.sleep(60.0)


@in_two
async def test_a_connection_that_breaks_in_a_hold_is_made_anew_after_it(two: Two, a: dist.Worker) -> None:
    watching = await acquainted(two, a)
    working = asyncio.ensure_future(a.call("b", "work", 1, 1.0, timeout=300))
    await asyncio.sleep(0.1)
    watching.hold("b", 8.0)
    two.later(3.0, two.network_breaks)
    assert await working == 1 and not lost(a, two.b) and two.ran.count(1) == 1


@in_two
async def test_the_whole_silence_is_left_to_find_another_way(two: Two, a: dist.Worker) -> None:
    """Where a connection breaks that was regular, and the peer cannot be reached for longer than its gaps."""
    await acquainted(two, a)
    working = asyncio.ensure_future(a.call("b", "work", 1, 8.0, timeout=300))
    await asyncio.sleep(5.0)
    two.network.reset("a", "b")
    await asyncio.sleep(0.0055)  # both ends know, and the next handshake is not complete
    two.network.cut("a", "b")
    await asyncio.sleep(1.15)
    two.network.heal("a", "b")
    assert await working == 1 and not lost(a, two.b) and two.ran.count(1) == 1


@in_two
async def test_lines_of_code_are_for_peers_of_the_own_principal(two: Two, a: dist.Worker) -> None:
    ((_, _, own),) = pulses_of(a.endpoint, 1.0, "app/train.py:7")
    assert own.line == "app/train.py:7"
    session_of(a).peer.principal = "tenant"  # type: ignore[misc]
    ((_, _, other),) = pulses_of(a.endpoint, 1.0, "app/train.py:7")
    assert other == (1.0, "")
    a.remove_peer("b")
    assert not list(pulses_of(a.endpoint, 1.0)), "a peer without a URL is not told"


# -------------------------------------------------------------------- threads and processes


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "aiograd watchdog"]


@pytest.fixture
def no_thread_yet() -> Iterator[None]:
    assert not threads()
    yield
    assert not threads()


@pytest.mark.net
@pytest.mark.usefixtures("no_thread_yet")
async def test_there_is_one_thread_while_a_worker_is_open() -> None:
    async with dist.Worker("a", secret=SECRET):
        (thread,) = threads()
        async with dist.Worker("b", secret=SECRET):
            assert threads() == [thread]
        assert threads() == [thread] and thread.daemon
    assert not threads() and not thread.is_alive()
    async with dist.Worker("c", secret=SECRET, watchdog=False):
        assert not threads()
    worker = dist.Worker("d", secret=SECRET)
    await worker.aclose()
    async with dist.Worker("e", secret=SECRET) as worker:
        await worker.aclose()
        assert not threads()


@pytest.mark.net
@pytest.mark.usefixtures("no_thread_yet")
def test_a_loop_that_ends_with_open_workers_ends_the_thread() -> None:
    loop = asyncio.new_event_loop()
    worker = dist.Worker("a", secret=SECRET)
    loop.run_until_complete(worker.__aenter__())
    (thread,) = threads()
    loop.run_until_complete(worker.endpoint.aclose())
    loop.close()
    thread.join()


def hold_here(until: Callable[[], bool]) -> str:
    """Hold up the loop until something is so; returns the line at which it stands."""
    while not until():
        time.sleep(0.01)
    return "distributed/test_watchdog.py"


@pytest.mark.net
@pytest.mark.parametrize("is_watched", [True, False])
async def test_the_log_has_the_line_of_a_hold_once(caplog: pytest.LogCaptureFixture, is_watched: bool) -> None:
    caplog.set_level(logging.WARNING, "aiograd.loop")
    async with dist.Worker("a", secret=SECRET, limits=PATIENT, watchdog=is_watched):
        await asyncio.sleep(0)
        began = time.monotonic()
        file = hold_here(lambda: bool(caplog.records) if is_watched else time.monotonic() > began + 1.0)
        held = time.monotonic()
        hold_here(lambda: time.monotonic() > held + 0.6)
    said = [record.getMessage() for record in caplog.records]
    if not is_watched:
        assert said == []
        return
    assert len(said) == 1 and said[0].startswith("worker a: the event loop has been held up for ")
    assert f"{file}:" in said[0] and caplog.records[0].name == "aiograd.loop" and caplog.records[0].worker == "a"  # type: ignore[attr-defined]


@pytest.mark.net
async def test_the_line_is_the_users_and_there_is_none_where_the_loop_waits() -> None:
    loop, here = WatchedLoop(), asyncio.get_running_loop()
    loop.watch = LoopWatch(SILENCE, 0.0)
    ticked = asyncio.Event()
    here.call_soon(loop._tick)
    here.call_soon(ticked.set)
    await ticked.wait()
    lines: list[str] = []
    at, seen, waited = threading.Event(), threading.Event(), asyncio.Event()

    def look() -> None:
        at.wait()
        lines.append(loop._line())
        seen.set()

    thread = threading.Thread(target=look)
    thread.start()
    at.set()
    seen.wait()  # stands in a library, called from here
    thread.join()
    code = test_the_line_is_the_users_and_there_is_none_where_the_loop_waits.__code__
    file, _, line = lines[0].rpartition(":")
    assert file == "distributed/test_watchdog.py" and code.co_firstlineno < int(line) < code.co_firstlineno + 30
    for turn in range(2):
        seen.clear()
        thread = threading.Thread(target=lambda: (time.sleep(0.05), look(), here.call_soon_threadsafe(waited.set)))
        thread.start()
        await waited.wait()
        waited.clear()
        thread.join()
        assert lines[1 + turn] == "", "it waits for something to do"
    loop._timer.cancel()  # type: ignore[union-attr]


@pytest.mark.proc
async def test_processes_whose_loops_are_held_up_are_kept_and_one_that_is_stopped_is_lost() -> None:
    """By blocking, by a loop of Python and by large products: the driver and the other workers keep them, and `why` has the line."""
    limits = dist.Limits(heartbeat=0.5, missed_heartbeats=3)
    names = ("sleep", "count", "multiply")
    async with dist.LocalCluster(4, names=[*names, "stopped"], service="tests.distributed.held_service:service", limits=limits) as cluster:
        driver = cluster.driver
        found: dict[str, str] = {}
        held = [asyncio.ensure_future(driver.call(name, name, 2 * limits.silence)) for name in names]
        while not all(task.done() for task in held):
            report = await driver.why(timeout=0.1)
            found |= {loop.worker: loop.line for loop in report.held if loop.line}
            assert {loop.worker for loop in report.held} <= {*names}
        await asyncio.gather(*held)
        assert found.keys() == set(names) and all(line.startswith("distributed/held_service.py:") for line in found.values()), found
        assert lost(driver) == 0
        pid = await driver.call("stopped", "process")
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(WorkerLostError, match="nothing was heard from it"):
                await driver.call("stopped", "process")
        finally:
            os.kill(pid, signal.SIGCONT)

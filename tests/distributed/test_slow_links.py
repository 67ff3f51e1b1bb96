"""Links on which a large call takes longer than a peer may be silent: it arrives, small calls get between, and frames are short."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aiograd.distributed.rpc.codec import WireTensor
from aiograd.distributed.rpc.endpoint import Endpoint
from aiograd.distributed.rpc.frame_age import FrameAge, clock
from aiograd.distributed.rpc.frames import FrameKind
from aiograd.distributed.rpc.limits import Limits
from aiograd.distributed.rpc.outbox import Outgoing, SessionOutbox
from aiograd.distributed.rpc.pacing import FIRST, LONGEST, SMALLEST, FramePacer
from aiograd.errors import WorkerLostError
from aiograd.testing import Faults
from aiograd.testing.network.link import SimulatedLink
from tests.distributed.world import EndpointPair
from tests.support import run_by

ECHO = 1


class Slow(EndpointPair):
    """A link that takes so many bytes a second; `connections` counts those that "b" has accepted."""

    def __init__(self, rate: float, latency: float = 0.01) -> None:
        super().__init__(latency=(latency, latency), slow=rate)
        self.connections = 0

    async def open(self, name: str) -> Endpoint:
        endpoint = await super().open(name)
        accept = endpoint._accept

        def count(channel: Any) -> None:
            self.connections += 1
            accept(channel)

        if name == "b":
            endpoint.transport._accept = count  # type: ignore[attr-defined]
        return endpoint


at_rate = run_by(lambda main, rate: Slow(rate).run(main))


def numbers(count: int) -> WireTensor:
    return WireTensor(np.arange(count, dtype=np.float64), False)


@pytest.mark.parametrize("rate", [2e4, 1e5, 5e5, 7e5])
@at_rate
async def test_a_large_call_gets_through_over_one_connection(slow: Slow, rate: float) -> None:
    """It takes twenty times as long as a peer may be silent, both ways."""
    sent = numbers(int(rate * 15 / 8))
    answer = await slow.a.request("b", ECHO, sent, 300.0)
    assert answer.array.tobytes() == sent.array.tobytes()
    assert slow.connections == 1


@pytest.mark.parametrize("rate", [5e4, 5e5, 5e6])
@at_rate
async def test_no_frame_occupies_a_link_for_longer_than_a_quarter_of_a_second(slow: Slow, rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    carry = SimulatedLink.carry

    def look(self: SimulatedLink, carrier: Any, frame: bytes, now: float) -> None:
        sizes.append(len(frame))
        carry(self, carrier, frame, now)

    monkeypatch.setattr(SimulatedLink, "carry", look)
    await slow.a.request("b", ECHO, numbers(int(rate * 5 / 8)), 300.0)
    assert max(sizes) <= rate * LONGEST * 1.1 + 100
    assert max(sizes) >= min(rate * LONGEST * 0.2, Limits().frame_bytes), "nor are they much shorter than they may be"


@pytest.mark.parametrize("rate", [3.2e4, 1.25e5, 5e5])
@at_rate
async def test_small_calls_get_between_the_frames_of_a_large_one(slow: Slow, rate: float) -> None:
    """The large one is hardly slower for them."""
    loop = asyncio.get_running_loop()
    sent = numbers(int(rate * 10 / 8))
    began = loop.time()
    large = asyncio.ensure_future(slow.a.request("b", ECHO, sent, 300.0))
    waits: list[float] = []
    while not large.done():
        before = loop.time()
        assert await slow.a.request("b", ECHO, 1, 5.0) == 1
        waits.append(loop.time() - before)
        await asyncio.sleep(0.1)
    assert len(waits) > 10 and max(waits) < max(0.6, FIRST / rate + 0.1)
    assert loop.time() - began < 1.1 * 2 * sent.array.nbytes / rate


@pytest.mark.parametrize("rate", [3.2e4, 1.25e5])
@at_rate
async def test_small_calls_beside_large_ones_in_both_directions(slow: Slow, rate: float) -> None:
    """The link is busy both ways, and the answers to pings wait too."""
    loop = asyncio.get_running_loop()
    sent = numbers(int(rate * 10 / 8))
    began = loop.time()
    large = [asyncio.ensure_future(slow.a.request("b", ECHO, sent, 300.0)) for _ in range(3)]
    waits: list[float] = []
    while not all(task.done() for task in large):
        before = loop.time()
        assert await slow.a.request("b", ECHO, 1, 5.0) == 1
        waits.append(loop.time() - before)
        await asyncio.sleep(0.1)
    for task in large:
        assert task.result().array.tobytes() == sent.array.tobytes()
    assert np.percentile(waits, 95) < 0.6 and max(waits) < max(0.75, FIRST / rate + 0.1)
    assert loop.time() - began < 1.1 * 6 * sent.array.nbytes / rate
    assert slow.connections == 1


@run_by(lambda main: Slow(1e6).run(main))
async def test_a_link_that_becomes_slow_and_fast_again(slow: Slow) -> None:
    large = asyncio.ensure_future(slow.a.request("b", ECHO, numbers(2_000_000), 300.0))
    for rate in (1e5, 1e7, 3e4, None):
        await asyncio.sleep(3.0)
        slow.network.set_faults("a", "b", Faults(latency=(0.01, 0.01), slow=rate))
    assert (await large).array.size == 2_000_000
    assert slow.connections == 1


@run_by(lambda main: Slow(1e5).run(main))
async def test_a_peer_that_dies_in_the_middle_of_a_slow_answer_is_lost_in_time(slow: Slow) -> None:
    loop = asyncio.get_running_loop()
    asking = asyncio.ensure_future(slow.a.request("b", ECHO, numbers(100_000), 300.0))
    await asyncio.sleep(12.0)
    slow.network.cut("a", "b")
    began = loop.time()
    with pytest.raises(WorkerLostError, match="nothing was heard"):
        await asking
    assert 1.0 < loop.time() - began < 2.0


# -------------------------------------------------------------------- the rule


class Way:
    """A link with a queue that no sender sees; after a pause `burst` bytes pass it at once, and answers to pings arrive each `bunch` seconds."""

    def __init__(self, rate: float, latency: float, burst: int = 0, bunch: float = 0.0) -> None:
        self.rate, self.latency, self.burst, self.bunch = rate, latency, burst, bunch
        self.pacer = FramePacer(1 << 20, 0.0)
        self.now, self.busy_until = 0.0, -math.inf
        #: when the next frame may follow
        self.next_at = -math.inf
        #: answers to pings: when they come, and how long the pings waited
        self.pongs: deque[tuple[float, float]] = deque()
        self.age = FrameAge(latency, 0.0)
        self.waits: list[float] = []
        self.frames: list[int] = []

    def put(self, size: int) -> float:
        """When bytes that are sent now have arrived."""
        self.busy_until = max(self.busy_until, self.now - self.burst / self.rate) + size / self.rate
        return max(self.busy_until, self.now) + self.latency

    def send(self, size: int) -> None:
        self.waits.append(max(self.busy_until - self.now, 0.0))
        self.frames.append(size)
        self.put(size)
        if self.pacer.sent(size):
            self.ping()
        if self.pacer.rate:
            self.next_at = self.pacer.next_at(size, self.now)

    def ping(self) -> None:
        arrived = self.put(20)
        due = arrived + self.latency
        if self.bunch:
            due = math.ceil(due / self.bunch) * self.bunch
        self.pongs.append((due, self.age.of(clock(self.now, 0.0), arrived)))
        self.pacer.pinged(20, self.now)

    def until_pong(self) -> None:
        assert self.pongs, "the pacer is full and asks nothing: nothing would ever be sent again"
        due, waited = self.pongs.popleft()
        self.now = max(self.now, due)
        if self.pacer.ponged(waited, self.now):
            self.ping()

    def fill(self, seconds: float) -> float:
        """Send without a pause; returns the part of the link's time that was used."""
        until, began, sent = self.now + seconds, self.now, len(self.frames)
        while self.now < until:
            while self.pongs and self.pongs[0][0] <= self.now:
                self.until_pong()
            if self.pacer.is_full:
                self.until_pong()
            elif self.pacer.rate and self.now < self.next_at:
                self.now = min(self.next_at, self.pongs[0][0] if self.pongs else math.inf)
            else:
                assert len(self.pongs) < 1000, "more and more is sent, and nothing arrives"
                self.send(self.pacer.frame_bytes)
        return sum(self.frames[sent:]) / self.rate / (self.now - began)


@pytest.mark.parametrize("latency", [0.0, 0.01, 0.1, 0.4])
@pytest.mark.parametrize("rate", [4e3, 3.2e4, 1.25e5, 1e6])
def test_a_full_link_never_makes_a_frame_wait_for_long_and_never_runs_dry(rate: float, latency: float) -> None:
    """This holds after minutes without an idle moment, too."""
    way = Way(rate, latency)
    for minute in range(4):
        way.waits.clear()
        way.frames.clear()
        used = way.fill(60.0)
        least = 3.5 * SMALLEST / rate
        most = max(2.5 * LONGEST, 2 * latency + LONGEST, least)  # a whole window after a pause
        assert max(way.waits) < (most if minute else max(most, 4 * LONGEST, FIRST / rate)), (minute, max(way.waits))
        assert np.percentile(way.waits, 90) < max(1.2 * LONGEST, least)
        assert max(way.frames[len(way.frames) // 4 :]) <= max(rate * 0.25 * 1.1, SMALLEST)
        assert used > (0.85 if minute else 0.7), (minute, used)


@pytest.mark.parametrize("bunch", [0.3, 0.7])
@pytest.mark.parametrize("rate", [3.2e4, 1.25e5, 1e6])
def test_answers_that_arrive_together_let_no_link_idle_and_release_no_burst(rate: float, bunch: float) -> None:
    """They wait behind the frames of the other direction. Frames leave at the rate of the link, whenever the answers arrive."""
    way = Way(rate, 0.03, bunch=bunch)
    way.fill(10.0)
    way.waits.clear()
    assert way.fill(12.0) > 0.97
    assert max(way.waits) < max(1.5 * LONGEST, 3.5 * SMALLEST / rate)


@pytest.mark.parametrize("latency", [0.0001, 0.02])
def test_a_fast_link_gets_the_longest_frames_after_some_round_trips_and_few_pings(latency: float) -> None:
    way = Way(1e9, latency)
    way.fill(0.02 + 15 * latency)
    assert way.pacer.frame_bytes == 1 << 20
    way.fill(1.0)
    pings, sent = len(way.pongs), len(way.frames)
    way.fill(1.0)
    assert set(way.frames[sent:]) == {1 << 20} and len(way.frames) - sent > 900
    assert pings < 20


@pytest.mark.parametrize("rate", [3.2e4, 1.25e5])
def test_a_link_that_was_fast_and_is_slow_is_noticed_with_a_few_answers(rate: float) -> None:
    way = Way(1e9, 0.01)
    way.fill(1.0)
    way.rate, way.busy_until = rate, way.now
    way.send(way.pacer.frame_bytes)
    for _ in range(8):
        if not way.pongs:
            way.ping()
        way.until_pong()
        while not way.pacer.is_full and len(way.pongs) < 2:
            way.send(way.pacer.frame_bytes)
    assert way.pacer.frame_bytes <= max(rate * LONGEST, SMALLEST)


def test_small_messages_and_slow_answers_leave_a_fast_link_its_long_frames() -> None:
    way = Way(1e9, 0.0001)
    way.fill(1.0)
    while way.pongs:
        way.until_pong()
    for _ in range(10):  # a message each second
        way.pacer.sent(10_000)
        way.now += 1.0
    way.pacer.pinged(20, way.now)
    assert way.pacer.ponged(0.2, way.now + 0.2) is False, "the peer's loop was held up"
    assert way.pacer.frame_bytes == 1 << 20 and not way.pacer.is_full


@pytest.mark.parametrize(("size", "pause"), [(10_000, 1.0), (2_000, 0.2), (100, 0.01)])
def test_small_messages_do_not_open_the_window_of_a_slow_link(size: int, pause: float) -> None:
    """Bytes that were sent since the last ping arrive long before the next one, and tell nothing of the rate."""
    way = Way(1.25e5, 0.01)
    for _ in range(2000):
        way.send(size)
        way.now += pause
        while way.pongs:
            way.until_pong()
    way.fill(10.0)
    assert max(way.waits) < 2.5 * LONGEST


def test_some_bytes_that_pass_at_once_are_no_fast_link() -> None:
    way = Way(1.25e5, 0.001, burst=12_000)
    way.fill(10.0)
    assert max(way.waits) < 4 * LONGEST


def test_a_peer_that_was_held_up_for_long_is_no_slow_link() -> None:
    """Its answers say that all pings waited for a minute; what follows waits for seconds at most, until the next answer."""
    way = Way(1e7, 0.01)
    way.fill(1.0)
    while not way.pacer.is_full:
        way.send(way.pacer.frame_bytes)
    way.now += 60.0
    for _ in range(len(way.pongs)):
        way.pongs.popleft()
        if way.pacer.ponged(60.0, way.now):
            way.ping()
    way.busy_until = way.now
    assert way.pacer.rate == 0.0 or way.pacer.next_at(0, way.now) <= way.now
    way.fill(15.0)
    assert way.fill(1.0) > 0.9, "as fast as before"


@pytest.mark.parametrize("waited", [0.0, 1e-3, 0.5, 1e3, 4e6])
def test_answers_that_make_no_sense_stop_nothing(waited: float) -> None:
    """A peer may say of its pings what it likes."""
    way = Way(1.25e5, 0.01)
    way.age = SimpleNamespace(of=lambda milliseconds, arrived: waited)  # type: ignore[assignment]
    way.fill(20.0)
    sent = len(way.frames)
    way.fill(60.0)
    assert way.now < 100.0, "no pause is longer than the slowest link explains"
    assert len(way.frames) > sent + 5


def test_an_answer_to_no_ping_is_refused() -> None:
    assert FramePacer(1 << 20, 0.0).ponged(0.0, 1.0) is None


def test_an_outbox_whose_frames_change_loses_and_doubles_nothing() -> None:
    draw = Random(7)
    for _ in range(200):
        outbox = SessionOutbox(64)
        messages = [Outgoing(FrameKind.REQUEST, n + 1, [draw.randbytes(draw.randrange(1, 900))], Limits()) for n in range(6)]
        for message in messages[:5]:
            outbox.put(message)
        outbox.hold(messages[5], 1.0)
        found: dict[int, bytearray] = {message.id: bytearray() for message in messages}
        while outbox or outbox.held_until < math.inf:
            size = draw.choice((16, 64, 256, 1024))
            outbox.resize(size)
            if draw.random() < 0.2 or not outbox:
                outbox.release()
            taken = outbox.take()
            if taken is not None:
                message, offset, parts = taken
                body = b"".join(parts)
                assert offset == len(found[message.id]) and len(body) <= size
                found[message.id] += body
        assert all(bytes(found[message.id]) == bytes(message.buffers[0]) for message in messages)
        assert outbox.unsent == 0 and not any(message.queued for message in messages)

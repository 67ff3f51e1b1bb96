"""Links on which a large call takes longer than a peer may be silent: it arrives, small calls get between, and frames are short."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any

import numpy as np
import pytest

from aiograd.distributed.rpc.codec import WireTensor
from aiograd.distributed.rpc.endpoint import Endpoint
from aiograd.distributed.rpc.frames import FrameKind
from aiograd.distributed.rpc.identity import PeerIdentity
from aiograd.distributed.rpc.keyring import Keyring
from aiograd.distributed.rpc.limits import Limits
from aiograd.distributed.rpc.outbox import Outgoing, SessionOutbox
from aiograd.distributed.rpc.pacing import LONGEST, SMALLEST, FramePacer
from aiograd.errors import WorkerLostError
from aiograd.testing import Faults, SimulatedNetwork, simulated_run
from aiograd.testing.network.link import SimulatedLink

KEY = b"k" * 32
ECHO = 1


class Slow:
    """Endpoints "a" and "b", and what went over the link between them: (time, bytes) of each frame, by the sender."""

    def __init__(self, rate: float, latency: float = 0.01) -> None:
        self.network = SimulatedNetwork(0, faults=Faults(latency=(latency, latency), slow=rate))
        self.a: Endpoint
        self.connections = 0

    async def handle(self, peer: PeerIdentity, kind: int, value: Any, timeout: float) -> Any:
        return value

    async def _open(self, name: str) -> Endpoint:
        endpoint = Endpoint(name, transport=self.network.transport(name), keyring=Keyring(KEY), limits=Limits(), handler=self.handle)
        await endpoint.open("", 0)
        return endpoint

    async def _on_a(self, main: Callable[[Slow], Coroutine[Any, Any, None]]) -> None:
        self.a = await self._open("a")
        self.a.add_peer("b", "sim://b")
        await main(self)
        await self.a.aclose()

    async def _on_b(self) -> None:
        b = await self._open("b")
        accept = b._accept

        def count(channel: Any) -> None:
            self.connections += 1
            accept(channel)

        b.transport._accept = count  # type: ignore[attr-defined]

    def run(self, main: Callable[[Slow], Coroutine[Any, Any, None]]) -> None:
        async def world() -> None:
            await self.network.spawn("b", self._on_b())
            await self.network.spawn("a", self._on_a(main))

        simulated_run(world)


def numbers(count: int) -> WireTensor:
    return WireTensor(np.arange(count, dtype=np.float64), False)


@pytest.mark.parametrize("rate", [2e4, 1e5, 5e5, 7e5])
def test_a_large_call_gets_through_over_one_connection(rate: float) -> None:
    """It takes twenty times as long as a peer may be silent, both ways."""

    async def main(slow: Slow) -> None:
        sent = numbers(int(rate * 15 / 8))
        answer = await slow.a.request("b", ECHO, sent, 300.0)
        assert answer.array.tobytes() == sent.array.tobytes()
        assert slow.connections == 1

    Slow(rate).run(main)


@pytest.mark.parametrize("rate", [5e4, 5e5, 5e6])
def test_no_frame_occupies_a_link_for_longer_than_a_quarter_of_a_second(rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    carry = SimulatedLink.carry

    def look(self: SimulatedLink, carrier: Any, frame: bytes, now: float) -> None:
        sizes.append(len(frame))
        carry(self, carrier, frame, now)

    monkeypatch.setattr(SimulatedLink, "carry", look)

    async def main(slow: Slow) -> None:
        await slow.a.request("b", ECHO, numbers(int(rate * 5 / 8)), 300.0)
        assert max(sizes) <= rate * LONGEST * 1.1 + 100
        assert max(sizes) >= min(rate * LONGEST * 0.5, Limits().frame_bytes), "nor are they much shorter than they may be"

    Slow(rate).run(main)


@pytest.mark.parametrize("rate", [5e4, 5e5])
def test_small_calls_get_between_the_frames_of_a_large_one(rate: float) -> None:
    async def main(slow: Slow) -> None:
        loop = asyncio.get_running_loop()
        large = asyncio.ensure_future(slow.a.request("b", ECHO, numbers(int(rate * 10 / 8)), 300.0))
        waits: list[float] = []
        while not large.done():
            began = loop.time()
            assert await slow.a.request("b", ECHO, 1, 5.0) == 1
            waits.append(loop.time() - began)
            await asyncio.sleep(0.1)
        assert len(waits) > 10 and max(waits) < 5 * LONGEST

    Slow(rate).run(main)


def test_a_link_that_becomes_slow_and_fast_again() -> None:
    async def main(slow: Slow) -> None:
        large = asyncio.ensure_future(slow.a.request("b", ECHO, numbers(2_000_000), 300.0))
        for rate in (1e5, 1e7, 3e4, None):
            await asyncio.sleep(3.0)
            slow.network.set_faults("a", "b", Faults(latency=(0.01, 0.01), slow=rate))
        assert (await large).array.size == 2_000_000
        assert slow.connections == 1

    Slow(1e6).run(main)


def test_a_peer_that_dies_in_the_middle_of_a_slow_answer_is_lost_in_time() -> None:
    async def main(slow: Slow) -> None:
        loop = asyncio.get_running_loop()
        asking = asyncio.ensure_future(slow.a.request("b", ECHO, numbers(100_000), 300.0))
        await asyncio.sleep(12.0)
        slow.network.cut("a", "b")
        began = loop.time()
        with pytest.raises(WorkerLostError, match="nothing was heard"):
            await asking
        assert 1.0 < loop.time() - began < 2.0

    Slow(1e5).run(main)


# -------------------------------------------------------------------- the rule


@pytest.mark.parametrize("rate", [1e3, 2e4, 3e5, 1e7, math.inf])
def test_frames_of_a_pacer_come_to_what_its_link_carries(rate: float) -> None:
    """A link with a queue: what was taken leaves at the rate, and the pacer is asked after each frame and when there is room again."""
    pacer = FramePacer(1 << 20)
    now, queued = 0.0, 0.0
    draw = Random(1)
    for _ in range(400):
        size = pacer.frame_bytes
        queued += size
        if rate == math.inf:
            queued = 0.0
        pacer.note(size, math.ceil(queued), now)
        assert pacer.frame_bytes <= 2 * size
        while queued > pacer.frame_bytes:
            step = draw.uniform(0.0, 0.02) if rate > 1e5 else 0.1
            now += step
            queued = max(0.0, queued - rate * step)
            pacer.note(0, math.ceil(queued), now)
    expected = min(max(rate * LONGEST, SMALLEST), 1 << 20)
    assert 0.5 * expected <= pacer.frame_bytes <= 1.3 * expected


def test_a_pause_between_two_messages_is_no_slow_link() -> None:
    pacer = FramePacer(1 << 20)
    for _ in range(10):
        pacer.note(pacer.frame_bytes, 0, 0.0)
    assert pacer.frame_bytes == 1 << 20
    pacer.note(1 << 20, 1000, 1.0)
    pacer.note(1 << 20, 1 << 20, 1000.0)
    assert pacer.frame_bytes == 1 << 20


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

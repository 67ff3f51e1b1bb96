"""Links on which a large call takes longer than a peer may be silent: it arrives, small calls get between, and frames are short."""

from __future__ import annotations

import asyncio
import math
from random import Random
from typing import Any

import numpy as np
import pytest

from aiograd.distributed.rpc.codec import WireTensor
from aiograd.distributed.rpc.endpoint import Endpoint
from aiograd.distributed.rpc.frames import FrameKind
from aiograd.distributed.rpc.limits import Limits
from aiograd.distributed.rpc.outbox import Outgoing, SessionOutbox
from aiograd.distributed.rpc.pacing import LONGEST, SMALLEST, FramePacer
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
    assert max(sizes) >= min(rate * LONGEST * 0.5, Limits().frame_bytes), "nor are they much shorter than they may be"


@pytest.mark.parametrize("rate", [5e4, 5e5])
@at_rate
async def test_small_calls_get_between_the_frames_of_a_large_one(slow: Slow, rate: float) -> None:
    loop = asyncio.get_running_loop()
    large = asyncio.ensure_future(slow.a.request("b", ECHO, numbers(int(rate * 10 / 8)), 300.0))
    waits: list[float] = []
    while not large.done():
        began = loop.time()
        assert await slow.a.request("b", ECHO, 1, 5.0) == 1
        waits.append(loop.time() - began)
        await asyncio.sleep(0.1)
    assert len(waits) > 10 and max(waits) < 5 * LONGEST


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

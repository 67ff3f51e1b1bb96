"""Deadlines of requests that the network holds up: they end where they run when their callers have gone, and never before."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any

import pytest

from aiograd.distributed.rpc.frame_age import WINDOW, FrameAge, clock
from aiograd.distributed.rpc.identity import PeerIdentity
from aiograd.distributed.rpc.limits import Limits
from aiograd.errors import DeadlineError
from aiograd.testing import Faults
from tests.distributed.world import EndpointPair
from tests.support import run_by


class Held(EndpointPair):
    """Endpoints "a" and "b"; `ended` has when handlers of "b" ended: by themselves or because they were cancelled, and what they were told."""

    limits = Limits(missed_heartbeats=100)

    def __init__(self) -> None:
        super().__init__(latency=(0.01, 0.01))
        self.ended: list[tuple[str, float]] = []
        self.told: list[float] = []

    async def handle(self, peer: PeerIdentity, kind: int, value: Any, timeout: float) -> Any:
        loop = asyncio.get_running_loop()
        self.told.append(timeout)
        try:
            await asyncio.sleep(value if isinstance(value, float) else 0.0)
        except asyncio.CancelledError:
            self.ended.append(("cancelled", loop.time()))
            raise
        self.ended.append(("done", loop.time()))
        return None

    def run(self, main: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
        async def connected(world: Held) -> None:
            await world.a.request("b", 1, 0, 5.0)
            await main(world)

        super().run(connected)


in_held = run_by(lambda main: Held().run(main))


@pytest.mark.parametrize("held", [0.0, 0.5, 1.0, 1.7])
@in_held
async def test_a_request_that_the_network_holds_up_ends_when_its_caller_has_gone(world: Held, held: float) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    world.network.cut("a", "b", both=False)
    loop.call_later(held, world.network.heal, "a", "b")
    with pytest.raises(DeadlineError):
        await world.a.request("b", 1, 100.0, 2.0)
    await asyncio.sleep(5.0)
    ((how, when),) = world.ended[1:]
    assert how == "cancelled" and began + 1.5 < when <= began + 2.0 + 0.03


@in_held
async def test_a_request_that_comes_after_its_caller_has_gone_does_not_run(world: Held) -> None:
    loop = asyncio.get_running_loop()
    world.network.cut("a", "b", both=False)
    with pytest.raises(DeadlineError):
        await world.a.request("b", 1, 100.0, 2.0)
    loop.call_later(0.5, world.network.heal, "a", "b")
    await asyncio.sleep(5.0)
    assert len(world.told) == 1
    await world.a.request("b", 1, 0.1, 2.0)
    assert world.ended[-1][0] == "done" and world.told[-1] > 1.9, "those that come in time have all of their time"


@in_held
async def test_a_deadline_is_never_before_that_of_the_caller(world: Held) -> None:
    """Links with jitter: what a handler is told it has left, and what its answer takes on the way, is no less than what its caller waits."""
    loop = asyncio.get_running_loop()
    for jitter in (0.0, 0.02, 0.2):
        world.network.set_faults("a", "b", Faults(latency=(0.01, 0.3), jitter=jitter))
        for _ in range(30):
            began = loop.time()
            with pytest.raises(DeadlineError):
                await world.a.request("b", 1, 100.0, 3.0)
            await asyncio.sleep(1.0)
            how, when = world.ended[-1]
            assert how == "cancelled" and began + 3.0 - 0.06 <= when


@pytest.mark.parametrize("drift", [-2e-4, 0.0, 2e-4])
def test_ages_of_frames_when_clocks_differ_and_drift(drift: float) -> None:
    """Hours of heartbeats, most of which are quick: the age of each frame is what it took longer, give or take the drift of a window."""
    draw = Random(3)
    way, zero = 0.02, 1234.5
    age = FrameAge(math.inf, 1000.0)
    now, sent = 2000.0, 2000.0
    for _ in range(20_000):
        sent = max(sent, now) + 0.5
        extra = draw.choice((0.0, 0.0, 0.001, 0.3, 1.8))
        now = sent + way + extra
        found = age.of(clock(sent * (1 + drift), zero * (1 + drift)), now)
        assert abs(found - extra) <= 2 * WINDOW * abs(drift) + 0.0021
    assert age.of(0, now) == 0.0


def test_a_clock_of_a_frame_begins_again_after_seven_weeks() -> None:
    age = FrameAge(math.inf, 0.0)
    for step in range(200):
        sent = step * 86_400.0
        assert age.of(clock(sent, 0.0), sent + 7.0) <= 0.002
        assert abs(age.of(clock(sent + 1.0, 0.0), sent + 10.0) - 2.0) <= 0.002


def test_the_first_frame_of_a_channel_may_be_held_up_as_well() -> None:
    age = FrameAge(100.02, 100.02)
    assert abs(age.of(clock(100.5, 100.0), 102.3) - 1.78) <= 0.002

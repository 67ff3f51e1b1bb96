"""The simulated network: what it carries, what it breaks, and that a seed repeats it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from aiograd.distributed import failpoints
from aiograd.distributed.failpoints import reach
from aiograd.distributed.rpc.transport import Channel
from aiograd.errors import ArgumentError, LoopError
from aiograd.testing import Faults, HostKilledError, SimulatedNetwork, simulated_run
from aiograd.testing.network.faults import FAULT_KINDS
from aiograd.testing.virtual_clock import VirtualClock
from tests.support import assert_awaiting_raises, assert_raises

ROOT = Path(__file__).resolve().parents[2]


class End:
    """One end of a channel, and what has come out of it."""

    def __init__(self, channel: Channel, on_frame: Callable[[bytes], object] | None = None) -> None:
        self.channel = channel
        self.frames: list[bytes] = []
        self.times: list[float] = []
        self.closed: list[BaseException | None] = []
        self.closed_at = -1.0
        self.writable = 0
        self._also = on_frame
        channel.attach(self._frame, self._closed, self._writable)

    def _frame(self, frame: bytes | memoryview) -> None:
        self.frames.append(bytes(frame))
        self.times.append(asyncio.get_running_loop().time())
        if self._also is not None:
            self._also(bytes(frame))

    def _closed(self, error: BaseException | None) -> None:
        self.closed.append(error)
        self.closed_at = asyncio.get_running_loop().time()

    def _writable(self) -> None:
        self.writable += 1


async def _pair(network: SimulatedNetwork, a: str = "a", b: str = "b") -> tuple[End, End]:
    """A connection from host a to host b; b listens if it does not yet."""
    accepted: asyncio.Future[Channel] = asyncio.get_running_loop().create_future()
    url = await network.transport(b).listen("", 0, lambda channel: accepted.done() or accepted.set_result(channel))
    channel = await network.transport(a).connect(url, 5)
    return End(channel), End(await accepted)


def _numbers(count: int) -> list[bytes]:
    return [b"%04d" % number for number in range(count)]


# ---- what a channel does


async def test_frames_pass_on_any_loop() -> None:
    network = SimulatedNetwork()
    client, server = await _pair(network)
    frames = _numbers(50)
    for frame in frames:
        assert client.channel.send(memoryview(frame))
        server.channel.send(bytearray(frame))
    for _ in range(5):
        await asyncio.sleep(0)
    assert client.frames == server.frames == frames
    assert client.channel.remote == "sim://b" and server.channel.remote == "sim://a"
    assert client.channel.certified_names is None
    client.channel.close()
    client.channel.close()
    client.channel.send(b"lost")
    for _ in range(5):
        await asyncio.sleep(0)
    assert (client.closed, server.closed) == ([None], [None]) and len(server.frames) == 50
    assert network.open_channels == 0
    assert_raises(LoopError, "only code on a SimulatedLoop", network.kill, "a")


async def test_a_sent_buffer_may_be_used_again(virtual_clock: VirtualClock) -> None:
    client, server = await _pair(SimulatedNetwork())
    buffer = bytearray(b"one")
    client.channel.send(buffer)
    buffer[:] = b"two"
    client.channel.send(memoryview(buffer))
    buffer[:] = b"bad"
    await asyncio.sleep(1)
    assert server.frames == [b"one", b"two"]


async def test_what_came_before_attach_is_not_lost_and_a_channel_can_be_handed_on(virtual_clock: VirtualClock) -> None:
    network = SimulatedNetwork(faults=Faults(latency=(0.1, 0.1)))
    accepted: list[Channel] = []
    url = await network.transport("b").listen("", 0, accepted.append)
    client = End(await network.transport("a").connect(url, 1))
    client.channel.send(b"early")
    await asyncio.sleep(1)
    first = End(accepted[0])
    assert first.frames == [b"early"]
    second = End(accepted[0])
    client.channel.send(b"late")
    await asyncio.sleep(1)
    client.channel.close()
    await asyncio.sleep(1)
    third = End(accepted[0])
    await asyncio.sleep(1)
    assert (first.frames, second.frames, third.frames) == ([b"early"], [b"late"], [])
    assert (first.closed, second.closed, third.closed) == ([], [None], []), "told exactly once"


async def test_a_channel_closed_before_attach_says_so_then(virtual_clock: VirtualClock) -> None:
    network = SimulatedNetwork()
    accepted: list[Channel] = []
    url = await network.transport("b").listen("", 0, accepted.append)
    (await network.transport("a").connect(url, 1)).close()
    await asyncio.sleep(1)
    server = End(accepted[0])
    await asyncio.sleep(1)
    assert server.closed == [None]


async def test_a_full_channel_asks_to_stop_and_says_when_to_go_on(virtual_clock: VirtualClock) -> None:
    network = SimulatedNetwork(faults=Faults(slow=1000), room=3000)
    client, server = await _pair(network)
    assert [client.channel.send(bytes(1000)) for _ in range(4)] == [True, True, False, False]
    await asyncio.sleep(1.5)
    assert client.writable == 0
    await asyncio.sleep(2)
    assert client.writable == 1 and server.times == [1, 2, 3], "a thousand bytes a second"
    assert client.channel.send(bytes(1000))


async def test_links_have_latencies_of_their_own_and_jitter_per_frame(virtual_clock: VirtualClock) -> None:
    network = SimulatedNetwork(3, faults=Faults(latency=(0.1, 0.5), jitter=0.01))
    client, server = await _pair(network)
    start = asyncio.get_running_loop().time()
    for _ in range(200):
        client.channel.send(b"")
        server.channel.send(b"")
        await asyncio.sleep(0.1)  # so that none waits for the one before
    await asyncio.sleep(2)
    took = [[time - start - 0.1 * number for number, time in enumerate(end.times)] for end in (server, client)]
    there, back = map(min, took)
    assert 0.1 <= there <= 0.5 and 0.1 <= back <= 0.5 and abs(there - back) > 1e-3
    assert 0.005 < sum(took[0]) / 200 - there < 0.02


# ---- connecting


async def test_connecting_to_nobody_is_refused(virtual_clock: VirtualClock) -> None:
    network = SimulatedNetwork(faults=Faults(latency=(0.1, 0.1)))
    transport = network.transport("a")
    await assert_awaiting_raises(ConnectionRefusedError, "no process listens at b", transport.connect("sim://b", 5))
    assert asyncio.get_running_loop().time() == 0.2
    client, server = await _pair(network)
    listener = network.find("b").listener  # type: ignore[union-attr]
    assert listener is not None
    await assert_awaiting_raises(OSError, "listens already", network.transport("b").listen("", 0, print))
    await listener.aclose()
    await listener.aclose()
    await asyncio.sleep(1)
    assert (client.closed, server.closed) == ([None], [None])
    await assert_awaiting_raises(ConnectionRefusedError, None, transport.connect("sim://b", 5))
    await assert_awaiting_raises(ArgumentError, "URLs like sim://w0", transport.connect("http://b", 5))
    await _pair(network)
    network.stop("b")
    assert network.open_channels == 1
    await assert_awaiting_raises(ConnectionRefusedError, None, transport.connect("sim://b", 5))
    assert network.open_channels == 0


async def test_connecting_over_a_cut_hangs_until_the_timeout_or_the_end_of_the_cut(virtual_clock: VirtualClock) -> None:
    loop = asyncio.get_running_loop()
    network = SimulatedNetwork(faults=Faults(latency=(0.1, 0.1)))
    await network.transport("b").listen("", 0, lambda channel: None)
    transport = network.transport("a")
    for both in (False, True):
        network.cut("b", "a", both=both)
        start = loop.time()
        await assert_awaiting_raises(TimeoutError, "a did not reach b within 3 s", transport.connect("sim://b", 3))
        assert loop.time() - start == 3
    loop.call_later(1, network.heal, "a", "b")
    start = loop.time()
    channel = await transport.connect("sim://b", 3)
    assert loop.time() - start == pytest.approx(1.2)
    channel.close()
    await asyncio.sleep(1)
    assert network.open_channels == 0


@pytest.mark.parametrize("order", ["fifo", "permuted"])
def test_a_cancelled_connect_leaves_no_channel(order: Any) -> None:
    async def main() -> int:
        network = SimulatedNetwork(faults=Faults(latency=(0.1, 0.1)))
        await network.transport("b").listen("", 0, End)
        await asyncio.gather(network.transport("a").connect("sim://b", 0.2), return_exceptions=True)
        await asyncio.sleep(1)
        return network.open_channels

    def cancelled(step: int) -> int:
        networks: list[SimulatedNetwork] = []

        async def outer() -> int:
            network = SimulatedNetwork(faults=Faults(latency=(0.1, 0.1)))
            networks.append(network)
            await network.transport("b").listen("", 0, End)
            task = asyncio.create_task(network.transport("a").connect("sim://b", 5))
            asyncio.get_running_loop().at_step(step, task.cancel)  # type: ignore[attr-defined]
            result = (await asyncio.gather(task, return_exceptions=True))[0]
            if not isinstance(result, BaseException):
                result.close()
            await asyncio.sleep(1)
            return network.open_channels

        return simulated_run(outer, seed=step, order=order).value

    assert [cancelled(step) for step in range(3, 16)] == [0] * 13
    simulated_run(main, seed=0, order=order)


def test_who_dies_while_connecting_leaves_no_channel() -> None:
    async def main(kill_after: float) -> int:
        network = SimulatedNetwork(faults=Faults(latency=(0.1, 0.1)))
        await network.transport("b").listen("", 0, End)
        network.spawn("a", network.transport("a").connect("sim://b", 5))
        await asyncio.sleep(kill_after)
        network.kill("a")
        await asyncio.sleep(5)
        return network.open_channels

    assert [simulated_run(main, seconds).value for seconds in (0.05, 0.15, 0.25)] == [0, 0, 0]


async def test_a_reset_can_hit_the_connecting_itself(virtual_clock: VirtualClock) -> None:
    network = SimulatedNetwork(faults=Faults(reset=1.0))
    await network.transport("b").listen("", 0, print)
    await assert_awaiting_raises(ConnectionResetError, None, network.transport("a").connect("sim://b", 1))


# ---- faults


def _delivered(faults: Faults, seed: int = 0, frames: int = 60) -> tuple[End, list[bytes], dict[str, int]]:
    async def main() -> tuple[End, list[bytes], dict[str, int]]:
        network = SimulatedNetwork(seed)
        client, server = await _pair(network)
        network.set_faults("a", "b", faults)
        for number in range(frames):
            client.channel.send(b"%04d" % number)
            await asyncio.sleep(0.001)
        await asyncio.sleep(1)
        statistics = network.statistics()["a", "b"]
        assert (statistics.sent, statistics.bytes) == (frames, 4 * frames) or client.closed
        assert statistics.delivered == len(server.frames)
        return client, server.frames, dict(statistics.faults)

    return simulated_run(main).value


def test_each_fault_does_what_it_says_at_its_rate() -> None:
    sent = _numbers(60)
    struck: Counter[str] = Counter()
    for seed in range(80):
        kind = ("reset", "stall")[seed % 2]
        client, got, hits = _delivered(Faults(**{kind: 0.02}, latency=(0.0, 0.005)), seed)  # type: ignore[arg-type]
        is_hit = hits.get(kind, 0)
        assert got == sent[: len(got)] and (len(got) < 60 or not is_hit or kind == "reset")
        assert [type(error) for error in client.closed] == [ConnectionResetError] * (is_hit if kind == "reset" else 0)
        struck[kind] += bool(is_hit)
    assert 15 < struck["reset"] < 40 and 15 < struck["stall"] < 40


def test_of_what_is_on_its_way_over_a_connection_that_breaks_an_unknown_part_arrives() -> None:
    async def main(seed: int) -> int:
        network = SimulatedNetwork(seed, faults=Faults(latency=(0.1, 0.1)))
        client, server = await _pair(network)
        for frame in _numbers(5):
            client.channel.send(frame)
            server.channel.send(frame)
        network.reset("a", "b")
        assert network.statistics()["a", "b"].delivered == 0
        await asyncio.sleep(1)
        assert server.frames == _numbers(5)[: len(server.frames)] and client.frames == []
        assert [type(error) for error in (*client.closed, *server.closed)] == [ConnectionResetError] * 2
        return len(server.frames)

    assert {simulated_run(main, seed).value for seed in range(60)} == set(range(6))


async def test_a_connection_that_goes_silent_stays_open_and_fills_up(virtual_clock: VirtualClock) -> None:
    network = SimulatedNetwork(faults=Faults(latency=(0.01, 0.01)), room=3000)
    client, server = await _pair(network)
    client.channel.send(b"before")
    network.force("a", "b", "stall")
    assert [client.channel.send(bytes(1000)) for _ in range(4)] == [True, True, False, False]
    server.channel.send(b"the other way")
    await asyncio.sleep(60)
    assert server.frames == [b"before"] and client.frames == [b"the other way"]
    assert client.closed == server.closed == [] and client.writable == 0
    other = (await _pair(network, "a", "b2"))[0]
    assert other.channel.send(b"another connection") and network.open_channels == 4
    client.channel.close()
    await asyncio.sleep(60)
    assert client.closed == [None] and server.closed == [], "nobody is told"
    server.channel.close()
    await asyncio.sleep(1)
    assert network.open_channels == 2


@pytest.mark.parametrize("kind", FAULT_KINDS)
async def test_a_fault_can_be_forced(virtual_clock: VirtualClock, kind: Any) -> None:
    network = SimulatedNetwork(faults=Faults(latency=(0.01, 0.01)))
    client, server = await _pair(network)
    client.channel.send(b"before")
    await asyncio.sleep(1)
    network.force("a", "b", kind, count=2)
    assert_raises(ArgumentError, "expected one of reset, stall", network.force, "a", "b", "explode")
    for number in range(4):
        client.channel.send(b"%d" % number * 10)
    await asyncio.sleep(1)
    assert network.statistics()["a", "b"].faults == {kind: 1 if kind == "reset" else 2}
    assert server.frames[0] == b"before" and server.frames[1:] in ([], [b"0" * 10])
    assert [type(error) for error in (client.closed + server.closed)] == ([ConnectionResetError] * 2 if kind == "reset" else [])


@pytest.mark.parametrize("order", ["fifo", "permuted"])
def test_a_beginning_of_what_was_sent_arrives_whatever_happens(order: Any) -> None:
    async def main(seed: int) -> str:
        random = Random(seed)
        network = SimulatedNetwork(seed, faults=Faults.drawn(random).without("stall"))
        try:
            client, server = await _pair(network)
        except ConnectionResetError:
            return "reset"
        sent: list[bytes] = []
        for number in range(40):
            sent.append(b"%d" % number * random.choice((1, 100)))
            client.channel.send(sent[-1])
            if random.random() < 0.1:
                random.choice((network.cut, network.heal))("a", "b")
            if random.random() < 0.05:
                network.freeze("b", random.random())
            await asyncio.sleep(random.choice((0, 0.001, 0.1)))
        network.heal_all()
        await asyncio.sleep(60)
        assert server.frames == sent[: len(server.frames)]
        if server.frames != sent:
            assert client.closed and server.closed
        client.channel.close()
        await asyncio.sleep(60)
        assert len(client.closed) == len(server.closed) == 1 and network.open_channels == 0
        return "whole" if server.frames == sent else "reset"

    outcomes = Counter(simulated_run(main, seed, seed=seed, order=order).value for seed in range(100))
    assert outcomes["whole"] > 50 and outcomes["reset"] > 5


def test_drawn_faults_differ_from_seed_to_seed() -> None:
    drawn = [Faults.drawn(Random(seed)) for seed in range(400)]
    assert drawn[:5] == [Faults.drawn(Random(seed)) for seed in range(5)] and len(set(drawn)) == 400
    for kind in (*FAULT_KINDS, "slow"):
        assert 50 < sum(kind in faults.kinds for faults in drawn) < 300
    assert 60 < sum(not faults.kinds for faults in drawn) < 160
    mixed = next(faults for faults in drawn if {"stall", "slow"} <= set(faults.kinds))
    assert {"stall", "slow"} - set(mixed.without("stall", "slow").kinds) == {"stall", "slow"}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"stall": 1.5}, "probability"),
        ({"reset": -0.1}, "probability"),
        ({"latency": (0.2, 0.1)}, "range of seconds"),
        ({"jitter": -1}, "at least 0"),
        ({"slow": 0}, "bytes per second"),
        ({"latency": 3}, "range of seconds"),
        ({"loss": "a"}, "probability"),
    ],
)
def test_faults_that_cannot_be(wrong: dict[str, Any], message: str) -> None:
    assert_raises(ArgumentError, message, lambda: Faults(**wrong))
    assert_raises(ArgumentError, "expected one of", lambda: Faults().without("latency"))


@pytest.mark.parametrize("wrong", [{"faults": 3}, {"seed": None}, {"seed": 1.5}])
def test_networks_that_cannot_be(wrong: dict[str, Any]) -> None:
    assert_raises(ArgumentError, f"{next(iter(wrong))}=", lambda: SimulatedNetwork(**wrong))


def test_faults_of_another_type_are_refused_where_they_are_given() -> None:
    network: Any = SimulatedNetwork(faults=lambda source, target: 3)  # type: ignore[arg-type, return-value]
    assert_raises(ArgumentError, "expected Faults", lambda: network.link("a", "b"))
    assert_raises(ArgumentError, "expected Faults", lambda: SimulatedNetwork().set_faults("a", "b", 3))  # type: ignore[arg-type]


# ---- cuts


async def test_a_cut_is_silent_and_one_way_if_asked(virtual_clock: VirtualClock) -> None:
    network = SimulatedNetwork(faults=Faults(latency=(0.1, 0.1)))
    client, server = await _pair(network)
    client.channel.send(b"on its way when the link is cut")
    await asyncio.sleep(0.05)
    network.cut("a", "b", both=False)
    client.channel.send(b"into the cut")
    server.channel.send(b"back")
    await asyncio.sleep(10)
    assert server.frames == [] and client.frames == [b"back"] and client.closed == server.closed == []
    assert network.statistics()["a", "b"].faults == {"cut": 1}
    network.heal("a", "b")
    client.channel.send(b"after")
    await asyncio.sleep(0.09)
    assert server.frames == []
    await asyncio.sleep(1)
    assert server.frames == [b"on its way when the link is cut", b"into the cut", b"after"]
    client.channel.close()
    await asyncio.sleep(0.05)
    network.cut("a", "b")
    await asyncio.sleep(5)
    assert client.closed == [None] and server.closed == [], "the end cannot be told over a cut"
    network.clog("a")
    network.heal("a", "b")
    await asyncio.sleep(5)
    assert server.closed == []
    network.heal_all()
    await asyncio.sleep(1)
    assert server.closed == [None]


async def test_partitions_and_clogs(virtual_clock: VirtualClock) -> None:
    network = SimulatedNetwork()
    names = ("a", "b", "c", "d")
    ends = {(a, b): await _pair(network, a, b) for a, b in (("a", "b"), ("a", "c"), ("b", "d"))}
    asked = 0
    for a, b in (("a", "b"), ("a", "c"), ("b", "d")):
        assert network.find(a) and network.find(b)

    async def passes() -> str:
        nonlocal asked
        asked += 1
        for client, _ in ends.values():
            client.channel.send(b"%d" % asked)
        await asyncio.sleep(1)
        return " ".join(a + b for (a, b), (_, server) in ends.items() if server.frames[-1:] == [b"%d" % asked])

    assert await passes() == "ab ac bd"
    network.partition(["a"], ["b", "c"])
    assert await passes() == "bd"
    network.heal_all()
    assert await passes() == "ab ac bd"
    network.clog("b")
    network.cut("a", "b")
    assert await passes() == "ac"
    network.unclog("b")
    assert await passes() == "ac bd", "the cut is there still"
    network.heal("a", "b")
    swizzle = asyncio.create_task(network.swizzle_clog(names, seconds=5))
    seen = [await passes() for _ in range(12)]
    assert swizzle.done() and len(set(seen)) > 1 and seen[-1] == "ab ac bd"


async def test_reset_breaks_all_connections_between_two_hosts(virtual_clock: VirtualClock) -> None:
    network = SimulatedNetwork()
    ends = [*await _pair(network, "a", "b"), *await _pair(network, "b", "a")]
    other = await _pair(network, "a", "c")
    network.reset("a", "b")
    await asyncio.sleep(1)
    assert [[type(error) for error in end.closed] for end in ends] == [[ConnectionResetError]] * 4
    assert other[0].closed == []


async def test_calm_ends_all_faults(virtual_clock: VirtualClock) -> None:
    network = SimulatedNetwork(faults=Faults(stall=1.0, latency=(0.1, 0.1)))
    client, server = await _pair(network)
    network.force("a", "b", "stall")
    network.clog("a")
    network.cut("a", "b")
    network.calm()
    client.channel.send(b"through")
    await asyncio.sleep(1)
    assert server.frames == [b"through"]
    assert (await _pair(network, "c", "d"))[0].channel.send(b"") is True


# ---- hosts


async def test_code_knows_its_host_and_passes_it_on(virtual_clock: VirtualClock) -> None:
    network = SimulatedNetwork()
    seen: list[str | None] = []

    async def look() -> str | None:
        asyncio.get_running_loop().call_soon(lambda: seen.append(network.current))
        return await asyncio.create_task(asyncio.sleep(0, network.current))

    with network.host("w0"):
        inside = asyncio.create_task(look())
        accepted: list[Channel] = []
        await network.transport("w1").listen("", 0, lambda channel: seen.append(network.current))
    assert await inside == "w0" and network.current is None
    assert await network.spawn("w1", look()) == "w1"
    client = await network.transport("w0").connect("sim://w1", 1)
    await asyncio.sleep(0)
    assert seen == ["w0", "w1", "w1"], "accept runs on the host that listens"
    End(client, lambda _: seen.append(network.current))
    assert accepted == []


async def test_spawn_hands_over_outcomes(virtual_clock: VirtualClock) -> None:
    network = SimulatedNetwork()

    async def fails() -> None:
        raise ValueError("mine")

    await assert_awaiting_raises(ValueError, "mine", network.spawn("a", fails()))
    stopped: list[bool] = []

    async def waits() -> None:
        try:
            await asyncio.sleep(9)
        except asyncio.CancelledError:
            stopped.append(True)
            raise

    outcome = network.spawn("a", waits())
    await asyncio.sleep(1)
    outcome.cancel()
    await asyncio.sleep(1)
    assert stopped == [True]
    network.spawn("a", waits())
    killed = network.spawn("a", waits())
    await asyncio.sleep(1)
    network.kill("a")
    await assert_awaiting_raises(HostKilledError, "host a was killed", killed)
    assert stopped == [True] and asyncio.get_running_loop().time() == 3
    assert_raises(ArgumentError, "restart", lambda: network.spawn("a", waits()))
    assert_raises(ArgumentError, "no host 'x'", network.kill, "x")


def test_a_crash_closes_connections_and_loses_some_of_what_was_on_its_way() -> None:
    async def main(seed: int) -> list[bytes]:
        network = SimulatedNetwork(seed, faults=Faults(latency=(0.01, 0.01)))
        client, server = await _pair(network)
        for frame in _numbers(6):
            server.channel.send(frame)
        client.channel.send(b"for the dead")
        network.kill("b")
        server.channel.send(b"from the dead")
        start = asyncio.get_running_loop().time()
        await asyncio.sleep(5)
        assert [type(error) for error in client.closed] == [ConnectionResetError] and client.closed_at - start == pytest.approx(0.01)
        assert server.frames == [] and server.closed == [] and network.open_channels == 0
        await assert_awaiting_raises(ConnectionRefusedError, None, network.transport("a").connect("sim://b", 5))
        return client.frames

    got = [simulated_run(main, seed).value for seed in range(30)]
    sent = _numbers(6)
    assert all(frames == sent[: len(frames)] for frames in got)
    assert len(set(map(len, got))) > 3


async def test_after_a_silent_death_nothing_closes_until_the_name_is_taken(virtual_clock: VirtualClock) -> None:
    network = SimulatedNetwork(faults=Faults(latency=(0.01, 0.01)))
    client, _ = await _pair(network)
    network.kill("b", silent=True)
    for _ in range(5):
        client.channel.send(b"hello?")
        await asyncio.sleep(10)
    await assert_awaiting_raises(TimeoutError, None, network.transport("a").connect("sim://b", 5))
    assert_raises(ArgumentError, "restart", network.transport, "b")
    assert client.closed == []
    network.restart("b")
    await asyncio.sleep(10)
    assert client.closed == []
    client.channel.send(b"hello?")
    await asyncio.sleep(1)
    assert [type(error) for error in client.closed] == [ConnectionResetError]
    again, server = await _pair(network)
    again.channel.send(b"new")
    await asyncio.sleep(1)
    assert server.frames == [b"new"]


def test_incarnations_have_entropy_of_their_own() -> None:
    async def main() -> list[bytes]:
        network = SimulatedNetwork(1)
        drawn = [network.transport(name).entropy(16) for name in ("a", "b")]
        network.restart("a")
        return [*drawn, network.transport("a").entropy(16), network.transport("a").entropy(16)]

    drawn = simulated_run(main).value
    assert len(set(drawn)) == 4 and {len(bytes_) for bytes_ in drawn} == {16}
    assert simulated_run(main).value == drawn


def test_a_killed_host_runs_nothing_and_a_restarted_one_starts_anew() -> None:
    async def main() -> None:
        network = SimulatedNetwork()
        ran: list[str] = []

        async def serve(name: str) -> None:
            def accept(channel: Channel) -> None:
                End(channel, lambda frame: (ran.append(name), channel.send(name.encode() + frame)))

            await network.transport("b").listen("", 0, accept)
            try:
                await asyncio.sleep(1e6)
            finally:
                ran.append(f"finally {name}")

        network.spawn("b", serve("first"))
        await asyncio.sleep(1)
        client = End(await network.transport("a").connect("sim://b", 1))
        client.channel.send(b"1")
        await asyncio.sleep(1)
        network.restart("b")
        network.spawn("b", serve("second"))
        await asyncio.sleep(1)
        assert len(client.closed) == 1
        client = End(await network.transport("a").connect("sim://b", 1))
        client.channel.send(b"2")
        await asyncio.sleep(1)
        assert client.frames == [b"second2"] and ran == ["first", "second"]

    simulated_run(main)


async def test_a_frozen_host_answers_later(virtual_clock: VirtualClock) -> None:
    network = SimulatedNetwork(faults=Faults(latency=(0.001, 0.001)))
    client, server = await _pair(network)
    network.freeze("b", 1)
    network.freeze("b", 5)
    network.freeze("b", 2)
    for frame in _numbers(3):
        client.channel.send(frame)
        await asyncio.sleep(0.5)
    assert server.frames == []
    more = await network.transport("a").connect("sim://b", 1)  # the system answers, not the process
    await asyncio.sleep(5)
    assert server.frames == _numbers(3) and server.times == [5.002] * 3
    more.close()


# ---- protocol points


def test_a_host_is_killed_at_a_protocol_point() -> None:
    async def main() -> None:
        network = SimulatedNetwork()
        done: list[str] = []

        async def work(name: str) -> None:
            for number in range(3):
                await asyncio.sleep(1)
                reach("bwd.after_accumulate")
                done.append(f"{name}{number}")

        killing = network.at("bwd.after_accumulate", "a", "kill", hit=2)
        calls: list[float] = []
        network.at("bwd.after_accumulate", "b", lambda: calls.append(asyncio.get_running_loop().time()), hit=3)
        assert_raises(ArgumentError, "'kill silently'", network.at, "bwd.after_accumulate", "b", "explode")
        assert_raises(ArgumentError, "no failpoint 'nowhere'", network.at, "nowhere", "b", "kill")
        killed = network.spawn("a", work("a"))
        await network.spawn("b", work("b"))
        await assert_awaiting_raises(HostKilledError, None, killed)
        assert done == ["a0", "b0", "b1", "b2"] and calls == [3] and killing.has_fired

    simulated_run(main)
    assert not failpoints._listeners, "the end of the run disarms"


async def test_coverage_counts_what_met_what(virtual_clock: VirtualClock) -> None:
    network = SimulatedNetwork()
    network.observe_points()
    client, _ = await _pair(network)
    other, _ = await _pair(network, "a", "c")
    request = b"AGRD\x01\x01" + bytes(10)
    response = b"AGRD\x01\x02" + bytes(10)

    async def sends(point: str, end: End, frame: bytes, kind: Any) -> None:
        reach(point)
        network.force("a", end.channel.remote[-1], kind)
        end.channel.send(frame)

    await network.spawn("a", sends("fwd.mid_send", client, request, "stall"))
    await network.spawn("a", sends("fwd.mid_send", client, response, "stall"))
    await network.spawn("a", sends("fwd.after_send", other, b"encrypted", "reset"))
    network.kill("a")
    assert network.coverage == {("stall", 1): 1, ("stall", 2): 1, ("reset", None): 1, ("kill", None): 1}
    assert network.point_coverage == {("fwd.mid_send", "stall"): 2, ("fwd.after_send", "reset"): 1, ("fwd.after_send", "kill"): 1}


# ---- repeating a run


async def _busy(seed: int) -> tuple[str, str]:
    """A run with a bit of everything."""
    network = SimulatedNetwork(seed, faults=Faults.drawn(Random(seed)))
    names = ["a", "b", "c"]

    async def host(name: str) -> None:
        transport = network.transport(name)

        def accept(channel: Channel) -> None:
            End(channel, lambda frame: channel.send(frame[:40] + transport.entropy(2)))

        await transport.listen("", 0, accept)
        for turn in range(6):
            await asyncio.sleep(0.1)
            for peer in names:
                try:
                    End(await transport.connect(f"sim://{peer}", 0.3)).channel.send(transport.entropy(turn))
                except OSError:
                    continue

    for name in names:
        network.spawn(name, host(name))
    swizzle = asyncio.create_task(network.swizzle_clog(seconds=1))
    await asyncio.sleep(0.4)
    network.kill("c")
    await asyncio.sleep(2)
    network.restart("c")
    again = network.spawn("c", host("c"))
    await asyncio.sleep(5)
    await swizzle
    assert again.done()
    return network.trace_hash, repr(sorted(network.statistics().items()))


def _outcomes(seeds: range) -> list[tuple[str, str, str]]:
    outcomes = []
    for seed in seeds:
        run = simulated_run(_busy, seed, seed=seed, order="permuted" if seed % 2 else "fifo")
        outcomes.append((*run.value, run.trace_hash))
    return outcomes


def test_a_seed_repeats_its_run() -> None:
    first = _outcomes(range(20))
    assert first == _outcomes(range(20))
    assert len({hashed for hashed, *_ in first}) == 20


@pytest.mark.proc
def test_a_seed_repeats_its_run_in_other_processes() -> None:
    script = "from tests.testing.test_network import _outcomes; print(_outcomes(range(4)))"
    printed = set()
    for hash_seed in ("0", "1", "random"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
        run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True, cwd=ROOT)
        printed.add(run.stdout.strip())
    assert printed == {repr(_outcomes(range(4)))}


@pytest.mark.parametrize(
    "use",
    [
        lambda network, name: network.reset("left", name), lambda network, name: network.reset(name, "left"),
        lambda network, name: network.cut("left", name), lambda network, name: network.cut(name, "left", both=False),
        lambda network, name: network.heal("left", name), lambda network, name: network.partition(["left"], ["other", name]),
        lambda network, name: network.set_faults("left", name, Faults()), lambda network, name: network.force("left", name, "reset"),
        lambda network, name: network.clog(name), lambda network, name: network.freeze(name, 1.0),
        lambda network, name: network.at("bwd.after_accumulate", name, "kill"),
    ],
)  # fmt: skip
def test_a_host_that_there_is_not_is_told_with_the_nearest_one(use: Callable[[SimulatedNetwork, str], Any]) -> None:
    async def main() -> None:
        network = SimulatedNetwork()
        for name in ("left", "right", "other"):
            network.transport(name)
        with pytest.raises(ArgumentError, match=r"no host 'rigth' in this network: did you mean 'right'\?; there are: left, right, other\. spawn"):
            use(network, "rigth")
        use(network, "right")

    simulated_run(main)


def test_links_are_set_up_before_there_are_hosts() -> None:
    async def main() -> None:
        network = SimulatedNetwork()
        network.cut("a", "b")
        with pytest.raises(TimeoutError):
            await _pair(network)

    simulated_run(main)


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf"), "1", None, True])
def test_a_host_is_frozen_for_seconds(seconds: Any) -> None:
    async def main() -> None:
        network = SimulatedNetwork()
        network.transport("a")
        with pytest.raises(ArgumentError, match=r"freeze\('a', .*\): expected seconds, a number of at least 0"):
            network.freeze("a", seconds)

    simulated_run(main)


def test_one_network_serves_one_loop() -> None:
    network = SimulatedNetwork()

    async def main() -> None:
        await network.transport("a").listen("", 0, print)

    simulated_run(main)
    assert_raises(LoopError, "one network for each run", simulated_run, main)
    assert_raises(LoopError, "inside a running event loop", network.reset, "a", "b")
    assert_raises(ArgumentError, "host name", network.transport, "a/b")


# ---- the fixture


@pytest.mark.simulated_network(seed=5, faults=Faults(latency=(1.0, 1.0)))
async def test_the_fixture_gives_a_network_on_the_virtual_clock(simulated_network: SimulatedNetwork) -> None:
    client, server = await _pair(simulated_network)
    client.channel.send(b"hello")
    await asyncio.sleep(2)
    assert server.frames == [b"hello"] and server.times == [3.0] and simulated_network.seed == 5
    simulated_network.kill("a")

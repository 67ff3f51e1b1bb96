"""Lines that the connections of a host share, and packets that are lost, on the simulated network."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiograd.distributed.rpc.transport import Channel
from aiograd.errors import ArgumentError
from aiograd.testing import AccessLink, Faults, SimulatedNetwork, simulated_run
from aiograd.testing.network.access import TURN
from aiograd.testing.virtual_clock import VirtualClock
from tests.support import assert_raises
from tests.testing.test_network import End, _busy, _pair

LATENCY = Faults(latency=(0.05, 0.05))
#: 1 Mbit/s up and 10 Mbit/s down
BEFORE = "fb1fa7fe78446e1c292cbf76a965e120"  # seed 7 of `_busy`, before there were lines and losses
HOME = AccessLink(up=125_000, down=1_250_000)


async def _connections(network: SimulatedNetwork, pairs: Iterable[tuple[str, str]]) -> dict[tuple[str, str], tuple[End, End]]:
    """A connection for each pair of hosts."""
    servers: dict[tuple[str, str], End] = {}
    clients = {}
    for source, target in dict.fromkeys(pairs):
        if network.find(target) is None or network.find(target).listener is None:  # type: ignore[union-attr]
            await network.transport(target).listen("", 0, lambda channel, to=target: servers.update({(channel.remote[6:], to): End(channel)}))
        clients[source, target] = End(await network.transport(source).connect(f"sim://{target}", 5))
    return {pair: (client, servers[pair]) for pair, client in clients.items()}


async def _arrivals(network: SimulatedNetwork, sends: Sequence[tuple[str, str, int]], seconds: float = 1000) -> list[list[float]]:
    """Send frames (source, target, size) at one time, over one connection per pair of hosts: the times of their arrivals, by pair."""
    connections = await _connections(network, [(source, target) for source, target, _ in sends])
    start = asyncio.get_running_loop().time()
    for source, target, size in sends:
        connections[source, target][0].channel.send(bytes(size))
    await asyncio.sleep(seconds)
    return [[time - start for time in server.times] for _, server in connections.values()]


async def test_a_lone_connection_has_the_whole_line(virtual_clock: VirtualClock) -> None:
    network = SimulatedNetwork(access={"home": HOME}, faults=LATENCY)
    up, down = await _arrivals(network, [("home", "hub", 125_000), ("hub", "home", 1_250_000)])
    assert up == [pytest.approx(1.05)], "the way up is 1 Mbit/s"
    assert down == [pytest.approx(1.05)], "the way down is 10 Mbit/s, and does not wait for the way up"


async def test_chunks_pass_both_lines_at_once(virtual_clock: VirtualClock) -> None:
    network = SimulatedNetwork(access=lambda name: HOME if name != "hub" else AccessLink(2_500_000, 2_500_000), faults=LATENCY)
    times = (await _arrivals(network, [("home", "hub", 250_000)]))[0]
    assert times == [pytest.approx(2.05, abs=0.01)], "a frame is not held back at the second line until its last byte has come"
    times = (await _arrivals(network, [("left", "right", 250_000)]))[0]
    assert times == [pytest.approx(2.05, abs=0.01)]


async def test_connections_share_a_line_alike(virtual_clock: VirtualClock) -> None:
    network = SimulatedNetwork(access={"hub": AccessLink(125_000, 250_000)})
    first, second, third = await _arrivals(network, [("hub", "a", 125_000), ("hub", "b", 62_500), ("c", "hub", 250_000)])
    assert second == [pytest.approx(1, abs=0.1)], "half of the line, as long as two use it"
    assert first == [pytest.approx(1.5)], "and the whole of it afterwards"
    assert third == [pytest.approx(1)], "what comes in has a line of its own"


async def test_a_small_message_does_not_wait_for_a_large_one_of_another_connection(virtual_clock: VirtualClock) -> None:
    network = SimulatedNetwork(access={"hub": AccessLink(125_000, 125_000)})
    large, small = await _arrivals(network, [("hub", "a", 1 << 20), ("hub", "b", 100)])
    assert small[0] < 2.5 * TURN and large[0] == pytest.approx(((1 << 20) + 100) / 125_000)
    large, other, small = await _arrivals(network, [("a", "hub", 1 << 20), ("b", "hub", 1 << 20), ("c", "hub", 100)])
    assert small[0] < 3.5 * TURN and large[0] > 16


async def test_frames_of_a_connection_stay_in_order(virtual_clock: VirtualClock) -> None:
    network = SimulatedNetwork(5, access=lambda name: HOME, faults=Faults(latency=(0.01, 0.05), jitter=0.3, loss=0.1))
    client, server = await _pair(network)
    frames = [number.to_bytes(2) * Random(number).randrange(1, 5000) for number in range(60)]
    for frame in frames:
        client.channel.send(frame)
    await asyncio.sleep(1000)
    assert server.frames == frames and server.times == sorted(server.times)


@given(
    rate=st.floats(1_000, 1e7),
    sends=st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 20_000), st.floats(0, 2)), min_size=1, max_size=25),
    is_up=st.booleans(),
    latency=st.sampled_from([0.0, 0.25]),
)
@settings(max_examples=100, deadline=None)
def test_a_line_carries_its_rate_and_never_more(rate: float, sends: list[tuple[str, int, float]], is_up: bool, latency: float) -> None:
    """Over any window no more arrives than the rate times the window and the frames that were on their way when it began, one per connection."""
    line = AccessLink(rate, math.inf) if is_up else AccessLink(math.inf, rate)

    async def main() -> list[tuple[float, int]]:
        network = SimulatedNetwork(access={"hub": line}, faults=Faults(latency=(latency, latency)))
        pairs = {name: ("hub", name) if is_up else (name, "hub") for name, *_ in sends}
        connections = await _connections(network, pairs.values())
        loop = asyncio.get_running_loop()
        start = loop.time() + latency
        for name, size, at in sends:
            loop.call_later(at, connections[pairs[name]][0].channel.send, bytes(size))
        await asyncio.sleep(1000)
        return sorted((time - start, len(frame)) for _, end in connections.values() for time, frame in zip(end.times, end.frames, strict=True))

    arrived = simulated_run(main, seed=1).value
    assert sorted(size for _, size in arrived) == sorted(size for _, size, _ in sends)
    under_way = sum(max(size for other, size, _ in sends if other == name) for name in {name for name, *_ in sends})
    for first, (since, _) in enumerate([(0.0, 0), *arrived]):
        carried = 0
        for until, size in arrived[first:]:
            carried += size
            assert carried <= rate * (until - since) * (1 + 1e-9) + 1e-3 + (under_way if first else 0)
    idle_at = 0.0
    for at, size in sorted((at, size) for _, size, at in sends):
        idle_at = max(idle_at, at) + size / rate
    assert arrived[-1][0] == pytest.approx(idle_at), "and it is never idle while there is something to carry"


async def test_nothing_enters_a_line_while_the_link_is_cut(virtual_clock: VirtualClock) -> None:
    network = SimulatedNetwork(access={"a": HOME})
    client, server = await _pair(network)
    client.channel.send(bytes(125_000))
    await asyncio.sleep(0.5)
    network.cut("a", "b")
    client.channel.send(b"later")
    await asyncio.sleep(10)
    heard = server.channel.heard_at
    assert server.frames == [] and heard <= 0.5, "nothing was heard over the cut"
    network.heal("a", "b")
    await asyncio.sleep(5)
    assert server.frames == [bytes(125_000), b"later"] and 10.9 < server.times[-1] < 11.2


async def test_each_chunk_is_a_sign_of_life(virtual_clock: VirtualClock) -> None:
    network = SimulatedNetwork(access={"a": HOME}, faults=LATENCY)
    client, server = await _pair(network)
    start = virtual_clock.time()
    client.channel.send(bytes(1 << 20))
    await asyncio.sleep(4)
    assert virtual_clock.time() - server.channel.heard_at <= 1.2 * TURN and server.frames == []
    await asyncio.sleep(10)
    assert server.channel.heard_at - start == pytest.approx((1 << 20) / 125_000 + 0.05)


@pytest.mark.parametrize("silent", [False, True])
async def test_bytes_for_a_connection_that_is_closed_leave_the_line_to_others(virtual_clock: VirtualClock, silent: bool) -> None:
    network = SimulatedNetwork(access={"a": HOME})
    client, _ = await _pair(network, "a", "b")
    client.channel.send(bytes(1 << 20))
    await asyncio.sleep(1)
    network.kill("b", silent=silent)
    if silent:
        client.channel.close()
    await asyncio.sleep(0.1)
    times = (await _arrivals(network, [("a", "c", 125_000)]))[0]
    assert times == [pytest.approx(1, abs=2 * TURN)]


async def test_frames_of_a_killed_host_arrive_in_part_and_then_the_end(virtual_clock: VirtualClock) -> None:
    arrived = set()
    for seed in range(8):
        network = SimulatedNetwork(seed, access={"a": HOME})
        client, server = await _pair(network)
        for _ in range(4):
            client.channel.send(bytes(50_000))
        await asyncio.sleep(0.5)
        network.kill("a")
        await asyncio.sleep(10)
        assert len(server.closed) == 1, seed
        assert isinstance(server.closed[0], ConnectionResetError)
        assert server.closed_at >= max(server.times, default=0)
        arrived.add(len(server.frames))
    assert 1 in arrived and max(arrived) == 4


# ---- loss


async def test_a_lost_packet_stalls_its_connection(virtual_clock: VirtualClock) -> None:
    for latency, pause in ((0.01, 0.2), (0.5, 1.0)):
        network = SimulatedNetwork(faults=Faults(latency=(latency, latency), loss=1.0))
        times = await _arrivals(network, [("a", "b", 10), ("a", "b", 1460), ("a", "b", 1461), ("c", "b", 1)])
        assert times[0] == pytest.approx([latency + pause, latency + 2 * pause, latency + 4 * pause]), "the second packet of the third frame, too"
        assert times[1] == pytest.approx([latency + pause]), "other connections do not wait"
        assert network.statistics()["a", "b"].faults == {"loss": 3}


@pytest.mark.parametrize("access", [None, {"a": HOME}])
async def test_so_many_packets_are_lost(virtual_clock: VirtualClock, access: dict[str, AccessLink] | None) -> None:
    network = SimulatedNetwork(3, faults=Faults(loss=0.05), access=access)
    times = (await _arrivals(network, [("a", "b", 1460)] * 2000, 10_000))[0]
    assert times[-1] == pytest.approx(0.05 * 2000 * 0.2, rel=0.3), "the stalls add up; a line works meanwhile"


@pytest.mark.parametrize("faults", [Faults(), Faults(latency=(0.001, 0.05), jitter=0.01, reset=0.1, stall=0.05, slow=1e4)])
def test_no_loss_and_no_lines_change_no_bit_of_a_schedule(faults: Faults) -> None:
    def outcome(**options: object) -> tuple[object, ...]:
        async def main() -> tuple[str, str]:
            network = SimulatedNetwork(2, faults=faults, **options)  # type: ignore[arg-type]
            client, server = await _pair(network)
            for number in range(100):
                client.channel.send(bytes(100 * number))
                server.channel.send(bytes(number))
                await asyncio.sleep(0.01)
            await asyncio.sleep(5)
            return network.trace_hash, repr((network.statistics(), server.times, client.times))

        run = simulated_run(main, seed=4)
        return run.value, run.trace_hash, run.steps

    assert outcome() == outcome(access={}) == outcome(access=lambda name: None) == outcome(access={"elsewhere": HOME})
    assert outcome() != outcome(access={"a": HOME}), "the schedule can be told apart"


def test_the_schedule_of_before() -> None:
    """A fixed seed gives the trace that it gave before there were lines and losses."""
    run = simulated_run(_busy, 7, seed=7)
    assert run.value[0] == BEFORE


def test_a_seed_repeats_a_run_over_lines() -> None:
    async def main(seed: int) -> tuple[str, str]:
        network = SimulatedNetwork(seed, faults=Faults(latency=(0.01, 0.1), jitter=0.01, loss=0.05), access=lambda name: AccessLink(5e4, 1e5))
        sends = [(source, target, 7000) for source in "abc" for target in "def"]
        arrivals = await _arrivals(network, sends)
        return network.trace_hash, repr(arrivals)

    outcomes = [[simulated_run(main, seed, seed=seed, order="permuted").value for seed in range(4)] for _ in range(2)]
    assert outcomes[0] == outcomes[1] and len(set(outcomes[0])) == 4


async def test_a_thousand_hosts_send_at_once(virtual_clock: VirtualClock) -> None:
    network = SimulatedNetwork(access=lambda name: AccessLink(125e6, 125e6) if name == "hub" else HOME, faults=LATENCY)
    server: list[End] = []
    await network.transport("hub").listen("", 0, lambda channel: server.append(End(channel)))
    clients: list[Channel] = [await network.transport(f"w{number}").connect("sim://hub", 5) for number in range(1000)]
    start = virtual_clock.time()
    for client in clients:
        client.send(bytes(21_000))
    await asyncio.sleep(5)
    times = [end.times[0] - start for end in server]
    assert len(times) == 1000 and 21_000 / 125_000 + 0.05 < max(times) < 0.5


# ---- bad input


@pytest.mark.parametrize("rate", [0, -1, math.nan, "fast", None, True])
def test_rates_are_numbers_above_0(rate: object) -> None:
    assert_raises(ArgumentError, r"AccessLink\(up=.*bytes per second", AccessLink, rate, 1)
    assert_raises(ArgumentError, r"AccessLink\(down=", AccessLink, 1, rate)


def test_lines_are_access_links() -> None:
    assert_raises(ArgumentError, "expected a mapping of hosts", SimulatedNetwork, access=HOME)
    assert_raises(ArgumentError, "host 'a' is 1000", SimulatedNetwork, access={"a": 1000})
    network = SimulatedNetwork(access=lambda name: 5)  # type: ignore[arg-type, return-value]
    assert_raises(ArgumentError, "host 'a' is 5; expected an AccessLink", network.link, "a", "b")
    assert_raises(ArgumentError, "loss=1.5", Faults, loss=1.5)
    assert Faults(loss=0.5).without("loss") == Faults() and Faults(loss=0.5).kinds == ("loss",) and not Faults(loss=0.5).is_plain


async def test_one_way_may_have_no_bound(virtual_clock: VirtualClock) -> None:
    network = SimulatedNetwork(access={"a": AccessLink(1000, math.inf)})
    up, down = await _arrivals(network, [("a", "b", 3000), ("b", "a", 1 << 19)])
    assert up == [pytest.approx(3)] and down == [pytest.approx(0, abs=1e-9)]

"""Workers whose own loop was held up: their peers have given them up meanwhile, and the next request is answered all the same, once."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

import aiograd as ag
from aiograd import distributed as dist
from aiograd.distributed.autograd import discovery
from aiograd.distributed.rpc.codec import encode
from aiograd.distributed.rpc.effects import NOT_KNOWN, Deliver
from aiograd.distributed.rpc.identity import PeerIdentity
from aiograd.distributed.rpc.limits import Limits
from aiograd.errors import DeadlineError, DistributedError, NotExposedError, WorkerLostError
from aiograd.testing import Faults, SimulatedNetwork, simulated_run
from aiograd.testing.virtual_clock import VirtualClock
from tests.distributed.memory import MemoryChannel, Switchboard
from tests.distributed.workers import SECRET, leaf, values, view
from tests.distributed.world import World, turns
from tests.support import run_by

SILENCE = Limits().silence


class Two:
    """Workers "a", whose code the test is, and "b", on hosts of their own; `ran` has what functions of "b" were called with."""

    def __init__(self, seed: int = 0) -> None:
        self.network = SimulatedNetwork(seed, faults=Faults(latency=(0.001, 0.005)))
        self.ran: list[Any] = []
        self.cancelled: list[Any] = []
        self.b: dist.Worker
        self.service = dist.Service()
        self.service.function("note")(self._note)
        self.service.function("work")(self._work)
        self.service.function("scale")(self._scale)
        self.weight = leaf(3)

    async def _note(self, what: int) -> int:
        self.ran.append(what)
        return what

    async def _work(self, what: int, seconds: float) -> int:
        self.ran.append(what)
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self.cancelled.append(what)
            raise
        return what

    async def _scale(self, x: Any) -> Any:
        return x * self.weight

    async def _serve(self, opened: asyncio.Future[None]) -> None:
        self.b = dist.Worker("b", service=self.service, secret=SECRET, transport=self.network.transport("b"))
        async with self.b:
            self.b.add_peer("a", "sim://a")
            opened.set_result(None)
            await asyncio.Event().wait()

    async def hold_up(self, seconds: float, *names: str) -> None:
        """Stop hosts, this one among them, as a debugger does; returns when it goes on."""
        for name in names or ("a",):
            self.network.freeze(name, seconds)
        await asyncio.sleep(0)

    def later(self, seconds: float, action: Callable[[], object]) -> None:
        """Do something although "a" is held up."""
        self.network.loop.call_later(seconds, action, context=self.outside)

    def network_breaks(self) -> None:
        """Frames on their way are lost."""
        self.network.reset("a", "b")
        self.network.heal("a", "b")

    def run(self, main: Callable[[Two, dist.Worker], Coroutine[Any, Any, None]]) -> None:
        async def on_a() -> None:
            async with dist.Worker("a", secret=SECRET, transport=self.network.transport("a"), peers={"b": "sim://b"}) as a:
                assert await a.call("b", "note", 0) == 0
                await main(self, a)

        async def world() -> None:
            self.outside = contextvars.copy_context()
            opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            serving = self.network.spawn("b", self._serve(opened))
            await opened
            await self.network.spawn("a", on_a())
            serving.cancel()
            await asyncio.wait([serving])
            assert max(Counter(self.ran).values()) == 1, f"ran twice: {self.ran}"

        simulated_run(world)


in_two = run_by(lambda main: Two().run(main), given=2)


def now() -> float:
    return asyncio.get_running_loop().time()


@pytest.mark.parametrize("seconds", [0.3, 1.2, 1.6, 2.0, 10.0, 100.0])
@pytest.mark.parametrize("pause", [0.0, 0.4])
@in_two
async def test_the_next_request_succeeds(two: Two, a: dist.Worker, seconds: float, pause: float) -> None:
    await asyncio.sleep(pause)
    await two.hold_up(seconds)
    began = now()
    assert await a.call("b", "note", 1) == 1
    assert now() - began < 1.0
    assert two.ran == [0, 1]


@pytest.mark.parametrize("seconds", [2.0, 10.0, 100.0])
@in_two
async def test_many_next_requests_succeed_however_soon_they_are_made(two: Two, a: dist.Worker, seconds: float) -> None:
    calls = [asyncio.ensure_future(a.call("b", "note", n)) for n in range(1, 4)]  # sent after the hold-up, as the first thing
    await two.hold_up(seconds)
    calls += [asyncio.ensure_future(a.call("b", "note", n)) for n in range(4, 50)]
    await asyncio.sleep(0.01)
    calls.append(asyncio.ensure_future(a.call("b", "note", 50)))
    assert await asyncio.gather(*calls) == list(range(1, 51))


@pytest.mark.parametrize("seconds", [2.0, 10.0])
@in_two
async def test_it_succeeds_where_the_peer_remembers_nothing(two: Two, a: dist.Worker, seconds: float) -> None:
    """The link is tested before anything is sent on it, so that nobody needs to say what became of it."""
    two.later(seconds - 0.1, two.b.endpoint._ended.clear)
    await two.hold_up(seconds)
    assert await a.call("b", "note", 1) == 1


@pytest.mark.parametrize("seconds", [2.0, 10.0, 100.0])
@pytest.mark.parametrize("is_silent", [False, True])
@in_two
async def test_a_peer_that_is_dead_is_lost_in_time(two: Two, a: dist.Worker, seconds: float, is_silent: bool) -> None:
    two.later(1.0, lambda: two.network.kill("b", silent=is_silent))
    await two.hold_up(seconds)
    began = now()
    with pytest.raises(WorkerLostError):
        await a.call("b", "note", 1)
    assert now() - began < SILENCE + 0.6


@pytest.mark.parametrize("seconds", [2.0, 10.0, 100.0])
@in_two
async def test_both_sides_are_held_up(two: Two, a: dist.Worker, seconds: float) -> None:
    working = asyncio.ensure_future(a.call("b", "work", 1, 0.5, timeout=300))
    await asyncio.sleep(0.1)
    await two.hold_up(seconds, "a", "b")
    assert await a.call("b", "note", 2) == 2
    assert await working == 1 and not two.cancelled, "nobody has given up anybody"


@pytest.mark.parametrize("seconds", [2.0, 10.0, 100.0])
async def test_the_clock_of_all_jumps(world: World, virtual_clock: VirtualClock, seconds: float) -> None:
    a, b = await world.pair()
    assert await a.ask("b", "echo", 0) == 0
    waiting = asyncio.ensure_future(a.ask("b", "gate", 1, timeout=300.0))
    await turns()
    asyncio.get_running_loop().advance(seconds)  # type: ignore[attr-defined]
    assert await a.ask("b", "echo", 2) == 2 and await b.ask("a", "echo", 3) == 3
    b.gate.set()
    assert await waiting == 1
    assert not a.lost and not b.lost and world.board.dials == 1


@pytest.mark.parametrize("seconds", [1.0, 1.5, 2.0, 10.0])
async def test_the_clock_jumps_while_a_peer_is_dialled(virtual_clock: VirtualClock, seconds: float) -> None:
    """As when thirty workers make their first call together and something expensive is done for each."""

    async with World() as world:
        a, b = await world.pair()
        world.board.latency = 0.01
        asking = asyncio.ensure_future(a.ask("b", "echo", 1))
        await asyncio.sleep(0.015)
        asyncio.get_running_loop().advance(seconds)  # type: ignore[attr-defined]
        assert await asking == 1 and b.ran == [1]


async def test_a_loop_that_is_always_late_finds_out_that_a_peer_is_gone(virtual_clock: VirtualClock) -> None:
    async with World(replace(Limits(), heartbeat=0.5)) as world:
        a, b = await world.pair()
        assert await a.ask("b", "echo", 0) == 0
        loop = asyncio.get_running_loop()
        world.board.hold()
        world.board.unreachable.add(b.transport.url)
        asking = asyncio.ensure_future(a.ask("b", "echo", 1))
        began = loop.time()
        while not asking.done() and loop.time() < began + 20:
            await asyncio.sleep(0.2)
            loop.advance(0.9)  # type: ignore[attr-defined]
        with pytest.raises(WorkerLostError):
            await asyncio.wait_for(asking, 0)
        world.board.let_go()


# -------------------------------------------------------------------- what was under way


@pytest.mark.parametrize("seconds", [2.0, 10.0, 50.0])
@in_two
async def test_a_request_that_never_arrived_is_made_again(two: Two, a: dist.Worker, seconds: float) -> None:
    two.network.cut("a", "b", both=False)
    calling = asyncio.ensure_future(a.call("b", "note", 1, timeout=300))
    large = asyncio.ensure_future(a.call("b", "scale", ag.ones((700_000,)), timeout=300))
    await asyncio.sleep(0.1)
    two.later(seconds - 0.2, lambda: two.network.heal("a", "b"))
    await two.hold_up(seconds)
    assert await calling == 1 and two.ran == [0, 1]
    assert float((await large).sum().numpy()) == 3 * 700_000


@pytest.mark.parametrize("seconds", [2.0, 10.0, 50.0])
@in_two
async def test_a_request_whose_answer_was_lost_is_not_made_again(two: Two, a: dist.Worker, seconds: float) -> None:
    two.network.cut("b", "a", both=False)
    calling = asyncio.ensure_future(a.call("b", "note", 1, timeout=300))
    await asyncio.sleep(0.1)
    assert two.ran == [0, 1]
    two.later(seconds - 0.2, two.network_breaks)
    await two.hold_up(seconds)
    with pytest.raises(WorkerLostError, match="it has given up the session"):
        await calling
    assert await a.call("b", "note", 2) == 2 and two.ran == [0, 1, 2]


@in_two
async def test_what_ran_when_the_peer_gave_up_is_lost_and_what_came_too_late_goes_on(two: Two, a: dist.Worker) -> None:
    working = asyncio.ensure_future(a.call("b", "work", 1, 30.0))
    await asyncio.sleep(0.1)
    two.network.cut("a", "b", both=False)
    late = [asyncio.ensure_future(a.call("b", "note", n)) for n in (2, 3)]
    await asyncio.sleep(0.1)
    late[1].cancel()
    two.later(4.0, lambda: two.network.heal("a", "b"))
    await two.hold_up(5.0)
    with pytest.raises(WorkerLostError):
        await working
    assert two.cancelled == [1], "the peer has ended it"
    assert await late[0] == 2 and two.ran == [0, 1, 2]


@in_two
async def test_a_deadline_holds_while_the_peer_is_asked_what_it_ran(two: Two, a: dist.Worker) -> None:
    two.network.cut("a", "b", both=False)
    calling = asyncio.ensure_future(a.call("b", "note", 1, timeout=5.0))
    await asyncio.sleep(0.1)
    two.later(3.0, lambda: two.network.heal("a", "b"))
    await two.hold_up(20.0)
    began = now()
    with pytest.raises(DeadlineError):
        await calling
    assert now() - began < 0.5 and two.ran == [0]


async def test_a_first_request_is_not_run_twice_where_its_answer_was_lost(world: World, virtual_clock: VirtualClock) -> None:
    """The dialler has never heard of the session, but the peer has run something for it."""
    a, b = await world.pair()
    asking = asyncio.ensure_future(a.ask("b", "echo", 1, timeout=300.0))
    world.board.passes = lambda channel, frame: channel.side == "a" or channel.sent == 1  # only the handshake comes back
    await asyncio.sleep(0.1)
    assert b.ran == [1]
    (peer,) = b.endpoint._peers.values()
    peer.lose(peer.sessions[0], "it is a test")
    await asyncio.sleep(0)
    world.board.passes = lambda channel, frame: True
    world.board.reset()
    with pytest.raises(WorkerLostError):
        await asking
    assert b.ran == [1]
    assert await a.ask("b", "echo", 2) == 2


@pytest.mark.parametrize("predicted", [0, discovery.PREDICTED_NODES], ids=["asked", "predicted"])
@pytest.mark.parametrize("seconds", [0.5, 2.0, 10.0])
@in_two
async def test_in_the_middle_of_a_pass(two: Two, a: dist.Worker, seconds: float, predicted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is asked what takes part has not prepared yet and gives the pass up; one that has the gradients waits for the decision."""
    monkeypatch.setattr(discovery, "PREDICTED_NODES", predicted)
    x = leaf(2)
    async with a.context() as ctx:
        loss = (await a.call("b", "scale", x)).sum()
        running = asyncio.ensure_future(ctx.backward(loss, timeout=100))
        await asyncio.sleep(0.003)
        await two.hold_up(seconds)
        if seconds < SILENCE or predicted:
            await running
            assert values(ctx.grads[x]) == [3] and values(view(two.b, ctx).grads[two.weight]) == [2]
        else:
            with pytest.raises(DistributedError):
                await running
            assert x not in ctx.grads and two.weight not in ctx.grads
    async with a.context() as ctx:
        await ctx.backward((await a.call("b", "scale", x)).sum())
        assert values(ctx.grads[x]) == [3]


@pytest.mark.parametrize("pause", [0.0, 0.1, 0.4])
@pytest.mark.parametrize("seconds", [1.3, 1.5, 1.6, 2.0, 3.0, 10.0, 100.0])
@in_two
async def test_the_first_pass_in_a_context_that_was_open_when_the_loop_was_held_up(two: Two, a: dist.Worker, seconds: float, pause: float) -> None:
    x = leaf(2)
    async with a.context() as ctx:
        loss = (await a.call("b", "scale", x)).sum()
        await asyncio.sleep(pause)
        await two.hold_up(seconds)
        await ctx.backward(loss)
        assert values(ctx.grads[x]) == [3] and values(view(two.b, ctx).grads[two.weight]) == [2]


@pytest.mark.parametrize("held", ["a", "b"])
@pytest.mark.parametrize("seconds", [0.5, 0.9, 1.1, 1.2])
@in_two
async def test_nothing_is_lost_where_a_loop_is_held_up_for_less_than_five_sixths_of_the_silence(
    two: Two, a: dist.Worker, seconds: float, held: str
) -> None:
    """Whenever it begins while a call runs, since the last heartbeat or just before the next one."""
    for number in range(1, 21):
        working = asyncio.ensure_future(a.call("b", "work", number, 3.0))
        await asyncio.sleep(0.03 * number)
        two.network.freeze(held, seconds)
        assert await working == number
    assert not two.cancelled and not a.endpoint.statistics().lost and not two.b.endpoint.statistics().lost


@pytest.mark.parametrize("seconds", [1.0, 1.2])
@in_two
async def test_a_pass_goes_on_where_the_loop_of_the_other_worker_is_held_up(two: Two, a: dist.Worker, seconds: float) -> None:
    x = leaf(2)
    for number in range(6):
        async with a.context() as ctx:
            loss = (await a.call("b", "scale", x)).sum()
            await asyncio.sleep(0.3)
            two.later(0.0005 * number, lambda: two.network.freeze("b", seconds))
            await ctx.backward(loss)
            assert values(ctx.grads[x]) == [3] and values(view(two.b, ctx).grads[two.weight]) == [2]


@in_two
async def test_a_pass_that_was_under_way_when_the_loop_was_held_up_is_told_of_the_loss(two: Two, a: dist.Worker) -> None:
    """The peer has given it up: what is spared is what began afterwards."""
    x = leaf(2)
    async with a.context() as ctx:
        loss = (await a.call("b", "scale", x)).sum()
        other = (await a.call("b", "scale", x)).sum()
        two.network.cut("b", "a", both=False)
        running = asyncio.ensure_future(ctx.backward(loss, timeout=100))
        await asyncio.sleep(0.1)
        two.later(3.0, two.network_breaks)
        await two.hold_up(5.0)
        after = asyncio.ensure_future(ctx.backward(other, timeout=100))
        with pytest.raises(DistributedError):
            await running
        with contextlib.suppress(DistributedError):  # of two passes at once in one context
            await after


@in_two
async def test_a_peer_that_is_held_up_is_lost_in_time_and_found_again(two: Two, a: dist.Worker) -> None:
    two.network.freeze("b", 10.0)
    began = now()
    with pytest.raises(WorkerLostError):
        await a.call("b", "note", 1)
    assert now() - began < SILENCE + 0.6
    await asyncio.sleep(10.0)
    assert await a.call("b", "note", 2) == 2
    assert two.ran in ([0, 2], [0, 1, 2])


async def test_a_worker_that_was_held_up_is_told_by_who_dials_it_first(virtual_clock: VirtualClock) -> None:
    """It knows no URL, so it cannot ask what became of its requests; the peer tells it with the next session."""

    async with World() as world:
        a, b = await world.pair()
        assert await a.ask("b", "echo", 0) == 0
        asking = asyncio.ensure_future(b.ask("a", "echo", 1, timeout=300.0))
        for channel in world.board.channels:
            channel.held = channel.side == "b"
        await asyncio.sleep(0.1)
        (theirs,) = a.endpoint._peers.values()
        theirs.lose(theirs.sessions[0], "it is a test")
        for channel in list(world.board.channels):
            channel.abort(ConnectionResetError("cut"))
        assert await a.ask("b", "echo", 2) == 2
        assert await asking == 1 and a.ran == [1]


async def test_what_is_remembered_of_sessions_is_bounded_and_per_principal(virtual_clock: VirtualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiograd.distributed.rpc.endpoint.ENDED_SESSIONS", 3)

    async with World() as world:
        a, _ = await world.pair()
        endpoint = a.endpoint
        mine, other = PeerIdentity("x", b"i" * 16, "default"), PeerIdentity("x", b"i" * 16, "tenant")
        for n in range(5):
            endpoint._remember(b"%016d" % n, mine, n)
        endpoint._remember(b"%016d" % 9, other, 1)
        assert [former.first for former in endpoint.ended_sessions(mine)] == [2, 3, 4]
        assert [former.first for former in endpoint.ended_sessions(mine, b"%016d" % 3)] == [2, 4, 3], "the one that was asked for comes last"
        assert endpoint.ended_sessions(mine, b"%016d" % 9)[-1].first == NOT_KNOWN, "it is somebody else's"
        assert endpoint.ended_sessions(other._replace(incarnation=b"j" * 16)) == []
        await asyncio.sleep(Limits().max_deadline + 1)
        endpoint._remember(b"%016d" % 7, mine, 7)
        assert [former.first for former in endpoint.ended_sessions(mine)] == [7]


async def test_a_handler_that_is_closed_outside_of_its_loop_says_nothing(
    world: World, virtual_clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """As the coroutines of a host that was killed are when the simulation is over."""
    caplog.set_level("DEBUG")
    a, b = await world.pair()
    asking = asyncio.ensure_future(a.ask("b", "gate", 1))
    await asyncio.sleep(0.1)
    (session,) = b.endpoint.sessions()
    (task,) = session.handlers
    coroutine = session._handlers._serve(Deliver(99, 7, bytearray().join(encode(None, Limits())), 1.0))
    session._handlers._running[99] = task
    session.peer.handler = lambda *_: asyncio.Event().wait()  # type: ignore[assignment]
    with contextlib.suppress(StopIteration):
        coroutine.send(None)
    coroutine.close()
    assert session._handlers._running.pop(99, None) is task, "nothing was answered"
    b.gate.set()
    await asking
    assert "GeneratorExit" not in caplog.text


# -------------------------------------------------------------------- a real loop


@pytest.mark.net
@pytest.mark.parametrize("is_first", [True, False])
async def test_a_loop_that_is_really_held_up(is_first: bool) -> None:
    """The peer runs on a loop of its own, in a thread, and hears nothing for longer than it waits."""
    limits = Limits(heartbeat=0.1)
    ready = asyncio.Event()
    loop = asyncio.get_running_loop()
    hub: dict[str, Any] = {}

    async def serve() -> None:
        async with dist.Worker("hub", secret=SECRET, limits=limits) as worker:
            hub.update(url=worker.url, worker=worker, loop=asyncio.get_running_loop(), stop=asyncio.Event())
            loop.call_soon_threadsafe(ready.set)
            await hub["stop"].wait()

    thread = asyncio.ensure_future(asyncio.to_thread(asyncio.run, serve()))
    await ready.wait()
    async with dist.Worker("a", secret=SECRET, limits=limits, peers={"hub": hub["url"]}, watchdog=False) as a:
        with pytest.raises(NotExposedError):
            await a.call("hub", "nothing")
        for _ in range(3):
            time.sleep(0.5)  # noqa: ASYNC251 - which is what this is about
            if not is_first:
                await asyncio.sleep(0)
            with pytest.raises(NotExposedError):
                await a.call("hub", "nothing")
        assert hub["worker"].endpoint.statistics().lost > 0, "it had been given up"
    hub["loop"].call_soon_threadsafe(hub["stop"].set)
    await thread


# -------------------------------------------------------------------- handshakes that overtake each other


class Overtaken(Switchboard):
    """Of the first connection of a, all after the first message of the handshake is held up, and a is told that it was reset.

    The rest arrives while b's answer to the next handshake is on its way (`early`), or when that session is in use already.
    """

    def __init__(self, *, early: bool) -> None:
        super().__init__()
        self.early = early
        self.first: MemoryChannel | None = None
        self.passes = self._look

    def _look(self, channel: MemoryChannel, frame: bytes) -> bool:
        if channel.side == "a" and self.first is None:
            self.first = channel
        elif channel is self.first:
            channel.held = True
            if channel.sent == 3:  # the request, after two of the handshake
                channel.loop.call_soon(channel._end, ConnectionResetError("reset"))
        elif channel.side == "b" and self.first is not None and channel.other is not self.first and self.early:
            self.early, channel.held = False, True
            self.first.release()
            channel.loop.call_later(0.01, channel.release)
        return True


@pytest.mark.parametrize("early", [True, False])
async def test_a_request_of_a_handshake_that_was_overtaken_runs_once(virtual_clock: VirtualClock, early: bool) -> None:
    ran: list[int] = []
    service = dist.Service()

    @service.function
    async def note(n: int) -> int:
        ran.append(n)
        return n

    board = Overtaken(early=early)
    async with (
        dist.Worker("b", secret=SECRET, service=service, transport=board.transport("b")) as b,
        dist.Worker("a", secret=SECRET, transport=board.transport("a"), peers={"b": b.url}) as a,
    ):
        if early:  # b says that it ran it, and its answer went with the session
            with pytest.raises(WorkerLostError, match="it has given up the session"):
                await a.call("b", "note", 1)
        else:
            assert await a.call("b", "note", 1) == 1
            assert board.first is not None
            board.first.release()
        await asyncio.sleep(1)
        assert ran == [1] and board.dials == 2
        assert await a.call("b", "note", 2) == 2 and board.dials == 2

"""Endpoints: requests, answers, errors, deadlines, and the end. Over an in-memory transport."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import logging
import math
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from aiograd.distributed.rpc import request_handlers
from aiograd.distributed.rpc.codec import WireTensor
from aiograd.distributed.rpc.earlier_requests import PendingRequest
from aiograd.distributed.rpc.identity import PeerIdentity
from aiograd.errors import (
    ArgumentError,
    ArgumentTypeError,
    AuthenticationError,
    ContextNotFoundError,
    DeadlineError,
    DistributedError,
    LimitError,
    NameTakenError,
    Overloaded,
    ProtocolError,
    RemoteError,
    UnknownPeerError,
    WorkerLostError,
)
from aiograd.testing import simulated_run
from aiograd.testing.virtual_clock import VirtualClock
from tests.chaos.broken import without
from tests.distributed.world import CALL, LIMITS, World, turns
from tests.support import cancel

# ---- requests and answers


async def test_requests_go_both_ways_over_one_connection(world: World) -> None:
    a, b = await world.pair()
    forth = [a.ask("b", "echo", number) for number in range(50)]
    assert await asyncio.gather(*forth) == list(range(50))
    back = [b.ask("a", "echo", number) for number in range(50)]  # b knows no URL of a
    forth = [a.ask("b", "echo", number) for number in range(50)]
    assert await asyncio.gather(*back, *forth) == 2 * list(range(50))
    assert world.board.dials == 1
    assert {identity.name for identity in b.callers} == {"a"}
    assert b.callers[0] == PeerIdentity("a", a.endpoint.incarnation, "default")
    assert a.callers[0] == PeerIdentity("b", b.endpoint.incarnation, "default")
    assert a.endpoint.peers == ("b",)
    assert b.endpoint.peers == ("a",)


async def test_a_request_to_oneself_shares_nothing(world: World) -> None:
    a = await world.node("a")
    sent = [[1, 2], {"x": WireTensor(np.arange(4.0), True)}]
    got = await a.ask("a", "echo", sent)
    assert got[0] == [1, 2] and got[0] is not sent[0]
    assert not np.shares_memory(got[1]["x"].array, sent[1]["x"].array)
    assert a.callers == [PeerIdentity("a", a.endpoint.incarnation, "default")]
    world.errors["x"] = ContextNotFoundError("no such context")
    with pytest.raises(ContextNotFoundError, match=r"^Error on Node a: no such context$"):
        await a.ask("a", "raise", "x")
    asking = asyncio.create_task(a.ask("a", "gate", 1))
    await turns()
    await cancel(asking)
    await turns()
    assert a.cancelled == [1]
    assert not world.board.channels


async def test_a_small_request_overtakes_a_large_one() -> None:
    limits = replace(LIMITS, frame_bytes=1 << 16)
    async with World(limits, high_water=1 << 17) as world:
        a, _ = await world.pair()
        await a.ask("b", "echo", 0)
        big = WireTensor(np.arange(1 << 20, dtype=np.float32), False)
        order: list[str] = []

        async def ask(name: str, argument: Any) -> Any:
            answer = await a.ask("b", "echo", argument)
            order.append(name)
            return answer

        large = asyncio.create_task(ask("large", big))
        await turns(1)
        assert a.endpoint.statistics().peers[0].outstanding == 1
        assert a.statistics("b").bytes_out < big.array.nbytes // 2, "the rest waits until something has arrived"
        small = asyncio.create_task(ask("small", "hi"))
        assert await small == "hi"
        answer = await large
        assert order == ["small", "large"]
        np.testing.assert_array_equal(answer.array, big.array)


async def test_the_smaller_of_two_frame_limits_holds(world: World) -> None:
    b = await world.node("b", limits=replace(LIMITS, frame_bytes=1 << 12))
    a = await world.node("a", b)
    value = b"x" * 100_000
    assert await a.ask("b", "echo", value) == value
    assert world.board.dials == 1
    assert a.statistics("b").frames_out >= 25


async def test_requests_wait_for_room() -> None:
    limits = replace(LIMITS, bytes_per_peer=1 << 20)
    async with World(limits) as world:
        a, b = await world.pair()
        tensor = WireTensor(np.zeros(1 << 16, dtype=np.float64), False)  # half of it
        asking = [asyncio.create_task(a.ask("b", "gate", tensor)) for _ in range(5)]
        await turns(50)
        assert len(b.ran) == 1  # two of them, with all that is around the data, are more than b takes
        asking[1].cancel()  # one that waits
        b.gate.set()
        results = await asyncio.gather(*asking, return_exceptions=True)
        assert [type(result) for result in results] == [WireTensor, asyncio.CancelledError, WireTensor, WireTensor, WireTensor]
        assert len(b.ran) == 4
    with pytest.raises(DistributedError):
        await a.ask("b", "echo")


async def test_waiting_for_room_ends_at_the_deadline(virtual_clock: VirtualClock) -> None:
    async with World(replace(LIMITS, bytes_per_peer=1 << 20)) as world:
        a, b = await world.pair()
        tensor = WireTensor(np.zeros(1 << 16, dtype=np.float64), False)
        first = await a.asking(0.1, "b", "gate", tensor)
        with pytest.raises(DeadlineError):
            await a.ask("b", "gate", tensor, timeout=2.0)
        b.gate.set()
        await first
        await a.ask("b", "echo", tensor, timeout=2.0)  # the room that was waited for is not lost
        assert len(b.ran) == 2


async def test_the_deadline_passes_in_the_moment_in_which_there_is_room(virtual_clock: VirtualClock) -> None:
    loop: Any = asyncio.get_running_loop()
    async with World(replace(LIMITS, bytes_per_peer=1 << 14)) as world:
        a, b = await world.pair()
        first = asyncio.create_task(a.ask("b", "gate", "y" * 10_000))
        await turns(50)
        (session,) = a.endpoint.sessions()
        second = asyncio.create_task(a.ask("b", "echo", "z" * 10_000, timeout=2.0))
        await turns()
        b.gate.set()
        while session._room.is_awaited:
            await turns(1)
        loop.advance(3.0)
        with pytest.raises(DeadlineError):
            await second
        await first
        assert await a.ask("b", "echo", "w" * 10_000) == "w" * 10_000
        assert b.ran == ["y" * 10_000, "w" * 10_000]


async def test_a_request_that_is_too_long_for_its_peer_is_refused_and_ends_no_other(world: World) -> None:
    b = await world.node("b", limits=replace(LIMITS, message_bytes=1 << 16))
    a = await world.node("a", b)
    await a.ask("b", "echo", 0)
    slow = asyncio.ensure_future(a.ask("b", "echo", "x" * 50_000))
    with pytest.raises(LimitError, match="longer than Limits.message_bytes=65536 of worker 'b'"):
        await a.ask("b", "echo", "y" * 1_000_000)
    assert await slow == "x" * 50_000 and await a.ask("b", "echo", 1) == 1
    assert world.board.dials == 1


async def test_what_cannot_be_sent_is_refused_at_home() -> None:
    async with World(replace(LIMITS, message_bytes=1 << 16, bytes_per_peer=1 << 17)) as world:
        a, b = await world.pair()
        with pytest.raises(ArgumentTypeError):
            await a.ask("b", "echo", object())
        with pytest.raises(LimitError):
            await a.ask("b", "echo", WireTensor(np.zeros(1 << 16), False))
        with pytest.raises(UnknownPeerError, match="add_peer"):
            await a.ask("c", "echo")
        with pytest.raises(AuthenticationError, match="stranger"):
            await a.ask("b", "echo", principal="stranger")
        assert world.board.dials == 0
        with pytest.raises(ArgumentError):
            a.endpoint.add_peer("a", "memory://elsewhere")
        assert await a.ask("b", "echo", 1) == 1
        assert b.ran == [1]


async def test_errors_of_handlers(world: World) -> None:
    a, _ = await world.pair()
    world.errors.update(
        value=ValueError("first line\nsecond line"),
        context=ContextNotFoundError("no such context"),
        cancelled=asyncio.CancelledError(),
    )
    with pytest.raises(RemoteError, match=r"^Error on Node b: kind 7: ValueError: first line$") as caught:
        await a.ask("b", "raise", "value")
    assert (caught.value.worker, caught.value.function, caught.value.type_name) == ("b", "kind 7", "ValueError")
    with pytest.raises(ContextNotFoundError):
        await a.ask("b", "raise", "context")
    with pytest.raises(RemoteError) as caught:
        await a.ask("b", "raise", "cancelled")
    assert caught.value.code == "cancelled"
    with pytest.raises(RemoteError) as caught:  # a result that cannot be sent
        await a.ask("b", "unsendable")
    assert caught.value.type_name == "ArgumentTypeError"


async def test_errors_pass_through_several_workers(world: World) -> None:
    c = await world.node("c")
    b = await world.node("b", c, describe=lambda kind, value: f"relay of {kind}")
    a = await world.node("a", b)
    world.errors["x"] = KeyError("weights")
    with pytest.raises(RemoteError, match=r"^Error on Node b: Error on Node c: kind 7: KeyError: 'weights'$") as caught:
        await a.ask("b", "relay", ("c", ("raise", "x")))
    assert (caught.value.worker, caught.value.function, caught.value.path) == ("c", "kind 7", ("b", "c"))
    world.errors["y"] = KeyError("here")
    with pytest.raises(RemoteError) as caught:
        await a.ask("b", "raise", "y")
    assert caught.value.function == "relay of 7"


async def test_cancelling_reaches_handlers_far_away(world: World) -> None:
    c = await world.node("c")
    b = await world.node("b", c)
    a = await world.node("a", b)
    asking = asyncio.create_task(a.ask("b", "relay", ("c", ("gate", 1))))
    await turns(60)
    assert c.ran == [1]
    await cancel(asking)
    await turns(60)
    assert len(b.cancelled) == 1
    assert c.cancelled == [1]
    assert a.statistics("b").outstanding == 0
    assert c.statistics("b").running == 0


@pytest.mark.parametrize("peer", ["a", "b"])
async def test_what_a_cancelled_handler_raises_is_of_no_interest(world: World, peer: str) -> None:
    a, b = await world.pair()
    asking = asyncio.create_task(a.ask(peer, "stubborn", 1))
    await turns()
    assert [*a.ran, *b.ran] == [1]
    await cancel(asking)
    await turns()
    gc.collect()


async def test_without_its_protection_cancelling_stays_at_home() -> None:
    with without("propagate_cancel"):
        async with World() as world:
            a, b = await world.pair()
            asking = asyncio.create_task(a.ask("b", "gate", 1))
            await turns()
            asking.cancel()
            await turns()
            assert b.cancelled == []


async def test_handlers_run_in_the_context_of_their_own_endpoint() -> None:
    mark = contextvars.ContextVar("mark", default="none")
    seen: list[str] = []

    async def handle(peer: PeerIdentity, kind: int, value: Any, timeout: float) -> None:
        seen.append(mark.get())
        mark.set("by an earlier handler")

    async with World() as world:
        mark.set("where b was opened")
        b = await world.node("b")
        b.endpoint.handler = handle
        mark.set("the caller's")
        a = await world.node("a", b)
        await a.ask("b", "echo")
        await a.ask("b", "echo")
    assert seen == ["where b was opened"] * 2


async def test_requests_that_are_served_without_a_task(virtual_clock: VirtualClock) -> None:
    """Their answers are held where nobody waits for them: they come with another, with one that is waited for, or a few milliseconds later."""

    mark = contextvars.ContextVar("mark", default="none")
    seen: list[Any] = []

    def take(peer: PeerIdentity, value: Any) -> bool:
        seen.append((peer.name, mark.get(), value))
        mark.set("by an earlier handler")
        if value == "wrong":
            raise ContextNotFoundError("no such context")
        return value == "urgent"

    async with World() as world:
        mark.set("where b was opened")
        b = await world.node("b", prompt_handlers={9: take})
        mark.set("the caller's")
        a = await world.node("a", b)
        now = asyncio.get_running_loop().time

        async def post(value: Any) -> tuple[Any, float]:
            began = now()
            await a.endpoint.request("b", 9, value, 5.0)
            return value, now() - began

        await a.ask("b", "echo")
        value, seconds = await post("patient")
        assert request_handlers.HOLD <= seconds < 2 * request_handlers.HOLD
        for other in (post("urgent"), a.ask("b", "echo", 1)):
            patient = asyncio.create_task(post("patient"))
            await turns()
            assert not patient.done(), "it is held"
            await other
            value, seconds = await patient
            assert seconds == 0.0, "it came along"
        assert (await post(bytes(request_handlers.HOLD_BYTES)))[1] == 0.0, "room is given back at once"
        with pytest.raises(ContextNotFoundError, match="no such context"):
            await post("wrong")
        with pytest.raises(ContextNotFoundError, match="no such context"):
            await b.endpoint.request("b", 9, "wrong", 5.0)
        await b.endpoint.request("b", 9, "urgent", 5.0)
        assert {name for name, *_ in seen} == {"a", "b"} and {each for _, each, _ in seen} == {"where b was opened"}
        assert b.callers == [b.callers[0]] * len(b.callers), "the other handler saw nothing of it"


async def test_answers_hold_nothing_behind(world: World) -> None:
    a, _ = await world.pair()
    array = np.zeros(1 << 12)
    gone = weakref.ref(array)
    await a.ask("b", "echo", WireTensor(array, False))
    await a.ask("b", "echo", 1)
    del array
    gc.collect()
    assert gone() is None


async def test_too_many_requests_are_refused_at_once() -> None:
    async with World(replace(LIMITS, requests_per_peer=3)) as world:
        a, b = await world.pair()
        asking = [asyncio.create_task(a.ask("b", "gate", number)) for number in range(5)]
        done, pending = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
        while len(done) < 2:
            done, pending = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            with pytest.raises(Overloaded, match="Error on Node b") as caught:
                await task
            assert caught.value.retry_after > 0
        b.gate.set()
        assert sorted(await asyncio.gather(*pending)) == sorted(b.ran)
        assert len(b.ran) == 3


# ---- deadlines


async def test_deadlines(world: World, virtual_clock: VirtualClock) -> None:
    a, b = await world.pair()
    with pytest.raises(DeadlineError, match=r"kind 7 to worker 'b' did not end within 2 s"):
        await a.ask("b", "sleep", 10.0, timeout=2.0)
    assert asyncio.get_running_loop().time() == pytest.approx(2.0, abs=0.1)
    await asyncio.sleep(0.1)
    assert b.cancelled == [10.0]
    assert b.timeouts[0] < 2.0  # it shrinks on its way
    with pytest.raises(DeadlineError):
        await a.ask("a", "sleep", 10.0, timeout=2.0)
    await asyncio.sleep(0.1)
    assert a.cancelled == [10.0]
    assert await a.ask("b", "sleep", 1.0, timeout=2.0) == 1.0


async def test_timeouts_that_make_no_sense(world: World) -> None:
    a, b = await world.pair()
    for timeout in (math.inf, math.nan):
        with pytest.raises(ArgumentError, match="finite"):
            await a.ask("b", "echo", 1, timeout=timeout)
    for peer in "ab":
        with pytest.raises(DeadlineError):
            await a.ask(peer, "echo", 1, timeout=0.0)
    assert b.ran == []


async def test_a_deadline_holds_while_nothing_is_connected(virtual_clock: VirtualClock) -> None:
    async with World(replace(LIMITS, missed_heartbeats=100)) as world:
        a, b = await world.pair()
        world.board.unreachable.add(b.transport.url)
        with pytest.raises(DeadlineError, match="connected: no"):
            await a.ask("b", "echo", 1, timeout=2.0)


async def test_a_request_that_makes_no_sense_is_answered_with_an_error(world: World) -> None:
    a, _ = await world.pair()
    await a.ask("b", "echo", 0)
    (peer,) = a.endpoint._peers.values()
    session = peer.session()
    loop = asyncio.get_running_loop()
    now = loop.time()
    answer: asyncio.Future[Any] = loop.create_future()
    id = session.rpc_session.request(CALL, [b"nonsense that is no message"], 5.0, now)
    session._requests[id] = PendingRequest(session, id, answer, CALL, 0, 5.0)
    session.pump(now)
    with pytest.raises((ProtocolError, LimitError), match="Error on Node b"):
        await answer
    assert await a.ask("b", "echo", 1) == 1
    assert world.board.dials == 1


# ---- the end


async def test_closing_tells_peers_and_leaves_nothing(world: World) -> None:
    a, b = await world.pair()
    await a.ask("b", "echo", 0)
    forth = asyncio.create_task(a.ask("b", "gate", 1))
    back = asyncio.create_task(b.ask("a", "gate", 2))
    alone = asyncio.create_task(a.ask("a", "gate", 3))
    await turns()
    await a.endpoint.aclose()
    assert a.cancelled == [2, 3]
    for task in forth, alone:
        with pytest.raises(DistributedError, match="being closed"):
            await task
    with pytest.raises(WorkerLostError, match="it was closed"):
        await back
    await turns()
    assert b.cancelled == [1]
    assert not a.lost and [identity.name for identity, _ in b.lost] == ["a"]
    with pytest.raises(DistributedError, match="not open"):
        await a.ask("b", "echo")
    await a.endpoint.aclose()
    assert not world.board.channels


async def test_closing_while_dialling(world: World) -> None:
    a, b = await world.pair()
    world.board.unreachable.add(b.transport.url)
    asking = asyncio.create_task(a.ask("b", "echo", 1))
    await turns()
    await a.endpoint.aclose()
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("dial")]
    with pytest.raises(DistributedError, match="being closed"):
        await asking


async def test_a_handler_that_will_not_stop_is_reported(virtual_clock: VirtualClock, caplog: pytest.LogCaptureFixture) -> None:
    stubborn: list[asyncio.Task[Any]] = []

    async def handle(peer: PeerIdentity, kind: int, value: Any, timeout: float) -> None:
        stubborn.append(asyncio.current_task())  # type: ignore[arg-type]
        for _ in range(100):
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.1)

    with caplog.at_level(logging.ERROR, "aiograd.distributed"):
        async with World() as world:
            a, b = await world.pair()
            b.endpoint.handler = handle
            asking = await a.asking(0.1, "b", "echo", 1)
            await b.endpoint.aclose()
            with pytest.raises(WorkerLostError):
                await asking
            await asyncio.wait(stubborn)
    assert "did not stop" in caplog.text


def test_cancelled_at_every_step_nothing_is_left() -> None:
    async def main() -> None:
        async with World() as world:
            c = await world.node("c")
            b = await world.node("b", c)
            a = await world.node("a", b)
            assert await a.ask("b", "relay", ("c", ("sleep", 0.1))) == 0.1
            world.board.reset()
            assert await a.ask("b", "relay", ("c", ("sleep", 0.1))) == 0.1

    steps = simulated_run(main).steps
    for step in range(1, steps + 1):
        with contextlib.suppress(asyncio.CancelledError):
            run = simulated_run(main, cancel_at=step)
            assert not run.leftover_tasks


@pytest.mark.parametrize("word", ["raise", "echo", "gate"])
def test_a_request_may_be_cancelled_at_any_moment(word: str) -> None:
    """Also in the moment in which its answer, an error or room for it comes."""

    async def main(step: int) -> int:
        loop: Any = asyncio.get_running_loop()
        async with World(replace(LIMITS, bytes_per_peer=1 << 14)) as world:
            world.errors["x"] = ValueError("too late")
            a, b = await world.pair()
            await a.ask("b", "echo", 0)
            first = asyncio.create_task(a.ask("b", "gate", "y" * 10_000))
            await turns()
            asking = asyncio.create_task(a.ask("b", word, "x" if word == "raise" else "z" * 10_000))
            begun = loop.steps
            loop.at_step(begun + step, asking.cancel)
            await turns(5)
            b.gate.set()
            await asyncio.wait([first, asking])
            ended = loop.steps
            with contextlib.suppress(asyncio.CancelledError, RemoteError):
                await asking
            assert await first == "y" * 10_000
            for _ in range(2):
                await a.ask("b", "echo", "w" * 10_000)  # all of the room is free again
            return ended - begun

    steps = simulated_run(main, 1).value
    for step in range(1, max(steps, 40)):
        simulated_run(main, step)
    gc.collect()  # an error that nobody has looked at is reported now


# ---- names


async def test_an_endpoint_that_keeps_names_takes_no_second_worker_of_a_name_while_the_first_is_there(world: World) -> None:
    b = await world.node("b")
    b.endpoint.keeps_names = True
    first = await world.node("a", b, host="here")
    assert await first.ask("b", "echo", 1) == 1
    second = await world.node("a", b, host="there")
    for _ in range(2):
        with pytest.raises(NameTakenError, match="worker 'b' is connected to another worker named 'a'"):
            await second.ask("b", "echo", 2)
    assert await first.ask("b", "echo", 3) == 3 and not b.lost
    await first.endpoint.aclose()
    assert await second.ask("b", "echo", 4) == 4
    assert [identity.incarnation for identity in b.callers] == [first.endpoint.incarnation] * 2 + [second.endpoint.incarnation]


async def test_a_peer_that_is_forgotten_is_not_dialled_any_more(world: World) -> None:
    a, _ = await world.pair()
    a.endpoint.remove_peer("b")
    a.endpoint.remove_peer("nobody")
    with pytest.raises(UnknownPeerError):
        await a.ask("b", "echo", 1)
    assert a.endpoint.peers == () and world.board.dials == 0

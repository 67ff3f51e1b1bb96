"""A message about another principal's context is answered as one about a context that never was, byte for byte, whatever that context is doing.

Two tenants send the same messages, one about a context of somebody else's and one about an id that nobody ever had. Whatever one of them is
told the other is told as well, and nothing of the foreign context changes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
import pytest

from aiograd import distributed as dist
from aiograd.distributed.autograd import discovery
from aiograd.distributed.autograd.context import Context
from aiograd.distributed.kinds import Kind
from aiograd.distributed.rpc.codec import decode, encode
from aiograd.distributed.rpc.frames import FrameKind, parse
from aiograd.distributed.rpc.keyring import Key, Keyring
from aiograd.distributed.rpc.limits import Limits
from aiograd.errors import ContextNotFoundError
from aiograd.testing.virtual_clock import VirtualClock
from aiograd.transaction import Outcome
from tests.distributed.intruder import LIMITS, Intruder
from tests.distributed.memory import Switchboard
from tests.distributed.passes_kit import after, before
from tests.distributed.workers import SECRET, knows, leaf, two_principals, until, values, view, workers

#: the tenants: one names a context of somebody else's, the other one that never was
TENANTS = {"x": Key("k2", b"x" * 32, "tenant"), "y": Key("k3", b"y" * 32, "lodger")}
INVENTED = b"never was there."
Message = tuple[Kind, tuple[Any, ...]]
#: what is compared: what kind of frame the answer was, and its bytes
Answer = tuple[FrameKind, bytes]


@pytest.fixture(autouse=True)
def _no_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are asked what takes part in a pass."""
    monkeypatch.setattr(discovery, "PREDICTED_NODES", 0)


def messages(key: bytes, origin: str, pass_id: tuple[str, int], edge: int, asked: str = "b") -> dict[str, Message]:
    """A message of every kind about a context, a pass and an edge."""

    def call(opens: bool) -> Message:
        return Kind.CALL, ("note", [1], {}, True, (key, origin, (-1,), 0, opens))

    return {
        "CALL": call(False),
        "CALL that opens": call(True),
        "MARK": (Kind.MARK, (key, *pass_id, [edge])),
        "GRADIENT": (Kind.GRADIENT, (key, *pass_id, (edge, [None], 0), 2, [])),
        "GRADIENT, predicted": (Kind.GRADIENT, (key, *pass_id, (edge, [None], 0), 2, [], [edge])),
        "GRADIENT, fast": (Kind.GRADIENT, (key, *pass_id, (edge, [None], 0), 0, [])),
        "COMMIT": (Kind.COMMIT, (key, *pass_id)),
        "ABORT": (Kind.ABORT, (key, *pass_id, "because")),
        "OUTCOME": (Kind.OUTCOME, (key, *pass_id)),
        "RENEW": (Kind.RENEW, ([(key, 99)],)),
        "RELEASE": (Kind.RELEASE, (key,)),
        "RELAY of COMMIT": (Kind.RELAY, (int(Kind.COMMIT), [(asked, (key, *pass_id))])),
        "RELAY of ABORT": (Kind.RELAY, (int(Kind.ABORT), [(asked, (key, *pass_id, "because"))])),
    }


def test_there_is_a_message_of_every_kind() -> None:
    assert {kind for kind, _ in messages(b"", "", ("", 0), 0).values()} == set(Kind) - {Kind.COLLECTIVE, Kind.POST, Kind.WAITS}


class Tenant:
    """Somebody with a key of its own, who sends messages by hand and reads the answers as they come."""

    def __init__(self, peer: Intruder) -> None:
        self.peer = peer
        self.asked = 0

    async def ask(self, message: Message, key: bytes) -> Answer:
        """Send a message; the answer, without what is drawn anew for each: the correlation id, and the name of the context itself."""
        self.asked += 1
        self.peer.send(self.peer.request(*message, self.asked))
        found: list[Any] = []

        def heard() -> bool:
            frames = [parse(frame, LIMITS) for frame in self.peer.heard()]
            found.extend(frame for frame in frames if frame.kind in (FrameKind.RESPONSE, FrameKind.FAILURE))
            return bool(found)

        await until(heard)
        (frame,) = found
        assert frame.id == self.asked
        value = decode(bytearray(frame.body), LIMITS)
        if frame.kind is FrameKind.FAILURE:
            assert len(value.pop("id")) == 16
        if message[0] is Kind.RELAY:
            for _, failed, answer in value:
                assert not failed or len(answer.pop("id")) == 16
        return frame.kind, b"".join(encode(value, LIMITS)).replace(key.hex().encode(), b"(its id)")


class Scene:
    """A context of "a", which "b" knows, and the pass and the edge that a tenant names."""

    def __init__(self, a: dist.Worker, b: dist.Worker, weight: Any) -> None:
        self.a = a
        self.b = b
        self.weight = weight
        self.ctx: Context
        self.loss: Any = None
        self.pass_id = ("a", 1)
        self.edge = 1
        self.go = asyncio.Event()
        self.reached = asyncio.Event()

    async def hold(self, *_: Any) -> None:
        """The owner's pass waits here until the tenants are through; later ones pass."""
        if not self.reached.is_set():
            self.reached.set()
            await self.go.wait()

    def traces(self) -> list[Any]:
        """All there is to be seen of the context on both workers; and of its tombstones."""
        found: list[Any] = []
        for worker in (self.a, self.b):
            table = worker._contexts
            found.append(list(table._released.get("default", ())))
            for each in table:
                if each.principal == "default":
                    parts = {name: (part.state, part.error, list(part.sends), part.others) for name, part in each.participants.items()}
                    grads = {id(node): slot.grad for node, slot in each.slots.items()}
                    edges = [*each.send_nodes.items(), *each.recv_nodes.items()]
                    leases = dict(each.openers), each.counter, dict(each.known_counters)
                    ended = dict(each.history.outcomes), set(each.in_doubt), list(each.calls)
                    found.append((each.id, each.is_released, parts, grads, edges, leases, ended))
        return found

    @contextlib.asynccontextmanager
    async def running(self, within: contextlib.AbstractContextManager[Any]) -> AsyncIterator[None]:
        """A pass that has come to `hold`; it is let go, and ends as if nothing had been, afterwards."""
        with within:
            going = asyncio.ensure_future(self.ctx.backward(self.loss))
            await self.reached.wait()
            (self.pass_id,) = {**self.ctx.participants, **self.ctx.history.outcomes}
            await asyncio.sleep(0.1)  # all others come to where they have to wait as well
            try:
                yield
            finally:
                self.go.set()
                await asyncio.wait([going])
            await going
        assert values(view(self.b, self.ctx).grads[self.weight]) == [1.0, 2.0]


#: what a context is doing while tenants send messages about it: by name
STATES: dict[str, Callable[[Scene], contextlib.AbstractAsyncContextManager[None]]] = {}


def state(function: Callable[[Scene], AsyncIterator[None]]) -> Callable[[Scene], AsyncIterator[None]]:
    STATES[function.__name__.replace("_", " ")] = contextlib.asynccontextmanager(function)
    return function


@contextlib.contextmanager
def hook(register: Callable[[Any], Any], scene: Scene) -> Iterator[None]:
    handle = register(scene.hold)
    try:
        yield
    finally:
        handle.remove()


@state
async def open_(scene: Scene) -> AsyncIterator[None]:
    yield


def held_up(name: str, within: Callable[[Scene], contextlib.AbstractContextManager[Any]], there: Callable[[Any], bool], here: str = "") -> None:
    """A state in which a pass is held up; `there` looks at the participant on b, `here` is the outcome on a."""

    async def held(scene: Scene) -> AsyncIterator[None]:
        async with scene.running(within(scene)):
            assert there(view(scene.b, scene.ctx).participants[scene.pass_id])
            assert not here or scene.ctx.history.outcomes[scene.pass_id] == here
            yield

    STATES[name] = contextlib.asynccontextmanager(held)


held_up("marked", lambda scene: after(scene.b, Kind.MARK, scene.hold), lambda participant: True)
held_up("running", lambda scene: hook(scene.weight.register_hook, scene), lambda participant: participant.state == "active")
held_up("prepared", lambda scene: after(scene.b, Kind.GRADIENT, scene.hold), lambda participant: participant.state == "prepared")
held_up(
    "committed where it began",
    lambda scene: before(scene.b, Kind.COMMIT, scene.hold),
    lambda participant: participant.state == "prepared",
    here="committed",
)
held_up(
    "committed with hooks that run",
    lambda scene: hook(scene.weight.register_post_accumulate_grad_hook, scene),
    lambda participant: participant.is_decided,
)


@state
async def committed(scene: Scene) -> AsyncIterator[None]:
    await scene.ctx.backward(scene.loss)
    (scene.pass_id,) = scene.ctx.history.outcomes
    yield


@state
async def aborted(scene: Scene) -> AsyncIterator[None]:
    with hook(scene.weight.register_hook, scene):
        going = asyncio.ensure_future(scene.ctx.backward(scene.loss))
        await scene.reached.wait()
        going.cancel()
        await asyncio.wait([going])
    (scene.pass_id,) = scene.ctx.history.outcomes
    assert view(scene.b, scene.ctx).history.outcomes[scene.pass_id] == "aborted"
    yield


@state
async def in_doubt(scene: Scene) -> AsyncIterator[None]:
    there = view(scene.b, scene.ctx)
    there.in_doubt.add(scene.pass_id)
    there.history.remember(scene.pass_id, Outcome.UNKNOWN)
    yield
    there.in_doubt.clear()


@state
async def released(scene: Scene) -> AsyncIterator[None]:
    await scene.a._leases.release(scene.ctx)
    assert not knows(scene.b, scene.ctx)
    yield


@state
async def forgotten_by_one(scene: Scene) -> AsyncIterator[None]:
    """Its lease has run out on the other worker."""
    there = view(scene.b, scene.ctx)
    there.openers.clear()
    await scene.b._leases.release(there)
    yield


@state
async def released_before_it_was_known(scene: Scene) -> AsyncIterator[None]:
    await scene.a._leases.release(scene.ctx)
    scene.b._contexts._released.clear()
    with pytest.raises(ContextNotFoundError):
        await scene.a.endpoint.request("b", Kind.RELEASE, (scene.ctx.key,), 5)
    assert scene.ctx.key in scene.b._contexts._released["default"]
    yield


def test_there_is_a_state_for_everything_that_can_become_of_a_context() -> None:
    assert len(STATES) == 12


#: the order in which a tenant sends: what is asked of what it does not have, of a context of its own, and of one that it has released
OPENING = [
    "CALL", "MARK", "GRADIENT", "GRADIENT, predicted", "GRADIENT, fast", "COMMIT", "ABORT", "OUTCOME", "RENEW", "RELAY of COMMIT", "RELAY of ABORT",
    "CALL that opens",
]  # fmt: skip
ORDERS = {
    "as one that never was": ["RELEASE", *OPENING, *reversed(OPENING)],
    "as one of its own": [*OPENING, *OPENING, "RELEASE", *OPENING],
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("asked", "ab")
@pytest.mark.parametrize("name", STATES)
async def test_a_message_about_a_foreign_context_is_answered_as_one_about_a_context_that_never_was(
    virtual_clock: VirtualClock, name: str, asked: str, order: str
) -> None:
    board = Switchboard()
    keyring = Keyring(SECRET, kid="k1")
    for key in TENANTS.values():
        keyring.add(key.kid, key.secret, principal=key.principal)
    ran: list[int] = []
    weight = leaf(1, 1)
    service = dist.Service()

    @service.function
    async def scale(x: Any) -> Any:
        return x * weight

    @service.function
    async def note(value: int) -> int:
        ran.append(value)
        return value

    limits = Limits(heartbeat=5.0, missed_heartbeats=1000)
    async with workers("a", "b", service=service, board=board, secrets={"a": keyring, "b": keyring}, limits=limits, idle=False) as (a, b):
        scene = Scene(a, b, weight)
        stranger = board.transport("stranger")
        tenants: dict[str, Tenant] = {}
        for each, key in TENANTS.items():
            peer = Intruder(await stranger.connect(f"memory://{asked}", 1.0))  # type: ignore[arg-type]
            await peer.greet(key, each, asked)
            tenants[each] = Tenant(peer)
        async with a.context() as scene.ctx:
            scene.loss = (await a.call("b", "scale", leaf(1, 2))).sum()
            scene.edge = next(iter(view(b, scene.ctx).send_nodes))
            async with STATES[name](scene):
                before_them = scene.traces()
                for turn, kind in enumerate(ORDERS[order]):
                    answers: list[Answer] = []
                    for each, named in zip(tenants.values(), (scene.ctx.key, INVENTED), strict=True):
                        answers.append(await each.ask(messages(named, "a", scene.pass_id, scene.edge, asked)[kind], named))
                    assert answers[0] == answers[1], f"{kind}, message {turn}"
                    assert scene.traces() == before_them, f"{kind}, message {turn}"
                assert len(ran) in (0, 2, 4, 6), "as often for one as for the other"
        for tenant in tenants.values():
            tenant.peer.close()
        await stranger.aclose()


async def test_an_id_that_a_stranger_has_taken_is_still_there_for_its_owner() -> None:
    """A tenant that learns of an id before its owner's call comes to a worker keeps nobody out."""
    server, tenant = two_principals()
    weight = leaf(2, 2)
    service = dist.Service()

    @service.function
    async def scale(x: Any) -> Any:
        return x * weight

    async with workers("a", "b", "x", service=service, secrets={"b": server, "x": tenant}, idle=False) as (a, b, x), a.context() as ctx:
        for known in (["tenant"], ["default", "tenant"]):
            await x.endpoint.request("b", Kind.CALL, ("scale", [1.0], {}, True, (ctx.key, "a", (-1,), 0, True)), 5)
            assert sorted(each.principal for each in b._contexts) == known
            await ctx.backward((await a.call("b", "scale", leaf(1, 1))).sum())
        assert np.array_equal(view(b, ctx).grads[weight].numpy(), [2, 2])
        await x.endpoint.request("b", Kind.RELEASE, (ctx.key,), 5)
        assert [each.principal for each in b._contexts] == ["default"] and knows(b, ctx)
        assert values(view(b, ctx).grads[weight]) == [2, 2]

"""Who has no key, the wrong one, somebody else's, or only what was recorded: every kind of request is refused, alike, and leaves no trace."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from aiograd import distributed as dist
from aiograd.distributed.autograd.context_table import CallHeader, ContextTable
from aiograd.distributed.kinds import Kind
from aiograd.distributed.messages.passes import Lease
from aiograd.distributed.objects.reference_table import ReferenceTable
from aiograd.distributed.rpc.handshake import Dialler
from aiograd.distributed.rpc.http import framing
from aiograd.distributed.rpc.identity import PeerIdentity
from aiograd.distributed.rpc.keyring import Key, Keyring
from aiograd.distributed.rpc.limits import Limits
from aiograd.errors import ContextNotFoundError, ReferenceLostError
from tests.distributed.http_support import UPGRADE, get, request
from tests.distributed.intruder import LIMITS, Intruder, request_frame, requests_about
from tests.distributed.memory import Switchboard
from tests.distributed.workers import OTHER_SECRET, SECRET, until

REMOVED_SECRET = b"a secret that was in use before."
CONTEXT = b"c" * 16


class Victim:
    """A worker with two tenants and a key that was removed, and what has been done there."""

    def __init__(self) -> None:
        self.ran: list[Any] = []
        self.made: list[object] = []
        self.keyring = Keyring(SECRET, kid="k1")
        self.keyring.add("k2", OTHER_SECRET, principal="tenant")
        self.keyring.add("k0", REMOVED_SECRET)
        self.keyring.remove("k0")
        self.service = dist.Service()
        self.service.function("note")(self._note)
        victim = self

        @self.service.reference
        class Thing:
            def __init__(self) -> None:
                victim.made.append(self)

    async def _note(self, value: int) -> int:
        self.ran.append(value)
        return value

    def assert_untouched(self, worker: dist.Worker, *, known: bool = False) -> None:
        """Nothing ran, nothing was made, and nobody got in, except where a peer was known before."""
        assert self.ran == [] and self.made == []
        figures = worker.statistics()
        assert (figures.contexts, figures.passes, figures.calls, figures.references, figures.bytes_held) == (0, 0, 0, 0, 0)
        assert known or not figures.peers
        assert figures.network.handshakes == 0


@contextlib.asynccontextmanager
async def victim() -> AsyncIterator[tuple[Victim, dist.Worker, Callable[[], Any]]]:
    """The victim "b", and how to connect to it."""
    board = Switchboard()
    it = Victim()
    limits = Limits(heartbeat=0.02, missed_heartbeats=100)
    async with dist.Worker("b", service=it.service, secret=it.keyring, limits=limits, transport=board.transport("b")) as worker:
        stranger = board.transport("stranger")

        async def connect() -> Intruder:
            return Intruder(await stranger.connect(worker.url, 1.0))  # type: ignore[arg-type]

        yield it, worker, connect
        await stranger.aclose()


K1, K2 = Key("k1", SECRET, "default"), Key("k2", OTHER_SECRET, "tenant")


def hello(key: Key = K1, sender: str = "a", receiver: str = "b") -> bytes:
    return Dialler(sender, os.urandom(16), key, receiver, None, os.urandom, LIMITS).hello()


async def recorded(connect: Callable[[], Any], key: Key = K1) -> Intruder:
    """A connection of somebody who may, with what was said on it."""
    peer: Intruder = await connect()
    await peer.greet(key, "a", "b")
    return peer


Attack = Callable[[Callable[[], Any], tuple[Any, Any]], Any]
ATTACKS: dict[str, Attack] = {}


def attack(function: Attack) -> Attack:
    """Note an attack: it gets a way to connect and what to ask for, and returns the connection on which it was tried."""
    ATTACKS[function.__name__.replace("_", " ")] = function
    return function


def by_hello(make: Callable[[], bytes]) -> Attack:
    """Say hello in some way; then, whatever comes, send what is wanted, in the clear."""

    async def tried(connect: Callable[[], Any], wanted: tuple[Any, Any]) -> Intruder:
        it: Intruder = await connect()
        it.send(make())
        it.send(b"".join(request_frame(*wanted)))
        return it

    return tried


@attack
async def a_request_instead_of_a_hello(connect: Callable[[], Any], wanted: tuple[Any, Any]) -> Intruder:
    it: Intruder = await connect()
    it.send(b"".join(request_frame(*wanted)))
    return it


@attack
async def recorded_handshake_and_request(connect: Callable[[], Any], wanted: tuple[Any, Any]) -> Intruder:
    peer = await recorded(connect)
    said = [*peer.sent, peer.request(*wanted)]  # the request itself is never sent by who may
    peer.close()
    it: Intruder = await connect()
    for record in said:
        it.send(record)
    return it


@attack
async def request_before_the_finish(connect: Callable[[], Any], wanted: tuple[Any, Any]) -> Intruder:
    it: Intruder = await connect()
    dialler = Dialler("a", os.urandom(16), K1, "b", None, os.urandom, LIMITS)
    it.send(dialler.hello())
    dialler.receive(await it.answer())
    it.send(bytes(dialler.result.seal.seal(request_frame(*wanted))))
    return it


@attack
async def wrong_finish(connect: Callable[[], Any], wanted: tuple[Any, Any]) -> Intruder:
    it: Intruder = await connect()
    dialler = Dialler("a", os.urandom(16), K1, "b", None, os.urandom, LIMITS)
    it.send(dialler.hello())
    finish = dialler.receive(await it.answer())
    it.send(finish[:-1] + bytes([finish[-1] ^ 1]))
    it.send(bytes(dialler.result.seal.seal(request_frame(*wanted))))
    return it


@attack
async def finish_of_another_connection(connect: Callable[[], Any], wanted: tuple[Any, Any]) -> Intruder:
    peer = await recorded(connect)
    it: Intruder = await connect()
    it.send(hello())
    await it.answer()
    it.send(peer.sent[1])
    it.send(peer.request(*wanted))
    peer.close()
    return it


@attack
async def its_own_answer_reflected(connect: Callable[[], Any], wanted: tuple[Any, Any]) -> Intruder:
    it: Intruder = await connect()
    it.send(hello())
    other: Intruder = await connect()
    other.send(await it.answer())
    other.send(b"".join(request_frame(*wanted)))
    it.close()
    return other


# what is tried on a connection of somebody who may, by who can write to it


async def spoilt(connect: Callable[[], Any], wanted: tuple[Any, Any], spoil: Callable[[Intruder, bytes], bytes]) -> Intruder:
    peer = await recorded(connect)
    peer.send(spoil(peer, peer.request(*wanted)))
    return peer


SPOIL: dict[str, Callable[[Intruder, bytes, tuple[Any, Any]], bytes]] = {
    "altered request": lambda peer, record, wanted: record[:70] + bytes([record[70] ^ 1]) + record[71:],
    # a record has no number of its own: the receiver counts, and this one is sealed as the one after the next
    "request out of order": lambda peer, record, wanted: peer.request(*wanted),
    "request cut short": lambda peer, record, wanted: record[:-1],
    "request in the clear": lambda peer, record, wanted: b"".join(request_frame(*wanted)),
}
ATTACKS.update({
    name: lambda connect, wanted, spoil=spoil: spoilt(connect, wanted, lambda peer, record: spoil(peer, record, wanted))  # type: ignore[misc]
    for name, spoil in SPOIL.items()
})  # fmt: skip


@attack
async def request_of_another_connection(connect: Callable[[], Any], wanted: tuple[Any, Any]) -> Intruder:
    other = await recorded(connect, K2)
    record = other.request(*wanted)
    other.close()
    return await spoilt(connect, wanted, lambda peer, _: record)


@attack
async def its_own_record_reflected(connect: Callable[[], Any], wanted: tuple[Any, Any]) -> Intruder:
    peer = await recorded(connect)
    assert peer.secured is not None
    heartbeat = await peer.answer()
    peer.send(heartbeat)
    return peer


WANTED = requests_about(CONTEXT, "a")
#: what a stranger says first, where that is all there is to an attack
SAID: dict[str, Callable[[], bytes]] = {
    "nothing": lambda: b"",
    "noise": lambda: random.Random("noise").randbytes(200),
    "no key": lambda: hello()[:-32] + bytes(32),
    "a key of zeros": lambda: hello(Key("k1", bytes(32), "default")),
    "wrong key": lambda: hello(Key("k1", OTHER_SECRET, "default")),
    "unknown kid": lambda: hello(Key("k9", SECRET, "default")),
    "removed key": lambda: hello(Key("k0", REMOVED_SECRET, "default")),
    "kid of another tenant": lambda: hello(Key("k2", SECRET, "tenant")),
    "another receiver": lambda: hello(receiver="c"),
    "claims to be the receiver": lambda: hello(sender="b", receiver="a"),
    "altered hello": lambda: (lambda text: text[:60] + bytes([text[60] ^ 1]) + text[61:])(hello()),
    "hello cut short": lambda: hello()[:-1],
    "a request": lambda: b"".join(request_frame(*requests_about(CONTEXT)[0])),
}
ATTACKS.update({name: by_hello(say) for name, say in SAID.items()})
ATTACKS["oversized hello"] = by_hello(lambda: hello() + bytes(8192))
#: what can get that far has shown a key, or a recording of one; the others get not a byte
AUTHENTIC_HELLO = {"recorded handshake and request", "request before the finish", "wrong finish", "finish of another connection"}
INSIDE = {
    "altered request", "request out of order", "request cut short", "request in the clear", "request of another connection",
    "its own record reflected",
}  # fmt: skip
#: in these somebody who may has been there as well
WITH_A_PEER = INSIDE | {"recorded handshake and request", "finish of another connection"}


def test_there_are_enough_attacks() -> None:
    assert len(ATTACKS) >= 24 and AUTHENTIC_HELLO | INSIDE < ATTACKS.keys()
    assert {kind for kind, _ in WANTED} == set(Kind)


@pytest.mark.parametrize("name", ATTACKS)
async def test_an_attack_is_refused_without_a_word_and_without_a_trace(name: str) -> None:
    """For each kind of request."""
    async with victim() as (it, worker, connect):
        for wanted in WANTED:
            tried: Intruder = await ATTACKS[name](connect, wanted)
            said = await tried.closed()
            if name in AUTHENTIC_HELLO:
                assert len(said) <= 1, "an answer that only who has the key can use"
            elif name in INSIDE:
                assert tried.heard() == [], "a request that was not made right is not answered"
            else:
                assert said == [], "who shows no key hears nothing"
            await until(lambda: not worker.statistics().network.handshakes)
            it.assert_untouched(worker, known=name in WITH_A_PEER)


async def test_what_is_asked_for_would_be_heard_if_it_were_asked_right() -> None:
    """Else the test above would show nothing."""
    for wanted in WANTED:
        async with victim() as (_, worker, connect):
            peer = await recorded(connect)
            peer.received.clear()
            peer.send(peer.request(*wanted))
            assert await peer.answer() and not peer.is_closed
            assert worker.statistics().peers[0].frames_in == 1
            peer.close()


@pytest.mark.net
async def test_all_refusals_are_the_same_bytes_on_the_wire() -> None:
    it = Victim()
    async with dist.Worker("b", service=it.service, secret=it.keyring, limits=Limits(handshake_timeout=0.3)) as worker:
        upgrade = f"GET /aiograd/v1 HTTP/1.1\r\nHost: {worker.url[7:]}\r\n{UPGRADE}\r\n".encode()
        answers = set()
        for name, say in SAID.items():
            text = say()
            frame = framing.header(0x82, len(text), framing.MASKED) + bytes(4) + text
            answers.add(await request(worker.url, upgrade + frame))
            it.assert_untouched(worker)
            assert len(answers) == 1, f"{name} is told apart"
        (answer,) = answers
        assert answer.startswith(b"HTTP/1.1 101") and len(answer.partition(b"\r\n\r\n")[2]) == 4, "only that it is closed"


@pytest.mark.net
async def test_paths_answer_strangers_and_those_who_have_a_key_alike() -> None:
    it = Victim()
    async with dist.Worker("b", service=it.service, secret=it.keyring) as worker:
        texts = ["Bearer x", "kid=k1", *(f"Bearer {secret.hex()}" for secret in (SECRET, OTHER_SECRET, REMOVED_SECRET))]
        headers = ["", *(f"Authorization: {text}\r\n" for text in texts)]
        paths = "/dashboard /dashboard/ /contexts /aiograd /aiograd/v2 /aiograd/v1/ /health/ / /../health /%2e%2e/secret"
        for path in paths.split():
            answers = {(await get(worker.url, path, header))[:2] for header in headers}
            assert answers == {(404, b"not found\n")}, path
        assert {(await get(worker.url, "/health", header))[:2] for header in headers} == {(200, b"ok")}
        status = 200 if importlib.util.find_spec("prometheus_client") else 501
        assert {(await get(worker.url, "/metrics", header))[0] for header in headers} == {status}, "for this machine, see test_metrics"
        it.assert_untouched(worker)


async def test_a_key_that_is_removed_lets_nobody_in_any_more() -> None:
    async with victim() as (it, _, connect):
        it.keyring.add("k3", b"r" * 32)
        peer = await recorded(connect, Key("k3", b"r" * 32, "default"))
        peer.send(peer.request(Kind.CALL, ("note", [7], {}, True, None)))
        await until(lambda: it.ran == [7])
        it.keyring.remove("k3")
        again: Intruder = await connect()
        again.send(hello(Key("k3", b"r" * 32, "default")))
        assert await again.closed() == []
        peer.close()


# -------------------------------------------------------------------- contexts and references of others


#: the other calls itself by the same name
ME, OTHER = PeerIdentity("a", b"i" * 16, "default"), PeerIdentity("a", b"i" * 16, "tenant")
GUESSES = int(os.environ.get("AIOGRAD_GUESSES", "10000"))


async def _no_pass(*_: Any) -> None:
    raise AssertionError("a pass was started")


def test_ids_of_another_tenant_are_no_better_than_invented_ones() -> None:
    """Leaked or guessed: the same answer for whatever is tried, and nothing is made or changed."""
    draws = random.Random("ids")
    table = ContextTable("b", b"i" * 16, Limits(contexts_per_principal=200), draws.randbytes, _no_pass)
    mine = [table.enter(ME, CallHeader(draws.randbytes(16), "a", (-1,), 0, True), 0.0) for _ in range(100)]
    theirs = [table.enter(OTHER, CallHeader(draws.randbytes(16), "x", (-1,), 0, True), 0.0) for _ in range(100)]
    before = [(context.key, dict(context.openers), context.is_released) for context in table]
    texts = set()
    for caller, keys in (
        (OTHER, [context.key for context in mine]),
        (ME, [context.key for context in theirs]),
        (ME, [draws.randbytes(16) for _ in range(GUESSES)]),
    ):
        for key in keys:
            with pytest.raises(ContextNotFoundError) as caught:
                table.find(key, caller, 1.0)
            texts.add(str(caught.value))
            for origin, opens in (("a", False), ("b", True)):
                with pytest.raises(ContextNotFoundError) as caught:
                    table.enter(caller, CallHeader(key, origin, (-1,), 0, opens), 1.0)
                texts.add(str(caught.value))
            table.renew(caller, [Lease(key, 99)], 50.0)
    assert len(texts) == 1, texts
    for context in mine:  # which opens one of its own
        assert table.enter(OTHER, CallHeader(context.key, "a", (-1,), 0, True), 1.0) not in (*mine, *theirs)
    assert [(context.key, dict(context.openers), context.is_released) for context in table][:200] == before


def test_references_of_another_tenant_are_no_better_than_invented_ones() -> None:
    draws = random.Random("references")
    table = ReferenceTable("b", b"e" * 16, draws.randbytes, 1000)
    owned = {principal: [table.add(object(), None, principal, "a") for _ in range(100)] for principal in ("default", "tenant")}
    texts = set()
    for principal, other in (("default", "tenant"), ("tenant", "default")):
        invented = [(draws.randbytes(16), b"e" * 16) for _ in range(GUESSES // 2)]
        for key, epoch in [*((ref.id, ref.epoch) for ref in owned[other]), *invented]:
            with pytest.raises(ReferenceLostError) as caught:
                table.find(key, epoch, principal)
            texts.add(str(caught.value))
            assert not table.remove(key, epoch, principal)
    assert len(texts) == 1 and len(table) == 200


"""Pulses: taken once and in order, by the session that they were made for, and nothing else in their place."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiograd import distributed as dist
from aiograd.distributed.rpc.http.pulse import PulseCarrier
from aiograd.distributed.rpc.limits import Limits
from aiograd.distributed.rpc.peer_session import PeerSession
from aiograd.distributed.rpc.pulse import LINE_BYTES, SECRET_BYTES, Pulse, Pulses
from aiograd.errors import NotExposedError
from tests.distributed.http_support import Authority, get, request
from tests.distributed.workers import SECRET

#: nothing is lost, and no first pulse is sent while a test runs
PATIENT = Limits(missed_heartbeats=1000)


def pair(secret: bytes = bytes(range(SECRET_BYTES))) -> tuple[Pulses, Pulses]:
    return Pulses(secret, dialled=True), Pulses(secret, dialled=False)


@given(st.floats(0.0, 1e9), st.text(max_size=300))
def test_a_pulse_arrives_as_it_was_made_and_a_line_is_cut(seconds: float, line: str) -> None:
    for here, there in (pair(), pair()[::-1]):
        taken = there.take(here.make(Pulse(seconds, line)))
        assert taken is not None and taken.seconds == seconds and taken.line.isprintable() and len(taken.line.encode()) <= 3 * LINE_BYTES
        if line.isascii() and line.isprintable():
            assert taken.line == line[:LINE_BYTES]


def test_each_is_taken_once_and_in_order() -> None:
    here, there = pair()
    first, second, third = (here.make(Pulse(0.5 * number, "a/b.py:1")) for number in range(3))
    assert there.take(second) == Pulse(0.5, "a/b.py:1")
    assert there.take(second) is None and there.take(first) is None, "it was there before, or came too late"
    assert there.take(third) == Pulse(1.0, "a/b.py:1") and here.count == 3


def test_no_other_session_takes_it_nor_the_side_that_made_it() -> None:
    here, there = pair()
    other = pair(os.urandom(SECRET_BYTES))[1]
    pulse = here.make(Pulse(1.0, ""))
    assert here.take(pulse) is None and other.take(pulse) is None
    forged = other._theirs[:16] + pulse[16:]  # under the name of the other session
    assert other.take(forged) is None
    assert there.take(pulse) == Pulse(1.0, "")


def test_nothing_can_be_altered_cut_or_added() -> None:
    here, there = pair()
    pulse = here.make(Pulse(1.0, "a/b.py:1"))
    for at in range(8 * len(pulse)):
        altered = bytearray(pulse)
        altered[at // 8] ^= 1 << at % 8
        assert there.take(bytes(altered)) is None
    for length in range(len(pulse)):
        assert there.take(pulse[:length]) is None
    assert there.take(pulse + b"\0") is None and there.take(pulse + bytes(1 << 20)) is None
    assert there.take(pulse) == Pulse(1.0, "a/b.py:1"), "what was refused has changed nothing"


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf"), -float("inf")])
def test_seconds_that_make_no_sense_are_refused(seconds: float) -> None:
    here, there = pair()
    assert there.take(here.make(Pulse(seconds, ""))) is None
    assert there.take(here.make(Pulse(0.0, ""))) == Pulse(0.0, "")


# -------------------------------------------------------------------- over HTTP


@contextlib.asynccontextmanager
async def sessions(served: dict[str, Any] | None = None, **options: Any) -> AsyncIterator[tuple[dist.Worker, Pulses, PeerSession]]:
    """A worker "b", the pulses of "a" to it, and the session of "b" with "a"."""
    async with (
        dist.Worker("b", secret=SECRET, limits=PATIENT, **(served or {}), **options) as b,
        dist.Worker("a", secret=SECRET, limits=PATIENT, peers={"b": b.url}, **options) as a,
    ):
        with contextlib.suppress(NotExposedError):
            await a.call("b", "nothing")
        (mine,), (theirs,) = a.endpoint.sessions(), b.endpoint.sessions()
        assert mine.pulses is not None
        yield b, mine.pulses, theirs


async def post(worker: dist.Worker, message: bytes, *, more: str = "", method: str = "POST") -> int:
    return (await get(worker.url, "/pulse", f"Aiograd-Pulse: {base64.b64encode(message).decode()}\r\n{more}", method=method))[0]


@pytest.mark.net
async def test_a_peer_takes_a_pulse_once() -> None:
    async with sessions() as (b, pulses, session):
        assert session.detector.is_patient
        first, second = pulses.make(Pulse(0.0, "")), pulses.make(Pulse(0.75, "a/b.py:1"))
        assert await post(b, first) == 204
        assert not session.detector.is_patient and session.detector.held_at is None
        assert await post(b, second) == 204
        assert (session.detector.held_line, round(session.detector.held_seconds, 6)) == ("a/b.py:1", 0.75)
        for replayed in (first, second):
            assert await post(b, replayed) == 403
        assert b.endpoint.refused_pulses == 2


@pytest.mark.net
async def test_what_is_no_pulse_of_a_session_is_refused_and_changes_nothing() -> None:
    async with sessions() as (b, pulses, session):
        before = session.detector.deadline
        stranger, pulse = pair(os.urandom(SECRET_BYTES))[0], pulses.make(Pulse(1.0, "a/b.py:1"))
        for message in (b"", b"?", stranger.make(Pulse(1.0, "")), pulse[:-1] + b"?", pulse[:40], pulse + bytes(2000), os.urandom(len(pulse))):
            assert await post(b, message) == 403
        assert (await get(b.url, "/pulse", "Aiograd-Pulse: ?\r\n", method="POST"))[0] == 403
        assert (await get(b.url, "/pulse", method="POST"))[0] == 403
        assert await post(b, pulse, method="GET") == 405
        assert await post(b, pulse, more="Origin: http://evil.example\r\n") == 403
        assert await post(b, bytes(10_000)) == 400, "a line of a head has a limit"
        text = f"POST /pulse HTTP/1.1\r\nHost: {b.url[7:]}\r\nContent-Length: 3\r\nConnection: close\r\n\r\nabc"
        assert (await request(b.url, text)).startswith(b"HTTP/1.1 413")
        assert session.detector.held_at is None and session.detector.is_patient and session.detector.deadline >= before
        assert b.endpoint.refused_pulses >= 9
        assert await post(b, pulse) == 204


@pytest.mark.net
async def test_a_worker_without_a_watchdog_takes_none() -> None:
    async with sessions({"watchdog": False}) as (b, pulses, session):
        assert await post(b, pulses.make(Pulse(1.0, ""))) == 404
        assert session.detector.is_patient and session.detector.held_at is None


async def carried(carrier: PulseCarrier, *posts: Any) -> None:
    for each in posts:
        carrier.post(*each)
    while carrier.is_busy:
        await asyncio.to_thread(carrier.work, 0.05)


@pytest.mark.net
async def test_a_thread_carries_pulses_also_to_peers_with_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    options: dict[str, Any] = {"client_ssl": authority.client("a")}
    for served in ({}, {"ssl": authority.server("b")}):
        async with sessions({**served}, **options) as (b, pulses, session):
            carrier = PulseCarrier()
            await carried(carrier, (pulses, b.url, Pulse(0.5, "a/b.py:1"), lambda: options["client_ssl"]))
            assert session.detector.held_line == "a/b.py:1"
            carrier.close()


@pytest.mark.net
async def test_peers_that_are_not_there_keep_no_other_from_its_pulse() -> None:
    async with sessions() as (b, pulses, session):
        carrier = PulseCarrier()
        gone = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        port = gone.sockets[0].getsockname()[1]
        gone.close()
        await gone.wait_closed()
        others = [(pair()[0], url, Pulse(1.0, ""), None) for url in (f"http://127.0.0.1:{port}", "http://no-such-host.invalid:1", "nonsense")]
        await carried(carrier, *others, (pulses, b.url, Pulse(0.5, "a/b.py:1"), None))
        assert session.detector.held_line == "a/b.py:1"
        carrier.close()


@pytest.mark.net
async def test_a_pulse_that_is_not_answered_is_given_up_and_none_is_sent_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiograd.distributed.rpc.http.pulse.PATIENCE", 0.2)
    came: list[bytes] = []

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.append(await reader.read())
        writer.close()

    server = await asyncio.start_server(listen, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    carrier, pulses = PulseCarrier(), pair()[0]
    await carried(carrier, *[(pulses, url, Pulse(1.0, ""), None)] * 3)
    while not came:
        await asyncio.sleep(0)
    assert pulses.count == 1 and len(came) == 1 and came[0].startswith(b"POST /pulse HTTP/1.1\r\n")
    carrier.close()
    server.close()
    await server.wait_closed()

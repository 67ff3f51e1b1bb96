"""Shared memory between processes of one machine: only what is safe to touch is touched, and frames go over the connection where there is none."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import mmap
import os
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import distributed as dist
from aiograd.distributed.cluster import LocalCluster
from aiograd.distributed.rpc.frames import FrameKind, pack_header
from aiograd.distributed.rpc.http import HttpTransport
from aiograd.distributed.rpc.keyring import Keyring
from aiograd.distributed.rpc.shared import memory
from aiograd.distributed.rpc.shared.allowance import SharedMemory
from aiograd.distributed.rpc.shared.lane import SHARED_FROM, Invitation, SharedLane
from aiograd.distributed.rpc.shared.ring import SharedRecord, pack, unpack
from aiograd.errors import ProtocolError, WorkerLostError
from aiograd.testing.virtual_clock import VirtualClock
from tests.distributed.intruder import Intruder
from tests.distributed.workers import echo, exposing
from tests.watchdog import SECONDS

pytestmark = [pytest.mark.net, pytest.mark.skipif(not memory.IS_SUPPORTED, reason="this system has no memory files with seals")]

SIZE = 1 << 16
NAME, TOKEN = bytes(range(16)), bytes(range(32))
SECRET = bytes(range(32))


def rings() -> int:
    """Rings that this process has mapped."""
    return sum("memfd:aiograd" in line for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.fixture(autouse=True)
def _no_ring_is_left() -> Any:
    before = rings()
    yield
    assert rings() == before


# ---------------------------------------------------------------- segments


def test_a_segment_is_the_same_memory_on_both_sides() -> None:
    ours, descriptor = memory.create(SIZE)
    theirs = memory.adopt(descriptor, SIZE)
    os.close(descriptor)
    assert theirs is not None
    theirs[:4] = b"abcd"
    assert ours[:4] == b"abcd"


def unsealed() -> int:
    descriptor = os.memfd_create("aiograd", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, SIZE)
    return descriptor


def read_only() -> int:
    import fcntl

    descriptor = unsealed()
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | memory._SEALS)
    return descriptor


def of_another_size() -> int:
    ring, descriptor = memory.create(SIZE // 2)
    ring.close()
    return descriptor


def a_file() -> int:
    with tempfile.TemporaryFile() as file:
        file.truncate(SIZE)
        return os.dup(file.fileno())


def a_pipe() -> int:
    reader, writer = os.pipe()
    os.close(writer)
    return reader


@pytest.mark.parametrize("make", [unsealed, read_only, of_another_size, a_file, a_pipe])
def test_memory_that_could_be_taken_away_is_not_touched(make: Callable[[], int]) -> None:
    descriptor = make()
    try:
        assert memory.adopt(descriptor, SIZE) is None
    finally:
        os.close(descriptor)


def test_huge_pages_are_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    ring, descriptor = memory.create(SIZE)
    ring.close()
    found = os.fstatvfs(descriptor)
    monkeypatch.setattr(os, "fstatvfs", lambda _: os.statvfs_result((2 << 20, *found[1:])))
    try:
        assert memory.adopt(descriptor, SIZE) is None
    finally:
        os.close(descriptor)


def test_a_segment_cannot_change_its_size() -> None:
    ring, descriptor = memory.create(SIZE)
    ring.close()
    try:
        for size in (0, SIZE // 2, 2 * SIZE):
            with pytest.raises(PermissionError):
                os.ftruncate(descriptor, size)
    finally:
        os.close(descriptor)


# ---------------------------------------------------------------- handing over


class Waiting:
    """An invitation, and what came of it."""

    def __init__(self) -> None:
        self.rings: asyncio.Queue[mmap.mmap] = asyncio.Queue()
        self.invitation = Invitation(asyncio.get_running_loop(), SIZE, SECONDS, self.rings.put_nowait)

    @property
    def is_open(self) -> bool:
        return self.invitation._listener is not None


def give(waiting: Waiting, token: bytes, descriptor: int | None = None) -> bool:
    ring, made = memory.create(SIZE)
    ring.close()
    try:
        return memory.hand_over(waiting.invitation.name, token, made if descriptor is None else descriptor)
    finally:
        os.close(made)


async def test_a_ring_is_handed_over() -> None:
    waiting = Waiting()
    assert give(waiting, waiting.invitation.token)
    ring = await asyncio.wait_for(waiting.rings.get(), SECONDS)
    assert len(ring) == SIZE and not waiting.is_open
    assert not give(waiting, waiting.invitation.token)  # nobody waits any more


async def test_who_has_not_read_the_invitation_is_ignored() -> None:
    waiting = Waiting()
    assert give(waiting, bytes(32))
    assert give(waiting, b"")
    read, write = os.pipe()
    assert give(waiting, waiting.invitation.token, read)
    os.close(read)
    os.close(write)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.connect(memory._address(waiting.invitation.name))
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as empty:
            empty.connect(memory._address(waiting.invitation.name))
            empty.send(waiting.invitation.token)
        await asyncio.sleep(0.01)
        assert waiting.rings.empty() and waiting.is_open
        assert give(waiting, waiting.invitation.token)
        await asyncio.wait_for(waiting.rings.get(), SECONDS)


async def visit(waiting: Waiting, copies: int = 1) -> None:
    """Come as a guest who has read the invitation, with so many descriptors of a ring, and be sent away."""
    ring, descriptor = memory.create(SIZE)
    ring.close()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as guest:
        guest.connect(memory._address(waiting.invitation.name))
        socket.send_fds(guest, [waiting.invitation.token], [descriptor] * copies)
    os.close(descriptor)
    while not waiting.invitation._guests:
        await asyncio.sleep(0)
    while waiting.invitation._guests:
        await asyncio.sleep(0)
    assert waiting.rings.empty() and waiting.is_open
    waiting.invitation.close()


async def test_two_descriptors_are_closed_unseen() -> None:
    await visit(Waiting(), copies=2)


async def test_another_user_is_given_nothing_and_believed_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = Waiting()
    monkeypatch.setattr(memory, "is_same_user", lambda connection: False)
    assert not give(waiting, waiting.invitation.token)
    await visit(waiting)


def test_the_user_is_the_one_that_the_system_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        assert memory.is_same_user(ours)
        user = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
        assert not memory.is_same_user(ours)


# ---------------------------------------------------------------- one connection


class Ends:
    """Two lanes; what one writes the other takes, when told to."""

    def __init__(self, frame_bytes: int = SHARED_FROM, **limits: Any) -> None:
        self.shared = [SharedMemory(dist.Limits(**limits)) for _ in range(2)]
        self.written: list[list[bytes]] = [[], []]
        self.writable = [0, 0]
        self.dropped: list[BaseException] = []
        self.lanes = [
            SharedLane(self.shared[side], frame_bytes, self.written[side].append, functools.partial(self._writable, side), self.dropped.append)
            for side in range(2)
        ]

    def _writable(self, side: int) -> None:
        self.writable[side] += 1

    def put(self, body: bytes) -> bool:
        return self.lanes[0].put(frame_of(body))

    def carry(self, side: int = 0) -> list[bytes]:
        """Everything that one side has written arrives; returns the bodies."""
        records, self.written[side] = self.written[side][:], []
        self.lanes[side]._write = self.written[side].append
        return [bytes(body) for record in records for _, body in self.lanes[1 - side].receive(record)]

    async def open(self) -> None:
        """Both know of the ring."""
        assert not self.put(bytes(SHARED_FROM))
        self.carry()
        while self.lanes[0]._out is None:
            await asyncio.sleep(0)

    def close(self) -> None:
        for lane in self.lanes:
            lane.close()


def frame_of(body: bytes) -> tuple[bytes, bytes]:
    return pack_header(FrameKind.REQUEST, 1, (body,), total=len(body), request_kind=1), body


@contextlib.asynccontextmanager
async def ends(**limits: Any) -> AsyncIterator[Ends]:
    both = Ends(**limits)
    try:
        await both.open()
        yield both
    finally:
        both.close()
        assert [each.held for each in both.shared] == [0, 0]


async def test_bodies_go_through_the_ring_and_one_record_tells_of_several() -> None:
    async with ends() as both:
        assert both.shared[1].held == memory.ring_bytes(SHARED_FROM)
        bodies = [os.urandom(SHARED_FROM) for _ in range(3)]
        for body in bodies:
            assert both.put(body)
        assert both.written[0] == []
        both.lanes[0].flush()
        (record,) = both.written[0]
        assert len(record) < 200
        assert both.carry() == bodies
        assert not both.put(bytes(SHARED_FROM - 1))  # small ones do not


async def test_a_full_ring_stops_the_sender_until_the_peer_has_copied_something_out() -> None:
    async with ends() as both:
        lane = both.lanes[0]
        sent = 0
        while not lane.is_full:
            assert both.put(bytes([sent]) * SHARED_FROM)
            sent += 1
        assert sent == 4 and not both.put(bytes(SHARED_FROM))
        lane.flush()
        assert both.carry() == [bytes([index]) * SHARED_FROM for index in range(sent)]
        both.carry(1)
        assert not lane.is_full and both.writable == [1, 0]
        assert both.put(bytes(SHARED_FROM))


async def test_a_peer_that_copies_nothing_out_is_dropped(virtual_clock: VirtualClock) -> None:
    both = Ends(unread_seconds=3.0)
    ring, descriptor = memory.create(memory.ring_bytes(SHARED_FROM))
    os.close(descriptor)
    both.lanes[0]._handed_over(ring)
    while not both.lanes[0].is_full:
        both.put(bytes(SHARED_FROM))
    await asyncio.sleep(2.9)
    assert both.dropped == []
    await asyncio.sleep(0.2)
    assert isinstance(both.dropped[0], WorkerLostError)
    both.close()


async def test_what_a_peer_writes_after_the_fact_is_not_what_was_taken() -> None:
    async with ends() as both:
        body = b"a" * SHARED_FROM
        both.put(body)
        both.lanes[0].flush()
        for record in both.written[0]:
            for _, view in both.lanes[1].receive(record):
                assert view.readonly  # so that sessions copy it before they look at it
                taken = bytearray(view)
                both.lanes[0]._out._memory[:4] = b"evil"  # type: ignore[union-attr]
                assert taken == body and bytes(view[:4]) == b"evil"


@pytest.mark.parametrize(
    "records",
    [
        [pack(SharedRecord.RELEASED, bytes(8))],
        [pack(SharedRecord.DECLINE)],
        [pack(SharedRecord.BODIES, frame_of(bytes(SHARED_FROM))[0])],
        [pack(SharedRecord.INVITE, NAME + TOKEN)[:-1]],
    ],
)
async def test_records_about_rings_that_do_not_exist_are_refused(records: list[bytes]) -> None:
    both = Ends()
    with pytest.raises(ProtocolError) as caught:
        for record in records:
            list(both.lanes[1].receive(record))
    assert caught.value.code == "shared"
    both.close()


@pytest.mark.parametrize("length", [SHARED_FROM + 1, 4 * SHARED_FROM, 0xFFFF_FFFF])
async def test_lengths_that_do_not_fit_are_refused(length: int) -> None:
    async with ends() as both:
        header = pack_header(FrameKind.REQUEST, 1, (range(length),), total=length, request_kind=1)  # type: ignore[arg-type]
        with pytest.raises(ProtocolError) as caught:
            list(both.lanes[1].receive(pack(SharedRecord.BODIES, header)))
        assert caught.value.code == "shared"


async def test_a_second_invitation_is_refused() -> None:
    async with ends() as both:
        with pytest.raises(ProtocolError):
            list(both.lanes[1].receive(pack(SharedRecord.INVITE, NAME + TOKEN)))


@pytest.mark.parametrize("why", ["nobody", "budget", "user", "descriptors", "off"])
async def test_without_a_ring_frames_go_over_the_connection(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    size = memory.ring_bytes(SHARED_FROM)
    both = Ends(shared_bytes=size - 1 if why == "budget" else size)
    if why == "off":
        both.lanes[1] = SharedLane(None, SHARED_FROM, both.written[1].append, lambda: None, both.dropped.append)
    assert not both.put(bytes(SHARED_FROM))
    if why == "nobody":
        assert both.lanes[0]._invitation is not None
        both.lanes[0]._invitation.close()
    elif why == "user":
        monkeypatch.setattr(memory, "is_same_user", lambda connection: False)
    elif why == "descriptors":
        monkeypatch.setattr(memory, "create", _fail)
    both.carry()
    assert [unpack(record)[0] for record in both.written[1]] == [SharedRecord.DECLINE]
    both.carry(1)
    invitation = both.lanes[0]._invitation
    assert invitation is not None and invitation._listener is None
    assert not both.put(bytes(SHARED_FROM)) and both.written[0] == []  # and it is not asked for again
    assert both.shared[1].held == 0
    both.close()


def _fail(*_: Any) -> Any:
    raise OSError("no descriptors")


async def test_an_invitation_to_which_nobody_comes_ends(virtual_clock: VirtualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(loop, "add_reader", lambda *_: None)  # the simulated loop has no sockets
    monkeypatch.setattr(loop, "remove_reader", lambda *_: None)
    both = Ends(handshake_timeout=2.0)
    assert not both.put(bytes(SHARED_FROM))
    invitation = both.lanes[0]._invitation
    assert invitation is not None
    await asyncio.sleep(1.9)
    assert invitation._listener is not None
    await asyncio.sleep(0.2)
    assert invitation._listener is None
    both.close()


# ---------------------------------------------------------------- workers

service = exposing(echo)


@contextlib.asynccontextmanager
async def pair(limits: dist.Limits | None = None, theirs: dist.Limits | None = None) -> AsyncIterator[tuple[dist.Worker, dist.Worker]]:
    async with (
        dist.Worker("b", service=service, secret=SECRET, limits=theirs or limits) as b,
        dist.Worker("a", service=service, secret=SECRET, peers={"b": b.url}, limits=limits) as a,
    ):
        yield a, b


def transport_of(worker: dist.Worker) -> HttpTransport:
    transport = worker.endpoint.transport
    assert isinstance(transport, HttpTransport)
    return transport


def held(worker: dist.Worker) -> int:
    shared = transport_of(worker).shared_memory
    return shared.held if shared is not None else 0


def written(worker: dist.Worker) -> int:
    """Bytes that have been written to open connections."""
    return sum(channel._written for channel in transport_of(worker)._channels)


@contextlib.asynccontextmanager
async def mallory(worker: dist.Worker) -> AsyncIterator[Intruder]:
    """A peer that has a key."""
    async with contextlib.aclosing(HttpTransport()) as transport:
        intruder, keyring = Intruder(await transport.connect(worker.url, SECONDS)), Keyring(SECRET)
        await intruder.greet(keyring.key_for(keyring.default_principal), "mallory", worker.name)
        yield intruder


def numbers(count: int) -> ag.Tensor:
    return ag.tensor(np.arange(count, dtype=np.float32))


async def until_shared(a: dist.Worker, peer: str = "b") -> None:
    """Send large values until those to a peer go through shared memory; for answers ask the peer the same."""
    x = numbers(100_000)
    while True:
        before = written(a)
        await a.call(peer, "echo", x)
        if held(a) and written(a) - before < 10_000:
            return


async def test_large_values_go_through_shared_memory_both_ways() -> None:
    async with pair() as (a, b):
        await until_shared(a)
        await until_shared(b, "a")
        x = numbers(2_500_000)
        before = written(a), written(b)
        for _ in range(3):
            assert np.array_equal((await a.call("b", "echo", x)).numpy(), x.numpy())
        assert written(a) - before[0] < 50_000 and written(b) - before[1] < 50_000
        figures = a.endpoint.statistics().peers[0]
        assert figures.bytes_out > 30_000_000 and figures.bytes_in > 30_000_000  # counted like any other
        assert rings() == 4  # two on each side, and both sides are here
    assert (held(a), held(b)) == (0, 0)


@pytest.mark.parametrize("who", ["caller", "callee", "both"])
async def test_it_can_be_switched_off(who: str) -> None:
    off, on = dist.Limits(shared_bytes=0), dist.Limits()
    async with pair(on if who == "callee" else off, on if who == "caller" else off) as (a, b):
        x = numbers(1_000_000)
        for _ in range(3):
            before = written(a)
            assert np.array_equal((await a.call("b", "echo", x)).numpy(), x.numpy())
            assert written(a) - before > 4_000_000
        assert held(a) == held(b) == rings() == 0


async def test_there_is_a_limit_to_the_shared_memory_of_a_worker() -> None:
    limit = memory.ring_bytes(dist.Limits().frame_bytes)
    async with pair(theirs=dist.Limits(shared_bytes=limit)) as (a, b), dist.Worker("c", secret=SECRET, peers={"b": b.url}) as c:
        await until_shared(a)
        assert held(b) == limit
        x = numbers(1_000_000)
        for _ in range(3):
            before = written(c)
            assert np.array_equal((await c.call("b", "echo", x)).numpy(), x.numpy())
            assert written(c) - before > 4_000_000
        assert held(b) == limit
        await a.aclose()
        while held(b):
            await asyncio.sleep(0)


async def test_a_connection_that_breaks_in_the_middle_of_messages() -> None:
    async with pair() as (a, b):
        await until_shared(a)
        x = numbers(5_000_000)
        for turns in range(0, 40, 4):
            task = asyncio.ensure_future(a.call("b", "echo", x))
            for _ in range(turns):
                await asyncio.sleep(0)
            for channel in list(transport_of(a)._channels):
                channel._transport.abort()
            assert np.array_equal((await task).numpy(), x.numpy())
        await until_shared(a)
        assert held(a) == held(b) == memory.ring_bytes(dist.Limits().frame_bytes)


@pytest.mark.parametrize("record", [pack(SharedRecord.BODIES, frame_of(bytes(99))[0]), b"AGSM", pack(SharedRecord.RELEASED, bytes(8))])
async def test_nonsense_from_an_authenticated_peer_closes_its_connection_and_no_other(record: bytes) -> None:
    async with pair() as (a, b):
        await until_shared(a)
        async with mallory(b) as intruder:
            intruder.send(intruder.seal(record))
            await intruder.closed(SECONDS)
        assert np.array_equal((await a.call("b", "echo", numbers(10))).numpy(), numbers(10).numpy())


async def test_an_invitation_to_nowhere_is_declined() -> None:
    async with dist.Worker("b", service=service, secret=SECRET) as b, mallory(b) as intruder:
        intruder.send(intruder.seal(pack(SharedRecord.INVITE, NAME + TOKEN)))
        while not (heard := [frame for frame in intruder.heard() if frame.startswith(b"AGSM")]):
            await asyncio.sleep(0.001)
        assert unpack(heard[0]) == (SharedRecord.DECLINE, b"")
        assert not intruder.is_closed and held(b) == 0


async def test_only_ends_of_one_address_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair() as (a, b):
        await a.call("b", "echo", numbers(1))
        (channel,) = transport_of(a)._channels
        assert channel.shared_memory is transport_of(a).shared_memory

    class Elsewhere:
        def __init__(self, inner: Any) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        def get_extra_info(self, name: str, default: Any = None) -> Any:
            return ("10.0.0.9", 7000) if name == "peername" else self._inner.get_extra_info(name, default)

    async with pair() as (a, b):
        transport = transport_of(a)
        adopt = transport._adopt
        monkeypatch.setattr(transport, "_adopt", lambda inner, *args, **kwargs: adopt(Elsewhere(inner), *args, **kwargs))  # type: ignore[arg-type]
        await a.call("b", "echo", numbers(1_000_000))
        (channel,) = transport._channels
        assert channel.shared_memory is None and held(a) == 0
        assert held(b) == 0  # b would, but a does not think that it is on the same machine


@pytest.mark.proc
async def test_memory_is_free_again_when_a_peer_is_killed() -> None:
    async with LocalCluster(1, names=["w"], service="tests.distributed.test_shared_memory:service") as cluster:
        driver = cluster.driver
        await until_shared(driver, "w")
        assert rings() == 2
        descriptors = len(os.listdir("/proc/self/fd"))
        call = asyncio.ensure_future(driver.call("w", "echo", numbers(20_000_000)))
        await asyncio.sleep(0)
        os.kill(cluster.pids["w"], signal.SIGKILL)
        with pytest.raises(WorkerLostError):
            await call
        while rings():
            await asyncio.sleep(0)
        assert held(driver) == 0
        assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_the_switch_is_checked() -> None:
    assert dist.Limits(shared_bytes=0).shared_bytes == 0
    for value in (-1, 1.5, True, False, None):
        with pytest.raises((ag.errors.ArgumentError, ag.errors.ArgumentTypeError)):
            dist.Limits(shared_bytes=value)  # type: ignore[arg-type]

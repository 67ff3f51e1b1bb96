"""Workers of different releases: they agree on a version or part at the handshake, each knowing why; never in the middle of a pass."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from aiograd import distributed as dist
from aiograd.distributed.kinds import Kind
from aiograd.distributed.rpc import endpoint as endpoint_module
from aiograd.distributed.rpc import peer as peer_module
from aiograd.distributed.rpc.frames import HEADER, PROTOCOL_VERSIONS
from aiograd.distributed.rpc.handshake import Answerer, Dialler
from aiograd.distributed.rpc.keyring import Key
from aiograd.errors import VersionMismatch
from aiograd.testing.virtual_clock import VirtualClock
from tests.distributed.intruder import Intruder, request_frame
from tests.distributed.memory import Switchboard
from tests.distributed.workers import SECRET, exposing, leaf, triple, until, values, view

Range = tuple[int, int]
RANGES: list[Range] = [(low, high) for low in range(1, 4) for high in range(low, 4)]


@pytest.fixture
def speaks(monkeypatch: pytest.MonkeyPatch) -> dict[str, Range]:
    """The versions that workers speak, by name."""
    ranges: dict[str, Range] = {}

    def of_the_worker(cls: Any) -> Any:
        @functools.wraps(cls)
        def made(name: str, *args: Any, **kwargs: Any) -> Any:
            return cls(name, *args, **kwargs, versions=ranges.get(name, PROTOCOL_VERSIONS))

        return made

    monkeypatch.setattr(peer_module, "Dialler", of_the_worker(Dialler))
    monkeypatch.setattr(endpoint_module, "Answerer", of_the_worker(Answerer))
    return ranges


@pytest.mark.parametrize("theirs", RANGES)
@pytest.mark.parametrize("ours", RANGES)
async def test_every_pair_works_or_parts_at_the_handshake(
    virtual_clock: VirtualClock, ours: Range, theirs: Range, speaks: dict[str, Range]
) -> None:
    speaks.update(a=ours, b=theirs)
    board = Switchboard()
    async with (
        dist.Worker("b", service=exposing(triple), secret=SECRET, transport=board.transport("b")) as b,
        dist.Worker("a", secret=SECRET, transport=board.transport("a"), peers={"b": b.url}) as a,
        a.context() as ctx,
    ):
        x = leaf(1)
        if max(ours[0], theirs[0]) <= min(ours[1], theirs[1]):
            await ctx.backward((await a.call("b", "triple", x)).sum())
            assert values(ctx.grads[x]) == [3]
        else:
            for _ in range(2):
                with pytest.raises(VersionMismatch) as caught:
                    await a.call("b", "triple", x)
                for low, high in (ours, theirs):
                    assert f"versions {low} to {high}" in str(caught.value)
            assert board.dials == 2, "there is no point in trying again"
            assert b.statistics().contexts == 0 and not b.statistics().peers
            ctx.known_workers.clear()
    assert virtual_clock.time() < 3.0


async def test_a_worker_that_is_upgraded_is_spoken_with_again(virtual_clock: VirtualClock, speaks: dict[str, Range]) -> None:
    board = Switchboard()
    async with dist.Worker("a", secret=SECRET, transport=board.transport("a"), peers={"b": "memory://b"}) as a:
        for versions, works in (((7, 8), False), (PROTOCOL_VERSIONS, True), ((7, 8), False)):
            speaks["b"] = versions
            async with dist.Worker("b", service=exposing(triple), secret=SECRET, transport=board.transport("b")), a.context() as ctx:
                x = leaf(1)
                try:
                    await ctx.backward((await a.call("b", "triple", x)).sum())
                    assert works and values(ctx.grads[x]) == [3]
                except VersionMismatch:
                    assert not works
                    ctx.known_workers.clear()


async def test_a_frame_of_another_version_ends_its_connection_and_a_pass_is_not_touched() -> None:
    ran: list[int] = []
    service = exposing(triple)
    service.function("note")(ran.append)
    board = Switchboard()
    async with (
        dist.Worker("b", service=service, secret=dist.Keyring(SECRET, kid="k1"), transport=board.transport("b")) as b,
        dist.Worker("a", secret=dist.Keyring(SECRET, kid="k1"), transport=board.transport("a"), peers={"b": b.url}) as a,
        a.context() as ctx,
    ):
        x = leaf(1)
        y = await a.call("b", "triple", x)
        stranger = board.transport("x")
        for version in (0, PROTOCOL_VERSIONS[1] + 1, 255):
            peer = Intruder(await stranger.connect(b.url, 1.0))  # type: ignore[arg-type]
            await peer.greet(Key("k1", SECRET, "default"), "x", "b")
            head, body = request_frame(Kind.CALL, ("note", [version], {}, True, None))
            fields = list(HEADER.unpack(head))
            fields[1] = version
            peer.send(peer.seal(HEADER.pack(*fields), body))
            await peer.closed()
        await until(lambda: len(view(b, ctx).openers) == 1)
        assert ran == []
        await ctx.backward(y.sum())
        assert values(ctx.grads[x]) == [3]
        await stranger.aclose()

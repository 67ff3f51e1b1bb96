"""Followers serve what their leader serves, to the bit, whatever happens between them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import distributed as dist
from aiograd import serving
from aiograd.distributed.rpc.encodings import Encoding
from aiograd.errors import (
    ArgumentError,
    ArgumentTypeError,
    AuthenticationError,
    DeadlineError,
    ServingError,
    VersionNotFoundError,
    WorkerLostError,
)  # fmt: skip
from aiograd.serving import follower as module
from aiograd.serving.follower import FORGET, Leader
from aiograd.testing.virtual_clock import VirtualClock
from tests.serving.leaders import Scene, Vector, same
from tests.serving.models import Two, ones, values
from tests.support import assert_awaiting_raises, assert_raises, cancel

pytestmark = pytest.mark.usefixtures("virtual_clock")


@pytest.fixture
def scene() -> Scene:
    return Scene()


async def agree(follower: Any, server: Any, seconds: float = 60.0) -> None:
    """Wait until the follower serves what the leader serves."""
    async with asyncio.timeout(seconds):
        while not (same(follower, server) and follower.connected):
            await asyncio.sleep(0.01)


def adopted(follower: Any) -> list[int]:
    """The numbers of the versions that the follower serves from now on, one after the other."""
    numbers: list[int] = []
    adopt = follower._adopt

    def noted(version: serving.Version) -> None:
        adopt(version)
        numbers.append(version.number)

    follower._adopt = noted
    return numbers


# ---------------------------------------------------------------- what travels


async def test_versions_and_rollbacks_travel_and_candidates_do_not(scene: Scene) -> None:
    model = Two(1.0)
    async with scene.leader(model) as server, scene.follower(Two(7.0)) as follower:
        assert same(follower, server) and values(await follower.predict(ones())) == {1.0}
        assert follower.connected and follower.error is None
        for n in range(2, 6):
            model.set(n)
            published = await server.publish(metrics={"loss": 1 / n})
            await follower.reach(n, timeout=5)
            found = follower.current
            names = ("number", "digest", "parent", "metrics", "created", "is_finite")
            assert [getattr(found, name) for name in names] == [getattr(published, name) for name in names]
            answer = await follower.predict(ones())
            assert (values(answer), answer.version, answer.digest) == ({float(n)}, n, published.digest)
        numbers = adopted(follower)
        model.set(6.0)
        await server.publish(promote=False)
        await asyncio.sleep(5)
        assert not numbers
        server.rollback()
        await agree(follower, server)
        server.promote(6)
        await agree(follower, server)
        assert numbers == [4, 6] and values(await follower.predict(ones())) == {6.0}
        assert [version.number for version in follower.versions] == [1, 2, 3, 4, 5, 6], "which answer who asks for them by number"
        follower.split({5: 1.0})
        assert values(await follower.predict(ones(), key="a")) == {5.0}, "splits are each server's own"
        assert len(follower.behind) == 6 and 0 <= max(follower.behind) < 60


async def test_a_delta_is_smaller_than_the_whole_state(scene: Scene) -> None:
    model = Vector(50_000)
    async with scene.leader(model, precision="bfloat16") as server, scene.follower(Vector(50_000, seed=1)) as follower:
        whole = follower.bytes_received
        assert 50_000 < whole < 100_000, "of float32 arrays with 16 bits"
        with ag.no_grad():
            model.weight[:500].add_(1.0)
        await server.publish()
        await agree(follower, server)
        assert 0 < follower.bytes_received - whole < 4_000
        assert not (follower.current.state["weight"].view(np.uint32) & 0xFFFF).any()
        await server.publish()
        await agree(follower, server)
        assert follower.bytes_received - whole < 5_000, "of the same state nothing"


async def test_a_slow_follower_skips_versions(scene: Scene) -> None:
    model = Two(1.0)
    async with scene.leader(model, keep=50) as server, scene.follower(Two()) as follower:
        numbers = adopted(follower)
        scene.board.latency = 0.4
        for n in range(2, 40):
            model.set(n)
            await server.publish()
            await asyncio.sleep(0.1)
            assert follower.worker.statistics().peers[0].outstanding <= 1
        await agree(follower, server)
        assert numbers == sorted(numbers) and numbers[-1] == 39 and len(numbers) < 12
        assert len(follower.behind) == len(numbers)


async def test_a_follower_whose_version_the_leader_has_dropped_gets_a_whole_state(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = encodings(monkeypatch)
    model = Two(1.0)
    async with scene.leader(model, keep=1) as server, scene.follower(Two()) as follower:
        scene.board.hold()
        for n in range(2, 5):
            model.set(n)
            await server.publish()
            await asyncio.sleep(0)
        scene.board.let_go()
        await agree(follower, server)
        assert encoded[0] == (0, 1) and encoded[-1][1] == 4 and encoded[-1][0] in (0, 2, 3)
        follower._store.admit(serving.Version.of(3, follower.current.state, digest="of another"), promote=True)
        follower._serve()
        model.set(5.0)
        await server.publish()
        await agree(follower, server)
        assert encoded[-1] in ((0, 5), (4, 5))


def encodings(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The numbers of base and target of each delta that is encoded from now on; 0 for zeros."""
    encoded: list[tuple[int, int]] = []
    encode = module.encode_delta

    def noted(base: serving.Version, target: serving.Version) -> bytes:
        encoded.append((base.number, target.number))
        return encode(base, target)

    monkeypatch.setattr(module, "encode_delta", noted)
    return encoded


async def test_a_delta_is_encoded_once_for_all_followers(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = encodings(monkeypatch)
    model = Two(1.0)
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(scene.leader(model))
        followers = [await stack.enter_async_context(scene.follower(Two(), f"follower{n}")) for n in range(8)]
        for n in range(2, 12):
            model.set(n)
            await server.publish()
            for follower in followers:
                await agree(follower, server)
        assert encoded == [(n, n + 1) for n in range(11)]
        assert len(_leader_of(server)._payloads) <= module.PAYLOADS


def _leader_of(server: Any) -> Leader:
    return next(each for each in gc.get_objects() if isinstance(each, Leader) and each._server is server)


async def test_a_follower_of_a_follower(scene: Scene) -> None:
    model = Two(1.0)
    service = dist.Service()
    async with scene.leader(model) as server, scene.worker("middle", service=service) as own:
        middle = serving.Follower(own, "leader", Two())
        serving.lead(service, middle)
        async with middle, scene.worker("end", peers={"middle": "memory://middle"}) as last, serving.Follower(last, "middle", Two()) as end:
            for n in range(2, 5):
                model.set(n)
                await server.publish()
                await end.reach(n, timeout=5)
                assert same(end, server)


async def test_reduced_precision_of_the_worker_does_not_touch_weights(scene: Scene) -> None:
    options = {"encoding": Encoding.BFLOAT16}
    model = Vector()
    async with scene.leader(model, worker=options) as server, scene.follower(Vector(seed=1), worker=options) as follower:
        model.step()
        await server.publish()
        await agree(follower, server)


# ---------------------------------------------------------------- parts


@pytest.mark.parametrize("how", ["parts", "leader's limits", "follower's limits"])
async def test_a_payload_in_several_messages(scene: Scene, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    limits = {"limits": dist.Limits(message_bytes=1200, frame_bytes=1000)}
    if how == "parts":
        monkeypatch.setattr(module, "PART", 100)
    model = Vector(300)
    options = [limits if how == f"{side} limits" else None for side in ("leader's", "follower's")]
    async with scene.leader(model, worker=options[0]) as server, scene.follower(Vector(300, seed=1), worker=options[1]) as follower:
        for _ in range(3):
            model.step()
            await server.publish()
            await agree(follower, server)
        assert follower.bytes_received > 4 * 1000 and not _leader_of(server)._transfers


async def test_a_version_arrives_whole_also_where_the_leader_has_dropped_it_meanwhile(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PART", 100)
    model = Vector(300)
    scene.board.latency = 0.01

    async def publish() -> None:
        while True:
            await asyncio.sleep(0.05)
            model.step()
            await server.publish()

    async with scene.leader(model, keep=1) as server:
        publishing = asyncio.create_task(publish())
        async with asyncio.timeout(30), scene.follower(Vector(300, seed=1)) as follower:
            numbers = adopted(follower)
            await asyncio.sleep(5)
            assert len(numbers) > 5 and server.current.number > 4 * len(numbers)
            await cancel(publishing)
            await agree(follower, server)


async def test_a_transfer_that_is_not_finished_is_forgotten(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PART", 100)
    async with scene.leader(Vector(300)) as server, scene.worker("w") as worker:
        leader = _leader_of(server)
        for n in range(3):
            answer = await worker.call("leader", "serving.follow", 0, "", 0, 0, 100)
            assert answer["transfer"] == n + 1 and answer["size"] > 200 == 2 * len(answer["part"])
        await asyncio.sleep(FORGET - 1)
        again = await worker.call("leader", "serving.follow", 0, "", 2, 100, 100)
        assert {**again, "part": 0} == {**answer, "part": 0, "transfer": 2} and len(leader._transfers) == 3
        await asyncio.sleep(2)
        await worker.call("leader", "serving.follow", 0, "", 2, 200, 100)
        assert list(leader._transfers) == [2]
        answer = await worker.call("leader", "serving.follow", 0, "", 1, 100, 100)
        assert list(answer) == ["refused"] and "there is no transfer 1" in answer["refused"]
        for offset in (10**9, -(10**9)):
            assert "part" in await worker.call("leader", "serving.follow", 0, "", 0, offset, -5)


async def test_a_leader_that_has_forgotten_the_transfer_is_asked_from_the_start(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PART", 100)
    model = Vector(300)
    async with scene.leader(model) as server, scene.follower(Vector(300, seed=1)) as follower:
        scene.board.latency = 0.01
        model.step()
        await server.publish()
        while not _leader_of(server)._transfers:
            await asyncio.sleep(0.001)
        _leader_of(server)._transfers.clear()
        while follower.connected:
            await asyncio.sleep(0.001)
        assert isinstance(follower.error, ServingError) and "there is no transfer" in str(follower.error)
        await agree(follower, server)


# ---------------------------------------------------------------- waiting, and what is refused


async def test_reading_what_was_written(scene: Scene) -> None:
    model = Two(1.0)
    async with scene.leader(model) as server, scene.follower(Two(), deadline=5.0) as follower:
        waiting = asyncio.create_task(follower.predict(ones(), at_least=3))
        for n in (2, 3):
            await asyncio.sleep(1)
            assert not waiting.done()
            model.set(n)
            await server.publish()
        answer = await waiting
        assert (answer.version, values(answer)) == (3, {3.0})
        await assert_awaiting_raises(DeadlineError, "version 9 or a later one does not serve in time; version 3 does", follower.reach(9, timeout=1))
        await assert_awaiting_raises(DeadlineError, "version 9", follower.predict(ones(), at_least=9, deadline=0.5))
        await follower.reach(2)
        reaching = asyncio.create_task(follower.reach(9))
        await asyncio.sleep(0)
    await assert_awaiting_raises(ServingError, "closed", reaching)
    await assert_awaiting_raises(ServingError, "closed", follower.reach(1))


async def test_a_wrong_secret_is_an_error_on_entry(scene: Scene, virtual_clock: VirtualClock) -> None:
    async with scene.leader(Two(1.0)) as server:
        with pytest.raises(AuthenticationError, match="may not have the same secret"):
            async with scene.follower(Two(), worker={"secret": b"another secret of 32 bytes and 1"}):
                pass
        assert virtual_clock.time() < 2.0
        async with scene.follower(Two()) as follower:
            assert same(follower, server)


async def test_a_leader_that_closes_in_the_middle_of_handshakes_is_waited_for(scene: Scene, virtual_clock: VirtualClock) -> None:
    """Before its first version a follower takes a few failed handshakes for a leader that closes; afterwards it never raises."""
    async with scene.worker("follower") as own:
        follower = serving.Follower(own, "leader", Two())
        failures: list[Exception] = [*map(AuthenticationError, "abc"), WorkerLostError("d"), *map(AuthenticationError, "efg")]
        call = own.call_apart

        async def failing(*args: Any, **options: Any) -> Any:
            if failures:
                raise failures.pop(0)
            return await call(*args, **options)

        own.call_apart = failing  # type: ignore[method-assign]
        async with scene.leader(Two(1.0)) as server, follower:
            assert same(follower, server) and failures == []
            failures += map(AuthenticationError, "hijklmn")
            for number in (2, 3):
                await server.publish()
                await follower.reach(number, timeout=60.0)
            assert same(follower, server) and failures == []


async def test_what_followers_and_leaders_refuse(scene: Scene) -> None:
    async with scene.leader(Two(1.0)) as server, scene.follower(Two()) as follower:
        for method, call in {
            "publish": lambda: follower.publish(), "promote": lambda: _called(follower.promote, 1), "rollback": lambda: _called(follower.rollback),
        }.items():  # fmt: skip
            await assert_awaiting_raises(ServingError, f"{method}: a follower serves what its leader serves; call it on .* worker 'leader'", call())
        await assert_awaiting_raises(VersionNotFoundError, "version 9 is not kept", follower.predict(ones(), version=9))
        buffer, optimizer = serving.ReplayBuffer(5), ag.optim.SGD(follower.model.parameters(), 0.1)
        assert_raises(ServingError, "Trainer: a follower serves", serving.Trainer, follower, optimizer, lambda *_: None, buffer=buffer)
        await assert_awaiting_raises(ArgumentError, "expected seconds, 0 or more", follower.reach(1, float("nan")))
        await assert_awaiting_raises(ArgumentTypeError, "expected the number of a version", follower.reach("x"))  # type: ignore[arg-type]
        own = follower.worker
        assert_raises(ArgumentError, "the leader keeps the log", serving.Follower, own, "leader", Two(), log="x")
        assert_raises(ArgumentTypeError, "expected a Worker and the name of the leader's", serving.Follower, "leader", own, Two())
        assert_raises(ArgumentTypeError, "expected a Worker and the name of the leader's", serving.Follower, own, 3, Two())
        assert_raises(ArgumentTypeError, "expected a Module", serving.Follower, own, "leader", None)
        service = dist.Service()
        serving.lead(service, server)
        assert_raises(ArgumentError, "exposed by this service already", serving.lead, service, server)
        for wrong in ((None, server), (service, None), (server, service)):
            assert_raises(ArgumentTypeError, "lead: expected a dist.Service and a Server", serving.lead, *wrong)
        assert same(follower, server) and math.isfinite(sum(follower.behind))


async def _called(method: Any, *args: Any) -> Any:
    return method(*args)

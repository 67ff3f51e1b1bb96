"""Followers serve what their leader serves, to the bit, whatever happens between them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import math
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import distributed as dist
from aiograd import nn, serving
from aiograd.distributed.rpc.encodings import Encoding
from aiograd.errors import ArgumentError, ArgumentTypeError, DeadlineError, DeltaError, DistributedError, ServingError, VersionNotFoundError
from aiograd.serving import follower as module
from aiograd.serving.follower import FORGET, LONG_POLL, LONGEST_RETRY, Leader
from aiograd.testing import simulated_run
from tests.distributed.workers import settled
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
    adopt = follower._publisher.adopt

    def noted(version: serving.Version) -> None:
        adopt(version)
        numbers.append(version.number)

    follower._publisher.adopt = noted
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
    encoded = _encodings(monkeypatch)
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
        follower._publisher.store.adopt(serving.Version.of(3, follower.current.state, digest="of another"))
        follower._publisher._serve()
        model.set(5.0)
        await server.publish()
        await agree(follower, server)
        assert encoded[-1] in ((0, 5), (4, 5))


def _encodings(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The numbers of base and target of each delta that is encoded from now on; 0 for zeros."""
    encoded: list[tuple[int, int]] = []
    encode = module.encode_delta

    def noted(base: serving.Version, target: serving.Version) -> bytes:
        encoded.append((base.number, target.number))
        return encode(base, target)

    monkeypatch.setattr(module, "encode_delta", noted)
    return encoded


async def test_a_delta_is_encoded_once_for_all_followers(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = _encodings(monkeypatch)
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


# ---------------------------------------------------------------- damage


@pytest.mark.parametrize("step", [11, pytest.param(1, marks=pytest.mark.sweep)])
async def test_damage_of_any_byte_of_a_delta_is_noticed_and_the_whole_state_fetched(scene: Scene, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    encode, places = module.encode_delta, 0
    place: int | None = None

    def damaged(base: serving.Version, target: serving.Version) -> bytes:
        nonlocal places
        data = encode(base, target)
        places = max(places, len(data))
        if place is None or base.number == 0:
            return data
        return data[:place] + bytes([data[place % len(data)] ^ 0x10]) + data[place + 1 :] if place < len(data) else data[:-1]

    monkeypatch.setattr(module, "encode_delta", damaged)
    model = Two(1.0)
    async with scene.leader(model) as server, scene.follower(Two()) as follower:
        await agree(follower, server)
        place = 0
        while place <= places:
            before = follower.current
            model.set(model.first.item() + 1)
            await server.publish()
            while follower.connected:
                await asyncio.sleep(0.001)
            assert isinstance(follower.error, DeltaError) and follower.current is before, "nothing is applied"
            await agree(follower, server)
            place += step


async def test_answers_that_are_none(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The follower goes on serving, says what is wrong, and heals."""
    service = dist.Service()
    model = Two(1.0)
    server = serving.Server(model)
    leader = Leader(server)
    wrong: Any = None
    count = itertools.count(0.5)

    @service.function("serving.follow")
    async def follow(number: int, digest: str, transfer: int, offset: int, most: int) -> Any:
        answer = await leader.follow(number, digest, transfer, offset, most)
        if wrong is None:
            return answer
        return wrong if not callable(wrong) else wrong(answer) if "part" in answer else answer

    monkeypatch.setattr(module, "PART", 100)
    async with server, scene.worker("leader", service=service), scene.follower(Two()) as follower:
        number = 1
        for answer, error, text in (
            (3, DistributedError, "other fields"), ([], DistributedError, "other fields"), ({"number": 1}, DistributedError, "other fields"),
            ({"refused": 3}, DistributedError, "other fields"), ({"refused": "closed"}, ServingError, "has no version: closed"),
            (lambda answer: {**answer, "size": 1.5}, DistributedError, "other fields"),
            (lambda answer: {**answer, "size": 10**12}, DeltaError, "1000000000000 bytes for a model of 8"),
            (lambda answer: {**answer, "size": answer["size"] + 5}, ServingError, "has no version: there is no transfer"),
            (lambda answer: {**answer, "since": next(count)}, DeltaError, "a part of version .* does not fit the parts before it"),
            (lambda answer: {**answer, "number": 99}, DeltaError, "version 99 was announced by 'leader', and version"),
            (lambda answer: {**answer, "part": answer["part"][:-1]}, ServingError, "has no version: there is no transfer"),
            (lambda answer: {**answer, "part": answer["part"][:0]}, DeltaError, "0 bytes are no whole delta"),
            (lambda answer: {**answer, "part": answer["part"] ^ 1}, DeltaError, "are no whole delta"),
            (lambda answer: {**answer, "part": answer["part"].reshape(1, -1)}, DistributedError, "other fields"),
            (lambda answer: {**answer, "part": ag.tensor([1.0])}, DistributedError, "other fields"),
            (lambda answer: {**answer, "model": "x"}, ArgumentError, "the leader 'leader' serves another model than Two"),
            (lambda answer: {**answer, "is_whole": not answer["is_whole"]}, DeltaError, "from another version"),
        ):  # fmt: skip
            wrong, number = answer, number + 1
            before = follower.current
            model.set(number)
            await server.publish()
            while follower.connected:
                await asyncio.sleep(0.001)
            assert isinstance(follower.error, error)
            with pytest.raises(error, match=text):
                raise follower.error
            assert follower.current is before and values(await follower.predict(ones())) == {float(number - 1)}
            wrong = None
            await agree(follower, server)


async def test_a_failure_of_the_leader_is_not_kept(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    encode, failures = module.encode_delta, 2

    def failing(base: serving.Version, target: serving.Version) -> bytes:
        nonlocal failures
        if target.number == 2 and failures:
            failures -= 1
            raise MemoryError("no room")
        return encode(base, target)

    monkeypatch.setattr(module, "encode_delta", failing)
    model = Two(1.0)
    async with scene.leader(model) as server, scene.follower(Two()) as follower:
        await server.publish()
        while follower.connected:
            await asyncio.sleep(0.001)
        assert "no room" in str(follower.error)
        await agree(follower, server)
        assert not failures


# ---------------------------------------------------------------- leaders that come and go


async def test_without_the_leader_a_follower_goes_on_serving_and_says_so(
    scene: Scene, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = _encodings(monkeypatch)
    model = Two(1.0)
    async with scene.worker("follower") as own:
        follower = serving.Follower(own, "leader", Two())
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(scene.leader(model))
            await stack.enter_async_context(follower)
            scene.crash("leader")
            await asyncio.sleep(10)
            assert not follower.connected and isinstance(follower.error, DistributedError)
            assert values(await follower.predict(ones())) == {1.0}
            (said,) = [record.getMessage() for record in caplog.records if record.name == "aiograd.serving"]
            assert "is without its leader leader and serves what it has: worker 'leader' was lost" in said
            model.set(2.0)
            async with scene.leader(model, log=None) as server:  # another process, whose numbers begin anew
                started = asyncio.get_running_loop().time()
                await agree(follower, server)
                assert asyncio.get_running_loop().time() - started < LONGEST_RETRY + 1
                assert (follower.current.number, values(await follower.predict(ones()))) == (1, {2.0}), "other weights under the same number"
                assert encoded == [(0, 1), (0, 1)], "whole"
                await server.aclose()
                await asyncio.sleep(LONG_POLL)
                assert not follower.connected and "after it was closed" in str(follower.error)
                assert values(await follower.predict(ones())) == {2.0}


async def test_a_follower_waits_for_its_leader(scene: Scene) -> None:
    async with scene.worker("follower") as own:
        follower = serving.Follower(own, "leader", Two())
        entering = asyncio.create_task(follower.__aenter__())
        await asyncio.sleep(30)
        assert not entering.done() and follower.error is not None
        for use in (follower.predict(ones()), follower.reach(1)):
            await assert_awaiting_raises(ServingError, "before it is entered", use)
        async with scene.worker("leader"):  # which does not lead
            await asyncio.sleep(5)
            assert "no function 'serving.follow' is exposed" in str(follower.error) and not entering.done()
        async with scene.leader(Two(3.0)):
            assert await entering is follower and values(await follower.predict(ones())) == {3.0}
            await follower.aclose()
        late = serving.Follower(own, "leader", Two())
        entering = asyncio.create_task(late.__aenter__())
        await asyncio.sleep(5)
        await cancel(entering)
        await settled(own)
        assert late._task is not None and late._task.done()
        await late.aclose()
        await assert_awaiting_raises(ServingError, "entered once", late.__aenter__())
        await settled(own)


async def test_a_leader_of_another_model(scene: Scene) -> None:
    class Reordered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.second = nn.Parameter(ag.tensor([0.0]))
            self.first = nn.Parameter(ag.tensor([0.0]))

    async with scene.worker("follower") as own:
        async with scene.leader(Two(1.0)) as server:
            for model in (nn.Linear(2, 1), Vector(2), Reordered()):
                entering = serving.Follower(own, "leader", model).__aenter__()
                await assert_awaiting_raises(ArgumentError, f"the leader 'leader' serves another model than {type(model).__name__}", entering)
            follower = await serving.Follower(own, "leader", Two()).__aenter__()
        async with scene.leader(nn.Linear(2, 1)):
            await asyncio.sleep(5)
            assert isinstance(follower.error, ArgumentError) and values(await follower.predict(ones())) == {1.0}
        async with scene.leader(Two(2.0)) as server:
            await agree(follower, server)
            await follower.aclose()


async def test_a_leader_that_closes_its_worker_leaves_nothing(scene: Scene) -> None:
    async with scene.leader(Two(1.0)), scene.worker("follower") as own, scene.worker("other") as other:
        followers = [await serving.Follower(each, "leader", Two()).__aenter__() for each in (own, other)]
        await followers[0].aclose()
        await settled(own)
        await own.aclose()
        await other.aclose()
        await asyncio.sleep(3)
        assert not followers[1].connected and "not open" in str(followers[1].error)
        await followers[1].aclose()
        await followers[1].aclose()


@pytest.mark.parametrize("fault", ["reset", "silent"])
def test_a_link_that_breaks_in_any_message_is_made_up_for(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PART", 400)
    frames = 0

    async def main(broken: int) -> None:
        nonlocal frames
        scene, model = Scene(), Vector(200)
        frames = 0

        def passes(channel: Any, frame: bytes) -> bool:
            nonlocal frames
            frames += 1
            if frames == broken and fault == "reset":
                asyncio.get_running_loop().call_soon(scene.board.reset)
            return frames != broken

        scene.board.passes = passes
        async with scene.leader(model) as server, scene.follower(Vector(200, seed=1)) as follower:
            for _ in range(2):
                model.step()
                await server.publish()
                await agree(follower, server, 30.0)

    simulated_run(main, -1)
    count, step = frames, max(1, frames // 25)
    for broken in range(1, count + 1, step):
        run = simulated_run(main, broken)
        assert not run.leftover_tasks, (broken, run.leftover_tasks)


def test_entering_following_and_leaving_can_be_cancelled_at_every_turn() -> None:
    async def main() -> None:
        scene, model = Scene(), Two(1.0)
        async with scene.leader(model) as server, scene.follower(Two()) as follower:
            model.set(2.0)
            await server.publish()
            assert values(await follower.predict(ones(), at_least=2)) == {2.0}
            server.rollback()
            while follower.current.number == 2:
                await asyncio.sleep(0)

    steps = simulated_run(main).steps
    for n in range(1, steps, max(1, steps // 60)):
        try:
            run = simulated_run(main, cancel_at=n)
        except asyncio.CancelledError:
            continue
        assert not run.leftover_tasks


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


async def test_what_followers_and_leaders_refuse(scene: Scene) -> None:
    async with scene.leader(Two(1.0)) as server, scene.follower(Two()) as follower:
        for method, call in {
            "publish": lambda: follower.publish(), "promote": lambda: _called(follower.promote, 1), "rollback": lambda: _called(follower.rollback),
        }.items():  # fmt: skip
            await assert_awaiting_raises(ServingError, f"{method}: a follower serves what its leader serves; call it on .* worker 'leader'", call())
        await assert_awaiting_raises(VersionNotFoundError, "version 9 is not kept", follower.predict(ones(), version=9))
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

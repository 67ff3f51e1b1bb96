"""Followers of leaders that come and go, over links that break, with payloads that are damaged."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import Any

import pytest

import aiograd as ag
from aiograd import distributed as dist
from aiograd import nn, serving
from aiograd.errors import ArgumentError, DeltaError, DistributedError, ServingError
from aiograd.serving import follower as module
from aiograd.serving.follower import LONG_POLL, LONGEST_RETRY, Leader
from aiograd.testing import simulated_run
from tests.distributed.workers import settled
from tests.serving.leaders import Scene, Vector
from tests.serving.models import Two, ones, values
from tests.serving.test_follower import agree, encodings
from tests.support import assert_awaiting_raises, cancel

pytestmark = pytest.mark.usefixtures("virtual_clock")


@pytest.fixture
def scene() -> Scene:
    return Scene()


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
    encoded = encodings(monkeypatch)
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
            assert "is without its leader 'leader' and serves its last version: worker 'leader' was lost" in said
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

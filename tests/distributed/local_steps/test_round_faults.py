"""Rounds that fail: base, outer optimizer, buffers and the place in the data change on all contributors or nowhere."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import pytest

from aiograd import distributed as dist
from aiograd.errors import DeadlineError, DistributedError, QuorumError, ReferenceLostError, RemoteError, UnknownPeerError, WorkerLostError
from tests.distributed.local_steps.learners import Dropping
from tests.distributed.local_steps.simulated import World, in_world

METHODS = ["compute", "prepare", "commit", "buffers"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("is_before", [True, False])
@pytest.mark.parametrize("silent", [True, False])
@pytest.mark.parametrize("name", ["w0", "w2"])
def test_a_member_that_is_killed_is_left_out(method: str, is_before: bool, silent: bool, name: str) -> None:
    async def main(world: World) -> None:
        await world.training.round()
        await world.coordinator.told()  # the next commit is of the next round
        if method == "buffers" and name != "w0":
            return
        world.around(name, method, lambda: world.network.kill(name, silent=silent), is_before=is_before)
        record = await world.training.round()
        counted = method == "commit"
        assert (name in record.members) is counted
        assert record.lost == (() if counted else (name,))
        following = await world.training.round()
        assert name not in following.members and name not in world.training.names
        assert following.lost == ((name,) if counted else ())
        if not counted:  # its batches are read first
            lost = [(0, 6), (0, 7)] if name == "w0" else [(0, 10), (0, 11)]
            assert list(following.batches["w1" if name == "w0" else "w0"]) == lost
        async for _ in world.training.rounds(1):
            pass
        await world.oracle()

    World(module=Dropping, steps=2).simulate(main)


def delayed(world: World, name: str, method: str, seconds: float) -> None:
    """Let a member wait before it does what it is asked for, once."""
    member = world.member(name)
    original = getattr(member, method)

    async def late(*args: Any) -> Any:
        vars(member).pop(method, None)
        await asyncio.sleep(seconds)
        return await original(*args)

    setattr(member, method, late)


@in_world()
async def test_a_round_is_over_when_it_is_decided_and_a_member_computes_when_it_has_committed(world: World) -> None:
    """The outcome travels beside the next request to compute, which may come first."""
    now = asyncio.get_running_loop().time
    await world.training.round()
    await world.training.round()
    await world.coordinator.told()
    delayed(world, "w1", "commit", 0.5)
    began = now()
    record = await world.training.round()
    assert now() - began < 0.5 and not world.coordinator.decisions.are_acknowledged, "nothing waits for the commit"
    following = await world.training.round()
    assert following.members == record.members and 0.5 < now() - began < 0.9, "no request was tried again"
    assert set(await world.training.digests()) == {"w0", "w1", "w2"}, "it waits until all have the base"
    assert world.coordinator.decisions.are_acknowledged
    await world.oracle()


@pytest.mark.parametrize("use", ["digests", "checkpoint", "restore", "aclose"])
def test_what_uses_members_waits_for_the_outcome_of_the_last_round(use: str) -> None:
    async def main(world: World) -> None:
        training = world.training
        await training.round()
        await world.coordinator.told()
        state = await training.checkpoint()
        delayed(world, "w1", "commit", 0.5)
        await training.round()
        committed = world.member("w1")._training.base
        if use == "digests":
            assert set(await training.digests()) == {"w0", "w1", "w2"}
        elif use == "checkpoint":
            assert set((await training.checkpoint(members=True))["members"]) == {"w0", "w1", "w2"}
        elif use == "restore":
            await training.restore(state)
            assert training.names == ("w0", "w1", "w2") and (await training.round()).number == 2
        else:
            await training.aclose()
        assert committed.version == 2, "it has committed the round"

    World().simulate(main)


@in_world()
async def test_a_member_that_does_not_commit_is_lost_whatever_it_says_about_its_next_batches(world: World) -> None:
    """It refuses the commit and then the local steps from the base that it does not have: no error of the round, the others go on."""
    await world.training.round()
    await world.coordinator.told()
    member = world.member("w1")

    async def refuses(step: int) -> bool:
        member._forget_step()
        raise DistributedError("no")

    member.commit = refuses
    assert (await world.training.round()).members == ("w0", "w1", "w2"), "it counted"
    record = await world.training.round()
    assert record.members == ("w0", "w2") and record.lost == ("w1",)
    await world.oracle()


@in_world()
async def test_computed_steps_are_not_computed_again(world: World) -> None:
    """A failed exchange is taken again with the contributions that are there."""
    steps = {name: world.model(name).steps for name in world.names}
    world.around("w1", "prepare", lambda: world.network.kill("w1"), is_before=True)
    record = await world.training.round()
    assert record.members == ("w0", "w2") and record.lost == ("w1",)
    assert [world.model(name).steps - steps[name] for name in record.members] == [2, 2]
    await world.oracle()


@pytest.mark.parametrize("where", ["loss", "data"])
@pytest.mark.parametrize("kind", [WorkerLostError, ReferenceLostError, DeadlineError, UnknownPeerError])
def test_a_loss_or_data_that_lost_a_worker_of_its_own_does_not_lose_the_member(kind: type[Exception], where: str) -> None:
    """Even if it names a member."""

    async def main(world: World) -> None:
        training = world.training
        await training.round()
        before = training.digest, training.names
        error = WorkerLostError("w1 is lost", worker="w1") if kind is WorkerLostError else kind("of its own")
        module, loader = world.model("w2"), world.member("w2")._training.loader
        if where == "loss":
            module.fails.append(error)
        else:
            read = loader.read

            async def fails(indices: Any) -> Any:
                loader.read = read
                raise error

            loader.read = fails
        with pytest.raises(RemoteError, match=f"{kind.__name__}: {error}") as caught:
            await training.round()
        assert (caught.value.worker, caught.value.type_name) == ("w2", kind.__name__)
        assert (training.digest, training.names) == before
        assert (await training.round()).members == training.names == ("w0", "w1", "w2")
        await world.oracle()

    World().simulate(main)


@pytest.mark.parametrize("name", ["w0", "w1"])
def test_a_loss_that_raises_names_the_member_and_its_batches_go_back(name: str) -> None:
    async def main(world: World) -> None:
        training = world.training
        await training.round()
        before = training.digest, training.version, training.epoch
        world.model(name).fails.append(ZeroDivisionError("by nought"))
        steps = {each: world.model(each).steps for each in world.names}
        with pytest.raises(RemoteError, match="by nought") as caught:
            await training.round()
        assert caught.value.worker == name
        assert (training.digest, training.version, training.epoch) == before
        record = await training.round()
        assert record.members == ("w0", "w1", "w2")
        others = [each for each in world.names if each != name]
        assert [world.model(each).steps - steps[each] for each in others] == [2, 2], "they go on with what they have"
        await world.oracle()

    World().simulate(main)


@in_world()
async def test_a_pseudo_gradient_that_is_not_finite_is_refused(world: World) -> None:
    model = world.model("w1")
    model.second.bias._data[1] = float("nan")  # undone when it begins at the base
    await world.training.round()
    original = model.loss

    async def broken(*batch: Any) -> Any:
        loss = await original(*batch)
        model.first.weight._data[2, 1] = float("inf")
        return loss

    model.loss = broken
    with pytest.raises(RemoteError, match=r"pseudo-gradient of first.weight is .* at \[\d, \d\]") as caught:
        await world.training.round()
    assert caught.value.worker == "w1"
    del model.loss
    await world.training.round()
    await world.oracle()


@pytest.mark.parametrize("method", ["prepare", "digest"])
def test_the_errors_of_all_members_are_in_the_first(method: str) -> None:
    async def main(world: World) -> None:
        def fail(text: str) -> None:
            raise ZeroDivisionError(text)

        training = world.training
        await training.round()
        before = training.digest
        for name in ("w1", "w2"):
            world.around(name, method, functools.partial(fail, f"nought of {name}"), is_before=True)
        if method == "prepare":
            world.around("w0", method, lambda: world.network.kill("w0"), is_before=True)
        with pytest.raises(RemoteError, match="nought of w1") as caught:
            await (training.round() if method == "prepare" else training.digests())
        notes = "\n".join(caught.value.__notes__)
        assert "the member on w2 has failed, too: RemoteError: " in notes and "nought of w2" in notes and "nought of w1" not in notes
        assert ("the member on w0 has failed, too: WorkerLostError: " in notes) == (method == "prepare")
        assert training.digest == before
        await training.round()
        await world.oracle()

    World().simulate(main)


@in_world(quorum=2)
async def test_too_few_members(world: World) -> None:
    training = world.training
    await training.round()
    before = training.digest, training.version
    for name in ("w0", "w2"):
        world.network.kill(name)
    for _ in range(2):
        with pytest.raises(QuorumError, match="w0, w2") as caught:
            await training.round()
        assert set(caught.value.lost) == {"w0", "w2"}
        assert (training.digest, training.version) == before
    world.restart("w2")
    await asyncio.sleep(1.0)
    await training.add("w2")
    record = await training.round()
    assert record.members == ("w1", "w2") and set(record.lost) == {"w0", "w2"}
    await world.oracle()


@pytest.mark.parametrize("seconds", [0.0, 0.001, 0.003, 0.005, 0.007, 0.009, 0.011, 0.02])
def test_a_round_that_is_cancelled(seconds: float) -> None:
    async def main(world: World) -> None:
        training = world.training
        await training.round()
        before = training.version
        rounding = asyncio.ensure_future(training.round())
        asyncio.get_running_loop().call_later(seconds, rounding.cancel)
        try:
            await rounding
        except asyncio.CancelledError as error:
            assert training.version == before + getattr(error, "committed", False)
        for _ in range(2):
            await training.round()
        await world.oracle()
        assert len(await training.digests()) == 3

    World(module=Dropping).simulate(main)


# ---------------------------------------------------------------- late members


@in_world(patience=1.0, quorum=2)
async def test_a_late_member_contributes_to_a_later_round(world: World) -> None:
    training = world.training
    world.model("w1").waits = {1: 3.5}
    first = await training.round()
    assert (first.members, first.late) == (("w0", "w2"), ("w1",))
    second = await training.round()
    assert (second.members, second.late) == (("w0", "w2"), ("w1",))
    records = [second]
    while "w1" not in records[-1].members:
        records.append(await training.round())
    last = records[-1]
    assert last.began["w1"] == 0 and last.began["w0"] == last.number - 1
    assert last.batches["w1"] == ((0, 2), (0, 3))
    assert (await training.round()).began == dict.fromkeys(world.names, last.number)
    await world.oracle()


@in_world(patience=0.5)
async def test_a_late_member_whose_rounds_are_not_kept_gets_the_base_again(world: World) -> None:
    training = world.training
    world.model("w1").waits = {1: 6.0}
    for _ in range(10):
        await training.round()
    assert len(training._coordinator._answers) < 10, "not all of them are kept"
    await asyncio.sleep(6.0)
    record = await training.round()
    assert record.began["w1"] == 0 and record.members == ("w0", "w1", "w2")
    await training.round()
    await world.oracle()


# ---------------------------------------------------------------- members that join


@in_world(members=2)
async def test_a_member_joins_beside_running_rounds(world: World) -> None:
    training = world.training
    await training.round()
    for name in training.names:
        world.model(name).waits = {0: 0.1}
    adding = asyncio.ensure_future(training.add("w2"))
    records = [await training.round() for _ in range(2)]
    await adding
    records.append(await training.round())
    assert training.names == ("w0", "w1", "w2")
    assert records[-1].members == ("w0", "w1", "w2")
    assert await training.digests() == dict.fromkeys(training.names, training.digest)
    await world.oracle()


@in_world(members=2)
async def test_a_joiner_replays_the_rounds_that_were_committed_meanwhile(world: World) -> None:
    training, coordinator = world.training, world.training._coordinator
    await training.round()
    original, ask, replayed = coordinator._give_base, coordinator.ask, []

    async def slow(member: Any, **options: Any) -> None:
        await original(member, **options)
        for _ in range(2):
            await training.round()

    async def noting(member: Any, method: str, *args: Any, **options: Any) -> Any:
        answer = await ask(member, method, *args, **options)
        if method == "replay":
            assert training.names == ("w0", "w1"), "no other member waits for it"
            replayed.append(answer)
            if len(replayed) < 3:
                await training.round()
        return answer

    coordinator._give_base = slow  # type: ignore[method-assign]
    coordinator.ask = noting  # type: ignore[method-assign]
    await training.add("w2")
    assert (replayed, coordinator.remotes[-1].version, training.version) == ([3, 4, 5], 5, 5)
    record = await training.round()
    assert record.members == ("w0", "w1", "w2")
    await world.oracle()


@in_world()
async def test_a_worker_that_was_restarted_is_taken_in_anew(world: World) -> None:
    training = world.training
    await training.round()
    world.network.kill("w1")
    assert (await training.round()).lost == ("w1",)
    world.restart("w1")
    await asyncio.sleep(0.5)
    await training.add("w1")
    await training.add("w1")  # it is there
    assert training.names == ("w0", "w2", "w1")
    assert (await training.round()).members == ("w0", "w2", "w1")
    await training.remove("w0")
    assert (await training.round()).members == ("w2", "w1")
    await world.oracle()


# ---------------------------------------------------------------- members that only dial out


@in_world(dials_out=True, members=2)
async def test_members_that_only_dial_out(world: World) -> None:
    training = world.training
    await training.round()
    await training.add("w2")
    record = await training.round()
    assert record.members == ("w0", "w1", "w2")
    world.network.kill("w1", silent=True)
    assert (await training.round()).lost == ("w1",)
    world.restart("w1")
    await asyncio.sleep(3.0)
    await training.add("w1")
    assert (await training.round()).members == ("w0", "w2", "w1")
    for name in world.names:
        assert {peer.name for peer in world.workers[name].statistics().peers} == {"driver"}
    await world.oracle()


MANY = tuple(f"w{number}" for number in range(36))


def test_many_members_are_told_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere so many members pass a decision on in a tree; members of local steps do not know each other."""

    def call_all(*args: Any, **options: Any) -> Any:
        raise AssertionError("members were asked to pass a decision on")

    async def main(world: World) -> None:
        record = await world.training.round()
        assert record.members == MANY
        assert await world.training.digests() == dict.fromkeys(MANY, world.training.digest)
        await world.oracle()

    monkeypatch.setattr(dist.RemoteRef, "call_all", call_all)
    World(MANY, dials_out=True, steps=1).simulate(main)

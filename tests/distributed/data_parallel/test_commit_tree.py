"""Decisions of steps that go by a tree of workers: whatever an inner worker of the tree does, every replica has taken the step once, or none has.

Seven replicas, each of which tells two others at most: the driver tells w0 and w3; w0 tells w1 and w2; w3 tells w4 and w5, and w5 tells w6.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from aiograd.distributed.data_parallel.replica_member import ReplicaMember
from aiograd.distributed.kinds import Kind
from aiograd.distributed.multicast import SHARE
from aiograd.distributed.rpc.endpoint import Endpoint
from aiograd.errors import CommitUnknown, RemoteError, WorkerLostError
from aiograd.transaction import tree
from tests.distributed.data_parallel.models import batches, module_of
from tests.distributed.data_parallel.simulated import World, expected
from tests.distributed.training_world import LIMITS
from tests.support import run_by

pytestmark = pytest.mark.sim

NAMES = tuple(f"w{index}" for index in range(7))
INNER = {"w0": {"w1", "w2"}, "w3": {"w4", "w5", "w6"}, "w5": {"w6"}}
GIVEN = batches(4, (2,) * 7)
REST = batches(4, (2,) * 6, seed=1)


class TreeWorld(World):
    """The replicas, and who has sent and done what."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        super().__init__(NAMES, **options)
        #: messages to many workers by who has sent them to whom, and decisions that hosts were told, by host and method
        self.relayed: list[tuple[str, str]] = []
        self.told: Counter[tuple[str, str]] = Counter()
        monkeypatch.setattr(tree, "FANOUT", 2)
        request = Endpoint.request

        async def noted(endpoint: Endpoint, peer: str, kind: int, *rest: Any) -> Any:
            if kind == Kind.RELAY:
                self.relayed.append((endpoint.name, peer))
            return await request(endpoint, peer, kind, *rest)

        monkeypatch.setattr(Endpoint, "request", noted)
        for method in ("commit", "abort"):
            monkeypatch.setattr(ReplicaMember, method, self._counting(method, getattr(ReplicaMember, method)))

    def _counting(self, method: str, original: Any) -> Any:
        async def counted(host: ReplicaMember, step: int) -> bool:
            if host._worker is not None:
                self.told[host._worker.name, method] += 1
            done: bool = await original(host, step)
            return done

        return counted

    async def goes_on_without(self, victim: str, *taken: Any) -> None:
        """The rest take a step, after those that were taken before."""
        await self.replicas.remove(victim)
        await self.replicas.step(REST[1])
        assert self.states == [await expected([*taken, REST[1]])] * 6

    async def survivors(self, *lost: str) -> list[dict[str, bytes]]:
        return [self.state(name) for name in NAMES if name not in lost]


in_a_tree = run_by(lambda main, monkeypatch: TreeWorld(monkeypatch).simulate(main))


def elapsed() -> float:
    return asyncio.get_running_loop().time()


def test_a_commit_of_many_replicas_goes_by_a_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(world: World) -> None:
        await world.replicas.step(GIVEN[0])
        assert world.states == [await expected(GIVEN[:1])] * 7

    world = TreeWorld(monkeypatch)
    world.simulate(main)
    assert Counter(world.relayed) == Counter(
        {("driver", "w0"): 1, ("driver", "w3"): 1, ("w0", "w1"): 1, ("w0", "w2"): 1, ("w3", "w4"): 1, ("w3", "w5"): 1, ("w5", "w6"): 1}
    )
    assert world.told == Counter({(name, "commit"): 1 for name in NAMES})


@pytest.mark.parametrize("silent", [False, True], ids=["crashes", "falls silent"])
@pytest.mark.parametrize("is_before", [True, False], ids=["before it commits", "after it has committed"])
@pytest.mark.parametrize("victim", INNER)
@in_a_tree
async def test_an_inner_worker_is_lost_while_a_commit_passes_through_it(world: TreeWorld, victim: str, is_before: bool, silent: bool) -> None:
    """The step is decided, so those behind it are told of it directly; none is told what was not decided, and none applies it twice."""
    replicas = world.replicas
    world.around(victim, "commit", lambda: world.network.kill(victim, silent=silent), is_before=is_before)
    began = elapsed()
    assert len(await replicas.step(GIVEN[0])) == 7
    assert elapsed() - began < (LIMITS.lease + LIMITS.silence if silent else 1.0)
    taken = await expected(GIVEN[:1])
    assert await world.survivors(victim) == [taken] * 6
    assert all(world.told[name, "commit"] for name in INNER[victim])
    with pytest.raises(WorkerLostError) as caught:
        await replicas.step(GIVEN[1])
    assert caught.value.worker == victim
    assert await world.survivors(victim) == [taken] * 6
    await world.goes_on_without(victim, GIVEN[0])


@pytest.mark.parametrize("victim", INNER)
@in_a_tree
async def test_an_inner_worker_is_lost_while_a_step_is_prepared(world: TreeWorld, victim: str) -> None:
    """That nobody takes the step goes by the tree too, which misses those behind the lost one."""
    replicas = world.replicas
    await replicas.step(GIVEN[0])
    world.told.clear()
    world.around(victim, "run", lambda: world.network.kill(victim), is_before=False)
    with pytest.raises(WorkerLostError) as caught:
        await replicas.step(GIVEN[1])
    assert caught.value.worker == victim
    assert await world.survivors(victim) == [await expected(GIVEN[:1])] * 6
    assert not [name for name, method in world.told if method == "commit"]
    await world.goes_on_without(victim, GIVEN[0])


@pytest.mark.parametrize("victim", INNER)
@in_a_tree
async def test_a_slow_inner_worker_holds_nobody_up_for_longer_than_its_part_of_the_time(world: TreeWorld, victim: str) -> None:
    """It passes the message on at once, but answers late: all behind it are told again, and commit once."""
    commit = world.host(victim).commit

    async def slow(step: int) -> bool:
        await asyncio.sleep(LIMITS.default_deadline * (SHARE + 0.1))
        done: bool = await commit(step)
        return done

    world.host(victim).commit = slow
    began = elapsed()
    await world.replicas.step(GIVEN[0])
    assert elapsed() - began < LIMITS.default_deadline * (2 * SHARE + 0.2)
    assert world.states == [await expected(GIVEN[:1])] * 7
    del world.host(victim).commit
    await world.replicas.step(GIVEN[1])
    assert world.states == [await expected(GIVEN[:2])] * 7


@pytest.mark.parametrize("trouble", ["is frozen, and waited for while it counts as there", "cannot reach those behind it"])
@pytest.mark.parametrize("victim", INNER)
@in_a_tree
async def test_all_take_a_step_while_an_inner_worker(world: TreeWorld, victim: str, trouble: str) -> None:
    def befall() -> None:
        if "frozen" in trouble:
            world.network.freeze(victim, LIMITS.silence / 2)
        else:
            for name in INNER[victim]:
                world.network.cut(victim, name)

    world.around(victim, "commit", befall, is_before=True)
    await world.replicas.step(GIVEN[0])
    assert world.states == [await expected(GIVEN[:1])] * 7
    world.network.heal_all()


@pytest.mark.parametrize("is_before", [True, False])
@pytest.mark.parametrize("victim", INNER)
@in_a_tree
async def test_a_step_that_is_cancelled_while_its_commit_passes_through_the_tree_is_taken(world: TreeWorld, victim: str, is_before: bool) -> None:
    stepping = asyncio.ensure_future(world.replicas.step(GIVEN[0]))
    await asyncio.sleep(0)
    world.around(victim, "commit", stepping.cancel, is_before=is_before)
    with pytest.raises(asyncio.CancelledError) as caught:
        await stepping
    assert getattr(caught.value, "committed", False)
    assert world.states == [await expected(GIVEN[:1])] * 7
    await world.replicas.step(GIVEN[1])
    assert world.states == [await expected(GIVEN[:2])] * 7


@pytest.mark.parametrize("victim", INNER)
@in_a_tree
async def test_a_step_that_is_cancelled_while_it_is_prepared_is_taken_by_none(world: TreeWorld, victim: str) -> None:
    await world.replicas.step(GIVEN[0])
    world.told.clear()
    stepping = asyncio.ensure_future(world.replicas.step(GIVEN[1]))
    await asyncio.sleep(0)
    world.around(victim, "run", stepping.cancel, is_before=True)
    with pytest.raises(asyncio.CancelledError) as caught:
        await stepping
    assert not getattr(caught.value, "committed", False)
    assert world.states == [await expected(GIVEN[:1])] * 7
    assert not [name for name, method in world.told if method == "commit"]
    await world.replicas.step(GIVEN[2])
    assert world.states == [await expected([GIVEN[0], GIVEN[2]])] * 7


@pytest.mark.parametrize("victim", INNER)
@in_a_tree
async def test_an_inner_worker_is_lost_while_all_are_told_that_a_step_has_failed(world: TreeWorld, victim: str) -> None:
    replicas = world.replicas
    module_of(world.host("w6")).fails = True
    world.around(victim, "abort", lambda: world.network.kill(victim), is_before=True)
    with pytest.raises(RemoteError, match="by nought"):
        await replicas.step(GIVEN[0])
    module_of(world.host("w6")).fails = False
    assert await world.survivors(victim) == [await expected([])] * 6
    assert not [name for name, method in world.told if method == "commit"]
    with pytest.raises(WorkerLostError):
        await replicas.step(GIVEN[1])
    await world.goes_on_without(victim)


@in_a_tree
async def test_all_inner_workers_are_lost_at_once(world: TreeWorld) -> None:
    def kill() -> None:
        for name in INNER:
            world.network.kill(name)

    world.around("w0", "commit", kill, is_before=True)
    await world.replicas.step(GIVEN[0])
    assert await world.survivors(*INNER) == [await expected(GIVEN[:1])] * 4


@in_a_tree
async def test_a_step_that_nobody_can_confirm_is_in_doubt(world: TreeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """All are lost at the decision: the tree makes no outcome out of silence."""

    def cut() -> None:
        for name in NAMES:
            world.network.cut("driver", name)

    commit = ReplicaMember.commit

    async def cutting(host: ReplicaMember, step: int) -> bool:
        cut()
        done: bool = await commit(host, step)
        return done

    monkeypatch.setattr(ReplicaMember, "commit", cutting)
    with pytest.raises(CommitUnknown) as caught:
        await world.replicas.step(GIVEN[0])
    assert caught.value.committed and set(caught.value.workers) == set(NAMES)
    world.network.heal_all()
    await asyncio.sleep(3 * LIMITS.lease)
    states = world.states
    assert states in ([await expected(GIVEN[:1])] * 7, [await expected([])] * 7)

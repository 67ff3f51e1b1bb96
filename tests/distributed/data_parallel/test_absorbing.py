"""A worker that is lost in a step is left out, and the others compute its shards in the same call, with the bits of an undisturbed run."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from random import Random
from typing import Any
from unittest import mock

import numpy as np
import pytest

import aiograd as ag
from aiograd import distributed as dist
from aiograd.distributed.data_parallel import coordinator
from aiograd.distributed.data_parallel.replica import Replica
from aiograd.distributed.data_parallel.replica_step import ReplicaStep
from aiograd.distributed.data_parallel.shard_gradients import ShardGradients, sum_of
from aiograd.errors import ArgumentError, ArgumentTypeError, DistributedError, RemoteError, WorkerLostError
from tests.distributed.data_parallel.absorbing import AbsorbRun, alone
from tests.distributed.data_parallel.models import BatchNet, Net, batches, bits, serial
from tests.distributed.data_parallel.simulated import World
from tests.distributed.workers import workers

SHARDS = (3, 2, 4, 3, 2, 3, 2)
GIVEN = batches(3, SHARDS)
NAMES = ("w0", "w1", "w2")


def world_of(*names: str, **options: Any) -> World:
    return World(names or NAMES, module=BatchNet, arguments=(0.5,), absorb=True, **{"accumulate": 2, **options})


#: by number of steps the state that they lead to without any trouble
UNDISTURBED: dict[int, dict[str, bytes]] = {}


@pytest.fixture(autouse=True, scope="module")
def undisturbed() -> None:
    for steps in (2, 3):
        UNDISTURBED[steps] = alone(GIVEN[:steps], world_of())


@contextlib.contextmanager
def counted() -> Iterator[Counter[tuple[int, int, int]]]:
    """Counts how often a replica computes a shard of a step."""
    seen: Counter[tuple[int, int, int]] = Counter()
    backward = ReplicaStep._backward

    async def counting(self: ReplicaStep, shard: int, *, is_last: bool) -> Any:
        loss = await backward(self, shard, is_last=is_last)
        seen[id(self._replica), self._replica.taken, shard] += 1
        return loss

    with mock.patch.object(ReplicaStep, "_backward", counting):
        yield seen


def lost_at(name: str, moment: float, *, silent: bool = False) -> float:
    """Lose a worker at a moment of the second of three steps; returns the virtual seconds of that step."""

    async def main(world: World) -> float:
        loop, replicas = asyncio.get_running_loop(), world.replicas
        await replicas.step(GIVEN[0])
        began = loop.time()
        killing = loop.call_later(moment, lambda: world.network.kill(name, silent=silent))
        losses = await replicas.step(GIVEN[1])
        took = loop.time() - began
        is_killed = loop.time() >= killing.when()
        killing.cancel()
        assert len(losses) == len(SHARDS)
        await replicas.step(GIVEN[2])
        assert world.states == [UNDISTURBED[3]] * len(replicas.names)
        assert replicas.lost == ((name,) if is_killed else ()) and len(replicas.names) == 3 - is_killed
        return took

    with counted() as seen:
        took: float = world_of().simulate(main)
    assert set(seen.values()) == {1}, "a replica computes nothing twice"
    return took


@pytest.mark.sim
@pytest.mark.parametrize(("name", "silent"), [("w0", False), ("w1", True), ("w2", False)])
@pytest.mark.parametrize("block", range(4))
def test_a_loss_at_any_moment_of_a_step_is_absorbed(name: str, silent: bool, block: int) -> None:
    calm = lost_at(name, 1e9)
    for part in range(block, 16, 4):
        lost_at(name, calm * part / 16, silent=silent)


@pytest.mark.sim
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("is_before", [True, False])
@pytest.mark.parametrize("method", ["version", "join", "run", "commit"])
def test_a_loss_at_any_point_of_the_transaction_is_absorbed(name: str, method: str, is_before: bool) -> None:
    async def main(world: World) -> None:
        replicas = world.replicas
        await replicas.step(GIVEN[0])
        if method in ("version", "join"):
            replicas._coordinator._is_ready = False
        world.around(name, method, lambda: world.network.kill(name), is_before=is_before)
        await replicas.step(GIVEN[1])
        await replicas.step(GIVEN[2])
        assert replicas.lost == (name,) and world.states == [UNDISTURBED[3]] * 2

    world_of().simulate(main)


@pytest.mark.sim
@pytest.mark.parametrize("method", ["version", "join", "give_up", "run", "abort", "commit"])
@pytest.mark.parametrize("is_before", [True, False])
def test_another_loss_while_one_is_absorbed(method: str, is_before: bool) -> None:
    async def main(world: World) -> None:
        replicas = world.replicas
        await replicas.step(GIVEN[0])
        world.around("w1", "run", lambda: world.network.kill("w1"), is_before=True)

        def then() -> None:
            world.around("w3", method, lambda: world.network.kill("w3"), is_before=is_before)

        world.around("w3", "run", then, is_before=True)
        await replicas.step(GIVEN[1])
        await replicas.step(GIVEN[2])
        assert set(replicas.lost) == {"w1", "w3"} and world.states == [UNDISTURBED[3]] * 3

    world_of("w0", "w1", "w2", "w3", "w4").simulate(main)


@pytest.mark.sim
@pytest.mark.parametrize("block", range(8))
def test_steps_are_taken_once_whoever_is_lost_when(block: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(4 * block, 4 * block + 4):
        seen += AbsorbRun(seed).run()
    assert seen["left out in a step"] > 1, seen


@pytest.mark.sim
@pytest.mark.sweep
def test_five_hundred_steps_under_kills() -> None:
    """No error, and one hash."""
    given = [batches(1, (2,) * (1 + number % 5), seed=number)[0] for number in range(500)]
    random = Random(0)
    found: list[Any] = []

    async def main(world: World) -> None:
        replicas, loop = world.replicas, asyncio.get_running_loop()
        dead: set[str] = set()

        def kill() -> None:
            living = [name for name in replicas.names if name not in dead]
            if len(living) == len(replicas.names) > 1:
                name = random.choice(living)
                dead.add(name)
                world.network.kill(name)
            loop.call_later(random.uniform(0.05, 0.4), kill)

        kill()
        kills = 0
        for shards in given:
            await replicas.step(shards)
            for name in set(replicas.lost) & dead:
                kills += 1
                world.restart(name)
                dead.discard(name)
            for name in replicas.lost:
                with contextlib.suppress(DistributedError):  # another one is lost meanwhile
                    await replicas.add(name)
        found.extend(world.state(name) for name in replicas.names if name not in dead)
        assert kills > 20, kills

    world = world_of(optimizer_options={"lr": 1e-3})
    world.simulate(main)
    assert found == [alone(given, world)] * len(found)


# ---------------------------------------------------------------- membership


def test_a_lost_worker_is_taken_in_again_or_given_up() -> None:
    async def main(world: World) -> None:
        replicas = world.replicas
        await replicas.step(GIVEN[0])
        for name in ("w0", "w2"):
            world.network.kill(name)
        outputs = await replicas.eval([x for x, _ in GIVEN[0]])  # is absorbed as well
        assert len(outputs) == len(SHARDS) and set(replicas.lost) == {"w0", "w2"} and replicas.names == ("w1",)
        await replicas.step(GIVEN[1])
        with pytest.raises(WorkerLostError):
            await replicas.add("w0")
        assert "w0" in replicas.lost
        world.restart("w0")
        await replicas.add("w0")
        assert replicas.names == ("w1", "w0") and replicas.lost == ("w2",)
        await replicas.remove("w2")
        assert replicas.lost == ()
        with pytest.raises(ArgumentError, match="no replica of this name"):
            await replicas.remove("w2")
        await replicas.step(GIVEN[2])
        assert world.states == [UNDISTURBED[3]] * 2

    world_of().simulate(main)


def test_a_worker_that_was_frozen_is_left_out_and_taken_in_again() -> None:
    async def main(world: World) -> None:
        replicas = world.replicas
        await replicas.step(GIVEN[0])
        world.network.freeze("w1", 6.0)
        await replicas.step(GIVEN[1])
        assert replicas.lost == ("w1",)
        await asyncio.sleep(8.0)
        assert replicas.lost == ("w1",), "it does not come back by itself"
        await replicas.add("w1")
        await replicas.step(GIVEN[2])
        assert world.states == [UNDISTURBED[3]] * 3
        await asyncio.sleep(1.0)
        assert world.workers["w1"].statistics().references == 3, "its first replica is gone"

    world_of().simulate(main)


def test_two_workers_that_lose_each_other() -> None:
    """The driver reaches both: one of them is left out."""

    async def main(world: World) -> None:
        await world.replicas.step(GIVEN[0])
        world.network.cut("w0", "w2")
        await world.replicas.step(GIVEN[1])
        assert world.replicas.lost in (("w0",), ("w2",))
        await world.replicas.step(GIVEN[2])
        assert world.states == [UNDISTURBED[3]] * 2
        world.network.heal("w0", "w2")
        await world.replicas.aclose()
        await asyncio.sleep(1.0)
        assert [world.workers[name].statistics().references for name in NAMES] == [0, 0, 0]

    world_of().simulate(main)


def test_no_replica_is_left() -> None:
    async def main(world: World) -> None:
        replicas = world.replicas
        await replicas.step(GIVEN[0])
        for name in NAMES:
            world.network.kill(name)
        with pytest.raises(WorkerLostError, match="lost a worker, and nothing has changed") as caught:
            await replicas.step(GIVEN[1])
        assert caught.value.worker in replicas.names and sorted(replicas.names) == [*NAMES] and replicas.lost == ()

    world_of().simulate(main)


@pytest.mark.parametrize("options", [{}, {"shard_optimizer": True, "accumulate": 1}], ids=["whole", "divided"])
def test_a_frozen_worker_whose_last_peer_is_killed_still_has_the_state(options: dict[str, Any]) -> None:
    """It is left out, and has missed nothing when the step fails: it takes the step once it runs again."""

    async def main(world: World) -> dict[str, bytes]:
        replicas = world.replicas
        await replicas.step(GIVEN[0])
        if world.options["absorb"]:
            world.network.freeze("w1", 4.0)
            asyncio.get_running_loop().call_later(1.0, lambda: world.network.kill("w0", silent=True))
            with pytest.raises(WorkerLostError, match="nothing has changed"):
                await replicas.step(GIVEN[1])
            assert sorted(replicas.names) == ["w0", "w1"] and replicas.lost == ()
            await asyncio.sleep(4.0)
        await replicas.step(GIVEN[1])
        if world.options["absorb"]:
            assert replicas.names == ("w1",) and replicas.lost == ("w0",)
            world.restart("w0")
            await replicas.add("w0")
        await replicas.step(GIVEN[2])
        assert world.states == [world.states[0]] * len(replicas.names)
        return world.states[0]

    found, undisturbed = (World(("w0", "w1"), **{**options, "absorb": absorb}).simulate(main) for absorb in (True, False))
    assert found == undisturbed


DIVISIONS = pytest.mark.parametrize("options", [{}, {"shard_optimizer": True}], ids=["whole", "divided"])


async def behind_alone(world: World) -> None:
    """Two steps, of which w1 lacks the second; it runs again when w0 is cut off, which has both. A third step fails."""
    replicas, network = world.replicas, world.network
    await replicas.step(GIVEN[0])
    network.freeze("w1", 4.0)
    await replicas.step(GIVEN[1])
    await asyncio.sleep(5.0)
    assert (replicas.names, replicas.lost) == (("w0",), ("w1",))
    network.cut("driver", "w0")
    with pytest.raises(WorkerLostError, match="nothing has changed"):
        await replicas.step(GIVEN[2])
    assert (replicas.names, replicas.lost) == (("w0", "w1"), ())


@DIVISIONS
@pytest.mark.parametrize("then", ["step", "eval", "add", "state_dict"])
def test_a_replica_that_is_behind_waits_for_the_one_with_the_newest_state(then: str, options: dict[str, Any]) -> None:
    """It is reached first, as often as the step is tried, and takes no step before it has the state."""

    async def main(world: World) -> dict[str, bytes]:
        replicas = world.replicas
        if not world.options["absorb"]:
            for shards in GIVEN:
                await replicas.step(shards)
            return world.states[0]
        await behind_alone(world)
        for _ in range(2):
            with pytest.raises(WorkerLostError, match="no replica that can be reached has the state after step 2; w0 may have it") as caught:
                await (replicas.eval([x for x, _ in GIVEN[2]]) if then == "eval" else replicas.step(GIVEN[2]))
            assert caught.value.worker == "w0" and str(caught.value).count("nothing has changed") == 0
            assert sorted(replicas.names) == ["w0", "w1"] and replicas.lost == ()
        world.network.heal("driver", "w0")
        await asyncio.sleep(3.0)
        if then == "add":
            await replicas.add("w0")
        elif then == "state_dict":
            assert bits(await replicas.state_dict()) == world.state("w0") != world.state("w1")
        await replicas.step(GIVEN[2])
        assert sorted(replicas.names) == ["w0", "w1"] and world.states[0] == world.states[1]
        return world.states[0]

    found, undisturbed = (World(("w0", "w1"), absorb=absorb, **options).simulate(main) for absorb in (True, False))
    assert found == undisturbed


def test_a_step_that_is_cancelled_when_only_a_replica_that_is_behind_is_left() -> None:
    """The one with the newest state is left out by then; the next call takes it back."""

    async def main(world: World) -> None:
        replicas = world.replicas
        await behind_alone(world)
        world.around("w1", "version", lambda: stepping.cancel() if replicas.lost else None, is_before=True)
        stepping = asyncio.ensure_future(replicas.step(GIVEN[2]))
        with pytest.raises(asyncio.CancelledError):
            await stepping
        assert (replicas.names, replicas.lost) == (("w1",), ("w0",))
        with pytest.raises(WorkerLostError, match="w0 may have it"):
            await replicas.state_dict()
        assert (replicas.names, replicas.lost) == (("w1", "w0"), ())
        world.network.heal("driver", "w0")
        await asyncio.sleep(3.0)
        assert bits(await replicas.state_dict()) == world.state("w0")

    World(("w0", "w1"), absorb=True).simulate(main)


@DIVISIONS
@pytest.mark.parametrize("how", ["restarted", "removed"])
def test_a_replica_that_is_behind_is_no_source_where_the_newest_state_is_lost(how: str, options: dict[str, Any]) -> None:
    async def main(world: World) -> None:
        replicas = world.replicas
        await behind_alone(world)
        if how == "restarted":
            world.network.kill("w0")
            world.network.heal("driver", "w0")
            world.restart("w0")
            await asyncio.sleep(3.0)
        else:
            await replicas.remove("w0")
        for _ in range(2):
            with pytest.raises(DistributedError, match="all replicas that had the state after step 2 are lost") as caught:
                await replicas.step(GIVEN[2])
            assert type(caught.value) is DistributedError

    World(("w0", "w1"), absorb=True, **options).simulate(main)


def test_shards_of_the_optimizer_that_replicas_which_were_left_out_still_have() -> None:
    """Two of three are cut off at once, and between them they have a shard that the third lacks."""

    async def main(world: World) -> dict[str, bytes]:
        replicas, network = world.replicas, world.network
        for shards in GIVEN[:2]:
            await replicas.step(shards)
        if world.options["absorb"]:
            for name in ("w1", "w2"):
                network.cut("driver", name)
            for _ in range(2):
                with pytest.raises(WorkerLostError, match="has a shard of the state of the optimizer"):
                    await replicas.step(GIVEN[2])
                assert sorted(replicas.names) == [*NAMES] and replicas.lost == ()
            network.heal_all()
            await asyncio.sleep(3.0)
        await replicas.step(GIVEN[2])
        assert len(replicas.names) == 3 and world.states == [world.states[0]] * 3
        return world.states[0]

    found, undisturbed = (World(NAMES, absorb=absorb, shard_optimizer=True).simulate(main) for absorb in (True, False))
    assert found == undisturbed


def test_the_state_of_the_optimizer_is_divided_among_the_others() -> None:
    async def main(world: World) -> Any:
        for number, shards in enumerate(GIVEN):
            if number and world.options["absorb"]:
                world.around(f"w{number}", "run", lambda number=number: world.network.kill(f"w{number}"), is_before=True)  # type: ignore[misc]
            await world.replicas.step(shards)
        return [bits(await world.replicas.state_dict()), len(world.replicas.names)]

    found = World(("w0", "w1", "w2", "w3"), absorb=True, shard_optimizer=True).simulate(main)
    assert found == [World(absorb=False, shard_optimizer=True).simulate(main)[0], 2]


@pytest.mark.parametrize("compress", [dist.TopK(1 / 4, bits=4, block=64), dist.Blockwise(4, block=64)], ids=repr)
def test_compressed_gradients(compress: Any) -> None:
    """The step counts once, on all that are left."""

    async def main(world: World) -> None:
        await world.replicas.step(GIVEN[0])
        world.around("w1", "run", lambda: world.network.kill("w1"), is_before=False)
        await world.replicas.step(GIVEN[1])
        assert world.replicas.lost == ("w1",) and world.states[:1] * 2 == world.states
        assert [world.host(name)._replica.taken for name in world.replicas.names] == [2, 2]

    world_of(compress=compress).simulate(main)


# ---------------------------------------------------------------- other errors


def test_other_errors_are_raised_and_nothing_has_changed() -> None:
    async def main(world: World) -> None:
        replicas = world.replicas
        for shards in GIVEN[:2]:
            await replicas.step(shards)
        before = world.states
        bad = [*GIVEN[2][:-1], (GIVEN[2][-1][0], np.full(2, 99))]  # no such class
        world.around("w0", "run", lambda: world.network.kill("w0"), is_before=True)
        with pytest.raises(RemoteError):
            await replicas.step(bad)
        assert world.states == before[: len(replicas.names)]
        await replicas.step(GIVEN[2])
        assert world.states == [UNDISTURBED[3]] * 2

    world_of().simulate(main)


@pytest.mark.sim
@pytest.mark.parametrize("block", range(4))
def test_a_step_that_is_cancelled_while_a_loss_is_absorbed(block: int) -> None:
    async def main(world: World, moment: float) -> bool:
        replicas = world.replicas
        await replicas.step(GIVEN[0])
        world.around("w1", "run", lambda: world.network.kill("w1"), is_before=True)
        stepping = asyncio.ensure_future(replicas.step(GIVEN[1]))
        await asyncio.sleep(moment)
        stepping.cancel()
        is_taken = True
        try:
            await stepping
        except asyncio.CancelledError as error:
            is_taken = getattr(error, "committed", False)
        await (replicas.step(GIVEN[2]) if is_taken else replicas.step(GIVEN[1]))
        assert world.states == [expected[is_taken]] * 2
        return is_taken

    expected = [UNDISTURBED[2], UNDISTURBED[3]]
    found = [world_of().simulate(lambda world, moment=moment: main(world, moment)) for moment in np.linspace(0, 0.08, 32)[block::4]]
    assert not found[0] and found[-1]


async def test_what_absorb_refuses() -> None:
    async with workers("driver", "w0") as (driver, _):
        with pytest.raises(ArgumentError, match="absorb=True.: w0 is the only replica"):
            await dist.DataParallel.create(driver, ["w0"], Net, absorb=True)
        with pytest.raises(ArgumentTypeError, match="absorb='yes'.: expected True or False"):
            await dist.DataParallel.create(driver, ["w0"], Net, absorb="yes")  # type: ignore[arg-type]


# ---------------------------------------------------------------- processes


@pytest.mark.proc
async def test_processes_that_are_killed() -> None:
    given = batches(36, (3, 2, 4, 3, 2))
    random, killed = Random(0), 0
    options: dict[str, Any] = {"optimizer": ag.optim.AdamW, "optimizer_options": {"lr": 0.02}}
    async with dist.LocalCluster(3, service="tests.distributed.data_parallel.models:service", max_restarts=100) as cluster:
        names = cluster.workers
        async with await dist.DataParallel.create(cluster.driver, names, Net, absorb=True, **options) as replicas:
            for number, shards in enumerate(given):
                stepping = asyncio.ensure_future(replicas.step(shards))
                if number % 12 == 6:
                    await asyncio.sleep(random.uniform(0, 0.01))
                    os.kill(cluster.pids[random.choice(replicas.names)], signal.SIGKILL)
                    killed += 1
                assert len(await stepping) == 5
                if number % 12 == 11:
                    for name in replicas.lost:
                        await cluster.wait_running(name)
                        await replicas.add(name)
                    assert len(replicas.names) == 3 and not replicas.lost
            found = bits(await replicas.state_dict())
    assert killed == 3
    model = Net()
    await serial(model, ag.optim.AdamW(model.parameters(), lr=0.02), given)
    assert found == bits(model.state_dict())


# ---------------------------------------------------------------- ablations


def _both_take_the_shards() -> Any:
    """Both neighbours of a lost replica compute its shards."""
    dealt_again = coordinator.dealt_again

    def twice(runs: Any, count: int) -> Any:
        found = dealt_again(runs, count)
        return [found[0], *(range(before.start, run.stop) for before, run in zip(runs, found[1:], strict=False))] if len(found) > 1 else found

    return mock.patch.object(coordinator, "dealt_again", twice)


def _count_twice() -> Any:
    """A shard that was added to the total is also kept apart."""

    def add_up(self: ShardGradients) -> None:
        while self._summed in self.losses:
            self._total = list(map(sum_of, self._total, self._apart[self._summed]))
            self._summed += 1

    return mock.patch.object(ShardGradients, "add_up", add_up)


def _keep_for_ever() -> Any:
    """Gradients of a step are kept for the next."""
    made = Replica.shard_gradients

    def kept(self: Replica, call: int) -> ShardGradients:
        return made(self, call) if self._kept is None else self._kept[1]

    committed = Replica.committed

    def forgetful(self: Replica, running: Any, sums: Any) -> None:
        before = self._kept
        committed(self, running, sums)
        self._kept = before

    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(Replica, "shard_gradients", kept))
    stack.enter_context(mock.patch.object(Replica, "committed", forgetful))
    return stack


def _keep_nothing() -> Any:
    """Gradients are computed again."""
    made = Replica.shard_gradients

    def fresh(self: Replica, call: int) -> ShardGradients:
        self._kept = None
        return made(self, call)

    return mock.patch.object(Replica, "shard_gradients", fresh)


@pytest.mark.sim
@pytest.mark.parametrize("broken", [_both_take_the_shards, _count_twice, _keep_for_ever, _keep_nothing])
def test_a_missing_protection_is_noticed(broken: Callable[[], Any]) -> None:
    calm = 0.06
    with broken(), pytest.raises((AssertionError, DistributedError)):
        for part in range(60):
            lost_at(NAMES[part % 3], calm * part / 60)

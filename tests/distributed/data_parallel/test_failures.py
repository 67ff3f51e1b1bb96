"""Steps of replicas that fail: all have taken it or none has, whatever fails and when, and training goes on to the bits of one process."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

import aiograd as ag
from aiograd import distributed as dist
from aiograd.distributed.data_parallel.replica_member import ReplicaMember
from aiograd.errors import ArgumentError, CollectiveError, CommitUnknown, DeadlineError, DistributedError, RemoteError, WorkerLostError
from tests.distributed.data_parallel.models import BatchNet, FailingSGD, Net, all_bits, batches, bits, module_of, replicas_behind, service
from tests.distributed.data_parallel.simulated import World, expected
from tests.distributed.training_world import LEASE
from tests.distributed.workers import workers

GIVEN = batches(6)
TWO = batches(6, (4, 4), seed=1)
FOUR = batches(6, (4, 4, 4, 4), seed=2)

# ---------------------------------------------------------------- errors


@pytest.mark.parametrize("name", ["w0", "w1"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_loss_that_fails_on_one_replica(name: str, accumulate: int) -> None:
    async def main(world: World) -> None:
        replicas = world.replicas
        await replicas.step(GIVEN[0])
        before = world.states
        module = module_of(world.host(name))
        module.fails = True
        for _ in range(2):
            with pytest.raises(RemoteError, match="by nought") as caught:
                await replicas.step(GIVEN[1])
            assert caught.value.worker == name and not getattr(caught.value, "committed", False)
            assert world.states == before
        module.fails = False
        for shards in GIVEN[1:4]:
            await replicas.step(shards)
        assert world.states == [await expected(GIVEN[:4], accumulate=accumulate)] * 3

    World(accumulate=accumulate).simulate(main)


def test_a_loss_that_lost_a_worker_of_its_own_leaves_no_replica_out() -> None:
    """Even if it names a replica that lives, where losses are absorbed."""

    async def main(world: World) -> None:
        module, replicas = module_of(world.host("w0")), world.replicas
        await replicas.step(GIVEN[0])
        loss, names = module.loss, replicas.names

        async def lost(*shard: Any) -> Any:
            module.loss = loss
            raise WorkerLostError("w1 is lost", worker="w1")

        module.loss = lost
        with pytest.raises(RemoteError, match=r"Net.loss: WorkerLostError: w1 is lost") as caught:
            await replicas.step(GIVEN[1])
        assert caught.value.worker == "w0" and replicas.names == names
        await replicas.step(GIVEN[1])
        assert replicas.names == names and world.states == [await expected(GIVEN[:2])] * 3

    World(absorb=True).simulate(main)


@contextlib.contextmanager
def told_of_a_loss(world: World, method: str) -> Iterator[None]:
    """Replicas form a group in which w2 is lost: w1 tells of that at once, and the driver notices later."""
    original = getattr(ReplicaMember, method)

    async def meet(self: ReplicaMember, *args: Any) -> Any:
        if self._worker.name == "w1" and "w2" in args[0]:
            raise CollectiveError("the group: broadcast(root=0) was cancelled on w2")
        if self._worker.name == "w2":
            world.network.kill("w2", silent=True)
        return await original(self, *args)

    with mock.patch.object(ReplicaMember, method, meet):
        yield


@pytest.mark.parametrize("method", ["synchronise", "join"])
def test_the_error_of_creating_names_the_lost_worker_where_a_group_fails_first(method: str) -> None:
    async def main(world: World) -> None:
        with told_of_a_loss(world, method), pytest.raises(WorkerLostError) as caught:
            await dist.DataParallel.create(world.driver, world.names, Net)
        assert caught.value.worker == "w2"

    World(replicas=1).simulate(main)


@pytest.mark.parametrize("absorb", [False, True])
def test_the_error_of_a_step_names_the_lost_worker_where_a_group_fails_first(absorb: bool) -> None:
    async def main(world: World) -> None:
        replicas = world.replicas
        await replicas.step(GIVEN[0])
        world.coordinator._is_ready = False
        with told_of_a_loss(world, "join"):
            if absorb:
                await replicas.step(GIVEN[1])
                assert replicas.lost == ("w2",) and world.states == [await expected(GIVEN[:2])] * 2
            else:
                with pytest.raises(WorkerLostError) as caught:
                    await replicas.step(GIVEN[1])
                assert caught.value.worker == "w2"

    World(absorb=absorb).simulate(main)


def test_an_optimizer_that_fails_has_changed_nothing_anywhere() -> None:
    async def main(world: World) -> None:
        before = world.states
        with pytest.raises(RemoteError, match="too steep"):
            await world.replicas.step(GIVEN[0])
        assert world.states == before == [await expected([])] * 3

    World(optimizer=FailingSGD, optimizer_options={}).simulate(main)


def test_a_parameter_that_cannot_be_written_to() -> None:
    async def main(world: World) -> None:
        before = world.states
        module_of(world.host("w1")).first.weight._data.flags.writeable = False
        with pytest.raises(RemoteError, match=r"shape \[6, 4\] is read-only"):
            await world.replicas.step(GIVEN[0])
        assert world.states == before

    World().simulate(main)


def test_a_step_that_takes_too_long() -> None:
    async def main(world: World) -> None:
        module_of(world.host("w1")).waits = 9.0
        before = world.states
        with pytest.raises(DeadlineError):
            await world.replicas.step(GIVEN[0])
        assert world.states == before
        module_of(world.host("w1")).waits = 0.0
        await world.replicas.step(GIVEN[0])
        assert world.states == [await expected(GIVEN[:1])] * 3

    World(timeout=3.0).simulate(main)


async def test_buffers_are_rolled_back_and_a_loss_that_runs_on_is_waited_for() -> None:
    """On real threads: one replica fails while the other is within its forward, which nobody can stop."""
    given = batches(2, (4, 4))
    async with workers("driver", "w0", "w1", service=service) as opened:
        options: dict[str, Any] = {"optimizer": ag.optim.SGD, "optimizer_options": {"lr": 0.1}}
        async with await dist.DataParallel.create(opened[0], ["w0", "w1"], BatchNet, **options) as replicas:
            await replicas.step(given[0])
            hosts, before = replicas_behind(replicas, opened), all_bits(replicas, opened)
            blocked, released = asyncio.Event(), []
            loop, first = asyncio.get_running_loop(), module_of(hosts[0])
            inner = first.norm.forward

            def slow(y: Any) -> Any:
                loop.call_soon_threadsafe(blocked.set)
                while not released:
                    time.sleep(0.001)
                return inner(y)

            object.__setattr__(first.norm, "forward", slow)
            second = module_of(hosts[1])

            async def fail(*_: Any) -> Any:
                await blocked.wait()
                raise ZeroDivisionError("by nought")

            object.__setattr__(second, "loss", fail)
            with pytest.raises(RemoteError, match="by nought"):
                await replicas.step(given[1])
            object.__delattr__(second, "loss")
            object.__delattr__(first.norm, "forward")
            stepping = asyncio.ensure_future(replicas.step(given[1]))
            await asyncio.sleep(0)
            released.append(True)
            await stepping
            assert all_bits(replicas, opened)[0] == all_bits(replicas, opened)[1] != before[0]
            found = all_bits(replicas, opened)[0]
            assert int.from_bytes(found["norm.num_batches_tracked"], "little") == 2


# ---------------------------------------------------------------- cancellation


async def test_steps_take_turns() -> None:
    async with workers("driver", "w0", "w1", service=service) as opened:
        options: dict[str, Any] = {"optimizer": ag.optim.AdamW, "optimizer_options": {"lr": 0.05}}
        async with await dist.DataParallel.create(opened[0], ["w0", "w1"], Net, **options) as replicas:
            await asyncio.gather(*(replicas.step(shards) for shards in TWO[:3]))
            assert all_bits(replicas, opened) == [await expected(TWO[:3])] * 2


# ---------------------------------------------------------------- lost replicas


def test_a_step_that_all_replicas_have_dropped_before_they_hear_of_its_commit_was_not_taken() -> None:
    async def main(world: World) -> None:
        at_decision(world, lambda: world.network.freeze("driver", 2.5 * LEASE))
        with pytest.raises(DistributedError, match="all replicas had dropped it") as caught:
            await world.replicas.step(GIVEN[0])
        assert not getattr(caught.value, "committed", False) and world.states == [await expected([])] * 3
        await world.replicas.step(GIVEN[0])
        assert world.states == [await expected(GIVEN[:1])] * 3

    World().simulate(main)


def test_a_step_that_nobody_confirms_is_in_doubt() -> None:
    async def main(world: World) -> None:
        def part() -> None:
            for name in world.names:
                world.network.cut("driver", name)

        at_decision(world, part)
        with pytest.raises(CommitUnknown) as caught:
            await world.replicas.step(GIVEN[0])
        assert caught.value.committed and set(caught.value.workers) == {"w0", "w1", "w2"}
        assert world.states == [await expected([])] * 3
        world.network.heal_all()
        await world.replicas.step(GIVEN[1])
        assert world.states == [await expected(GIVEN[:2])] * 3

    World().simulate(main)


def at_decision(world: World, action: Any) -> None:
    """Do something when the driver has decided to commit, before anybody is told; once."""
    decisions = world.replicas._coordinator.decisions
    original = decisions._commit

    def wrapped(decision: Any) -> Any:
        vars(decisions).pop("_commit", None)
        result = original(decision)
        action()
        return result

    decisions._commit = wrapped  # type: ignore[method-assign]


# ---------------------------------------------------------------- joining


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_replica_that_joins_has_the_state_of_the_others(accumulate: int) -> None:
    async def main(world: World) -> None:
        replicas = world.replicas
        for shards in GIVEN[:2]:
            await replicas.step(shards)
        hosts = [world.host(name) for name in replicas.names]
        await replicas.add("w3")
        assert replicas.names == ("w0", "w1", "w2", "w3")
        assert world.states == [await expected(GIVEN[:2], accumulate=accumulate)] * 4
        assert [world.host(name) for name in replicas.names[:3]] == hosts, "nobody else restarts"
        for shards in FOUR[:2]:
            await replicas.step(shards)
        assert world.states == [await expected([*GIVEN[:2], *FOUR[:2]], accumulate=accumulate)] * 4
        await replicas.remove("w0")
        assert replicas.names == ("w1", "w2", "w3")
        for shards in GIVEN[2:4]:
            await replicas.step(shards)
        assert world.states == [await expected([*GIVEN[:2], *FOUR[:2], *GIVEN[2:4]], accumulate=accumulate)] * 3

    World(("w0", "w1", "w2", "w3"), 3, accumulate=accumulate).simulate(main)


@pytest.mark.parametrize("name", ["w0", "w1"])
def test_a_worker_that_came_back_takes_its_place_again(name: str) -> None:
    async def main(world: World) -> None:
        replicas = world.replicas
        await replicas.step(GIVEN[0])
        await replicas.add(name)  # it is there: nothing happens
        world.network.kill(name)
        with pytest.raises(WorkerLostError):
            await replicas.step(GIVEN[1])
        with pytest.raises(WorkerLostError):
            await replicas.add(name)
        world.restart(name)
        with pytest.raises(WorkerLostError, match="was restarted") as caught:
            await replicas.step(GIVEN[1])
        assert caught.value.worker == name
        await replicas.add(name)
        assert replicas.names == ("w0", "w1", "w2")
        for shards in GIVEN[1:3]:
            await replicas.step(shards)
        assert world.states == [await expected(GIVEN[:3])] * 3

    World().simulate(main)


def test_two_workers_are_lost_at_once() -> None:
    async def main(world: World) -> None:
        replicas = world.replicas
        await replicas.step(FOUR[0])
        for name in ("w0", "w2"):
            world.network.kill(name)
        lost = []
        for _ in range(2):
            with pytest.raises(WorkerLostError) as caught:
                await replicas.step(FOUR[1])
            lost.append(caught.value.worker)
            world.restart(lost[-1])
            await asyncio.sleep(0.1)
            await replicas.add(lost[-1])
        assert set(lost) == {"w0", "w2"}
        await replicas.step(FOUR[1])
        assert world.states == [await expected(FOUR[:2])] * 4

    World(("w0", "w1", "w2", "w3")).simulate(main)


def test_all_who_have_the_state_are_lost() -> None:
    async def main(world: World) -> None:
        replicas = world.replicas
        await replicas.step(TWO[0])
        state = await replicas.state_dict()
        for name in ("w0", "w1"):
            world.network.kill(name)
            world.restart(name)
        await asyncio.sleep(5.0)
        with pytest.raises(DistributedError, match="all replicas that had the state after step 1 are lost"):
            await replicas.add("w0")
        with pytest.raises(DistributedError, match="all replicas that had the state"):
            await replicas.state_dict()
        async with await dist.DataParallel.create(world.driver, ["w0", "w1"], Net, **world.options) as others:
            await others.load_state_dict(state)
            assert bits(await others.state_dict()) == await expected(TWO[:1])

    World(("w0", "w1")).simulate(main)


def test_a_state_is_read_while_a_replica_is_lost() -> None:
    async def main(world: World) -> None:
        await world.replicas.step(GIVEN[0])
        world.network.kill("w0")
        assert bits(await world.replicas.state_dict()) == await expected(GIVEN[:1])
        assert len((await world.replicas.optimizer_state_dict())["state"]) == 4

    World().simulate(main)


@pytest.mark.parametrize("after", [0.0, 0.003, 0.006, 0.009, 0.012, 0.015, 0.02])
def test_a_load_that_is_interrupted_leaves_one_state_on_all(after: float) -> None:
    async def main(world: World) -> None:
        replicas = world.replicas
        for shards in GIVEN[:2]:
            await replicas.step(shards)
        fresh = {name: ag.zeros(value.shape) for name, value in (await replicas.state_dict()).items()}
        loading = asyncio.ensure_future(replicas.load_state_dict(fresh))
        await asyncio.sleep(after)
        loading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await loading
        await replicas.eval([x for x, _ in GIVEN[0]])
        states = world.states
        assert states[0] in (await expected(GIVEN[:2]), bits(fresh)) and states == [states[0]] * 3
        await replicas.step(GIVEN[2])
        assert world.states == [world.states[0]] * 3 != states

    World().simulate(main)


@pytest.mark.parametrize("after", [0.0, 0.004, 0.008, 0.012, 0.016, 0.02, 0.024])
def test_joining_that_is_cancelled_changes_nothing(after: float) -> None:
    async def main(world: World) -> None:
        replicas = world.replicas
        await replicas.step(TWO[0])
        adding = asyncio.ensure_future(replicas.add("w2"))
        await asyncio.sleep(after)
        adding.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await adding
        is_in = len(replicas.names) == 3
        await replicas.step(GIVEN[1] if is_in else TWO[1])
        assert world.states == [await expected([TWO[0], GIVEN[1] if is_in else TWO[1]])] * (2 + is_in)
        if not is_in:
            await asyncio.sleep(1.0)
            assert world.workers["w2"].statistics().references == 0

    World(replicas=2).simulate(main)


def test_what_remove_and_add_refuse() -> None:
    async def main(world: World) -> None:
        replicas = world.replicas
        with pytest.raises(ArgumentError, match="no replica of this name; there are w0, w1"):
            await replicas.remove("w2")
        with pytest.raises(DistributedError, match="w9"):
            await replicas.add("w9")
        await replicas.remove("w1")
        with pytest.raises(ArgumentError, match="the last replica"):
            await replicas.remove("w0")
        await asyncio.sleep(1.0)
        assert world.workers["w1"].statistics().references == 0
        assert replicas.names == ("w0",)

    World(("w0", "w1")).simulate(main)

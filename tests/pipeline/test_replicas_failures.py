"""Pipelines in replicas that lose a worker, on a simulated network: all replicas have the gradients of a step or none has, whenever it happens."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import pytest

import aiograd as ag
from aiograd import distributed as dist
from aiograd.errors import PipelineError, WorkerLostError
from aiograd.pipeline import Pipeline, make_schedule
from aiograd.testing import simulated_run
from tests.pipeline.models import blocks, data, gradients, values
from tests.pipeline.remote import behind
from tests.pipeline.replicas import place_replicas, serial_replicas
from tests.pipeline.test_pipeline_doubt import FORWARD, World

BATCH = data(16)
REPLICAS = [["a0", "a1"], ["b0", "b1"], ["c0", "c1"]]
NOTHING = [None] * 4


class ReplicatedWorld(World):
    """A driver and workers on a simulated network, with a pipeline in two replicas of two stages; two workers are left."""

    def __init__(self, schedule: str = "ZB-H1") -> None:
        super().__init__()
        self.names = ["driver", *(name for replica in REPLICAS for name in replica)]
        self.schedule = make_schedule(schedule, 2, 2)

    async def drive(self, main: Any) -> Any:
        async with self.worker("driver") as self.driver:
            self.placed = await place_replicas(self.driver, REPLICAS, wait=FORWARD)
            async with Pipeline(self.placed[:2], self.schedule) as self.pipe:
                await self.pipe.eval(BATCH[0])
                self.find_hosts()
                return await main(self)

    @property
    def found(self) -> list[Any]:  # type: ignore[override]
        """The gradients of all replicas, as they are on their workers."""
        return [self.gradients_of(replica) for replica in self.pipe.replicas]

    def gradients_of(self, replica: Any) -> Any:
        return gradients(behind(module, *self.workers.values()) for module in replica)


@functools.cache
def expected(*replicas: int) -> Any:
    """Bytes of the gradients after steps with so many replicas."""

    async def alone() -> Any:
        modules = blocks(2)
        for count in replicas:
            await serial_replicas(modules, [2] * count, *BATCH)
        return gradients(modules)

    return simulated_run(alone).value


# ---------------------------------------------------------------- lost workers


def duration(schedule: str) -> float:
    """Virtual seconds that a step takes."""
    world = ReplicatedWorld(schedule)
    took: list[float] = []

    async def main(world: Any) -> None:
        began = asyncio.get_running_loop().time()
        await world.pipe.step(*BATCH)
        took.append(asyncio.get_running_loop().time() - began)

    world.run(main)
    return took[0]


@pytest.mark.parametrize("kind", ["1F1B", "ZB-H1"])
def test_a_lost_stage_is_replaced_and_the_other_one_of_its_replica_stays(kind: str) -> None:
    bits = expected(2)

    async def main(world: Any) -> None:
        pipe = world.pipe
        asyncio.get_running_loop().call_later(0.25, lambda: world.network.kill("b1"))
        with pytest.raises(WorkerLostError):
            await pipe.step(*BATCH)
        _, (stays, _) = pipe.replicas
        await pipe.remove("b1")
        await pipe.add([stays, world.placed[2][1]])
        await pipe.step(*BATCH)
        assert world.found == [bits] * 2 and [[each.peer for each in replica] for replica in pipe.replicas] == [["a0", "a1"], ["b0", "c1"]]

    ReplicatedWorld(kind).run(main)


def test_a_worker_that_comes_back_without_its_stage() -> None:
    bits = expected(2)

    async def main(world: Any) -> None:
        world.network.kill("a1")
        await asyncio.sleep(0.1)
        world.network.restart("a1")
        world.network.spawn("a1", world.serve("a1"))
        for _ in range(2):
            with pytest.raises(WorkerLostError, match="restarted|is gone") as caught:
                await world.pipe.step(*BATCH)
            assert caught.value.worker == "a1"
        stays, _ = world.pipe.replicas[0]
        await world.pipe.remove("a1")
        await world.pipe.add([stays, await world.driver.remote_module("a1", "Last", 1)])
        await world.pipe.step(*BATCH)
        assert world.found == [bits] * 2

    ReplicatedWorld().run(main)


def test_clipping_goes_on_where_a_lost_stage_is_put_elsewhere() -> None:
    """Not with replicas: the worker is lost when it is to scale its gradients, and another one computes them anew."""

    async def main(world: Any) -> None:
        async def respawn(stage: int) -> Any:
            return await world.driver.remote_module("c0", "Block", stage)

        a0, a1 = world.placed[0]
        async with Pipeline([a0, a1], world.schedule, clip_norm=0.1, respawn=respawn) as pipe:
            await pipe.eval(BATCH[0])
            (host,) = (remote for remote in pipe._coordinator.remotes if remote.owner == "a0")
            held = behind(type(a0)(world.driver, "a0", host.ref), *world.workers.values())

            async def lost(step: int, factor: Any) -> bool:
                world.network.kill("a0")
                await asyncio.sleep(1.0)
                return True

            held.scale = lost
            await pipe.step(*BATCH)
            assert [each.peer for each in pipe.stages] == ["c0", "a1"]
            assert world.gradients_of(pipe.stages) == await clipped()

    ReplicatedWorld().run(main)


async def clipped() -> Any:
    """The gradients of one replica, scaled."""
    modules = blocks(2)
    await serial_replicas(modules, [2], *BATCH)
    assert ag.optim.clip_grad_norm_([parameter for stage in modules for parameter in stage.parameters()], 0.1).item() > 0.1
    return gradients(modules)


# ---------------------------------------------------------------- failures and the decision


@pytest.mark.parametrize(("replica", "stage", "call"), [(0, 0, 1), (0, 1, 2), (1, 0, 2), (1, 1, 1)])
def test_a_stage_that_fails_changes_nothing_anywhere(replica: int, stage: int, call: int) -> None:
    bits = expected(2)

    async def main(world: Any) -> None:
        module = world.pipe.replicas[replica][stage]
        for _ in range(2):
            await module.ref.call("fail_at", call)
            with pytest.raises(PipelineError, match="by nought"):
                await world.pipe.step(*BATCH)
            assert world.found == [NOTHING] * 2
        assert values(await world.pipe.step(*BATCH))
        assert world.found == [bits] * 2

    ReplicatedWorld().run(main)


def test_clipping_is_part_of_the_transaction() -> None:
    """A worker is lost when the others have scaled their gradients: nothing has changed, and the next step scales anew."""

    async def main(world: Any) -> None:
        world.pipe.clip_norm = 0.1
        scaled = world.hosts["a0"].scale
        others = asyncio.Event()
        host = world.hosts["b1"]
        scale = host.scale

        async def noted(step: int, factor: Any) -> bool:
            result = await scaled(step, factor)
            others.set()
            return bool(result)

        async def lost(step: int, factor: Any) -> bool:
            await others.wait()
            world.network.kill("b1")
            return bool(await scale(step, factor))

        world.hosts["a0"].scale, host.scale = noted, lost
        with pytest.raises(WorkerLostError) as caught:
            await world.pipe.step(*BATCH)
        assert others.is_set() and caught.value.worker == "b1"
        assert world.gradients_of(world.pipe.replicas[0]) == NOTHING and world.gradients_of(world.pipe.replicas[1][:1]) == NOTHING[:2]
        await world.pipe.remove("b1")
        await world.pipe.step(*BATCH)
        (found,) = world.found
        assert found == await clipped()

    ReplicatedWorld().run(main)


@pytest.mark.parametrize("name", ["a0", "b1"])
def test_nobody_waits_for_a_worker_that_is_known_to_be_lost(name: str) -> None:
    """Not to give up the step, and not to remove its replica and its part of the optimizer: all of that takes as long as the others take."""
    step = duration("ZB-H1")

    async def main(world: Any) -> None:
        loop = asyncio.get_running_loop()
        pipe, stages = world.pipe, [module for replica in world.pipe.replicas for module in replica]
        optimizer = dist.DistributedOptimizer(world.driver, ag.optim.SGD, stages, lr=0.1)
        await pipe.step(*BATCH)
        await optimizer.step()
        world.network.kill(name, silent=True)
        began = loop.time()
        with pytest.raises(WorkerLostError):
            await pipe.step(*BATCH)
        assert loop.time() - began < world.limits.silence + 0.6  # heartbeats are 0.5 s apart
        began = loop.time()
        await pipe.remove(name)
        await optimizer.remove(name)
        assert loop.time() - began < 0.1
        await pipe.step(*BATCH)
        assert loop.time() - began < 0.1 + step + 0.2

    ReplicatedWorld().run(main)

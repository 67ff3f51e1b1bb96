"""Pipelines in replicas that absorb the loss of workers, on a simulated network: the bits of a step without a loss, whenever it happens."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aiograd.errors import ArgumentError, WorkerLostError
from aiograd.pipeline import Pipeline, make_schedule
from tests.pipeline.models import gradients, values
from tests.pipeline.remote import behind
from tests.pipeline.replicas import place_replicas
from tests.pipeline.test_pipeline_doubt import FORWARD, World
from tests.pipeline.test_replicas_failures import BATCH, expected

REPLICAS = [["a0", "a1"], ["b0", "b1"], ["c0", "c1"]]
ALL = [name for replica in REPLICAS for name in replica]


class AbsorbingWorld(World):
    """A driver and workers on a simulated network, with a pipeline in three replicas of two stages; one worker is left."""

    def __init__(self, schedule: str = "1F1B", **options: Any) -> None:
        super().__init__()
        self.names = ["driver", *ALL, "spare"]
        self.schedule = make_schedule(schedule, 2, 2)
        self.options = {"wait": FORWARD} | options

    async def drive(self, main: Any) -> Any:
        async with self.worker("driver") as self.driver:
            self.placed = await place_replicas(self.driver, REPLICAS, **self.options)
            async with Pipeline(self.placed, self.schedule, absorb=True) as self.pipe:
                await self.pipe.eval(BATCH[0])
                return await main(self)

    def gradients_of(self, name: str) -> Any:
        """The gradients of a worker that lives."""
        module = next(module for replica in self.pipe.replicas for module in replica if module.peer == name)
        return gradients([behind(module, *self.workers.values())])

    def check(self, bits: Any, *lost: str) -> None:
        """See that all workers but these have the gradients."""
        for stage in (0, 1):
            for replica in self.pipe.replicas:
                if replica[stage].peer not in lost:
                    assert self.gradients_of(replica[stage].peer) == bits[2 * stage : 2 * stage + 2], replica[stage].peer


@pytest.mark.parametrize("kind", ["1F1B", "ZB-H1"])
@pytest.mark.parametrize("name", ALL)
def test_a_worker_is_lost_between_steps(name: str, kind: str) -> None:
    once, twice = expected(3), expected(3, 3)

    async def main(world: Any) -> None:
        whole = (await world.pipe.eval(BATCH[0])).numpy().tobytes()
        assert world.pipe.absorbed == {}
        world.network.kill(name)
        losses = values(await world.pipe.step(*BATCH))
        world.check(once, name)
        assert len(losses) == 6
        replica, stage = next((r, s) for r, names in enumerate(REPLICAS) for s, each in enumerate(names) if each == name)
        takers = [names[stage] for number, names in enumerate(REPLICAS) if number != replica]
        assert world.pipe.absorbed == {(replica, stage): tuple(takers)}
        await world.pipe.step(*BATCH)
        world.check(twice, name)
        assert (await world.pipe.eval(BATCH[0])).numpy().tobytes() == whole

    AbsorbingWorld(kind).run(main)


def duration(schedule: str) -> float:
    """Virtual seconds that a step without a loss takes."""
    took: list[float] = []

    async def main(world: Any) -> None:
        began = asyncio.get_running_loop().time()
        await world.pipe.step(*BATCH)
        took.append(asyncio.get_running_loop().time() - began)

    AbsorbingWorld(schedule).run(main)
    return took[0]


@pytest.mark.parametrize("name", ["a0", "a1", "b0", "c1"])
@pytest.mark.parametrize("part", range(8))
def test_a_worker_is_lost_in_the_midst_of_a_step(name: str, part: int) -> None:
    bits, step = expected(3), duration("1F1B")

    async def main(world: Any) -> None:
        asyncio.get_running_loop().call_later(step * (part + 0.5) / 8, lambda: world.network.kill(name))
        losses = await world.pipe.step(*BATCH)
        world.check(bits, name)
        assert len(losses) == 6

    AbsorbingWorld().run(main)


@pytest.mark.parametrize("names", [("a0", "b1"), ("a0", "b0"), ("a0", "a1"), ("b0", "c0"), ("a1", "c1"), ("a0", "b1", "c0")])
def test_several_workers_are_lost_one_after_another(names: tuple[str, ...]) -> None:
    bits = [expected(*[3] * count) for count in range(1, len(names) + 1)]

    async def main(world: Any) -> None:
        lost = []
        for number, name in enumerate(names):
            world.network.kill(name)
            lost.append(name)
            await world.pipe.step(*BATCH)
            world.check(bits[number], *lost)
        assert len(world.pipe.absorbed) == len(names)

    AbsorbingWorld().run(main)


def test_several_workers_are_lost_at_once() -> None:
    bits = expected(3)

    async def main(world: Any) -> None:
        for name in ("a0", "b1"):
            world.network.kill(name)
        await world.pipe.step(*BATCH)
        world.check(bits, "a0", "b1")

    AbsorbingWorld().run(main)


def test_a_stage_that_is_lost_everywhere() -> None:
    bits = expected(3)

    async def main(world: Any) -> None:
        await world.pipe.step(*BATCH)
        for name in ("a1", "b1", "c1"):
            world.network.kill(name)
        for _ in range(2):
            with pytest.raises(WorkerLostError, match="stage 1 of the pipeline is lost in all of 3 replicas.*Nothing has changed"):
                await world.pipe.step(*BATCH)
        for name in ("a0", "b0", "c0"):
            assert world.gradients_of(name) == bits[:2]

    AbsorbingWorld().run(main)


@pytest.mark.parametrize("name", ["a0", "b1", "c1"])
def test_a_lost_place_is_filled(name: str) -> None:
    once, twice = expected(3), expected(3, 3)

    async def main(world: Any) -> None:
        world.network.kill(name)
        await world.pipe.step(*BATCH)
        kind = "Last" if name.endswith("1") else "Block"
        with pytest.raises(ArgumentError, match=r"replace\('b0'\): this worker is not lost; lost are: " + name):
            await world.pipe.replace("b0", world.placed[0][0])
        with pytest.raises(ArgumentError, match="2 modules; expected one for each of its stages"):
            await world.pipe.replace(name, [1, 2])
        with pytest.raises(ArgumentError, match="differ"):
            await world.pipe.replace(name, await world.driver.remote_module("spare", "Other", 0))
        assert len(world.pipe.absorbed) == 1
        module = await world.driver.remote_module("spare", kind, int(name[1]))
        await world.pipe.replace(name, module)
        assert world.pipe.absorbed == {}
        world.check(once)
        assert "spare" in [each.peer for replica in world.pipe.replicas for each in replica]
        await world.pipe.step(*BATCH)
        world.check(twice)

    AbsorbingWorld().run(main)


def test_a_replica_with_a_lost_worker_is_removed() -> None:
    bits = expected(3, 2)

    async def main(world: Any) -> None:
        world.network.kill("b1")
        await world.pipe.step(*BATCH)
        await world.pipe.remove("b1")
        assert world.pipe.absorbed == {} and len(world.pipe.replicas) == 2
        await world.pipe.step(*BATCH)
        world.check(bits)

    AbsorbingWorld().run(main)


def test_without_absorbing_a_loss_is_an_error() -> None:
    async def main(world: Any) -> None:
        async with Pipeline(world.placed, world.schedule) as pipe:
            await pipe.eval(BATCH[0])
            world.network.kill("b1")
            with pytest.raises(WorkerLostError):
                await pipe.step(*BATCH)
            assert pipe.absorbed == {}
            with pytest.raises(ArgumentError, match="lost are: none"):
                await pipe.replace("b1", world.placed[0][0])

    AbsorbingWorld().run(main)

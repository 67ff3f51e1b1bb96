"""Pipelines in replicas that absorb the loss of workers, on a simulated network: the bits of a step without a loss, whenever it happens."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aiograd.errors import ArgumentError, PipelineError, WorkerLostError
from aiograd.pipeline import Pipeline, make_schedule
from tests.pipeline.models import data, gradients, values
from tests.pipeline.remote import behind
from tests.pipeline.replicas import place_replicas
from tests.pipeline.test_pipeline_doubt import FORWARD, World
from tests.pipeline.test_replicas_failures import BATCH, NOTHING, expected

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

"""Workers of pipelines with values past neighbours are lost: replicas absorb that, or replacements are found, and the bits are the same."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from aiograd import distributed as dist
from aiograd.pipeline import Pipeline, make_schedule
from aiograd.testing import simulated_run
from tests.pipeline.models import data, gradients, mean_square, values
from tests.pipeline.remote import behind
from tests.pipeline.test_pipeline_doubt import World
from tests.pipeline.unusual import KINDS, TopWithLoss, alone, arguments, modules, place, stages
from tests.sweeps import swept

REPLICAS = ("abcd", "efgh")
WITH_LOSS = (*KINDS[:3], TopWithLoss)
BATCH = data(8)


class UnusualWorld(World):
    """A driver and workers on a simulated network, with the model in one pipeline or in replicas, and two workers that are left."""

    def __init__(self, replicas: tuple[str, ...] = REPLICAS, schedule: str = "1F1B") -> None:
        super().__init__()
        self.layout = replicas
        self.schedule = make_schedule(schedule, 4, 8 // len(replicas))
        self.names = ["driver", *"".join(replicas), "y", "z"]
        self.lost: list[int] = []

    async def respawn(self, stage: int) -> Any:
        self.lost.append(stage)
        return await self.driver.remote_module("yz"[len(self.lost) - 1], KINDS[stage], stage)

    async def drive(self, main: Any) -> Any:
        async with self.worker("driver") as self.driver:
            if len(self.layout) == 1:
                made: Any = stages(await place(self.driver, self.layout[0]))
                options: dict[str, Any] = {"loss_fn": mean_square, "respawn": self.respawn, "worker": self.driver}
            else:
                made = [stages(await place(self.driver, each, WITH_LOSS)) for each in self.layout]
                options = {"absorb": True}
            async with Pipeline(made, self.schedule, **options) as self.pipe:
                await self.pipe.eval(BATCH[0])
                return await main(self)

    async def step(self) -> list[float]:
        return values(await self.pipe.step(*BATCH, **arguments(8)))

    def check(self, bits: Any, *lost: str) -> None:
        """See that the workers of each replica have the gradients, all but the lost ones."""
        for replica in self.pipe.replicas:
            for stage, module in enumerate(replica):
                if module.peer not in lost:
                    found = gradients([behind(dist.RemoteModule(self.driver, module.peer, module.ref), *self.workers.values())])
                    assert found == bits[2 * stage : 2 * stage + 2], module.peer


def expected(replicas: int) -> tuple[list[float], list[Any]]:
    async def running() -> tuple[list[float], list[Any]]:
        items = modules()
        return await alone(items, 8 // replicas, *BATCH, **arguments(8), replicas=replicas), gradients(items)

    return simulated_run(running).value


def duration(replicas: tuple[str, ...], schedule: str) -> float:
    """Virtual seconds of a step without a loss, which has the expected bits."""
    losses, bits = expected(len(replicas))
    took: list[float] = []

    async def main(world: Any) -> None:
        began = asyncio.get_running_loop().time()
        assert await world.step() == losses
        took.append(asyncio.get_running_loop().time() - began)
        world.check(bits)

    UnusualWorld(replicas, schedule).run(main)
    return took[0]


@pytest.mark.sim
@pytest.mark.parametrize(("name", "schedule"), swept([("b", "ZB-H1"), *itertools.product("ah", ["1F1B", "ZB-H1"])], keep=1))
def test_replicas_absorb_the_loss_of_a_worker(name: str, schedule: str) -> None:
    losses, bits = expected(2)
    took = duration(REPLICAS, schedule)
    for part in (0.2, 0.5, 0.8):

        async def main(world: Any, part: float = part) -> None:
            asyncio.get_running_loop().call_later(took * part, world.network.kill, name)
            assert await world.step() == losses
            world.check(bits, name)

        UnusualWorld(REPLICAS, schedule).run(main)


@pytest.mark.sim
@pytest.mark.parametrize(("name", "schedule"), swept([("b", "ZB-H1"), *itertools.product("ad", ["1F1B", "ZB-H1"])], keep=1))
def test_a_replacement_gets_the_values_again(name: str, schedule: str) -> None:
    losses, bits = expected(1)
    took = duration(("abcd",), schedule)
    for part in (0.2, 0.5, 0.8):

        async def main(world: Any, part: float = part) -> None:
            asyncio.get_running_loop().call_later(took * part, world.network.kill, name)
            assert await world.step() == losses
            assert world.lost == ["abcd".index(name)]
            world.check(bits)

        UnusualWorld(("abcd",), schedule).run(main)

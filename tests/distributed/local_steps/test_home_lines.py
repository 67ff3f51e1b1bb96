"""Rounds over home lines of 1 Mbit/s, in virtual time: bytes, seconds, and no member is lost for being slow."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import distributed as dist
from aiograd import nn
from aiograd.testing import AccessLink, Faults, SimulatedNetwork
from tests.distributed.local_steps.learners import service
from tests.distributed.local_steps.simulated import World
from tests.sweeps import swept

NAMES = ("w0", "w1", "w2", "w3")
#: bytes per second of 1 Mbit/s
MEGABIT = 125_000


@service.reference
class Wide(nn.Module):
    """200,400 parameters, and local steps of 0.3 s."""

    def __init__(self) -> None:
        self.layer = nn.Linear(500, 400, generator=ag.Generator(0))

    def data(self) -> Any:
        return ag.data.DataLoader(np.random.default_rng(0).standard_normal((512, 500)).astype(np.float32), batch_size=2)

    async def loss(self, x: Any) -> Any:
        await asyncio.sleep(0.3)
        return (self.layer(x) ** 2).mean()


class HomeWorld(World):
    """Members behind home lines."""

    def __init__(self, members: int | None = None, **options: Any) -> None:
        super().__init__(NAMES, members, module=Wide, steps=30, dials_out=True, **options)
        lines = dict.fromkeys(NAMES, AccessLink(MEGABIT, MEGABIT))
        self.network = SimulatedNetwork(1, faults=Faults(latency=(0.015, 0.02)), access=lines)


@pytest.mark.sim
def test_bytes_and_seconds_of_a_round() -> None:
    async def main(world: World) -> None:
        training = world.training
        before = training.statistics()
        begin = asyncio.get_running_loop().time()
        for _ in range(2):
            assert (await training.round()).lost == ()
        seconds = (asyncio.get_running_loop().time() - begin) / 2
        figures = training.statistics()
        moved = (figures.bytes_sent + figures.bytes_received - before.bytes_sent - before.bytes_received) / 2
        parameters = 500 * 400 + 400
        by_steps = 30 * len(NAMES) * 2 * 2 * 3 / 4 * 4 * parameters  # a ring: every member sends and receives 3/4 of the parameters twice
        assert by_steps / moved > 1000, (by_steps, moved)
        assert figures.utilisation > 0.9 and seconds < 10.0, (figures, seconds)

    HomeWorld(compress=dist.TopK()).simulate(main)


@pytest.mark.sim
def test_members_without_compression_are_not_lost_either() -> None:
    """A payload of 800 kB takes more than six seconds."""

    async def main(world: World) -> None:
        record = await world.training.round()
        assert (record.members, record.lost) == (NAMES, ())

    HomeWorld().simulate(main)


@pytest.mark.sim
@pytest.mark.parametrize("compress", swept([dist.TopK(1 / 16, bits=4), dist.Blockwise(4)]), ids=repr)
def test_a_member_that_joins_costs_the_others_little(compress: dist.Compressor) -> None:
    """The base takes its time over the line of the joiner, beside the rounds of the others."""

    async def main(world: World) -> None:
        async def seconds() -> float:
            began = asyncio.get_running_loop().time()
            members.append((await world.training.round()).members)
            return asyncio.get_running_loop().time() - began

        members: list[tuple[str, ...]] = []
        before = [await seconds() for _ in range(2)]
        joining = asyncio.ensure_future(world.training.add(NAMES[3]))
        beside = [await seconds()]
        while NAMES[3] not in members[-1]:
            beside.append(await seconds())
        await joining
        after = [await seconds() for _ in range(2)]
        assert members[-3:] == [NAMES] * 3 and 2 <= len(beside) <= 6, members
        lost = sum(each - max(before) for each in beside[:-1]) + beside[-1] - max(after)
        assert 3 * lost / min(before) < 0.25, ("rounds that all others lose together", before, beside, after)

    HomeWorld(members=3, compress=compress).simulate(main)

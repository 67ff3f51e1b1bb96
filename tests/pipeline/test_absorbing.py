"""Pipelines in replicas that absorb the loss of workers, on a simulated network: the bits of a step without a loss, whenever it happens."""

from __future__ import annotations

import asyncio
import functools
from random import Random
from typing import Any

import pytest

import aiograd as ag
from aiograd.errors import ArgumentError, CommitUnknown, PipelineError, ProtocolError, RemoteError, WorkerLostError
from aiograd.pipeline import Pipeline, make_schedule
from tests.pipeline.models import blocks, data, gradients, values
from tests.pipeline.remote import Block, CountingBlock, NoisyBlock, ScalingBlock, behind
from tests.pipeline.replicas import place_replicas
from tests.pipeline.test_pipeline_doubt import FORWARD, World
from tests.pipeline.test_replicas_failures import BATCH, expected
from tests.sweeps import swept

REPLICAS = [["a0", "a1"], ["b0", "b1"], ["c0", "c1"]]
ALL = [name for replica in REPLICAS for name in replica]


class AbsorbingWorld(World):
    """A driver and workers on a simulated network, with a pipeline in three replicas of two stages; one worker is left."""

    def __init__(self, schedule: Any = "1F1B", kind: Any = Block, replicas: Any = REPLICAS, clip_norm: float | None = None, **options: Any) -> None:
        super().__init__()
        self.names = ["driver", *ALL, "spare"]
        self.schedule = make_schedule(schedule, 2, 2) if isinstance(schedule, str) else schedule
        self.kind, self.layout, self.clip_norm = kind, replicas, clip_norm
        self.options = options

    async def drive(self, main: Any) -> Any:
        async with self.worker("driver") as self.driver:
            self.placed = await place_replicas(self.driver, self.layout, self.kind, **self.options)
            async with Pipeline(self.placed, self.schedule, absorb=True, clip_norm=self.clip_norm) as self.pipe:
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


@pytest.mark.parametrize(("kind", "name"), [("1F1B", "a0"), ("1F1B", "b1"), ("1F1B", "c0"), ("ZB-H1", "a1"), ("ZB-H1", "b0"), ("ZB-H1", "c1")])
def test_a_worker_is_lost_between_steps(kind: str, name: str) -> None:
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

    AbsorbingWorld(kind, wait=FORWARD).run(main)


def duration(schedule: str) -> float:
    """Virtual seconds that a step without a loss takes."""
    took: list[float] = []

    async def main(world: Any) -> None:
        began = asyncio.get_running_loop().time()
        await world.pipe.step(*BATCH)
        took.append(asyncio.get_running_loop().time() - began)

    AbsorbingWorld(schedule, wait=FORWARD).run(main)
    return took[0]


@pytest.mark.parametrize("name", ["a0", "b1"])
@pytest.mark.parametrize("part", swept(range(8), keep=3))
def test_a_worker_is_lost_in_the_midst_of_a_step(name: str, part: int) -> None:
    bits, step = expected(3), duration("1F1B")

    async def main(world: Any) -> None:
        asyncio.get_running_loop().call_later(step * (part + 0.5) / 8, lambda: world.network.kill(name))
        losses = await world.pipe.step(*BATCH)
        world.check(bits, name)
        assert len(losses) == 6

    AbsorbingWorld(wait=FORWARD).run(main)


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

    AbsorbingWorld(wait=FORWARD).run(main)


def test_several_workers_are_lost_at_once() -> None:
    bits = expected(3)

    async def main(world: Any) -> None:
        for name in ("a0", "b1"):
            world.network.kill(name)
        await world.pipe.step(*BATCH)
        world.check(bits, "a0", "b1")

    AbsorbingWorld(wait=FORWARD).run(main)


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

    AbsorbingWorld(wait=FORWARD).run(main)


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
            await world.pipe.replace(name, await world.driver.remote_module("spare", "Wide", 0))
        assert len(world.pipe.absorbed) == 1
        module = await world.driver.remote_module("spare", kind, int(name[1]))
        await world.pipe.replace(name, module)
        assert world.pipe.absorbed == {}
        world.check(once)
        assert "spare" in [each.peer for replica in world.pipe.replicas for each in replica]
        await world.pipe.step(*BATCH)
        world.check(twice)

    AbsorbingWorld(wait=FORWARD).run(main)


def test_a_replica_with_a_lost_worker_is_removed() -> None:
    bits = expected(3, 2)

    async def main(world: Any) -> None:
        world.network.kill("b1")
        await world.pipe.step(*BATCH)
        await world.pipe.remove("b1")
        assert world.pipe.absorbed == {} and len(world.pipe.replicas) == 2
        await world.pipe.step(*BATCH)
        world.check(bits)

    AbsorbingWorld(wait=FORWARD).run(main)


def test_a_replica_is_added_while_another_one_has_a_lost_worker() -> None:
    bits = expected(2, 3)

    async def main(world: Any) -> None:
        await world.pipe.remove("c0")
        world.network.kill("b0")
        await world.pipe.step(*BATCH)
        await world.pipe.add(world.placed[2])
        await world.pipe.step(*BATCH)
        assert world.pipe.absorbed == {(1, 0): ("a0", "c0")}
        world.check(bits, "b0")

    AbsorbingWorld(wait=FORWARD).run(main)


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

    AbsorbingWorld(wait=FORWARD).run(main)


# -------------------------------------------------------------------- the same as without a loss


async def one(world: Any, batch: Any) -> list[float] | None:
    """The losses of a step; None: it is taken, and the error says that a lost worker has not confirmed it."""
    try:
        return values(await world.pipe.step(*batch))
    except CommitUnknown as error:
        assert error.committed
        return None


def equal(found: Any, expected: Any) -> bool:
    """True if gradients are equal, and the losses that are known."""
    losses = zip(found[0], expected[0], strict=True)
    return found[1] == expected[1] and all(mine is None or mine == wanted for mine, wanted in losses)


def trained(world: AbsorbingWorld, batch: Any, *trouble: tuple[float, str]) -> tuple[Any, ...]:
    """Three steps, with hosts killed so many virtual seconds after the first has begun.

    Returns:
        The losses; the gradients of each stage, which all living workers have; the seconds that the steps took.
    """
    result: list[Any] = []

    async def main(world: Any) -> None:
        loop = asyncio.get_running_loop()
        ag.seed(5)
        began = loop.time()
        for after, name in trouble:
            loop.call_later(after, lambda name=name: world.network.kill(name))
        losses = [await one(world, batch) for _ in range(3)]
        lost = {name for _, name in trouble}
        found = [
            {str(gradients([behind(replica[stage], *world.workers.values())])) for replica in world.pipe.replicas if replica[stage].peer not in lost}
            for stage in range(world.schedule.num_stages)
        ]
        assert all(len(each) == 1 for each in found), "workers of one stage have other gradients"
        assert bool(world.pipe.absorbed) == bool(lost)
        result.extend((losses, found, loop.time() - began))

    world.run(main)
    return tuple(result)


WORLDS = {
    "dropout": lambda: AbsorbingWorld("1F1B", NoisyBlock),
    "clipped": lambda: AbsorbingWorld("ZB-H1", clip_norm=0.05),
    "GPipe": lambda: AbsorbingWorld(make_schedule("GPipe", 2, 5)),
    "workers with two stages": lambda: AbsorbingWorld(make_schedule("Interleaved1F1B", 2, 4, 2), replicas=[names * 2 for names in REPLICAS]),
    "workers with two stages in a V": lambda: AbsorbingWorld(
        make_schedule("ZBV", 2, 4, 2), replicas=[[*names, *reversed(names)] for names in REPLICAS]
    ),
    "a worker with two ranks": lambda: AbsorbingWorld(make_schedule("1F1B", 3, 3), replicas=[[*names, names[1]] for names in REPLICAS]),
    "buffers that stay": lambda: AbsorbingWorld("1F1B", ScalingBlock),
}


@functools.cache
def undisturbed(case: str) -> Any:
    """Of a batch of which replicas have unequal parts."""
    return trained(WORLDS[case](), data(31))


@pytest.mark.parametrize("case", WORLDS)
@pytest.mark.parametrize("lost", [("b1",), ("c0", "a1")])
@pytest.mark.parametrize("part", [0.1, 0.45])
def test_the_bits_of_steps_without_a_loss(case: str, lost: tuple[str, ...], part: float) -> None:
    losses, found, took = undisturbed(case)
    trouble = [(took * (part + 0.3 * number), name) for number, name in enumerate(lost)]
    assert equal(trained(WORLDS[case](), data(31), *trouble), (losses, found))


@pytest.mark.parametrize("chunk", range(6))
def test_any_time(chunk: int) -> None:
    losses, found, took = trained(AbsorbingWorld(), BATCH)
    for seed in range(chunk * 3, chunk * 3 + 3):
        random = Random(seed)
        lost = random.choice([("a0",), ("a1",), ("b0",), ("c1",), ("a0", "b1"), ("b1", "c1"), ("a0", "a1"), ("c0", "b0", "a1")])
        trouble = [(random.uniform(0, took), name) for name in lost]
        assert equal(trained(AbsorbingWorld(), BATCH, *trouble), (losses, found)), (seed, trouble)


def test_buffers_that_change() -> None:
    async def main(world: Any) -> None:
        await world.pipe.step(*BATCH)
        before = world.gradients_of("b0")
        world.network.kill("a1")
        await world.pipe.step(*BATCH)  # no buffers there
        before = world.gradients_of("b0")
        world.network.kill("a0")
        with pytest.raises(PipelineError, match=r"forwards of stages \[0\] change buffers.*Fill its place"):
            await world.pipe.step(*BATCH)
        assert world.gradients_of("b0") == before
        (count,) = (buffer for name, buffer in behind(world.placed[1][0], *world.workers.values()).named_buffers() if name == "count")
        assert count.item() == 2 * 2 + 2  # of an evaluation and two steps
        await world.pipe.replace("a0", await world.driver.remote_module("spare", "CountingBlock", 0))
        await world.pipe.step(*BATCH)
        assert list(world.pipe.absorbed) == [(0, 1)]

    AbsorbingWorld("1F1B", CountingBlock).run(main)


async def test_what_cannot_be_absorbed() -> None:
    with pytest.raises(ArgumentError, match="absorb=True.*give at least two replicas"):
        Pipeline(blocks(2), make_schedule("1F1B", 2, 2), absorb=True)
    with pytest.raises(ArgumentError, match="absorb=True.*give at least two replicas"):
        Pipeline([blocks(2)], make_schedule("1F1B", 2, 2), absorb=True)


NOTHING_KNOWN: dict[str, Any] = {"entry": {}, "forward": {}, "backward": {}, "target": {}, "given": {}, "returned": {}}


#: changes of the rows of a worker, and what the error says
SENSELESS: list[tuple[dict[str, Any], str]] = [
    ({"rows": {"9": "0F0"}}, "a row of rank 9"),
    ({"rows": {"0": "1F0"}}, "the action 1F0"),
    ({"rows": {"0": "8F0"}}, "the action 8F0"),
    ({"rows": {"0": "moon"}}, "moon"),
    ({"homes": {"0": [0, 0]}}, "ranks of 1 stages"),
    ({"adders": {"0": 0}}, "lost stages .0."),
    ({"adders": {"17": 0}}, "lost stages .17."),
    ({"firsts": [0]}, "1 first microbatches"),
    ({"replica": 3}, "replica 3 of 3"),
    ({"replica": -1}, "malformed AbsorbedRows"),
    ({"homes": {"x": []}}, "malformed AbsorbedRows"),
    ({"repeats": -1}, "malformed AbsorbedRows"),
    ({"repeats": 1, "known": {"entry": {}, "forward": {}, "backward": {}}}, "malformed"),
    ({"repeats": 1, "known": NOTHING_KNOWN | {"entry": {"0": [-1]}}}, "malformed"),
    ({"repeats": 1, "known": NOTHING_KNOWN | {"entry": {"x": [0]}}}, "malformed"),
    ({"repeats": 1, "known": NOTHING_KNOWN | {"entry": {"0": [0]}}}, "the work for step 1 is not kept any more"),
]


def test_rows_that_make_no_sense() -> None:
    """From the process that has the pipeline, or from one that says that it has it."""

    async def main(world: Any) -> None:
        rows = {
            "replica": 0, "rows": {"0": "0F0 0I0 0W0"}, "homes": {str(stage): [0, 0] for stage in range(6)}, "adders": {"2": 0},
            "scales": [1.0] * 3, "firsts": [0, 2, 4],
        }  # fmt: skip
        host = next(remote.ref for remote in world.pipe._coordinator.remotes if remote.owner == "a0")
        for number, (change, message) in enumerate(SENSELESS, 50):
            with pytest.raises((ProtocolError, RemoteError), match=message):
                await host.call("run", number, True, {}, None, [1, 2], [1.0, 0, []], False, rows | change)
            assert world.gradients_of("a0") == [None, None]

    AbsorbingWorld().run(main)

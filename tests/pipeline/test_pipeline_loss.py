"""Workers of a pipeline are lost in the middle of a step: nothing changes, or the step goes on elsewhere and ends with the same bits."""

from __future__ import annotations

import asyncio
from collections import Counter
from random import Random
from typing import Any

import pytest

from aiograd import distributed as dist
from aiograd.errors import ArgumentTypeError, CommitUnknown, DistributedError, PipelineError, WorkerLostError
from aiograd.pipeline import Pipeline, Schedule, make_schedule
from aiograd.testing import Faults, SimulatedNetwork, simulated_run
from aiograd.testing.virtual_clock import VirtualClock
from tests.distributed.workers import SECRET
from tests.pipeline.models import blocks, data, gradients, mean_square, serial, values
from tests.pipeline.remote import behind, place, service

#: virtual seconds that a forward takes
FORWARD = 0.1


class World:
    """Workers on a simulated network, and a pipeline over them.

    Args:
        order: of the pipeline.
        homes: where each stage lives.
        seed, faults: of the network.
        respawns: whether stages of lost workers are put on spare ones.
    """

    def __init__(self, order: Schedule, homes: list[str | None], *, seed: int = 0, faults: Faults | None = None, respawns: bool = True) -> None:
        self.order = order
        self.homes = homes
        self.network = SimulatedNetwork(seed, faults=faults or Faults(latency=(0.001, 0.002)))
        self.respawns = respawns
        self.workers: dict[str, dist.Worker] = {}
        self.names = ["driver", *sorted({home for home in homes if home}), "spare0", "spare1"]
        self.lost: list[int] = []
        self.batch = data(2 * order.num_microbatches)
        self.took = 0.0
        #: seconds that a backward of the first stage takes
        self.slow = 0.0

    async def serve(self, name: str) -> None:
        peers = {other: f"sim://{other}" for other in self.names if other != name}
        worker = dist.Worker(name, service=service, peers=peers, secret=SECRET, transport=self.network.transport(name))
        self.workers[name] = await worker.__aenter__()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:  # a host that was killed closes nothing
            await worker.aclose()
            raise

    async def respawn(self, stage: int) -> Any:
        self.lost.append(stage)
        spare = f"spare{(len(self.lost) - 1) % 2}"
        return (await place(self.driver, [None] * stage + [spare], wait=FORWARD))[stage]

    async def run(self, *trouble: tuple[float, str], training: bool = True) -> Any:
        """Carry out one step while hosts are killed, each at its time after the step has begun; returns its losses or the error."""
        servers = [self.network.spawn(name, self.serve(name)) for name in self.names[1:]]
        try:
            return await self.network.spawn("driver", self.drive(trouble, training))
        finally:
            for server in servers:
                server.cancel()
            await asyncio.gather(*servers, return_exceptions=True)

    async def drive(self, trouble: tuple[tuple[float, str], ...], training: bool) -> Any:
        loop = asyncio.get_running_loop()
        peers = {name: f"sim://{name}" for name in self.names[1:]}
        async with dist.Worker("driver", peers=peers, secret=SECRET, transport=self.network.transport("driver")) as self.driver:
            self.workers["driver"] = self.driver
            modules = await place(self.driver, self.homes, wait=FORWARD)
            if self.slow:
                behind(modules[0], *self.workers.values()).inner[0].weight.register_hook(lambda grad: asyncio.sleep(self.slow))
            pipe = Pipeline(modules, self.order, loss_fn=mean_square, respawn=self.respawn if self.respawns else None)
            async with pipe:
                await pipe.eval(self.batch[0])
                began = loop.time()
                for after, name in trouble:
                    loop.call_later(after, lambda name=name: self.network.find(name) and self.network.kill(name))
                try:
                    result = values(await pipe.step(*self.batch)) if training else (await pipe.eval(self.batch[0])).tolist()
                except (DistributedError, PipelineError) as error:
                    result = error
                self.took = loop.time() - began
                self.owners = [getattr(module, "peer", "driver") for module in pipe.stages]
                self.modules = [behind(module, *self.workers.values()) for module in pipe.stages]
            return result


async def _alone(order: Schedule) -> tuple[list[float], list[Any]]:
    modules = blocks(order.num_stages)
    losses = await serial(modules, order.num_microbatches, *data(2 * order.num_microbatches))
    return losses, gradients(modules)


def alone(order: Schedule) -> tuple[list[float], list[Any]]:
    return simulated_run(_alone, order).value


ORDERS = {name: make_schedule(name, 3, 4) for name in ("1F1B", "ZB-H1")}


@pytest.mark.parametrize(
    ("name", "homes", "victims"),
    [("1F1B", "abc", "a"), ("ZB-H1", "abc", "b"), ("1F1B", "abc", "c"), ("ZB-H1", ".b.", "b"), ("1F1B", "ab.", "ab"), ("ZB-H1", "ab.", "ba")],
)
@pytest.mark.parametrize("block", range(2))
def test_a_step_survives_the_loss_of_workers_at_any_time(name: str, homes: str, victims: str, block: int) -> None:
    """Each block has every other time."""
    order = ORDERS[name]
    losses, expected = alone(order)
    places = [None if home == "." else home for home in homes]
    calm = World(order, places)
    assert simulated_run(calm.run).value == losses and not calm.lost
    duration = calm.took
    survived = 0
    parts = range(block, 7, 2)
    for i in parts:
        world = World(order, places)
        times = [duration * (i + 0.5) / 7 + 0.15 * k for k in range(len(victims))]
        result = simulated_run(world.run, *zip(times, victims, strict=True)).value
        assert result == losses
        assert gradients(world.modules) == expected
        survived += bool(world.lost)
    assert survived == len(parts)


@pytest.mark.parametrize(("homes", "victim"), [("abc", "b"), (".b.", "b"), ("abc", "c")])
def test_without_replacement_nothing_changes_anywhere(homes: str, victim: str) -> None:
    order = ORDERS["1F1B"]
    places = [None if home == "." else home for home in homes]
    calm = World(order, places)
    simulated_run(calm.run)
    for i in range(8):
        world = World(order, places, respawns=False)
        error = simulated_run(world.run, (calm.took * (i + 0.5) / 8, victim)).value
        assert isinstance(error, DistributedError) and not error.committed
        assert not any(gradients(world.modules))


@pytest.mark.parametrize("before_the_end", [0.05, 0.4])
@pytest.mark.parametrize("respawns", [True, False])
def test_a_worker_is_lost_when_it_is_done_and_others_are_not(respawns: bool, before_the_end: float) -> None:
    order = make_schedule("1F1B", 2, 4)
    losses, expected = alone(order)
    calm, world = (World(order, ["a", "b"], respawns=respawns) for _ in range(2))
    calm.slow = world.slow = 0.5
    simulated_run(calm.run)
    result = simulated_run(world.run, (calm.took - before_the_end, "b")).value
    if respawns:
        assert result == losses and gradients(world.modules) == expected and world.lost == [1]
    else:
        assert isinstance(result, WorkerLostError) and not result.committed and not any(gradients(world.modules))


def test_an_evaluation_survives_too() -> None:
    order = ORDERS["1F1B"]
    results = []
    for trouble in ((), ((0.15, "b"),), ((0.25, "c"), (0.3, "a"))):
        world = World(order, ["a", "b", "c"])

        async def main(world: World = world, trouble: Any = trouble) -> Any:
            return await world.run(*trouble, training=False)

        results.append(simulated_run(main).value)
        assert len(world.lost) == len(trouble)
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("chunk", range(4))
def test_any_bad_luck_ends_in_one_of_three_ways(chunk: int) -> None:
    """Over links that lose, repeat and delay frames: done, nothing changed, or not known on the workers that are named."""
    order = ORDERS["ZB-H1"]
    losses, expected = alone(order)
    outcomes: Counter[str] = Counter()
    for seed in range(chunk * 12, chunk * 12 + 12):
        random = Random(seed)
        world = World(order, ["a", None, "b"], seed=seed, faults=Faults.drawn(random), respawns=random.random() < 0.5)
        trouble = [(random.uniform(0, 2.5), random.choice("ab"))] if random.random() < 0.7 else []
        try:
            result = simulated_run(world.run, *trouble, seed=seed).value
        except (DistributedError, PipelineError):  # already in the evaluation before the step
            outcomes["early"] += 1
            continue
        found = gradients(world.modules)
        if isinstance(result, CommitUnknown):
            outcomes["unknown"] += 1
            assert result.committed and result.workers
            for module, owner, wanted in zip(world.modules, world.owners, (expected[:2], expected[2:4], expected[4:]), strict=True):
                assert gradients([module]) == wanted or (owner in result.workers and not any(gradients([module]))), seed
        elif isinstance(result, Exception):
            outcomes["failed"] += 1
            assert not result.committed and not any(found), (seed, result)
        else:
            outcomes["done"] += 1
            assert result == losses and found == expected, seed
    assert outcomes["done"] >= 4, outcomes


async def test_a_replacement_that_is_none(virtual_clock: VirtualClock) -> None:
    world = World(ORDERS["1F1B"], ["a", "b", "c"])
    world.respawn = lambda stage: blocks(1)[0]  # type: ignore[method-assign,assignment,return-value]

    with pytest.raises(ArgumentTypeError, match=r"respawn\(1\) returned"):
        await world.run((0.2, "b"))

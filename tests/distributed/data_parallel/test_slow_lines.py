"""Training with buckets of 4 MB between workers with lines of 1 Mbit/s: no worker is lost, and the bits are equal to one process."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

import aiograd as ag
from aiograd import distributed as dist
from aiograd import nn
from aiograd.testing import AccessLink, Faults, SimulatedNetwork, simulated_run
from tests.distributed.data_parallel.models import serial
from tests.distributed.data_parallel.replicas import mean_of
from tests.distributed.workers import SECRET

NAMES = ("a", "b")
LINE = AccessLink(125_000, 125_000)
#: 4.4 MB of float32, more than one bucket
ROWS, COLUMNS = 1100, 1000

service = dist.Service()


@service.reference
class Wide(nn.Module):
    """One matrix, which is added to a row of numbers and squared."""

    def __init__(self) -> None:
        self.matrix = nn.Parameter(ag.zeros((ROWS, COLUMNS)))
        self.vector = nn.Parameter(ag.zeros((COLUMNS,)))

    def forward(self, x: Any) -> Any:
        return (self.matrix + self.vector + x).square().mean()

    async def loss(self, x: Any) -> Any:
        return self(x)


@service.function
async def echo(number: int) -> int:
    return number


def shards() -> list[Any]:
    return [np.arange(COLUMNS, dtype=np.float32) / 100 + 10 * rank for rank in range(len(NAMES))]


def bits(model: Any) -> list[bytes]:
    return [p.detach().numpy().tobytes() for p in model.parameters()]


async def mean() -> list[bytes]:
    """The bits of one process that takes a step with the mean gradient."""
    model = Wide()

    async def grads_of(rank: int) -> Any:
        model.zero_grad()
        await model(ag.tensor(shards()[rank])).backward()
        return [p.grad.numpy() for p in model.parameters()]

    for p, each in zip(model.parameters(), await mean_of(grads_of, len(NAMES)), strict=True):
        p.grad = ag.tensor(np.frombuffer(each, np.float32).reshape(p.shape))
    ag.optim.SGD(model.parameters(), lr=100.0).step()
    return bits(model)


class Lines:
    """Workers with a line each."""

    def __init__(self) -> None:
        self.network = SimulatedNetwork(1, faults=Faults(latency=(0.01, 0.02)), access=lambda name: LINE)
        self.over = asyncio.Event()
        self.ended = 0
        #: seconds of small calls of "a" to "b", over the connection of the buckets
        self.waits: list[float] = []

    def worker(self, name: str) -> dist.Worker:
        peers = {other: f"sim://{other}" for other in ("driver", *NAMES) if other != name}
        limits = dist.Limits(default_deadline=600.0)
        return dist.Worker(name, service=service, peers=peers, secret=SECRET, transport=self.network.transport(name), limits=limits)

    async def serve(self, name: str) -> None:
        loop = asyncio.get_running_loop()
        async with self.worker(name) as worker:
            while not self.over.is_set():
                await asyncio.sleep(0.5)
                if name == "a":
                    began = loop.time()
                    assert await worker.call("b", "echo", len(self.waits)) == len(self.waits)
                    self.waits.append(loop.time() - began)
            self.ended += 1
            while self.ended < len(NAMES):  # "a" may still call
                await asyncio.sleep(0.5)

    async def run(self, members: Any) -> list[Any]:
        servers = [self.network.spawn(name, main) for name, main in members.items()]
        return await asyncio.gather(*servers)


def test_replicas_take_a_step_and_their_state_is_fetched() -> None:
    async def main() -> None:
        lines = Lines()

        async def drive() -> Any:
            async with lines.worker("driver") as driver:
                options = {"optimizer": "SGD", "optimizer_options": {"lr": 100.0}}
                async with await dist.DataParallel.create(driver, NAMES, Wide, **options) as replicas:
                    await replicas.step([(row,) for row in shards()])
                    state = await replicas.state_dict()
                lines.over.set()
                return state

        *_, state = await lines.run({**{name: lines.serve(name) for name in NAMES}, "driver": drive()})
        alone = Wide()
        await serial(alone, ag.optim.SGD(alone.parameters(), lr=100.0), [[(row,) for row in shards()]])
        assert [state[name].numpy().tobytes() for name in ("matrix", "vector")] == bits(alone)
        assert len(lines.waits) > 100
        median, most_of_them = np.percentile(lines.waits, [50, 90])
        assert median < 0.3 and most_of_them < 0.75 and max(lines.waits) < 1.25, "buckets go both ways"

    run = simulated_run(main)
    assert 100 < run.time < 400 and not run.leftover_tasks


def test_members_of_a_group_take_a_step() -> None:
    async def main() -> None:
        lines = Lines()

        async def member(name: str) -> Any:
            async with lines.worker(name) as worker:
                group = await dist.join_group(worker, NAMES)
                model = Wide()
                ddp = dist.DistributedDataParallel(model, group)
                await (await ddp(ag.tensor(shards()[group.rank]))).backward()
                ag.optim.SGD(model.parameters(), lr=100.0).step()
                await group.barrier()
                await group.aclose()
                return bits(model)

        found = await lines.run({name: member(name) for name in NAMES})
        assert found == [await mean()] * 2

    assert 50 < simulated_run(main).time < 200


def test_an_all_reduce_keeps_both_directions_of_the_lines_busy() -> None:
    """It takes hardly longer than its bytes, though answers to pings wait behind the frames of the other direction."""

    async def main() -> float:
        lines, spent = Lines(), []

        async def member(name: str) -> None:
            async with lines.worker(name) as worker:
                group = await dist.join_group(worker, NAMES)
                began = asyncio.get_running_loop().time()
                await group.all_reduce([np.ones(600_000, np.float32)])
                spent.append(asyncio.get_running_loop().time() - began)
                await group.barrier()
                await group.aclose()

        await lines.run({name: member(name) for name in NAMES})
        return max(spent)

    least = 600_000 * 4 / LINE.up
    assert least < simulated_run(main).value < 1.08 * least

"""aiograd: the shard of a lost worker is computed by the others in the same step; a process in its place takes part from a later step on."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from typing import Any

import aiograd as ag
from aiograd import distributed as dist
from aiograd import nn
from aiograd.errors import DistributedError
from aiograd.nn import functional as F
from tests.faults import task

service = dist.Service()


@service.function
def process_number() -> int:
    """The number of this process."""
    return os.getpid()


@service.reference
class Network(nn.Module):
    """Scores of the classes; each shard sleeps for `work` seconds."""

    def __init__(self, work: float) -> None:
        inputs, hidden, outputs = task.SIZES
        self.layers = nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))
        self.load_state_dict(dict(zip(self.state_dict(), task.weights(), strict=True)))
        self.work = work

    async def loss(self, inputs: Any, classes: Any) -> Any:
        """The mean loss of a shard."""
        await asyncio.sleep(self.work)
        return F.cross_entropy(self.layers(inputs), classes)


async def answered(driver: dist.Worker, name: str) -> tuple[str, int]:
    """Wait until a worker answers; returns its name and process."""
    while True:
        try:
            return name, await driver.call(name, "process_number", timeout=1.0)
        except DistributedError:
            await asyncio.sleep(0.05)


async def main() -> None:
    """Train until the process is ended."""
    options = task.options(__doc__ or "")
    lines, (inputs, classes) = task.Lines(options.lines, "driver"), task.data()
    names = [f"replica{number}" for number in range(options.replicas + (options.join > 0))]
    cluster = dist.make_cluster(options.on, len(names), names=names, service="tests.faults.peers.aiograd_data_parallel:service", max_restarts=1000)
    optimizer: dict[str, Any] = {"optimizer": ag.optim.SGD, "optimizer_options": {"lr": task.LR}}
    create = dist.DataParallel.create
    async with cluster, await create(cluster.driver, names[: options.replicas], Network, options.work, absorb=True, **optimizer) as replicas:
        returning = {name: asyncio.ensure_future(answered(cluster.driver, name)) for name in replicas.names}
        joins_at = time.monotonic() + (options.join or float("inf"))
        for step in itertools.count():
            if time.monotonic() >= joins_at:
                joins_at = float("inf")
                returning[names[-1]] = asyncio.ensure_future(answered(cluster.driver, names[-1]))
                lines.write("joins")
            for name in [name for name, answer in returning.items() if answer.done()]:
                lines.runs(*returning.pop(name).result())
                if name not in replicas.names:
                    await replicas.add(name)
            began = time.monotonic()
            shards = [task.rows(*task.share(step, part, options.replicas)) for part in range(options.replicas)]
            await replicas.step([(inputs[rows], classes[rows]) for rows in shards])
            weights = await replicas.state_dict() if step % 10 == 0 else {}
            lines.step(began, step, *task.share(step, 0, 1), bits=task.bits(each.numpy() for each in weights.values()) if weights else "")
            for name in replicas.lost:
                returning.setdefault(name, asyncio.ensure_future(answered(cluster.driver, name)))


if __name__ == "__main__":
    asyncio.run(main())

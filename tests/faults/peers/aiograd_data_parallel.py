"""aiograd: the shard of a lost worker is computed by the others in the same step; a process in its place takes part from a later step on."""

from __future__ import annotations

import asyncio
import contextlib
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

#: shards for each replica: three others share those of a lost one evenly
SHARDS = 3

service = dist.Service()
service.function(os.getpid)


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


async def answered(cluster: Any, name: str, after: float = 0.0) -> tuple[str, int]:
    """Wait until a worker knows the others and answers; returns its name and process."""
    await asyncio.sleep(after)
    while True:
        with contextlib.suppress(DistributedError):
            await cluster.wait_running(name)
            return name, await cluster.driver.call(name, "getpid", timeout=1.0)
        await asyncio.sleep(0.05)


async def main() -> None:
    """Train until the process is ended."""
    options = task.options(__doc__ or "")
    lines, (inputs, classes), parts = task.Lines(options.lines, "driver"), task.data(), SHARDS * options.replicas
    names = [f"replica{number}" for number in range(options.replicas + (options.join > 0))]
    host, _, port = options.meet.partition(":")
    how: dict[str, Any] = {"host": host, "port": int(port), "allow_plaintext": True} if options.on == "join" else {"max_restarts": 1000}
    cluster = dist.make_cluster(options.on, len(names), names=names, service="tests.faults.peers.aiograd_data_parallel:service", **how)
    given: dict[str, Any] = {"optimizer": ag.optim.SGD, "optimizer_options": {"lr": task.LR}, "absorb": True}
    create, first = dist.DataParallel.create, names[: options.replicas]
    async with cluster, await create(cluster.driver, first, Network, options.work / SHARDS, **given) as replicas:
        returning = {name: asyncio.ensure_future(answered(cluster, name, options.join * (name not in first))) for name in names}
        for step in itertools.count():
            for name in [name for name, answer in returning.items() if answer.done()]:
                lines.runs(*returning.pop(name).result())
                if name not in replicas.names:
                    lines.write("joins")
                    with contextlib.suppress(DistributedError):  # it is lost again, or another is: it is asked again after the step
                        await replicas.add(name)
            began = time.monotonic()
            await replicas.step([(inputs[rows], classes[rows]) for rows in (task.rows(*task.share(step, part, parts)) for part in range(parts))])
            weights = await replicas.state_dict() if step % task.SEEN == 0 else {}
            lines.step(began, step, *task.share(step, 0, 1), [each.numpy() for each in weights.values()])
            for name in {*names}.difference(replicas.names):
                returning.setdefault(name, asyncio.ensure_future(answered(cluster, name)))


if __name__ == "__main__":
    asyncio.run(main())

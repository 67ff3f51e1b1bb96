"""Workers are killed and no step fails: replicas of a network, then a pipeline in two replicas, have the bits of one process at the end.

    python examples/absorbed.py                # processes of this machine, about ten seconds
    python examples/absorbed.py --steps 60

With ``absorb=True`` a lost worker's part of a step is computed by the others in the same call: its shard of the batch by other replicas, its
microbatches by the worker that has the same stage in another replica. No step is repeated by hand, no checkpoint is read, and no sample is left out.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import time
from collections.abc import Iterable, Sequence
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # several processes share the cores

import numpy as np
from sklearn.datasets import load_digits

import aiograd as ag
from aiograd import distributed as dist
from aiograd import nn
from aiograd.nn import functional as F
from aiograd.pipeline import Pipeline, make_schedule

BATCH, SHARDS, MICROBATCHES = 128, 4, 4
OPTIONS: dict[str, Any] = {"lr": 3e-3}

# -------------------------------------------------------------------- what runs in the worker processes

service = dist.Service()


@service.reference
class Bottom(nn.Module):
    """The first stage: features of images of 64 pixels."""

    def __init__(self) -> None:
        generator = ag.Generator(0)
        self.layers = nn.Sequential(nn.Linear(64, 128, generator=generator), nn.ReLU(), nn.Linear(128, 64, generator=generator), nn.ReLU())

    def forward(self, images: Any) -> Any:
        """The features."""
        return self.layers(images)


@service.reference
class Top(nn.Module):
    """The second stage: the mean loss of features and labels."""

    def __init__(self) -> None:
        self.layer = nn.Linear(64, 10, generator=ag.Generator(1))

    def forward(self, features: Any, labels: Any) -> Any:
        """The loss."""
        return F.cross_entropy(self.layer(features), labels)


@service.reference
class Whole(nn.Module):
    """Both stages in one network."""

    def __init__(self) -> None:
        self.bottom, self.top = Bottom(), Top()

    def forward(self, images: Any, labels: Any) -> Any:
        """The loss."""
        return self.top(self.bottom(images), labels)


# -------------------------------------------------------------------- what runs here


class Batches:
    """The batch of each step.

    Args:
        steps: how many there are.
    """

    def __init__(self, steps: int) -> None:
        digits = load_digits()
        self.images, self.labels = ag.asarray((digits.data / 16).astype(np.float32)), ag.asarray(digits.target)
        self.rows = [np.random.default_rng(step).integers(0, len(self.labels), BATCH) for step in range(steps)]

    def parts(self, rows: Any, count: int) -> list[tuple[Any, Any]]:
        """Images and labels in equal parts."""
        return [(self.images[part], self.labels[part]) for part in np.split(rows, count)]


def digest(arrays: Iterable[Any]) -> str:
    """The hash of the bytes of arrays."""
    total = hashlib.sha256()
    for array in arrays:
        total.update(array.detach().numpy().tobytes())
    return total.hexdigest()[:16]


async def train_replicas(cluster: Any, batches: Batches) -> str:
    """Data parallelism on four workers, of which two are killed and one joins again; the hash of the weights."""
    kills, back = {len(batches.rows) // 4: "w1", len(batches.rows) // 2: "w3"}, 3 * len(batches.rows) // 4
    names = [f"w{i}" for i in range(SHARDS)]
    options = {"optimizer": ag.optim.AdamW, "optimizer_options": OPTIONS, "absorb": True}
    async with await dist.DataParallel.create(cluster.driver, names, Whole, method="forward", **options) as replicas:
        for step, rows in enumerate(batches.rows):
            if step in kills:
                os.kill(cluster.pids[kills[step]], signal.SIGKILL)
            if step == back:
                await replicas.add("spare")
            began = time.perf_counter()
            losses = await replicas.step(batches.parts(rows, SHARDS))
            told = f"{kills[step]} is killed" if step in kills else "spare takes part" if step == back else ""
            say(step, losses, time.perf_counter() - began, sorted(set(replicas.names) - set(replicas.lost)), told)
        return digest((await replicas.state_dict()).values())


async def train_pipeline(cluster: Any, batches: Batches) -> str:
    """A pipeline of two stages in two replicas; the worker of a stage is killed, and its place is filled later; the hash of the weights."""
    driver, kill, fill = cluster.driver, len(batches.rows) // 3, 2 * len(batches.rows) // 3
    replicas = [[await driver.remote_module(f"{each}0", Bottom), await driver.remote_module(f"{each}1", Top)] for each in "ab"]
    optimizer = dist.DistributedOptimizer(driver, ag.optim.AdamW, [stage for replica in replicas for stage in replica], **OPTIONS)
    async with Pipeline(replicas, make_schedule("1F1B", ranks=2, microbatches=MICROBATCHES // 2), worker=driver, absorb=True) as pipe:
        for step, rows in enumerate(batches.rows):
            if step == kill:
                os.kill(cluster.pids["b1"], signal.SIGKILL)
            if step == fill:
                top = await driver.remote_module("spare2", Top)
                await pipe.replace("b1", top)
                await optimizer.add([top], like="a1")
            began = time.perf_counter()
            losses = await pipe.step(batches.images[rows], batches.labels[rows])
            if step == kill:
                await optimizer.remove("b1")
            await optimizer.step()
            told = "b1 is killed, a1 computes its part" if step == kill else "spare2 has its place" if step == fill else ""
            names = [stage.peer for replica in pipe.replicas for stage in replica if (step < kill or stage.peer != "b1")]
            say(step, losses, time.perf_counter() - began, names, told)
        return digest([value for stage in pipe.replicas[1] for value in (await stage.state_dict()).values()])


def say(step: int, losses: Sequence[Any], seconds: float, names: Sequence[str], told: str) -> None:
    """Print a line about a step in which something happened, and about the first one."""
    if told or not step:
        loss = np.mean([each.item() for each in losses])
        print(f"    step {step:3}: loss {loss:.4f}, {1000 * seconds:4.0f} ms on {' '.join(names)}; {told or 'whole'}")


async def alone(batches: Batches, groups: int, parts: int) -> str:
    """The hash of the weights of one process that adds up the gradients of the parts of each group, then of the groups."""
    model = Whole()
    optimizer = ag.optim.AdamW(model.parameters(), **OPTIONS)
    for rows in batches.rows:
        sums: list[Any] = []
        for group in np.split(rows, groups):
            for images, labels in batches.parts(group, parts):
                await ag.backward(model(images, labels), ag.tensor(np.float32(1 / (groups * parts))))
            mine = [parameter.grad for parameter in model.parameters()]
            sums = [have + grad for have, grad in zip(sums, mine, strict=True)] if sums else mine
            optimizer.zero_grad()
        for parameter, grad in zip(model.parameters(), sums, strict=True):
            parameter.grad = grad
        optimizer.step()
        optimizer.zero_grad()
    return digest(model.state_dict().values())


async def main(steps: int) -> None:
    """Train both ways under kills, then compare with one process."""
    batches = Batches(steps)
    names = ["w0", "w1", "w2", "w3", "spare", "a0", "a1", "b0", "b1", "spare2"]
    async with dist.LocalCluster(len(names), names=names, service="absorbed:service") as cluster:
        print("four replicas, a shard of each batch for each")
        replicas = await train_replicas(cluster, batches)
        print("a pipeline of two stages, in two replicas")
        pipeline = await train_pipeline(cluster, batches)
    print(f"\n{'':10}{'under kills':18}one process")
    for name, found, expected in (("replicas", replicas, await alone(batches, SHARDS, 1)), ("pipeline", pipeline, await alone(batches, 2, 2))):
        print(f"{name:10}{found:18}{expected}")
        assert found == expected
    print(f"no step of {2 * steps} failed, and the weights have the same bits")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=24, help="of each of the two (24)")
    options = parser.parse_args()
    if options.steps < 8:
        parser.error("--steps: expected at least 8, so that there is a step for each event")
    ag.run(main(options.steps))

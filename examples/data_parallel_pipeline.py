"""Two replicas of a pipeline of two stages, on four worker processes; one is killed on the way and another takes its place.

    python examples/data_parallel_pipeline.py                # processes of this machine, about ten seconds
    python examples/data_parallel_pipeline.py --schedule 1F1B --steps 40

Each replica carries out the schedule for its half of the microbatches. The two workers that have the same stage add up its gradients while the other
stage still computes. The weights at the end have the bits of one process that computes the gradients of one replica after the other.
"""

from __future__ import annotations

import argparse
import os
import signal
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # several processes share the cores

import numpy as np
from sklearn.datasets import load_digits

import aiograd as ag
from aiograd import distributed as dist
from aiograd import nn
from aiograd.errors import WorkerLostError
from aiograd.nn import functional as F
from aiograd.pipeline import Pipeline, make_schedule

BATCH, MICROBATCHES = 128, 4
OPTIONS: dict[str, Any] = {"lr": 3e-3}

# -------------------------------------------------------------------- what runs in the worker processes

service = dist.Service()


@service.reference
class Bottom(nn.Module):
    """The first stage: features of images of 64 pixels."""

    def __init__(self) -> None:
        generator = ag.Generator(0)
        self.layers = nn.Sequential(nn.Linear(64, 128, generator=generator), nn.ReLU(), nn.Linear(128, 128, generator=generator), nn.ReLU())

    def forward(self, images: Any) -> Any:
        """The features."""
        return self.layers(images)


@service.reference
class Top(nn.Module):
    """The second stage: the scores of the digits, or the loss."""

    def __init__(self) -> None:
        self.layer = nn.Linear(128, 10, generator=ag.Generator(1))

    def forward(self, features: Any, labels: Any = None) -> Any:
        """The scores; with labels the mean loss."""
        scores = self.layer(features)
        return scores if labels is None else F.cross_entropy(scores, labels)


# -------------------------------------------------------------------- what runs here


async def main(schedule: str, steps: int) -> None:
    """Train across processes, then compare with one process."""
    digits = load_digits()
    images, labels = ag.asarray((digits.data / 16).astype(np.float32)), ag.asarray(digits.target)
    batches = [np.random.default_rng(step).integers(0, len(labels), BATCH) for step in range(steps)]
    names = ["a0", "a1", "b0", "b1", "spare"]
    rows: list[tuple[int, str, float]] = []

    async with dist.LocalCluster(len(names), names=names, service="data_parallel_pipeline:service") as cluster:
        driver = cluster.driver
        replicas = [[await driver.remote_module(f"{each}0", Bottom), await driver.remote_module(f"{each}1", Top)] for each in "ab"]
        optimizer = dist.DistributedOptimizer(driver, ag.optim.AdamW, [stage for replica in replicas for stage in replica], **OPTIONS)
        async with Pipeline(replicas, make_schedule(schedule, ranks=2, microbatches=MICROBATCHES // 2), worker=driver, clip_norm=1.0) as pipe:
            for step, batch in enumerate(batches):
                if step == steps // 2:
                    os.kill(cluster.pids["b1"], signal.SIGKILL)
                try:
                    losses = await pipe.step(images[batch], labels[batch])
                except WorkerLostError as error:
                    print(f"{error.worker} is lost; nothing has changed on the others, and the spare worker takes its place", flush=True)
                    _, (bottom, _) = pipe.replicas
                    top = await driver.remote_module("spare", Top)
                    await pipe.remove(error.worker)
                    await pipe.add([bottom, top])
                    await optimizer.remove(error.worker)
                    await optimizer.add([top], like="a1")
                    losses = await pipe.step(images[batch], labels[batch])
                await optimizer.step()
                names = [stage.peer for replica in pipe.replicas for stage in replica]
                rows.append((step, " ".join(names), float(np.mean([each.item() for each in losses]))))
            state = [await stage.state_dict() for stage in pipe.replicas[1]]

    print(f"\n{'step':>4}  {'workers':<12}  loss")
    for step, workers, loss in rows[:: max(1, steps // 10)]:
        print(f"{step:4}  {workers:<12}  {loss:.4f}")
    same = await alone(images, labels, batches, state)
    print(f"\nthe weights {'have the same bits as' if same else 'DIFFER FROM'} those of one process that computes one replica after the other")
    assert same


async def alone(images: Any, labels: Any, batches: list[Any], state: Any) -> bool:
    """True if training in one process ends with the same bits."""
    bottom, top = Bottom(), Top()
    parameters = [*bottom.parameters(), *top.parameters()]
    optimizer = ag.optim.AdamW(parameters, **OPTIONS)
    for batch in batches:
        sums: list[Any] = []
        for half in np.split(batch, 2):
            for part in np.split(half, MICROBATCHES // 2):
                loss = top(bottom(images[part]), labels[part])
                await ag.backward(loss, ag.tensor(np.float32(1 / MICROBATCHES)))
            mine = [parameter.grad for parameter in parameters]
            sums = mine if not sums else [have + grad for have, grad in zip(sums, mine, strict=True)]
            optimizer.zero_grad()
        for parameter, grad in zip(parameters, sums, strict=True):
            parameter.grad = grad
        ag.optim.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return all(
        np.array_equal(values[name].numpy(), value.detach().numpy())
        for stage, values in zip((bottom, top), state, strict=True)
        for name, value in stage.state_dict().items()
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--schedule", default="ZB-H1", help="1F1B, ZB-H1, GPipe, ...")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    ag.run(main(options.schedule, options.steps))

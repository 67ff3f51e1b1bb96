"""One network on four worker processes, each with a shard of every batch; one is killed on the way and another takes part from then on.

    python examples/data_parallel.py                         # processes of this machine, about ten seconds
    python examples/data_parallel.py --on ray                # actors of Ray
    python examples/data_parallel.py --epochs 4 --clip 0.5

Gradients are summed between the workers, in the order of their ranks, and all replicas take the same step of AdamW, or none does. When a worker is
killed its step is given up everywhere, and the three others take it; a new one gets their state and is the fourth. The weights at the end have the
bits of one process that adds up the gradients of the same shards. (Workers that join by themselves have to be started with as many threads of BLAS as
this process has: OPENBLAS_NUM_THREADS=1.)
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import time
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # several processes share the cores

import numpy as np
from sklearn.datasets import load_digits

import aiograd as ag
from aiograd import distributed as dist
from aiograd import nn
from aiograd.errors import WorkerLostError
from aiograd.nn import functional as F

NAMES = [f"replica{i}" for i in range(5)]
AT_FIRST, BATCH = 4, 128
OPTIONS: dict[str, Any] = {"lr": 3e-3, "weight_decay": 1e-2}

# -------------------------------------------------------------------- what runs in the worker processes

service = dist.Service()


@service.reference
class Digits(nn.Module):
    """Scores of the digits for images of 64 pixels."""

    def __init__(self) -> None:
        generator = ag.Generator(0)
        self.layers = nn.Sequential(
            nn.Linear(64, 128, generator=generator), nn.ReLU(), nn.Linear(128, 128, generator=generator), nn.ReLU(),
            nn.Linear(128, 10, generator=generator),
        )  # fmt: skip

    def forward(self, images: Any) -> Any:
        """The scores."""
        return self.layers(images)

    def loss(self, images: Any, labels: Any) -> Any:
        """The mean loss of a shard."""
        return F.cross_entropy(self(images), labels)


@service.function
def end() -> None:
    """Kill this worker, as the loss of a machine would."""
    os.kill(os.getpid(), signal.SIGKILL)


# -------------------------------------------------------------------- what runs here


class Training:
    """Trains replicas.

    Args:
        replicas: the replicas.
        images, labels: of all digits.
    """

    def __init__(self, replicas: dist.DataParallel, images: Any, labels: Any) -> None:
        self.replicas = replicas
        self.images, self.labels = images, labels
        #: the shards of each step that was taken
        self.taken: list[list[Any]] = []

    async def step(self, rows: Any) -> float:
        """Take a step with these rows, divided among the replicas that there are; returns the loss."""
        shards = np.array_split(rows, len(self.replicas.names))
        losses = await self.replicas.step([(self.images[shard], self.labels[shard]) for shard in shards])
        self.taken.append(shards)
        return sum(loss.item() * len(shard) for loss, shard in zip(losses, shards, strict=True)) / len(rows)


async def main(epochs: int, clip: float, on: str) -> None:
    """Train across processes, then compare with one process."""
    digits = load_digits()
    images, labels = (digits.data / 16).astype(np.float32), digits.target
    order = np.random.default_rng(0).permutation(len(labels))
    training, testing = order[:1408], order[1437:]
    loader = ag.data.DataLoader(training, BATCH, shuffle=True, generator=ag.Generator(0))
    steps = epochs * len(loader)
    killing: asyncio.Future[None] | None = None

    async with dist.make_cluster(on, len(NAMES), names=NAMES, service="data_parallel:service") as cluster:
        options = {"optimizer": ag.optim.AdamW, "optimizer_options": OPTIONS, "clip_norm": clip}
        async with await dist.DataParallel.create(cluster.driver, NAMES[:AT_FIRST], Digits, **options) as replicas:
            run = Training(replicas, images, labels)
            started = time.perf_counter()
            while loader.epoch < epochs:
                async for lease in loader.leases():
                    number = lease.epoch * len(loader) + lease.number
                    if number == steps // 3 and killing is None:
                        killing = asyncio.ensure_future(cluster.driver.call(NAMES[1], "end"))
                    try:
                        async with lease as rows:
                            loss = await run.step(rows.numpy())
                    except WorkerLostError as error:
                        print(f"    {error.worker} is lost, the step was given up everywhere; its batch comes again", flush=True)
                        await replicas.remove(error.worker)
                        continue
                    if number == 2 * steps // 3:
                        await replicas.add(NAMES[4])
                        print(f"    {NAMES[4]} has the state of the others and takes part", flush=True)
                    if number % max(1, steps // 10) == 0:
                        print(f"    step {number:3}: loss {loss:.4f}, {len(replicas.names)} replicas", flush=True)
            await asyncio.gather(killing, return_exceptions=True)
            seconds = time.perf_counter() - started
            shards = [images[part] for part in np.array_split(testing, len(replicas.names))]
            scores = np.concatenate([each.numpy() for each in await replicas.eval(shards)])
            accuracy = float((scores.argmax(axis=1) == labels[testing]).mean())
            state, names = await replicas.state_dict(), replicas.names

    same = await alone(images, labels, run.taken, clip, state)
    print(f"\n{steps} steps of {BATCH} images in {seconds:.1f} s, at the end on {', '.join(names)}")
    print(f"{accuracy:.1%} of {len(testing)} test images")
    print(f"the weights {'have the same bits as' if same else 'DIFFER FROM'} those of one process that adds up the gradients of the shards in turn")
    assert same
    assert names == (NAMES[0], NAMES[2], NAMES[3], NAMES[4])
    assert epochs < 10 or accuracy > 0.93


async def alone(images: Any, labels: Any, taken: list[list[Any]], clip: float, state: Any) -> bool:
    """True if training in one process ends with the same bits."""
    model = Digits()
    optimizer = ag.optim.AdamW(model.parameters(), **OPTIONS)
    for shards in taken:
        for shard in shards:
            loss = model.loss(ag.asarray(images[shard]), labels[shard])
            await ag.backward(loss, ag.tensor(len(shard) / BATCH))
        ag.optim.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return all(np.array_equal(state[name].numpy(), value.detach().numpy()) for name, value in model.state_dict().items())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--clip", type=float, default=1.0, help="the largest norm of the gradients")
    parser.add_argument("--on", choices=("local", "ray", "join"), default="local", help="where the workers run (default: processes of this machine)")
    options = parser.parse_args()
    ag.run(main(options.epochs, options.clip, options.on))

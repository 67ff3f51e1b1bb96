"""A gradient penalty in data-parallel steps: the loss of each replica contains a gradient, so the step contains second derivatives.

    python examples/gradient_penalty.py               # three worker processes on this machine, a few seconds
    python examples/gradient_penalty.py --steps 300 --weight 1

A network learns to read digits, once with the loss alone and once with the mean square of its gradient by the pixels beside it, which makes the
answers depend less on any one pixel. The replicas compute the penalty of their shards with `ag.grad(..., create_graph=True)`; the weights at the end
have the bits of one process.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # another number of threads rounds otherwise

import numpy as np

try:
    from sklearn.datasets import load_digits
except ImportError:
    sys.exit("this example needs scikit-learn: pip install '.[demo]'")

import aiograd as ag
from aiograd import distributed as dist
from aiograd import nn

WORKERS, BATCH = 3, 96
OPTIONS = {"lr": 5e-3}

# -------------------------------------------------------------------- what runs in the worker processes

service = dist.Service()


@service.reference
class Reader(nn.Module):
    """Scores of the digits, (n, 10), and a loss with a penalty.

    Args:
        weight: of the penalty.
    """

    def __init__(self, weight: float) -> None:
        generator = ag.Generator(0)
        self.layers = nn.Sequential(nn.Linear(64, 64, generator=generator), nn.Tanh(), nn.Linear(64, 10, generator=generator))
        self.weight = weight

    def forward(self, images: Any) -> Any:
        """The scores."""
        return self.layers(images)

    async def loss(self, images: Any, labels: Any) -> Any:
        """The mean loss of a shard, and `weight` times its penalty."""
        images = ag.asarray(images).detach().requires_grad_()
        losses = nn.functional.cross_entropy(self(images), labels, reduction="none")
        (slopes,) = await ag.grad(losses.sum(), [images], create_graph=True)
        return losses.mean() + self.weight * slopes.square().sum(1).mean()


# -------------------------------------------------------------------- what runs here


async def replicated(batches: list[Any], weight: float) -> Any:
    """The weights after steps on the workers."""
    async with dist.LocalCluster(WORKERS, service="gradient_penalty:service") as cluster:
        options = {"optimizer": ag.optim.AdamW, "optimizer_options": OPTIONS}
        async with await dist.DataParallel.create(cluster.driver, cluster.workers, Reader, weight, **options) as replicas:
            for number, shards in enumerate(batches):
                losses = await replicas.step(shards)
                if number % max(1, len(batches) // 4) == 0:
                    print(f"    step {number:3}: loss {np.mean([loss.item() for loss in losses]):.3f}", flush=True)
            return await replicas.state_dict()


async def alone(batches: list[Any], weight: float) -> Reader:
    """One process that adds up the gradients of the same shards."""
    reader = Reader(weight)
    optimizer = ag.optim.AdamW(reader.parameters(), **OPTIONS)
    for shards in batches:
        for images, labels in shards:
            await ag.backward(await reader.loss(images, labels), ag.tensor(len(images) / BATCH))
        optimizer.step()
        optimizer.zero_grad()
    return reader


async def accuracy(reader: Reader, images: Any, labels: Any, change: float) -> float:
    """The share of images that are read correctly after each pixel has changed, in the direction that makes the loss larger."""
    pixels = ag.tensor(images, requires_grad=True)
    (slopes,) = await ag.grad(nn.functional.cross_entropy(reader(pixels), labels), [pixels])
    return float((reader(ag.asarray(images) + change * np.sign(slopes)).numpy().argmax(1) == labels).mean())


async def main(steps: int, weight: float) -> None:
    """Train with and without the penalty, and compare."""
    digits = load_digits()
    images, labels = (digits.data / 16).astype(np.float32), digits.target
    chosen = [np.array_split(np.random.default_rng(step).choice(1400, BATCH, replace=False), WORKERS) for step in range(steps)]
    batches = [[(images[rows], labels[rows]) for rows in shards] for shards in chosen]
    for each in (0.0, weight):
        print(f"weight of the penalty {each:g}:")
        state, reader = await replicated(batches, each), await alone(batches, each)
        same = all(state[name].numpy().tobytes() == value.detach().numpy().tobytes() for name, value in reader.state_dict().items())
        right = [await accuracy(reader, images[1400:], labels[1400:], change) for change in (0.0, 0.1)]
        print(f"    {right[0]:.0%} of new images right, {right[1]:.0%} after each pixel has moved by a tenth in its worst direction")
        print(f"    the weights {'have the same bits as' if same else 'DIFFER FROM'} those of one process")
        assert same


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--weight", type=float, default=0.3)
    options = parser.parse_args()
    ag.run(main(options.steps, options.weight))

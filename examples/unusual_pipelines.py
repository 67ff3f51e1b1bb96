"""A U-shaped network in a pipeline over three workers: a skip connection, an input and a loss in the middle, microbatches of four shapes.

    python examples/unusual_pipelines.py                     # three worker processes on this machine, about ten seconds

Each worker has one stage. Noisy digits are made clean, and the stage in the middle says which digits they are, which is a loss of its own:

    stage 0, down ----- output -----> stage 1, middle ----- output -----> stage 2, up  -> the loss of pixels
       |                              labels ^   | loss ----------------------^               + that of labels
       +----------- features, past the worker in the middle ------------------^

Values that a stage gives by name go straight to the worker that takes them, and their gradients straight back. The microbatches are cuts of the
images of different sizes. The weights have the bits of one process that computes one microbatch after the other.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # several processes share the cores

import numpy as np
from sklearn.datasets import load_digits

import aiograd as ag
from aiograd import distributed as dist
from aiograd import nn
from aiograd.nn import functional as F
from aiograd.pipeline import Pipeline, Stage, make_schedule

SHAPES = [(8, 8), (8, 6), (6, 8), (6, 6)]  # of the images of each microbatch
ROWS = 24
OPTIONS: dict[str, Any] = {"lr": 1e-2}

# -------------------------------------------------------------------- what runs in the worker processes

service = dist.Service()


@service.reference
class Down(nn.Module):
    """Half as many pixels; gives its features as well."""

    def __init__(self) -> None:
        self.convolution = nn.Conv2d(1, 8, 3, padding=1, generator=ag.Generator(0))

    def forward(self, images: Any) -> Any:
        """The output, and what it gives."""
        features = F.relu(self.convolution(images))
        return F.avg_pool2d(features, 2), features


@service.reference
class Middle(nn.Module):
    """Says which digits they are."""

    def __init__(self) -> None:
        self.convolution = nn.Conv2d(8, 16, 3, padding=1, generator=ag.Generator(1))
        self.classes = nn.Linear(16, 10, generator=ag.Generator(2))

    def forward(self, x: Any, labels: Any = None) -> Any:
        """The output, and the loss, where there are labels."""
        y = F.relu(self.convolution(x))
        return y, None if labels is None else 0.1 * F.cross_entropy(self.classes(y.mean(axis=(2, 3))), labels)


@service.reference
class Up(nn.Module):
    """As many pixels as before; takes features."""

    def __init__(self) -> None:
        self.convolution = nn.Conv2d(24, 1, 3, padding=1, generator=ag.Generator(3))

    def forward(self, x: Any, target: Any = None, *, features: Any) -> Any:
        """The clean images, or with a target the loss."""
        images = self.convolution(ag.concatenate([F.interpolate(x, scale_factor=2), features], axis=1))
        return images if target is None else F.mse_loss(images, target)


# -------------------------------------------------------------------- what runs here


def batch(step: int) -> tuple[list[Any], list[Any], list[Any]]:
    """Noisy images, labels and clean images by microbatch."""
    digits, rng = load_digits(), np.random.default_rng(step)
    noisy, labels, clean = [], [], []
    for height, width in SHAPES:
        rows = rng.integers(0, len(digits.target), ROWS)
        images = (digits.images[rows, None, :height, :width] / 16).astype(np.float32)
        noisy.append(ag.asarray(images + rng.normal(0, 0.3, images.shape).astype(np.float32)))
        clean.append(ag.asarray(images))
        labels.append(ag.asarray(digits.target[rows]))
    return noisy, labels, clean


async def alone(steps: int) -> list[Any]:
    """The weights after training in one process, one microbatch after the other."""
    down, middle, up = modules = [Down(), Middle(), Up()]
    optimizer = ag.optim.Adam([parameter for module in modules for parameter in module.parameters()], **OPTIONS)
    for step in range(steps):
        optimizer.zero_grad()
        for images, labels, target in zip(*batch(step), strict=True):
            y, features = down(images)
            y, loss = middle(y, labels)
            await ag.backward(up(y, target, features=features) + loss, ag.tensor(np.float32(1 / len(SHAPES))))
        optimizer.step()
    return [module.state_dict() for module in modules]


async def main(steps: int, schedule: str) -> None:
    """Train over workers, then compare with one process."""
    names = ["down", "middle", "up"]
    async with dist.LocalCluster(3, names=names, service="unusual_pipelines:service") as cluster:
        modules = [await cluster.driver.remote_module(name, kind) for name, kind in zip(names, (Down, Middle, Up), strict=True)]
        optimizer = dist.DistributedOptimizer(cluster.driver, ag.optim.Adam, modules, **OPTIONS)
        stages = [
            Stage(modules[0], gives=("features",)),
            Stage(modules[1], takes=("labels",), gives=("loss",)),
            Stage(modules[2], takes=("features",)),
        ]
        async with Pipeline(stages, make_schedule(schedule, ranks=3, microbatches=len(SHAPES))) as pipe:
            for step in range(steps):
                images, labels, targets = batch(step)
                losses = await pipe.step(arg_mbs=[(each,) for each in images], kwarg_mbs=[{"labels": each} for each in labels], target_mbs=targets)
                await optimizer.step()
                if step % max(1, steps // 5) == 0 or step == steps - 1:
                    by_shape = "  ".join(f"{h}x{w} {loss.item():.3f}" for (h, w), loss in zip(SHAPES, losses, strict=True))
                    print(f"step {step:3}  loss by shape: {by_shape}")
        found = [await module.state_dict() for module in modules]
    expected = await alone(steps)
    same = all(mine[name].numpy().tobytes() == state[name].numpy().tobytes() for mine, state in zip(expected, found, strict=True) for name in mine)
    print(f"the weights {'have the same bits as' if same else 'DIFFER FROM'} those of one process")
    assert same


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--schedule", default="ZB-H1", help="1F1B, ZB-H1, GPipe, ...")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    ag.run(main(options.steps, options.schedule))

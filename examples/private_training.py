"""Train on scikit-learn's handwritten digits with differential privacy, beside the same training without it.

    python examples/private_training.py
    python examples/private_training.py --noise 2 --steps 400

Batches are drawn by `PoissonSampler`, gradients are clipped per example, and noise is added (DP-SGD). In the middle one example is broken: the step
that meets it raises, and changes neither weights nor the privacy that is spent.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # matrices this small gain nothing from more, and waiting for each other costs

import numpy as np
from sklearn.datasets import load_digits

import aiograd as ag
from aiograd import nn
from aiograd.errors import NaNGradientError
from aiograd.nn import functional as F

DELTA = 1e-5


def network() -> nn.Module:
    """64 pixels → 64 → 10 classes, the same weights each time."""
    generator = ag.Generator(0)
    return nn.Sequential(nn.Linear(64, 64, generator=generator), nn.Tanh(), nn.Linear(64, 10, generator=generator))


def accuracy(model: nn.Module, images: np.ndarray, labels: np.ndarray) -> float:
    """The share of images that it classifies correctly."""
    with ag.no_grad():
        return float((model(ag.asarray(images)).numpy().argmax(axis=1) == labels).mean())


async def main(noise: float, steps: int, rate: float) -> None:
    digits = load_digits()
    images, labels = (digits.data / 16).astype(np.float32), digits.target
    order = np.random.default_rng(0).permutation(len(images))
    training, testing = order[:1437], order[1437:]

    plain = network()
    optimizer = ag.optim.SGD(plain.parameters(), lr=0.5, momentum=0.5)
    for batch in ag.data.PoissonSampler(len(training), rate, steps, generator=ag.Generator(1)):
        loss = F.cross_entropy(plain(ag.asarray(images[training[batch]])), labels[training[batch]])
        optimizer.zero_grad()
        await loss.backward()
        optimizer.step()
    print(f"without privacy: test accuracy {accuracy(plain, images[testing], labels[testing]):.1%}, epsilon infinite")

    model = network()
    private = ag.optim.Private(
        ag.optim.SGD(model.parameters(), lr=0.5, momentum=0.5), noise_multiplier=noise, max_grad_norm=1.0, sample_rate=rate,
        dataset_size=len(training), generator=ag.Generator(2),
    )  # fmt: skip
    sampler = ag.data.PoissonSampler(len(training), rate, steps, generator=ag.Generator(1))
    for step, batch in enumerate(sampler):
        examples, classes = images[training[batch]], labels[training[batch]]
        if step == steps // 2:
            before = [p.detach().numpy().copy() for p in model.parameters()]
            spent = private.epsilon(DELTA)
            broken = np.concatenate([examples, np.full((1, 64), np.nan, np.float32)])
            try:
                await private.step(lambda x, y: F.cross_entropy(model(x), y), (broken, np.append(classes, 0)))
            except NaNGradientError as error:
                print(f"step {step}: {error}")
            kept = all(np.array_equal(old, p.detach().numpy()) for old, p in zip(before, model.parameters(), strict=True))
            print(f"the step that failed changed nothing: {kept and private.epsilon(DELTA) == spent}")
        losses = await private.step(lambda x, y: F.cross_entropy(model(x), y), (examples, classes))
        if (step + 1) % 50 == 0:
            print(f"step {step + 1}: mean loss {losses.numpy().mean():.3f}, epsilon {private.epsilon(DELTA):.2f} at delta {DELTA}")
    print(
        f"with privacy: test accuracy {accuracy(model, images[testing], labels[testing]):.1%}, epsilon {private.epsilon(DELTA):.2f}, "
        f"{private.steps} steps of about {rate * len(training):.0f} examples"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--noise", type=float, default=1.5, help="standard deviation of the noise over the clipping norm")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rate", type=float, default=0.1, help="probability of an example to be in a batch")
    options = parser.parse_args()
    ag.run(main(options.noise, options.steps, options.rate))

"""The same training in one process, without any network; the distributed training is compared with it, to the bit."""

from __future__ import annotations

import math
from typing import Any

from aiograd.nn.functional import cross_entropy
from aiograd.optim import AdamW
from aiograd.running.cli.demo.data import batches
from aiograd.running.cli.demo.model import Network
from aiograd.running.modes import no_grad
from aiograd.tensors.passes import grad
from aiograd.tensors.tensor import Tensor

#: options of AdamW, here and there; the rate of the first epoch
RATE = 4e-3
DECAY = 0.01


def rate(epoch: int, epochs: int) -> float:
    """The learning rate of an epoch: it falls along a cosine, so that the last epochs do not jump about."""
    return RATE * (1 + math.cos(math.pi * epoch / epochs)) / 2


async def gradients_alone(seed: int, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Gradients of the loss of one batch by parameter, of the untrained network."""
    network = Network(seed=seed)
    names, parameters = zip(*network.named_parameters(), strict=True)
    loss = cross_entropy(network(images), labels)
    return dict(zip(names, await grad(loss, parameters), strict=True))


async def train_alone(seed: int, epochs: int, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Train the network; returns its weights. Cancelling stops it."""
    network = Network(seed=seed)
    optimizer = AdamW(network.parameters(), lr=RATE, weight_decay=DECAY)
    for epoch in range(epochs):
        optimizer.param_groups[0]["lr"] = rate(epoch, epochs)
        for batch in batches(len(labels), epoch):
            loss = cross_entropy(network(images[batch]), labels[batch])
            optimizer.zero_grad()
            await loss.backward()
            optimizer.step()
    return network.state_dict()


def accuracy(scores: Any, labels: Any) -> float:
    """The share of images with the highest score for the right digit."""
    with no_grad():
        return float((scores.detach().numpy().argmax(axis=1) == labels).mean())

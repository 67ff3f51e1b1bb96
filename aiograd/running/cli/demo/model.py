"""The network of the demo: a small convolutional one, made of blocks, so that it can be cut anywhere between two of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from aiograd import nn
from aiograd.nn.functional import cross_entropy
from aiograd.running.random import Generator

#: names of the blocks, from the image to the ten digits
BLOCKS: tuple[str, ...] = ("edges", "shapes", "features", "digits")

_MAKERS: dict[str, Callable[[Generator], nn.Module]] = {
    "edges": lambda generator: nn.Sequential(nn.Conv2d(1, 16, 3, padding=1, generator=generator), nn.ReLU(), nn.MaxPool2d(2)),
    "shapes": lambda generator: nn.Sequential(nn.Conv2d(16, 32, 3, padding=1, generator=generator), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
    "features": lambda generator: nn.Sequential(nn.Linear(128, 64, generator=generator), nn.ReLU()),
    "digits": lambda generator: nn.Linear(64, 10, generator=generator),
}


class Network(nn.Module):
    """Some blocks in a row: all of them, or the part that one worker holds.

    A block starts with the same weights wherever it is made, and its parameters have the same names there, so the state of the whole network is
    the union of the states of its parts.

    Args:
        blocks: names out of `BLOCKS`; None: all of them.
        seed: of the weights.
    """

    def __init__(self, blocks: list[str] | None = None, seed: int = 0) -> None:
        for name in BLOCKS if blocks is None else blocks:
            self.add_module(name, _MAKERS[name](Generator(1000 * seed + BLOCKS.index(name))))

    def forward(self, x: Any) -> Any:
        """Images of shape (n, 1, 8, 8), or the output of the block before, to the output of the last block: (n, 10) scores."""
        for block in self.children():
            x = block(x)
        return x

    def loss(self, images: Any, labels: Any) -> Any:
        """The mean cross entropy of images and their digits."""
        return cross_entropy(self(images), labels)


def cut(parts: int) -> list[list[str]]:
    """The names of the blocks of each of `parts` workers, as even as they come.

    Args:
        parts: 1 to 4.
    """
    bounds = [round(i * len(BLOCKS) / parts) for i in range(parts + 1)]
    return [list(BLOCKS[a:b]) for a, b in itertools.pairwise(bounds)]

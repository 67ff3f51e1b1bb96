"""Models that show which version computed an answer."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

import aiograd as ag
from aiograd import nn


class Two(nn.Module):
    """Two weights that are equal in each version: an answer of two versions has two values."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Parameter(ag.tensor([value]))
        self.second = nn.Parameter(ag.tensor([value]))

    def forward(self, x: Any) -> Any:
        return ag.stack([x[:, 0] * self.first, x[:, 0] * self.second], axis=1)

    def set(self, value: float) -> None:
        """Give both weights a value, in two steps."""
        with ag.no_grad():
            self.first.fill_(value)
            self.second.fill_(value)


class TwoSlowly(Two):
    """As `Two`, with awaits between the weights."""

    seconds = 0.0

    async def forward(self, x: Any) -> Any:
        left = x[:, 0] * self.first
        await asyncio.sleep(self.seconds)
        return ag.stack([left, x[:, 0] * self.second], axis=1)


def state(value: float) -> dict[str, Any]:
    """The state of a `Two`."""
    return {"first": np.array([value], np.float32), "second": np.array([value], np.float32)}


def ones(rows: int = 1) -> Any:
    """Columns for a `Two`."""
    return np.ones((rows, 1), np.float32)


def values(answer: Any) -> set[float]:
    """The different values of an answer; one if it is whole."""
    return set(answer.value.numpy().ravel().tolist())

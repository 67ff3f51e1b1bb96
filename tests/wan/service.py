"""The model that processes on slow links train."""

from __future__ import annotations

import asyncio
from typing import Any

import aiograd as ag
from aiograd import distributed as dist
from aiograd import nn
from aiograd.nn import functional as F
from tests.distributed.local_steps.learners import data_set

service = dist.Service()

ROWS, BATCH = 480, 4


@service.reference
class Wide(nn.Module):
    """Two layers with `width` units between them, 8 * width + 3 parameters; a step takes at least `seconds`."""

    def __init__(self, width: int, seconds: float) -> None:
        generator = ag.Generator(0)
        self.first = nn.Linear(4, width, generator=generator)
        self.second = nn.Linear(width, 3, generator=generator)
        self.seconds = seconds

    def data(self) -> Any:
        """The data set, alike on all."""
        return ag.data.DataLoader(data_set(ROWS), batch_size=BATCH, shuffle=True, generator=ag.Generator(5))

    async def loss(self, x: Any, target: Any) -> Any:
        """The loss of a batch."""
        await asyncio.sleep(self.seconds)
        return F.cross_entropy(self.second(ag.tanh(self.first(x))), target)

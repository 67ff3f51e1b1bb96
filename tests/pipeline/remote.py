"""Stages on workers, for tests."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from typing import Any

import numpy as np

import aiograd as ag
from aiograd import distributed as dist
from tests.pipeline.models import blocks, mean_square

service = dist.Service()


@service.reference
class Block(ag.nn.Module):
    """A block of the model that `blocks` makes; fails or waits on demand."""

    def __init__(self, index: int, wait: float = 0.0) -> None:
        self.inner = blocks(index + 1)[index]
        self.wait = wait
        self.fails_at = self.ends_at = -1
        self.calls = 0

    async def forward(self, x: Any) -> Any:
        self.calls += 1
        if self.calls == self.fails_at:
            raise ZeroDivisionError("by nought")
        if self.calls == self.ends_at:
            await self.end()
        if self.wait:
            await asyncio.sleep(self.wait)
        return self.inner(x)

    async def fail_at(self, call: int) -> None:
        self.fails_at = self.calls + call

    async def end_at(self, call: int) -> None:
        self.ends_at = self.calls + call

    async def gradient(self) -> bytes:
        return b"".join(parameter.grad.numpy().tobytes() for parameter in self.parameters())

    async def end(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


@service.reference
class NoisyBlock(ag.nn.Module):
    """A block that drops."""

    def __init__(self, index: int) -> None:
        self.inner = blocks(index + 1)[index]

    def forward(self, x: Any) -> Any:
        return ag.nn.functional.dropout(self.inner(x), 0.5)


@service.reference
class Head(ag.nn.Module):
    """A last block that computes the loss itself."""

    def __init__(self, index: int) -> None:
        self.inner = blocks(index + 1)[index]

    def forward(self, x: Any, target: Any = None) -> Any:
        return self.inner(x) if target is None else mean_square(self.inner(x), target)


@service.reference
class Last(Block):
    """A last block that computes the loss itself; fails or waits on demand."""

    async def forward(self, x: Any, target: Any = None) -> Any:
        y = await super().forward(x)
        return y if target is None else mean_square(y, target)


@service.reference
class NormBlock(ag.nn.Module):
    """A block that normalises, with running statistics."""

    def __init__(self, index: int) -> None:
        self.inner = blocks(index + 1)[index]
        self.norm = ag.nn.BatchNorm1d(self.inner[0].weight.shape[0])

    def forward(self, x: Any) -> Any:
        return self.norm(self.inner(x))


@service.reference
class ScalingBlock(Block):
    """A block with a buffer that stays as it is, and one that may count forwards."""

    counts = False

    def __init__(self, index: int, wait: float = 0.0) -> None:
        super().__init__(index, wait)
        self.register_buffer("factor", ag.ones(1))
        self.register_buffer("count", ag.zeros(1))

    async def forward(self, x: Any) -> Any:
        if self.counts:
            self.count += 1
        return await super().forward(x) * self.factor


@service.reference
class CountingBlock(ScalingBlock):
    """A block with a buffer that counts forwards."""

    counts = True


@service.reference
class Wide(Block):
    """A block of another size."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.inner = blocks(1, size=6)[0]


@service.reference
class Loose(Block):
    """A block with a leaf that is no parameter."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.held = [ag.tensor([1.0] * 5, dtype=np.float32, requires_grad=True)]

    async def forward(self, x: Any) -> Any:
        return self.inner(x) * self.held[0]


async def place(driver: dist.Worker, homes: Sequence[str | None], **options: Any) -> list[Any]:
    """Blocks on workers by name, or here where there is none."""
    return [
        blocks(index + 1)[index] if home is None else dist.RemoteModule(driver, home, await driver.remote(home, Block, index, **options))
        for index, home in enumerate(homes)
    ]


def behind(module: Any, *opened: dist.Worker) -> Any:
    """The module itself, wherever it lives."""
    if not isinstance(module, dist.RemoteModule):
        return module
    worker = next(each for each in opened if each.name == module.peer)
    return worker._objects.table._held[module.ref.key].value  # on whosever behalf

"""Work that takes a given time and no more processor time than it must: a network of many parameters, and a member of rounds without any."""

from __future__ import annotations

import asyncio
from typing import Any

import aiograd as ag
from aiograd import distributed as dist
from aiograd import nn

#: parameters of the network, of equal size
LAYERS = 8

service = dist.Service()


def layer_sizes(parameters: int) -> list[int]:
    """The sizes of the layers of a network."""
    return [size for number in range(LAYERS) if (size := (parameters + number) // LAYERS)]


class SlowBackward(ag.Function):
    """The identity; its backward takes a while."""

    @staticmethod
    def forward(ctx: Any, x: Any, seconds: float) -> Any:
        """Returns `x`."""
        ctx.seconds = seconds
        return x * 1

    @staticmethod
    async def backward(ctx: Any, gradient: Any) -> tuple[Any, None]:
        """Returns the gradient after the seconds."""
        await asyncio.sleep(ctx.seconds)
        return gradient, None


@service.reference
class ModelledNetwork(nn.Module):
    """A network that takes `seconds` for a loss and its backward.

    Args:
        parameters: their number.
        seconds: of a step.
        batches: number of batches in its data set.
    """

    def __init__(self, parameters: int, seconds: float, batches: int) -> None:
        self.layers = nn.ParameterList([nn.Parameter(ag.zeros(size)) for size in layer_sizes(parameters)])
        self.seconds = seconds
        self.batches = batches

    async def loss(self, x: Any) -> Any:
        """The loss of a batch, a third of the seconds later."""
        await asyncio.sleep(self.seconds / 3)
        y = x.sum()
        for layer in self.layers:
            y = SlowBackward.apply(y + layer.sum(), self.seconds * 2 / 3 / len(self.layers))
        return y

    def data(self) -> Any:
        """Batches of one row."""
        return ag.data.DataLoader(ag.data.TensorDataset(ag.zeros(self.batches, 1)), batch_size=1)


@service.function
async def local_steps(seconds: float, size: int) -> Any:
    """Compute for a while; returns a payload of `size` bytes."""
    await asyncio.sleep(seconds)
    return ag.zeros(size, dtype=ag.uint8)


@service.function
async def prepare(answer: Any) -> int:
    """Take the answer of a round; returns its size."""
    return int(answer.shape[0])


@service.function
async def commit() -> None:
    """Take the outcome of a round."""

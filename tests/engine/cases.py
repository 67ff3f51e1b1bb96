"""Leaves, functions and graphs that the tests of the engine share."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

import aiograd as ag


def number(tensor: ag.Tensor | None) -> float:
    """The only element."""
    assert tensor is not None
    return float(tensor.item())


def chain(x: ag.Tensor, length: int, factor: float = 1.0) -> ag.Tensor:
    """`x` multiplied so many times; each node saves its input."""
    c = ag.tensor(np.full(x.shape, factor))
    for _ in range(length):
        x = x * c
    return x


def ticking(start: int = 0) -> Callable[[], float]:
    """A clock that moves by 1 whenever it is read, so that a budget is a number of readings."""
    return itertools.count(start).__next__


class Switch:
    """Lets waiters pass once it is on; for coroutines that must still be running when something else happens."""

    def __init__(self) -> None:
        self._future: asyncio.Future[None] | None = None

    def __await__(self) -> Any:
        if self._future is None:
            self._future = asyncio.get_running_loop().create_future()
        return asyncio.shield(self._future).__await__()

    def on(self) -> None:
        if self._future is None:
            self._future = asyncio.get_running_loop().create_future()
        if not self._future.done():
            self._future.set_result(None)


def function(backward: Any, *, inline: bool = False, factor: float = 1.0) -> Callable[[ag.Tensor], ag.Tensor]:
    """``apply`` of a custom function that multiplies by `factor` in forward and saves its input; `backward` is ``(ctx, g)``."""

    class F(ag.Function):
        @staticmethod
        def forward(ctx: Any, x: ag.Tensor) -> ag.Tensor:
            ctx.save_for_backward(x)
            return x * factor

    F.backward = staticmethod(backward)
    F.inline = inline
    return F.apply


async def rounds(count: int) -> None:
    """Let the loop go round so many times."""
    for _ in range(count):
        await asyncio.sleep(0)


def message(error: BaseException) -> str:
    """The text of an exception with its notes."""
    return "\n".join([str(error), *getattr(error, "__notes__", ())])

"""Stages, tensors and checks that the tests of stage backward passes share."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np

import aiograd as ag
from aiograd import nn
from aiograd.pipeline import stage_backward, stage_backward_input, stage_backward_weight
from tests.support import bits, cancel, custom_function

values = np.random.default_rng(7)


def fixed(numbers: Any) -> Any:
    """A tensor outside of any graph."""
    return ag.tensor(np.asarray(numbers, dtype=np.float64))


def matrix(rows: int = 4, columns: int = 4, *, grad: bool = False) -> Any:
    made = ag.tensor(values.uniform(-1.0, 1.0, (rows, columns)))
    return made.requires_grad_() if grad else made


class Net(nn.Module):
    """Linear, ReLU, Linear."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a = nn.Linear(width, width)
        self.b = nn.Linear(width, width)

    def forward(self, x: Any) -> Any:
        return self.b(np.maximum(self.a(x), 0.0))


def twins(width: int = 16) -> tuple[Net, Net]:
    """Two nets with the same parameters."""
    one, other = Net(width), Net(width)
    other.load_state_dict(one.state_dict())
    return one, other


def matrix_of(number: float) -> Any:
    return fixed(np.full((4, 4), number))


async def cancelled_in_a_hook(tensor: Any, backward: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    """Cancel a backward while a hook of a tensor runs, which never ends by itself."""
    started = asyncio.Event()

    async def stall(g: Any) -> None:
        started.set()
        await asyncio.Event().wait()

    tensor.register_hook(stall)
    running = asyncio.ensure_future(backward())
    await started.wait()
    await cancel(running)


async def halves(outputs: Any, grads: Any, inputs: Any, weights: Any, *, retain_graph: bool = False) -> tuple[Any, Any]:
    """Both halves, one after the other."""
    weights = list(weights)
    before = [getattr(w, "grad", None) for w in weights]
    dinputs, groups = await stage_backward_input(outputs, grads, inputs, iter(weights))
    assert all(getattr(w, "grad", None) is b for w, b in zip(weights, before, strict=True))
    return dinputs, await stage_backward_weight(iter(weights), groups, retain_graph)


async def same_as_whole(stage: Callable[..., Any], inputs: list[Any], weights: list[Any], grads: Any = None) -> list[Any]:
    """Check that both halves of ``stage(*inputs)`` give what the whole gives, to the bit; returns the gradients of the weights."""
    for tensor in [*inputs, *weights]:
        tensor.grad = None
    whole = await stage_backward(stage(*inputs), _given(grads), inputs)
    expected = bits(*(*whole, *(w.grad for w in weights)))
    for weight in weights:
        weight.grad = None
    dinputs, dweights = await halves(stage(*inputs), _given(grads), inputs, weights)
    assert bits(*dinputs, *dweights) == expected
    result = [w.grad for w in weights]
    for tensor in [*inputs, *weights]:
        tensor.grad = None
    return result


def _given(grads: Any) -> Any:
    return grads() if callable(grads) else grads


@custom_function(lambda a, b: a * b)
def Fails(ctx: Any, g: Any) -> Any:
    """Raises where the gradient of `b` is wanted."""
    if ctx.needs_input_grad[1]:
        raise ZeroDivisionError("not today")
    return g, None


def array_of(tensor: Any) -> weakref.ref[Any]:
    return weakref.ref(tensor.detach()._data)

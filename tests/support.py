"""Support: the tensors and comparisons that tests of every room start from."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import inspect
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import pytest

import aiograd as ag


def leaf(values: Any, dtype: Any = None, *, grad: Any = None) -> ag.Tensor:
    """A leaf that requires grad, of float64 or complex128 unless asked otherwise, with a gradient if one is given."""
    dtype = np.result_type(np.asarray(values).dtype, np.float64) if dtype is None else dtype
    made = ag.tensor(values, dtype=dtype, requires_grad=True)
    if grad is not None:
        made.grad = ag.tensor(grad, dtype=dtype)
    return made


_drawn = np.random.default_rng(0)


def random_leaf(*shape: int, dtype: Any = np.float32, grad: bool = True) -> ag.Tensor:
    """A leaf of standard normal numbers, others each time."""
    return ag.tensor(_drawn.standard_normal(shape).astype(dtype), requires_grad=grad)


def bits(*tensors: Any) -> list[Any]:
    """Shape, dtype and bytes of each; None for None."""
    return [None if x is None else (x.shape, x.dtype.str, x.detach().numpy().tobytes()) for x in tensors]


def custom_function(forward: Callable[..., Any] = lambda x, *_: x * 1, *, inline: bool = False, saves: bool = False) -> Callable[[Any], Any]:
    """A decorator that makes a class of a rule ``(ctx, *grads)``, a `Function` of the rule's name.

    Args:
        forward: takes the arguments of ``apply``; by default the first argument times 1 is the result.
        inline: the rule runs on the loop's thread.
        saves: the arguments are the rule's ``ctx.saved_tensors``.
    """

    def run(ctx: Any, *args: Any) -> Any:
        if saves:
            ctx.save_for_backward(*args)
        return forward(*args)

    def decorate(rule: Any) -> Any:
        return type(rule.__name__, (ag.Function,), {"forward": staticmethod(run), "backward": staticmethod(rule), "inline": inline})

    return decorate


def constant(values: Any) -> ag.Tensor:
    """A float64 tensor that does not require grad."""
    return ag.tensor(values, dtype=np.float64)


def same(tensor: Any, values: Any) -> None:
    """Assert that a tensor holds these values, to the bit."""
    np.testing.assert_array_equal(tensor.numpy(), values)


def assert_raises(error: Any, match: str | None, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call, which is to raise an error in whose text the pattern `match` is found; the error."""
    with pytest.raises(error, match=match) as caught:
        call(*args, **kwargs)
    try:
        return caught.value
    finally:
        del caught  # the error refers to this frame


async def assert_awaiting_raises(error: Any, match: str | None, awaitable: Awaitable[Any]) -> Any:
    """Await what is to raise an error in whose text the pattern `match` is found; the error."""
    with pytest.raises(error, match=match) as caught:
        await awaitable
    try:
        return caught.value
    finally:
        del caught  # the error refers to this frame


@contextlib.contextmanager
def reference_counts_only() -> Iterator[None]:
    """No cycle is collected: what is freed here is freed by reference count."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def draw(*shape: int, at: int = 0) -> Any:
    """Standard normal numbers of a shape; `at` is the seed."""
    return np.random.default_rng(at).standard_normal(shape)


def held_up(function: Callable[..., Any]) -> tuple[Callable[..., Any], threading.Event, threading.Event]:
    """The same function, for a thread, which waits before; events that say that it has begun, and that it may go on."""
    begun, go = threading.Event(), threading.Event()

    def held(*args: Any, **kwargs: Any) -> Any:
        begun.set()
        assert go.wait(60)
        return function(*args, **kwargs)

    return held, begun, go


async def cancel(task: asyncio.Future[Any]) -> None:
    """Cancel a task, which must end by that."""
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def run_by(run: Callable[..., Any], given: int = 1) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """A decorator of async tests that do not run on pytest's loop.

    Args:
        run: gets the test as a coroutine function, and runs it; its other parameters are fixtures.
        given: how many arguments `run` calls it with. They are the first ones of the test, the others are its fixtures and parameters.
    """
    wanted = list(inspect.signature(run).parameters)[1:]

    def decorate(test: Callable[..., Any]) -> Callable[..., None]:
        own = list(inspect.signature(test).parameters)[given:]

        @functools.wraps(test)
        def on_its_loop(**fixtures: Any) -> None:
            run(functools.partial(test, **{name: fixtures[name] for name in own}), **{name: fixtures[name] for name in wanted})

        names = dict.fromkeys((*own, *wanted))
        on_its_loop.__signature__ = inspect.Signature([inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names])  # type: ignore[attr-defined]
        return on_its_loop

    return decorate

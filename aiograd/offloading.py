"""Forward in good company: run synchronous work on the engine's threads, and wait for results that are still being computed."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from aiograd.engine.run import current_engine
from aiograd.errors import ArgumentTypeError
from aiograd.tensors.core import TensorCore

P = ParamSpec("P")
T = TypeVar("T")


async def offload(fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a synchronous function on the engine's executor, so that the event loop stays free: ``y = await ag.offload(model, x)``.

    The function runs in a copy of the caller's context: `no_grad`, anomaly mode, saved-tensor hooks, profiler and default dtype are as they are
    here, and what it changes of them stays with it. What it records belongs to the graph as if it had been recorded here.

    Cancelling stops the waiting; the function itself runs to its end on its thread and its result is dropped.

    Args:
        fn: a plain function; it must not be ``async def``.
        args, kwargs: handed on.

    Returns:
        What `fn` returns.

    Raises:
        ArgumentTypeError: `fn` is not callable or is a coroutine function. EngineClosedError: the engine has been closed. Whatever `fn` raises.
    """
    if not callable(fn):
        raise ArgumentTypeError(f"offload: expected a function, found {type(fn).__name__}. Pass the function and its arguments, not its result.")
    name = getattr(fn, "__qualname__", type(fn).__name__)
    if inspect.iscoroutinefunction(fn):
        raise ArgumentTypeError(f"offload: {name} is a coroutine function, which runs on the event loop: await it directly")
    result = await current_engine().offload(functools.partial(fn, *args, **kwargs))
    if inspect.iscoroutine(result):
        result.close()
        raise ArgumentTypeError(f"offload: {name} returned a coroutine, which runs on the event loop: call and await it directly")
    return result  # type: ignore[no-any-return]


async def ready(tree: T) -> T:
    """Wait until the data of every Tensor in nested tuples, lists and dicts is there.

    The computations go on at the same time; only the waiting is one after the other. Cancelling stops the waiting, not the computations.

    Args:
        tree: a Tensor, or tuples, lists and dicts of them, nested as you like; anything else in it is left alone.

    Returns:
        `tree` itself.

    Raises:
        What a computation failed with.
    """
    stack: list[Any] = [tree]
    while stack:
        item = stack.pop()
        if isinstance(item, TensorCore):
            await item
        elif isinstance(item, (tuple, list)):
            stack.extend(reversed(item))
        elif isinstance(item, dict):
            stack.extend(reversed(item.values()))
    return tree

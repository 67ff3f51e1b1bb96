"""`offload` and `ready`: run synchronous work on the engine's threads, and wait for Tensors that are still being computed."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

from aiograd.engine.run import current_engine
from aiograd.errors import ArgumentTypeError
from aiograd.running import foreign_modes
from aiograd.running.caller import called
from aiograd.running.trees import leaves_of
from aiograd.tensors.core import TensorCore

#: runs the functions that a step offloads, so that the step knows which of them outlast it, such as a `ModuleCalls`; None outside of such a step
STEP_CALLS: ContextVar[Any] = ContextVar("aiograd.step_calls", default=None)

P = ParamSpec("P")
T = TypeVar("T")


def offload(fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, T]:
    """Run a synchronous function on the engine's executor, so that the event loop stays free: ``y = await ag.offload(model, x)``.

    The function runs in a copy of the caller's context: it has the caller's `no_grad`, anomaly mode, saved-tensor hooks, profiler and default
    dtype, and its changes of them do not affect the caller. It records operations in the graph as the caller would. Where torch modules are wrapped,
    it also runs in torch's grad mode, inference mode and autocast of the place where `offload` is called.

    Cancelling stops the waiting; the function itself runs to its end on its thread and its result is dropped.

    Args:
        fn: a plain function; it must not be ``async def``.
        args, kwargs: arguments of `fn`.

    Returns:
        A coroutine of the result of `fn`.

    Raises:
        ArgumentTypeError: `fn` is not callable, or is a coroutine function, or returns a coroutine. EngineClosedError: the engine has been closed.
        Exceptions of `fn` pass through.
    """
    if not callable(fn):
        raise ArgumentTypeError(f"offload: expected a function, found {type(fn).__name__}. Pass the function and its arguments, not its result.")
    name = getattr(fn, "__qualname__", type(fn).__name__)
    if inspect.iscoroutinefunction(fn):
        raise ArgumentTypeError(f"offload: {name} is a coroutine function, which runs on the event loop: await it directly")
    return called(_offload(name, foreign_modes.within(functools.partial(fn, *args, **kwargs), foreign_modes.noted())), "offload")


async def _offload(name: str, function: Callable[[], T]) -> T:
    result = await (STEP_CALLS.get() or current_engine()).offload(function)
    if inspect.iscoroutine(result):
        result.close()
        raise ArgumentTypeError(f"offload: {name} returned a coroutine, which runs on the event loop: call and await it directly")
    return result  # type: ignore[no-any-return]


async def ready(tree: T) -> T:
    """Wait until the data of every Tensor in nested tuples, lists and dicts has been computed.

    The computations run concurrently; the Tensors are awaited one after the other. Cancelling stops the waiting, not the computations.

    Args:
        tree: a Tensor, or tuples, lists and dicts of them, nested to any depth; anything else in it is ignored.

    Returns:
        `tree` itself.

    Raises:
        The exception of a computation that failed.

    >>> x, more = await ag.ready((ag.tensor(1.0), {"y": ag.tensor(2.0)}))
    >>> x + more["y"]
    tensor(3.)
    """
    for tensor in leaves_of(tree, TensorCore):
        await tensor
    return tree

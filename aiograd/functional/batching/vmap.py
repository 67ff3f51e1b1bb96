"""`vmap`: a function of one example as a function of a batch."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from aiograd.array_functions import conversion, manipulation
from aiograd.errors import ArgumentError, ArgumentTypeError, ShapeError
from aiograd.functional.batching import rules as rules
from aiograd.functional.batching.array import BatchedArray, BatchLevel
from aiograd.functional.function_tangents import LAYERS, Layer
from aiograd.running.devices import register_device, unregister_device
from aiograd.running.random_streams import Draws, RefusedDraws
from aiograd.tensors.core import TensorCore, make, refresh


class SharedLayer(Layer):
    """A custom function on arguments that are the same for all examples: it runs on the caller's Tensors, and so do its rules."""

    __slots__ = ()

    def __init__(self, level: BatchLevel, args: Sequence[Any], records: bool) -> None:
        self.level, self.args, self.records, self.tangents, self.inputs = level, args, records, [None] * len(args), 0
        self.values = [arg._data.value if _is_of(level, arg) else arg for arg in args]

    def outputs(self, function: Any, context: Any, made: Sequence[Any], nesting: Any) -> list[Any]:
        """The outputs as Tensors of the level."""
        return [make(self.level.adopt(out)) if isinstance(out, TensorCore) else out for out in made]


def _is_of(level: BatchLevel, arg: Any) -> bool:
    return isinstance(arg, TensorCore) and isinstance(arg._data, BatchedArray) and arg._data.level is level


def _layer(level: BatchLevel, args: Sequence[Any], records: bool) -> SharedLayer | None:
    return None if any(_is_of(level, arg) and arg._data.batched for arg in args) else SharedLayer(level, args, records)


LAYERS[BatchLevel] = _layer

Dims = int | None | Sequence[int | None]
_DRAWS = (
    "vmap: the function draws random numbers, which would be the same for all examples. Draw them before, with a batch axis, and pass them as an "
    "argument; leave dropout out by eval()."
)


def vmap(function: Callable[..., Any], in_dims: Dims = 0, out_dims: int = 0) -> Callable[..., Any]:
    """`function`, written for one example, as a function of a batch of them.

    It runs once; rows run on the whole batch by numpy's broadcasting where they have such a rule (`aiograd.functional.batching.rules`), else in a
    loop over the examples. Passes inside it give gradients per example, and the result can be differentiated from outside. The function may be
    ``async def``; the result is then awaited, and cancelling it cancels the function.

    Args:
        function: takes Tensors, returns a Tensor or a tuple of them; it may neither read values (``if``, ``item()``) nor draw random numbers: draw
            them before, and pass them with a batch axis.
        in_dims: the batch axis of every argument, or one for each; None: the argument is the same for all examples.
        out_dims: the batch axis of every result.

    Returns:
        A function of batches, which returns batches; a coroutine where `function` returns one.

    Raises:
        ShapeError: arguments have batches of different lengths, or none has any. ArgumentError: the function reads a value, or draws random numbers.
        ArgumentTypeError: it returns something else.
    """
    return with_batch_axis(function, in_dims, out_dims, RefusedDraws(_DRAWS))


def with_batch_axis(function: Callable[..., Any], in_dims: Dims = 0, out_dims: int = 0, draws: Draws | None = None) -> Callable[..., Any]:
    """As `vmap`; `draws` takes the function's random draws, None: the function may draw, and the numbers are the same for the whole batch."""
    draws_of_it = contextlib.nullcontext if draws is None else draws.recording

    @functools.wraps(function)
    def mapped(*args: Any) -> Any:
        dims: list[Any] = list(in_dims) if isinstance(in_dims, (tuple, list)) else [in_dims] * len(args)
        if len(dims) != len(args):
            raise ArgumentError(f"vmap(in_dims={in_dims}): {len(dims)} axes for {len(args)} arguments")
        tensors = [manipulation.moveaxis(x, dim, 0) if dim is not None else conversion.as_tensor(x) for x, dim in zip(args, dims, strict=True)]
        sizes = {x.shape[0] for x, dim in zip(tensors, dims, strict=True) if dim is not None}
        if len(sizes) != 1 or 0 in sizes:
            raise ShapeError(f"vmap: batches of lengths {sorted(sizes)}, expected one length of at least 1 for all arguments with a batch axis")
        level = BatchLevel(sizes.pop())
        call = functools.partial(function, *(make(BatchedArray(level, x, dim is not None)) for x, dim in zip(tensors, dims, strict=True)))
        if inspect.iscoroutinefunction(function):
            return later(call, level)
        with _registered(level), draws_of_it():
            result = call()
            if not inspect.isawaitable(result) or isinstance(result, TensorCore):
                return _unwrapped(result, level, out_dims)
        return later(lambda: result, level)

    async def later(call: Callable[[], Any], level: BatchLevel) -> Any:
        with _registered(level), draws_of_it():
            return _unwrapped(await call(), level, out_dims)

    return mapped


@contextlib.contextmanager
def _registered(level: BatchLevel) -> Iterator[None]:
    register_device(level)
    try:
        yield
    finally:
        unregister_device(level.name)


def _unwrapped(result: Any, level: BatchLevel, out_dims: int) -> Any:
    if isinstance(result, (tuple, list)):
        parts = [_unwrapped(part, level, out_dims) for part in result]
        return type(result)(*parts) if hasattr(result, "_fields") else type(result)(parts)
    if result is None:
        return None
    if not isinstance(result, TensorCore):
        raise ArgumentTypeError(f"vmap: the function returned {type(result).__name__}, expected a Tensor or a tuple of them")
    refresh(result)
    data: Any = result._data
    if not isinstance(data, BatchedArray) or data.level is not level:
        data = level.adopt(result)
    whole = data.value if data.batched else manipulation.broadcast_to(data.value, (level.size, *data.shape))
    return manipulation.moveaxis(whole, 0, out_dims) if out_dims else whole

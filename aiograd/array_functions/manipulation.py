"""Rearranging, joining, splitting, repeating and padding, with the standard's signatures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from aiograd.array_functions.conversion import ArrayLike, Axis, Unary, as_tensor, axes_of, calling, one, row, tensors_of, values_of
from aiograd.errors import ArgumentError, ShapeError
from aiograd.ops import joining, shape
from aiograd.tensors.record import call
from aiograd.tensors.tensor import Tensor

__all__ = [
    "reshape", "flatten", "permute_dims", "transpose", "swapaxes", "matrix_transpose", "moveaxis", "squeeze", "expand_dims", "broadcast_to",
    "broadcast_arrays", "broadcast_shapes", "flip", "roll", "concat", "stack", "unstack", "split", "tile", "repeat", "pad", "diagonal", "clone",
]  # fmt: skip


def reshape(x: ArrayLike, /, shape: int | Sequence[int], *, copy: bool | None = None) -> Tensor:
    """The elements in row-major order in another shape, of which one extent may be -1; a view where possible unless `copy`."""
    source = as_tensor(x)
    wanted = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
    if copy:
        source = clone(source)
    result: Tensor = call(row("reshape"), (source,), {"shape": wanted})
    if copy is False and source.device == "cpu" and not np.shares_memory(result.detach().numpy(), source.detach().numpy()):
        raise ArgumentError(f"reshape(copy=False): shape {list(source.shape)} cannot be seen as {list(wanted)} without a copy of this memory layout")
    return result


def flatten(x: ArrayLike, /, start: int = 0, end: int = -1) -> Tensor:
    """Axes `start` to `end` joined into one."""
    source = as_tensor(x)
    ndim = max(source.ndim, 1)
    start, end = shape.checked_axis(start, ndim), shape.checked_axis(end, ndim)
    extents = source.shape or (1,)
    return call(row("reshape"), (source,), {"shape": (*extents[:start], math.prod(extents[start : end + 1]), *extents[end + 1 :])})  # type: ignore[no-any-return]


def permute_dims(x: ArrayLike, /, axes: Sequence[int]) -> Tensor:
    """Axes in the order given."""
    source = as_tensor(x)
    order = tuple(shape.checked_axis(axis, max(source.ndim, 1)) for axis in axes)
    if sorted(order) != list(range(source.ndim)):
        raise ShapeError(f"permute_dims(): axes {tuple(axes)} of an array of shape {list(source.shape)}: expected each of its axes once")
    return call(row("permute"), (source,), {"axes": order})  # type: ignore[no-any-return]


def transpose(x: ArrayLike, /, axes: Sequence[int] | int | None = None, axis2: int | None = None) -> Tensor:
    """Axes in the order given, or reversed; ``transpose(x, 0, 1)`` exchanges two, as in PyTorch."""
    source = as_tensor(x)
    if isinstance(axes, (int, np.integer)):
        if axis2 is None:
            raise ArgumentError(f"transpose(x, {axes}): expected the order of all axes, or the two to exchange")
        return swapaxes(source, int(axes), axis2)
    return permute_dims(source, tuple(range(source.ndim))[::-1] if axes is None else axes)


def swapaxes(x: ArrayLike, axis1: int, axis2: int, /) -> Tensor:
    """Two axes exchanged."""
    return call(row("transpose"), (as_tensor(x),), {"axis0": axis1, "axis1": axis2})  # type: ignore[no-any-return]


def matrix_transpose(x: ArrayLike, /) -> Tensor:
    """The last two axes exchanged."""
    source = as_tensor(x)
    if source.ndim < 2:
        raise ShapeError(f"matrix_transpose() of shape {list(source.shape)}: expected at least two axes")
    return call(row("transpose"), (source,), {})  # type: ignore[no-any-return]


def moveaxis(x: ArrayLike, source: int | tuple[int, ...], destination: int | tuple[int, ...], /) -> Tensor:
    """Axes moved to other places, the rest keeping their order."""
    return shape.moveaxis(as_tensor(x), source, destination)  # type: ignore[no-any-return]


def squeeze(x: ArrayLike, /, axis: Axis = None) -> Tensor:
    """Remove the given axes, which must have extent 1; all axes of extent 1 if none are given."""
    return call(row("squeeze"), (as_tensor(x),), {"axis": axes_of(axis)})  # type: ignore[no-any-return]


def expand_dims(x: ArrayLike, /, axis: int | Sequence[int] = 0) -> Tensor:
    """Insert axes of extent 1 at these places of the result."""
    return call(row("unsqueeze"), (as_tensor(x),), {"axis": axes_of(axis)})  # type: ignore[no-any-return]


def broadcast_to(x: ArrayLike, /, shape: Sequence[int]) -> Tensor:
    """Broadcast to a shape, without a copy."""
    return call(row("expand"), (as_tensor(x),), {"shape": tuple(shape)})  # type: ignore[no-any-return]


def broadcast_arrays(*arrays: ArrayLike) -> tuple[Tensor, ...]:
    """Arrays broadcast against each other."""
    return tuple(shape.np_broadcast_arrays(*tensors_of(arrays, "broadcast_arrays")))


def broadcast_shapes(*shapes: Sequence[int]) -> tuple[int, ...]:
    """The shape that arrays of these shapes broadcast to."""
    try:
        return np.broadcast_shapes(*(tuple(s) for s in shapes))
    except ValueError:
        raise ShapeError(f"broadcast_shapes(): {', '.join(str(list(s)) for s in shapes)} do not broadcast: extents must be equal or 1") from None


def flip(x: ArrayLike, /, axis: Axis = None) -> Tensor:
    """Reverse the order of the elements along axes; along all if none are given."""
    return call(row("flip"), (as_tensor(x),), {"axis": axes_of(axis)})  # type: ignore[no-any-return]


def roll(x: ArrayLike, /, shift: int | Sequence[int], axis: Axis = None) -> Tensor:
    """Shift the elements along axes; an element that leaves at one end comes in at the other."""
    return call(row("roll"), (as_tensor(x),), {"shift": axes_of(shift), "axis": axes_of(axis)})  # type: ignore[no-any-return]


def concat(arrays: Sequence[ArrayLike], /, axis: int | None = 0) -> Tensor:
    """Join arrays along an axis that they have; flatten and join them if it is None."""
    return joining.concat(some_of("concat", arrays), axis=axis)  # type: ignore[no-any-return]


def stack(arrays: Sequence[ArrayLike], /, axis: int = 0) -> Tensor:
    """Join arrays along a new axis."""
    return call(row("stack"), tuple(some_of("stack", arrays)), {"axis": axis})  # type: ignore[no-any-return]


def some_of(name: str, arrays: Any) -> list[Tensor]:
    """A sequence of arrays as Tensors, at least one."""
    tensors = tensors_of(arrays, name)
    if not tensors:
        raise ArgumentError(f"{name}(): expected at least one array, found none")
    return tensors


def unstack(x: ArrayLike, /, axis: int = 0) -> tuple[Tensor, ...]:
    """The slices along an axis."""
    return call(row("unbind"), (as_tensor(x),), {"axis": axis})  # type: ignore[no-any-return]


def split(x: ArrayLike, /, sections: int | Sequence[int], axis: int = 0) -> tuple[Tensor, ...]:
    """Cut an array along an axis into so many equal parts, or at the given positions (as in numpy)."""
    return joining.split_at(as_tensor(x), sections, axis)


def tile(x: ArrayLike, repetitions: int | Sequence[int], /) -> Tensor:
    """Repeat the whole array, so many times along each axis."""
    counts = tuple(repetitions) if isinstance(repetitions, (tuple, list)) else (repetitions,)
    return call(row("tile"), (as_tensor(x),), {"repetitions": counts})  # type: ignore[no-any-return]


def repeat(x: ArrayLike, /, repeats: int | Sequence[int] | Tensor, axis: int | None = None) -> Tensor:
    """Repeat each element along an axis, as often as one number or one for each says."""
    counts = values_of(repeats) if isinstance(repeats, Tensor) else repeats
    return joining.repeat(as_tensor(x), counts, axis=axis)  # type: ignore[no-any-return]


def pad(x: ArrayLike, pad_width: int | Sequence[Any], /, mode: str = "constant", *, value: float = 0.0) -> Tensor:
    """Add a border: so much on every side, (before, after), or one such pair per axis; modes as in ``np.pad``."""
    return joining.pad(as_tensor(x), pad_width, mode=mode, value=value)  # type: ignore[no-any-return]


def diagonal(x: ArrayLike, /, offset: int = 0, axis1: int = -2, axis2: int = -1) -> Tensor:
    """The diagonals of matrices, or of the planes of two axes, along a new last axis."""
    return call(row("diagonal"), (as_tensor(x),), {"offset": offset, "axis1": axis1, "axis2": axis2})  # type: ignore[no-any-return]


clone: Unary = one("clone", "Copy, in the graph.", calling("clone"))

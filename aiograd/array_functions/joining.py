"""numpy's and PyTorch's further ways of putting arrays together, taking them apart, turning them round, and looking at parts of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aiograd.array_functions.conversion import ArrayLike, Axis, Unary, as_tensor, axes_of, one, row
from aiograd.array_functions.creation import diag, meshgrid
from aiograd.array_functions.manipulation import concat, moveaxis, pad, reshape, some_of, split, stack
from aiograd.array_functions.searching import where
from aiograd.errors import ArgumentError, IndexRangeError
from aiograd.ops import calculus, joining, shape, windows
from aiograd.tensors.record import call
from aiograd.tensors.tensor import Tensor

__all__ = [
    "append", "atleast_1d", "atleast_2d", "atleast_3d", "block_diag", "cartesian_prod", "chunk", "column_stack", "diag_embed", "diagflat", "dsplit",
    "dstack", "fliplr", "flipud", "hsplit", "hstack", "narrow", "partition", "rollaxis", "rot90", "select", "sliding_window_view", "tensor_split",
    "unflatten", "unfold", "vsplit", "vstack",
]  # fmt: skip


def checked_axis(x: Tensor, axis: int, what: str) -> int:
    """An axis of `x` counted from the start.

    Raises:
        IndexRangeError: it has no such axis.
    """
    if not -x.ndim <= axis < x.ndim:
        raise IndexRangeError(f"{what}: axis {axis} of a tensor of shape {list(x.shape)}, expected {-x.ndim} to {x.ndim - 1}")
    return axis % x.ndim


# Together.


def hstack(arrays: Sequence[ArrayLike], /) -> Tensor:
    """Joined along the second axis, vectors along their only one."""
    return joining.np_hstack(some_of("hstack", arrays))  # type: ignore[no-any-return]


def vstack(arrays: Sequence[ArrayLike], /) -> Tensor:
    """Joined along the first axis, vectors being rows."""
    return joining.np_vstack(some_of("vstack", arrays))  # type: ignore[no-any-return]


def dstack(arrays: Sequence[ArrayLike], /) -> Tensor:
    """Joined along the third axis."""
    return joining.np_dstack(some_of("dstack", arrays))  # type: ignore[no-any-return]


def column_stack(arrays: Sequence[ArrayLike], /) -> Tensor:
    """Joined along the second axis, vectors being columns."""
    return joining.np_column_stack(some_of("column_stack", arrays))  # type: ignore[no-any-return]


def append(x: ArrayLike, values: ArrayLike, /, axis: int | None = None) -> Tensor:
    """`values` behind `x` along an axis; both flattened when none is given."""
    return concat([x, values], axis=axis)


def block_diag(*matrices: ArrayLike) -> Tensor:
    """Matrices along the diagonal of one that is zero elsewhere; vectors are rows."""
    blocks = [atleast_2d(m) for m in matrices]
    if not blocks:
        raise ArgumentError("block_diag(): expected at least one matrix")
    width, before, rows = sum(b.shape[1] for b in blocks), 0, []
    for block in blocks:
        rows.append(pad(block, ((0, 0), (before, width - before - block.shape[1]))))
        before += block.shape[1]
    return concat(rows, axis=0)


atleast_1d: Unary = one("atleast_1d", "Add an axis to a number; others have at least one.", shape.np_atleast_1d)
atleast_2d: Unary = one("atleast_2d", "Add axes in front until there are two; a vector becomes a row.", shape.np_atleast_2d)
atleast_3d: Unary = one("atleast_3d", "Add axes until there are three, as in numpy.", shape.np_atleast_3d)


def diag_embed(x: ArrayLike, /, offset: int = 0, axis1: int = -2, axis2: int = -1) -> Tensor:
    """Matrices, in two new axes, that have the vectors of the last axis on diagonal `offset`."""
    source = as_tensor(x)
    size = source.shape[-1] + abs(offset)
    matrices = call(row("diagonal_adjoint"), (source,), {"shape": (*source.shape[:-1], size, size), "offset": offset})
    return moveaxis(matrices, (-2, -1), (axis1, axis2))


def diagflat(x: ArrayLike, /, offset: int = 0) -> Tensor:
    """A matrix with all elements on diagonal `offset`."""
    return diag(reshape(x, (-1,)), k=offset)


def cartesian_prod(*vectors: ArrayLike) -> Tensor:
    """All combinations of elements of vectors, one in each row; of one vector the vector."""
    if len(vectors) == 1:
        return as_tensor(vectors[0]).clone()
    return stack([grid.reshape(-1) for grid in meshgrid(*vectors, indexing="ij")], axis=-1)


# Apart.


def chunk(x: ArrayLike, /, chunks: int, axis: int = 0) -> tuple[Tensor, ...]:
    """Cut along an axis into at most so many parts of equal length, the last one shorter where that does not divide."""
    source = as_tensor(x)
    axis = checked_axis(source, axis, "chunk()")
    if chunks < 1:
        raise ArgumentError(f"chunk({chunks}): expected at least one")
    length = max(-(-source.shape[axis] // chunks), 1)
    return split(source, list(range(length, source.shape[axis], length)), axis=axis)


def tensor_split(x: ArrayLike, /, sections: int | Sequence[int], axis: int = 0) -> tuple[Tensor, ...]:
    """Cut along an axis into so many parts, as even as may be, or at the given positions."""
    return joining.split_at(as_tensor(x), sections, axis, even=False)


def hsplit(x: ArrayLike, /, sections: int | Sequence[int]) -> tuple[Tensor, ...]:
    """`split` along the second axis, of vectors along their only one."""
    source = as_tensor(x)
    return split(source, sections, axis=1 if source.ndim > 1 else 0)


def vsplit(x: ArrayLike, /, sections: int | Sequence[int]) -> tuple[Tensor, ...]:
    """`split` along the first axis."""
    return split(x, sections, axis=0)


def dsplit(x: ArrayLike, /, sections: int | Sequence[int]) -> tuple[Tensor, ...]:
    """`split` along the third axis."""
    return tuple(joining.np_dsplit(as_tensor(x), sections))


def narrow(x: ArrayLike, /, axis: int, start: int, length: int) -> Tensor:
    """`length` slices along an axis from `start` on, as a view."""
    source = as_tensor(x)
    axis = checked_axis(source, axis, "narrow()")
    extent = source.shape[axis]
    first = start + extent if start < 0 else start
    if not 0 <= first <= first + length <= extent:
        raise IndexRangeError(f"narrow({axis}, {start}, {length}): axis {axis} of shape {list(source.shape)} has {extent} slices")
    return source[(slice(None),) * axis + (slice(first, first + length),)]


def unflatten(x: ArrayLike, /, axis: int, sizes: Sequence[int]) -> Tensor:
    """One axis split into several of these extents, of which one may be -1."""
    source = as_tensor(x)
    axis = checked_axis(source, axis, "unflatten()")
    return reshape(source, (*source.shape[:axis], *sizes, *source.shape[axis + 1 :]))


def unfold(x: ArrayLike, /, axis: int, size: int, step: int = 1) -> Tensor:
    """Windows of `size` neighbours along an axis, one every `step` elements, along a new last axis."""
    return call(row("windows"), (as_tensor(x),), {"size": size, "axis": axis, "step": step})  # type: ignore[no-any-return]


def sliding_window_view(x: ArrayLike, /, window_shape: int | Sequence[int], axis: Axis = None) -> Tensor:
    """Windows along axes (all if none are given), with the elements of each along new last axes."""
    return windows.np_sliding_window_view(as_tensor(x), window_shape, axes_of(axis))  # type: ignore[no-any-return]


# Round, and by choice.


fliplr: Unary = one("fliplr", "The columns in reverse order.", shape.np_fliplr)
flipud: Unary = one("flipud", "The rows in reverse order.", shape.np_flipud)


def rot90(x: ArrayLike, /, k: int = 1, axes: tuple[int, int] = (0, 1)) -> Tensor:
    """Turned by 90 degrees `k` times in the plane of two axes, from the first towards the second."""
    return shape.np_rot90(as_tensor(x), k, tuple(axes))  # type: ignore[no-any-return]


def rollaxis(x: ArrayLike, /, axis: int, start: int = 0) -> Tensor:
    """An axis moved in front of another, as in numpy."""
    return calculus.np_rollaxis(as_tensor(x), axis, start)  # type: ignore[no-any-return]


def partition(x: ArrayLike, kth: int | Sequence[int], /, axis: int | None = -1) -> Tensor:
    """Put the element at `kth` where sorting would put it, smaller ones before and larger ones behind: sorted, here."""
    return calculus.np_partition(as_tensor(x), kth, axis)  # type: ignore[no-any-return]


def select(conditions: Sequence[ArrayLike], choices: Sequence[ArrayLike], /, default: ArrayLike = 0) -> Tensor:
    """Elements of the choice with the first condition that holds, of `default` where none does (numpy's ``select``)."""
    if len(conditions) != len(choices) or not len(conditions):
        raise ArgumentError(f"select(): {len(conditions)} conditions for {len(choices)} choices, expected as many, and at least one")
    result: Any = default
    for condition, choice in zip(reversed(conditions), reversed(choices), strict=True):
        result = where(condition, choice, result)
    return result  # type: ignore[no-any-return]


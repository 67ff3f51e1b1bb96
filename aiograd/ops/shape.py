"""Rows that rearrange elements without computing anything: most of them return views.

All are linear with real coefficients, so their rules hold for complex gradients as they are.

Note [Plain arrays first]
    Dispatching a row costs 0.3 µs and more, numpy's own functions for these things 0.5 to 2 µs, an ndarray's method 0.1 µs. Rules run on
    ndarrays far more often than on anything else, so `reshaped` and `swapped`, which the rules use, ask for that first.

Rejected: one row for all permutations. `transpose`, which swaps two axes, is its own inverse, and a rule that need not invert a
permutation is the faster one for the matrices that meet it most.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from aiograd.errors import ArgumentError, IndexRangeError, NoRuleError, ShapeError
from aiograd.ops.elementwise import identity
from aiograd.ops.op import Op, answer, define, implements
from aiograd.running.types import Array, Shape


def checked_axis(axis: int, ndim: int) -> int:
    """`axis` counted from the start.

    Raises:
        IndexRangeError: an array of `ndim` axes does not have it.
    """
    if not -ndim <= axis < ndim:
        expected = f"one from {-ndim} to {ndim - 1}" if ndim else "an array with axes"
        raise IndexRangeError(f"axis {axis} of an array of {ndim} axes: expected {expected}")
    return axis % ndim


def _reshape(x: Array, /, shape: Shape) -> Array:
    """The elements of `x`, in row-major order, in another shape.

    Args:
        x: any shape.
        shape: the new shape; one length may be -1.
    """
    return x.reshape(shape)


def _permute_vjp(g: Array, axes: tuple[int, ...] | None) -> Array:
    if axes is None:
        return g.T if g.__class__ is np.ndarray else permute(g, axes=None)
    inverse = [0] * len(axes)
    for i, a in enumerate(axes):
        inverse[a] = i
    return permute(g, axes=tuple(inverse))


def _expand(x: Array, /, shape: Shape) -> Array:
    """`x` broadcast to `shape`, a read-only view."""
    new = len(shape) - x.ndim
    if x.__class__ is not np.ndarray or not x.flags.c_contiguous or not x.size or new < 0:
        return np.broadcast_to(x, shape)
    strides = [0] * new
    for n, length, stride in zip(shape[new:], x.shape, x.strides, strict=True):
        if n != length and length != 1:
            return np.broadcast_to(x, shape)  # raises
        strides.append(stride if n == length else 0)
    view = np.ndarray(shape, x.dtype, x, 0, strides)  # twice as fast as broadcast_to
    view.setflags(write=False)
    return view


def _squeeze(x: Array, /, axis: int | tuple[int, ...] | None = None) -> Array:
    """`x` without the axes given, which must have length 1; without all axes of length 1 when none is given."""
    return np.squeeze(x, axis=axis)


def _unsqueeze(x: Array, /, axis: int | tuple[int, ...] = 0) -> Array:
    """`x` with new axes of length 1 at these positions of the result."""
    if type(axis) is int and -x.ndim - 1 <= axis <= x.ndim:
        place = axis if axis >= 0 else axis + x.ndim + 1
        return x.reshape((*x.shape[:place], 1, *x.shape[place:]))
    return np.expand_dims(x, axis)


def _flip(x: Array, /, axis: int | tuple[int, ...] | None = None) -> Array:
    """`x` in reverse order along the axes given; along all when none is."""
    return np.flip(x, axis=axis)


def _roll_vjp(g: Array, shift: int | tuple[int, ...], axis: int | tuple[int, ...] | None) -> Array:
    return roll(g, shift=tuple(-s for s in shift) if isinstance(shift, tuple) else -shift, axis=axis)


def _diagonal_adjoint(x: Array, /, shape: Shape, offset: int = 0, axis1: int = -2, axis2: int = -1) -> Array:
    """Zeros of `shape` with `x` on the diagonals: what `diagonal` takes out, put back.

    Args:
        x: (..., D), as `diagonal` of `shape` returns it.
        shape: shape of the result.
        offset, axis1, axis2: as in `diagonal`.
    """
    out = np.zeros(shape, x.dtype)
    diagonals = np.diagonal(out, offset, axis1, axis2)
    diagonals.setflags(write=True)  # a view of `out`, read-only by numpy's caution alone
    diagonals[...] = x
    return out


def reshaped(x: Array, shape: Shape) -> Array:
    """`reshape`, by the shortest way; see Note [Plain arrays first]."""
    return x.reshape(shape) if x.__class__ is np.ndarray else reshape(x, shape=shape)


def swapped(x: Array, axis0: int = -2, axis1: int = -1) -> Array:
    """`transpose`, by the shortest way."""
    return x.swapaxes(axis0, axis1) if x.__class__ is np.ndarray else transpose(x, axis0=axis0, axis1=axis1)


reshape: Op = define("reshape", _reshape, x=lambda g, x_shape: reshaped(g, x_shape), view=True, jvp="forward", complex="explicit", cost=0.1)
#: `x` with its axes in the order given; reversed when none is
permute: Op = define("permute", lambda x, /, axes=None: x.transpose(axes), x=_permute_vjp, view=True, jvp="forward", complex="explicit", cost=0.1)
#: `x` with two axes exchanged
transpose: Op = define(
    "transpose", lambda x, /, axis0=-2, axis1=-1: x.swapaxes(axis0, axis1),
    x=lambda g, axis0, axis1: swapped(g, axis0, axis1), view=True, jvp="forward", complex="explicit", cost=0.1
)
# the engine sums the gradient down to the shape of the argument, as for every broadcast
expand = define("expand", _expand, x=identity, view=True, jvp="forward", complex="explicit", cost=0.3)
squeeze = define("squeeze", _squeeze, x=lambda g, x_shape: reshaped(g, x_shape), view=True, jvp="forward", complex="explicit", cost=0.1)
unsqueeze = define("unsqueeze", _unsqueeze, x=lambda g, x_shape: reshaped(g, x_shape), view=True, jvp="forward", complex="explicit", cost=0.1)
flip: Op = define("flip", _flip, x=lambda g, axis: flip(g, axis=axis), view=True, jvp="forward", complex="explicit", cost=0.1, numpy=(np.flip,))
#: `x` shifted along `axis`; what leaves at one end comes in at the other. With no axis, `x` is rolled as if it were flat
roll: Op = define("roll", lambda x, /, shift, axis=None: np.roll(x, shift, axis=axis), x=_roll_vjp, jvp="forward", complex="explicit", cost=0.6)
#: the lower triangles of matrices (..., M, N): zeros above diagonal `k`
tril: Op = define("tril", lambda x, /, k=0: np.tril(x, k), x=lambda g, k: tril(g, k=k), jvp="forward", complex="explicit", cost=1.5)
#: the upper triangles of matrices (..., M, N): zeros below diagonal `k`
triu: Op = define("triu", lambda x, /, k=0: np.triu(x, k), x=lambda g, k: triu(g, k=k), jvp="forward", complex="explicit", cost=1.5)
#: the diagonals of the matrices that `axis1` and `axis2` span, along a new last axis
diagonal: Op = define(
    "diagonal", lambda x, /, offset=0, axis1=-2, axis2=-1: np.diagonal(x, offset, axis1, axis2),
    x=lambda g, x_shape, offset, axis1, axis2: diagonal_adjoint(g, shape=x_shape, offset=offset, axis1=axis1, axis2=axis2),
    view=True,
    jvp="forward", complex="explicit",
    cost=0.3,
)
diagonal_adjoint: Op = define(
    "diagonal_adjoint",
    _diagonal_adjoint,
    x=lambda g, offset, axis1, axis2: diagonal(g, offset=offset, axis1=axis1, axis2=axis2),
    jvp="forward", complex="explicit",
    cost=0.1,
)


def matrix_transpose(x: Array, /) -> Array:
    """Matrices (..., M, N) transposed to (..., N, M)."""
    return transpose(x, axis0=-2, axis1=-1)


def moveaxis(x: Array, source: int | tuple[int, ...], destination: int | tuple[int, ...], /) -> Array:
    """`x` with the axes at `source` moved to `destination`, the others keeping their order."""
    ndim = len(x.shape)
    sources = [checked_axis(a, ndim) for a in (source if isinstance(source, tuple) else (source,))]
    destinations = [checked_axis(a, ndim) for a in (destination if isinstance(destination, tuple) else (destination,))]
    order = [a for a in range(ndim) if a not in sources]
    for target, origin in sorted(zip(destinations, sources, strict=True)):
        order.insert(target, origin)
    return permute(x, axes=tuple(order))


# numpy's functions, with numpy's arguments


@implements(np.reshape)
def np_reshape(a: Array, /, shape: Any = None, order: str = "C", *, newshape: Any = None, copy: Any = None) -> Array:
    """numpy's ``reshape``, in row-major order."""
    if order != "C":
        raise NoRuleError(f"np.reshape on a Tensor takes order='C', found {order!r}; transpose first")
    shape = newshape if shape is None else shape
    return reshape(a, shape=tuple(shape) if np.iterable(shape) else (shape,))


@implements(np.ravel)
def np_ravel(a: Array, order: str = "C") -> Array:
    """numpy's ``ravel``, in row-major order."""
    if order != "C":
        raise NoRuleError(f"np.ravel on a Tensor takes order='C', found {order!r}; transpose first")
    return reshape(a, shape=(-1,))


@implements(np.transpose)
def np_transpose(a: Array, axes: Any = None) -> Array:
    """numpy's ``transpose`` and ``permute_dims``."""
    if axes is None:
        return permute(a, axes=None)
    axes = tuple(axes) if np.iterable(axes) else (axes,)
    return permute(a, axes=tuple(i + len(a.shape) if i < 0 else i for i in axes))


@implements(np.moveaxis)
def np_moveaxis(a: Array, source: Any, destination: Any) -> Array:
    """numpy's ``moveaxis``."""
    return moveaxis(a, tuple(source) if np.iterable(source) else source, tuple(destination) if np.iterable(destination) else destination)


@implements(np.broadcast_arrays)
def np_broadcast_arrays(*args: Array, subok: bool = False) -> tuple[Array, ...]:
    """numpy's ``broadcast_arrays``."""
    try:
        shape = np.broadcast_shapes(*(np.shape(a) for a in args))
    except ValueError:
        raise ShapeError(f"shapes {', '.join(str(list(np.shape(a))) for a in args)} do not broadcast: extents must be equal or 1") from None
    return tuple(a if np.shape(a) == shape else expand(a, shape=shape) for a in args)


@implements(np.flipud)
def np_flipud(m: Array) -> Array:
    """numpy's ``flipud``."""
    return flip(m, axis=0)


@implements(np.fliplr)
def np_fliplr(m: Array) -> Array:
    """numpy's ``fliplr``."""
    return flip(m, axis=1)


@implements(np.rot90)
def np_rot90(m: Array, k: int = 1, axes: tuple[int, int] = (0, 1)) -> Array:
    """numpy's ``rot90``: quarter turns from the first towards the second axis."""
    first, second = axes
    k %= 4
    if k == 2:
        return flip(m, axis=(first, second))
    if k == 1:
        return transpose(flip(m, axis=second), axis0=first, axis1=second)
    return flip(transpose(m, axis0=first, axis1=second), axis=second) if k == 3 else reshape(m, shape=m.shape)


@implements(np.roll)
def np_roll(a: Array, shift: Any, axis: Any = None) -> Array:
    """numpy's ``roll``."""
    return roll(a, shift=tuple(shift) if np.iterable(shift) else shift, axis=tuple(axis) if np.iterable(axis) else axis)


@implements(np.diag)
def np_diag(v: Array, k: int = 0) -> Array:
    """numpy's ``diag``: a matrix with the vector `v` on its diagonal, or the diagonal of the matrix `v`."""
    if len(v.shape) == 2:
        return diagonal(v, offset=k)
    if len(v.shape) != 1:
        raise ArgumentError(f"np.diag takes a vector or a matrix, found shape {v.shape}")
    size = v.shape[0] + abs(k)
    return diagonal_adjoint(v, shape=(size, size), offset=k)


@implements(np.atleast_1d)
def np_atleast_1d(*arys: Array) -> Any:
    """numpy's ``atleast_1d``."""
    return _at_least(arys, lambda shape: shape or (1,))


@implements(np.atleast_2d)
def np_atleast_2d(*arys: Array) -> Any:
    """numpy's ``atleast_2d``."""
    return _at_least(arys, lambda shape: shape if len(shape) >= 2 else (1,) * (2 - len(shape)) + shape)


@implements(np.atleast_3d)
def np_atleast_3d(*arys: Array) -> Any:
    """numpy's ``atleast_3d``."""
    return _at_least(arys, lambda shape: {0: (1, 1, 1), 1: (1, *shape, 1), 2: (*shape, 1)}.get(len(shape), shape))


def _at_least(arrays: tuple[Array, ...], widen: Any) -> Any:
    results = tuple(reshape(a, shape=widen(tuple(np.shape(a)))) for a in arrays)
    return results[0] if len(results) == 1 else results


answer({
    np.swapaxes: lambda a, axis1, axis2: transpose(a, axis0=axis1, axis1=axis2),
    np.matrix_transpose: lambda x, /: matrix_transpose(x),
    np.linalg.matrix_transpose: lambda x, /: matrix_transpose(x),
    np.broadcast_to: lambda array, shape, subok=False: expand(array, shape=tuple(shape) if np.iterable(shape) else (shape,)),
    np.squeeze: lambda a, axis=None: squeeze(a, axis=axis),
    np.expand_dims: lambda a, axis: unsqueeze(a, axis=tuple(axis) if isinstance(axis, list) else axis),
    np.tril: lambda m, k=0: tril(m, k=k),
    np.triu: lambda m, k=0: triu(m, k=k),
    np.diagonal: lambda a, offset=0, axis1=0, axis2=1: diagonal(a, offset=offset, axis1=axis1, axis2=axis2),
})  # fmt: skip

"""Sliding windows along one axis, their adjoint, and convolution of vectors, which is a product of windows with a vector."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from aiograd.errors import ShapeError
from aiograd.ops.joining import constant_pad
from aiograd.ops.linalg import matmul
from aiograd.ops.op import Op, define, implements
from aiograd.ops.shape import checked_axis, flip
from aiograd.running.types import Array, Shape


def _windows(x: Array, /, size: int, axis: int = -1, step: int = 1) -> Array:
    """Windows of `size` neighbours along `axis`, one every `step` elements.

    Args:
        x: (..., length, ...) with at least `size` elements along `axis`.
        size: elements of a window.
        axis: where the windows slide.
        step: elements between the starts of neighbouring windows.

    Returns:
        (..., (length - size) // step + 1, ..., size), a read-only view.
    """
    axis = checked_axis(axis, x.ndim)
    if not 0 <= size <= x.shape[axis] or step < 1:
        raise ShapeError(f"windows of {size} elements, one every {step}, along axis {axis} of shape {list(x.shape)}")
    return sliding_window_view(x, size, axis)[(slice(None),) * axis + (slice(None, None, step),)]


def _windows_adjoint(g: Array, /, shape: Shape, size: int, axis: int = -1, step: int = 1) -> Array:
    """Zeros of `shape` with every window of `g` added where `windows` takes it from."""
    axis = checked_axis(axis, len(shape))
    out = np.zeros(shape, g.dtype)
    lead = (slice(None),) * axis
    count = g.shape[axis]
    for k in range(size if count else 0):
        out[(*lead, slice(k, k + (count - 1) * step + 1, step))] += g[..., k]
    return out


windows: Op = define(
    "windows",
    _windows,
    x=lambda g, x_shape, size, axis, step: windows_adjoint(g, shape=x_shape, size=size, axis=axis, step=step),
    view=True, jvp="forward", complex="explicit",
    cost=3.0,
)
windows_adjoint: Op = define(
    "windows_adjoint", _windows_adjoint, g=lambda g, size, axis, step: windows(g, size=size, axis=axis, step=step),
    jvp="forward", complex="explicit", cost=1.0
)


@implements(np.convolve)
def np_convolve(a: Array, v: Array, mode: str = "full") -> Array:
    """numpy's ``convolve``."""
    if np.ndim(a) != 1 or np.ndim(v) != 1 or not a.shape[0] or not v.shape[0]:
        raise ShapeError(f"convolve: found shapes {list(np.shape(a))} and {list(np.shape(v))}, expected two vectors that are not empty")
    if mode not in ("full", "same", "valid"):
        raise ShapeError(f"convolve: mode is {mode!r}, expected 'full', 'same' or 'valid'")
    if v.shape[0] > a.shape[0]:
        a, v = v, a
    size = v.shape[0]
    border = {"full": (size - 1, size - 1), "same": (size // 2, size - 1 - size // 2), "valid": (0, 0)}[mode]
    return matmul(windows(constant_pad(a, pad_width=(border,)), size=size, axis=0), flip(v, axis=0))


@implements(np.correlate)
def np_correlate(a: Array, v: Array, mode: str = "valid") -> Array:
    """numpy's ``correlate``: `v`, conjugated, against `a` at every distance."""
    if np.size(v) > np.size(a):
        return np.conjugate(flip(np_correlate(v, a, mode), axis=0))
    return np_convolve(a, flip(np.conjugate(v), axis=0), mode)


@implements(sliding_window_view)
def np_sliding_window_view(x: Array, window_shape: Any, axis: Any = None, *, subok: bool = False, writeable: bool = False) -> Array:
    """numpy's ``sliding_window_view``."""
    sizes = tuple(window_shape) if np.iterable(window_shape) else (window_shape,)
    axes = tuple(range(len(x.shape))) if axis is None else tuple(axis) if np.iterable(axis) else (axis,)
    if len(sizes) != len(axes):
        raise ShapeError(f"sliding_window_view: {len(sizes)} extents of windows for {len(axes)} axes")
    for size, a in zip(sizes, (checked_axis(a, len(x.shape)) for a in axes), strict=True):
        x = windows(x, size=size, axis=a)
    return x

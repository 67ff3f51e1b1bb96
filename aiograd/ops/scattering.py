"""Extrema of numbers scattered to one place: the row behind ``scatter_reduce`` with "amax" and "amin".

Where several contributions to a place are equal to its extremum, each takes the same share of the gradient, as in PyTorch.
"""

from __future__ import annotations

import numpy as np

from aiograd.errors import ShapeError
from aiograd.ops.creation import ones_like
from aiograd.ops.indexing import gather, gather_adjoint
from aiograd.ops.masking import mask
from aiograd.ops.op import Op, define
from aiograd.running.types import Array


def _scatter_extreme(x: Array, src: Array, indices: Array, /, axis: int = -1, *, largest: bool = True) -> Array:
    """`x` in which each place is the extremum of itself and of what `src` puts there.

    Args:
        x: any shape with at least one axis.
        src: the elements to put, of the shape of `indices`.
        indices: integers, of the shape of `x` except along `axis`; a place may be named any number of times.
        axis: where to put.
        largest: True for the maximum.
    """
    if src.shape != indices.shape or any(a != b for i, (a, b) in enumerate(zip(x.shape, indices.shape, strict=True)) if i != axis % x.ndim):
        raise ShapeError(f"scatter: found x {x.shape}, src {src.shape}, indices {indices.shape}; expected one shape except along axis {axis}")
    out = np.array(x, copy=True)
    places = list(np.ogrid[tuple(map(slice, indices.shape))])
    places[axis] = np.asarray(indices)
    (np.maximum if largest else np.minimum).at(out, tuple(places), src)
    return out


def _scatter_extreme_vjp(
    g: Array, x: Array, src: Array, out: Array, indices: Array, axis: int, needs: tuple[bool, bool]
) -> tuple[Array | None, Array | None]:
    kept, put = np.equal(x, out), np.equal(src, gather(out, indices, axis=axis))
    winners = gather_adjoint(mask(ones_like(src), put), indices, shape=x.shape, axis=axis) + mask(ones_like(x), kept)
    share = g / np.maximum(winners, 1)
    return mask(share, kept) if needs[0] else None, mask(gather(share, indices, axis=axis), put) if needs[1] else None


def _scatter_extreme_jvp(t: tuple[Array | None, ...], x: Array, src: Array, out: Array, indices: Array, axis: int) -> Array:
    kept, put = np.equal(x, out), np.equal(src, gather(out, indices, axis=axis))
    winners = gather_adjoint(mask(ones_like(src), put), indices, shape=x.shape, axis=axis) + mask(ones_like(x), kept)
    total = None if t[0] is None else mask(t[0], kept)
    if t[1] is not None:
        part = gather_adjoint(mask(t[1], put), indices, shape=x.shape, axis=axis)
        total = part if total is None else total + part
    return total / np.maximum(winners, 1)


scatter_extreme: Op = define("scatter_extreme", _scatter_extreme, joint={("x", "src"): _scatter_extreme_vjp}, jvp=_scatter_extreme_jvp, cost=20.0)

"""Gather and scatter in PyTorch's order of arguments, and cumulative extrema.

Note [Indices that are smaller]
    As in PyTorch the indices may be shorter than the tensor along the other axes, and stand for its first places there; nothing is
    broadcast. `take_along_axis` is numpy's function, which does.

Note [Where the axis stands]
    ``scatter(x, axis, index, src)`` is PyTorch's order. The axis may be given by name as well, as everywhere in this package, and is the last by
    default: ``scatter(x, index, src, axis=0)``. An int in second place is an axis, anything else the index.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from aiograd.array_functions.conversion import ArrayLike, as_tensor, row
from aiograd.array_functions.manipulation import broadcast_to
from aiograd.errors import ArgumentError, ArgumentTypeError, IndexRangeError, ShapeError
from aiograd.ops import indexing
from aiograd.tensors.record import call
from aiograd.tensors.tensor import Tensor

__all__ = ["cummax", "cummin", "logcumsumexp", "gather", "scatter", "scatter_add", "scatter_reduce"]

_REDUCTIONS = ("sum", "prod", "mean", "amax", "amin")


def indices_of(name: str, indices: Any) -> Tensor:
    """Indices as a Tensor.

    Raises:
        ArgumentTypeError: they are no integers.
    """
    if isinstance(indices, (list, tuple)):
        indices = np.asarray(indices)
        indices = indices if indices.size else indices.astype(np.intp)  # an empty list has no integers to tell its dtype
    given = as_tensor(indices)
    if given.dtype.kind not in "iu":
        raise ArgumentTypeError(f"{name}(): indices have dtype {given.dtype}, expected integers")
    return given


def _checked(name: str, x: Tensor, axis: int, index: Tensor) -> int:
    """The axis, counted from the start, if shapes fit."""
    if not -max(x.ndim, 1) <= axis < max(x.ndim, 1):
        raise ArgumentError(f"{name}(): axis {axis} of a tensor of shape {list(x.shape)}")
    axis %= max(x.ndim, 1)
    fits = index.ndim == x.ndim and all(n <= m for i, (n, m) in enumerate(zip(index.shape, x.shape, strict=True)) if i != axis)
    if not fits:
        raise ShapeError(f"{name}(): index has shape {list(index.shape)}, expected at most {list(x.shape)} except along axis {axis}")
    return axis


def _region(x: Tensor, index: Tensor, axis: int) -> tuple[slice, ...] | None:
    """The part of `x` that `index` speaks of; None if it is all of it."""
    part = tuple(slice(None) if i == axis else slice(n) for i, n in enumerate(index.shape))
    return None if all(i == axis or n == m for i, (n, m) in enumerate(zip(index.shape, x.shape, strict=True))) else part


def gather(x: ArrayLike, /, axis: int, index: ArrayLike) -> Tensor:
    """Elements along an axis: ``out[i, j] = x[index[i, j], j]`` for axis 0; see Note [Indices that are smaller]."""
    source, chosen = as_tensor(x), indices_of("gather", index)
    if chosen.device != source.device:
        chosen = chosen.to(source.device)
    axis = _checked("gather", source, axis, chosen)
    if not source.ndim:
        return source.clone()
    part = _region(source, chosen, axis)
    return call(row("gather"), (source if part is None else source[part], chosen), {"axis": axis})  # type: ignore[no-any-return]


def scatter(x: ArrayLike, /, *arguments: Any, axis: int | None = None, index: Any = None, src: Any = None) -> Tensor:
    """A copy with elements along an axis replaced: ``out[index[i, j], j] = src[i, j]`` for axis 0.

    Args:
        x: any shape.
        arguments: axis, index and source by position; see Note [Where the axis stands].
        axis: an axis of `x`.
        index: integers; see Note [Indices that are smaller]. No place should be named twice.
        src: at least as large as `index`, or something that broadcasts to its shape.

    Returns:
        A Tensor of the shape and dtype of `x`.
    """
    target, along, chosen, values = _arguments("scatter", x, arguments, axis, index, src)
    return _onto(target, chosen, along, lambda part: call(row("scatter"), (part, chosen, values), {"axis": along}))


def scatter_add(x: ArrayLike, /, *arguments: Any, axis: int | None = None, index: Any = None, src: Any = None) -> Tensor:
    """A copy with elements added along an axis: ``out[index[i, j], j] += src[i, j]`` for axis 0, once for every mention.

    Arguments as of `scatter`.
    """
    target, along, chosen, values = _arguments("scatter_add", x, arguments, axis, index, src)
    return _onto(target, chosen, along, lambda part: indexing.scatter_add(part, chosen, values, axis=along))


def scatter_reduce(x: ArrayLike, /, axis: int, index: ArrayLike, src: ArrayLike, reduce: str, *, include_self: bool = True) -> Tensor:
    """A copy in which each place that `index` names is reduced with all that `src` puts there.

    Args:
        x: any shape.
        axis, index, src: as of `scatter`; a place may be named any number of times.
        reduce: "sum", "prod", "mean", "amax" or "amin". A product takes memory for as many elements per place as the fullest place has.
        include_self: True if the elements of `x` take part; False if only `src` counts where something is put.

    Returns:
        A Tensor of the shape and dtype of `x`.

    Raises:
        ArgumentError: another `reduce`.
    """
    if reduce not in _REDUCTIONS:
        raise ArgumentError(f"scatter_reduce(reduce={reduce!r}): expected one of {', '.join(map(repr, _REDUCTIONS))}")
    target, along, chosen, values = _arguments("scatter_reduce", x, (), axis, index, src)
    return _onto(target, chosen, along, lambda part: _reduced(part, chosen, values, along, reduce, include_self))


def _reduced(x: Tensor, index: Tensor, source: Tensor, axis: int, reduce: str, include_self: bool) -> Tensor:
    if reduce == "prod":
        return _product(x, index, source, axis, include_self)
    if not include_self:
        neutral = {"amax": -math.inf, "amin": math.inf}.get(reduce, 0)
        if x.dtype.kind in "iu" and reduce in ("amax", "amin"):
            limits = np.iinfo(x.dtype)
            neutral = limits.min if reduce == "amax" else limits.max
        x = call(row("scatter"), (x, index, np.full(index.shape, neutral, x.dtype)), {"axis": axis})
    if reduce in ("amax", "amin"):
        return call(row("scatter_extreme"), (x, source, index), {"axis": axis, "largest": reduce == "amax"})  # type: ignore[no-any-return]
    total: Tensor = indexing.scatter_add(x, index, source, axis=axis)
    if reduce == "sum":
        return total
    ones = as_tensor(np.ones(index.shape, x.dtype)).to(x.device)
    counts = call(row("gather_adjoint"), (ones, index), {"shape": x.shape, "axis": axis}) + (1 if include_self else 0)
    counts = call(row("maximum"), (counts, np.ones((), x.dtype)), {})
    mean: Tensor = total // counts if x.dtype.kind in "iu" else total / counts
    return mean


def _product(x: Tensor, index: Tensor, source: Tensor, axis: int, include_self: bool) -> Tensor:
    """Factors side by side on a new last axis, ones where there is none: products of a row are exact where a factor is zero."""
    chosen = np.moveaxis(index.detach().cpu().numpy(), axis, -1)
    lines = chosen.reshape(-1, chosen.shape[-1]) if chosen.size else np.zeros((0, 0), np.int64)
    length = x.shape[axis]
    if lines.size and (lines.min() < -length or lines.max() >= length):
        raise IndexRangeError(f"scatter_reduce(): indices run from {lines.min()} to {lines.max()}, expected -{length} to {length - 1}")
    places = lines % max(length, 1) + np.arange(len(lines))[:, None] * length
    flat = places.reshape(-1)
    order = np.argsort(flat, kind="stable")
    starts = np.searchsorted(flat[order], flat[order])
    rank = np.empty(flat.size, np.int64)
    rank[order] = np.arange(flat.size) - starts  # the number of each factor among the factors of its place
    own = x.moveaxis(axis, -1)
    base = own.reshape(-1, 1)
    if not include_self:
        base = call(row("setitem"), (base, 1), {"index": np.unique(flat)})
    factors = as_tensor(np.ones((own.size, int(rank.max(initial=-1)) + 1), x.dtype)).to(x.device)
    put = call(row("setitem"), (factors, source.moveaxis(axis, -1).reshape(-1)), {"index": (flat, rank)})
    together = call(row("cat"), (base, put), {"axis": 1})
    return call(row("prod"), (together,), {"axis": 1}).reshape(own.shape).moveaxis(-1, axis)  # type: ignore[no-any-return]


def _arguments(name: str, x: Any, given: tuple[Any, ...], axis: Any, index: Any, src: Any) -> tuple[Tensor, int, Tensor, Tensor]:
    """The target, the axis, the indices, and as much of the source as they speak of; 0-d ones as vectors of one."""
    rest = list(given)
    if axis is None:
        axis = int(rest.pop(0)) if rest and isinstance(rest[0], (int, np.integer)) else -1
    index = rest.pop(0) if rest and index is None else index
    src = rest.pop(0) if rest and src is None else src
    if rest or index is None or src is None:
        raise ArgumentTypeError(f"{name}(): expected (x, axis, index, src)")
    target, chosen = as_tensor(x), indices_of(name, index)
    if chosen.device != target.device:
        chosen = chosen.to(target.device)
    along = _checked(name, target, axis, chosen)
    values = as_tensor(np.full((), src, target.dtype) if isinstance(src, (bool, int, float, complex)) else src, target.dtype)
    if values.device != target.device:
        values = values.to(target.device)
    if not target.ndim:
        return target, along, chosen.reshape(1), values.reshape(1)
    if values.ndim == chosen.ndim and all(n <= m for n, m in zip(chosen.shape, values.shape, strict=True)):
        return target, along, chosen, values if values.shape == chosen.shape else values[tuple(slice(n) for n in chosen.shape)]
    return target, along, chosen, broadcast_to(values, chosen.shape)


def _onto(x: Tensor, index: Tensor, axis: int, function: Callable[[Tensor], Tensor]) -> Tensor:
    """`function` of the part of `x` that `index` speaks of, in a copy of `x`."""
    if not index.size:
        return x.clone()
    if not x.ndim:
        return function(x.reshape(1)).reshape(())
    part = _region(x, index, axis)
    return function(x) if part is None else call(row("setitem"), (x, function(x[part])), {"index": part})


# Cumulative extrema.


def cummax(x: ArrayLike, /, axis: int = -1) -> tuple[Tensor, Tensor]:
    """The largest of the elements up to each along an axis, and where it is; of equal ones the last."""
    return call(row("cummax"), (as_tensor(x),), {"axis": axis})  # type: ignore[no-any-return]


def cummin(x: ArrayLike, /, axis: int = -1) -> tuple[Tensor, Tensor]:
    """The smallest of the elements up to each along an axis, and where it is; of equal ones the last."""
    return call(row("cummin"), (as_tensor(x),), {"axis": axis})  # type: ignore[no-any-return]


def logcumsumexp(x: ArrayLike, /, axis: int = -1) -> Tensor:
    """``log(cumsum(exp(x)))`` along an axis, without overflow; real numbers."""
    return call(row("logcumsumexp"), (as_tensor(x),), {"axis": axis})  # type: ignore[no-any-return]

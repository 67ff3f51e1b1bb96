"""Changing the size of lines and images: the nearest pixel, or straight lines between neighbours. Axes are resampled one after the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from aiograd.array_functions.conversion import ArrayLike, as_tensor, row
from aiograd.errors import ArgumentError, ShapeError
from aiograd.tensors.record import call
from aiograd.tensors.tensor import Tensor

#: the axes that each mode expects
_MODES = {"nearest": (3, 4), "nearest-exact": (3, 4), "linear": (3,), "bilinear": (4,)}


def interpolate(
    input: ArrayLike,
    size: int | Sequence[int] | None = None,
    scale_factor: float | Sequence[float] | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
) -> Tensor:
    """Lines (N, C, L) or images (N, C, H, W) in another size.

    Args:
        input: see above.
        size: the new extents, or one number for all.
        scale_factor: instead of `size`, times the old extents, rounded down.
        mode: "nearest", "nearest-exact" (of pixels that are areas), "linear" for lines, "bilinear" for images.
        align_corners: for the last two: True if the first and last pixels keep their places.
        recompute_scale_factor: True to go by the new extents rather than by `scale_factor`.

    Returns:
        (N, C, L') or (N, C, H', W').

    Raises:
        ArgumentError: another mode, or sizes that make no sense.
        ShapeError: another number of axes.
    """
    x = as_tensor(input)
    if mode not in _MODES:
        raise ArgumentError(f"interpolate(mode={mode!r}): expected one of {', '.join(map(repr, _MODES))}")
    if x.ndim not in _MODES[mode]:
        raise ShapeError(f"interpolate(mode={mode!r}): found shape {list(x.shape)}, expected {' or '.join(map(str, _MODES[mode]))} axes")
    if (size is None) == (scale_factor is None):
        raise ArgumentError("interpolate: expected either a size or a scale_factor")
    if align_corners is not None and mode.startswith("nearest"):
        raise ArgumentError(f"interpolate(mode={mode!r}): align_corners is for 'linear' and 'bilinear'")
    old = x.shape[2:]
    factors: list[float | None] = [None] * len(old)
    if scale_factor is None:
        new = [int(n) for n in _each(size, len(old))]
    else:
        given = [float(f) for f in _each(scale_factor, len(old))]
        new = [math.floor(n * f) for n, f in zip(old, given, strict=True)]
        factors = [None] * len(old) if recompute_scale_factor else list(given)
    if any(n < 1 for n in new) or 0 in old:
        raise ShapeError(f"interpolate: from {list(old)} to {new}: expected extents above 0")
    for i, (length, wanted, factor) in enumerate(zip(old, new, factors, strict=True)):
        step = length / wanted if factor is None else 1.0 / factor
        if mode.startswith("nearest"):
            x = _nearest(x, i + 2, wanted, step, 0.5 if mode == "nearest-exact" else 0.0)
        else:
            x = _linear(x, i + 2, wanted, step, bool(align_corners))
    return x


def _each(given: Any, count: int) -> Sequence[Any]:
    values = list(given) if isinstance(given, (tuple, list)) else [given] * count
    if len(values) != count:
        raise ArgumentError(f"interpolate: found {len(values)} numbers for {count} axes")
    return values


def _nearest(x: Tensor, axis: int, wanted: int, step: float, shift: float) -> Tensor:
    # in float32, as PyTorch has it: rounding decides which of two pixels is nearest
    places = np.floor((np.arange(wanted, dtype=np.float32) + np.float32(shift)) * np.float32(step)).astype(np.int64)
    return _taken(x, np.minimum(places, x.shape[axis] - 1), axis)


def _taken(x: Tensor, places: Any, axis: int) -> Tensor:
    return call(row("take"), (x, places), {"axis": axis})  # type: ignore[no-any-return]


def _linear(x: Tensor, axis: int, wanted: int, step: float, align_corners: bool) -> Tensor:
    length = x.shape[axis]
    if wanted == length and step == 1.0:
        return x
    if align_corners:
        places = np.arange(wanted) * ((length - 1) / (wanted - 1) if wanted > 1 else 0.0)
    else:
        places = np.maximum((np.arange(wanted) + 0.5) * step - 0.5, 0.0)
    below = np.minimum(np.floor(places).astype(np.int64), length - 1)
    part = (places - below).astype(x.dtype).reshape((-1,) + (1,) * (x.ndim - 1 - axis))
    share = as_tensor(np.clip(part, 0, 1)).to(x.device)
    return _taken(x, below, axis) * (1 - share) + _taken(x, np.minimum(below + 1, length - 1), axis) * share

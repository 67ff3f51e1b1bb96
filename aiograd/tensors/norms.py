"""The total norm of many arrays and the factor that limits it, for gradient clipping in one process or in several.

The sizes are added one by one in the order of the arrays, so the result is the same to the bit, wherever the sizes were computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from aiograd.errors import ArgumentError, ArgumentTypeError
from aiograd.ops.creation import astype
from aiograd.running.caller import type_found


def size_of(array: Any, norm_type: float) -> Any:
    """The contribution of one array to the norm: the sum of powers of magnitudes, or the largest magnitude."""
    if type(array) is np.ndarray and norm_type == 2:
        flat = np.ascontiguousarray(array, np.float32 if array.dtype == np.float16 else None).reshape(-1)
        return np.real(np.vdot(flat, flat))
    size = np.abs(array)
    if math.isinf(norm_type):
        return np.max(size) if array.size else np.sum(size)
    return np.sum(size**norm_type)


def sum_of(sizes: Iterable[Any], norm_type: float) -> Any:
    """The total of the sizes (see `size_of`) of at least one array."""
    total: Any = None
    for size in sizes:
        total = size if total is None else np.maximum(total, size) if math.isinf(norm_type) else total + size
    return total


def norm_of(total: Any, norm_type: float) -> Any:
    """The norm for a total of sizes."""
    if math.isinf(norm_type):
        return total
    return np.sqrt(total) if norm_type == 2 else total ** (1.0 / norm_type)


def factor_for(norm: Any, max_norm: float) -> Any:
    """The factor that makes the norm of arrays at most `max_norm`."""
    return np.minimum(max_norm / (norm + 1e-6), 1.0)


def scaled(arrays: Sequence[Any], factor: Any) -> list[Any]:
    """The arrays times a factor, each in its dtype."""
    return [astype(array * factor, dtype=array.dtype, copy=False) for array in arrays]


def check_limits(what: str, max_norm: Any, norm_type: Any) -> None:
    """Raise unless these are the limit and the order of a norm.

    Raises:
        ArgumentTypeError: one is no number. ArgumentError: the limit is below 0, the order not above it, or one is NaN.
    """
    for name, value in (("max_norm", max_norm), ("norm_type", norm_type)):
        if not hasattr(value, "__float__"):
            raise ArgumentTypeError(f"{what}({name}={value!r:.100}): expected a number, found {type_found(value)}")
    if not max_norm >= 0 or not norm_type > 0:
        raise ArgumentError(f"{what}(max_norm={max_norm}, norm_type={norm_type}): expected a limit of at least 0 and a norm above 0")


def checked_norm(what: str, clip_norm: Any) -> float | None:
    """The largest norm that `what` was given as ``clip_norm``; None: any.

    Raises:
        ArgumentError: it is none.
    """
    if clip_norm is None:
        return None
    if isinstance(clip_norm, bool) or not isinstance(clip_norm, (int, float)) or not 0 < clip_norm < math.inf:
        raise ArgumentError(f"{what}(clip_norm={clip_norm!r}): expected a number above 0, or None")
    return float(clip_norm)

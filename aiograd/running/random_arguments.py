"""Arguments of a generator's methods, checked, and the Tensors that they return."""

from __future__ import annotations

from typing import Any

import numpy as np

from aiograd.errors import ArgumentError, ArgumentTypeError
from aiograd.running.modes import get_default_dtype
from aiograd.running.types import Shape
from aiograd.tensors.core import make
from aiograd.tensors.tensor import Tensor


def entropy_of(seed: Any) -> int | tuple[int, ...]:
    """The seed of a stream: an int of at least 0, or a tuple of them; fresh entropy for None."""
    if seed is None:
        fresh = np.random.SeedSequence().entropy
        return entropy_of(fresh)
    several = isinstance(seed, (tuple, list))
    numbers = seed if several else [seed]
    if not numbers or any(isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < 0 for n in numbers):
        raise ArgumentError(f"Generator(seed={seed!r}): expected an int of at least 0, a sequence of them, or None")
    return tuple(map(int, numbers)) if several else int(seed)


def shape_of(shape: Any) -> Shape:
    """A shape, also from one extent."""
    extents = (shape,) if isinstance(shape, (int, np.integer)) and not isinstance(shape, bool) else shape
    if not isinstance(extents, (tuple, list)) or any(isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < 0 for n in extents):
        raise ArgumentError(f"shape {shape!r}: expected an int of at least 0, or a sequence of them")
    return tuple(map(int, extents))


def float_dtypes(dtype: Any) -> tuple[np.dtype[Any], np.dtype[Any]]:
    """The dtype of the result, and the one to draw in."""
    wanted = get_default_dtype() if dtype is None else np.dtype(dtype)
    if wanted.kind != "f":
        raise ArgumentTypeError(f"dtype {wanted}: expected a real floating dtype such as float32 or float64")
    return wanted, np.dtype(np.float64 if wanted.itemsize > 4 else np.float32)


def check_probability(what: str, p: float) -> None:
    """Raise unless `p` is a probability."""
    if not 0 <= p <= 1:
        raise ArgumentError(f"{what}(p={p}): expected a probability between 0 and 1")


def tensor_of(array: Any, dtype: np.dtype[Any]) -> Tensor:
    """A Tensor of numbers that were drawn."""
    return make(np.asarray(array, dtype=dtype))  # type: ignore[no-any-return]

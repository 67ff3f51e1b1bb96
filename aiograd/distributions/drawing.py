"""Draws by weights: `multinomial`, and the classes that `Categorical` draws."""

from __future__ import annotations

from typing import Any

import numpy as np

from aiograd.array_functions.conversion import as_tensor
from aiograd.errors import ArgumentError, ShapeError
from aiograd.running.random import Generator, default_generator
from aiograd.tensors.core import host_array, make
from aiograd.tensors.tensor import Tensor


def classes(weights: Any, count: int, generator: Generator) -> Any:
    """Classes drawn independently, each with a probability proportional to its weight.

    Args:
        weights: (rows, classes), finite, at least 0, with a sum above 0.
        count: draws of each row.
        generator: draws them.

    Returns:
        (rows, count), int64.
    """
    sums = np.cumsum(np.asarray(weights, np.float64), -1)
    places = generator.uniform((len(sums), count), dtype=np.float64).numpy() * sums[:, -1:]
    found = np.empty(places.shape, np.int64)
    for i, row in enumerate(sums):
        found[i] = np.searchsorted(row, places[i], side="right")
    last = sums.shape[-1] - 1 - np.argmax(np.asarray(weights)[:, ::-1] > 0, -1)  # rounding may lead beyond it
    return np.minimum(found, last[:, None])


def multinomial(input: Any, num_samples: int, replacement: bool = False, *, generator: Generator | None = None) -> Tensor:
    """Indices drawn with probabilities proportional to weights.

    Args:
        input: (classes,) or (rows, classes): weights, finite, at least 0; their sum need not be 1.
        num_samples: how many to draw of each row.
        replacement: True if an index may be drawn more than once.
        generator: draws them; None: the default generator of the running task.

    Returns:
        (num_samples,) or (rows, num_samples), int64; without replacement in the order of the draws.

    Raises:
        ShapeError: no vector or matrix. ArgumentError: weights that are none, or too few above 0 to draw without replacement.
    """
    source = as_tensor(input).detach()
    if source.ndim not in (1, 2) or not source.shape[-1] or source.dtype.kind not in "fiub":
        raise ShapeError(f"multinomial: found shape {list(source.shape)}, dtype {source.dtype}; expected weights, (classes,) or (rows, classes)")
    if isinstance(num_samples, bool) or not isinstance(num_samples, (int, np.integer)) or num_samples < 1:
        raise ArgumentError(f"multinomial(num_samples={num_samples!r}): expected an int above 0")
    weights = np.atleast_2d(host_array(source).astype(np.float64))
    if not np.all(np.isfinite(weights)) or np.any(weights < 0) or not np.all(weights.max(-1) > 0):
        raise ArgumentError("multinomial: expected weights that are finite and at least 0, with a sum above 0")
    draws = generator or default_generator()
    scaled = np.ldexp(weights, -np.frexp(weights.max(-1, keepdims=True))[1])  # exact, and sums do not overflow
    if replacement:
        found = classes(scaled, int(num_samples), draws)
    else:
        possible = int((weights > 0).sum(-1).min(initial=weights.shape[-1]))
        if num_samples > possible:
            raise ArgumentError(f"multinomial(num_samples={num_samples}): a row has {possible} weights above 0; pass replacement=True to draw again")
        # the first to arrive of clocks that tick at these rates
        waits = -np.log1p(-draws.uniform(weights.shape, dtype=np.float64).numpy())
        with np.errstate(divide="ignore"):
            found = np.argsort(np.where(weights > 0, waits / scaled, np.inf), -1, kind="stable")[:, :num_samples]
    result: Tensor = make(found if source.ndim == 2 else found[0])
    return result

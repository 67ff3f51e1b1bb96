"""Undoing broadcasting, in the one place that does it.

Rules return gradients of the broadcast shape; the engine calls `unbroadcast` on their results where the shape differs from the
argument's.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def expandable(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """True if an array of shape `target` broadcasts to `shape`, so that a gradient of `shape` sums down to `target`."""
    if shape[len(shape) - len(target) :] == target:
        return True
    if len(target) > len(shape):
        return False
    return all(t in (1, s) for s, t in zip(reversed(shape), reversed(target), strict=False))


def unbroadcast(gradient: Any, target: tuple[int, ...]) -> Any:
    """Sum `gradient` over the axes that broadcasting `target` to its shape added or stretched.

    Args:
        gradient: array, Tensor or device array of the shape that `target` broadcasts to.
        target: shape of the argument.

    Returns:
        An array of shape `target`.
    """
    shape = gradient.shape
    extra = len(shape) - len(target)
    if extra == 1 and shape[1:] == target and gradient.__class__ is np.ndarray:
        return np.add.reduce(gradient)  # a bias added to every row of a batch: by far the most common case
    axes = tuple(range(extra)) + tuple(i + extra for i, t in enumerate(target) if t == 1 and shape[i + extra] != 1)
    if axes:
        gradient = np.add.reduce(gradient, axis=axes) if gradient.__class__ is np.ndarray else np.sum(gradient, axis=axes)
    return gradient if gradient.shape == target else np.reshape(gradient, target)

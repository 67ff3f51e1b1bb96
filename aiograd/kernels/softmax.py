"""Softmax, its logarithm, and cross entropy with integer targets."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from aiograd.kernels.arrays import as_rows, flat, nothing
from aiograd.kernels.pool import run
from aiograd.kernels.selection import compiled

NDArray = npt.NDArray[Any]


def _by_rows(name: str, x: NDArray, axis: int, *arrays: NDArray) -> NDArray | None:
    """Run the compiled kernel `name` along the last axis; None: there is none to be used."""
    if axis not in (-1, x.ndim - 1) or x.ndim == 0:
        return None
    kernels = compiled(x.size, x, *arrays)
    if kernels is None:
        return None
    n = x.shape[-1]
    out = np.empty(x.shape, x.dtype)
    run(getattr(kernels.softmax, name), x.size // n, x.size, as_rows(x, n), *(as_rows(a, n) for a in arrays), out.reshape(-1, n))
    return out


def nothing_along(x: NDArray, axis: int) -> NDArray:
    """The softmax of an array without elements, or its logarithm.

    Raises:
        IndexError: it does not have the axis.
    """
    _ = x.shape[axis]
    return np.zeros(x.shape, np.result_type(x.dtype, np.float16))


def _exponentials(x: NDArray, axis: int) -> NDArray:
    e: NDArray = np.asarray(x - np.maximum.reduce(x, axis=axis, keepdims=True))
    return np.exp(e, out=e) if e.dtype.kind == "f" else np.exp(e)


def softmax(x: NDArray, axis: int = -1) -> NDArray:
    """``exp(x) / sum(exp(x))`` along `axis`."""
    if not x.size:
        return nothing_along(x, axis)
    out = _by_rows("softmax", x, axis)
    if out is None:
        out = _exponentials(x, axis)
        out /= np.add.reduce(out, axis=axis, keepdims=True)
    return out


def softmax_grad(g: NDArray, out: NDArray, axis: int = -1) -> NDArray:
    """Gradient of `softmax` from its output."""
    dx = _by_rows("softmax_grad", g, axis, out)
    if dx is None:
        dx = g * out
        dx -= out * np.add.reduce(dx, axis=axis, keepdims=True)
    return dx


def log_softmax(x: NDArray, axis: int = -1) -> NDArray:
    """Logarithm of `softmax`."""
    if not x.size:
        return nothing_along(x, axis)
    out = _by_rows("log_softmax", x, axis)
    if out is None:
        out = x - np.maximum.reduce(x, axis=axis, keepdims=True)
        total = np.add.reduce(np.exp(out), axis=axis, keepdims=True)
        out = out - np.log(total)
    return out


def log_softmax_grad(g: NDArray, out: NDArray, axis: int = -1) -> NDArray:
    """Gradient of `log_softmax` from its output."""
    dx = _by_rows("log_softmax_grad", g, axis, out)
    if dx is None:
        dx = np.asarray(np.exp(out))
        dx *= np.add.reduce(g, axis=axis, keepdims=True)
        np.subtract(g, dx, out=dx)
    return dx


def log_sum_exp(x: NDArray) -> NDArray:
    """``log(sum(exp(row)))`` of each row.

    Args:
        x: (rows, n), n > 0.

    Returns:
        (rows,).
    """
    kernels = compiled(x.size, x)
    if kernels is not None:
        out = np.empty(len(x), x.dtype)
        run(kernels.softmax.log_sum_exp, len(x), x.size, as_rows(x, x.shape[1]), out)
        return out
    top = np.maximum.reduce(x, axis=1)
    e = x - top[:, None]
    np.exp(e, out=e)
    total: NDArray = np.add.reduce(e, axis=1)
    np.log(total, out=total)
    total += top
    return total


def cross_entropy(x: NDArray, target: NDArray, weight: NDArray | None, ignore_index: int, smoothing: float) -> tuple[NDArray, NDArray, NDArray]:
    """Cross entropy of each row with an integer target.

    Args:
        x: logits, (rows, n), n > 0.
        target: (rows,), checked.
        weight: (n,) of each class, or None.
        ignore_index: a target with a row that counts for nothing.
        smoothing: label smoothing.

    Returns:
        Per row: the loss, how much the row counts in a mean, and the log-sum-exp; (rows,).
    """
    rows, n = x.shape
    shift = log_sum_exp(x)
    kept = target != ignore_index
    index = target if kept.all() else np.where(kept, target, 0)
    counts = kept.astype(x.dtype)
    if weight is not None:
        counts *= weight[index]
    factor = (1.0 - smoothing) * counts
    # what counts for nothing adds nothing, even where a logit is -inf
    loss = np.where(factor == 0, x.dtype.type(0), factor * (shift - x[np.arange(rows), index]))
    if smoothing:
        if weight is None:
            spread = shift * n - np.add.reduce(x, axis=1)
        else:
            counted = x if weight.all() else np.where(weight == 0, x.dtype.type(0), x)
            spread = shift * np.add.reduce(weight) - np.matmul(counted, weight.astype(x.dtype))
        loss = loss + (smoothing / n) * spread
    if index is not target:
        loss[~kept] = 0
    return loss, counts, shift


def cross_entropy_grad(
    scale: NDArray, x: NDArray, target: NDArray, weight: NDArray | None, ignore_index: int, smoothing: float, shift: NDArray
) -> NDArray:
    """Gradient of the logits.

    Args:
        scale: (rows,), gradient of each row's loss.
        x: logits, (rows, n).
        target: (rows,).
        weight: (n,) or None.
        ignore_index: a target with a row that counts for nothing.
        smoothing: label smoothing.
        shift: (rows,), log-sum-exp, as the forward gave it.

    Returns:
        (rows, n).
    """
    rows, n = x.shape
    kept = target != ignore_index
    if kept.all():
        index = target
    else:
        index, scale = np.where(kept, target, 0), np.where(kept, scale, scale.dtype.type(0))
    kernels = compiled(x.size, x, scale, shift)
    if kernels is not None:
        dx = np.empty((rows, n), x.dtype)
        w = nothing(x.dtype) if weight is None else flat(weight.astype(x.dtype, copy=False))
        index = np.ascontiguousarray(index, np.int64)
        run(kernels.softmax.cross_entropy_grad, rows, x.size, as_rows(x, n), index, flat(shift), flat(scale), w, float(smoothing), dx)
        return dx
    dx = x - shift[:, None]
    np.exp(dx, out=dx)
    hard = scale * (1.0 - smoothing)
    if weight is not None:
        hard = hard * weight[index].astype(x.dtype, copy=False)
    level = hard
    if smoothing:
        level = hard + scale * (smoothing / n * (n if weight is None else float(np.add.reduce(weight))))
    dx *= level[:, None]
    if smoothing:
        even = scale * (smoothing / n)
        dx -= even[:, None] if weight is None else even[:, None] * weight.astype(x.dtype, copy=False)
    dx[np.arange(rows), index] -= hard
    if index is not target:
        dx[~kept] = 0
    return dx

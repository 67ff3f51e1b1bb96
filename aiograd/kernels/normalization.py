"""Layer and RMS normalisation of rows, in one pass forward and one backward, and batch normalisation; numpy goes by blocks of rows in cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from aiograd.kernels.arrays import as_rows, contiguous, flat, nothing, row_blocks
from aiograd.kernels.pool import partition, run
from aiograd.kernels.selection import compiled

NDArray = npt.NDArray[Any]


#: how often the kernels of a norm go through their input, so that compiled ones serve smaller arrays than a single pass would
_PASSES = 4


def _or_nothing(x: NDArray | None, dtype: np.dtype[Any]) -> NDArray:
    return nothing(dtype) if x is None else flat(x)


def _or_ones(x: NDArray | None, n: int, dtype: np.dtype[Any]) -> NDArray:
    return np.ones(n, dtype) if x is None else flat(x)


def layer_norm(x: NDArray, weight: NDArray | None, bias: NDArray | None, eps: float) -> tuple[NDArray, NDArray, NDArray]:
    """Standardise rows, then scale and shift.

    Args:
        x: (rows, n), n > 0.
        weight: (n,) or None.
        bias: (n,) or None.
        eps: added to the variance.

    Returns:
        The result, and the mean and reciprocal deviation of each row.
    """
    rows, n = x.shape
    kernels = compiled(_PASSES * x.size, x, weight, bias)
    if kernels is not None:
        out, mean, rstd = np.empty((rows, n), x.dtype), np.empty(rows, x.dtype), np.empty(rows, x.dtype)
        w, b = _or_nothing(weight, x.dtype), _or_nothing(bias, x.dtype)
        run(kernels.normalization.layer_norm, rows, x.size, as_rows(x, n), w, b, float(eps), out, mean, rstd)
        return out, mean, rstd
    dtype = np.result_type(x, *(v for v in (weight, bias) if v is not None))
    out, mean, rstd = np.empty((rows, n), dtype), np.empty(rows, x.dtype), np.empty(rows, x.dtype)
    for low, block in _blocks(x):
        m = np.add.reduce(block, axis=1)
        m /= n
        centred = block - m[:, None]
        r = np.einsum("ij,ij->i", centred, centred)
        r /= n
        r += eps
        np.sqrt(r, out=r)
        np.reciprocal(r, out=r)
        centred *= r[:, None]
        target = out[low : low + len(block)]
        _scale(centred, weight, bias, target)
        mean[low : low + len(block)], rstd[low : low + len(block)] = m, r
    return out, mean, rstd


def _blocks(x: NDArray) -> list[tuple[int, NDArray]]:
    starts = row_blocks(*x.shape)
    return [(low, x[low : low + starts.step]) for low in starts]


def _scale(unit: NDArray, weight: NDArray | None, bias: NDArray | None, out: NDArray) -> None:
    if weight is not None:
        np.multiply(unit, weight, out=out)
        unit = out
    if bias is not None:
        np.add(unit, bias, out=out)
    elif weight is None:
        np.copyto(out, unit)


def layer_norm_grad(
    g: NDArray, x: NDArray, weight: NDArray | None, mean: NDArray, rstd: NDArray, needs: tuple[bool, bool, bool] = (True, True, True)
) -> tuple[NDArray | None, NDArray | None, NDArray | None]:
    """Gradients of `layer_norm`.

    Args:
        g: (rows, n).
        x: (rows, n).
        weight: (n,) or None.
        mean: (rows,), as the forward gave it.
        rstd: (rows,), likewise.
        needs: for x, weight and bias, True if the gradient is wanted.

    Returns:
        The wanted gradients; None for the others.
    """
    rows, n = x.shape
    dtype = np.result_type(g, x)
    kernels = compiled(_PASSES * x.size, x, g, weight, mean, rstd)
    if kernels is not None:
        blocks = partition(rows, x.size)[0]
        out, dw, db = np.empty((rows, n), dtype), np.empty((blocks, n), dtype), np.empty((blocks, n), dtype)
        w = _or_ones(weight, n, dtype)
        run(kernels.normalization.layer_norm_grad, rows, x.size, as_rows(g, n), as_rows(x, n), w, mean, rstd, out, dw, db)
        return out if needs[0] else None, np.add.reduce(dw, axis=0) if needs[1] else None, np.add.reduce(db, axis=0) if needs[2] else None
    dx = np.empty((rows, n), dtype) if needs[0] else None
    dweight = np.zeros(n, dtype) if needs[1] else None
    dbias = np.add.reduce(g, axis=0) if needs[2] else None
    if dx is None and dweight is None:
        return None, None, dbias
    for low, block in _blocks(x):
        part = slice(low, low + len(block))
        grad = g[part]
        unit = block - mean[part, None]
        unit *= rstd[part, None]
        if dweight is not None:
            dweight += np.einsum("ij,ij->j", grad, unit)
        if dx is not None:
            line = dx[part]
            scaled = grad if weight is None else np.multiply(grad, weight, out=line)
            first, second = np.add.reduce(scaled, axis=1) / n, np.einsum("ij,ij->i", scaled, unit) / n
            unit *= second[:, None]
            np.subtract(scaled, unit, out=line)
            line -= first[:, None]
            line *= rstd[part, None]
    return dx, dweight, dbias


def rms_norm(x: NDArray, weight: NDArray | None, eps: float) -> tuple[NDArray, NDArray]:
    """Divide rows by their root mean square, then scale.

    Args:
        x: (rows, n), n > 0.
        weight: (n,) or None.
        eps: added to the mean square.

    Returns:
        The result, and what each row was multiplied by.
    """
    rows, n = x.shape
    kernels = compiled(x.size, x, weight)
    if kernels is not None:
        out, scale = np.empty((rows, n), x.dtype), np.empty(rows, x.dtype)
        run(kernels.normalization.rms_norm, rows, x.size, as_rows(x, n), _or_nothing(weight, x.dtype), float(eps), out, scale)
        return out, scale
    scale = np.einsum("ij,ij->i", x, x)
    scale /= n
    scale += eps
    np.sqrt(scale, out=scale)
    np.reciprocal(scale, out=scale)
    out = x * scale[:, None]
    return (out if weight is None else out * weight), scale


def rms_norm_grad(
    g: NDArray, x: NDArray, weight: NDArray | None, scale: NDArray, needs: tuple[bool, bool] = (True, True)
) -> tuple[NDArray | None, NDArray | None]:
    """Gradients of `rms_norm` with respect to x and weight, None for an unwanted one."""
    rows, n = x.shape
    dtype = np.result_type(g, x)
    dx = np.empty((rows, n), dtype) if needs[0] else None
    kernels = compiled(x.size, x, g, weight, scale)
    if kernels is not None:
        none = nothing(dtype, 2)
        dw = np.empty((partition(rows, x.size)[0], n), dtype) if needs[1] else none
        run(
            kernels.normalization.rms_norm_grad, rows, x.size, as_rows(g, n), as_rows(x, n), _or_nothing(weight, dtype), scale,
            none if dx is None else dx, dw,
        )
        return dx, np.add.reduce(dw, axis=0) if needs[1] else None
    dweight = np.zeros(n, dtype) if needs[1] else None
    for low, block in _blocks(x):
        part = slice(low, low + len(block))
        grad = g[part]
        unit = block * scale[part, None]
        if dweight is not None:
            dweight += np.einsum("ij,ij->j", grad, unit)
        if dx is not None:
            line = dx[part]
            scaled = grad if weight is None else np.multiply(grad, weight, out=line)
            unit *= (np.einsum("ij,ij->i", scaled, unit) / n)[:, None]
            np.subtract(scaled, unit, out=line)
            line *= scale[part, None]
    return dx, dweight


#: values per channel and sample from which the compiled batch normalisation goes by channels; of one it goes by columns, and numpy between
_SHORT = 8


def _goes_by_loops(length: int) -> bool:
    return length == 1 or length >= _SHORT


def _channel_total(x: NDArray) -> NDArray:
    """Sums of the channels of (N, C, L)."""
    total: NDArray = np.add.reduce(x[:, :, 0] if x.shape[2] == 1 else np.add.reduce(x, axis=2), axis=0)
    return total


def _channel_dot(a: NDArray, b: NDArray) -> NDArray:
    """Sums of products over the channels of two (N, C, L)."""
    if a.shape[2] == 1:
        columns: NDArray = np.einsum("nc,nc->c", a[:, :, 0], b[:, :, 0])
        return columns
    total: NDArray = np.add.reduce(np.einsum("ncl,ncl->nc", a, b), axis=0)
    return total


def batch_norm(x: NDArray, weight: NDArray | None, bias: NDArray | None, eps: float) -> tuple[NDArray, NDArray, NDArray, NDArray]:
    """Standardise channels over the batch, then scale and shift.

    Args:
        x: (N, C, L), not empty.
        weight: (C,) of the same dtype, or None.
        bias: likewise.
        eps: added to the variance.

    Returns:
        The result, and the mean, the biased variance and the reciprocal deviation of each channel.
    """
    n, c, length = x.shape
    kernels = compiled(_PASSES * x.size, x, weight, bias) if _goes_by_loops(length) else None
    if kernels is not None and length == 1:
        out = np.empty((n, c, 1), x.dtype)
        mean, var, rstd = (np.empty(c, x.dtype) for _ in range(3))
        w, b = _or_ones(weight, c, x.dtype), np.zeros(c, x.dtype) if bias is None else flat(bias)
        run(kernels.normalization.batch_norm_columns, c, x.size, contiguous(x)[:, :, 0], w, b, float(eps), out[:, :, 0], mean, var, rstd)
        return out, mean, var, rstd
    if kernels is not None:
        out = np.empty((n, c, length), x.dtype)
        mean, var, rstd = (np.empty(c, x.dtype) for _ in range(3))
        w, b = _or_nothing(weight, x.dtype), _or_nothing(bias, x.dtype)
        run(kernels.normalization.batch_norm, c, x.size, contiguous(x), w, b, float(eps), out, mean, var, rstd)
        return out, mean, var, rstd
    mean = _channel_total(x)
    mean /= n * length
    out = x - mean[:, None]
    var = _channel_dot(out, out)
    var /= n * length
    rstd = var + eps
    np.sqrt(rstd, out=rstd)
    np.reciprocal(rstd, out=rstd)
    out *= (rstd if weight is None else rstd * weight)[:, None]
    if bias is not None:
        out += bias[:, None]
    return out, mean, var, rstd


def batch_norm_grad(
    g: NDArray, x: NDArray, weight: NDArray | None, mean: NDArray, rstd: NDArray, needs_x: bool = True
) -> tuple[NDArray | None, NDArray, NDArray]:
    """Gradients of `batch_norm`.

    Args:
        g: (N, C, L).
        x: (N, C, L).
        weight: (C,) or None.
        mean: (C,), as the forward gave it.
        rstd: (C,), likewise.
        needs_x: True if the gradient of x is wanted.

    Returns:
        Of x (None if not asked for), weight and bias.
    """
    n, c, length = x.shape
    kernels = compiled(_PASSES * x.size, x, g, weight, mean, rstd) if _goes_by_loops(length) else None
    if kernels is not None and length == 1:
        dx = np.empty((n, c, 1) if needs_x else (0, 0, 1), x.dtype)
        dweight, dbias = np.empty(c, x.dtype), np.empty(c, x.dtype)
        w = _or_ones(weight, c, x.dtype)
        run(
            kernels.normalization.batch_norm_columns_grad, c, x.size, contiguous(g)[:, :, 0], contiguous(x)[:, :, 0], w, mean, rstd, dx[:, :, 0],
            dweight, dbias,
        )
        return dx if needs_x else None, dweight, dbias
    if kernels is not None:
        dx = np.empty((n, c, length) if needs_x else (0, 0, 0), x.dtype)
        dweight, dbias = np.empty(c, x.dtype), np.empty(c, x.dtype)
        w = _or_nothing(weight, x.dtype)
        run(kernels.normalization.batch_norm_grad, c, x.size, contiguous(g), contiguous(x), w, mean, rstd, dx, dweight, dbias)
        return dx if needs_x else None, dweight, dbias
    dbias = _channel_total(g)
    unit = x - mean[:, None]
    unit *= rstd[:, None]
    dweight = _channel_dot(g, unit)
    if not needs_x:
        return None, dweight, dbias
    unit *= (dweight / (n * length))[:, None]
    unit += (dbias / (n * length))[:, None]
    np.subtract(g, unit, out=unit)
    unit *= (rstd if weight is None else rstd * weight)[:, None]
    return unit, dweight, dbias

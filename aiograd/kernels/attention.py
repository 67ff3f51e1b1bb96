"""Scaled dot-product attention that keeps one number per query for backward."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from aiograd.kernels.pool import run
from aiograd.kernels.selection import compiled

NDArray = npt.NDArray[Any]


def _heads(x: NDArray, leading: tuple[int, ...]) -> NDArray:
    """(..., rows, features) broadcast to the leading axes, as (batch, heads, rows, features); a view where the layout allows."""
    batch, heads = (math.prod(leading[:-1]), leading[-1]) if leading else (1, 1)
    x = np.asarray(x)
    if x.shape[:-2] != leading:
        x = np.broadcast_to(x, (*leading, *x.shape[-2:]))
    x = x.reshape(batch, heads, *x.shape[-2:])
    return x if x.flags.aligned else x.copy()


def _like(x: NDArray, shape: tuple[int, ...]) -> NDArray:
    """An array of `shape` (batch, heads, rows, features) with its axes in the memory order of `x`.

    A query that is a transposed view of (batch, rows, heads, features) gets a result of the same kind, so that transposing back and
    joining the heads needs no copy.
    """
    if x.strides[1] < x.strides[2]:
        return np.empty((shape[0], shape[2], shape[1], shape[3]), x.dtype).swapaxes(1, 2)
    return np.empty(shape, x.dtype)


def _leading(*arrays: NDArray | None) -> tuple[int, ...]:
    shapes = [a.shape[:-2] for a in arrays if a is not None]
    return shapes[0] if all(s == shapes[0] for s in shapes) else np.broadcast_shapes(*shapes)


def _added(allowed: NDArray | None, added: NDArray | None, dtype: np.dtype[Any]) -> NDArray | None:
    """One array to add to the scores: minus infinity where they do not take part."""
    if allowed is None:
        return added
    blocked: NDArray = np.where(allowed, dtype.type(0), dtype.type(-np.inf))
    return blocked if added is None else np.add(blocked, added)


def _scores(q: NDArray, k: NDArray, allowed: NDArray | None, added: NDArray | None, causal: bool, scale: float) -> NDArray:
    scores: NDArray = np.matmul(q * q.dtype.type(scale), np.swapaxes(k, -1, -2))
    mask = _added(allowed, added, scores.dtype)
    if mask is not None:
        scores = scores + mask
    if causal:
        scores += np.where(np.tri(*scores.shape[-2:], dtype=np.bool_), scores.dtype.type(0), scores.dtype.type(-np.inf))
    return scores


def attention(
    q: NDArray, k: NDArray, v: NDArray, allowed: NDArray | None, added: NDArray | None, causal: bool, scale: float
) -> tuple[NDArray, NDArray]:
    """``softmax(scale * q @ k.mT + mask) @ v``.

    Args:
        q: (..., L, E). Leading axes broadcast.
        k: (..., S, E).
        v: (..., S, V).
        allowed: (..., L, S), which scores take part, or None.
        added: (..., L, S), added to the scores, or None.
        causal: query i sees keys 0 to i.
        scale: of the scores.

    Returns:
        The result (..., L, V), and the log-sum-exp of each query's scores (..., L), infinite for a query that sees nothing.
    """
    leading = _leading(q, k, v, allowed, added)
    rows, length = q.shape[-2], k.shape[-2]
    kernels = compiled(math.prod(leading) * rows * length, q, k, v, added)
    if kernels is not None:
        q4, k4, v4 = _heads(q, leading), _heads(k, leading), _heads(v, leading)
        mask = _mask(allowed, added, leading, rows, length, q.dtype)
        out = _like(q4, (*q4.shape[:3], v.shape[-1]))
        shift = np.empty(q4.shape[:3], q.dtype)
        count = q4.shape[0] * q4.shape[1]
        work = count * rows * length * (q.shape[-1] + v.shape[-1]) // 16
        run(
            kernels.attention.attention, count, work, q4, k4, v4, mask, bool(causal), float(scale), kernels.gemm_microkernel.width(q.dtype), out,
            shift,
        )  # fmt: skip
        return out.reshape(*leading, *out.shape[2:]), shift.reshape(*leading, rows)
    scores = _scores(q, k, allowed, added, causal, scale)
    top = np.maximum.reduce(scores, axis=-1, keepdims=True, initial=-np.inf)  # there may be no keys
    np.copyto(top, scores.dtype.type(0), where=top == -np.inf)
    scores -= top
    np.exp(scores, out=scores)
    total = np.add.reduce(scores, axis=-1, keepdims=True)
    empty = total == 0
    np.copyto(total, scores.dtype.type(1), where=empty)
    scores /= total
    shift = np.where(empty, scores.dtype.type(np.inf), np.log(total) + top)[..., 0]
    return np.matmul(scores, v), shift


def _mask(allowed: NDArray | None, added: NDArray | None, leading: tuple[int, ...], rows: int, length: int, dtype: np.dtype[Any]) -> NDArray:
    mask = _added(allowed, added, dtype)
    if mask is None:
        return np.empty((0, 0, 0, 0), dtype)
    return _heads(np.broadcast_to(mask, (*mask.shape[:-2], rows, length)), leading)


def attention_grad(
    g: NDArray,
    q: NDArray,
    k: NDArray,
    v: NDArray,
    allowed: NDArray | None,
    added: NDArray | None,
    causal: bool,
    scale: float,
    shift: NDArray,
    needs_mask: bool,
) -> tuple[NDArray, NDArray, NDArray, NDArray | None]:
    """Gradients of `attention` with respect to q, k, v and the array added to the scores (None unless asked for), broadcast."""
    leading = _leading(q, k, v, allowed, added)
    rows, length = q.shape[-2], k.shape[-2]
    kernels = compiled(math.prod(leading) * rows * length, q, k, v, added, g, shift)
    if kernels is not None:
        q4, k4, v4, g4 = (_heads(x, leading) for x in (q, k, v, g))
        mask = _mask(allowed, added, leading, rows, length, q.dtype)
        dq, dk, dv = _like(q4, q4.shape), _like(k4, k4.shape), _like(v4, v4.shape)
        dmask = np.empty((*q4.shape[:3], length) if needs_mask else (0, 0, 0, 0), q.dtype)
        count = q4.shape[0] * q4.shape[1]
        run(
            kernels.attention.attention_grad, count, count * rows * length * (q.shape[-1] + v.shape[-1]) // 8, g4, q4, k4, v4, mask,
            np.ascontiguousarray(shift).reshape(q4.shape[:3]), bool(causal), float(scale), kernels.gemm_microkernel.width(q.dtype), dq, dk, dv, dmask,
        )
        results = [x.reshape(*leading, *x.shape[2:]) for x in (dq, dk, dv)]
        return results[0], results[1], results[2], dmask.reshape(*leading, rows, length) if needs_mask else None
    weights = _scores(q, k, allowed, added, causal, scale)
    weights -= shift[..., None]
    np.exp(weights, out=weights)
    slopes = np.matmul(g, np.swapaxes(v, -1, -2))
    slopes -= np.einsum("...ls,...ls->...l", slopes, weights)[..., None]
    slopes *= weights
    factor = q.dtype.type(scale)
    dq, dk = np.matmul(slopes, k) * factor, np.matmul(np.swapaxes(slopes, -1, -2), q) * factor
    return dq, dk, np.matmul(np.swapaxes(weights, -1, -2), g), slopes if needs_mask else None

"""Scaled dot-product attention as one row.

The plain rule recomputes the attention weights from the scores, so the row keeps its arguments only; the kernels keep one number per
query besides, and compute the weights again by blocks.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from aiograd.errors import ArgumentTypeError, ShapeError
from aiograd.kernels import attention as kernels
from aiograd.ops.linalg import GEMM_RATE
from aiograd.ops.nn_softmax import safe_softmax, softmax_vjp
from aiograd.ops.op import Fused, define
from aiograd.running.types import Array, Shape


def _mT(x: Array) -> Array:
    return np.swapaxes(x, -1, -2)


def attention_scale(q: Array, scale: float | None) -> float:
    """`scale`, by default one over the root of the number of features."""
    return 1.0 / math.sqrt(q.shape[-1]) if scale is None else float(scale)


def attention_mask(mask: Array, is_causal: bool, queries: int, keys: int) -> tuple[Array, Array]:
    """``(allowed, added)``: a boolean array of scores that take part (or None), and an array that is added to the scores (or None)."""
    allowed: Array = np.tri(queries, keys, dtype=np.bool_) if is_causal else None
    if mask is None:
        return allowed, None
    if mask.dtype == np.bool_:
        return (mask if allowed is None else np.logical_and(mask, allowed)), None
    return allowed, mask


def _weights(q: Array, k: Array, mask: Array, is_causal: bool, scale: float | None) -> Array:
    scores = np.matmul(q * attention_scale(q, scale), _mT(k))
    allowed, added = attention_mask(mask, is_causal, q.shape[-2], k.shape[-2])
    if added is not None:
        scores = scores + added
    if allowed is not None:
        scores = np.where(allowed, scores, np.array(-np.inf, scores.dtype))
    return safe_softmax(scores, axis=-1)


def check_attention(q: Array, k: Array, v: Array, mask: Array) -> None:
    """Refuse shapes and masks that do not fit.

    Raises:
        ShapeError: shapes; ArgumentTypeError: a mask that is neither boolean nor floating.
    """
    if min(q.ndim, k.ndim, v.ndim) < 2 or q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2] or not k.shape[-1]:
        found = f"q {q.shape}, k {k.shape}, v {v.shape}"
        raise ShapeError(f"attention: found {found}; expected q (..., L, E), k (..., S, E), v (..., S, V), E > 0")
    if mask is not None and mask.dtype != np.bool_ and mask.dtype.kind != "f":
        raise ArgumentTypeError(f"attention: the mask has dtype {mask.dtype}, expected bool (True takes part) or floating (added to the scores)")


def _attention(q: Array, k: Array, v: Array, mask: Array = None, /, is_causal: bool = False, scale: float | None = None) -> Array:
    """``softmax(scale * q @ k.mT + mask) @ v``.

    Args:
        q: (..., L, E). Leading axes broadcast.
        k: (..., S, E).
        v: (..., S, V).
        mask: (..., L, S), boolean (True takes part) or floating (added to the scores), or absent.
        is_causal: query i attends to keys 0 to i only.
        scale: of the scores; None: ``1 / sqrt(E)``.

    Returns:
        (..., L, V). A query that may attend to no key gives zeros, as all do where there are no keys.
    """
    check_attention(q, k, v, mask)
    return np.matmul(_weights(q, k, mask, is_causal, scale), v)


def _attention_vjp(
    g: Array, needs: tuple[bool, ...], q: Array, k: Array, v: Array, mask: Array, is_causal: bool, scale: float | None
) -> tuple[Any, ...]:
    weights = _weights(q, k, mask, is_causal, scale)
    dv = np.matmul(_mT(weights), g) if needs[2] else None
    if not (needs[0] or needs[1] or needs[3]):
        return None, None, dv, None
    dscores = softmax_vjp(np.matmul(g, _mT(v)), weights, -1)
    factor = attention_scale(q, scale)
    dq = np.matmul(dscores, k) * factor if needs[0] else None
    dk = np.matmul(_mT(dscores), q) * factor if needs[1] else None
    return dq, dk, dv, dscores if needs[3] else None


def _attention_jvp(t: tuple[Array | None, ...], q: Array, k: Array, v: Array, mask: Array, is_causal: bool, scale: float | None) -> Array:
    weights, factor = _weights(q, k, mask, is_causal, scale), attention_scale(q, scale)
    parts = [] if t[0] is None else [np.matmul(t[0] * factor, _mT(k))]
    if t[1] is not None:
        parts.append(np.matmul(q * factor, _mT(t[1])))
    if t[3] is not None:
        parts.append(t[3])
    through = None if t[2] is None else np.matmul(weights, t[2])
    if not parts:
        return through
    dscores = parts[0]
    for part in parts[1:]:
        dscores = dscores + part
    moved = np.matmul(softmax_vjp(dscores, weights, -1), v)
    return moved if through is None else moved + through


def _cost(output: Shape, inputs: tuple[Shape, ...]) -> float:
    q, k, v = inputs[:3]
    return math.prod(q[:-1]) * k[-2] * (2.0 * (q[-1] + v[-1]) / GEMM_RATE + 2.0)


def _split_mask(mask: Array) -> tuple[Array, Array]:
    if mask is None:
        return None, None
    return (mask, None) if mask.dtype == np.bool_ else (None, mask)


def _fused_attention(q: Array, k: Array, v: Array, mask: Array, is_causal: bool, scale: float | None) -> tuple[Array, Array]:
    check_attention(q, k, v, mask)
    return kernels.attention(q, k, v, *_split_mask(mask), is_causal, attention_scale(q, scale))


def _fused_attention_vjp(
    g: Array, needs: tuple[bool, ...], q: Array, k: Array, v: Array, mask: Array, shift: Array, is_causal: bool, scale: float | None
) -> tuple[Any, ...]:
    return kernels.attention_grad(g, q, k, v, *_split_mask(mask), is_causal, attention_scale(q, scale), shift, needs[3])


scaled_dot_product_attention = define(
    "scaled_dot_product_attention",
    _attention,
    joint={("q", "k", "v", "mask"): _attention_vjp},
    jvp=_attention_jvp, cost=_cost,
    fused=Fused(_fused_attention, ("shift",), joint={("q", "k", "v", "mask"): _fused_attention_vjp}),
)

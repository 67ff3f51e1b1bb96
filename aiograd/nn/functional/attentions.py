"""Dropout and scaled dot-product attention as functions."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np

from aiograd.array_functions.conversion import ArrayLike, as_tensor, as_tensors, row
from aiograd.array_functions.manipulation import matrix_transpose, repeat
from aiograd.array_functions.searching import where
from aiograd.errors import ArgumentError, ShapeError
from aiograd.nn.functional.documentation import document
from aiograd.running.random import Generator, default_generator
from aiograd.tensors.record import call
from aiograd.tensors.tensor import Tensor

_attention = row("scaled_dot_product_attention")


def dropout(input: ArrayLike, p: float = 0.5, training: bool = True, *, generator: Generator | None = None) -> Tensor:
    """Each element set to 0 with probability `p`, the others scaled so that the mean stays; nothing changes unless `training`.

    Raises:
        ArgumentError: `p` is no probability.
    """
    x = as_tensor(input)
    if not 0 <= p <= 1:
        raise ArgumentError(f"dropout(p={p}): expected a probability between 0 and 1")
    if not training or p == 0:
        return x
    return x * (generator or default_generator()).dropout_mask(x.shape, p, dtype=x.dtype, device=x.device)


def _dropped_channels(name: str, axes: int, input: ArrayLike, p: float, training: bool, generator: Generator | None) -> Tensor:
    x = as_tensor(input)
    if x.ndim not in (axes + 1, axes + 2):
        raise ShapeError(f"{name}: found shape {list(x.shape)}, expected (N, C) or (C,) and {axes} more axes")
    if not 0 <= p <= 1:
        raise ArgumentError(f"{name}(p={p}): expected a probability between 0 and 1")
    if not training or p == 0:
        return x
    channels = x.ndim - axes if (axes, x.ndim) != (2, 3) else 2
    shape = (*x.shape[:channels], *(1,) * (x.ndim - channels))
    return x * (generator or default_generator()).dropout_mask(shape, p, dtype=x.dtype, device=x.device)


def dropout1d(input: ArrayLike, p: float = 0.5, training: bool = True, *, generator: Generator | None = None) -> Tensor:
    """`dropout` of whole channels of lines: a channel is kept or set to 0 as one."""
    return _dropped_channels("dropout1d", 1, input, p, training, generator)


def dropout2d(input: ArrayLike, p: float = 0.5, training: bool = True, *, generator: Generator | None = None) -> Tensor:
    """`dropout` of whole channels of images."""
    return _dropped_channels("dropout2d", 2, input, p, training, generator)


def dropout3d(input: ArrayLike, p: float = 0.5, training: bool = True, *, generator: Generator | None = None) -> Tensor:
    """`dropout` of whole channels of volumes."""
    return _dropped_channels("dropout3d", 3, input, p, training, generator)


def scaled_dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    attn_mask: ArrayLike | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    generator: Generator | None = None,
) -> Tensor:
    """``softmax(scale * query @ key.mT + attn_mask) @ value``.

    Args:
        query: (..., L, E). Leading axes broadcast.
        key: (..., S, E).
        value: (..., S, V).
        attn_mask: (..., L, S), boolean (True takes part) or floating (added to the scores), or None.
        dropout_p: probability with which attention weights are dropped; always applied when above 0.
        is_causal: query i attends to keys 0 to i only.
        scale: of the scores; None: ``1 / sqrt(E)``.
        enable_gqa: True where several heads of the query share one of key and value: (..., Hq, L, E) with (..., H, S, E), H dividing Hq.
        generator: for dropout; the default generator if None.

    Returns:
        (..., L, V). A query that may attend to no key gives zeros, as all do where there are no keys.

    Raises:
        ShapeError: heads that do not divide.
    """
    if enable_gqa:
        key, value = _shared_heads(as_tensor(query), key), _shared_heads(as_tensor(query), value)
    if dropout_p == 0:
        return call(_attention, (query, key, value, attn_mask), {"is_causal": is_causal, "scale": scale})  # type: ignore[no-any-return]
    weights = attention_weights(query, key, attn_mask, is_causal, scale)
    return dropout(weights, dropout_p, generator=generator) @ as_tensor(value)


def _shared_heads(query: Tensor, x: ArrayLike) -> Tensor:
    """Keys or values, each head as often as heads of the query share it."""
    shared = as_tensor(x)
    if query.ndim < 3 or shared.ndim < 3 or not shared.shape[-3] or query.shape[-3] % shared.shape[-3]:
        raise ShapeError(
            f"scaled_dot_product_attention(enable_gqa=True): found query {list(query.shape)} and {list(shared.shape)}; expected heads in the third "
            "axis from the end, those of key and value dividing those of the query"
        )
    return repeat(shared, query.shape[-3] // shared.shape[-3], axis=-3)


def attention_weights(
    query: ArrayLike, key: ArrayLike, attn_mask: ArrayLike | None = None, is_causal: bool = False, scale: float | None = None
) -> Tensor:
    """The weights (..., L, S) that `scaled_dot_product_attention` multiplies the values with; arguments as there."""
    q, k = as_tensors(query, key)
    scores = (q * (1.0 / math.sqrt(q.shape[-1]) if scale is None else scale)) @ matrix_transpose(k)
    allowed: Any = as_tensor(np.tri(scores.shape[-2], scores.shape[-1], dtype=np.bool_)).to(scores.device) if is_causal else None
    if attn_mask is not None:
        mask = as_tensor(attn_mask)
        if mask.dtype == np.bool_:
            allowed = mask if allowed is None else mask & allowed
        else:
            scores = scores + mask
    if allowed is not None:
        scores = where(allowed, scores, -math.inf)
    return call(row("safe_softmax"), (scores,), {"axis": -1})  # type: ignore[no-any-return]


document(sys.modules[__name__])

"""Dropout and scaled dot-product attention as functions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from aiograd.array_functions.conversion import ArrayLike, as_tensor, as_tensors, row
from aiograd.array_functions.manipulation import matrix_transpose
from aiograd.array_functions.searching import where
from aiograd.errors import ArgumentError
from aiograd.random import Generator, default_generator
from aiograd.tensors.record import call
from aiograd.tensors.tensor import Tensor

_attention = row("scaled_dot_product_attention")


def dropout(input: ArrayLike, p: float = 0.5, training: bool = True, *, generator: Generator | None = None) -> Tensor:
    """Each element set to 0 with probability `p`, the others scaled so that the mean stays; nothing changes unless `training`.

    Args:
        input: any shape, real floating.
        p: in [0, 1].
        training: True to drop.
        generator: the generator to draw from; the default generator if None.

    Returns:
        A Tensor of the shape of `input`; `input` itself if nothing is dropped.

    Raises:
        ArgumentError: `p` is no probability.
    """
    x = as_tensor(input)
    if not 0 <= p <= 1:
        raise ArgumentError(f"dropout(p={p}): expected a probability between 0 and 1")
    if not training or p == 0:
        return x
    return x * (generator or default_generator()).dropout_mask(x.shape, p, dtype=x.dtype, device=x.device)


def scaled_dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    attn_mask: ArrayLike | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
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
        generator: for dropout; the default generator if None.

    Returns:
        (..., L, V). A query that may attend to no key gives zeros, as all do where there are no keys.
    """
    if dropout_p == 0:
        return call(_attention, (query, key, value, attn_mask), {"is_causal": is_causal, "scale": scale})  # type: ignore[no-any-return]
    weights = attention_weights(query, key, attn_mask, is_causal, scale)
    return dropout(weights, dropout_p, generator=generator) @ as_tensor(value)


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

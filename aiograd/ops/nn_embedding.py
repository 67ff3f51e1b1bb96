"""Looking up rows of a matrix, and its adjoint: adding rows into a matrix."""

from __future__ import annotations

import numpy as np

from aiograd.errors import ArgumentError, ArgumentTypeError, ShapeError
from aiograd.kernels.layout import scatter_rows
from aiograd.ops.op import Op, define
from aiograd.running.types import Array


def checked_indices(name: str, indices: Array, rows: int) -> Array:
    """`indices` as an integer ndarray with values in [0, rows).

    Raises:
        ArgumentTypeError: not integers; ArgumentError: out of range.
    """
    indices = np.asarray(indices)
    if indices.dtype.kind not in "iu":
        raise ArgumentTypeError(f"{name}: indices have dtype {indices.dtype}, expected integers")
    if indices.size and (indices.min() < 0 or indices.max() >= rows):
        raise ArgumentError(f"{name}: indices run from {indices.min()} to {indices.max()}, expected 0 to {rows - 1}")
    return indices


def _embedding(weight: Array, /, indices: Array, padding_idx: int | None = None) -> Array:
    """Rows of `weight`.

    Args:
        weight: (rows, features).
        indices: integers of any shape.
        padding_idx: a row that takes no gradient.

    Returns:
        (*indices.shape, features).
    """
    if weight.ndim != 2:
        raise ShapeError(f"embedding: weight has shape {weight.shape}, expected (rows, features)")
    return np.take(weight, checked_indices("embedding", indices, weight.shape[0]), axis=0)


def _embedding_grad(rows: Array, /, indices: Array, num_embeddings: int, padding_idx: int | None = None) -> Array:
    """Add each of `rows` into the row its index names.

    Args:
        rows: (*indices.shape, features).
        indices: integers.
        num_embeddings: rows of the result.
        padding_idx: a row that stays zero.

    Returns:
        (num_embeddings, features).
    """
    flat = checked_indices("embedding_grad", indices, num_embeddings).reshape(-1)
    out = scatter_rows(np.reshape(rows, (flat.size, rows.shape[-1])), flat, num_embeddings)
    if padding_idx is not None:
        out[padding_idx] = 0
    return out


def _embedding_grad_rows(g: Array, indices: Array, padding_idx: int | None) -> Array:
    taken = embedding(g, indices=indices, padding_idx=padding_idx)
    if padding_idx is None:
        return taken
    return taken * np.expand_dims((indices if hasattr(indices, "__aiograd_device__") else np.asarray(indices)) != padding_idx, -1).astype(g.dtype)


def _factors(g: Array, indices: Array, padding_idx: int | None) -> tuple[Array, Array]:
    return indices, g if padding_idx is None else g * np.expand_dims(indices != padding_idx, -1)


embedding = define(
    "embedding",
    _embedding,
    weight=lambda g, weight_shape, indices, padding_idx: embedding_grad(
        g, indices=indices, num_embeddings=weight_shape[0], padding_idx=padding_idx
    ),
    norm={"weight": _factors},
    jvp=lambda t, indices, padding_idx: _embedding_grad_rows(t, indices, padding_idx), cost=4.0,
)
embedding_grad: Op = define("embedding_grad", _embedding_grad, rows=_embedding_grad_rows, jvp="forward", cost=2.0)

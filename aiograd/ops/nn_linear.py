"""The affine map ``x @ weight.T + bias`` as one row: three GEMMs and a column sum, for any number of leading axes."""

from __future__ import annotations

import math

import numpy as np

from aiograd.errors import ShapeError
from aiograd.kernels.reduction import column_sum
from aiograd.ops.linalg import GEMM_RATE, product
from aiograd.ops.op import Fused, Op, define
from aiograd.running.types import Array, Shape


def as_rows(x: Array) -> Array:
    """`x` with its leading axes folded into one: shape (rows, last)."""
    return x if x.ndim == 2 else np.reshape(x, (math.prod(x.shape[:-1]), x.shape[-1]))


def _linear(x: Array, weight: Array, bias: Array = None, /) -> Array:
    """Affine map of the last axis.

    Args:
        x: (..., in).
        weight: (out, in).
        bias: (out,) or absent.

    Returns:
        (..., out).

    Raises:
        ShapeError: the shapes do not fit.
    """
    if weight.ndim != 2 or x.ndim == 0 or x.shape[-1] != weight.shape[1] or (bias is not None and bias.shape != weight.shape[:1]):
        found = f"x {x.shape}, weight {weight.shape}" + ("" if bias is None else f", bias {bias.shape}")
        raise ShapeError(f"linear: found {found}; expected x (..., in), weight (out, in), bias (out,)")
    out = product(as_rows(x), weight.T, bias)
    return out if x.ndim == 2 else np.reshape(out, (*x.shape[:-1], weight.shape[0]))


def _cost(output: Shape, inputs: tuple[Shape, ...]) -> float:
    inner = (inputs[0] or inputs[1] or (1,))[-1]  # of an argument without gradient that was not saved the shape is not known
    return 2.0 * math.prod(output) * inner / GEMM_RATE


def _x(g: Array, weight: Array, x_shape: Shape) -> Array:
    if len(x_shape) == 2:
        return product(g, weight)
    return np.reshape(product(as_rows(g), weight), x_shape)


def _weight(g: Array, x: Array) -> Array:
    return product(as_rows(g).T, as_rows(x))


def _linear_jvp(t: tuple[Array | None, ...], x: Array, weight: Array) -> Array:
    out = None if t[0] is None else linear(t[0], weight)
    if t[1] is not None:
        part = linear(x, t[1])
        out = part if out is None else out + part
    return out if t[2] is None else t[2] if out is None else out + t[2]


linear: Op = define(
    "linear",
    _linear,
    x=_x,
    weight=_weight,
    bias=lambda g: np.sum(as_rows(g), axis=0),
    recorded={"x": lambda g, weight, x_shape: g @ weight if len(x_shape) == 2 else _x(g, weight, x_shape)},
    norm={"weight": lambda g, x: (g, x), "bias": lambda g: (np.ones((*g.shape[:-1], 1), g.dtype), g)},
    jvp=_linear_jvp, cost=_cost,
    fused=Fused(lambda x, weight, bias: (_linear(x, weight, bias),), (), {"x": _x, "weight": _weight, "bias": lambda g: column_sum(as_rows(g))}),
)

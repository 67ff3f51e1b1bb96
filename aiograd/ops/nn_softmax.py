"""Softmax along an axis, its logarithm, and the variant for masked scores."""

from __future__ import annotations

import numpy as np

from aiograd.kernels import softmax as kernels
from aiograd.ops.op import Fused, define
from aiograd.running.types import Array


def _softmax(x: Array, /, axis: int = -1) -> Array:
    """``exp(x) / sum(exp(x))`` along `axis`, safe from overflow; a number counts as a vector of one."""
    if not x.size:
        return kernels.nothing_along(x, axis)
    e = np.exp(x - np.max(x, axis=axis, keepdims=True))
    return e / np.sum(e, axis=axis, keepdims=True)


def _safe_softmax(x: Array, /, axis: int = -1) -> Array:
    """Softmax in which a slice of nothing but ``-inf`` gives zeros, not NaN: a query that may attend to nothing attends to nothing."""
    if not x.size:
        return kernels.nothing_along(x, axis)
    top = np.max(x, axis=axis, keepdims=True)
    e = np.exp(x - np.where(top == -np.inf, np.zeros((), top.dtype), top))
    total = np.sum(e, axis=axis, keepdims=True)
    return e / np.where(total == 0, np.ones((), total.dtype), total)


def _log_softmax(x: Array, /, axis: int = -1) -> Array:
    """``x - log(sum(exp(x)))`` along `axis`, safe from overflow; a number counts as a vector of one."""
    if not x.size:
        return kernels.nothing_along(x, axis)
    shifted = x - np.max(x, axis=axis, keepdims=True)
    return shifted - np.log(np.sum(np.exp(shifted), axis=axis, keepdims=True))


def softmax_vjp(g: Array, out: Array, axis: int) -> Array:
    """Gradient of softmax from its output."""
    return out * (g - np.sum(g * out, axis=axis, keepdims=True))


softmax = define(
    "softmax",
    _softmax,
    x=softmax_vjp,
    jvp="rule", cost=3.0,
    fused=Fused(lambda x, axis: (kernels.softmax(x, axis),), (), {"x": lambda g, out, axis: kernels.softmax_grad(g, out, axis)}),
)
safe_softmax = define("safe_softmax", _safe_softmax, x=softmax_vjp, jvp="rule", cost=3.0)
log_softmax = define(
    "log_softmax",
    _log_softmax,
    x=lambda g, out, axis: g - np.exp(out) * np.sum(g, axis=axis, keepdims=True),
    jvp=lambda t, out, axis: t - np.sum(np.exp(out) * t, axis=axis, keepdims=True),
    cost=4.0,
    fused=Fused(lambda x, axis: (kernels.log_softmax(x, axis),), (), {"x": lambda g, out, axis: kernels.log_softmax_grad(g, out, axis)}),
)

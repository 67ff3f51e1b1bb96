"""Optimizer steps in place on parameters and their state.

Arrays are C-contiguous, of one dtype and size; the parameter and the state are written to. numpy goes by blocks that stay in cache,
which is four times faster than one pass per operation over arrays that do not.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from aiograd.errors import ArgumentError
from aiograd.kernels.arrays import flat, nothing
from aiograd.kernels.pool import KernelBatch, run
from aiograd.kernels.selection import compiled

NDArray = npt.NDArray[Any]

_BLOCK = 16_384


def _lines(name: str, parameter: NDArray, gradient: NDArray, *state: NDArray | None) -> list[NDArray]:
    """The arrays as one axis each, an absent one as an empty array."""
    for label, array in (("parameter", parameter), *(("state", s) for s in state)):
        if array is not None and not (array.flags.c_contiguous and array.flags.writeable and array.flags.aligned):
            raise ArgumentError(f"{name}: {label} of shape {array.shape} must be C-contiguous and writeable, since it is updated in place")
        if array is not None and array.size != gradient.size:
            raise ArgumentError(f"{name}: {label} has {array.size} elements and the gradient {gradient.size}; expected the same number")
    return [nothing(parameter.dtype) if a is None else flat(a) for a in (parameter, gradient, *state)]


def sgd(
    parameter: NDArray,
    gradient: NDArray,
    velocity: NDArray | None = None,
    *,
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
    first: bool = False,
    batch: KernelBatch | None = None,
) -> None:
    """One step of gradient descent, in place.

    Args:
        parameter: any shape.
        gradient: the same shape.
        velocity: the same shape, or None for no momentum.
        lr: learning rate.
        momentum: how much of the velocity is kept.
        dampening: how much of the gradient is kept out of it.
        weight_decay: times the parameter is added to the gradient.
        nesterov: look ahead by one step.
        maximize: go up.
        first: the velocity is not set yet; it becomes the gradient.
        batch: takes the call of the compiled kernel; None: it is done at once.

    Raises:
        ArgumentError: an array that cannot be updated in place, or sizes that differ.
    """
    p, g, v = _lines("sgd", parameter, gradient, velocity)
    kernels = compiled(parameter.size, parameter, gradient, velocity)
    if kernels is not None:
        (run if batch is None else batch.add)(
            kernels.optimizer.sgd, parameter.size, parameter.size, p, g, v, float(lr), float(momentum), float(dampening),
            float(weight_decay), bool(nesterov), bool(maximize), bool(first),
        )
        return
    for low in range(0, p.size, _BLOCK):
        part = slice(low, low + _BLOCK)
        d = -g[part] if maximize else g[part]
        if weight_decay:
            d = d + weight_decay * p[part]
        if v.size:
            u = v[part]
            if first:
                u[:] = d
            else:
                u *= momentum
                u += (1.0 - dampening) * d
            d = d + momentum * u if nesterov else u
        p[part] -= lr * d


def adam(
    parameter: NDArray,
    gradient: NDArray,
    mean: NDArray,
    square: NDArray,
    largest: NDArray | None = None,
    *,
    step: int,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decoupled: bool = False,
    maximize: bool = False,
    batch: KernelBatch | None = None,
) -> None:
    """One step of Adam (or AdamW), in place.

    Args:
        parameter: any shape.
        gradient: the same shape.
        mean: running mean of the gradient, the same shape.
        square: running mean of its square, the same shape.
        largest: running maximum of `square` (AMSGrad), the same shape, or None.
        step: the number of this step, from 1.
        lr: learning rate.
        beta1: decay of `mean`.
        beta2: decay of `square`.
        eps: added to the root of the corrected square.
        weight_decay: times the parameter is added to the gradient, or taken off the parameter when decoupled.
        decoupled: AdamW.
        maximize: go up.
        batch: takes the call of the compiled kernel; None: it is done at once.

    Raises:
        ArgumentError: an array that cannot be updated in place, or sizes that differ.
    """
    p, g, m, v, top = _lines("adam", parameter, gradient, mean, square, largest)
    correction1, correction2 = 1.0 - beta1**step, 1.0 - beta2**step
    kernels = compiled(parameter.size, parameter, gradient, mean, square, largest)
    if kernels is not None:
        (run if batch is None else batch.add)(
            kernels.optimizer.adam, parameter.size, 2 * parameter.size, p, g, m, v, top, float(lr), float(beta1), float(beta2),
            float(eps), float(weight_decay), correction1, correction2, bool(decoupled), bool(maximize),
        )
        return
    root = 1.0 / math.sqrt(correction2)
    scratch, other = np.empty(min(_BLOCK, p.size), p.dtype), np.empty(min(_BLOCK, p.size), p.dtype)
    for low in range(0, p.size, _BLOCK):
        part = slice(low, low + _BLOCK)
        value, u, w = p[part], m[part], v[part]
        d, t = scratch[: value.size], other[: value.size]
        np.negative(g[part], out=d) if maximize else np.copyto(d, g[part])
        if weight_decay and decoupled:
            value *= 1.0 - lr * weight_decay
        elif weight_decay:
            np.multiply(value, weight_decay, out=t)
            d += t
        u *= beta1
        np.multiply(d, 1.0 - beta1, out=t)
        u += t
        np.multiply(d, d, out=t)
        t *= 1.0 - beta2
        w *= beta2
        w += t
        if top.size:
            w = np.maximum(top[part], w, out=top[part])
        np.sqrt(w, out=t)
        t *= root
        t += eps
        np.divide(u, t, out=t)
        t *= lr / correction1
        value -= t

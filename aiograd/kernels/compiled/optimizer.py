"""Optimizer steps in place, one pass over memory."""

from __future__ import annotations

import math
from typing import Any

from aiograd.kernels.compiled.jit import flag, kernel, reads, real, writes


@kernel(writes(1), reads(1), writes(1), real, real, real, real, flag, flag, flag)
def sgd(
    parameter: Any, gradient: Any, velocity: Any, lr: float, momentum: float, dampening: float, weight_decay: float, nesterov: bool,
    maximize: bool, first: bool, block: int, low: int, high: int,
) -> None:
    """One step of gradient descent; an empty velocity means no momentum."""
    cast = parameter.dtype.type
    p, g = parameter[low:high], gradient[low:high]
    rate, decay, sign = cast(lr), cast(weight_decay), cast(-1.0 if maximize else 1.0)
    if not velocity.size:
        for i in range(p.size):
            p[i] -= rate * (sign * g[i] + decay * p[i])
        return
    v = velocity[low:high]
    keep = cast(0.0 if first else momentum)
    take = cast(1.0 if first else 1.0 - dampening)
    ahead = cast(momentum)
    if nesterov:
        for i in range(p.size):
            d = sign * g[i] + decay * p[i]
            u = keep * v[i] + take * d
            v[i] = u
            p[i] -= rate * (d + ahead * u)
    else:
        for i in range(p.size):
            u = keep * v[i] + take * (sign * g[i] + decay * p[i])
            v[i] = u
            p[i] -= rate * u


@kernel(writes(1), reads(1), writes(1), writes(1), writes(1), real, real, real, real, real, real, real, flag, flag)
def adam(
    parameter: Any, gradient: Any, mean: Any, square: Any, largest: Any, lr: float, beta1: float, beta2: float, eps: float,
    weight_decay: float, correction1: float, correction2: float, decoupled: bool, maximize: bool, block: int, low: int, high: int,
) -> None:
    """One step of Adam or AdamW; a `largest` that is not empty makes it AMSGrad. The corrections are ``1 - beta ** step``."""
    cast = parameter.dtype.type
    p, g, m, v = parameter[low:high], gradient[low:high], mean[low:high], square[low:high]
    b1, c1, b2, c2 = cast(beta1), cast(1.0 - beta1), cast(beta2), cast(1.0 - beta2)
    rate, small, root = cast(lr / correction1), cast(eps), cast(1.0 / math.sqrt(correction2))
    sign = cast(-1.0 if maximize else 1.0)
    decay = cast(0.0 if decoupled else weight_decay)
    shrink = cast(1.0 - lr * weight_decay if decoupled else 1.0)
    if largest.size:
        top = largest[low:high]
        for i in range(p.size):
            d = sign * g[i] + decay * p[i]
            u = b1 * m[i] + c1 * d
            w = b2 * v[i] + c2 * d * d
            m[i] = u
            v[i] = w
            t = max(w, top[i])
            top[i] = t
            p[i] = shrink * p[i] - rate * u / (math.sqrt(t) * root + small)
    else:
        for i in range(p.size):
            d = sign * g[i] + decay * p[i]
            u = b1 * m[i] + c1 * d
            w = b2 * v[i] + c2 * d * d
            m[i] = u
            v[i] = w
            p[i] = shrink * p[i] - rate * u / (math.sqrt(w) * root + small)

"""The privacy that steps with clipped and noised gradients spend.

Note [One integral for every order]
    The moment of order a of a step is the mean of ``((1 - q) + q exp((2 z - 1) / (2 s²)))^a`` over z from a normal distribution of standard deviation
    s, the noise multiplier; q is the rate. For whole a it is a finite sum. For others public accountants sum two alternating series, which converge
    slowly where q is large; the trapezoidal rule on the mean itself converges faster than any power of its step, since the integrand is smooth and
    falls off like a bell, and needs no special functions.

Source: Mironov, Talwar and Zhang, Rényi differential privacy of the sampled Gaussian mechanism (2019); Canonne, Kamath and Steinke, The discrete
Gaussian for differential privacy (2020), proposition 12.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from aiograd.errors import ArgumentError

#: the orders of which the best is taken
ORDERS = (*(n / 10 for n in range(11, 110)), *map(float, range(11, 64)), 128.0, 256.0, 512.0)
#: with less noise than this, sampling is not counted: the bound is above the exact value, and no such step is private
_LEAST_NOISE = 0.05


def rdp_epsilon(*, noise_multiplier: float, sample_rate: float, steps: int, delta: float) -> float:
    """The epsilon of (epsilon, delta)-differential privacy after steps of DP-SGD with Poisson sampling; data sets that differ in one example.

    Args:
        noise_multiplier: standard deviation of the noise over the norm to which gradients are clipped, at least 0; with 0 nothing is private.
        sample_rate: probability of an example to be in a batch, above 0 and at most 1.
        steps: how many, at least 0.
        delta: probability that the promise does not hold, between 0 and 1, both excluded.

    Returns:
        Epsilon, at least 0; infinity without noise. The least over the orders 1.1 to 10.9 by 0.1, 11 to 63, 128, 256 and 512.

    Raises:
        ArgumentError: a number outside of its range.

    Source: see `aiograd.optim.accountant`.

    >>> round(ag.optim.rdp_epsilon(noise_multiplier=1.1, sample_rate=256 / 60000, steps=14062, delta=1e-5), 2)
    2.6
    """
    check_mechanism("rdp_epsilon", noise_multiplier, sample_rate)
    check_number("rdp_epsilon", "delta", delta, lambda x: 0 < x < 1, "a probability above 0 and below 1")
    check_number("rdp_epsilon", "steps", steps, lambda x: x >= 0 and isinstance(x, (int, np.integer)), "a whole number of at least 0")
    if steps == 0:
        return 0.0
    if noise_multiplier == 0:
        return math.inf
    orders = np.array(ORDERS)
    spent = int(steps) * np.array(_divergences(float(noise_multiplier), float(sample_rate)))
    epsilons = spent + np.log1p(-1 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1)
    return max(0.0, float(epsilons.min()))


def check_mechanism(call: str, noise_multiplier: Any, sample_rate: Any) -> None:
    """Refuse settings of noise and sampling, as `rdp_epsilon` does."""
    check_number(call, "noise_multiplier", noise_multiplier, lambda x: 0 <= x < math.inf, "a finite number of at least 0")
    check_number(call, "sample_rate", sample_rate, lambda x: 0 < x <= 1, "a probability above 0 and at most 1")


def check_number(call: str, name: str, value: Any, is_right: Callable[[Any], Any], expected: str) -> None:
    """Refuse a setting.

    Raises:
        ArgumentError: it is no number, or not right.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)) or not is_right(value):
        raise ArgumentError(f"{call}({name}={value!r}): expected {expected}")


@functools.lru_cache(64)
def _divergences(noise: float, rate: float) -> tuple[float, ...]:
    """The Rényi divergence of one step, by order."""
    if rate == 1.0 or noise < _LEAST_NOISE:
        return tuple(order / (2 * noise**2) for order in ORDERS)
    return tuple(max(0.0, (_whole if order.is_integer() else _any)(order, noise, rate)) / (order - 1) for order in ORDERS)


def _log_sum(terms: Any) -> float:
    top = terms.max()
    return float(top + np.log(np.exp(terms - top).sum()))


def _whole(order: float, noise: float, rate: float) -> float:
    """The logarithm of the moment of a whole order, by the binomial theorem."""
    k = np.arange(order + 1)
    choices = np.concatenate(([0.0], np.cumsum(np.log((order - k[:-1]) / (k[:-1] + 1)))))
    return _log_sum(choices + k * math.log(rate) + (order - k) * math.log1p(-rate) + (k * k - k) / (2 * noise**2))


def _any(order: float, noise: float, rate: float) -> float:
    """The same for any order, by the trapezoidal rule; see Note [One integral for every order]."""
    step = min(noise / 8, noise**2 / 4)
    z = np.arange(-12 * noise, order + 12 * noise, step)
    ratio = np.logaddexp(math.log1p(-rate), math.log(rate) + (2 * z - 1) / (2 * noise**2))
    return _log_sum(order * ratio - z * z / (2 * noise**2)) + math.log(step / (noise * math.sqrt(2 * math.pi)))

"""Kullback-Leibler divergences: a table by the classes of two distributions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from aiograd.array_functions.comparison import greater, less, logical_or
from aiograd.array_functions.elementwise import log
from aiograd.array_functions.searching import where
from aiograd.array_functions.special import digamma, gammaln
from aiograd.distributions.continuous import Normal, Uniform
from aiograd.distributions.discrete import Bernoulli, Categorical, safe_log, xlogy_free
from aiograd.distributions.distribution import Distribution
from aiograd.distributions.gamma_family import Beta, Dirichlet, Gamma
from aiograd.errors import ArgumentTypeError, ShapeError
from aiograd.tensors.tensor import Tensor

D = TypeVar("D", bound=Callable[..., Any])

_TABLE: dict[tuple[type, type], Callable[[Any, Any], Tensor]] = {}


def register_kl(p: type[Distribution], q: type[Distribution]) -> Callable[[D], D]:
    """Decorator: the function computes the divergence of a distribution of class `q` from one of class `p`.

    Args:
        p: class of the first distribution.
        q: class of the second.

    Returns:
        The decorator.
    """

    def register(function: D) -> D:
        _TABLE[p, q] = function
        return function

    return register


def kl_divergence(p: Distribution, q: Distribution) -> Tensor:
    """The mean under `p` of the logarithm of its density over the density of `q`, of the batch shape.

    Args:
        p: the first distribution.
        q: the second.

    Returns:
        A Tensor of the batch shape, in nats.

    Raises:
        ArgumentTypeError: no formula is known for the two classes.
        ShapeError: two Categorical or Dirichlet distributions of different numbers of classes.
    """
    for first in type(p).__mro__:
        for second in type(q).__mro__:
            if (first, second) in _TABLE:
                return _TABLE[first, second](p, q)
    raise ArgumentTypeError(f"kl_divergence: no formula for {type(p).__name__} and {type(q).__name__}; add one with register_kl")


def _same_classes(p: Distribution, a: Tensor, b: Tensor) -> None:
    if a.shape[-1] != b.shape[-1]:
        raise ShapeError(f"kl_divergence: found {type(p).__name__} of {a.shape[-1]} and of {b.shape[-1]} classes, expected as many")


@register_kl(Normal, Normal)
def _normal(p: Normal, q: Normal) -> Tensor:
    ratio, shift = p.scale / q.scale, (p.loc - q.loc) / q.scale
    return 0.5 * (ratio * ratio + shift * shift - 1.0) - log(ratio)


@register_kl(Uniform, Uniform)
def _uniform(p: Uniform, q: Uniform) -> Tensor:
    outside = logical_or(less(p.low, q.low), greater(p.high, q.high))
    result: Tensor = where(outside, np.inf, log((q.high - q.low) / (p.high - p.low)))
    return result


@register_kl(Bernoulli, Bernoulli)
def _bernoulli(p: Bernoulli, q: Bernoulli) -> Tensor:
    on, off = p.probs, 1.0 - p.probs
    return xlogy_free(on, safe_log(on) - safe_log(q.probs)) + xlogy_free(off, safe_log(off) - safe_log(1.0 - q.probs))


@register_kl(Categorical, Categorical)
def _categorical(p: Categorical, q: Categorical) -> Tensor:
    _same_classes(p, p.probs, q.probs)
    return xlogy_free(p.probs, p.logits - q.logits).sum(-1)


@register_kl(Gamma, Gamma)
def _gamma(p: Gamma, q: Gamma) -> Tensor:
    a, b = p.concentration, q.concentration
    return b * log(p.rate / q.rate) + gammaln(b) - gammaln(a) + (a - b) * digamma(a) + (q.rate - p.rate) * (a / p.rate)


@register_kl(Beta, Beta)
def _beta(p: Beta, q: Beta) -> Tensor:
    mine, other = (p.concentration1, p.concentration0), (q.concentration1, q.concentration0)
    whole, theirs = mine[0] + mine[1], other[0] + other[1]
    norms = gammaln(whole) - gammaln(mine[0]) - gammaln(mine[1]) - gammaln(theirs) + gammaln(other[0]) + gammaln(other[1])
    return norms + sum((a - b) * (digamma(a) - digamma(whole)) for a, b in zip(mine, other, strict=True))


@register_kl(Dirichlet, Dirichlet)
def _dirichlet(p: Dirichlet, q: Dirichlet) -> Tensor:
    a, b = p.concentration, q.concentration
    _same_classes(p, a, b)
    whole, theirs = a.sum(-1), b.sum(-1)
    norms = gammaln(whole) - gammaln(theirs) - (gammaln(a) - gammaln(b)).sum(-1)
    return norms + ((a - b) * (digamma(a) - digamma(whole).unsqueeze(-1))).sum(-1)

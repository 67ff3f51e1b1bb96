"""Gamma, Beta and Dirichlet: all are made of samples of the gamma distribution, which are drawn on the host: await parameters on a device first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from aiograd.array_functions.conversion import as_tensor
from aiograd.array_functions.elementwise import log, xlogy
from aiograd.array_functions.manipulation import broadcast_to, stack
from aiograd.array_functions.special import digamma, gammaln, xlog1py
from aiograd.distributions.distribution import Distribution, joint_shape, parameters
from aiograd.distributions.standard_gamma import StandardGamma
from aiograd.errors import ShapeError
from aiograd.running.random import Generator
from aiograd.tensors.core import host_array
from aiograd.tensors.tensor import Tensor


def _standard_gammas(generator: Generator, concentration: Tensor, shape: Sequence[int], device: str) -> Tensor:
    """Samples with scale 1, of a shape that the concentration (on the host) broadcasts to, at least as large as the smallest number."""
    alpha = broadcast_to(concentration, tuple(shape))
    sample = np.maximum(generator.standard_gamma(host_array(alpha.detach())).numpy(), np.finfo(alpha.dtype).tiny)
    result: Tensor = StandardGamma.apply(alpha, sample)
    return result if device == "cpu" else result.to(device)


class Gamma(Distribution):
    """The gamma distribution, with density ``rate**a * x**(a-1) * exp(-rate * x) / gamma(a)``.

    Args:
        concentration: the shape `a`, above 0.
        rate: above 0.
        validate_args, generator: as of `Distribution`.

    >>> distribution = ag.distributions.Gamma(2.0, 4.0)
    >>> distribution.mean, distribution.log_prob(0.5)
    (tensor(0.5), tensor(0.07944155))
    """

    has_rsample = True

    concentration: Tensor
    rate: Tensor

    def __init__(self, concentration: Any, rate: Any, validate_args: bool = True, *, generator: Generator | None = None) -> None:
        self.concentration, self.rate = parameters("Gamma", concentration, rate)
        super().__init__(self.concentration.shape, (), validate_args, generator)
        self._require("concentration", self.concentration, lambda x: x > 0, "numbers above 0")
        self._require("rate", self.rate, lambda x: x > 0, "numbers above 0")

    def rsample(self, sample_shape: int | Sequence[int] = ()) -> Tensor:
        return _standard_gammas(self._generator, self.concentration.to("cpu"), self._shape(sample_shape), self.rate.device) / self.rate

    def log_prob(self, value: Any) -> Tensor:
        a = self.concentration
        x = as_tensor(value, a.dtype)
        self._require("value", x, lambda x: x >= 0, "numbers of at least 0")
        return xlogy(a, self.rate) + xlogy(a - 1.0, x) - self.rate * x - gammaln(a)

    def entropy(self) -> Tensor:
        a = self.concentration
        return a - log(self.rate) + gammaln(a) + (1.0 - a) * digamma(a)

    @property
    def mean(self) -> Tensor:
        return self.concentration / self.rate

    @property
    def variance(self) -> Tensor:
        return self.concentration / (self.rate * self.rate)


class Dirichlet(Distribution):
    """The Dirichlet distribution, of vectors of positive numbers with a sum of 1.

    Args:
        concentration: (..., K), above 0.
        validate_args, generator: as of `Distribution`.

    Raises:
        ShapeError: a concentration without axes.

    >>> distribution = ag.distributions.Dirichlet([1.0, 3.0])
    >>> distribution.mean
    tensor([0.25, 0.75])
    >>> distribution.sample().shape
    (2,)
    """

    has_rsample = True

    concentration: Tensor

    def __init__(self, concentration: Any, validate_args: bool = True, *, generator: Generator | None = None) -> None:
        (self.concentration,) = parameters("Dirichlet", concentration)
        if not self.concentration.ndim:
            raise ShapeError("Dirichlet: found a concentration without axes, expected (..., K)")
        super().__init__(self.concentration.shape[:-1], self.concentration.shape[-1:], validate_args, generator)
        self._require("concentration", self.concentration, lambda x: x > 0, "numbers above 0")

    def rsample(self, sample_shape: int | Sequence[int] = ()) -> Tensor:
        gammas = _standard_gammas(self._generator, self.concentration.to("cpu"), self._shape(sample_shape), self.concentration.device)
        return gammas / gammas.sum(-1, keepdims=True)

    def log_prob(self, value: Any) -> Tensor:
        a = self.concentration
        x = as_tensor(value, a.dtype)
        self._require_classes(x)
        joint_shape("Dirichlet", "a value and a concentration", x.shape, a.shape)
        self._require("value", x, lambda x: (x >= 0) & (np.abs(x.sum(-1, keepdims=True) - 1) < 1e-6), "numbers of at least 0 whose sum is 1")
        return xlogy(a - 1.0, x).sum(-1) + gammaln(a.sum(-1)) - gammaln(a).sum(-1)

    def entropy(self) -> Tensor:
        a = self.concentration
        whole, k = a.sum(-1), a.shape[-1]
        return gammaln(a).sum(-1) - gammaln(whole) - (k - whole) * digamma(whole) - ((a - 1.0) * digamma(a)).sum(-1)

    @property
    def mean(self) -> Tensor:
        return self.concentration / self.concentration.sum(-1, keepdims=True)

    @property
    def variance(self) -> Tensor:
        whole, mean = self.concentration.sum(-1, keepdims=True), self.mean
        return mean * (1.0 - mean) / (whole + 1.0)


class Beta(Distribution):
    """The beta distribution on [0, 1], with density proportional to ``x**(a-1) * (1-x)**(b-1)``.

    Args:
        concentration1: `a`, above 0.
        concentration0: `b`, above 0.
        validate_args, generator: as of `Distribution`.

    >>> distribution = ag.distributions.Beta(2.0, 2.0)
    >>> distribution.mean, distribution.variance
    (tensor(0.5), tensor(0.05))
    """

    has_rsample = True

    concentration1: Tensor
    concentration0: Tensor

    def __init__(self, concentration1: Any, concentration0: Any, validate_args: bool = True, *, generator: Generator | None = None) -> None:
        self.concentration1, self.concentration0 = parameters("Beta", concentration1, concentration0)
        super().__init__(self.concentration1.shape, (), validate_args, generator)
        self._require("concentration1", self.concentration1, lambda x: x > 0, "numbers above 0")
        self._require("concentration0", self.concentration0, lambda x: x > 0, "numbers above 0")

    def rsample(self, sample_shape: int | Sequence[int] = ()) -> Tensor:
        both = stack([self.concentration1.to("cpu"), self.concentration0.to("cpu")], axis=-1)
        gammas = _standard_gammas(self._generator, both, (*self._shape(sample_shape), 2), self.concentration1.device)
        return gammas[..., 0] / gammas.sum(-1)

    def log_prob(self, value: Any) -> Tensor:
        a, b = self.concentration1, self.concentration0
        x = as_tensor(value, a.dtype)
        self._require("value", x, lambda x: (x >= 0) & (x <= 1), "numbers from 0 to 1")
        return xlogy(a - 1.0, x) + xlog1py(b - 1.0, -x) + gammaln(a + b) - gammaln(a) - gammaln(b)

    def entropy(self) -> Tensor:
        a, b = self.concentration1, self.concentration0
        norm = gammaln(a) + gammaln(b) - gammaln(a + b)
        return norm - (a - 1.0) * digamma(a) - (b - 1.0) * digamma(b) + (a + b - 2.0) * digamma(a + b)

    @property
    def mean(self) -> Tensor:
        return self.concentration1 / (self.concentration1 + self.concentration0)

    @property
    def variance(self) -> Tensor:
        whole = self.concentration1 + self.concentration0
        return self.concentration1 * self.concentration0 / (whole * whole * (whole + 1.0))

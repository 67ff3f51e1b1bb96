"""Normal and Uniform: samples are affine functions of their parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from aiograd.array_functions.comparison import greater_equal, less, logical_and
from aiograd.array_functions.conversion import as_tensor
from aiograd.array_functions.elementwise import log
from aiograd.array_functions.searching import where
from aiograd.array_functions.special import erfinv, ndtr
from aiograd.distributions.distribution import Distribution, drawn, parameters
from aiograd.running.random import Generator
from aiograd.tensors.tensor import Tensor

HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)


class Normal(Distribution):
    """The normal distribution.

    Args:
        loc: mean.
        scale: standard deviation, above 0.
        validate_args, generator: as of `Distribution`.

    >>> distribution = ag.distributions.Normal(0.0, 2.0)
    >>> distribution.log_prob(1.0)
    tensor(-1.7370857)
    >>> distribution.rsample((4,)).shape
    (4,)
    """

    has_rsample = True

    loc: Tensor
    scale: Tensor

    def __init__(self, loc: Any, scale: Any, validate_args: bool = True, *, generator: Generator | None = None) -> None:
        self.loc, self.scale = parameters("Normal", loc, scale)
        super().__init__(self.loc.shape, (), validate_args, generator)
        self._require("loc", self.loc, lambda x: ~np.isnan(x), "numbers")
        self._require("scale", self.scale, lambda x: x > 0, "numbers above 0")

    def rsample(self, sample_shape: int | Sequence[int] = ()) -> Tensor:
        shape = self._shape(sample_shape)
        noise = self._generator.normal(shape, dtype=self.loc.dtype)
        return self.loc + self.scale * (noise if self.loc.device == "cpu" else noise.to(self.loc.device))

    def log_prob(self, value: Any) -> Tensor:
        z = (as_tensor(value, self.loc.dtype) - self.loc) / self.scale
        return -0.5 * (z * z) - log(self.scale) - HALF_LOG_2PI

    def entropy(self) -> Tensor:
        return log(self.scale) + (0.5 + HALF_LOG_2PI)

    def cdf(self, value: Any) -> Tensor:
        """The probability of a draw up to a value.

        Args:
            value: an array that broadcasts.

        Returns:
            Probabilities.
        """
        return ndtr((as_tensor(value, self.loc.dtype) - self.loc) / self.scale)

    def icdf(self, value: Any) -> Tensor:
        """The value up to which a draw comes with a probability.

        Args:
            value: probabilities, an array that broadcasts.

        Returns:
            Values.
        """
        return self.loc + self.scale * erfinv(2.0 * as_tensor(value, self.loc.dtype) - 1.0) * math.sqrt(2.0)

    @property
    def mean(self) -> Tensor:
        return self.loc

    @property
    def variance(self) -> Tensor:
        return self.scale * self.scale


class Uniform(Distribution):
    """The uniform distribution on [low, high); `log_prob` is -inf outside.

    Args:
        low, high: ends, the first below the second.
        validate_args, generator: as of `Distribution`.

    >>> distribution = ag.distributions.Uniform(1.0, 3.0)
    >>> distribution.mean, distribution.entropy()
    (tensor(2.), tensor(0.6931472))
    """

    has_rsample = True

    low: Tensor
    high: Tensor

    def __init__(self, low: Any, high: Any, validate_args: bool = True, *, generator: Generator | None = None) -> None:
        self.low, self.high = parameters("Uniform", low, high)
        super().__init__(self.low.shape, (), validate_args, generator)
        self._require("high - low", (self.high - self.low).detach(), lambda x: x > 0, "numbers above 0")

    def rsample(self, sample_shape: int | Sequence[int] = ()) -> Tensor:
        noise = self._generator.uniform(self._shape(sample_shape), dtype=self.low.dtype)
        return self.low + (self.high - self.low) * drawn(noise.numpy(), self.low)

    def log_prob(self, value: Any) -> Tensor:
        x = as_tensor(value, self.low.dtype)
        inside = logical_and(greater_equal(x, self.low), less(x, self.high))
        result: Tensor = where(inside, -log(self.high - self.low), -np.inf)
        return result

    def entropy(self) -> Tensor:
        return log(self.high - self.low)

    @property
    def mean(self) -> Tensor:
        return (self.low + self.high) / 2.0

    @property
    def variance(self) -> Tensor:
        width = self.high - self.low
        return width * width / 12.0

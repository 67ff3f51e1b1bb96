"""Bernoulli, Categorical and Multinomial, given by probabilities or by logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from aiograd.array_functions.activation import log_softmax, sigmoid, softplus
from aiograd.array_functions.comparison import equal, greater
from aiograd.array_functions.conversion import as_tensor
from aiograd.array_functions.elementwise import exp, log, xlogy
from aiograd.array_functions.manipulation import broadcast_arrays, broadcast_to
from aiograd.array_functions.scattering import gather
from aiograd.array_functions.searching import where
from aiograd.array_functions.special import gammaln, logit, xlog1py
from aiograd.distributions.distribution import Distribution, drawn, joint_shape, parameters
from aiograd.distributions.drawing import classes
from aiograd.errors import ArgumentError, ShapeError
from aiograd.running.random import Generator
from aiograd.tensors.core import host_array, make
from aiograd.tensors.tensor import Tensor


def _one_of(name: str, probs: Any, logits: Any) -> None:
    if (probs is None) == (logits is None):
        raise ArgumentError(f"{name}: expected either probs or logits")


class Bernoulli(Distribution):
    """1 with a probability, else 0; samples are in the dtype of the parameter.

    Args:
        probs: of 1, in [0, 1]; or
        logits: ``log(p / (1 - p))``.
        validate_args, generator: as of `Distribution`.

    >>> distribution = ag.distributions.Bernoulli(probs=0.25)
    >>> distribution.log_prob(1.0), distribution.entropy()
    (tensor(-1.3862944), tensor(0.56233513))
    """

    def __init__(self, probs: Any = None, logits: Any = None, validate_args: bool = True, *, generator: Generator | None = None) -> None:
        _one_of("Bernoulli", probs, logits)
        (self._given,) = parameters("Bernoulli", logits if probs is None else probs)
        self._by_logits = probs is None
        super().__init__(self._given.shape, (), validate_args, generator)
        if not self._by_logits:
            self._require("probs", self._given, lambda x: (x >= 0) & (x <= 1), "probabilities")
        else:
            self._require("logits", self._given, lambda x: ~np.isnan(x), "numbers")

    @property
    def probs(self) -> Tensor:
        """Probabilities of 1."""
        return sigmoid(self._given) if self._by_logits else self._given

    @property
    def logits(self) -> Tensor:
        """Logits of 1."""
        return self._given if self._by_logits else logit(self._given)

    def sample(self, sample_shape: int | Sequence[int] = ()) -> Tensor:
        places = self._generator.uniform(self._shape(sample_shape), dtype=np.float64).numpy()
        return drawn(places < host_array(self.probs.detach().to("cpu")), self._given)

    def log_prob(self, value: Any) -> Tensor:
        x = as_tensor(value, self._given.dtype)
        self._require("value", x, lambda x: (x == 0) | (x == 1), "0 or 1")
        x = x if x.dtype == self._given.dtype else x.astype(self._given.dtype)
        if self._by_logits:
            return xlogy_free(x, -softplus(-self._given)) + xlogy_free(1.0 - x, -softplus(self._given))
        result: Tensor = xlogy(x, self._given) + xlog1py(1.0 - x, -self._given)
        return result

    def entropy(self) -> Tensor:
        p = self.probs
        if self._by_logits:
            return xlogy_free(p, softplus(-self._given)) + xlogy_free(1.0 - p, softplus(self._given))
        return -(xlogy(p, p) + xlog1py(1.0 - p, -p))

    @property
    def mean(self) -> Tensor:
        return self.probs

    @property
    def variance(self) -> Tensor:
        return self.probs * (1.0 - self.probs)


def xlogy_free(weight: Tensor, logarithm: Tensor) -> Tensor:
    """`weight` times `logarithm`; a value without weight adds nothing, even where the logarithm is infinite."""
    result: Tensor = weight * where(equal(weight, 0), 0.0, logarithm)
    return result


def safe_log(x: Tensor) -> Tensor:
    """Logarithms of probabilities; -inf, without a gradient, where they are 0."""
    positive = greater(x, 0.0)
    result: Tensor = where(positive, log(where(positive, x, 1.0)), -math.inf)
    return result


class _OverClasses(Distribution):
    probs: Tensor
    logits: Tensor

    def __init__(self, name: str, probs: Any, logits: Any, validate_args: bool, event: bool, generator: Generator | None) -> None:
        _one_of(name, probs, logits)
        (given,) = parameters(name, logits if probs is None else probs)
        if not given.ndim or not given.shape[-1]:
            raise ShapeError(f"{name}: found parameters of shape {list(given.shape)}, expected (..., classes)")
        super().__init__(given.shape[:-1], given.shape[-1:] if event else (), validate_args, generator)
        if probs is None:
            self._require("logits", given, lambda x: np.isfinite(x.max(-1, keepdims=True)) & (x < np.inf), "finite numbers or -inf, not all")
            self.logits = log_softmax(given)
            self.probs = exp(self.logits)
        else:
            self._require("probs", given, lambda x: (x >= 0) & np.isfinite(x) & (x.sum(-1, keepdims=True) > 0), "weights with a sum above 0")
            self.probs = given / given.sum(-1, keepdims=True)
            self.logits = safe_log(self.probs)

    def _classes(self, count: int) -> Any:
        """(*batch shape, count) classes."""
        probs = host_array(self.probs.detach().to("cpu"))
        found = classes(probs.reshape(-1, probs.shape[-1]), count, self._generator)
        return found.reshape(*self.batch_shape, count)

    def _entropy_of_one(self) -> Tensor:
        return -xlogy_free(self.probs, self.logits).sum(-1)


class Categorical(_OverClasses):
    """A class, with a probability for each; samples are int64.

    Args:
        probs: (..., classes), at least 0; divided by their sum; or
        logits: (..., classes), logarithms of such.
        validate_args, generator: as of `Distribution`.

    >>> distribution = ag.distributions.Categorical(logits=[[0.0, 0.0], [0.0, 1.0]])
    >>> distribution.log_prob([0, 1])
    tensor([-0.6931472 , -0.31326166])
    >>> distribution.sample((3,)).shape
    (3, 2)
    """

    def __init__(self, probs: Any = None, logits: Any = None, validate_args: bool = True, *, generator: Generator | None = None) -> None:
        super().__init__("Categorical", probs, logits, validate_args, False, generator)

    def sample(self, sample_shape: int | Sequence[int] = ()) -> Tensor:
        shape = self._shape(sample_shape)
        count = math.prod(shape[: len(shape) - len(self.batch_shape)])
        result: Tensor = make(np.moveaxis(self._classes(count), -1, 0).reshape(shape))
        return result if self.probs.device == "cpu" else result.to(self.probs.device)

    def log_prob(self, value: Any) -> Tensor:
        x = as_tensor(value)
        count = self.probs.shape[-1]
        self._require("value", x, lambda x: (x >= 0) & (x < count) & (x == np.floor(x)), f"a class from 0 to {count - 1}")
        x = x if x.dtype == np.int64 else x.astype(np.int64)
        shape = joint_shape("Categorical", "a value and a batch", x.shape, self.batch_shape)
        logits = broadcast_to(self.logits, (*shape, count))
        return gather(logits, -1, broadcast_to(x, shape).unsqueeze(-1)).squeeze(-1)

    def entropy(self) -> Tensor:
        return self._entropy_of_one()


class Multinomial(_OverClasses):
    """Counts of the classes in so many draws, (..., classes); samples are in the dtype of the parameter.

    Args:
        total_count: how many draws.
        probs, logits: as of `Categorical`.
        validate_args, generator: as of `Distribution`.

    Raises:
        ArgumentError: no such `total_count`.

    >>> distribution = ag.distributions.Multinomial(4, probs=[0.5, 0.5])
    >>> distribution.mean, distribution.log_prob([2.0, 2.0])
    (tensor([2., 2.]), tensor(-0.98082924))
    """

    def __init__(
        self, total_count: int = 1, probs: Any = None, logits: Any = None, validate_args: bool = True, *, generator: Generator | None = None
    ) -> None:
        if isinstance(total_count, bool) or not isinstance(total_count, (int, np.integer)) or total_count < 0:
            raise ArgumentError(f"Multinomial(total_count={total_count!r}): expected an int of at least 0")
        self.total_count: int = int(total_count)
        super().__init__("Multinomial", probs, logits, validate_args, True, generator)

    def sample(self, sample_shape: int | Sequence[int] = ()) -> Tensor:
        shape = self._shape(sample_shape)
        several, k = math.prod(shape[: len(shape) - len(self.batch_shape) - 1]), shape[-1]
        found = self._classes(several * self.total_count).reshape(*self.batch_shape, several, self.total_count)
        counts = (found[..., None] == np.arange(k)).sum(-2)
        return drawn(np.moveaxis(counts, -2, 0).reshape(shape), self.probs)

    def log_prob(self, value: Any) -> Tensor:
        x = as_tensor(value, self.probs.dtype)
        total = self.total_count
        self._require_classes(x)
        joint_shape("Multinomial", "a value and probabilities", x.shape, self.probs.shape)
        self._require("value", x, lambda x: (x >= 0) & (x.sum(-1, keepdims=True) == total), f"counts whose sum is {total}")
        counts, logits = broadcast_arrays(x if x.dtype == self.probs.dtype else x.astype(self.probs.dtype), self.logits)
        return math.lgamma(total + 1.0) - gammaln(counts + 1.0).sum(-1) + xlogy_free(counts, logits).sum(-1)

    def entropy(self) -> Tensor:
        n = self.total_count
        counts = np.arange(1.0, n + 1.0).reshape(-1, *(1,) * self.probs.ndim)
        ways = np.array([math.lgamma(n + 1.0) - math.lgamma(c + 1.0) - math.lgamma(n - c + 1.0) for c in range(1, n + 1)]).reshape(counts.shape)
        lgammas = np.array([math.lgamma(c + 1.0) for c in range(1, n + 1)]).reshape(counts.shape)
        times, kinds, known = (drawn(each, self.probs) for each in (counts, ways, lgammas))
        positive = greater(self.probs, 0.0)  # a class of probability 0 is drawn never; its powers would have no gradient
        chances = exp(kinds + xlogy(times, where(positive, self.probs, 1.0)) + xlog1py(n - times, -self.probs)) * positive
        return n * self._entropy_of_one() - math.lgamma(n + 1.0) + (chances * known).sum(0).sum(-1)

    @property
    def mean(self) -> Tensor:
        return self.total_count * self.probs

    @property
    def variance(self) -> Tensor:
        return self.total_count * self.probs * (1.0 - self.probs)

"""``ag.stats``: densities and probabilities under the names and signatures of ``scipy.stats``, as differentiable functions of tensors.

::

    ag.stats.norm.logpdf(x, loc, scale).sum()

`norm`, `uniform`, `expon`, `gamma`, `chi2`, `beta` and `t` have ``pdf``, ``logpdf``, ``cdf``, ``logcdf``, ``sf`` and
``logsf`` of ``(x, *shapes, loc=0, scale=1)``, and ``entropy(*shapes, loc=0, scale=1)``; `poisson` has ``pmf`` and ``logpmf``
instead of the densities, and no scale. `dirichlet` and `multivariate_normal` have ``pdf``, ``logpdf`` and ``entropy``.
SciPy is not needed.

Outside of the support a density is 0, where a parameter is none NaN, as in SciPy. Probabilities of `gamma`, `chi2`, `beta` and `t` have gradients for
`x`, `loc` and `scale`; a shape that requires grad is a `NoRuleError` in backward there, since that derivative has no closed form.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from aiograd.array_functions import special
from aiograd.array_functions.comparison import greater, greater_equal, less, logical_and, logical_not, logical_or
from aiograd.array_functions.conversion import as_tensor
from aiograd.array_functions.elementwise import exp, expm1, floor, log, log1p, xlogy
from aiograd.array_functions.linalg import cholesky, solve_triangular
from aiograd.array_functions.manipulation import moveaxis
from aiograd.array_functions.searching import where
from aiograd.distributions import Beta, Dirichlet, Gamma, Normal
from aiograd.errors import ArgumentError, NoRuleError, ShapeError
from aiograd.running.lazy import on_first_use
from aiograd.running.modes import get_default_dtype
from aiograd.tensors.core import host_array
from aiograd.tensors.creation import asarray
from aiograd.tensors.tensor import Tensor

if not TYPE_CHECKING:  # an unknown name is told with the nearest one
    __getattr__, __dir__ = on_first_use(__name__)

__all__ = ["beta", "chi2", "dirichlet", "expon", "gamma", "multivariate_normal", "norm", "poisson", "t", "uniform"]

Formula = Callable[..., Any]


def _alike(*values: Any) -> list[Tensor]:
    """Floating Tensors; numbers, lists and integers take the dtype that the floating arrays among them are promoted to."""
    given = [np.asarray(value) if isinstance(value, (list, tuple)) else value for value in values]
    kinds = [value.dtype for value in given if hasattr(value, "dtype")]
    floating = [kind for kind in kinds if kind.kind == "f"]
    like = np.result_type(*floating) if floating else np.dtype(np.float64) if kinds else get_default_dtype()
    found = [as_tensor(value) if hasattr(value, "dtype") else asarray(value, dtype=like) for value in given]
    return [value if value.dtype.kind == "f" else value.astype(like) for value in found]


class _Standard(NamedTuple):
    """A distribution with location 0 and scale 1, by functions of a number in the support and of the shapes."""

    shapes: tuple[str, ...]
    logpdf: Formula
    cdf: Formula
    sf: Formula
    entropy: Formula
    low: float = -math.inf
    high: float = math.inf
    #: an inner number of the support, which stands for those outside
    inner: float = 0.5
    logcdf: Formula | None = None
    logsf: Formula | None = None


class _Continuous:
    """A family of densities, see the module."""

    def __init__(self, name: str, standard: _Standard) -> None:
        self.name = name
        self.standard = standard

    def __repr__(self) -> str:
        return f"<aiograd.stats.{self.name}>"

    def _arguments(self, function: str, x: tuple[Any, ...], values: tuple[Any, ...], loc: Any, scale: Any) -> list[Tensor]:
        """`x`, the shapes, location and scale; SciPy takes the last two by position too."""
        count = len(self.standard.shapes)
        twice = (len(values) > count and loc is not None) or (len(values) > count + 1 and scale is not None)
        if twice or not count <= len(values) <= count + 2:
            wanted = ", ".join(("x", *self.standard.shapes)) if function != "entropy" else ", ".join(self.standard.shapes)
            raise ArgumentError(f"{self.name}.{function}: found {len(values)} parameters, expected ({wanted}, loc=0, scale=1)")
        given = (*values[count:], *([] if loc is None else [loc]))
        loc, scale = given[0] if given else 0.0, given[1] if len(given) > 1 else 1.0 if scale is None else scale
        return _alike(*x, *values[:count], loc, scale)

    def _at(self, function: str, x: Any, values: tuple[Any, ...], loc: Any, scale: Any, outside: tuple[float, float]) -> Tensor:
        standard = self.standard
        x, *shapes, loc, scale = self._arguments(function, (x,), values, loc, scale)
        z = (x - loc) / scale
        formula = getattr(standard, function)
        above = greater(z, standard.high)
        beyond = logical_or(less(z, standard.low), above)  # a NaN is in the support and stays NaN
        fair: Any = greater(scale, 0.0)
        for shape in shapes:
            fair = logical_and(fair, greater(shape, 0.0))
        value = formula(where(logical_and(fair, logical_not(beyond)), z, standard.inner), *(where(fair, shape, 1.0) for shape in shapes))
        if function == "logpdf":
            value = value - log(where(fair, scale, 1.0))
        result: Tensor = where(fair, where(beyond, where(above, outside[1], outside[0]), value), math.nan)
        return result

    def logpdf(self, x: Any, *shapes: Any, loc: Any = None, scale: Any = None) -> Tensor:
        """The logarithm of the density."""
        return self._at("logpdf", x, shapes, loc, scale, (-math.inf, -math.inf))

    def pdf(self, x: Any, *shapes: Any, loc: Any = None, scale: Any = None) -> Tensor:
        """The density."""
        return exp(self.logpdf(x, *shapes, loc=loc, scale=scale))

    def cdf(self, x: Any, *shapes: Any, loc: Any = None, scale: Any = None) -> Tensor:
        """The probability of a number up to `x`."""
        return self._at("cdf", x, shapes, loc, scale, (0.0, 1.0))

    def sf(self, x: Any, *shapes: Any, loc: Any = None, scale: Any = None) -> Tensor:
        """The probability of a number above `x`."""
        return self._at("sf", x, shapes, loc, scale, (1.0, 0.0))

    def logcdf(self, x: Any, *shapes: Any, loc: Any = None, scale: Any = None) -> Tensor:
        """The logarithm of `cdf`."""
        if self.standard.logcdf is None:
            return log(self.cdf(x, *shapes, loc=loc, scale=scale))
        return self._at("logcdf", x, shapes, loc, scale, (-math.inf, 0.0))

    def logsf(self, x: Any, *shapes: Any, loc: Any = None, scale: Any = None) -> Tensor:
        """The logarithm of `sf`."""
        if self.standard.logsf is None:
            return log(self.sf(x, *shapes, loc=loc, scale=scale))
        return self._at("logsf", x, shapes, loc, scale, (0.0, -math.inf))

    def entropy(self, *shapes: Any, loc: Any = None, scale: Any = None) -> Tensor:
        """The entropy, in nats."""
        *found, _, scale = self._arguments("entropy", (), shapes, loc, scale)
        result: Tensor = self.standard.entropy(*found) + log(scale)
        return result


def _t_norm(df: Tensor) -> Any:
    """The logarithm of the integral of ``(1 + z**2 / df) ** (-(df + 1) / 2)``."""
    return 0.5 * log(df) + special.gammaln(0.5 * df) - special.gammaln(0.5 * df + 0.5) + 0.5 * math.log(math.pi)


def _t_logpdf(z: Tensor, df: Tensor) -> Any:
    return -0.5 * (df + 1.0) * log1p(z * z / df) - _t_norm(df)


def _t_entropy(df: Tensor) -> Any:
    half = 0.5 * (df + 1.0)
    return half * (special.digamma(half) - special.digamma(0.5 * df)) + _t_norm(df)


def _gamma(a: Any) -> Gamma:
    return Gamma(a, 1.0, validate_args=False)


def _beta(a: Any, b: Any) -> Beta:
    return Beta(a, b, validate_args=False)


_NORMAL = Normal(0.0, 1.0)

norm: Final = _Continuous("norm", _Standard(
    (), lambda z: -0.5 * (z * z) - 0.5 * math.log(2.0 * math.pi), special.ndtr, lambda z: special.ndtr(-z), lambda: _NORMAL.entropy(),
    logcdf=special.log_ndtr, logsf=lambda z: special.log_ndtr(-z),
))  # fmt: skip
uniform: Final = _Continuous("uniform", _Standard((), lambda z: 0.0 * z, lambda z: z, lambda z: 1.0 - z, lambda: 0.0, 0.0, 1.0))
expon: Final = _Continuous("expon", _Standard(
    (), lambda z: -z, lambda z: -expm1(-z), lambda z: exp(-z), lambda: 1.0, 0.0, logcdf=lambda z: log(-expm1(-z)), logsf=lambda z: -z
))  # fmt: skip
gamma: Final = _Continuous("gamma", _Standard(
    ("a",), lambda z, a: _gamma(a).log_prob(z), lambda z, a: special.gammainc(a, z), lambda z, a: special.gammaincc(a, z),
    lambda a: _gamma(a).entropy(), 0.0,
))  # fmt: skip
chi2: Final = _Continuous("chi2", _Standard(
    ("df",), lambda z, df: _gamma(0.5 * df).log_prob(0.5 * z) - math.log(2.0), lambda z, df: special.gammainc(0.5 * df, 0.5 * z),
    lambda z, df: special.gammaincc(0.5 * df, 0.5 * z), lambda df: _gamma(0.5 * df).entropy() + math.log(2.0), 0.0,
))  # fmt: skip
beta: Final = _Continuous("beta", _Standard(
    ("a", "b"), lambda z, a, b: _beta(a, b).log_prob(z), lambda z, a, b: special.betainc(a, b, z), lambda z, a, b: special.betaincc(a, b, z),
    lambda a, b: _beta(a, b).entropy(), 0.0, 1.0,
))  # fmt: skip
t: Final = _Continuous("t", _Standard(
    ("df",), _t_logpdf, lambda z, df: special.stdtr(df, z), lambda z, df: special.stdtr(df, -z), _t_entropy
))  # fmt: skip


class _Poisson:
    """Counts of events, see the module; counts have no gradient."""

    def __repr__(self) -> str:
        return "<aiograd.stats.poisson>"

    def _counts(self, k: Any, mu: Any, loc: Any) -> tuple[Tensor, Tensor, Any]:
        counts, rate, shift = _alike(k, mu, loc)
        counts = counts - shift
        if counts.requires_grad:
            raise NoRuleError("poisson: counts are integers and have no gradient. Pass them detached: k.detach().")
        return counts, rate, greater_equal(rate, 0.0)

    def logpmf(self, k: Any, mu: Any, loc: Any = 0) -> Tensor:
        """The logarithm of the probability of `k` events."""
        counts, rate, fair = self._counts(k, mu, loc)
        whole = logical_and(greater_equal(counts, 0.0), counts == floor(counts))
        at = where(whole, counts, 0.0)
        value = xlogy(at, where(fair, rate, 1.0)) - rate - special.gammaln(at + 1.0)
        return where(fair, where(whole, value, -math.inf), math.nan)

    def pmf(self, k: Any, mu: Any, loc: Any = 0) -> Tensor:
        """The probability of `k` events."""
        return exp(self.logpmf(k, mu, loc))

    def _tail(self, function: Formula, below: float, k: Any, mu: Any, loc: Any) -> Tensor:
        counts, rate, fair = self._counts(k, mu, loc)
        some = greater_equal(counts, 0.0)
        value = function(floor(where(some, counts, 0.0)) + 1.0, where(fair, rate, 1.0))
        return where(fair, where(some, value, below), math.nan)

    def cdf(self, k: Any, mu: Any, loc: Any = 0) -> Tensor:
        """The probability of up to `k` events."""
        return self._tail(special.gammaincc, 0.0, k, mu, loc)

    def sf(self, k: Any, mu: Any, loc: Any = 0) -> Tensor:
        """The probability of more than `k` events."""
        return self._tail(special.gammainc, 1.0, k, mu, loc)

    def logcdf(self, k: Any, mu: Any, loc: Any = 0) -> Tensor:
        """The logarithm of `cdf`."""
        return log(self.cdf(k, mu, loc))

    def logsf(self, k: Any, mu: Any, loc: Any = 0) -> Tensor:
        """The logarithm of `sf`."""
        return log(self.sf(k, mu, loc))


class _Dirichlet:
    """Shares that add up to 1; the first axis of `x` goes over them, and the last may be left out, see the module."""

    def __repr__(self) -> str:
        return "<aiograd.stats.dirichlet>"

    def logpdf(self, x: Any, alpha: Any) -> Tensor:
        """The logarithm of the density."""
        x, alpha = _alike(x, alpha)
        if alpha.ndim != 1 or not x.ndim or x.shape[0] not in (alpha.shape[0], alpha.shape[0] - 1):
            raise ShapeError(f"dirichlet: found x {list(x.shape)} and alpha {list(alpha.shape)}, expected alpha (k,) and x (k, ...) or (k - 1, ...)")
        if x.shape[0] < alpha.shape[0]:
            x = np.concatenate([x, 1.0 - x.sum(0, keepdims=True)])
        return Dirichlet(alpha).log_prob(moveaxis(x, 0, -1))

    def pdf(self, x: Any, alpha: Any) -> Tensor:
        """The density."""
        return exp(self.logpdf(x, alpha))

    def entropy(self, alpha: Any) -> Tensor:
        """The entropy, in nats."""
        return Dirichlet(_alike(alpha)[0]).entropy()


class _MultivariateNormal:
    """Normal vectors; `cov` is a matrix, its diagonal or a number, see the module."""

    def __repr__(self) -> str:
        return "<aiograd.stats.multivariate_normal>"

    def _arguments(self, x: Any, mean: Any, cov: Any) -> tuple[Tensor, Tensor]:
        """Distances from the mean, vectors in the last axis, and the covariance matrix."""
        x, center, matrix = _alike(x, 0.0 if mean is None else mean, 1.0 if cov is None else cov)
        size = (matrix.shape or center.shape or (1,))[-1]
        x = x if size > 1 or x.shape[-1:] == (1,) else x.unsqueeze(-1)
        square = matrix if matrix.ndim >= 2 else matrix * np.eye(size, dtype=matrix.dtype)
        if square.shape != (size, size) or center.shape not in ((), (size,)) or x.shape[-1:] not in ((size,), (1,)):
            found = f"x {list(x.shape)}, mean {list(center.shape)} and cov {list(matrix.shape)}"
            raise ShapeError(f"multivariate_normal: found {found}, expected (..., k), (k,) and (k, k)")
        return x - center, square

    def logpdf(self, x: Any, mean: Any = None, cov: Any = None, allow_singular: bool = False) -> Tensor:
        """The logarithm of the density.

        Raises:
            LinAlgError: `cov` is not positive definite, and `allow_singular` is False. NoRuleError: it requires grad, and `allow_singular` is True.
        """
        off, matrix = self._arguments(x, mean, cov)
        size = matrix.shape[0]
        if not allow_singular:
            root = cholesky(matrix)
            z = solve_triangular(root, off.unsqueeze(-1), upper=False).squeeze(-1)
            return -0.5 * (z * z).sum(-1) - log(root.diagonal()).sum() - 0.5 * size * math.log(2.0 * math.pi)
        if matrix.requires_grad:
            raise NoRuleError("multivariate_normal(allow_singular=True): the density has no derivative by a singular cov. Pass cov.detach().")
        values, vectors = np.linalg.eigh(host_array(matrix))
        least = 1e6 * np.finfo(values.dtype).eps * np.max(np.absolute(values))
        if (values < -least).any():
            raise np.linalg.LinAlgError("multivariate_normal: cov has a negative eigenvalue")
        some = values > least
        z = off @ (vectors[:, some] / np.sqrt(values[some]))
        value = -0.5 * (z * z).sum(-1) - 0.5 * (math.log(2.0 * math.pi) * int(some.sum()) + float(np.log(values[some]).sum()))
        stray = np.absolute(host_array((off @ vectors[:, ~some]).detach())).max(-1, initial=0.0)
        return where(stray < 1e3 * least, value, -math.inf)

    def pdf(self, x: Any, mean: Any = None, cov: Any = None, allow_singular: bool = False) -> Tensor:
        """The density."""
        return exp(self.logpdf(x, mean, cov, allow_singular))

    def entropy(self, mean: Any = None, cov: Any = None) -> Tensor:
        """The entropy, in nats."""
        _, matrix = self._arguments(0.0 if mean is None else mean, mean, cov)
        return log(cholesky(matrix).diagonal()).sum() + 0.5 * matrix.shape[0] * math.log(2.0 * math.pi * math.e)


poisson: Final = _Poisson()
dirichlet: Final = _Dirichlet()
multivariate_normal: Final = _MultivariateNormal()

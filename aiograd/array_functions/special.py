"""``ag.special``: special functions under the names of ``scipy.special`` and ``torch.special``; SciPy is not needed for them.

SciPy's own ufuncs find the same rows when they are called on Tensors, by name (`aiograd.tensors.scipy_names`).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from aiograd.array_functions.activation import log_softmax, sigmoid, softmax
from aiograd.array_functions.comparison import equal, isfinite
from aiograd.array_functions.conversion import ArrayLike, Axis, Binary, Unary, as_tensor, as_tensors, axes_of, calling, one, row, two
from aiograd.array_functions.elementwise import erf, erfc, exp, log, minimum, sinc, xlogy
from aiograd.array_functions.reduction import logsumexp as _logsumexp
from aiograd.array_functions.searching import where
from aiograd.errors import ArgumentError
from aiograd.ops import gamma as gamma_rows
from aiograd.ops import special as special_rows
from aiograd.running.lazy import on_first_use
from aiograd.tensors.record import call
from aiograd.tensors.tensor import Tensor

if not TYPE_CHECKING:  # an unknown name is told with the nearest one
    __getattr__, __dir__ = on_first_use(__name__)

__all__ = [
    "bessel_j0", "bessel_j1", "bessel_y0", "bessel_y1", "beta", "betainc", "betaincc", "betaln", "digamma", "entr", "erf", "erfc", "erfcinv", "erfcx",
    "erfinv", "expit", "exprel", "gamma", "gammainc", "gammaincc", "gammaln", "gammasgn", "i0", "i0e", "i1", "i1e", "iv", "ive", "j0", "j1",
    "jn", "jv", "k0", "k1", "lgamma", "log_ndtr", "log_softmax", "logit", "logsumexp", "multigammaln", "ndtr", "ndtri", "polygamma", "psi",
    "rel_entr", "rgamma", "sinc", "softmax", "stdtr", "xlog1py", "xlogy", "y0", "y1", "yn", "zeta",
]  # fmt: skip

_zeta, _gammainc, _gammaincc, _stdtr = two("zeta"), two("gammainc"), two("gammaincc"), two("stdtr")
_jv, _yn, _iv, _ive = two("bessel_jv"), two("bessel_yn"), two("bessel_iv"), two("bessel_ive")


def logsumexp(a: ArrayLike, /, axis: Axis = None, b: ArrayLike | None = None, keepdims: bool = False) -> Tensor:
    """``log(sum(b * exp(a)))`` over axes, without overflow.

    Args:
        a: any shape.
        axis: axes to sum over; None: all.
        b: factors that broadcast with `a`, such as weights; None: 1.
        keepdims: leave the axes in, with length 1.

    Returns:
        A Tensor of the shape of `a` without the axes; NaN where a sum is negative.
    """
    if b is None:
        return _logsumexp(a, axis=axis, keepdims=keepdims)
    powers, weights = as_tensors(a, b)
    axes, none = axes_of(axis), equal(weights, 0)
    largest = where(none, -math.inf, powers.detach()).max(axis=axes, keepdims=True)
    gap = powers - where(isfinite(largest), largest, 0.0)
    most = math.log(np.finfo(gap.dtype).max) - 1.0  # a power without weight must not become infinite
    total = log((weights * exp(where(none, minimum(gap, most), gap))).sum(axis=axes, keepdims=True)) + where(isfinite(largest), largest, 0.0)
    if keepdims:
        return total
    return total.reshape(()) if axes is None else total.squeeze(axes)


gammaln: Unary = one("gammaln", "The logarithm of the magnitude of the gamma function.", calling("gammaln"))
gamma: Unary = one("gamma", "The gamma function, ``(x - 1)!`` of positive integers.", calling("gamma"))
digamma: Unary = one("digamma", "The derivative of the logarithm of the gamma function.", calling("digamma"))


def polygamma(n: int, x: ArrayLike, /) -> Tensor:
    """The `n`-th derivative of `digamma`."""
    if isinstance(n, bool) or not isinstance(n, int) or n < 0:
        raise ArgumentError(f"polygamma(n={n!r}): expected an int of at least 0")
    return gamma_rows.polygamma(n, as_tensor(x))  # type: ignore[no-any-return]


def zeta(x1: ArrayLike, x2: ArrayLike = 1.0, /) -> Tensor:
    """Hurwitz's zeta function, the sum of ``(k + x2) ** -x1``; Riemann's without `x2`. Its gradient is that for `x2`."""
    return _zeta(x1, x2)


def beta(x1: ArrayLike, x2: ArrayLike, /) -> Tensor:
    """The beta function; NaN where the gamma functions above and below the line are infinite."""
    return gamma_rows.beta(*as_tensors(x1, x2))  # type: ignore[no-any-return]


def betaln(x1: ArrayLike, x2: ArrayLike, /) -> Tensor:
    """The logarithm of the magnitude of the beta function."""
    return gamma_rows.betaln(*as_tensors(x1, x2))  # type: ignore[no-any-return]


erfinv: Unary = one("erfinv", "The inverse of `erf`.", calling("erfinv"))
ndtr: Unary = one("ndtr", "The probability that a standard normal is below `x`.", special_rows.ndtr)
log_ndtr: Unary = one("log_ndtr", "The logarithm of `ndtr`, also where that is too small to represent.", calling("log_ndtr"))


def logit(x: ArrayLike, /, eps: float | None = None) -> Tensor:
    """``log(x / (1 - x))``, of `x` limited to [eps, 1 - eps] where `eps` is given."""
    source = as_tensor(x)
    return call(row("logit"), (source if eps is None else source.clip(eps, 1.0 - eps),), {})  # type: ignore[no-any-return]


entr: Unary = one("entr", "``-x * log(x)``, 0 at 0.", special_rows.entr)


xlog1py: Binary = two("xlog1py", "``x1 * log1p(x2)``, 0 where `x1` is 0.")


i0: Unary = one("i0", "The modified Bessel function of the first kind of order 0.", calling("bessel_i0"))
i1: Unary = one("i1", "The modified Bessel function of the first kind of order 1.", calling("bessel_i1"))
i0e: Unary = one("i0e", "``exp(-|x|) * i0(x)``.", calling("bessel_i0e"))
i1e: Unary = one("i1e", "``exp(-|x|) * i1(x)``.", calling("bessel_i1e"))
j0: Unary = one("j0", "The Bessel function of the first kind of order 0.", calling("bessel_j0"))
j1: Unary = one("j1", "The Bessel function of the first kind of order 1.", calling("bessel_j1"))
y0: Unary = one("y0", "The Bessel function of the second kind of order 0.", calling("bessel_y0"))
y1: Unary = one("y1", "The Bessel function of the second kind of order 1.", calling("bessel_y1"))
k0: Unary = one("k0", "The modified Bessel function of the second kind of order 0; infinite at 0.", calling("bessel_k0"))
k1: Unary = one("k1", "The modified Bessel function of the second kind of order 1; infinite at 0.", calling("bessel_k1"))


def jv(v: ArrayLike, x: ArrayLike, /) -> Tensor:
    """The Bessel function of the first kind of order `v`.

    Args:
        v: orders, up to 5000 in magnitude. An order that requires grad is a NoRuleError in backward: that derivative has no closed form.
        x: any shape; NaN where it is negative and the order is no integer.

    Returns:
        A Tensor of the shape that the arguments broadcast to.
    """
    return _jv(v, x)


def yn(n: ArrayLike, x: ArrayLike, /) -> Tensor:
    """The Bessel function of the second kind of integer order.

    Args:
        n: integers, up to 5000 in magnitude. An order that requires grad is a NoRuleError in backward.
        x: any shape; NaN where it is negative.

    Returns:
        A Tensor of the shape that the arguments broadcast to.
    """
    return _yn(n, x)


def iv(v: ArrayLike, x: ArrayLike, /) -> Tensor:
    """The modified Bessel function of the first kind of order `v`.

    Args:
        v, x: as of `jv`.

    Returns:
        A Tensor of the shape that the arguments broadcast to.
    """
    return _iv(v, x)


def ive(v: ArrayLike, x: ArrayLike, /) -> Tensor:
    """``exp(-|x|) * iv(v, x)``.

    Args:
        v, x: as of `jv`.

    Returns:
        A Tensor of the shape that the arguments broadcast to.
    """
    return _ive(v, x)


rgamma: Unary = one("rgamma", "``1 / gamma(x)``, 0 at 0, -1, -2, ...", calling("rgamma"))
gammasgn: Unary = one("gammasgn", "The sign of the gamma function; its gradient is zero.", calling("gammasgn"))


def multigammaln(x: ArrayLike, d: int, /) -> Tensor:
    """The logarithm of the multivariate gamma function of dimension `d`; NaN where `x` is not above ``(d - 1) / 2``.

    Raises:
        ArgumentError: `d` is no int of at least 1.
    """
    if isinstance(d, bool) or not isinstance(d, int) or d < 1:
        raise ArgumentError(f"multigammaln(d={d!r}): expected an int of at least 1")
    return gamma_rows.multigammaln(as_tensor(x), d)  # type: ignore[no-any-return]


def gammainc(a: ArrayLike, x: ArrayLike, /) -> Tensor:
    """The regularized lower incomplete gamma function, from 0 at ``x = 0`` to 1.

    Args:
        a: at least 0. One that requires grad is a NoRuleError in backward: that derivative has no closed form.
        x: at least 0.

    Returns:
        A Tensor of the shape that the arguments broadcast to.
    """
    return _gammainc(a, x)


def gammaincc(a: ArrayLike, x: ArrayLike, /) -> Tensor:
    """``1 - gammainc(a, x)``, accurate where that is small.

    Args:
        a, x: as of `gammainc`.

    Returns:
        A Tensor of the shape that the arguments broadcast to.
    """
    return _gammaincc(a, x)


def betainc(a: ArrayLike, b: ArrayLike, x: ArrayLike, /) -> Tensor:
    """The regularized incomplete beta function, from 0 at ``x = 0`` to 1 at 1.

    Args:
        a, b: above 0. One that requires grad is a NoRuleError in backward: that derivative has no closed form.
        x: from 0 to 1.

    Returns:
        A Tensor of the shape that the arguments broadcast to.
    """
    return call(row("betainc"), (a, b, x), {})  # type: ignore[no-any-return]


def betaincc(a: ArrayLike, b: ArrayLike, x: ArrayLike, /) -> Tensor:
    """``1 - betainc(a, b, x)``, accurate where that is small.

    Args:
        a, b, x: as of `betainc`.

    Returns:
        A Tensor of the shape that the arguments broadcast to.
    """
    return call(row("betaincc"), (a, b, x), {})  # type: ignore[no-any-return]


def stdtr(df: ArrayLike, x: ArrayLike, /) -> Tensor:
    """The probability that Student's t is below `x`.

    Args:
        df: degrees of freedom, above 0. One that requires grad is a NoRuleError in backward: that derivative has no closed form.
        x: any shape.

    Returns:
        A Tensor of the shape that the arguments broadcast to.
    """
    return _stdtr(df, x)


erfcx: Unary = one("erfcx", "``exp(x**2) * erfc(x)``, also where one of the two leaves the range.", calling("erfcx"))
erfcinv: Unary = one("erfcinv", "The inverse of `erfc`.", special_rows.erfcinv)


def ndtri(p: ArrayLike, /) -> Tensor:
    """The inverse of `ndtr`."""
    return call(row("ndtri"), (as_tensor(p),), {})  # type: ignore[no-any-return]


exprel: Unary = one("exprel", "``(exp(x) - 1) / x``, 1 at 0.", calling("exprel"))
rel_entr: Binary = two("rel_entr", "``x1 * log(x1 / x2)``, 0 where `x1` is 0; infinite where `x2` alone is 0 or either is negative.")


#: the other library's names
jn = jv
expit: Unary = sigmoid
psi: Unary = digamma
lgamma: Unary = gammaln
bessel_j0: Unary = j0
bessel_j1: Unary = j1
bessel_y0: Unary = y0
bessel_y1: Unary = y1

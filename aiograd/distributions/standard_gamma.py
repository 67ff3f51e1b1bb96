"""Samples of the gamma distribution as a differentiable function of its concentration.

Note [The derivative of a sample]
    A sample `z` keeps its quantile while the concentration `a` moves: ``dz/da = -(dP/da) / p``, where `P` is the regularized incomplete gamma
    function and `p` its derivative by `z`. With ``P = c * S``, ``c = z**a * exp(-z) / gamma(a + 1)`` and the series
    ``S = 1 + z/(a+1) + z**2/((a+1)*(a+2)) + ...``, the factor `c` cancels and nothing overflows or underflows:
    ``dz/da = -(z / a) * (S * (log(z) - digamma(a + 1)) - T)``, where `T` has the terms of `S`, each times ``1/(a+1) + ... + 1/(a+n)``. The
    series takes about ``z - a + 8 * sqrt(a)`` terms. For a large `z` the bracket is a small difference of large numbers, which loses digits
    only for samples far out in the tail.

Source: Figurnov, Mohamed, Mnih, Implicit reparameterization gradients (2018).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from aiograd.functional.function import Function, once_differentiable
from aiograd.ops.gamma import digamma
from aiograd.tensors.core import host_array, make
from aiograd.tensors.tensor import Tensor

#: terms smaller than this part of the sum are left out
_PRECISION = 1e-17


def sample_slope(sample: Any, concentration: Any) -> Any:
    """The derivative of samples by the concentration; see Note [The derivative of a sample].

    Args:
        sample: above 0.
        concentration: above 0, of the same shape.
    """
    z, a = (np.atleast_1d(np.asarray(x, np.float64)) for x in (sample, concentration))
    term, total, weighted, harmonic = np.ones_like(z), np.ones_like(z), np.zeros_like(z), np.zeros_like(z)
    scale = np.zeros_like(z)  # logarithm by which the sums are too small
    n = 0
    while np.any((term > _PRECISION * total) | (a + n < z)):
        n += 1
        term = term * (z / (a + n))
        harmonic = harmonic + 1.0 / (a + n)
        total, weighted = total + term, weighted + term * harmonic
        if n % 64 == 0:
            large = np.where(total > 1e100, 1e-100, 1.0)
            term, total, weighted = term * large, total * large, weighted * large
            scale = scale - np.log(large)
    with np.errstate(over="ignore"):
        slope = -(z / a) * (total * (np.log(z) - digamma(a + 1.0)) - weighted) * np.exp(scale)
    return slope.reshape(np.shape(sample))


class StandardGamma(Function):
    """A sample as a function of its concentration. Differentiable once."""

    inline = True

    @staticmethod
    def forward(ctx: Any, concentration: Tensor, sample: Any) -> Tensor:
        """The sample itself."""
        ctx.sample = sample
        ctx.concentration = host_array(concentration)
        return make(sample)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, None]:
        """Times the slope of the sample."""
        slope = sample_slope(ctx.sample, ctx.concentration)
        return grad * make(slope.astype(ctx.sample.dtype)), None

"""``ag.special`` with PyTorch's and numpy's names of parameters; written by ``python -m tests.function_stub``."""

# ruff: noqa: E704, I001

import builtins
from typing import overload

from aiograd.array_functions.conversion import ArrayLike, Axis
from aiograd.tensors.tensor import Tensor
from aiograd.array_functions.special import (
    bessel_j0 as bessel_j0, bessel_j1 as bessel_j1, bessel_y0 as bessel_y0, bessel_y1 as bessel_y1, beta as beta, betainc as betainc,
    betaincc as betaincc, betaln as betaln, digamma as digamma, entr as entr, erf as erf, erfc as erfc, erfcinv as erfcinv, erfcx as erfcx,
    erfinv as erfinv, expit as expit, exprel as exprel, gamma as gamma, gammainc as gammainc, gammaincc as gammaincc, gammaln as gammaln,
    gammasgn as gammasgn, i0 as i0, i0e as i0e, i1 as i1, i1e as i1e, iv as iv, ive as ive, j0 as j0, j1 as j1, jn as jn, jv as jv, k0 as k0,
    k1 as k1, lgamma as lgamma, log_ndtr as log_ndtr, logit as logit, multigammaln as multigammaln, ndtr as ndtr, ndtri as ndtri,
    polygamma as polygamma, psi as psi, rel_entr as rel_entr, rgamma as rgamma, sinc as sinc, stdtr as stdtr, xlog1py as xlog1py, xlogy as xlogy,
    y0 as y0, y1 as y1, yn as yn, zeta as zeta,
)  # fmt: skip
@overload
def log_softmax(x: ArrayLike, /, axis: builtins.int = -1) -> Tensor: ...
@overload
def log_softmax(x: ArrayLike, /, dim: builtins.int = -1) -> Tensor: ...
@overload
def logsumexp(a: ArrayLike, /, axis: Axis = None, b: ArrayLike | None = None, keepdims: builtins.bool = False) -> Tensor: ...
@overload
def logsumexp(a: ArrayLike, /, dim: Axis = None, b: ArrayLike | None = None, keepdim: builtins.bool = False) -> Tensor: ...
@overload
def softmax(x: ArrayLike, /, axis: builtins.int = -1) -> Tensor: ...
@overload
def softmax(x: ArrayLike, /, dim: builtins.int = -1) -> Tensor: ...

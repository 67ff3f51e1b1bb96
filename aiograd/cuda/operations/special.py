"""Special functions that numpy lacks or composes with arrays of its own."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from aiograd.cuda import tables
from aiograd.cuda.array import CudaArray
from aiograd.cuda.elementwise import elementwise


def _unary(name: str) -> Any:
    def implementation(x: CudaArray, /) -> Any:
        if x.dtype.kind not in "fiub":
            return NotImplemented
        dtype = x.dtype if x.dtype.kind == "f" else np.dtype(np.float64)
        return elementwise(name, (x,), (dtype, dtype))

    return implementation


for _name in ("erf", "erfc", "sigmoid"):
    tables.row(_name)(_unary(_name))


@tables.function(np.sinc)
def sinc(x: CudaArray) -> Any:
    """``sin(pi x) / (pi x)``, 1 at 0."""
    u = np.multiply(np.where(x == 0, 1, x), math.pi)
    return np.where(x == 0, 1, np.sin(u) / u).astype(u.dtype, copy=False)


@tables.row("sinc")
def sinc_derivative(x: CudaArray, /, order: int = 0) -> Any:
    """The derivative of `sinc` of this order: where the closed form would cancel, near 0, its power series."""
    if order == 0:
        return sinc(x)
    if x.dtype == np.float16:
        return sinc_derivative(x.astype(np.float32), order).astype(x.dtype)
    u = np.multiply(x, math.pi)
    near = np.absolute(u) < order + 2.0
    outside = np.where(near, 1.0, u)
    value = np.sin(outside) / outside
    for n in range(1, order + 1):
        value = (np.sin(outside + n * (math.pi / 2)) - n * value) / outside
    inside = np.where(near, u, 0.0)
    square = inside * inside
    first = (order + 1) // 2
    terms = [(-1.0) ** k / ((2 * k + 1) * math.factorial(2 * k - order)) for k in range(first, first + 14 + 2 * order)]
    series: Any = terms[-1]
    for term in reversed(terms[:-1]):
        series = series * square + term
    if (2 * first - order) % 2:
        series = series * inside
    return np.where(near, series, value) * math.pi**order


@tables.function(np.imag)
def imag(val: CudaArray) -> Any:
    """The imaginary parts: zeros where `val` is real."""
    return np.zeros_like(val) if val.dtype.kind != "c" else NotImplemented


@tables.function(np.angle)
def angle(z: CudaArray, deg: bool = False) -> Any:
    """The angle of `z` in the complex plane: 0 or pi where it is real."""
    if z.dtype.kind != "f":
        return NotImplemented
    turned = np.where(np.signbit(z), 180.0 if deg else math.pi, 0.0).astype(z.dtype)
    return np.where(np.isnan(z), z, turned)

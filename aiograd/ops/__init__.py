"""The op tables: importing this package fills them.

A family of functions to a file, a row to a function; `op` defines a row.

==================  ==============================================================================================
op, broadcasting    the class of a row, and the search for one; undoing broadcasting
creation            constants in the image of an array, copies, casts
masking             choosing by a condition
elementwise         arithmetic, powers, exponentials, trigonometry, rounding, extrema
complexes           between real and complex
special             erf, sinc, the logistic function and its relatives (error_function: how erf is computed)
gamma, bessel       the gamma function, zeta and their relatives; Bessel functions of orders 0 and 1
bessel_orders       Bessel functions of any order
incomplete          incomplete gamma and beta functions
activation          relu, gelu and others
comparison          comparisons, logic and tests, without gradients
shape, joining      rearranging; joining, splitting, repeating, padding
indexing            indexing and its adjoints; take, gather, scatter
reduction, scan     sums, means, extrema; cumulative sums, products, recurrences
cumulative          cumulative extrema and logsumexp
scattering          extrema of numbers scattered to one place
sorting             sort, topk, median, searches
statistics          quantiles, covariances, sums without NaN
calculus            differences, the trapezoidal rule, interpolation
windows, fft        sliding windows and convolution; Fourier transforms
linalg, einsum      products of matrices; Einstein summation
decomposition       inverses, factorisations
determinant         determinants and their derivatives
matrix_functions    eigenvalues of general matrices, the exponential, triangular systems, least squares
norms               norms of vectors and matrices
nn                  the fused rows that networks need
==================  ==============================================================================================
"""

from __future__ import annotations

from aiograd.ops import (
    activation,
    bessel,
    bessel_orders,
    calculus,
    comparison,
    complexes,
    creation,
    cumulative,
    decomposition,
    determinant,
    einsum,
    elementwise,
    fft,
    gamma,
    incomplete,
    indexing,
    joining,
    linalg,
    masking,
    matrix_functions,
    nn,
    norms,
    reduction,
    scan,
    scattering,
    shape,
    sorting,
    special,
    statistics,
    windows,
)
from aiograd.ops.broadcasting import unbroadcast
from aiograd.ops.op import FUNCTIONS, ROWS, UFUNCS, Fused, Op, define, implements

__all__ = [
    "FUNCTIONS", "ROWS", "UFUNCS", "Fused", "Op", "activation", "bessel", "bessel_orders", "calculus", "comparison", "complexes", "creation",
    "cumulative", "decomposition", "determinant", "define", "einsum", "elementwise", "fft", "gamma", "implements", "incomplete", "indexing",
    "joining", "linalg", "masking", "matrix_functions", "nn", "norms", "reduction", "scan", "scattering", "shape", "sorting", "special",
    "statistics", "unbroadcast", "windows",
]  # fmt: skip

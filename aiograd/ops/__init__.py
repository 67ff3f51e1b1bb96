"""The op tables: importing this package fills them.

A family of functions to a file, a row to a function; `op` says what a row is.

==================  ==============================================================================================
op, broadcasting    what a row is and how rows are found; undoing broadcasting
creation            constants in the image of an array, copies, casts
masking             choosing by a condition
elementwise         arithmetic, powers, exponentials, trigonometry, rounding, extrema
complexes           between real and complex
special             erf, sinc, the logistic function and its relatives (error_function: how erf is computed)
activation          relu, gelu and others
comparison          comparisons, logic and tests, without gradients
shape, joining      rearranging; joining, splitting, repeating, padding
indexing            indexing and its adjoints; take, gather, scatter
reduction, scan     sums, means, extrema; cumulative sums, products, recurrences
sorting             sort, topk, median, searches
linalg, einsum      products of matrices; Einstein summation
decomposition       inverses, determinants, factorisations
norms               norms of vectors and matrices
nn                  the fused rows that networks need
==================  ==============================================================================================
"""

from __future__ import annotations

from aiograd.ops import (
    activation,
    comparison,
    complexes,
    creation,
    decomposition,
    einsum,
    elementwise,
    indexing,
    joining,
    linalg,
    masking,
    nn,
    norms,
    reduction,
    scan,
    shape,
    sorting,
    special,
)
from aiograd.ops.broadcasting import unbroadcast
from aiograd.ops.op import FUNCTIONS, ROWS, UFUNCS, Fused, Op, define, implements

__all__ = [
    "FUNCTIONS",
    "ROWS",
    "UFUNCS",
    "Fused",
    "Op",
    "activation",
    "comparison",
    "complexes",
    "creation",
    "decomposition",
    "define",
    "einsum",
    "elementwise",
    "implements",
    "indexing",
    "joining",
    "linalg",
    "masking",
    "nn",
    "norms",
    "reduction",
    "scan",
    "shape",
    "sorting",
    "special",
    "unbroadcast",
]

"""Products: `numpy.matmul` of two matrices as `numpy.dot`, which costs half as much where they are small.

Both hand two matrices of one floating dtype, in row-major or column-major order and with no axis of length 1, to the same routine of the BLAS with
the same arguments, so the bits are the same. Other layouts and shapes they treat differently: those stay. `numpy.dot` does not look for floating
point errors afterwards, so an overflow inside of a product gives no warning.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from aiograd.compiler.calls import ArrayCode, Call, Ref


def with_products_by_dot(code: ArrayCode) -> ArrayCode:
    """The code with `numpy.dot` in the place of `numpy.matmul` where the two do the same."""
    return replace(code, calls=tuple([call.but(function=np.dot, label="dot") if _is_plain(call) else call for call in code.calls]))


def _is_plain(call: Call) -> bool:
    if call.function is not np.matmul or call.out is not None or call.options or len(call.arguments) != 2:
        return False
    one, other = call.arguments
    if not (isinstance(one, Ref) and isinstance(other, Ref) and _is_dense(one) and _is_dense(other) and call.results[0].is_in_order):
        return False
    return one.dtype == other.dtype


def _is_dense(ref: Any) -> bool:
    if ref.shape is None or len(ref.shape) != 2 or min(ref.shape) < 2 or ref.dtype.kind not in "fc" or ref.dtype.char not in "fdFD":
        return False
    (rows, columns), size = ref.shape, ref.dtype.itemsize
    return ref.strides in ((columns * size, size), (size, rows * size))

"""Products: `numpy.matmul` of two matrices as `numpy.dot`, which costs half as much where they are small.

Both hand two matrices of one floating dtype, in row-major or column-major order and with no axis of length 1, to the same routine of the BLAS with
the same arguments, so the bits are the same. Other layouts and shapes they treat differently: those stay. `numpy.dot` does not look for floating
point errors afterwards, so an overflow inside of a product gives no warning.

`numpy.dot` copies a matrix whose rows or columns are one in memory, as of a broadcast number; that copy is a call of its own, since a native
function knows products of matrices without gaps only.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from aiograd.compiler.calls import ArrayCode, Call, Form, Ref


def with_products_by_dot(code: ArrayCode) -> ArrayCode:
    """The code with `numpy.dot` in the place of `numpy.matmul` where the two do the same."""
    calls: list[Call] = []
    for call in code.calls:
        if _is_plain(call):
            call = call.but(function=np.dot, label="dot")
        elif call.function is np.dot:
            for each in {each for each in call.arguments if isinstance(each, Ref) and _repeats(each)}:
                copy = Ref(f"{each.name}_{call.results[0].name}", each.shape, each.dtype, np.empty(each.shape or (), each.dtype).strides)
                calls.append(Call(Form.METHOD, "copy", "copy", (each,), (copy,), fresh=True, comment=call.comment))
                call = call.replaced({each: copy})
        calls.append(call)
    return replace(code, calls=tuple(calls))


def _repeats(ref: Ref) -> bool:
    """True for a matrix with memory that counts several times."""
    steps = list(zip(ref.shape or (), ref.strides or (), strict=False))
    return len(steps) == 2 and 0 not in (ref.shape or ()) and any([stride == 0 and length > 1 for length, stride in steps])


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

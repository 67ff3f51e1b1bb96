"""numpy's own loops: their addresses, and how numpy would call them for given arrays.

Note [The same call]
    A loop is called as numpy calls it: with the same counts, steps and order of elements, so that the bits are the same, however the
    loop treats whole vectors and the rest. `elementwise_plan` and `reduction_plan` know only arrays that numpy goes through in few such calls,
    or in one for each row without gaps; of others they give None, and the call stays Python.
"""

from __future__ import annotations

import ctypes
import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from aiograd.running.types import Shape

#: offsets in numpy's structure of a ufunc: inputs, outputs, functions, data, their number, types
_NIN, _NOUT, _FUNCTIONS, _DATA, _COUNT, _TYPES = 16, 20, 32, 40, 48, 64
#: kinds of dtypes with loops that need no interpreter lock and no conversion
_KINDS = "fdFD?bBhHiIlLqQ"


def _word(address: int) -> int:
    return int(ctypes.c_uint64.from_address(address).value)


@functools.cache
def ufunc_problem() -> str | None:
    """Why numpy's loops cannot be called in this process; None if they can."""
    if tuple(map(int, np.__version__.split(".")[:1])) != (2,):
        return f"numpy {np.__version__} has an unknown layout of ufuncs"
    for ufunc in (np.add, np.tanh, np.matmul):
        count, base = len(ufunc.types), id(ufunc)
        numbers = [ctypes.c_int.from_address(base + offset).value for offset in (_NIN, _NOUT, _COUNT)]
        if numbers != [ufunc.nin, ufunc.nout, count]:
            return f"numpy {np.__version__} has an unknown layout of ufuncs"
        types = ctypes.string_at(_word(base + _TYPES), count * ufunc.nargs)
        if [np.dtype(each).num for each in "".join(ufunc.types).replace("->", "")] != list(types):
            return f"numpy {np.__version__} has an unknown layout of ufuncs"
    one, two, out = np.arange(3.0), np.ones(3), np.empty(3)
    _call(np.add, "dd->d", (one, two, out), (3,), (8, 8, 8))
    return None if out.tolist() == [1.0, 2.0, 3.0] else f"loops of numpy {np.__version__} are called in an unknown way"


def _call(ufunc: np.ufunc, types: str, arrays: tuple[Any, ...], dimensions: tuple[int, ...], steps: tuple[int, ...]) -> None:
    address, data = loop_addresses(ufunc, types)
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)(address)
    pointers = (ctypes.c_void_p * len(arrays))(*[array.ctypes.data for array in arrays])
    function(pointers, (ctypes.c_int64 * len(dimensions))(*dimensions), (ctypes.c_int64 * len(steps))(*steps), data)


def loop_addresses(ufunc: np.ufunc, types: str) -> tuple[int, int]:
    """The address of a loop, and of the data that it is given."""
    place = ufunc.types.index(types)
    functions, data = _word(id(ufunc) + _FUNCTIONS), _word(id(ufunc) + _DATA)
    return _word(functions + 8 * place), _word(data + 8 * place) if data else 0


def loop_types(ufunc: np.ufunc, dtypes: tuple[np.dtype[Any], ...]) -> str | None:
    """The types of the loop for operands of these dtypes, as in `numpy.ufunc.types`; None if there is none that can be called."""
    if ufunc is np.power and dtypes[-1].kind in "iu":
        return None  # its loop raises an error for a negative exponent
    chars = [dtype.char for dtype in dtypes]
    if not all([char in _KINDS for char in chars]) or getattr(np, ufunc.__name__, None) is not ufunc:
        return None
    types = f"{''.join(chars[: ufunc.nin])}->{''.join(chars[ufunc.nin :])}"
    return types if types in ufunc.types else None


#: loops around a call: for each its length, and the bytes by which the operands move on
Around = tuple[tuple[int, tuple[int, ...]], ...]


def elementwise_plan(shape: Shape, operands: list[tuple[Shape, tuple[int, ...], int]]) -> tuple[Around, int, tuple[int, ...]] | None:
    """The calls that numpy makes for these operands, the result last: the loops around one call, and its count and steps.

    Args:
        shape: of the result.
        operands: of each, shape, strides, and bytes of an element.
    """
    _, result, size = operands[-1]
    count = math.prod(shape)
    if count == 1:
        return (), count, tuple([size for _, _, size in operands])
    if count > 1 and not _is_dense(shape, result, size):
        return None
    if not all([math.prod(own) == 1 or (own == shape and strides is not None) for own, strides, _ in operands]):
        return None
    walk: list[tuple[int, tuple[int, ...]]] = []
    for axis in _axes(shape, result):
        length, moves = shape[axis], tuple([0 if math.prod(own) == 1 else strides[axis] for own, strides, _ in operands])
        if walk and walk[-1][1] == tuple([move * length for move in moves]):
            length *= walk.pop()[0]
        walk.append((length, moves))
    *outer, (count, steps) = walk
    for (own, _, size), step in zip(operands, steps, strict=True):
        if math.prod(own) != 1 and (step != size if outer else step <= 0):
            return None
    return tuple(outer), count, steps


def _axes(shape: Shape, strides: tuple[int, ...]) -> list[int]:
    """Axes longer than 1, the one with the longest stride first."""
    return sorted([axis for axis in range(len(shape)) if shape[axis] != 1], key=lambda axis: -abs(strides[axis]))


def _is_dense(shape: Shape, strides: tuple[int, ...], size: int) -> bool:
    expected = size
    for axis in reversed(_axes(shape, strides)):
        if strides[axis] != expected:
            return False
        expected *= shape[axis]
    return True


@dataclass(frozen=True)
class ReductionPlan:
    """How numpy reduces an array.

    Attributes:
        outer: lengths of the loops around the call, and the bytes by which result and array move on.
        count: elements of one call.
        steps: of result and array in a call.
    """

    outer: tuple[tuple[int, tuple[int, int]], ...]
    count: int
    steps: tuple[int, int]


def reduction_plan(
    shape: Shape, strides: tuple[int, ...], size: int, axes: tuple[int, ...], kept: Shape, result: tuple[int, ...]
) -> ReductionPlan | None:
    """How numpy goes through an array to reduce it; None if that is not known here.

    Args:
        shape, strides, size: of the array, and of its elements.
        axes: that are reduced.
        kept: shape of the result with the reduced axes as axes of length 1.
        result: strides of that.
    """
    if not math.prod(shape) or not _is_dense(shape, strides, size):
        return None
    walk: list[tuple[int, int, int]] = []
    for axis in _axes(shape, strides):
        own = 0 if axis in axes else result[axis]
        if walk and walk[-1][1] == own * shape[axis] and walk[-1][2] == strides[axis] * shape[axis] and bool(walk[-1][1]) is bool(own):
            walk[-1] = walk[-1][0] * shape[axis], own, strides[axis]
        else:
            walk.append((shape[axis], own, strides[axis]))
    if not walk:
        return ReductionPlan((), 1, (0, size))
    *outer, (count, step, inner) = walk
    return ReductionPlan(tuple([(length, (own, each)) for length, own, each in outer]), count, (step, inner))

"""Transposed copies, by square blocks that are turned in registers.

Copying number by number costs about a nanosecond each, since one side is always strided; a block of 8 x 8 float32 takes 8 loads, 24
shuffles and 8 stores.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from aiograd.kernels.compiled.jit import inline

_i32, _i64 = ir.IntType(32), ir.IntType(64)

# Each stage combines rows `distance` apart, first by the first list and then by the second. The lists move data within 16-byte lanes where
# they can, which takes one instruction per row on every CPU that has the registers.
_STAGES8 = (
    (1, (0, 8, 1, 9, 4, 12, 5, 13), (2, 10, 3, 11, 6, 14, 7, 15)),
    (2, (0, 1, 8, 9, 4, 5, 12, 13), (2, 3, 10, 11, 6, 7, 14, 15)),
    (4, (0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)),
)
_STAGES4 = ((1, (0, 4, 2, 6), (1, 5, 3, 7)), (2, (0, 1, 4, 5), (2, 3, 6, 7)))


# the stages leave column k in this place
_PLACES8 = (0, 2, 1, 3, 4, 6, 5, 7)
_PLACES4 = (0, 1, 2, 3)


def _turned(builder: Any, rows: list[Any], single: bool) -> list[Any]:
    """The rows of the transpose of a square block."""
    for distance, first, second in _STAGES8 if single else _STAGES4:
        combined: list[Any] = [None] * len(rows)
        for low in range(len(rows)):
            if low & distance:
                continue
            for target, order in ((low, first), (low + distance, second)):
                mask = ir.Constant(ir.VectorType(_i32, len(order)), list(order))
                combined[target] = builder.shuffle_vector(rows[low], rows[low + distance], mask)
        rows = combined
    return [rows[place] for place in (_PLACES8 if single else _PLACES4)]


@intrinsic
def _turn(context: Any, a: Any, a_start: Any, a_stride: Any, b: Any, b_start: Any, b_stride: Any) -> Any:
    """Write the transpose of the block of `a` at `a_start` to `b` at `b_start`; 8 x 8 float32 or 4 x 4 float64."""
    signature = types.void(a, types.int64, types.int64, b, types.int64, types.int64)

    def codegen(target: Any, builder: Any, signature: Any, args: Any) -> Any:
        single = signature.args[0].dtype == types.float32
        side = 8 if single else 4
        vector = ir.VectorType(ir.FloatType() if single else ir.DoubleType(), side)

        def line(position: int, row: int) -> Any:
            data = target.make_array(signature.args[position])(target, builder, args[position]).data
            offset = builder.add(args[position + 1], builder.mul(args[position + 2], _i64(row)))
            return builder.bitcast(builder.gep(data, [offset]), vector.as_pointer())

        rows = []
        for r in range(side):
            rows.append(builder.load(line(0, r)))
            rows[-1].align = 4 if single else 8
        for r, row in enumerate(_turned(builder, rows, single)):
            builder.store(row, line(3, r)).align = 4 if single else 8
        return target.get_dummy_value()

    return signature, codegen


@inline
def transposed_copy(a: Any, a_start: int, a_stride: int, rows: int, columns: int, b: Any, b_start: int, b_stride: int) -> None:
    """Copy the transpose of a matrix of `rows` x `columns`.

    Args:
        a: contiguous; holds the matrix.
        a_start: offset, in elements, of its first number.
        a_stride: from row to row.
        rows: of the matrix.
        columns: of the matrix.
        b: contiguous; takes the transpose.
        b_start: offset of its first number.
        b_stride: from row to row.
    """
    side = 32 // a.itemsize
    whole_rows, whole_columns = rows - rows % side, columns - columns % side
    for r in range(0, whole_rows, side):
        for c in range(0, whole_columns, side):
            _turn(a, a_start + r * a_stride + c, a_stride, b, b_start + c * b_stride + r, b_stride)
    if whole_rows < rows or whole_columns < columns:
        source, target = a.ravel(), b.ravel()
        for r in range(rows):
            for c in range(whole_columns if r < whole_rows else 0, columns):
                target[b_start + c * b_stride + r] = source[a_start + r * a_stride + c]

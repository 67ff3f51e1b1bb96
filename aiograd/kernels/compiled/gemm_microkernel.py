"""A small block of a matrix product held in registers: the one loop that matrix products, convolution, attention and LSTM spend their time in.

``gemm_microkernel`` computes, for ROWS rows and `width` columns,

    c[r, j] = sum over k < depth of  a[row_offsets[r] + depth_offsets[k]] * b[k, j]

Because each operand of `a` is found by adding two table entries, one loop serves a plain matrix, its transpose, and the windows of a
convolution (where the row says which window and k says which channel and tap), so nothing is unfolded or transposed in memory
first. `b` is read in panels: rows of exactly `width` numbers.

Note [The shape of the block]
    Each step loads `vectors` vectors of `b` and multiplies them by ROWS broadcast numbers of `a` into ROWS x vectors accumulators.
    They must fit the registers with a few to spare, or the compiler spills them and the loop runs three times slower; so the shape
    depends on the CPU. With 8 x 2 vectors of 64 bytes it reaches 90 of about 98 GFLOP/s (float32) of a Zen 4 core. CPUs for which
    LLVM avoids 64-byte vectors get 32-byte ones, of which AVX-512 has 32 registers too.

Without fused multiply-add in the CPU, ``fmuladd`` is a product and a sum, where ``fma`` would be a call per number.

Rejected: leaving the loop to LLVM's vectoriser (it does not keep accumulators of an outer loop in registers); im2col and a BLAS
GEMM (the columns are nine times the input of a 3x3 convolution, and were 1.6 times slower).
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils, config
from numba.extending import intrinsic


def _block_shape() -> tuple[int, int, int]:
    """Bytes per vector, rows, vectors; see Note [The shape of the block]."""
    cpu = config.CPU_NAME or llvm.get_host_cpu_name()
    if config.CPU_FEATURES is not None:
        features = {name[1:] for name in config.CPU_FEATURES.split(",") if name.startswith("+")}
    else:
        features = {name for name, present in llvm.get_host_cpu_features().items() if present}
    if "avx512f" in features and cpu.startswith("znver"):
        return 64, 8, 2
    if "avx512vl" in features:
        return 32, 6, 4
    if "avx2" in features:
        return 32, 6, 2
    return 16, 6, 4 if "neon" in features else 2


BYTES, ROWS, _VECTORS = _block_shape()
_i32, _i64 = ir.IntType(32), ir.IntType(64)


def width(dtype: Any) -> int:
    """Columns of a block."""
    return BYTES // int(np.dtype(dtype).itemsize) * _VECTORS


def _compile_block(a: Any, row_offsets: Any, depth_offsets: Any, b: Any, c: Any, adds: bool) -> tuple[Any, Any]:
    """The signature and the code of `gemm_microkernel`, or with `adds` of `gemm_microkernel_add`."""
    signature = types.void(a, types.int64, row_offsets, types.int64, depth_offsets, types.int64, b, types.int64, c, types.int64, types.int64)

    def codegen(target: Any, builder: Any, signature: Any, args: Any) -> Any:
        def memory(position: int) -> Any:
            return target.make_array(signature.args[position])(target, builder, args[position]).data

        single = signature.args[0].dtype == types.float32
        lanes = BYTES // (4 if single else 8)
        element = ir.FloatType() if single else ir.DoubleType()
        vector = ir.VectorType(element, lanes)
        multiply_add = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(vector, [vector] * 3), f"llvm.fmuladd.v{lanes}f{32 if single else 64}"
        )
        undefined = ir.Constant(vector, ir.Undefined)
        same = ir.Constant(ir.VectorType(_i32, lanes), [0] * lanes)

        def vector_at(pointer: Any, offset: Any) -> Any:
            return builder.bitcast(builder.gep(pointer, [offset]), vector.as_pointer())

        start = builder.gep(memory(0), [args[1]])
        table = builder.gep(memory(2), [args[3]])
        rows = [builder.gep(start, [builder.load(builder.gep(table, [_i64(r)]))]) for r in range(ROWS)]
        depth_table, panel = memory(4), builder.gep(memory(6), [args[7]])

        align = element.get_abi_size(target.target_data)

        def places() -> list[Any]:
            corner = builder.gep(memory(8), [args[9]])
            lines = [builder.gep(corner, [builder.mul(args[10], _i64(r))]) for r in range(ROWS)]
            return [vector_at(line, _i64(v * lanes)) for line in lines for v in range(_VECTORS)]

        first_sums = [ir.Constant(vector, [0.0] * lanes)] * (ROWS * _VECTORS)
        if adds:
            first_sums = [builder.load(place) for place in places()]
            for loaded in first_sums:
                loaded.align = align

        before = builder.block
        loop, after = builder.append_basic_block("tile.depth"), builder.append_basic_block("tile.store")
        builder.branch(loop)
        builder.position_at_end(loop)
        k, pointer = builder.phi(_i64), builder.phi(panel.type)
        sums = [builder.phi(vector) for _ in range(ROWS * _VECTORS)]
        offset = builder.load(builder.gep(depth_table, [k]))
        columns = []
        for v in range(_VECTORS):
            columns.append(builder.load(vector_at(pointer, _i64(v * lanes))))
            columns[-1].align = align
        totals = []
        for r in range(ROWS):
            number = builder.insert_element(undefined, builder.load(builder.gep(rows[r], [offset])), _i32(0))
            number = builder.shuffle_vector(number, undefined, same)
            totals += [builder.call(multiply_add, [number, columns[v], sums[r * _VECTORS + v]]) for v in range(_VECTORS)]
        next_k, next_pointer = builder.add(k, _i64(1)), builder.gep(pointer, [_i64(lanes * _VECTORS)])
        for phi, first, later in [(k, _i64(0), next_k), (pointer, panel, next_pointer), *zip(sums, first_sums, totals, strict=True)]:
            phi.add_incoming(first, before)
            phi.add_incoming(later, loop)
        builder.cbranch(builder.icmp_signed("<", next_k, args[5]), loop, after)

        builder.position_at_end(after)
        for total, place in zip(totals, places(), strict=True):
            builder.store(total, place).align = align
        return target.get_dummy_value()

    return signature, codegen


@intrinsic
def gemm_microkernel(context: Any, a: Any, a_start: Any, row_offsets: Any, row: Any, depth_offsets: Any, depth: Any, b: Any, b_start: Any, c: Any, c_start: Any, c_stride: Any) -> Any:  # noqa: E501
    """Write one block of the product to `c`.

    Args:
        a: array with the memory that the offsets (in elements) refer to, after `a_start`.
        a_start: offset of the operand.
        row_offsets: int64 table; entries `row` to ``row + ROWS - 1`` are used.
        row: first entry.
        depth_offsets: int64 table of `depth` entries.
        depth: length of the sums, at least 1.
        b: panels, contiguous; `depth` rows of `width` numbers from `b_start` on.
        b_start: offset of the panel.
        c: where the block goes: ROWS rows of `width` numbers, `c_stride` apart, from `c_start` on.
        c_start: offset of the block.
        c_stride: offset between its rows.
    """
    return _compile_block(a, row_offsets, depth_offsets, b, c, adds=False)


@intrinsic
def gemm_microkernel_add(context: Any, a: Any, a_start: Any, row_offsets: Any, row: Any, depth_offsets: Any, depth: Any, b: Any, b_start: Any, c: Any, c_start: Any, c_stride: Any) -> Any:  # noqa: E501
    """`gemm_microkernel` that begins its sums with the numbers in `c`."""
    return _compile_block(a, row_offsets, depth_offsets, b, c, adds=True)

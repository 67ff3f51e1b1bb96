"""Copies of short lines by vectors, whole or every second number: what lies between a kernel's arrays and its scratch memory.

A loop over 14 or 28 numbers spends its time in the remainder that the vectoriser leaves at the end. Here the last vector of a line is loaded and
stored under a mask, so that nothing beyond the line is read or written.

Measured by ``tests/benchmarks/layers.py`` (depthwise convolution: a third of the time).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from aiograd.kernels.compiled.gemm_microkernel import BYTES
from aiograd.kernels.compiled.jit import inline

_i32, _i64 = ir.IntType(32), ir.IntType(64)


class _Vectors:
    """Writes vector instructions for arrays of one float type."""

    def __init__(self, target: Any, builder: Any, dtype: Any) -> None:
        single = dtype == types.float32
        self.target, self.builder = target, builder
        self.lanes = BYTES // (4 if single else 8)
        self.element = ir.FloatType() if single else ir.DoubleType()
        self.vector = ir.VectorType(self.element, self.lanes)
        self.mask_type = ir.VectorType(ir.IntType(1), self.lanes)
        self.align = self.element.get_abi_size(target.target_data)
        self.suffix = f"v{self.lanes}f{32 if single else 64}.p0"

    def at(self, array_type: Any, array: Any, offset: Any) -> Any:
        data = self.target.make_array(array_type)(self.target, self.builder, array).data
        return self.builder.bitcast(self.builder.gep(data, [offset]), self.vector.as_pointer())

    def first(self, count: Any, skipped: int = 0) -> Any:
        """The mask of the lanes below `count`, of the vector that begins with lane `skipped`."""
        builder, wide = self.builder, ir.VectorType(_i64, self.lanes)
        spread = builder.insert_element(ir.Constant(wide, ir.Undefined), count, _i32(0))
        spread = builder.shuffle_vector(spread, ir.Constant(wide, ir.Undefined), ir.Constant(ir.VectorType(_i32, self.lanes), [0] * self.lanes))
        return builder.icmp_signed("<", ir.Constant(wide, list(range(skipped, skipped + self.lanes))), spread)

    def load(self, pointer: Any, mask: Any) -> Any:
        kind = ir.FunctionType(self.vector, [pointer.type, _i32, self.mask_type, self.vector])
        function = cgutils.get_or_insert_function(self.builder.module, kind, f"llvm.masked.load.{self.suffix}")
        return self.builder.call(function, [pointer, _i32(self.align), mask, ir.Constant(self.vector, [0.0] * self.lanes)])

    def store(self, value: Any, pointer: Any, mask: Any) -> None:
        kind = ir.FunctionType(ir.VoidType(), [self.vector, pointer.type, _i32, self.mask_type])
        function = cgutils.get_or_insert_function(self.builder.module, kind, f"llvm.masked.store.{self.suffix}")
        self.builder.call(function, [value, pointer, _i32(self.align), mask])

    def pick(self, a: Any, b: Any, indices: list[int]) -> Any:
        return self.builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_i32, self.lanes), indices))


@intrinsic
def _lanes(context: Any, a: Any) -> Any:
    """Numbers per vector."""
    return types.int64(a), lambda target, builder, signature, args: _i64(BYTES // (4 if a.dtype == types.float32 else 8))


@intrinsic
def _copy(context: Any, a: Any, a_start: Any, b: Any, b_start: Any, count: Any) -> Any:
    """Copy at most a vector of `count` numbers from `a` to `b`."""

    def codegen(target: Any, builder: Any, signature: Any, args: Any) -> Any:
        v = _Vectors(target, builder, a.dtype)
        mask = v.first(args[4])
        v.store(v.load(v.at(a, args[0], args[1]), mask), v.at(b, args[2], args[3]), mask)
        return target.get_dummy_value()

    return types.void(a, types.int64, b, types.int64, types.int64), codegen


@intrinsic
def _copy_second(context: Any, a: Any, a_start: Any, b: Any, b_start: Any, count: Any) -> Any:
    """Copy every second number of `a`, at most a vector of `count` of them, side by side into `b`."""

    def codegen(target: Any, builder: Any, signature: Any, args: Any) -> Any:
        v = _Vectors(target, builder, a.dtype)
        source = v.at(a, args[0], args[1])
        wide = builder.sub(builder.add(args[4], args[4]), _i64(1))
        low, high = v.load(source, v.first(wide)), v.load(builder.gep(source, [_i64(1)]), v.first(wide, v.lanes))
        v.store(v.pick(low, high, list(range(0, 2 * v.lanes, 2))), v.at(b, args[2], args[3]), v.first(args[4]))
        return target.get_dummy_value()

    return types.void(a, types.int64, b, types.int64, types.int64), codegen


@intrinsic
def _merge(context: Any, a: Any, a_start: Any, other_start: Any, b: Any, b_start: Any, count: Any) -> Any:
    """Write `count` numbers to `b`, at most two vectors, in turn from two places of `a`."""

    def codegen(target: Any, builder: Any, signature: Any, args: Any) -> Any:
        v = _Vectors(target, builder, a.dtype)
        evens = v.first(builder.ashr(builder.add(args[5], _i64(1)), _i64(1)))
        odds = v.first(builder.ashr(args[5], _i64(1)))
        first, second = v.load(v.at(a, args[0], args[1]), evens), v.load(v.at(a, args[0], args[2]), odds)
        order = [half + lane for half in range(v.lanes) for lane in (0, v.lanes)]
        place = v.at(b, args[3], args[4])
        v.store(v.pick(first, second, order[: v.lanes]), place, v.first(args[5]))
        v.store(v.pick(first, second, order[v.lanes :]), builder.gep(place, [_i64(1)]), v.first(args[5], v.lanes))
        return target.get_dummy_value()

    return types.void(a, types.int64, types.int64, b, types.int64, types.int64), codegen


@inline
def copy_line(a: Any, a_start: int, b: Any, b_start: int, count: int) -> None:
    """``b[b_start : b_start + count] = a[a_start : a_start + count]`` of flat arrays."""
    lanes = _lanes(a)
    for k in range(0, count, lanes):
        _copy(a, a_start + k, b, b_start + k, count - k)


@inline
def copy_every_second(a: Any, a_start: int, b: Any, b_start: int, count: int) -> None:
    """``b[b_start : b_start + count] = a[a_start : a_start + 2 * count - 1 : 2]``."""
    lanes = _lanes(a)
    for k in range(0, count, lanes):
        _copy_second(a, a_start + 2 * k, b, b_start + k, min(count - k, lanes))


@inline
def merge_lines(a: Any, a_start: int, other_start: int, b: Any, b_start: int, count: int) -> None:
    """Write `count` numbers to `b` from `b_start` on, the first, third, ... from `a_start` on and the others from `other_start` on."""
    lanes = 2 * _lanes(a)
    for k in range(0, count, lanes):
        _merge(a, a_start + k // 2, other_start + k // 2, b, b_start + k, min(count - k, lanes))


@inline
def whole_vectors(length: int) -> int:
    """`length` rounded up so far that a loop of this length leaves nothing over."""
    return (length + 63) >> 6 << 6


@inline
def zeros(length: int, like: Any) -> Any:
    """Scratch memory of `length` numbers, and as many more as a loop over `whole_vectors` of a part of it touches."""
    return np.zeros(whole_vectors(length) + 64, like.dtype)

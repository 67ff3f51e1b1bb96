"""A vector of numbers as a value of compiled code: a loop with sums that must stay in registers says so, rather than hope for the vectoriser.

Vectors have as many lanes as `aiograd.kernels.compiled.gemm_microkernel` finds best for the CPU.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

from aiograd.kernels.compiled.gemm_microkernel import BYTES

_i32, _i64 = ir.IntType(32), ir.IntType(64)


class Vector(types.Type):
    """The type of a vector of `dtype`."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype
        self.lanes = BYTES // (4 if dtype == types.float32 else 8)
        super().__init__(name=f"Vector({dtype})")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Vector) -> None:
        element = ir.FloatType() if kind.dtype == types.float32 else ir.DoubleType()
        super().__init__(manager, kind, ir.VectorType(element, kind.lanes))


def _lane_numbers(builder: Any, lanes: int, first: Any) -> Any:
    """``first``, ``first + 1``, ... as 32-bit numbers."""
    kind = ir.VectorType(_i32, lanes)
    return builder.add(_spread(builder, builder.trunc(first, _i32), lanes), ir.Constant(kind, list(range(lanes))))


def _spread(builder: Any, value: Any, lanes: int) -> Any:
    kind = ir.VectorType(value.type, lanes)
    single = builder.insert_element(ir.Constant(kind, ir.Undefined), value, _i32(0))
    return builder.shuffle_vector(single, ir.Constant(kind, ir.Undefined), ir.Constant(ir.VectorType(_i32, lanes), [0] * lanes))


def _below(builder: Any, numbers: Any, limit: Any, lanes: int) -> Any:
    """The mask of the numbers from 0 to `limit`, which is left out."""
    return builder.icmp_unsigned("<", numbers, _spread(builder, builder.trunc(limit, _i32), lanes))


def _pointer(target: Any, builder: Any, array_type: Any, array: Any, offset: Any, vector: Any) -> Any:
    return builder.bitcast(builder.gep(target.make_array(array_type)(target, builder, array).data, [offset]), vector.as_pointer())


def _masked(builder: Any, name: str, kind: Any, vector: Any, args: list[Any]) -> Any:
    suffix = f"v{vector.count}f{32 if isinstance(vector.element, ir.FloatType) else 64}.p0"
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.masked.{name}.{suffix}"), args)


@intrinsic
def lanes(context: Any, like: Any) -> Any:
    """Numbers per vector of an array's type."""
    return types.int64(like), lambda target, builder, signature, args: _i64(Vector(like.dtype).lanes)


@intrinsic
def filled(context: Any, value: Any) -> Any:
    """A vector of one number."""
    kind = Vector(value)
    return kind(value), lambda target, builder, signature, args: _spread(builder, args[0], kind.lanes)


@intrinsic
def load(context: Any, a: Any, start: Any, column: Any, width: Any, count: Any) -> Any:
    """The numbers from `column` on, at most `count`, of the row of `width` numbers at `start` of a flat array; zeros on both sides of the row."""
    kind = Vector(a.dtype)

    def codegen(target: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = target.get_value_type(kind)
        mask = _below(builder, _lane_numbers(builder, kind.lanes, args[2]), args[3], kind.lanes)
        mask = builder.and_(mask, _below(builder, _lane_numbers(builder, kind.lanes, _i64(0)), args[4], kind.lanes))
        place = _pointer(target, builder, a, args[0], builder.add(args[1], args[2]), vector)
        function = ir.FunctionType(vector, [place.type, _i32, mask.type, vector])
        align = vector.element.get_abi_size(target.target_data)
        return _masked(builder, "load", function, vector, [place, _i32(align), mask, ir.Constant(vector, [0.0] * kind.lanes)])

    return kind(a, types.int64, types.int64, types.int64, types.int64), codegen


@intrinsic
def store(context: Any, value: Any, a: Any, start: Any, count: Any) -> Any:
    """Write at most `count` numbers of a vector to a flat array."""

    def codegen(target: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = args[0].type
        mask = _below(builder, _lane_numbers(builder, value.lanes, _i64(0)), args[3], value.lanes)
        place = _pointer(target, builder, a, args[1], args[2], vector)
        function = ir.FunctionType(ir.VoidType(), [vector, place.type, _i32, mask.type])
        _masked(builder, "store", function, vector, [args[0], place, _i32(vector.element.get_abi_size(target.target_data)), mask])
        return target.get_dummy_value()

    return types.void(value, a, types.int64, types.int64), codegen


@intrinsic
def multiply_add(context: Any, a: Any, b: Any, c: Any) -> Any:
    """``a * b + c``."""

    def codegen(target: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = args[0].type
        name = f"llvm.fmuladd.v{a.lanes}f{32 if a.dtype == types.float32 else 64}"
        return builder.call(cgutils.get_or_insert_function(builder.module, ir.FunctionType(vector, [vector] * 3), name), args)

    return a(a, a, a), codegen


@intrinsic
def total(context: Any, value: Any) -> Any:
    """The sum of the lanes: of the two halves, lane by lane, then of the halves of that."""

    def codegen(target: Any, builder: Any, signature: Any, args: Any) -> Any:
        (left,), lanes = args, value.lanes
        while lanes > 1:
            lanes //= 2
            kind = ir.VectorType(_i32, lanes)
            lower, upper = (ir.Constant(kind, list(range(first, first + lanes))) for first in (0, lanes))
            left = builder.fadd(builder.shuffle_vector(left, left, lower), builder.shuffle_vector(left, left, upper))
        return builder.extract_element(left, _i32(0))

    return value.dtype(value), codegen

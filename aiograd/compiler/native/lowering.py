"""ArrayCode to `NativeCode`: which calls a native function can make, where their arrays are, which of them share a loop."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.lib import NumpyVersion

from aiograd.compiler.calls import ArrayCode, Call, Form, Ref
from aiograd.compiler.native.elementwise import can_cast, is_exact, llvm_type
from aiograd.compiler.native.expansions import EXPANSIONS
from aiograd.compiler.native.items import Location, LoopCall, NativeCode, RootKind, Row, dtype_of
from aiograd.compiler.native.placing import Placing, Unsupported
from aiograd.compiler.native.turns import in_turns
from aiograd.compiler.native.ufuncs import ReductionPlan, elementwise_plan, loop_types, reduction_plan
from aiograd.ops.indexing import is_basic
from aiograd.ops.shape import expand
from aiograd.running.trees import leaves_of

#: elements that numpy before 2.3 adds up at a time, so that sums of more have other bits than one call of the loop; 0: all
PIECE = 8192 if NumpyVersion(np.__version__) < "2.3.0" else 0
#: functions with results that show the memory of their first argument, or are copies of it
_VIEWS = frozenset({
    np.asarray, np.broadcast_to, np.reshape, np.transpose, np.swapaxes, np.moveaxis, np.expand_dims, np.squeeze, np.ravel, np.atleast_1d,
    np.atleast_2d, np.atleast_3d, np.rollaxis, np.flip, np.diagonal, expand.forward,
})  # fmt: skip
_VIEW_METHODS = frozenset({"reshape", "transpose", "swapaxes", "ravel", "squeeze", "diagonal", "conj", "conjugate", "copy", "astype"})


def reason_against(call: Call, written: frozenset[Ref] = frozenset()) -> str:
    """Why a native function cannot make a call; empty if it can.

    Args:
        call: the call.
        written: as of `lowered`.
    """
    try:
        _Lowering(ArrayCode("", call.refs(), (call,), call.results), written).add(call)
    except Unsupported as reason:
        return str(reason)
    return ""


def lowered(code: ArrayCode, written: frozenset[Ref] = frozenset(), updates: tuple[tuple[Ref, Ref], ...] = ()) -> NativeCode:
    """The native function of this code, as data.

    Args:
        code: the code.
        written: arguments that it writes all of: memory of an arena. Other arguments are never written, so that the code can run again.
        updates: as of `NativeCode`.

    Raises:
        Unsupported: it has a call that a native function cannot make, see `reason_against`.
    """
    lowering = _Lowering(code, written)
    for call in in_turns(code.calls):
        lowering.add(call)
    native = lowering.finish()
    native.updates = updates
    return native


def stand_in(ref: Ref) -> np.ndarray[Any, Any]:
    """An array with the shape, dtype and strides of a Ref, all in one element."""
    shape, strides = ref.shape or (), ref.strides or ()
    extents = [stride * (length - 1) for stride, length in zip(strides, shape, strict=True)] if math.prod(shape) else []
    first, last = sum(min(extent, 0) for extent in extents), sum(max(extent, 0) for extent in extents)
    dtype: Any = ref.dtype
    memory = np.zeros((last - first) // dtype.itemsize + 1, dtype)
    return np.ndarray(shape, dtype, memory, -first, strides)


class _Lowering(Placing):
    def add(self, call: Call) -> None:
        """Add the items of a call."""
        expansion = EXPANSIONS.get(call.function) if call.form is Form.CALL and call.function.__hash__ is not None else None
        if expansion is not None:
            expansion(self, call)
            return
        for ref in (*call.refs(), *call.results):
            if ref.dtype is None or ref.shape is None or ref.strides is None or ref.dtype.hasobject or not ref.dtype.isnative:
                raise Unsupported(f"{ref.name} is no array of numbers")
        if call.form is Form.STORE:
            self._store(call)
        elif call.unpacks or len(call.results) != 1:
            raise Unsupported("it has several results")
        elif call.form is not Form.CALL:
            self._method(call)
        elif call.is_elementwise:
            self._ufunc(call)
        elif call.function in _VIEWS:
            self._view(call, lambda array: call.function(array, *call.arguments[1:], **call.options))
        else:
            is_reduction = getattr(call.function, "__name__", "") == "reduce" and isinstance(getattr(call.function, "__self__", None), np.ufunc)
            handler: Any = _Lowering._reduction if is_reduction else _HANDLERS.get(call.function)
            if handler is None:
                raise Unsupported(f"{call.label} has no native form")
            handler(self, call)

    def _ufunc(self, call: Call) -> None:
        function = call.function
        operands = tuple([self._array(each) for each in call.arguments])
        (result,) = call.results
        dtypes = loop_dtypes(function, operands)
        if dtypes[-1] != result.dtype:
            raise Unsupported(f"{call.label} gives {dtypes[-1]}")
        same = dtypes[0]
        if len(set(dtypes[:-1])) != 1 or not is_exact(function, same):
            self._loop(call, function, operands, dtypes)
            return
        for each in operands:
            if isinstance(each, Ref) and not can_cast(dtype_of(each), same):  # a number is converted as it is emitted
                raise Unsupported(f"{call.label} converts {each.dtype}")
        self._make(result, call.out)
        self._row(call, Row(function, operands, same, result))

    def _loop(self, call: Call, function: np.ufunc, operands: tuple[Any, ...], dtypes: tuple[np.dtype[Any], ...]) -> None:
        """A call of numpy's loop for an element-wise row."""
        (result,) = call.results
        types = loop_types(function, dtypes)
        if types is None:
            raise Unsupported(f"{call.label} has no loop for {', '.join(map(str, dtypes[:-1]))}")
        refs = []
        for each, dtype in zip(operands, dtypes, strict=False):
            if each.__class__ is not Ref:
                each = self._array(np.asarray(each, dtype), whole=True)
            if each.dtype != dtype:
                raise Unsupported(f"{call.label} converts {each.dtype} to {dtype}")
            refs.append(each)
        every = [(each.shape or (), each.strides or (), dtype.itemsize) for each, dtype in zip((*refs, result), dtypes, strict=True)]
        plan = elementwise_plan(result.shape or (), every)
        if plan is None:
            raise Unsupported(f"{call.label} of arrays that do not lie alike")
        self._make(result, call.out)
        outer, count, steps = plan
        if count and all([length for length, _ in outer]):
            self._item(LoopCall(function, types, (*refs, result), outer, (count,), steps, call.label, "", call.errors))

    def _product(self, call: Call) -> None:
        """A product of matrices, by the loop of ``matmul``; ``dot`` of two matrices has its bits."""
        operands: list[Any] = [self._array(each) for each in call.arguments]
        (result,) = call.results
        if len(operands) != 2:
            raise Unsupported(f"{call.label} with other arguments")
        one: Any = operands[0]
        other: Any = operands[1]
        if call.options or not all([each.__class__ is Ref and len(each.shape or ()) == 2 for each in (one, other, result)]):
            raise Unsupported(f"{call.label} of no matrices")
        if call.function is np.dot and one.dtype.kind == "c" and min(*one.shape, *other.shape) < 2:
            raise Unsupported("dot of complex vectors, which has signs of zeros of its own")
        types = loop_types(np.matmul, (one.dtype, other.dtype, dtype_of(result)))
        if types is None or not result.is_in_order or dtype_of(result).kind not in "fc" or not math.prod(result.shape or ()):
            raise Unsupported(f"{call.label} of {result.dtype}")
        (rows, inner), (_, columns) = one.shape, other.shape
        if not inner or (call.function is np.dot and not all([_lies_in_rows(each) for each in (one, other)])):
            raise Unsupported(f"{call.label} of matrices with gaps")
        if call.function is np.dot and dtype_of(result).kind == "c" and 1 in (rows * inner, inner * columns):
            raise Unsupported("dot of a single complex number")  # the sign of its imaginary zero is another one
        self._make(result, call.out)
        steps = (0, 0, 0, *one.strides, *other.strides, *(result.strides or ()))
        self._item(LoopCall(np.matmul, types, (one, other, result), (), (1, rows, inner, columns), steps, call.label, "", call.errors))

    def _reduction(self, call: Call) -> None:
        """A sum, by the loop of ``add``."""
        ufunc = call.function.__self__
        if ufunc not in (np.add, np.maximum, np.minimum):
            raise Unsupported(f"{call.label} has no native form")
        array: Any = self._array(call.arguments[0])
        given: list[Any] = [*call.arguments[1:], *(0, None, None, False)[len(call.arguments) - 1 :]]
        axis, dtype, out, keepdims, *more = given
        (result,) = call.results
        if not isinstance(array, Ref) or call.options or out is not None or more or dtype not in (None, array.dtype):
            raise Unsupported(f"{call.label} has no native form")
        types = loop_types(ufunc, (dtype_of(result), dtype_of(array), dtype_of(result)))
        if types is None or array.dtype != result.dtype or dtype_of(array).kind not in "fiu" or not result.is_in_order:
            raise Unsupported(f"{call.label} of {array.dtype}")
        shape, size = array.shape or (), dtype_of(array).itemsize
        axes = tuple(range(len(shape))) if axis is None else tuple([each % len(shape) for each in (axis if isinstance(axis, tuple) else (axis,))])
        kept = tuple([1 if each in axes else length for each, length in enumerate(shape)])
        places = iter(result.strides or ())
        own = result.strides if keepdims else tuple([0 if each in axes else next(places) for each in range(len(shape))])
        plan = reduction_plan(shape, array.strides or (), size, axes, kept, own or ())
        if plan is None:
            raise Unsupported(f"{call.label} of an array with gaps")
        if 0 < PIECE < plan.count and not plan.steps[0] and ufunc is np.add and dtype_of(array).kind == "f":
            self._sum_in_pieces(call, types, array, plan)
            return
        self._make(result)
        outer, count, (step, inner) = plan.outer, plan.count, plan.steps
        rest = array
        if ufunc is not np.add:  # the first elements, and then the others
            self._known[result].root.is_pinned = True
            strides = tuple([stride for each, stride in enumerate(array.strides or ()) if keepdims or each not in axes])
            first = Ref(f"{array.name}_first", result.shape, array.dtype, strides)
            location = self._known[first] = self._given(array)
            self._row(call, Row(None, (first,), dtype_of(result), result))
            if not step and not any([not moves[0] for _, moves in outer]):
                moved, count = inner, count - 1
            elif step and len(outer) == 1:
                ((length, moves),) = outer
                moved, outer = moves[1], ((length - 1, moves),)
            else:
                raise Unsupported(f"{call.label} over several axes")
            if not count or not all([length for length, _ in outer]):
                return
            rest = Ref(f"{array.name}_rest", array.shape, array.dtype, array.strides)
            self._known[rest] = Location(location.root, location.offset + moved)
        around = tuple([(length, (own, each, own)) for length, (own, each) in outer])
        begin = "zero" if ufunc is np.add else ""
        self._item(LoopCall(ufunc, types, (result, rest, result), around, (count,), (step, inner, step), call.label, begin, call.errors))

    def _sum_in_pieces(self, call: Call, types: str, array: Ref, plan: ReductionPlan) -> None:
        """A sum of numbers in a row as numpy before 2.3 makes it: the loop adds one piece after the other to the result."""
        if plan.outer:
            raise Unsupported(f"{call.label} of rows of more than {PIECE:,} numbers, with numpy before 2.3")
        (result,), (step, inner) = call.results, plan.steps
        self._make(result)
        self._known[result].root.is_pinned = True
        pieces, left = divmod(plan.count, PIECE)
        around, steps = ((pieces, (0, PIECE * inner, 0)),), (step, inner, step)
        self._item(LoopCall(np.add, types, (result, array, result), around, (PIECE,), steps, call.label, "zero", call.errors))
        if left:
            location, rest = self._given(array), Ref(f"{array.name}_rest", array.shape, array.dtype, array.strides)
            self._known[rest] = Location(location.root, location.offset + pieces * PIECE * inner)
            self._item(LoopCall(np.add, types, (result, rest, result), (), (left,), steps, call.label, "", call.errors))

    def _method(self, call: Call) -> None:
        others = call.arguments[1:]
        if call.form is Form.INDEX:
            if not is_basic(others[0]) or leaves_of(others[0], Ref):
                raise Unsupported("an index with values")
            self._view(call, lambda array: array[others[0]])
        elif call.form is Form.ATTRIBUTE:
            self._view(call, lambda array: getattr(array, call.function))
        elif call.function in _VIEW_METHODS:
            if leaves_of((others, call.options), Ref):
                raise Unsupported("a method with arrays")
            self._view(call, lambda array: getattr(array, call.function)(*others, **call.options))
        else:
            raise Unsupported(f".{call.function}() has no native form")

    def _view(self, call: Call, function: Callable[[Any], Any]) -> None:
        """A call of one array that shows its memory, or copies it."""
        source = self._array(call.arguments[0])
        (result,) = call.results
        if source.__class__ is not Ref or leaves_of((call.arguments[1:], call.options), Ref):
            raise Unsupported(f"{call.label} of no array")
        array = stand_in(source)
        found = np.asanyarray(function(array))
        if (found.shape, found.dtype) != (result.shape, result.dtype):
            raise Unsupported(f"{call.label} gives another shape")
        location = self._given(source)
        if found.size and np.shares_memory(found, array):
            if found.strides != result.strides or found.dtype != source.dtype:
                raise Unsupported(f"{call.label} shows its argument otherwise")
            self._known[result] = Location(location.root, location.offset + found.ctypes.data - array.ctypes.data)
        elif source.shape == result.shape or (found.dtype == source.dtype and found.size == array.size):
            self._copied(call, source, result)
        else:
            raise Unsupported(f"{call.label} of these arrays is no copy")

    def _copied(self, call: Call, source: Ref, result: Ref) -> None:
        """A copy of an array, in another dtype or shape."""
        if not can_cast(dtype_of(source), dtype_of(result)):
            raise Unsupported(f"{call.label} converts {source.dtype} to {result.dtype}")
        if source.shape != result.shape:
            if not result.is_in_order:
                raise Unsupported(f"{call.label} makes an array with gaps")
            whole = Ref(f"{result.name}_as", source.shape, result.dtype, _in_order(source.shape or (), dtype_of(result).itemsize))
            self._make(whole)
            self._known[result] = self._known[whole]
            result = whole
        else:
            self._make(result)
        self._row(call, Row(None, (source,), result.dtype, result))  # type: ignore[arg-type]

    def _store(self, call: Call) -> None:
        out: Any = call.out
        value = self._array(call.arguments[0])
        index = call.arguments[1]
        location = self._given(out)
        is_own = location.root.kind is RootKind.SCRATCH or location.root.ref in self._written
        if not is_basic(index) or leaves_of(index, Ref) or not is_own:
            raise Unsupported("a store with an index of values, or into an argument")
        array = stand_in(out)
        part = array[index] if isinstance(array[index], np.ndarray) else array[(*index, ...) if isinstance(index, tuple) else (index, ...)]
        found: Any = value.dtype if value.__class__ is Ref else out.dtype
        if llvm_type(out.dtype) is None:
            raise Unsupported(f"a store into {out.dtype}")
        if not can_cast(found, out.dtype):
            raise Unsupported(f"a store converts {found} to {out.dtype}")
        location.root.is_pinned = True
        target = Ref(f"{out.name}_part", part.shape, out.dtype, part.strides)
        self._known[target] = Location(location.root, location.offset + part.ctypes.data - array.ctypes.data if part.size else 0)
        for result in call.results:
            self._known[result] = location
        self._row(call, Row(None, (value,), out.dtype, target))

    # ---------------------------------------------------------------- functions

    def _empty(self, call: Call) -> None:
        self._make(call.results[0])

    def _filled(self, call: Call, value: Any) -> None:
        (result,) = call.results
        if llvm_type(dtype_of(result)) is None:
            raise Unsupported(f"{call.label} of {result.dtype}")
        self._make(result)
        self._row(call, Row(None, (value,), dtype_of(result), result))

    def _chosen(self, call: Call) -> None:
        (result,) = call.results
        if len(call.arguments) != 3 or call.options:
            raise Unsupported("where with other arguments")
        operands = tuple([self._array(each) for each in call.arguments])
        for each in operands[1:]:
            if each.__class__ is Ref and not can_cast(each.dtype, result.dtype):  # type: ignore[arg-type]
                raise Unsupported(f"where converts {each.dtype}")
        if llvm_type(result.dtype) is None or (operands[0].__class__ is Ref and llvm_type(operands[0].dtype) is None):  # type: ignore[arg-type]
            raise Unsupported(f"where of {result.dtype}")
        self._make(result)
        self._row(call, Row(np.where, operands, result.dtype, result))  # type: ignore[arg-type]

    def _joined(self, call: Call) -> None:
        (result,) = call.results
        parts = [self._array(each) for each in call.arguments[0]]
        axis = call.arguments[1] if len(call.arguments) > 1 else call.options.get("axis", 0)
        is_other = len(call.arguments) > 2 or call.options.keys() - {"axis"} or axis.__class__ is not int
        if is_other or any([part.__class__ is not Ref for part in parts]):
            raise Unsupported(f"{call.label} with other arguments")
        if not all([can_cast(part.dtype, dtype_of(result)) for part in parts]):
            raise Unsupported(f"{call.label} converts")
        self._make(result)
        root = self._known[result].root
        root.is_pinned = True
        array, begin = stand_in(result), 0
        address, array = array.ctypes.data, np.moveaxis(array, axis, 0)
        for part in parts:
            if call.function is np.stack:
                shown, length = array[begin, ...], 1
            else:
                length = part.shape[axis]
                shown = np.moveaxis(array[begin : begin + length], 0, axis)
            begin += length
            target = Ref(f"{result.name}_{begin}", shown.shape, result.dtype, shown.strides)
            self._known[target] = Location(root, shown.ctypes.data - address if shown.size else 0)
            self._row(call, Row(None, (part,), result.dtype, target))  # type: ignore[arg-type]


def _lies_in_rows(ref: Any) -> bool:
    """True for a matrix in row-major or column-major order without gaps, which ``dot`` hands to the BLAS as it is."""
    (rows, columns), size = ref.shape, ref.dtype.itemsize
    return bool(ref.strides in ((columns * size, size), (size, rows * size)))

def _in_order(shape: tuple[int, ...], size: int) -> tuple[int, ...]:
    strides = []
    for length in reversed(shape):
        strides.append(size)
        size *= length
    return tuple(reversed(strides))


def loop_dtypes(function: np.ufunc, operands: tuple[Any, ...]) -> tuple[np.dtype[Any], ...]:
    """The dtypes that a ufunc's loop takes and gives."""
    kinds = [each.dtype if isinstance(each, (Ref, np.generic)) else np.dtype(bool) if each.__class__ is bool else type(each) for each in operands]
    return _resolved(function, tuple(kinds))


@functools.lru_cache(maxsize=4096)
def _resolved(function: np.ufunc, kinds: tuple[Any, ...]) -> tuple[np.dtype[Any], ...]:
    try:
        return tuple(function.resolve_dtypes((*kinds, *[None] * function.nout)))
    except TypeError as error:
        raise Unsupported(str(error)) from None


_HANDLERS: dict[Any, Any] = {
    np.empty: _Lowering._empty,
    np.zeros: lambda lowering, call: lowering._filled(call, 0),
    np.ones: lambda lowering, call: lowering._filled(call, 1),
    np.zeros_like: lambda lowering, call: lowering._filled(call, 0),
    np.ones_like: lambda lowering, call: lowering._filled(call, 1),
    np.empty_like: _Lowering._empty,
    np.dot: _Lowering._product,
    np.matmul: _Lowering._product,
    np.where: _Lowering._chosen,
    np.concatenate: _Lowering._joined,
    np.stack: _Lowering._joined,
}

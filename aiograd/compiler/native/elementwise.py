"""Element-wise rows with exact results as LLVM instructions: numbers or vectors of them.

Note [Exact]
    An instruction here has the bits of numpy's loop in every lane: IEEE operations without fast-math flags and without contraction, comparisons,
    selects and conversions. Every other ufunc is a call of numpy's own loop, see `aiograd.compiler.native.ufuncs`.
    Of equal operands, zeros of both signs among them, ``maximum`` and ``minimum`` give the second one, as the instructions of x86-64 do; numpy's
    loops for other CPUs differ, so there these two are no part of the table.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

import numpy as np

#: machines with the rule for zeros of Note [Exact]
IS_X86 = platform.machine().lower() in ("x86_64", "amd64")

_FLOATS = {4: "float", 8: "double"}
_SUFFIXES = {"float": "f32", "double": "f64"}


def llvm_type(dtype: np.dtype[Any]) -> str | None:
    """The type of an element in a register; None for a dtype without one."""
    if dtype.kind == "b":
        return "i1"
    if dtype.kind in "iu" and dtype.isnative:
        return f"i{8 * dtype.itemsize}"
    return _FLOATS.get(dtype.itemsize) if dtype.kind == "f" and dtype.isnative else None


def memory_type(dtype: np.dtype[Any]) -> str:
    """The type of an element in memory."""
    return "i8" if dtype.kind == "b" else str(llvm_type(dtype))


def vector(kind: str, lanes: int) -> str:
    """The type of so many numbers; 0: of a single one."""
    return f"<{lanes} x {kind}>" if lanes else kind


def splat(kind: str, constant: str, lanes: int) -> str:
    """A constant in all lanes."""
    return f"<{', '.join([f'{kind} {constant}'] * lanes)}>" if lanes else constant


def number(value: Any, dtype: np.dtype[Any]) -> str:
    """A number as a constant of LLVM, by its bits."""
    array = np.asarray(value).astype(dtype)
    if dtype.kind == "b":
        return "true" if array else "false"
    if dtype.kind in "iu":
        return str(int(array))
    return f"bitcast (i{8 * dtype.itemsize} {word_of(array)} to {llvm_type(dtype)})"


def word_of(number: np.ndarray[Any, Any]) -> int:
    """The bits of a number, as an integer without sign."""
    return int(number.view(f"u{number.dtype.itemsize}"))


class Lanes:
    """Writes instructions for some numbers side by side.

    Args:
        add: appends an instruction and returns the name of its result.
        lanes: numbers side by side; 0: a single one.
    """

    def __init__(self, add: Callable[[str], str], lanes: int) -> None:
        self.add = add
        self.lanes = lanes

    def of(self, kind: str) -> str:
        """The type of the numbers together."""
        return vector(kind, self.lanes)

    def constant(self, value: Any, dtype: np.dtype[Any]) -> str:
        """A number in all lanes."""
        return splat(str(llvm_type(dtype)), number(value, dtype), self.lanes)

    def intrinsic(self, name: str, kind: str, *arguments: str) -> str:
        """A call of an intrinsic function of LLVM."""
        suffix = _SUFFIXES[kind]
        whole = f"llvm.{name}.v{self.lanes}{suffix}" if self.lanes else f"llvm.{name}.{suffix}"
        return self.add(f"call {self.of(kind)} @{whole}({', '.join(f'{self.of(kind)} {each}' for each in arguments)})")

    def select(self, condition: str, kind: str, one: str, other: str) -> str:
        """One or the other, by lane."""
        return self.add(f"select {self.of('i1')} {condition}, {self.of(kind)} {one}, {self.of(kind)} {other}")

    def quotient(self, kind: str, one: str, other: str, dtype: np.dtype[Any]) -> str:
        """A division; number by number where a register has more lanes, since a division in an unused lane would note errors of its own."""
        whole = self.of(kind)
        if not self.lanes or self.lanes * dtype.itemsize in (16, 32, 64):
            return self.add(f"fdiv {whole} {one}, {other}")
        found = "poison"
        for place in range(self.lanes):
            pair = [self.add(f"extractelement {whole} {each}, i64 {place}") for each in (one, other)]
            found = self.add(f"insertelement {whole} {found}, {kind} {self.add(f'fdiv {kind} {pair[0]}, {pair[1]}')}, i64 {place}")
        return found

    def choice(self, condition: str, dtype: np.dtype[Any], one: str, other: str) -> str:
        """One or the other, by lane; of bits, so that an operation is not left out in lanes that do not show it: its errors are told."""
        kind = str(llvm_type(dtype))
        if dtype.kind != "f":
            return self.select(condition, kind, one, other)
        whole, bits = self.of(kind), f"i{8 * dtype.itemsize}"
        one, other = (self.add(f"bitcast {whole} {each} to {self.of(bits)}") for each in (one, other))
        return self.add(f"bitcast {self.of(bits)} {self.select(condition, bits, one, other)} to {whole}")

    def cast(self, value: str, source: np.dtype[Any], target: np.dtype[Any]) -> str:
        """A conversion as numpy makes it."""
        if source == target:
            return value
        one, other = str(llvm_type(source)), str(llvm_type(target))
        if target.kind == "b":
            return self.truth(value, source)
        if source.kind == "f" and target.kind == "f":
            verb = "fpext" if target.itemsize > source.itemsize else "fptrunc"
        elif source.kind == "f":
            verb = "fptosi" if target.kind == "i" else "fptoui"
        elif target.kind == "f":
            verb = "sitofp" if source.kind == "i" else "uitofp"
        elif one == other:
            return value
        elif target.itemsize < source.itemsize and source.kind != "b":
            verb = "trunc"
        else:
            verb = "sext" if source.kind == "i" else "zext"
        return self.add(f"{verb} {self.of(one)} {value} to {self.of(other)}")

    def truth(self, value: str, dtype: np.dtype[Any]) -> str:
        """True in each lane with a number other than zero."""
        if dtype.kind == "b":
            return value
        kind, zero = self.of(str(llvm_type(dtype))), self.constant(0, dtype)
        return self.add(f"fcmp une {kind} {value}, {zero}" if dtype.kind == "f" else f"icmp ne {kind} {value}, {zero}")


def can_cast(source: np.dtype[Any], target: np.dtype[Any]) -> bool:
    """True if `Lanes.cast` gives numpy's bits: a float beyond an integer's range has no defined integer."""
    if llvm_type(source) is None or llvm_type(target) is None:
        return False
    return not (source.kind == "f" and target.kind in "iu")


Emit = Callable[[Lanes, str, "list[str]", "np.dtype[Any]"], str]
_TABLE: dict[Any, tuple[str, Emit]] = {}


def _rows(kinds: str, *functions: Any) -> Callable[[Emit], Emit]:
    def note(emit: Emit) -> Emit:
        for function in functions:
            _TABLE[function] = kinds, emit
        return emit

    return note


def _arithmetic(function: np.ufunc, of_floats: str, of_integers: str, of_bools: str) -> None:
    def emit(lanes: Lanes, kind: str, x: list[str], dtype: np.dtype[Any]) -> str:
        verb = of_floats if dtype.kind == "f" else of_bools if dtype.kind == "b" else of_integers
        return lanes.add(f"{verb} {lanes.of(kind)} {x[0]}, {x[1]}")

    _TABLE[function] = "fiu" + ("b" if of_bools else ""), emit


_arithmetic(np.add, "fadd", "add", "or")
_arithmetic(np.subtract, "fsub", "sub", "")
_arithmetic(np.multiply, "fmul", "mul", "and")


@_rows("f", np.divide)
def _divide(lanes: Lanes, kind: str, x: list[str], dtype: np.dtype[Any]) -> str:
    return lanes.quotient(kind, x[0], x[1], dtype)


@_rows("fi", np.negative)
def _negative(lanes: Lanes, kind: str, x: list[str], dtype: np.dtype[Any]) -> str:
    return lanes.add(f"fneg {lanes.of(kind)} {x[0]}" if dtype.kind == "f" else f"sub {lanes.of(kind)} {lanes.constant(0, dtype)}, {x[0]}")


@_rows("fiu", np.positive, np.conjugate)
def _positive(lanes: Lanes, kind: str, x: list[str], dtype: np.dtype[Any]) -> str:
    return x[0]


@_rows("f", np.absolute, np.fabs)
def _absolute(lanes: Lanes, kind: str, x: list[str], dtype: np.dtype[Any]) -> str:
    return lanes.intrinsic("fabs", kind, x[0])


@_rows("fiu", np.square)
def _square(lanes: Lanes, kind: str, x: list[str], dtype: np.dtype[Any]) -> str:
    return lanes.add(f"{'fmul' if dtype.kind == 'f' else 'mul'} {lanes.of(kind)} {x[0]}, {x[0]}")


@_rows("f", np.reciprocal)
def _reciprocal(lanes: Lanes, kind: str, x: list[str], dtype: np.dtype[Any]) -> str:
    return lanes.quotient(kind, lanes.constant(1, dtype), x[0], dtype)


def _by_intrinsic(function: np.ufunc, name: str) -> None:
    def emit(lanes: Lanes, kind: str, x: list[str], dtype: np.dtype[Any]) -> str:
        return lanes.intrinsic(name, kind, x[0])

    _TABLE[function] = "f", emit


_by_intrinsic(np.sqrt, "sqrt")
for _function, _name in ((np.floor, "floor"), (np.ceil, "ceil"), (np.trunc, "trunc"), (np.rint, "rint")):
    if IS_X86:  # one instruction each; elsewhere LLVM may call the C library
        _by_intrinsic(_function, _name)


@_rows("f", np.sign)
def _sign(lanes: Lanes, kind: str, x: list[str], dtype: np.dtype[Any]) -> str:
    zero, whole = lanes.constant(0, dtype), lanes.of(kind)
    is_zero = lanes.add(f"fcmp oeq {whole} {x[0]}, {zero}")
    is_less = lanes.add(f"fcmp olt {whole} {x[0]}, {zero}")
    is_more = lanes.add(f"fcmp ogt {whole} {x[0]}, {zero}")
    other = lanes.select(is_zero, kind, zero, x[0])
    other = lanes.select(is_less, kind, lanes.constant(-1, dtype), other)
    return lanes.select(is_more, kind, lanes.constant(1, dtype), other)


def _extreme(function: np.ufunc, word: str) -> None:
    def emit(lanes: Lanes, kind: str, x: list[str], dtype: np.dtype[Any]) -> str:
        whole = lanes.of(kind)
        if dtype.kind == "f":
            first = lanes.add(f"fcmp o{word} {whole} {x[0]}, {x[1]}")
            is_nan = lanes.add(f"fcmp uno {whole} {x[0]}, {x[0]}")
            return lanes.select(is_nan, kind, x[0], lanes.select(first, kind, x[0], x[1]))
        first = lanes.add(f"icmp {'s' if dtype.kind == 'i' else 'u'}{word} {whole} {x[0]}, {x[1]}")
        return lanes.select(first, kind, x[0], x[1])

    _TABLE[function] = "fiub" if IS_X86 else "iub", emit


_extreme(np.maximum, "gt")
_extreme(np.minimum, "lt")


def _comparison(function: np.ufunc, of_floats: str, of_integers: str) -> None:
    def emit(lanes: Lanes, kind: str, x: list[str], dtype: np.dtype[Any]) -> str:
        if dtype.kind == "f":
            return lanes.add(f"fcmp {of_floats} {lanes.of(kind)} {x[0]}, {x[1]}")
        signed = "" if of_integers in ("eq", "ne") else "s" if dtype.kind == "i" else "u"
        return lanes.add(f"icmp {signed}{of_integers} {lanes.of(kind)} {x[0]}, {x[1]}")

    _TABLE[function] = "fiub", emit


_comparison(np.greater, "ogt", "gt")
_comparison(np.greater_equal, "oge", "ge")
_comparison(np.less, "olt", "lt")
_comparison(np.less_equal, "ole", "le")
_comparison(np.equal, "oeq", "eq")
_comparison(np.not_equal, "une", "ne")


def _logical(function: np.ufunc, verb: str) -> None:
    def emit(lanes: Lanes, kind: str, x: list[str], dtype: np.dtype[Any]) -> str:
        return lanes.add(f"{verb} {lanes.of('i1')} {lanes.truth(x[0], dtype)}, {lanes.truth(x[1], dtype)}")

    _TABLE[function] = "fiub", emit


_logical(np.logical_and, "and")
_logical(np.logical_or, "or")
_logical(np.logical_xor, "xor")


@_rows("fiub", np.logical_not)
def _logical_not(lanes: Lanes, kind: str, x: list[str], dtype: np.dtype[Any]) -> str:
    return lanes.add(f"xor {lanes.of('i1')} {lanes.truth(x[0], dtype)}, {splat('i1', 'true', lanes.lanes)}")


def _bitwise(function: np.ufunc, verb: str) -> None:
    def emit(lanes: Lanes, kind: str, x: list[str], dtype: np.dtype[Any]) -> str:
        return lanes.add(f"{verb} {lanes.of(kind)} {x[0]}, {x[1]}")

    _TABLE[function] = "iub", emit


_bitwise(np.bitwise_and, "and")
_bitwise(np.bitwise_or, "or")
_bitwise(np.bitwise_xor, "xor")


@_rows("iub", np.invert)
def _invert(lanes: Lanes, kind: str, x: list[str], dtype: np.dtype[Any]) -> str:
    ones = splat("i1", "true", lanes.lanes) if dtype.kind == "b" else splat(kind, "-1", lanes.lanes)
    return lanes.add(f"xor {lanes.of(kind)} {x[0]}, {ones}")


@_rows("f", np.isnan)
def _isnan(lanes: Lanes, kind: str, x: list[str], dtype: np.dtype[Any]) -> str:
    return lanes.add(f"fcmp uno {lanes.of(kind)} {x[0]}, {x[0]}")


@_rows("f", np.isfinite)
def _isfinite(lanes: Lanes, kind: str, x: list[str], dtype: np.dtype[Any]) -> str:
    return lanes.add(f"fcmp olt {lanes.of(kind)} {lanes.intrinsic('fabs', kind, x[0])}, {lanes.constant(np.inf, dtype)}")


@_rows("f", np.isinf)
def _isinf(lanes: Lanes, kind: str, x: list[str], dtype: np.dtype[Any]) -> str:
    return lanes.add(f"fcmp oeq {lanes.of(kind)} {lanes.intrinsic('fabs', kind, x[0])}, {lanes.constant(np.inf, dtype)}")


def is_exact(function: Any, dtype: np.dtype[Any]) -> bool:
    """True for a ufunc that is emitted here for operands of this dtype, which its loop takes."""
    found = _TABLE.get(function)
    return found is not None and dtype.kind in found[0] and llvm_type(dtype) is not None


def emit_row(lanes: Lanes, function: Any, operands: list[str], dtype: np.dtype[Any]) -> str:
    """The name of the result of a ufunc.

    Args:
        operands: names of its operands, all of `dtype`.
    """
    return _TABLE[function][1](lanes, str(llvm_type(dtype)), operands, dtype)

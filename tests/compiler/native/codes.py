"""Codes made of calls on sample arrays, and runs of them: native, and by numpy."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from aiograd.compiler.calls import ArrayCode, Call, Form, Ref
from aiograd.compiler.native.build import load_native, native_text
from aiograd.compiler.native.lowering import reason_against
from aiograd.compiler.native.tiers import native_problem
from aiograd.compiler.source import SourceFile, load
from aiograd.running.trees import map_tree

#: for modules that make native functions
needs_native = pytest.mark.skipif(native_problem() is not None, reason=str(native_problem()))

INTEGERS = "bhilqBHILQ"
DTYPES = [np.dtype(char) for char in f"fd{INTEGERS}?"]
#: around the elements of a register, of a vector of a loop, and of both together
LENGTHS = (1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 31, 32, 33, 63, 64, 65, 70, 127, 129, 257)


class Recorder:
    """Makes a code call by call; each is done at once on samples, which say what its result is.

    Attributes:
        calls: so far.
        given: the parameters.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.given: list[Ref] = []
        self.errors: tuple[tuple[str, str], ...] = ()
        self._samples: dict[Ref, Any] = {}
        self._numbers = itertools.count()

    def parameter(self, sample: Any) -> Ref:
        """A parameter, with an array for it."""
        ref = self._ref(sample)
        self.given.append(ref)
        return ref

    def _ref(self, sample: Any) -> Ref:
        found = np.asarray(sample)
        ref = Ref(f"v{next(self._numbers)}", found.shape, found.dtype, found.strides)
        self._samples[ref] = sample
        return ref

    def sample(self, ref: Ref) -> Any:
        """The sample of a Ref."""
        return self._samples[ref]

    def call(self, function: Callable[..., Any], *arguments: Any, out: Ref | None = None, fresh: bool = True, **options: Any) -> Ref:
        """``function(*arguments, **options)``."""
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = function(*self._values(arguments), **self._values(options))
        label = getattr(function, "__name__", "function")
        return self._add(Form.CALL, function, label, arguments, found, options, fresh=fresh, out=out)

    def index(self, ref: Ref, index: Any) -> Ref:
        """``ref[index]``."""
        return self._add(Form.INDEX, None, "", (ref, index), self._samples[ref][index])

    def method(self, ref: Ref, name: str, *arguments: Any, **options: Any) -> Ref:
        """``ref.name(*arguments, **options)``."""
        with np.errstate(all="ignore"):
            found = getattr(self._samples[ref], name)(*arguments, **options)
        return self._add(Form.METHOD, name, name, (ref, *arguments), found, options)

    def transposed(self, ref: Ref) -> Ref:
        """``ref.T``."""
        return self._add(Form.ATTRIBUTE, "T", "T", (ref,), self._samples[ref].T)

    def store(self, out: Ref, index: Any, value: Any) -> Ref:
        """``out[index] = value``; the samples keep the value too."""
        with np.errstate(all="ignore"):
            self._samples[out][index] = self._values(value)
        ref = self._add(Form.STORE, None, "", (value, index), self._samples[out], out=out)
        ref.name = out.name
        return ref

    def _values(self, arguments: Any) -> Any:
        return map_tree(lambda ref: self._samples[ref], arguments, Ref)

    def _add(
        self, form: Form, function: Any, label: str, arguments: tuple[Any, ...], found: Any, options: Any = None,
        fresh: bool = False, out: Ref | None = None,
    ) -> Ref:
        ref = self._ref(found)
        self.calls.append(Call(form, function, label, arguments, (ref,), options or {}, fresh=fresh, out=out, errors=self.errors))
        return ref

    def code(self, results: Any) -> ArrayCode:
        """The code, with these results."""
        return ArrayCode("f", tuple(self.given), tuple(self.calls), results)


#: True for texts of `Both` without sizes; see the fixture `sizes`
IS_DYNAMIC = False


class Both:
    """A code as a native function and as one of numpy calls.

    Attributes:
        native, plain: the functions.
        asked: calls of numpy's function by the native one.
        text: the native function's.
    """

    def __init__(self, code: ArrayCode, written: frozenset[Ref] = frozenset()) -> None:
        self.plain = load(code, SourceFile())
        self.asked = 0
        self.text = native_text(code, written, is_dynamic=IS_DYNAMIC)
        self.native = load_native(self.text, self._fallback)

    def _fallback(self, *arguments: Any) -> Any:
        self.asked += 1
        return self.plain(*arguments)

    def check(self, arguments: Sequence[Any], label: str = "", *, quiet: bool = True) -> None:
        """Both give the same bits, and the native one without the other one's help."""
        asked = self.asked
        with np.errstate(all="ignore" if quiet else "warn"):
            found, expected = self.native(*arguments), self.plain(*arguments)
        assert_same(found, expected, label)
        if quiet:
            assert self.asked == asked, f"{label}: numpy's function ran"


def can_be_native(recorder: Recorder) -> bool:
    """True if the last call has a native form."""
    return not reason_against(recorder.calls[-1])


def assert_same(found: Any, expected: Any, label: str = "") -> None:
    """The same shapes, strides, dtypes and bits; a NaN is as good as another."""
    if expected.__class__ in (tuple, list):
        assert found.__class__ is expected.__class__ and len(found) == len(expected), label
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{label} result {number}")
        return
    if expected is None:
        assert found is None, label
        return
    other = np.asarray(expected)
    assert found.__class__ is np.ndarray, f"{label}: {type(found)}"
    assert (found.shape, found.dtype) == (other.shape, other.dtype), f"{label}: {found.dtype}{found.shape}, not {other.dtype}{other.shape}"
    if other.size:
        kept = [axis for axis in range(other.ndim) if other.shape[axis] > 1]
        assert [found.strides[axis] for axis in kept] == [other.strides[axis] for axis in kept], f"{label}: strides"
    bits = [np.frombuffer(plain_bits(each), np.uint8).reshape(-1, other.itemsize) for each in (found, other)]
    if wrong := np.flatnonzero((bits[0] != bits[1]).any(axis=1)).tolist():
        place = wrong[0]
        raise AssertionError(f"{label}: {found.dtype}{found.shape} element {place}: {found.ravel()[place]!r}, not {other.ravel()[place]!r}")


def plain_bits(array: Any) -> bytes:
    """The bytes in order, with one NaN for all."""
    if array.dtype.kind in "fc":
        parts = np.ascontiguousarray(array).reshape(-1).view(array.real.dtype)
        array = np.where(np.isnan(parts), parts.dtype.type(np.nan), parts)
    return bytes(np.ascontiguousarray(array).tobytes())


def special(dtype: np.dtype[Any], count: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """Numbers of a dtype, special ones among them, in a fixed random order."""
    rng = np.random.default_rng(seed)
    if dtype.kind == "f":
        info = np.finfo(dtype)
        known = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, -np.nan, info.max, -info.max, info.tiny, -info.tiny, info.smallest_subnormal,
                 -info.smallest_subnormal, info.tiny / 3, info.eps, 0.5, -0.5, 1.5, 2.5, -2.5, 1 / info.eps, 0.49999999, 1e10]  # fmt: skip
        values = np.array([*known, *rng.standard_normal(40), *rng.standard_normal(20) * 1e30, *rng.standard_normal(20) * 1e-30]).astype(dtype)
    elif dtype.kind == "b":
        values = np.array([False, True])
    else:
        limits = np.iinfo(dtype)
        low, high = int(limits.min), int(limits.max)
        known = [low, low + 1, high, high - 1, 0, 1, 2, 3, 7, high // 2, *([-1, -2, -7, low // 2] if low else [])]
        values = np.concatenate([np.array(known, dtype), rng.integers(low, high, 20, dtype, endpoint=True)])
    return rng.permutation(values)[rng.integers(0, len(values), count)] if count < len(values) else np.resize(rng.permutation(values), count)

"""Floating-point errors of native functions are told as by numpy calls: the same warnings and errors, in the same ways of handling."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from tests.compiler.native.codes import Both, Recorder, needs_native, special

pytestmark = needs_native

SHAPES = ((), (1,), (2,), (3,), (15,), (4,), (16,), (17,), (40,), (3, 5))
WAYS = ("ignore", "warn", "raise", "call")
SHAPE_CASES = [pytest.param(shape) for shape in SHAPES]


def told(function: Callable[..., Any], *arguments: Any, **handling: str) -> list[str]:
    """The reports of a call: warnings, errors, calls of the function of `numpy.seterrcall`."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught, np.errstate(**handling, call=lambda kind, _: found.append(kind)):
        warnings.simplefilter("always")
        try:
            function(*arguments)
        except FloatingPointError as error:
            found.append(repr(error))
    return found + sorted({str(each.message) for each in caught})


def same(both: Both, *arguments: Any, **handling: str) -> list[str]:
    """The reports of a call, the same by both functions, also when it is repeated."""
    expected = told(both.plain, *arguments, **handling)
    assert told(both.native, *arguments, **handling) == expected
    assert told(both.native, *arguments, **handling) == expected
    return expected


#: by error: a row that makes it of these numbers
MADE = {
    "divide": (np.divide, 1.0, 0.0), "invalid": (np.subtract, np.inf, np.inf), "over": (np.multiply, 3e38, 3e38), "under": (np.multiply, 2e-38, 1e-3),
    "log": (np.log, 0.0), "log of less": (np.log, -1.0), "exp": (np.exp, 1e3), "exp of less": (np.exp, -1e3), "power": (np.power, 1e30, 9.0),
    "arccos": (np.arccos, 2.0), "hypot": (np.hypot, 3e38, 3e38), "sqrt": (np.sqrt, -1.0), "fmod": (np.fmod, 1.0, 0.0), "sinh": (np.sinh, 1e3),
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPE_CASES, ids=str)
@pytest.mark.parametrize("name", list(MADE))
def test_every_way_of_handling(name: str, shape: tuple[int, ...]) -> None:
    function, *values = MADE[name]
    arrays = [np.full(shape, 0.5, "f") for _ in values]
    recorder = Recorder()
    both = Both(recorder.code(recorder.call(function, *map(recorder.parameter, arrays))))
    for way in WAYS:
        assert not same(both, *arrays, all=way)
    assert not both.asked
    for array, value in zip(arrays, values, strict=True):
        array.reshape(-1)[-1:] = value
    for way in WAYS[1:]:
        assert same(both, *arrays, all=way), way
    asked = both.asked
    assert asked and not same(both, *arrays, all="ignore") and both.asked == asked
    for kind in ("divide", "invalid", "over", "under"):
        same(both, *arrays, all="ignore", **{kind: "warn"})


@pytest.mark.parametrize("shape", SHAPE_CASES, ids=str)
@pytest.mark.parametrize("inside", ["ignore", "warn", "raise"])
def test_calls_with_a_handling_of_their_own(inside: str, shape: tuple[int, ...]) -> None:
    """A division in the middle is handled in its own way, what is before and after it as around it."""
    recorder = Recorder()
    x, y = (recorder.parameter(np.ones(shape, "f")) for _ in "xy")
    before = recorder.call(np.multiply, x, x)
    recorder.errors = (("divide", inside), ("invalid", inside))
    quotient = recorder.call(np.divide, before, y)
    logarithm = recorder.call(np.log, y)
    recorder.errors = ()
    both = Both(recorder.code((recorder.call(np.add, quotient, logarithm), recorder.call(np.multiply, x, y))))
    for one, other in [(1.0, 1.0), (3e38, 1.0), (1.0, 0.0), (3e38, 0.0), (0.0, 0.0), (1.0, -1.0), (np.nan, np.nan), (np.inf, 1.0)]:
        for way in WAYS:
            same(both, np.full(shape, one, "f"), np.full(shape, other, "f"), all=way)


@pytest.mark.parametrize("shape", SHAPE_CASES, ids=str)
@pytest.mark.parametrize("char", "fd")
def test_an_operand_that_is_not_chosen(char: str, shape: tuple[int, ...]) -> None:
    """Both operands of ``where`` are computed, so errors of both are told."""
    for first in (True, False):
        recorder = Recorder()
        x, y = (recorder.parameter(np.ones(shape, char)) for _ in "xy")
        quotient = recorder.call(np.divide, x, y)
        condition = recorder.call(np.greater, x, 2.0)
        both = Both(recorder.code(recorder.call(np.where, condition, quotient if first else 1.0, 1.0 if first else quotient)))
        assert same(both, np.full(shape, 1.0 if first else 3.0, char), np.zeros(shape, char), all="warn")


@pytest.mark.parametrize("function", [np.greater, np.less_equal, np.equal, np.maximum, np.minimum, np.sign, np.isnan, np.logical_and])
def test_comparisons_with_nan(function: np.ufunc) -> None:
    for shape in SHAPES:
        recorder = Recorder()
        arrays = [np.full(shape, np.nan, "f"), np.ones(shape, "f")][: function.nin]
        both = Both(recorder.code(recorder.call(function, *map(recorder.parameter, arrays))))
        same(both, *arrays, all="warn")


def test_sums_and_products() -> None:
    recorder = Recorder()
    x = recorder.parameter(np.ones((4, 4), "f"))
    both = Both(recorder.code((recorder.call(np.add.reduce, x, 0, None, None, False), recorder.call(np.matmul, x, x))))
    for value in (1.0, 3e38, np.inf, np.nan, 1e-30):
        same(both, np.full((4, 4), value, "f"), all="warn")
    infinite = np.ones((4, 4), "f")
    infinite[0], infinite[1] = np.inf, -np.inf
    assert same(both, infinite, all="warn")


def test_flags_from_before_a_call_are_not_its_own() -> None:
    recorder = Recorder()
    both = Both(recorder.code(recorder.call(np.exp, recorder.parameter(np.ones(5, "f")))))
    with np.errstate(all="ignore"):
        np.exp(special(np.dtype("f"), 50)), np.log(np.zeros(3)), np.divide(np.ones(3), 0.0)
    assert not told(both.native, np.ones(5, "f"), all="warn") and not both.asked


@pytest.mark.parametrize("function", [ag.sigmoid, ag.nn.functional.silu, lambda x: ag.logsumexp(x, 0)], ids=["sigmoid", "silu", "logsumexp"])
@pytest.mark.parametrize("before", [np.remainder, np.fmod, np.floor_divide])
def test_the_processor_rounds_as_before(before: np.ufunc, function: Callable[[Any], Any]) -> None:
    """Such a loop of numpy leaves more in the status word of the other floating-point unit than flags of errors."""
    native = ag.compile(function, tier="native")
    x = ag.tensor([1.0, 5.0])
    for _ in range(3):
        before(np.array([5.0], np.float32), np.float32(2.0))
        native(x)
        one, third, least = np.float64(1.0), np.float64(3.0), np.float64(5e-324)
        assert least * one == least > 0
        assert (one / third).hex() == "0x1.5555555555555p-2" and (-one / third).hex() == "-0x1.5555555555555p-2"


@pytest.mark.one_loop
async def test_an_error_leaves_gradients_as_they_were() -> None:
    """A backward that raises in the middle changes no gradient, in both tiers."""
    for tier in ("numpy", "native"):
        function = ag.compile(lambda x, y: (x * y / y).sum(), tier=tier)
        for _ in range(2):
            x, y = (ag.tensor(np.ones(4, np.float32), requires_grad=True) for _ in "xy")
            await function(x, y).backward()
        before = [x.grad.numpy().copy(), y.grad.numpy().copy()]
        x.data[...] = 0.0
        y.data[...] = 1e-38
        with np.errstate(all="raise", under="ignore"):
            with pytest.raises(FloatingPointError):
                await (function(x, y) * 1e30).backward()
        assert all(np.array_equal(one, other) for one, other in zip(before, (x.grad.numpy(), y.grad.numpy()), strict=True)), tier

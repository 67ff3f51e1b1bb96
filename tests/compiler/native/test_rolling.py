"""Repeated bodies are loops over addresses, with the bits of numpy's functions: random bodies, operands of every kind, everything checked."""

from __future__ import annotations

import sys
import warnings
from random import Random
from typing import Any

import numpy as np
import pytest

from aiograd.compiler.calls import Ref
from aiograd.compiler.native import build, rolling
from aiograd.compiler.native.items import Location, NativeCode, RootKind
from tests.compiler.native.codes import Both, Recorder, needs_native
from tests.sweeps import swept

pytestmark = needs_native

SHAPES = ((5, 16), (64,), (3, 7), (4,), ())
UNARY = (np.tanh, np.exp, np.sin, np.negative, np.sqrt)
BINARY = (np.add, np.multiply, np.subtract, np.maximum, np.divide)
QUIET = tuple([(kind, "ignore") for kind in ("divide", "over", "under", "invalid")])


class Repeated:
    """A code with a random body that is repeated; its operands come from arguments, results, constants, and one or two repetitions before.

    Args:
        seed: of the body.
        count: of repetitions.
    """

    def __init__(self, seed: int, count: int) -> None:
        choose = Random(seed)
        rng = np.random.default_rng(seed)
        self.shape, self.dtype = choose.choice(SHAPES), np.dtype(choose.choice("fd"))
        self.recorder = Recorder()
        self.arguments: list[Any] = []
        self._rng = rng
        self.invariant = [self.given(self.shape) for _ in range(2)]
        self.inputs = [self.given(self.shape) for _ in range(count)]
        self.stacked = self.given((count, *self.shape))
        self.square = self.given((self.shape[-1],) * 2) if len(self.shape) == 2 else None
        self.plan = [self._statement(choose) for _ in range(choose.randint(3, 7))]
        state: list[Any] = [self.given(self.shape), self.given(self.shape)]
        kept: list[Any] = []
        for step in range(count):
            made = self._body(step, state)
            if seed % 3 == 0:
                kept.append(made[len(made) // 2])
            if seed % 5 == 0:
                kept.append(made[0])
            state = [made[-1], state[0]]
        self.both = Both(self.recorder.code((state[0], (*kept,), [state[1], *kept[:1]])))

    def given(self, shape: tuple[int, ...]) -> Ref:
        """A parameter with an array for it."""
        self.arguments.append(self._rng.uniform(0.2, 0.9, shape).astype(self.dtype))
        return self.recorder.parameter(self.arguments[-1])

    def _statement(self, choose: Random) -> tuple[Any, ...]:
        kinds = ("made", "state", "invariant", "input", "stacked", "number", "changing number", "constant", "part")
        function = choose.choice((*UNARY, *BINARY, *BINARY, "sum", "product", "parts", "row"))
        count = function.nin if isinstance(function, np.ufunc) else 1
        operands = [(choose.choice(kinds) if place else choose.choice(kinds[:5]), choose.random()) for place in range(count)]
        return function, operands, choose.random() < 0.25

    def _body(self, step: int, state: list[Any]) -> list[Any]:
        made: list[Any] = []
        for function, operands, is_quiet in self.plan:
            self.recorder.errors = QUIET if is_quiet else ()
            found = [self._operand(kind, draw, step, state, made) for kind, draw in operands]
            made.append(self.recorder.call(function, *found) if isinstance(function, np.ufunc) else self._other(function, *found))
        self.recorder.errors = ()
        total = self.recorder.call(np.add, made[-1], state[0])
        made.append(self.recorder.call(np.tanh, self.recorder.call(np.multiply, total, self.dtype.type(0.3))))
        return made

    def _other(self, function: str, operand: Ref) -> Ref:
        recorder = self.recorder
        if function == "sum" and self.shape:
            return recorder.call(np.multiply, operand, recorder.call(np.add.reduce, operand, 0))
        if function == "row" and len(self.shape) == 2:
            return recorder.call(np.add, operand, recorder.index(recorder.call(np.negative, operand), 1))
        if function == "product" and len(self.shape) == 2:
            return recorder.call(np.matmul, operand, self.square)
        if function == "parts" and self.shape:
            whole = recorder.call(np.empty, operand.shape, operand.dtype)
            half = (self.shape[0] + 1) // 2
            for part in (slice(half, None), slice(0, half)):
                whole = recorder.store(whole, part, recorder.index(operand, part))
            return whole
        return recorder.call(np.negative, operand)

    def _operand(self, kind: str, draw: float, step: int, state: list[Any], made: list[Any]) -> Any:
        recorder = self.recorder
        if kind == "made" and made:
            return made[int(draw * len(made))]
        if kind in ("made", "state"):
            return state[int(draw * 2)]
        if kind == "invariant":
            return self.invariant[int(draw * 2)]
        if kind == "input" or (kind in ("stacked", "part") and not self.shape):
            return self.inputs[step]
        if kind == "stacked":
            return recorder.index(self.stacked, step if draw < 0.5 else len(self.inputs) - 1 - step)
        if kind == "number":
            return self.dtype.type(0.75)
        if kind == "changing number":
            return self.dtype.type(draw + 0.37 * (step % 7))
        if kind == "constant":
            return np.full(self.shape, draw + step, self.dtype)
        return recorder.index(self.stacked, 0)


def lines(both: Both) -> int:
    """Lines of the text; a table of constants is one."""
    return len(both.text.text.splitlines())


def loops(both: Both) -> list[rolling.Roll]:
    """The loops of its items."""
    native = both.text.native
    last = {native.locations[ref].root: number for number, item in enumerate(native.items) for ref in (*item.reads(), *item.writes())}
    return rolling.rolls_of(native, last, rolling.returned_whole(native))


@pytest.mark.parametrize("checked", ["0", "1"])
@pytest.mark.parametrize("first", swept(range(0, 400, 20), keep=2))
def test_random_bodies(monkeypatch: pytest.MonkeyPatch, first: int, checked: str) -> None:
    monkeypatch.setenv("AIOGRAD_NATIVE_CHECK", checked)
    rolled = 0
    for seed in range(first, first + 20):
        rolled += check(seed)
    assert rolled >= 18


def check(seed: int) -> bool:
    """Compare; true if there was a loop: the text has as many lines for twice the repetitions."""
    one, other = Repeated(seed, 20), Repeated(seed, 40)
    for each in (one, other):
        for _ in range(2):
            each.both.check(each.arguments, f"seed {seed}")
    return lines(other.both) == lines(one.both)


@pytest.mark.parametrize("shape", [(5,), (40, 3)])
@pytest.mark.parametrize("changes", ["operand", "part"])
def test_repetitions_that_differ_in_what_they_read(changes: str, shape: tuple[int, ...]) -> None:
    """Each item is like the one before by a period; one of them reads another array, or another part of it, now and then."""
    choose, recorder = Random(5), Recorder()
    arguments = [np.random.default_rng(step).uniform(0.2, 0.9, shape) for step in range(61)]
    state, *inputs = [recorder.parameter(array) for array in arguments]
    for x in inputs:
        first = recorder.call(np.sin, x)
        second = recorder.call(np.multiply, first, 2.0)
        if changes == "operand":
            other = recorder.call(np.exp, choose.choice((first, second)))
            state = recorder.call(np.tanh, recorder.call(np.multiply, state, other))
        else:
            begin = choose.choice((0, 1))
            part = recorder.call(np.multiply, recorder.index(second, slice(begin, begin + 3)), 3.0)
            state = recorder.call(np.multiply, state, recorder.call(np.add.reduce, recorder.call(np.exp, part), 0))
    Both(recorder.code((state,))).check(arguments)


def test_repetitions_with_operands_of_different_layouts() -> None:
    choose, recorder = Random(5), Recorder()
    arguments = [np.random.default_rng(step).uniform(0.2, 0.9, (7, 7)) for step in range(61)]
    state, *inputs = map(recorder.parameter, arguments)
    for x in inputs:
        operand = choose.choice((x, recorder.transposed(x)))
        state = recorder.call(np.tanh, recorder.call(np.multiply, state, operand))
    Both(recorder.code((state,))).check(arguments)


def test_repetitions_that_handle_errors_differently() -> None:
    choose, recorder = Random(3), Recorder()
    arguments = [np.full((3, 7), 0.5) for _ in range(41)]
    state, *inputs = map(recorder.parameter, arguments)
    quiet = []
    for x in inputs:
        quiet.append(choose.random() < 0.5)
        recorder.errors = QUIET if quiet[-1] else ()
        state = recorder.call(np.tanh, recorder.call(np.exp, recorder.call(np.multiply, x, state)))
    both = Both(recorder.code((state,)))
    for place, is_quiet in enumerate(quiet):
        wrong = [*arguments]
        wrong[1 + place] = np.full((3, 7), 1e4)
        before = both.asked
        with np.errstate(over="warn"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            both.native(*wrong)
        assert both.asked - before == (not is_quiet), place


def test_parts_of_one_array_of_few_elements() -> None:
    """It is in a register in front of the loop, where each repetition reads another part of it."""
    choose, recorder = Random(3), Recorder()
    arguments = [np.linspace(0.1, 0.9, 7), np.full(3, 0.5)]
    whole, state = map(recorder.parameter, arguments)
    whole = recorder.call(np.multiply, whole, 1.5)
    for _ in range(40):
        begin = choose.randrange(5)
        state = recorder.call(np.multiply, recorder.call(np.cos, state), recorder.index(whole, slice(begin, begin + 3)))
    both = Both(recorder.code((state,)))
    assert loops(both)
    both.check(arguments)


@pytest.mark.parametrize("shape", [(5,), (3, 7)])
def test_arrays_of_some_repetitions_that_are_used_behind_the_loop(shape: tuple[int, ...]) -> None:
    for used in ((0, 1, 2), (30,), (38, 39)):
        recorder = Recorder()
        arguments = [np.random.default_rng(step).uniform(0.2, 0.9, shape) for step in range(41)]
        state, *inputs = [recorder.parameter(array) for array in arguments]
        products = []
        for x in inputs:
            products.append(recorder.call(np.multiply, x, state))
            state = recorder.call(np.tanh, recorder.call(np.add, products[-1], state))
        for place in used:
            state = recorder.call(np.subtract, recorder.call(np.cos, state), recorder.call(np.multiply, products[place], products[place]))
        both = Both(recorder.code((state,)))
        assert loops(both)
        both.check(arguments, f"{used}")


def drifting(count: int, *, fails_at: int = -1) -> Repeated:
    """``x * x`` of a state, and an input for each repetition; one of them may be beyond the range."""
    repeated = Repeated.__new__(Repeated)
    recorder = Recorder()
    state = recorder.parameter(np.full((3, 7), 0.5))
    arguments = [np.full((3, 7), 0.5)]
    kept = []
    for step in range(count):
        arguments.append(np.full((3, 7), 1e200 if step == fails_at else 0.25))
        x = recorder.parameter(np.full((3, 7), 0.25))
        square = recorder.call(np.multiply, x, x)
        state = recorder.call(np.tanh, recorder.call(np.add, recorder.call(np.tanh, square), state))
        kept.append(square)
    repeated.arguments, repeated.both = arguments, Both(recorder.code((state, tuple(kept))))
    return repeated


@pytest.mark.parametrize("fails_at", [0, 1, 17, 39])
def test_a_floating_point_error_in_one_repetition_is_told(fails_at: int) -> None:
    """numpy's function answers, which warns."""
    repeated = drifting(40, fails_at=fails_at)
    with pytest.warns(RuntimeWarning, match="overflow encountered in multiply"):
        repeated.both.check(repeated.arguments, quiet=False)
    assert repeated.both.asked == 1
    fine = drifting(40)
    fine.both.check(fine.arguments, quiet=False)
    assert not fine.both.asked


@pytest.mark.parametrize("place", [0, 20, 39])
@pytest.mark.parametrize("is_quiet", [True, False])
def test_errors_are_told_of_the_calls_that_do_not_ignore_them(is_quiet: bool, place: int) -> None:
    """The first items of a repetition ignore what the last ones tell."""
    recorder = Recorder()
    arguments = [np.full((3, 7), 0.5) for _ in range(81)]
    state, *inputs = map(recorder.parameter, arguments)
    for x, y in zip(inputs[::2], inputs[1::2], strict=True):
        recorder.errors = QUIET
        quiet = recorder.call(np.exp, recorder.call(np.multiply, x, state))
        recorder.errors = ()
        state = recorder.call(np.cosh, recorder.call(np.multiply, recorder.call(np.tanh, quiet), y))
    both = Both(recorder.code((state,)))
    assert loops(both)
    arguments[1 + 2 * place + (not is_quiet)] = np.full((3, 7), 1e4)
    with np.errstate(all="ignore"), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with np.errstate(over="warn"):
            both.native(*arguments)
    assert both.asked == (not is_quiet) and bool(told) is not is_quiet


def test_an_array_that_is_no_array_is_found_in_every_repetition() -> None:
    repeated = drifting(40)
    repeated.arguments[23] = repeated.arguments[23].view(np.ma.MaskedArray)
    repeated.both.native(*repeated.arguments)
    assert repeated.both.asked == 1


@pytest.mark.parametrize("kind", [RootKind.ARGUMENT, RootKind.RESULT])
@pytest.mark.parametrize("moved", [-8, 8])
def test_a_wrong_address_in_a_table_is_found(monkeypatch: pytest.MonkeyPatch, kind: RootKind, moved: int) -> None:
    """Of the 25th array of this kind, which is in the middle of a loop."""
    monkeypatch.setenv("AIOGRAD_NATIVE_CHECK", "1")
    lowered = build.lowered

    def changed(*given: Any) -> NativeCode:
        native = lowered(*given)
        wrong = [ref for ref, each in native.locations.items() if each.root.kind is kind][25]
        native.locations[wrong] = Location(native.locations[wrong].root, moved)
        return native

    monkeypatch.setattr(build, "lowered", changed)
    repeated = drifting(40)
    with pytest.raises(AssertionError, match="native function f: item .* outside of it"):
        repeated.both.native(*repeated.arguments)


def test_what_repeats_is_found() -> None:
    """Periods one within the other, bodies of one item, and repetitions that are too few."""
    numbers = [9, *[1, 2, 1, 3] * 20, 8, *[4] * 40, 7, *[5, 6] * 3]
    found = [*rolling._repeats(np.array(numbers))]
    assert found[0] == (1, 4, 20) and (82, 1, 40) in found
    assert not [each for each in found if each[0] > 120]


def test_repetitions_that_are_no_loops_are_looked_at_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = []

    class Body(rolling._Body):
        def __init__(self, native: Any, parts: Any, begin: int, period: int, returned: Any) -> None:
            super().__init__(native, parts, begin, period, returned)
            looked_at.append(period)

    monkeypatch.setattr(rolling, "_Body", Body)
    choose, recorder = Random(1), Recorder()
    state = first = recorder.parameter(np.full(70, 0.5))
    for _ in range(300):
        state = recorder.call(np.tanh, recorder.call(np.cos, choose.choice((state, first))))
    Both(recorder.code((state,))).check([np.full(70, 0.5)])
    assert 600 < sum(looked_at) <= 4 * 600


def test_a_long_list_without_repetitions_has_no_loops() -> None:
    assert not [*rolling._repeats(np.arange(1000))]
    assert not [*rolling._repeats(np.arange(1000) // 2)]


if __name__ == "__main__":
    given = [*map(int, sys.argv[1:]), 0, 100][:2]
    found = [(seed, check(seed)) for seed in range(given[0], given[0] + given[1])]
    others = [seed for seed, is_rolled in found if not is_rolled]
    print(f"{len(found) - len(others)} of {len(found)} are loops; the others: {others}")

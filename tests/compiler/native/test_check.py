"""The checking mode: it gives the same bits, and finds functions that would touch memory outside of their arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.compiler.calls import ArrayCode
from aiograd.compiler.native import build
from aiograd.compiler.native.check import is_checked
from aiograd.compiler.native.items import Location, LoopCall, NativeCode, RootKind
from tests.compiler.native.codes import Both, Recorder, needs_native

pytestmark = needs_native


@pytest.fixture(autouse=True)
def _checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOGRAD_NATIVE_CHECK", "1")


def exponentials(length: int) -> ArrayCode:
    """``exp(exp(x * y))`` and a sum: a row, two calls of numpy's loop, a reduction."""
    recorder = Recorder()
    x, y = (recorder.parameter(np.ones(length)) for _ in "xy")
    inner = recorder.call(np.exp, recorder.call(np.multiply, x, y))
    outer = recorder.call(np.exp, inner)
    return recorder.code((outer, recorder.call(np.add.reduce, outer, None), recorder.call(np.add, inner, y)))


def arguments(length: int) -> list[np.ndarray[Any, Any]]:
    return [np.linspace(-1.0, 1.0, length), np.linspace(0.0, 0.5, length)]


@pytest.mark.parametrize("length", [3, 16, 40, 64, 5000, 200_000])
def test_the_bits_are_the_same(length: int) -> None:
    both = Both(exponentials(length))
    assert both.text.checked is not None and len(both.text.checked.checks) > 5
    for _ in range(2):
        both.check(arguments(length))


def broken(monkeypatch: pytest.MonkeyPatch, change: Callable[[NativeCode], None]) -> None:
    """Change native functions before they are written."""
    lowered = build.lowered

    def changed(*given: Any) -> NativeCode:
        native = lowered(*given)
        change(native)
        return native

    monkeypatch.setattr(build, "lowered", changed)


@pytest.mark.parametrize("length", [3, 40, 5000, 200_000])
@pytest.mark.parametrize("moved", [-8, 8])
@pytest.mark.parametrize("kind", [RootKind.ARGUMENT, RootKind.RESULT])
def test_a_wrong_address_is_found(monkeypatch: pytest.MonkeyPatch, length: int, moved: int, kind: RootKind) -> None:
    """In registers, in loops, in calls of loops, with and without the interpreter's lock."""

    def change(native: NativeCode) -> None:
        for ref, location in list(native.locations.items()):
            if location.root.kind is kind:
                native.locations[ref] = Location(location.root, location.offset + moved)
                break

    broken(monkeypatch, change)
    both = Both(exponentials(length))
    with pytest.raises(AssertionError, match="native function f: item .* outside of it"):
        both.native(*arguments(length))


def test_an_array_that_is_shorter_than_the_program_expects() -> None:
    both = Both(exponentials(40))
    one, other = arguments(40)
    with pytest.raises(AssertionError, match="outside of it"):
        both.native(one[:39], other)


def test_a_loop_of_numpy_that_goes_too_far_is_found_in_the_red_zone(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(native: NativeCode) -> None:
        first = next(i for i, item in enumerate(native.items) if isinstance(item, LoopCall))
        item: Any = native.items[first]
        native.items[first] = replace(item, dimensions=(item.dimensions[0] + 1,))

    monkeypatch.setattr(LoopCall, "extent", lambda self, place: (0, 8))  # so that only the red zone finds it
    broken(monkeypatch, change)
    both = Both(exponentials(64))
    with pytest.raises(AssertionError, match="red zone"):
        both.native(*arguments(64))


def test_the_variable_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOGRAD_NATIVE_CHECK", "0")
    assert not is_checked()
    assert build.native_text(exponentials(3)).checked is None
    monkeypatch.setenv("AIOGRAD_NATIVE_CHECK", "yes")
    with pytest.raises(ag.errors.ArgumentError, match="AIOGRAD_NATIVE_CHECK='yes': expected 0 or 1"):
        is_checked()

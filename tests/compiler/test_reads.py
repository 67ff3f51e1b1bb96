"""Reads of a compiled function: after a change of any value that it reads, the result is the eager one."""

from __future__ import annotations

import asyncio
import contextvars
import datetime
import io
import itertools
import logging
import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from tests.compiler.reads_of_attributes import GLOBAL
from tests.compiler.reads_of_values import CASES
from tests.compiler.test_compile import bits, leaf

# ---------------------------------------------------------------- what cannot be watched


def _drawn(x: Any) -> Any:
    return x * DRAWS.random()


VARIABLE: contextvars.ContextVar[float] = contextvars.ContextVar("variable")
DRAWS, GENERATOR, NUMBERS = random.Random(1), np.random.default_rng(1), itertools.count(1)
WEIGHTS = np.ones(10_000)
FOUND: list[Any] = []
CYCLE: list[Any] = [1.0]
CYCLE.append(CYCLE)


def _reads_a_file(x: Any) -> Any:
    with open(os.devnull) as file:
        return x * len(file.read())


class _Keeps:
    def __init__(self) -> None:
        self.steps = 0
        self.last: Any = None
        self.seen: list[int] = []

    def counts_and_uses(self, x: Any) -> Any:
        self.steps += 1
        return x * self.steps

    def keeps(self, x: Any) -> Any:
        self.last = x * 2
        return self.last + 1

    def collects(self, x: Any) -> Any:
        y = x * 2
        FOUND.append(y)
        return y * 1

    def grows(self, x: Any) -> Any:
        self.seen.append(1)
        return x * len(self.seen)


#: by the reason: functions whose result may be another at every call, though nothing that they read has changed
REFUSED: dict[str, list[Callable[[Any], Any]]] = {
    r"calls time.perf_counter\(\)": [lambda x: x * (time.perf_counter() >= 0.0)],
    r"calls datetime.now\(\)": [lambda x: x * datetime.datetime.now(datetime.UTC).year],
    r"calls posix.getpid\(\)": [lambda x: x * os.getpid()],
    r"calls _?io.open\(\)": [_reads_a_file],
    "uses a Random, whose state may change": [_drawn, lambda x: x * max([2.0, DRAWS.random()]), lambda x: x * (random.random() + 1)],
    "uses a Generator, whose state may change": [lambda x: x * GENERATOR.random(), lambda x: x * sum(GENERATOR.random(2))],
    "uses a RandomState, whose state may change": [lambda x: x * np.random.rand()],
    r"calls random.Random\(\)": [lambda x: x * random.Random().random()],
    "uses a count, which can be used only once": [lambda x: x * next(NUMBERS), lambda x: x * next(zip(NUMBERS, [1], strict=False))[0]],
    "changes what it reads, <_Keeps>.steps": [_Keeps().counts_and_uses],
    "keeps a tensor in a _Keeps": [_Keeps().keeps],
    "keeps a tensor in a list": [_Keeps().collects],
    "changes a list that it reads": [_Keeps().grows],
    "array of 80,000 bytes, which is too large": [lambda x: x * np.sqrt(WEIGHTS).sum(), lambda x: x * WEIGHTS.mean()],
    "looks if two objects are the same list": [lambda x: x * (2.0 if FOUND is CYCLE else 3.0)],
    "nested deeper than 16, or contain themselves": [lambda x: x * len(str(CYCLE))],
    "reads the ContextVar": [lambda x: x * sum(map(VARIABLE.get, [2.0]))],
    "reads grad_fn of a tensor": [lambda x: x * (2.0 if x.grad_fn is None else 3.0)],
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_watched_runs_eagerly(reason: str) -> None:
    for function in REFUSED[reason]:
        compiled, x = ag.compile(function), leaf(3)
        with pytest.warns(UserWarning, match=rf"{reason}.* test_reads.py:\d+" if "changes what" not in reason else reason):
            for _ in range(4):
                compiled(x)
        assert compiled.statistics().runs == 0 and compiled.statistics().breaks == 1


def _logs(x: Any) -> Any:
    logging.getLogger("aiograd.test").debug("a call")
    print("a call", file=io.StringIO())
    return x * 2


class _Counts:
    def __init__(self) -> None:
        self.calls = self.rows = 0
        self.counts = {"calls": 0}

    def __call__(self, x: Any) -> Any:
        global CALLS
        self.calls += 1
        self.rows = self.rows + len(x)
        self.counts["calls"] += 1
        CALLS += 1
        return x * 2


def _own_objects(x: Any) -> Any:
    class Local:
        def __init__(self) -> None:
            self.items = [1, 2]

    local, named, numbers = Local(), {"a": 1}, iter([1, 2])
    local.items.append(next(numbers))
    named["a"] += len(local.items)
    drawn = random.Random(5).random() + np.random.default_rng(5).random()
    return x * len(local.items) * named["a"] * next(numbers) * drawn * float(np.triu(np.ones((300, 300))).sum())


CALLS = 0
#: functions with effects that nothing reads, or that only read what they have made themselves
ALLOWED: list[Callable[[Any], Any]] = [_logs, _Counts(), _own_objects, lambda x: x * len(list(zip([1, 2], [3, 4], strict=True)))]


@pytest.mark.parametrize("function", ALLOWED)
def test_what_a_function_makes_counts_or_prints_is_no_reason_against_a_program(function: Callable[[Any], Any]) -> None:
    compiled, x = ag.compile(function), leaf(3)
    for _ in range(3):
        assert bits(compiled(x)) == bits(function(x))
    assert compiled.statistics().recordings == 1 and compiled.statistics().runs == 2


def test_a_leaf_among_the_arguments() -> None:
    compiled, weight = ag.compile(f := lambda x: x * (2.0 if x.is_leaf else 3.0)), leaf(3)
    for _ in range(2):
        for x in (weight, weight * 1, weight.detach()):
            assert bits(compiled(x)) == bits(f(x))
    assert compiled.statistics().recordings == 3


async def test_tasks_have_values_of_their_own() -> None:
    variable: Any = contextvars.ContextVar("variable")
    compiled, x = ag.compile(lambda x: x * variable.get()), leaf(3)

    async def task(value: float) -> None:
        variable.set(value)
        for _ in range(3):
            assert bits(compiled(x)) == bits(x * value)
            await asyncio.sleep(0)

    await asyncio.gather(*map(task, (2.0, 3.0, 4.0)))
    assert compiled.statistics().recordings == 3


def test_an_object_that_raises_for_names_it_does_not_know() -> None:
    class Strict:
        rate = 2.0

        def __getattr__(self, name: str) -> Any:
            raise KeyError(name)

    strict, x = Strict(), leaf(3)
    compiled = ag.compile(lambda x, s: x * s.rate * strict.rate)
    for _ in range(3):
        assert bits(compiled(x, strict)) == bits(x * 4.0)
    assert compiled.statistics().runs == 2


def test_an_object_that_does_not_know_its_class() -> None:
    class Strict:
        def __getattribute__(self, name: str) -> Any:
            return {"rate": GLOBAL["strict"]}[name]

    GLOBAL["strict"] = 2.0
    strict, x = [Strict()], leaf(3)
    compiled = ag.compile(lambda x: x * strict[0].rate)
    for rate in (2.0, 2.0, 2.0, 3.0, 3.0):
        GLOBAL["strict"] = rate
        assert bits(compiled(x)) == bits(x * rate)
    strict[0] = Strict()
    assert bits(compiled(x)) == bits(x * 3.0) and compiled.statistics().runs == 3
    with pytest.raises(ag.errors.ArgumentTypeError, match="an object that cannot be looked at, since it raises KeyError"):
        compiled(x, strict[0])


def test_objects_that_are_equal_are_not_one() -> None:
    class Equal:
        def __init__(self, rate: float) -> None:
            self.rate = rate

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Equal)

        def __hash__(self) -> int:
            return 1

    compiled, x = ag.compile(lambda x, e: x * e.rate), leaf(3)
    for rate in (2.0, 3.0, 2.0):
        assert bits(compiled(x, Equal(rate))) == bits(x * rate)


def test_a_debugger_goes_on() -> None:
    seen = []

    def trace(frame: Any, event: str, argument: Any) -> Any:
        if frame.f_code is helper.__code__:
            seen.append(event)
        return trace

    def helper(x: Any) -> Any:
        return x * GLOBAL["traced"]

    GLOBAL["traced"] = 2.0
    compiled, x, before = ag.compile(lambda x: helper(x)), leaf(3), sys.gettrace()
    sys.settrace(trace)
    try:
        compiled(x)
        assert sys.gettrace() is trace
    finally:
        sys.settrace(before)
    assert seen == ["call", "line", "return"]
    GLOBAL["traced"] = 3.0
    assert bits(compiled(x)) == bits(x * 3.0)


@pytest.mark.parametrize("name", CASES)
async def test_a_change_is_seen(name: str) -> None:
    function, changes = CASES[name]()
    compiled, x = ag.compile(function, max_signatures=64), leaf(2, 3)
    results = []
    for change in [lambda: None, *changes]:
        change()
        for _ in range(4):
            assert bits(compiled(x)) == bits(function(x))
        results.append(bits(function(x)))
    assert compiled.statistics().runs >= 2 * len(results), compiled.statistics()
    assert len({str(each) for each in results}) > 1

"""Names that a compiled function reads: whatever is replaced there, no stale program runs."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import nn
from tests.compiler.test_compile import bits, leaf


class _Numbers:
    """A class and an object of it that functions read numbers from."""

    __slots__ = ("own",)
    scale = 2.0

    def __init__(self) -> None:
        self.own = 2.0

    @classmethod
    def made(cls) -> float:
        return cls.scale

    def method(self, x: Any) -> Any:
        return x * self.scale


def _double(x: Any) -> Any:
    return x * 2.0


def _through(x: Any) -> Any:
    return _HELPERS["call"](x) * NUMBER


NUMBER: Any = 2.0
NOTHING: Any = None
ARRAY = np.full(3, 2.0, np.float32)
MODEL: Any = nn.Linear(3, 3)
NUMBERS = _Numbers()
PARTIAL: Any = functools.partial(np.multiply, 2.0)
SETTINGS = types.ModuleType("settings")
SETTINGS.__dict__.update(scale=2.0)
_HELPERS: dict[str, Any] = {"call": _double}

#: by what a name leads to: a function of it, and how it is replaced
REPLACED: dict[str, tuple[Callable[[Any], Any], str, Any, Any]] = {
    "number": (lambda x: x * NUMBER, "NUMBER", None, 3.0),
    "number of another type": (lambda x: x * NUMBER, "NUMBER", None, np.float32(3.0)),
    "complex number": (lambda x: x * NUMBER, "NUMBER", None, 3j),
    "dtype": (lambda x: x.astype(NUMBER if isinstance(NUMBER, type) else np.float32), "NUMBER", None, np.float64),
    "None": (lambda x: x * 2.0 if NOTHING is None else x * 3.0, "NOTHING", None, object()),
    "array": (lambda x: x * ARRAY, "ARRAY", None, np.full(3, 3.0, np.float32)),
    "function": (lambda x: _double(x), "_double", None, lambda x: x * 3.0),
    "global of a function that is called": (lambda x: _through(x), "NUMBER", None, 3.0),
    "function in a dict": (lambda x: _through(x), "_HELPERS", "call", lambda x: x * 3.0),
    "module": (lambda x: MODEL(x), "MODEL", None, nn.Linear(3, 3)),
    "attribute of a class": (lambda x: x * _Numbers.scale * _Numbers.made(), "_Numbers", "scale", 3.0),
    "attribute of an object's class": (lambda x: x * NUMBERS.scale, "_Numbers", "scale", 3.0),
    "attribute of a method's class": (NUMBERS.method, "_Numbers", "scale", 3.0),
    "slot": (lambda x: x * NUMBERS.own, "NUMBERS", "own", 3.0),
    "Python module": (lambda x: x * SETTINGS.scale, "SETTINGS", "scale", 3.0),
    "partial": (lambda x: PARTIAL(x), "PARTIAL", None, functools.partial(np.multiply, 3.0)),
}


@pytest.mark.parametrize("kind", REPLACED)
async def test_whatever_a_name_leads_to_may_be_replaced(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    f, name, part, other = REPLACED[kind]
    compiled, x = ag.compile(f), leaf(2, 3)
    for _ in range(3):
        assert bits(compiled(x)) == bits(f(x))
    assert compiled.statistics().recordings == 1
    before, held = bits(f(x)), globals()[name]
    if part is None:
        monkeypatch.setitem(globals(), name, other)
    elif isinstance(held, dict):
        monkeypatch.setitem(held, part, other)
    else:
        monkeypatch.setattr(held, part, other)
    for _ in range(3):
        assert bits(compiled(x)) == bits(f(x)) != before
    assert compiled.statistics().recordings == 2 and compiled.statistics().runs == 4


async def test_an_optimizer_that_was_replaced_takes_no_step() -> None:
    model, x = nn.Linear(3, 1), leaf(2, 3, grad=False)
    optimizer = ag.optim.SGD(model.parameters(), lr=0.1)

    @ag.compile
    async def step() -> Any:
        loss = model(x).sum()
        await loss.backward()
        optimizer.step()
        return loss

    for _ in range(2):
        await step()
    optimizer = ag.optim.SGD(model.parameters(), lr=0.0)
    before = bits(model.weight)
    await step()
    assert bits(model.weight) == before and step.statistics().recordings == 2


async def test_a_function_that_makes_something_at_its_first_call_has_a_program_from_the_second_on() -> None:
    class Lazy:
        def __init__(self) -> None:
            self.made: Any = None

        @ag.compile
        def call(self, x: Any) -> Any:
            if self.made is None:
                self.made = {"factor": 2.0, "of": object()}
            return x * self.made["factor"]

    lazy, x = Lazy(), leaf(3)
    for _ in range(4):
        assert bits(lazy.call(x)) == bits(x * 2.0)
    assert Lazy.call.statistics().recordings == 2 and Lazy.call.statistics().runs == 2 and not Lazy.call.statistics().breaks


class Trainer:
    """Keeps books beside what a step uses."""

    def __init__(self) -> None:
        self.model = nn.Linear(3, 1)
        self.optimizer = ag.optim.SGD(self.model.parameters(), lr=0.1)
        self.options = {"norm": 0.5}
        self.scale = 1.0
        self.history: list[float] = []
        self.steps = self.calls = 0

    @property
    def norm(self) -> float:
        return self.options["norm"]

    def loss(self, x: Any) -> Any:
        return (self.model(x) ** 2).mean() * self.scale

    @ag.compile
    async def step(self, x: Any) -> Any:
        self.optimizer.zero_grad()
        self.calls += 1
        loss = self.loss(x)
        await loss.backward()
        ag.optim.clip_grad_norm_(self.model.parameters(), self.norm)
        self.optimizer.step()
        return loss


async def test_books_that_an_object_keeps_are_no_reason_to_record_again_and_what_its_methods_use_is() -> None:
    trainer, twin = Trainer(), Trainer()
    twin.model.load_state_dict(trainer.model.state_dict())
    before = Trainer.step.statistics().recordings
    for number in range(12):
        if number == 4:
            trainer.scale = twin.scale = 3.0
        elif number == 8:
            trainer.options["norm"] = twin.options["norm"] = 0.01
        x = leaf(2, 3, grad=False)
        trainer.history.append((await trainer.step(x)).item())
        twin.history.append((await Trainer.step.function(twin, x)).item())
        trainer.steps += 1
        assert bits(*trainer.model.parameters()) == bits(*twin.model.parameters())
    assert trainer.history == twin.history and Trainer.step.statistics().recordings - before == 3


class Reading:
    """Uses attributes by names that it does not mention."""

    def __init__(self) -> None:
        self.first, self.second = 2.0, 3.0

    def __call__(self, name: str) -> Any:
        return getattr(self, name)


async def test_attributes_that_are_found_by_computed_names_count() -> None:
    reading, x = Reading(), leaf(3)
    compiled = ag.compile(lambda x: x * reading("first") + x * reading("sec" + "ond"))
    for _ in range(2):
        assert bits(compiled(x)) == bits(x * 2.0 + x * 3.0)
    reading.second = 5.0
    for _ in range(2):
        assert bits(compiled(x)) == bits(x * 2.0 + x * 5.0)


async def test_names_lead_deep() -> None:
    deep: Any = types.SimpleNamespace()
    for _ in range(5):
        deep = types.SimpleNamespace(part=deep, rest=list(range(3)))
    deep.part.part.part.part.weight = leaf(3)
    deep.part.part.part.number = 2.0
    compiled, x = ag.compile(lambda x: x * deep.part.part.part.part.weight * deep.part.part.part.number), leaf(3)
    for change in range(6):
        if change == 2:
            deep.part.part.part.part.weight = leaf(3)
        elif change == 4:
            deep.part.part.part.number = 3.0
        assert bits(compiled(x)) == bits(x * deep.part.part.part.part.weight * deep.part.part.part.number)
    assert compiled.statistics().recordings == 3

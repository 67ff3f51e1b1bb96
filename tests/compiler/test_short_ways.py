"""Short ways of compiled calls do what the long ones do: guards compared by generated functions, passes over one program in one step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.compiler import compiled, guard_code
from aiograd.compiler.node import ProgramNode
from aiograd.compiler.program_code import MOST_CHECKS, GuardedCode
from aiograd.engine.graph_task import GraphTask
from tests.support import assert_awaiting_raises, leaf


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[GuardedCode]:
    """The programs whose surroundings have been looked through."""
    found: list[GuardedCode] = []
    before = GuardedCode.compared

    def counted(code: GuardedCode) -> Any:
        found.append(code)
        return before(code)

    monkeypatch.setattr(GuardedCode, "compared", counted)
    return found


class Holder:
    def __init__(self) -> None:
        self.weight = leaf([2.0])
        self.scale = 3.0
        self.parts = {"a": [leaf([1.0])], "b": (leaf([4.0]), None)}


def test_nothing_is_looked_through_while_nothing_changes(compared: list[GuardedCode]) -> None:
    holder, module = Holder(), ag.nn.Linear(1, 1)
    f = ag.compile(lambda x, n, rest: module(x * holder.weight * holder.scale + holder.parts["a"][0] + holder.parts["b"][0]) * n + rest["y"][0])
    x, y = leaf([5.0]), np.ones(1, np.float32)
    for _ in range(2):
        f(x, 2, {"y": [y]})
    compared.clear()
    first = [f(x, 2, {"y": [y]}).item() for _ in range(20)]
    assert not compared and f.statistics().recordings == 1 and len(set(first)) == 1


def test_comparisons_of_arguments_are_not_made_to_be_thrown_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """More programs than comparisons are kept, called in turn: each gets a comparison `MOST_CHECKS` times, and is found the long way from then on."""
    made: list[Any] = []

    def counted(*args: Any) -> Any:
        made.append(args)
        return guard_code.arguments_check(*args)

    monkeypatch.setattr(compiled, "arguments_check", counted)
    f = ag.compile(lambda x: x * 2)
    for _ in range(20):
        for rows in range(1, 8):
            assert f(np.ones(rows, np.float32)).shape == (rows,)
    assert f.statistics().recordings == 7 and len(made) == 7 * MOST_CHECKS


NOT_READ = ("an attribute that the function does not read", "one more entry", "the order of entries")
CHANGES: dict[str, Any] = {
    "a weight of the same value": lambda h: setattr(h, "weight", leaf([2.0])),
    "a number": lambda h: setattr(h, "scale", 4.0),
    "a number's type": lambda h: setattr(h, "scale", 3),
    "an item": lambda h: h.parts["a"].__setitem__(0, leaf([6.0])),
    "one more item": lambda h: h.parts["a"].append(leaf([6.0])),
    "a tuple": lambda h: h.parts.update(b=(leaf([7.0]), None)),
    "None": lambda h: h.parts.update(b=(h.parts["b"][0], leaf([1.0]))),
    "one more entry": lambda h: h.parts.update(c=leaf([1.0])),
    "the order of entries": lambda h: h.parts.update(a=h.parts.pop("a")),
    NOT_READ[0]: lambda h: setattr(h, "more", leaf([1.0])),
    "all attributes": lambda h: setattr(h, "__dict__", Holder().__dict__),
    "a shape": lambda h: setattr(h.weight, "_data", np.full((2, 1), 2.0)),
    "a dtype": lambda h: setattr(h.weight, "_data", np.full(1, 2.0, np.float32)),
    "requires_grad": lambda h: h.weight.requires_grad_(False),
}


@pytest.mark.parametrize("name", CHANGES)
def test_every_change_is_seen(name: str) -> None:
    holder = Holder()

    def plain(x: Any) -> Any:
        return x * holder.weight * holder.scale + sum(holder.parts["a"]) * 2.0 + holder.parts["b"][0]

    f, x = ag.compile(plain), leaf([5.0])
    for _ in range(4):
        f(x)
    CHANGES[name](holder)
    for _ in range(3):
        found, expected = f(x), plain(x)
        assert found.detach().numpy().tobytes() == expected.detach().numpy().tobytes() and found.dtype == expected.dtype
    assert f.statistics().recordings == (1 if name in NOT_READ else 2)


def test_other_objects_that_are_as_good_are_looked_through(compared: list[GuardedCode]) -> None:
    parts = {"named": {"a": leaf([1.0]), "b": 2.0}, "list": [leaf([1.0]), 1.0]}
    f, x = ag.compile(lambda x: x * parts["named"]["a"] * parts["named"]["b"] * parts["list"][0] * parts["list"][1]), leaf([5.0])
    for n in range(3 * MOST_CHECKS):
        parts["named"], parts["list"] = dict(parts["named"]), list(parts["list"])
        assert f(x).item() == 10.0
        assert n == 0 or compared, n
        compared.clear()
    assert f.statistics().recordings == 1


# -------------------------------------------------------------------- passes


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch) -> list[GraphTask]:
    """The GraphTasks that are made."""
    found: list[GraphTask] = []
    before = GraphTask.__init__

    def counted(task: GraphTask, *args: Any, **options: Any) -> None:
        found.append(task)
        before(task, *args, **options)

    monkeypatch.setattr(GraphTask, "__init__", counted)
    return found


async def test_a_pass_over_one_program_makes_no_graph_task(tasks: list[GraphTask]) -> None:
    x, w = leaf([1.0, 2.0]), leaf([3.0, 4.0])
    f = ag.compile(lambda: (x * w).sum())
    await f().backward()
    tasks.clear()
    async with ag.Engine(clock=lambda: 0.0) as engine:  # whose budget is never spent
        loss = f()
        await loss.backward(retain_graph=True)
        await loss.backward()
        assert engine.statistics().committed == 2 and not tasks
    assert x.grad.tolist() == [9.0, 12.0] and w.grad.tolist() == [3.0, 6.0]
    await assert_awaiting_raises(ag.errors.GraphFreedError, None, loss.backward())


async def test_a_pass_of_a_step_to_some_leaves_or_to_one_that_is_used_twice_makes_no_graph_task(tasks: list[GraphTask]) -> None:
    x, w = leaf([1.0, 2.0]), leaf([3.0, 4.0])
    wanted = [w]

    async def step() -> Any:
        loss = (x * w * w).sum()
        await loss.backward(inputs=wanted)
        return loss

    f = ag.compile(step)
    await f()
    assert x.grad is None and w.grad.tolist() == [6.0, 16.0]
    tasks.clear()
    async with ag.Engine(clock=lambda: 0.0) as engine:
        loss = await f()
        assert engine.statistics().committed == 1 and not tasks
        assert x.grad is None and w.grad.tolist() == [12.0, 32.0]
        await assert_awaiting_raises(ag.errors.GraphFreedError, None, loss.backward())


async def test_hooks_take_the_usual_path(tasks: list[GraphTask]) -> None:
    x, w = leaf([1.0, 2.0]), leaf([3.0, 4.0])
    f = ag.compile(lambda: (x * w).sum())
    f()
    seen: list[str] = []
    x.register_hook(lambda g: seen.append("leaf"))
    w.register_post_accumulate_grad_hook(lambda leaf: seen.append("after"))
    loss = f()
    loss.register_hook(lambda g: seen.append("root"))
    await loss.backward()
    assert seen == ["root", "leaf", "after"] and len(tasks) == 1


@pytest.mark.parametrize("kept", [False, True])
async def test_a_short_pass_that_fails_changes_nothing(monkeypatch: pytest.MonkeyPatch, kept: bool) -> None:
    x, w = leaf([1.0, 2.0]), leaf([3.0, 4.0])
    f = ag.compile(lambda: (x * w).sum())
    await f().backward()
    before, loss = (x.grad, w.grad), f()

    def fails(node: Any, grads: Any) -> Any:
        raise FloatingPointError("no")

    async with ag.Engine(clock=lambda: 0.0) as engine:
        with monkeypatch.context() as patched:
            patched.setattr(ProgramNode, "vjp", fails)
            raised = await assert_awaiting_raises(FloatingPointError, "no", loss.backward(retain_graph=kept))
        assert any("in the backward of" in note and "Backward" in note for note in raised.__notes__)
        assert engine.statistics().failed == 1 and engine.statistics().in_flight == 0
        assert x.grad is before[0] and w.grad is before[1] and x.grad.tolist() == [3.0, 4.0]
        if kept:
            await loss.backward()
            assert x.grad.tolist() == [6.0, 8.0]
        else:
            await assert_awaiting_raises(ag.errors.GraphFreedError, "FloatingPointError: no", loss.backward())

"""Rows and the pass after them as one native function: what is seen afterwards is what the eager step leaves."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.lib import NumpyVersion

import aiograd as ag
import aiograd.nn.functional as F
from aiograd.compiler import joint_pass, steps
from aiograd.engine.run.current import current_engine
from aiograd.graph import accumulate_grad
from tests.compiler.native.codes import needs_native

pytestmark = needs_native

X = np.random.default_rng(0).standard_normal((6, 4)).astype("f")
T = np.array([0, 3, 1, 1, 2, 0])


class Case:
    """A small network, and a step that leaves its gradients."""

    def __init__(self, *, keeps: bool = False) -> None:
        rng = np.random.default_rng(1)
        self.w, self.b, self.c = (ag.tensor(rng.standard_normal(s).astype("f"), requires_grad=True) for s in ((4, 4), (4,), (4,)))
        self.keeps = keeps

    @property
    def leaves(self) -> tuple[Any, ...]:
        return self.w, self.b, self.c

    async def step(self, x: Any, labels: Any) -> Any:
        loss = F.cross_entropy((x @ self.w).relu() + self.b + self.c, labels)
        await loss.backward(retain_graph=self.keeps)
        return loss

    def state(self, loss: Any) -> list[Any]:
        return [loss.requires_grad, loss.numpy().tobytes(), *[None if p.grad is None else p.grad.numpy().tobytes() for p in self.leaves]]


@pytest.fixture
def joint(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each run that may be joint, True if it was."""
    found: list[bool] = []

    def noted(code: Any, inputs: list[Any]) -> Any:
        made = joint_pass.run_jointly(code, inputs)
        found.append(made is not None)
        return made

    monkeypatch.setattr(steps, "run_jointly", noted)
    return found


async def both(disturb: dict[int, Callable[[Case], Any]], count: int = 6, target: Any = lambda n: T) -> None:
    """Some steps, eager and native, with the same results; `disturb` is carried out before some."""
    results = []
    for compiled in (False, True):
        case, found = Case(), []
        run: Any = ag.compile(case.step, tier="native") if compiled else case.step
        for n in range(count):
            if n in disturb:
                disturb[n](case)
            loss = await run(X + np.float32(n), ag.tensor(target(n)))
            found.append(case.state(loss))
            for leaf in case.leaves if n % 2 else ():  # every other one adds to what is there
                leaf.grad = None
        results.append(found)
    assert results[0] == results[1]


@pytest.mark.parametrize("checked", ["0", "1"])
async def test_gradients(checked: str, joint: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """They are set, and added to the ones that are there; two leaves with one gradient have an array each."""
    async with ag.Engine(budget=1000.0):
        monkeypatch.setenv("AIOGRAD_NATIVE_CHECK", checked)
        before = current_engine().statistics().committed
        await both({})
        assert joint == [True] * 4
        assert current_engine().statistics().committed == before + 12
        case = Case()
        run = ag.compile(case.step, tier="native")
        for _ in range(3):
            for leaf in case.leaves:
                leaf.grad = None
            await run(X, ag.tensor(T))
        copied: list[Any] = []
        monkeypatch.setattr(accumulate_grad, "own", lambda grad: copied.append(grad) or grad.copy())
        for leaf in case.leaves:
            leaf.grad = None
        await run(X, ag.tensor(T))
        assert not copied  # they are the arrays that the function has made
        assert joint[-1] and not np.shares_memory(case.b.grad.numpy(), case.c.grad.numpy())
        assert case.b.grad.numpy().flags.owndata


async def test_targets_that_are_ignored(joint: list[bool]) -> None:
    async with ag.Engine(budget=1000.0):
        await both({}, 8, lambda n: np.where(T == 1, -100, T) if n == 4 else T)
        assert joint == [True, True, False, True, True, True]


async def test_the_graph_is_spent_afterwards() -> None:
    async with ag.Engine(budget=1000.0):
        errors = []
        for compiled in (False, True):
            case = Case()
            run: Any = ag.compile(case.step, tier="native") if compiled else case.step
            for _ in range(3):
                loss = await run(X, ag.tensor(T))
            with pytest.raises(ag.errors.GraphFreedError) as caught:
                await loss.backward()
            errors.append(type(caught.value))
        assert errors[0] is errors[1]


async def test_a_graph_that_is_kept(joint: list[bool]) -> None:
    async with ag.Engine(budget=1000.0):
        results = []
        for compiled in (False, True):
            case = Case(keeps=True)
            run: Any = ag.compile(case.step, tier="native") if compiled else case.step
            for _ in range(3):
                loss = await run(X, ag.tensor(T))
                await loss.backward()
            results.append(case.state(loss))
        assert results[0] == results[1] and not joint


async def test_hooks_are_called(joint: list[bool]) -> None:
    """A step with a hook at a leaf takes the usual way, until the hook is gone."""
    async with ag.Engine(budget=1000.0):
        handles: list[Any] = []

        def hook(case: Case) -> None:
            handles.append(case.b.register_hook(lambda grad: grad * 2.0))

        def after(case: Case) -> None:
            handles.append(case.w.register_post_accumulate_grad_hook(lambda leaf: setattr(leaf, "grad", leaf.grad * 3.0)))

        await both({2: after, 4: lambda case: handles[-1].remove(), 5: hook}, 8)
        assert joint == [False, False, True, False, False, False]


async def test_watched_passes_and_profiles(joint: list[bool]) -> None:
    async with ag.Engine(budget=1000.0):
        case = Case()
        run = ag.compile(case.step, tier="native")
        for _ in range(3):
            await run(X, ag.tensor(T))
        assert joint == [True]
        with ag.profiler.profile():
            await run(X, ag.tensor(T))
        assert joint == [True, False]
        with ag.detect_anomaly():
            await run(X, ag.tensor(T))
        assert True not in joint[1:]
        await run(X, ag.tensor(T))
        assert joint[-1]


async def test_without_a_turn(joint: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """While another pass has the loop, the pass waits as ever."""
    async with ag.Engine(budget=1000.0):
        case = Case()
        run = ag.compile(case.step, tier="native")
        for _ in range(3):
            await run(X, ag.tensor(T))
        turns: Any = current_engine()._loop_budget
        assert turns.take()
        waits = asyncio.create_task(run(X, ag.tensor(T)))
        try:
            await asyncio.sleep(0)
            assert joint == [True, False] and not waits.done()
        finally:
            turns.release()
        await waits


@pytest.mark.parametrize("way", ["raise", "warn"])
async def test_a_floating_point_error(way: Any, joint: list[bool]) -> None:
    async with ag.Engine(budget=1000.0):
        results = []
        for compiled in (False, True):
            case, said = Case(), []
            run: Any = ag.compile(case.step, tier="native") if compiled else case.step
            for _ in range(3):
                await run(X, ag.tensor(T))
            for leaf in case.leaves:
                leaf.grad = None
            with warnings.catch_warnings(record=True) as caught, np.errstate(all=way, under="ignore"):
                warnings.simplefilter("always")
                try:
                    await run(np.full_like(X, 3e38), ag.tensor(T))
                except FloatingPointError as error:
                    said.append(str(error))
            said += [str(warning.message) for warning in caught]
            results.append((said, [None if leaf.grad is None else np.isnan(leaf.grad.numpy()).tolist() for leaf in case.leaves]))
        assert results[0] == results[1]
        assert results[0][0] or NumpyVersion(np.__version__) < "2.3.0", "older ones do not look at the errors of products"
        assert joint == [True, False]

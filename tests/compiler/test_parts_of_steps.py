"""Compiled steps of several parts: what one part or call hands on to the next is what the eager function has there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.compiler.native.tiers import native_problem
from tests.compiler.test_random_programs import bits

TIERS = ["numpy", pytest.param("native", marks=pytest.mark.skipif(native_problem() is not None, reason=str(native_problem())))]


class Leaves:
    """Parameters of a step, the same in every object."""

    def __init__(self) -> None:
        rng = np.random.default_rng(1)
        self.w, self.v = (ag.tensor(rng.standard_normal((3, 4)), requires_grad=True) for _ in "wv")


async def same(step: Callable[[Leaves, Any], Any], runs: int = 4, **options: Any) -> list[Any]:
    """The programs of a step, after some compiled runs with the results and gradients of eager ones."""
    found: list[list[Any]] = []
    compiled: Any = None
    for is_compiled in (False, True):
        leaves, rng = Leaves(), np.random.default_rng(5)
        compiled = ag.compile(step, **options) if is_compiled else step
        found.append([])
        for _ in range(runs):
            results = await compiled(leaves, ag.tensor(rng.standard_normal((3, 4))))
            found[-1].append(bits(*results, leaves.w, leaves.v, leaves.w.grad, leaves.v.grad))
    assert found[0] == found[1]
    statistics = compiled.statistics()
    assert not statistics.breaks and statistics.runs == runs - 1, statistics
    return list(compiled.programs)


# -------------------------------------------------------------------- memory budgets


async def several_parts(leaves: Leaves, x: Any) -> Any:
    leaves.w.grad = leaves.v.grad = None
    h = ag.tanh(x * leaves.w)
    (g,) = await ag.grad((h.T.exp() * leaves.v.T).sum(), [leaves.w])
    z = ag.exp(ag.tanh((g * 2.0 + h.detach()).T.reshape(3, 4)) * leaves.v)
    await (z.T * x.T).sum().backward()
    return g * 3.0, z.detach() * 1.0


async def test_a_step_of_several_parts_has_a_memory_budget() -> None:
    """Values that a part takes from another have other names in it, and are known by them to its plan."""
    (program,) = await same(several_parts, memory_budget=0.8)
    assert len(program.parts) > 2
    assert program.memory_plan.recompute and program.memory_plan.peak <= 0.8 * program.memory_plan.full


# -------------------------------------------------------------------- values of gradients

VALUES: dict[str, Callable[[Any, Any], Any]] = {
    "detached": lambda w, x: w.grad.detach() * 2.0,
    "data": lambda w, x: w.grad.data * 2.0,
    "twice": lambda w, x: w.grad.detach().detach() + w.grad,
    "view": lambda w, x: w.grad.T.detach() * 2.0 + w.grad.detach().T,
    "array": lambda w, x: np.multiply(w.grad.detach(), ag.asarray(w.grad)),
    "list": lambda w, x: ag.stack([w.grad.detach(), w.grad]),
    "mask": lambda w, x: ag.where(w.grad.detach() > 0.0, x, x * 2.0),
    "index": lambda w, x: x[:, w.grad.detach()[0].argsort()],
    "leaf": lambda w, x: (w.grad.detach().requires_grad_() * 2.0).detach(),
    "written": lambda w, x: written(w),
}


def written(w: Any) -> Any:
    kept = w.grad.detach() * 1.0
    seen = w.grad.detach()
    with ag.no_grad():
        w.grad *= 0.5
        w -= seen * 0.1
    return kept + seen


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("value", VALUES)
async def test_a_gradient_that_is_read_is_the_one_of_this_run(value: str, tier: str) -> None:
    async def step(leaves: Leaves, x: Any) -> Any:
        leaves.w.grad = None
        await (x * leaves.w**2).sum().backward()
        result = VALUES[value](leaves.w, x)
        await (x.exp() * leaves.w).sum().backward()
        return (result * 1.0,)

    await same(step, tier=tier)


async def test_a_gradient_that_a_later_pass_replaces_is_read_eagerly() -> None:
    """What was read before the pass is used after it."""

    async def step(w: Any, x: Any) -> Any:
        w.grad = None
        await (x * w**2).sum().backward()
        seen = w.grad.detach()
        await (x.exp() * w).sum().backward()
        return seen * 2.0

    found = []
    for is_compiled in (False, True):
        leaves, rng = Leaves(), np.random.default_rng(5)
        bound = leaves.w

        async def here(x: Any, bound: Any = bound) -> Any:
            return await step(bound, x)

        run = ag.compile(here) if is_compiled else here
        with pytest.warns(UserWarning, match="replaced since it was read") if is_compiled else contextlib.nullcontext():
            found.append([bits(await run(ag.tensor(rng.standard_normal((3, 4))))) for _ in range(3)])
    assert found[0] == found[1]


async def test_a_gradient_with_another_name_is_read_eagerly() -> None:
    found = []
    for is_compiled in (False, True):
        leaves = Leaves()
        leaves.w.grad = ag.zeros(3, 4, dtype=leaves.w.dtype)
        first = leaves.w.grad

        async def step(x: Any, leaves: Leaves = leaves, first: Any = first) -> Any:
            results = first * 2.0, leaves.w.grad * 3.0
            await (x * leaves.w).sum().backward()
            return results

        run = ag.compile(step) if is_compiled else step
        with pytest.warns(UserWarning, match="another name") if is_compiled else contextlib.nullcontext():
            found.append([bits(*await run(ag.ones(3, 4, dtype=leaves.w.dtype))) for _ in range(3)])
    assert found[0] == found[1]

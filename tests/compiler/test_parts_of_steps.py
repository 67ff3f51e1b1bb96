"""Compiled steps of several parts: what one part or call hands on to the next is what the eager function has there."""

from __future__ import annotations

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

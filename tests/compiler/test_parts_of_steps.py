"""Compiled steps of several parts: what one part or call hands on to the next is what the eager function has there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.compiler.native.tiers import native_problem
from aiograd.errors import GraphFreedError, ModifiedError
from tests.compiler.test_random_programs import bits
from tests.support import assert_awaiting_raises

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


# -------------------------------------------------------------------- layouts


def read(g: Any, x: Any) -> tuple[Any, ...]:
    """Results that depend on where the elements of `g` are, if they are read by their place in memory."""
    return (g * 2.0).sum(axis=0), g.reshape(-1) * 3.0, g.T.reshape(-1) * 1.0, (g + x).T.reshape(-1)


def three_uses(leaves: Leaves, x: Any) -> Any:
    """The gradient of `w` is a sum of two transposed ones, to which one that lies in order is added."""
    last = (leaves.w * x).sum()
    return (leaves.w.T * x.reshape(4, 3)).sum() + (leaves.w.T * x.exp().reshape(4, 3)).sum() + last


def two_uses(leaves: Leaves, x: Any) -> Any:
    """The gradient of `w` lies in memory column by column."""
    return (leaves.w.T * x.reshape(4, 3)).sum() + (leaves.w.T * x.exp().reshape(4, 3)).sum()


async def given_by_grad(leaves: Leaves, x: Any) -> Any:
    (g,) = await ag.grad(two_uses(leaves, x), [leaves.w])
    (h,) = await ag.grad(three_uses(leaves, x), [leaves.w])
    return *read(g, x), *read(h, x)


async def read_of_a_leaf(leaves: Leaves, x: Any) -> Any:
    leaves.w.grad = None
    await two_uses(leaves, x).backward()
    results = read(leaves.w.grad, x)
    leaves.w.grad = None
    await three_uses(leaves, x).backward()
    return *results, *read(leaves.w.grad, x)


async def broadcast(leaves: Leaves, x: Any) -> Any:
    """All elements of the first gradient are one in memory, and each row of the second."""
    g, h = await ag.grad(leaves.w.sum() * 2.0 + (leaves.v.sum(axis=0) * x[0]).sum(), [leaves.w, leaves.v])
    return *read(g, x), *read(h, x)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("step", [given_by_grad, read_of_a_leaf, broadcast])
async def test_a_part_reads_gradients_as_they_lie_in_memory(step: Any, tier: str) -> None:
    await same(step, tier=tier)


@pytest.mark.parametrize("tier", TIERS)
async def test_a_program_lays_its_gradients_out_as_the_engine_does(tier: str) -> None:
    found = []
    for is_compiled in (False, True):
        leaves, rng = Leaves(), np.random.default_rng(5)
        loss_of = ag.compile(three_uses, tier=tier) if is_compiled else three_uses
        for _ in range(3):
            leaves.w.grad = None
            await loss_of(leaves, ag.tensor(rng.standard_normal((3, 4)))).backward()
        found.append((leaves.w.grad.numpy().strides, bits(leaves.w.grad)))
    assert found[0] == found[1]


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("step", [given_by_grad, read_of_a_leaf])
async def test_a_hook_may_lay_a_gradient_out_in_another_way(step: Any, tier: str) -> None:
    found = []
    for is_compiled in (False, True):
        leaves, rng, turned = Leaves(), np.random.default_rng(5), []
        run = ag.compile(step, tier=tier) if is_compiled else step
        results = []
        for _ in range(4):
            results += bits(*await run(leaves, ag.tensor(rng.standard_normal((3, 4)))))
            leaves.w.register_hook(lambda grad, turned=turned: turned.append(grad) or (grad * 2.0).reshape(-1).reshape(3, 4))
        assert len(turned) == 2 * (1 + 2 + 3)
        found.append(results)
    assert found[0] == found[1]


@pytest.mark.parametrize("tier", TIERS)
async def test_a_gradient_that_was_set_by_hand_may_lie_in_another_way(tier: str) -> None:
    async def accumulated(leaves: Leaves, x: Any) -> Any:
        results = read(leaves.w.grad, x)
        leaves.w.grad = None
        await (leaves.w * x).sum().backward()
        return results

    found = []
    for is_compiled in (False, True):
        leaves, rng = Leaves(), np.random.default_rng(5)
        run = ag.compile(accumulated, tier=tier) if is_compiled else accumulated
        leaves.w.grad = ag.asarray(np.asfortranarray(rng.standard_normal((3, 4))))
        found.append([bits(*await run(leaves, ag.tensor(rng.standard_normal((3, 4))))) for _ in range(3)])
    assert found[0] == found[1]


async def test_a_call_that_returns_another_shape_is_an_error() -> None:
    rows = 3

    class Rows(ag.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x[:rows]

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return None

    @ag.compile
    def some(x: Any) -> Any:
        return Rows.apply(x * 2.0) * 3.0

    x = ag.ones(3, 4)
    for _ in range(2):
        assert some(x).shape == (3, 4)
    rows = 2
    with pytest.raises(ag.errors.TraceError, match=r"float32\[2, 4\].*float32\[3, 4\]"):
        some(x)


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
    """A gradient that was read before the pass is used after it."""

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


# -------------------------------------------------------------------- one pass after another


def apart(leaves: Leaves, x: Any) -> Any:
    """The gradients of `w` and `v` need no saved array in common."""
    return ag.sum(ag.tanh(x * leaves.w)) + (leaves.v.exp() * 2.0).sum()


async def to_each(leaves: Leaves, x: Any) -> Any:
    leaves.w.grad = leaves.v.grad = None
    loss = apart(leaves, x)
    await loss.backward(inputs=[leaves.w])
    await loss.backward(inputs=[leaves.v])
    return loss, leaves.w.grad * leaves.v.grad


async def added_up(leaves: Leaves, x: Any) -> Any:
    """The first pass may be one native function with the rows before it, but for the pass after it."""
    loss = apart(leaves, x)
    await loss.backward(inputs=[leaves.w])
    await loss.backward(inputs=[leaves.v])
    return (loss,)


async def by_grad(leaves: Leaves, x: Any) -> Any:
    loss = apart(leaves, x)
    (g,) = await ag.grad(loss, [leaves.w])
    (h,) = await ag.grad(loss, [leaves.v])
    return loss, g * h


async def kept_once(leaves: Leaves, x: Any) -> Any:
    leaves.w.grad = leaves.v.grad = None
    loss = apart(leaves, x)
    await loss.backward(inputs=[leaves.w], retain_graph=True)
    await loss.backward()
    return loss.detach() * 1.0, leaves.w.grad * leaves.v.grad


async def without_saved_arrays(leaves: Leaves, x: Any) -> Any:
    leaves.w.grad = leaves.v.grad = None
    loss = (x + leaves.w - leaves.v).sum()
    await loss.backward()
    await loss.backward()
    (g,) = await ag.grad(loss * 2.0 + ag.exp(loss * 0.01), [leaves.v])
    return loss, g * leaves.w.grad


async def beside_a_part(leaves: Leaves, x: Any) -> Any:
    """The last pass goes to `w`, through an output of a part whose gradients are all freed; only the other one leads to `w`."""
    leaves.w.grad = leaves.v.grad = None
    kept, loss = leaves.v * leaves.v, (x * leaves.w * leaves.v).sum()
    await (loss + kept.exp().sum()).backward()
    last = (kept * 0.5 + leaves.w).sum()
    await last.backward(inputs=[leaves.w])
    return loss, leaves.w.grad * leaves.v.grad


async def modified_between(leaves: Leaves, x: Any) -> Any:
    """The values that the second pass needs are unchanged."""
    leaves.w.grad = leaves.v.grad = None
    loss = (x * leaves.w**2).sum() + (leaves.v**3).sum()
    await loss.backward(inputs=[leaves.w])
    with ag.no_grad():
        leaves.w -= leaves.w.grad * 0.1
    await loss.backward(inputs=[leaves.v])
    return loss, leaves.w.grad * leaves.v.grad


@pytest.mark.parametrize("options", [{"tier": "numpy"}, pytest.param({"tier": "native"}, marks=TIERS[1].marks), {"memory_budget": 1.0}], ids=str)
@pytest.mark.parametrize("step", [to_each, added_up, by_grad, kept_once, beside_a_part, without_saved_arrays, modified_between])
async def test_passes_one_after_the_other(step: Any, options: dict[str, Any]) -> None:
    async with ag.Engine(budget=1000.0):
        await same(step, **options)


def linear_at_the_end(leaves: Leaves, x: Any) -> Any:
    return (x * leaves.w).sum() + leaves.v.sum()


@pytest.mark.parametrize("options", [{"tier": "numpy"}, pytest.param({"tier": "native"}, marks=TIERS[1].marks), {"memory_budget": 1.0}], ids=str)
@pytest.mark.parametrize("is_step", [False, True])
async def test_a_pass_frees_what_the_eager_one_frees(is_step: bool, options: dict[str, Any]) -> None:
    """After a pass to all, another finds the way to `v`, on which nothing is saved, and not the one to `w`."""

    async def passed(leaves: Leaves, x: Any) -> Any:
        loss = linear_at_the_end(leaves, x)
        await loss.backward()
        return loss

    async with ag.Engine(budget=1000.0):
        found = []
        for is_compiled in (False, True):
            leaves, rng = Leaves(), np.random.default_rng(5)
            run = passed if is_step else linear_at_the_end
            run = ag.compile(run, **options) if is_compiled else run
            for _ in range(4):
                leaves.w.grad = leaves.v.grad = None
                loss = run(leaves, ag.tensor(rng.standard_normal((3, 4))))
                if is_step:
                    loss = await loss
                else:
                    await loss.backward(inputs=[leaves.w], retain_graph=True)
                    await loss.backward()
                await loss.backward(inputs=[leaves.v])
                await assert_awaiting_raises(GraphFreedError, "second time", loss.backward(inputs=[leaves.w]))
                await assert_awaiting_raises(GraphFreedError, "second time", loss.backward())
                found.append((is_compiled, bits(leaves.w.grad, leaves.v.grad)))
        assert [each for is_compiled, each in found if is_compiled] == [each for is_compiled, each in found if not is_compiled]


async def test_a_whole_pass_frees_all_though_a_part_ran_before_it() -> None:
    async with ag.Engine(budget=1000.0):
        leaves, x = Leaves(), ag.ones(3, 4, dtype=np.float64)
        for loss_of in (apart, ag.compile(apart)):
            for _ in range(3):
                loss = loss_of(leaves, x)
                await loss.backward(inputs=[leaves.w], retain_graph=True)
                await loss.backward()
                await assert_awaiting_raises(GraphFreedError, "second time", loss.backward(inputs=[leaves.v]))


async def test_a_pass_to_some_leaves_looks_at_what_it_computes_again() -> None:
    """Within a budget `tanh` is computed again, of a leaf that has been modified."""

    @ag.compile(memory_budget=0.7)
    def loss_of(leaves: Leaves) -> Any:
        return (leaves.w**2).sum() + ag.exp(ag.sin(ag.exp(ag.sin(ag.tanh(leaves.v + 1.0))))).sum()

    leaves = Leaves()
    for _ in range(2):
        loss = loss_of(leaves)
    (program,) = loss_of.programs
    assert program.memory_plan.recompute
    await loss.backward(inputs=[leaves.w])
    with ag.no_grad():
        leaves.v *= 2.0
    await assert_awaiting_raises(ModifiedError, "has read", loss.backward(inputs=[leaves.v]))


async def test_a_gradient_that_is_modified_twice_is_not_needed_by_a_pass() -> None:
    """Its value is an output of the part whose graph the second pass runs over, which does not need it."""

    async def step(leaves: Leaves, x: Any) -> Any:
        leaves.w.grad = leaves.v.grad = None
        await (x * leaves.w * leaves.w).sum().backward()
        loss = (leaves.v * leaves.v).sum()
        leaves.w.grad *= 0.5
        leaves.w.grad *= 0.5
        await loss.backward()
        return loss, leaves.w.grad * 1.0

    await same(step)

"""Passes within passes: from rules, hooks and callbacks, to any depth, with their errors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

import aiograd as ag
from aiograd.graph import current_graph_task_id, current_node
from tests.support import assert_awaiting_raises, custom_function, leaf, same


def nesting(inside: Any) -> Any:
    """A Function that passes its gradient on and awaits ``inside(g)`` in backward."""

    @custom_function()
    async def Nests(ctx: Any, g: Any) -> Any:
        await inside(g)
        return g

    return Nests.apply


async def test_grad_within_a_rule() -> None:
    @custom_function(lambda a: a * a * a, saves=True)
    async def Through(ctx: Any, g: Any) -> Any:
        """Computes its gradient by differentiating what it computes."""
        (a,) = ctx.saved_tensors
        with ag.enable_grad():
            inside = a.detach().requires_grad_()
            out = inside * inside * inside
        (result,) = await ag.grad(out, inside, g)
        return result

    x = leaf([2.0])
    await Through.apply(x).sum().backward()
    same(x.grad, [12.0])


async def test_an_inner_pass_into_the_same_leaf_counts() -> None:
    x = leaf([1.0])

    async def inside(g: Any) -> None:
        with ag.enable_grad():
            inner = (x * 100).sum()
        await inner.backward()
        same(x.grad, [100.0])  # committed by itself

    await (nesting(inside)(x) * 2).sum().backward()
    same(x.grad, [102.0])


async def test_the_inner_pass_is_over_before_the_outer_goes_on() -> None:
    order: list[str] = []
    x, w = leaf([1.0]), leaf([1.0])
    y = x * 1
    y.register_hook(lambda g: order.append("outer continues"))

    async def inside(g: Any) -> None:
        order.append("inner starts")
        with ag.enable_grad():
            inner = w * 1
            for _ in range(3):
                inner = inner * 1
            inner.register_hook(lambda g: order.append("inner hook"))
        await inner.backward()
        order.append("inner is over")

    await nesting(inside)(y).sum().backward()
    assert order == ["inner starts", "inner hook", "inner is over", "outer continues"]


async def test_passes_are_current_within_their_own_code() -> None:
    seen: list[Any] = []
    w = leaf([1.0])

    async def inside(g: Any) -> None:
        outer = current_graph_task_id(), current_node()
        with ag.enable_grad():
            inner = w * 2
        inner.register_hook(lambda g: seen.append((current_graph_task_id(), current_node())))
        await inner.backward()
        assert (current_graph_task_id(), current_node()) == outer
        seen.append(outer)

    await nesting(inside)(leaf([1.0])).sum().backward()
    (inner_id, inner_node), (outer_id, outer_node) = seen
    assert inner_id > outer_id >= 0
    assert inner_node.name == "MulBackward" and outer_node.name == "NestsBackward"


async def test_grad_modes_are_those_of_each_pass() -> None:
    modes: list[bool] = []
    w = leaf([2.0])

    async def inside(g: Any) -> None:
        modes.append(ag.is_grad_enabled())
        with ag.enable_grad():
            inner = (w * w).sum()
        (g1,) = await ag.grad(inner, w, create_graph=True)
        assert g1.requires_grad
        modes.append(ag.is_grad_enabled())

    await nesting(inside)(leaf([1.0])).sum().backward()
    assert modes == [False, False] and ag.is_grad_enabled()


def deeper(x: ag.Tensor, bottom: Callable[[], object]) -> Any:
    """``apply`` of a Function of a leaf and a level: its backward runs a pass of the level below, at level 0 it calls `bottom`."""

    class Deeper(ag.Function):
        @staticmethod
        def forward(ctx: Any, a: Any, level: int) -> Any:
            ctx.level = level
            return a * 1

        @staticmethod
        async def backward(ctx: Any, g: Any) -> Any:
            if ctx.level:
                with ag.enable_grad():
                    inner = Deeper.apply(x, ctx.level - 1)
                await inner.backward()
            else:
                bottom()
            return g, None

    return Deeper.apply


@pytest.mark.parametrize("depth", [100, 2000])
async def test_nesting_goes_as_deep_as_one_likes(depth: int) -> None:
    x = leaf([1.0])
    reached: list[int] = []
    await deeper(x, lambda: reached.append(ag.graph.current.CURRENT.get().task.reentrant_depth))(x, depth).sum().backward()
    same(x.grad, [depth + 1.0])
    assert reached == [depth]


async def test_an_inner_error_goes_through_the_outer_pass_with_its_type() -> None:
    class Mine(Exception):
        pass

    x, w, v = leaf([1.0]), leaf([1.0]), leaf([1.0])

    @custom_function(inline=True)
    def Fails(ctx: Any, g: Any) -> Any:
        raise Mine("inner")

    async def inside(g: Any) -> None:
        with ag.enable_grad():
            first, second = (v * 3).sum(), Fails.apply(w).sum()
        await first.backward()
        await second.backward()

    with pytest.raises(Mine, match="inner") as caught:
        await (nesting(inside)(x) * 2).sum().backward()
    notes = "\n".join(caught.value.__notes__)
    assert "FailsBackward" in notes and "NestsBackward" in notes
    assert "inside" in [entry.name for entry in caught.traceback]
    assert x.grad is None and w.grad is None
    same(v.grad, [3.0])  # an inner pass that was complete stays committed


async def test_an_error_comes_up_from_the_depths() -> None:
    x = leaf([1.0])
    await assert_awaiting_raises(ZeroDivisionError, "division", deeper(x, lambda: 1 // 0)(x, 200).sum().backward())
    assert x.grad is None


async def test_a_rule_may_handle_the_error_of_its_inner_pass() -> None:
    x, w = leaf([1.0]), leaf([1.0])

    def refuse(g: Any) -> None:
        raise ZeroDivisionError

    async def inside(g: Any) -> None:
        with ag.enable_grad():
            inner = w * 2
        inner.register_hook(refuse)
        await assert_awaiting_raises(ZeroDivisionError, None, inner.backward())

    await (nesting(inside)(x) * 2).sum().backward()
    same(x.grad, [2.0])
    assert w.grad is None


async def test_several_nodes_may_nest_at_the_same_time() -> None:
    x, w = leaf([1.0]), leaf([1.0])
    together = asyncio.Event()
    waiting: list[int] = []

    async def inside(g: Any) -> None:
        with ag.enable_grad():
            inner = (w * 2).sum()
        waiting.append(1)
        if len(waiting) == 3:
            together.set()
        await together.wait()
        await inner.backward()

    nest = nesting(inside)
    await (nest(x) + nest(x) + nest(x)).sum().backward()
    same(x.grad, [3.0])
    same(w.grad, [6.0])

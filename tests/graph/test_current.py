"""The current pass, as code inside of it sees it, and final callbacks."""

from __future__ import annotations

import asyncio
import contextvars
from typing import Any

import pytest

import aiograd as ag
from aiograd.errors import ArgumentError, GraphError
from aiograd.graph import current_graph_task_id, current_node, execution_order, queue_callback, will_run
from tests.support import assert_awaiting_raises, assert_raises, custom_function, leaf


def traced(function: Any, *, inline: bool = True) -> Any:
    """A Function that passes its gradient on and calls `function` in backward."""

    @custom_function()
    def Traced(ctx: Any, g: Any) -> Any:
        function()
        return g

    Traced.inline = inline
    return Traced.apply


# -------------------------------------------------------------------- which pass, which node


async def test_every_pass_has_the_next_number() -> None:
    x = leaf([1.0])
    ids: list[int] = []
    assert current_graph_task_id() == -1
    y = traced(lambda: ids.append(current_graph_task_id()))(x).sum()
    await y.backward(retain_graph=True)
    await ag.grad(y, x)
    assert ids[1] == ids[0] + 1
    assert current_graph_task_id() == -1


@pytest.mark.parametrize("inline", [True, False], ids=["inline", "executor"])
async def test_the_current_node_is_the_one_whose_code_runs(inline: bool) -> None:
    x = leaf([1.0])
    seen: list[Any] = []
    assert current_node() is None
    y = traced(lambda: seen.append(current_node()), inline=inline)(x)
    y.register_hook(lambda g: seen.append(current_node()))
    x.register_hook(lambda g: seen.append(current_node()))
    x.register_post_accumulate_grad_hook(lambda t: seen.append(current_node()))
    y.grad_fn.register_prehook(lambda g: seen.append(current_node()))
    y.grad_fn.register_hook(lambda i, o: seen.append(current_node()))
    await y.sum().backward()
    assert seen == [y.grad_fn, y.grad_fn, y.grad_fn, y.grad_fn, x._node, x._node]
    assert current_node() is None


async def test_the_order_of_execution_can_be_asked_for_and_is_kept() -> None:
    x, w = leaf([1.0]), leaf([1.0])
    ran: list[Any] = []
    predicted: list[Any] = []

    def note() -> None:
        ran.append(current_node())

    a = traced(note)(x)
    b = traced(note)(w)
    c = traced(note)(a)
    out = (c * b).sum()
    out.register_hook(lambda g: predicted.extend(execution_order()))
    await out.backward()
    assert [node for node in predicted if node in ran] == ran == [c.grad_fn, b.grad_fn, a.grad_fn]
    assert predicted[0] is out.grad_fn
    assert len(predicted) == 7
    # a leaf comes as soon as it is complete
    assert predicted.index(w._node) == predicted.index(b.grad_fn) + 1


@pytest.mark.parametrize("ask", [execution_order, lambda: will_run(None), lambda: queue_callback(print)])  # type: ignore[arg-type]
def test_outside_of_a_pass_there_is_nothing_to_ask(ask: Any) -> None:
    assert_raises(GraphError, r"during (a )?backward pass", ask)


# -------------------------------------------------------------------- the caller's context


@pytest.mark.parametrize("inline", [True, False], ids=["inline", "executor"])
async def test_rules_and_hooks_see_the_context_variables_of_the_caller(inline: bool) -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")
    x = leaf([1.0])
    seen: list[str] = []
    y = traced(lambda: seen.append(variable.get()), inline=inline)(x)
    y.register_hook(lambda g: seen.append(variable.get()))

    async def hook(g: Any) -> None:
        await asyncio.sleep(0)
        seen.append(variable.get())

    y.register_hook(hook)
    variable.set("caller's")
    await y.sum().backward()
    assert seen == ["caller's"] * 3


# -------------------------------------------------------------------- final callbacks


async def test_a_callback_has_to_be_callable_and_in_time() -> None:
    x = leaf([1.0])
    tasks: list[Any] = []
    y = traced(lambda: queue_callback(3))(x)  # type: ignore[arg-type]
    await assert_awaiting_raises(ArgumentError, "expected a callable", y.sum().backward())
    z = traced(lambda: tasks.append(ag.graph.current.CURRENT.get().task))(x)
    await z.sum().backward()
    assert_raises(GraphError, "the pass is over", lambda: tasks[0].queue_callback(print))

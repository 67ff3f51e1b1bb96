"""The current pass, as code inside of it sees it, and final callbacks."""

from __future__ import annotations

import asyncio
import contextvars
from typing import Any

import numpy as np
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


async def test_a_coroutine_hook_still_knows_after_it_has_waited() -> None:
    x = leaf([1.0])
    y, z = x * 2, x * 3
    seen: list[bool] = []

    def watch(tensor: Any) -> None:
        async def hook(g: Any) -> None:
            await asyncio.sleep(0)
            seen.append(current_node() is tensor.grad_fn and current_graph_task_id() >= 0)

        tensor.register_hook(hook)

    watch(y)
    watch(z)
    await (y + z).sum().backward()
    assert seen == [True, True]


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


async def test_whether_a_node_runs_can_be_asked() -> None:
    x, w = leaf([1.0]), leaf([1.0])
    a, b = x * 2, w * 3
    out = (a + b).sum()
    answers: list[Any] = []
    out.register_hook(lambda g: answers.append([will_run(n) for n in (a.grad_fn, b.grad_fn, x._node, w._node)]))
    await out.backward(retain_graph=True)
    await out.backward(inputs=[w], retain_graph=True)
    await ag.grad(out, a)
    # asked for by grad(), the gradient of `a` is captured and its node does not run
    assert answers == [[True, True, True, True], [False, True, False, True], [False, False, False, False]]


async def test_the_graph_task_can_be_looked_at() -> None:
    x = leaf([1.0])
    y = (x * 2).sum()
    seen: list[Any] = []

    def look(g: Any) -> None:
        task = ag.graph.current.CURRENT.get().task
        seen.append((task.id, task.keep_graph, task.reentrant_depth, task.exec_info is None, task.can_checkpoint, task.completed))
        assert task.roots == ((y.grad_fn, 0),)
        assert task.nodes_in_graph >= {x._node}
        assert y.grad_fn not in task.nodes_in_graph

    y.register_hook(look)
    await y.backward(retain_graph=True)
    await ag.grad(y, x)
    (first, second) = seen
    assert first[1:] == (True, 0, True, True, False)
    assert second[1:] == (False, 0, False, False, False)
    assert second[0] == first[0] + 1


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


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("outside", [False, True])
async def test_the_grad_mode_of_a_pass_is_create_graph_whatever_the_callers(outside: bool, create_graph: bool) -> None:
    x = leaf([1.0])
    seen: list[bool] = []
    y = traced(lambda: seen.append(ag.is_grad_enabled()))(x)
    y.register_hook(lambda g: seen.append(ag.is_grad_enabled()))
    z = (y * y).sum()
    with ag.set_grad_enabled(outside):
        (g,) = await ag.grad(z, x, create_graph=create_graph)
        assert ag.is_grad_enabled() is outside
    assert seen == [create_graph] * 2
    assert g.requires_grad is create_graph
    assert ag.is_grad_enabled()


# -------------------------------------------------------------------- final callbacks


async def test_callbacks_run_after_everything_and_in_order() -> None:
    x = leaf([1.0])
    order: list[Any] = []

    def queue() -> None:
        queue_callback(lambda: order.append(("first", x.grad.item())))
        queue_callback(lambda: order.append(("second", x.grad.item())))

    y = traced(queue)(x)
    y.register_hook(lambda g: order.append("hook"))
    x.register_post_accumulate_grad_hook(lambda t: order.append("accumulated"))
    await (y * 3).sum().backward()
    assert order == ["hook", "accumulated", ("first", 3.0), ("second", 3.0)]


async def test_a_callback_may_queue_more() -> None:
    x = leaf([1.0])
    order: list[int] = []

    def first() -> None:
        order.append(1)
        queue_callback(lambda: order.append(3))

    y = traced(lambda: (queue_callback(first), queue_callback(lambda: order.append(2))))(x)
    await y.sum().backward()
    assert order == [1, 2, 3]


async def test_callbacks_may_be_coroutines_and_know_their_pass() -> None:
    x = leaf([1.0])
    seen: list[Any] = []

    async def callback() -> None:
        before = current_graph_task_id()
        await asyncio.sleep(0)
        seen.append((before == current_graph_task_id() >= 0, current_node()))

    await traced(lambda: queue_callback(callback))(x).sum().backward()
    assert seen == [(True, None)]


async def test_a_callback_belongs_to_the_pass_that_queued_it() -> None:
    x, w = leaf([1.0]), leaf([1.0])
    order: list[str] = []

    @custom_function()
    async def Nests(ctx: Any, g: Any) -> Any:
        queue_callback(lambda: order.append("outer"))
        with ag.enable_grad():
            inner = traced(lambda: queue_callback(lambda: order.append("inner")))(w).sum()
        await inner.backward()
        order.append("inner is over")
        return g

    await Nests.apply(x).sum().backward()
    assert order == ["inner", "inner is over", "outer"]


async def test_an_error_in_a_callback_fails_the_pass_after_the_commit() -> None:
    class Mine(Exception):
        pass

    def fail() -> None:
        raise Mine

    x = leaf([1.0])
    order: list[int] = []
    y = traced(lambda: (queue_callback(fail), queue_callback(lambda: order.append(1))))(x)
    caught = await assert_awaiting_raises(Mine, None, y.sum().backward())
    assert caught.committed  # type: ignore[attr-defined]
    np.testing.assert_array_equal(x.grad.numpy(), [1.0])
    assert order == []


async def test_callbacks_do_not_run_when_the_pass_fails() -> None:
    x = leaf([1.0])
    y = traced(lambda: queue_callback(lambda: pytest.fail("the pass failed")))(x)

    def fail(g: Any) -> None:
        raise ZeroDivisionError

    x.register_hook(fail)
    await assert_awaiting_raises(ZeroDivisionError, None, y.sum().backward())


async def test_a_callback_has_to_be_callable_and_in_time() -> None:
    x = leaf([1.0])
    tasks: list[Any] = []
    y = traced(lambda: queue_callback(3))(x)  # type: ignore[arg-type]
    await assert_awaiting_raises(ArgumentError, "expected a callable", y.sum().backward())
    z = traced(lambda: tasks.append(ag.graph.current.CURRENT.get().task))(x)
    await z.sum().backward()
    assert_raises(GraphError, "the pass is over", lambda: tasks[0].queue_callback(print))

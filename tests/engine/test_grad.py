"""grad() and backward(inputs=...): what is captured, what is left alone, and which nodes run at all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.errors import ArgumentError, ArgumentTypeError, NoGraphError, UnusedInputError
from aiograd.ops import ROWS
from aiograd.ops.op import define
from tests.support import assert_awaiting_raises, assert_raises, custom_function, leaf, same


@custom_function(inline=True)
def Explodes(ctx: Any, g: Any) -> Any:
    """Must not run."""
    raise AssertionError("this node has no path to an input")


@custom_function(lambda a, b: a + b, inline=True)
def OnlyFirst(ctx: Any, g: Any) -> Any:
    return g, None


# -------------------------------------------------------------------- grad


async def test_grad_returns_a_tuple_and_touches_no_grad() -> None:
    x, w = leaf([2.0]), leaf([3.0])
    x.grad = old = ag.tensor([9.0], dtype=np.float64)
    result = await ag.grad((x * w).sum(), (x, w))
    assert isinstance(result, tuple)
    same(result[0], [3.0])
    same(result[1], [2.0])
    assert x.grad is old and w.grad is None


async def test_inputs_may_be_leaves_or_not_and_lie_on_one_path() -> None:
    a = leaf([2.0])
    b = a * 3
    c = b * b
    d = c.sum() * 5
    for inputs in ((a, b, c, d), (d, c, b, a)):
        grads = await ag.grad(d, inputs, retain_graph=True)
        expected = {id(a): [180.0], id(b): [60.0], id(c): [5.0], id(d): 1.0}
        for tensor, grad in zip(inputs, grads, strict=True):
            same(grad, expected[id(tensor)])


async def test_an_input_may_repeat() -> None:
    x = leaf([2.0])
    y = x * 3
    grads = await ag.grad((y * y).sum(), (x, y, x, y))
    for grad, value in zip(grads, (36.0, 12.0, 36.0, 12.0), strict=True):
        same(grad, [value])


async def test_the_root_as_input_gives_the_seed() -> None:
    x = leaf([2.0])
    y = (x * x).sum()
    (g,) = await ag.grad(y, y, ag.tensor(7.0, dtype=np.float64))
    same(g, 7.0)
    (g,) = await ag.grad(x, x, ag.tensor([7.0], dtype=np.float64))
    same(g, [7.0])


async def test_outputs_of_one_node_are_captured_apart() -> None:
    x = leaf([1.0, 2.0, 3.0])
    a, b, c = np.split(x, 3)
    ga, gc = await ag.grad((a * 2 + b * 3).sum(), (a, c), allow_unused=True)
    same(ga, [2.0])
    assert gc is None
    gx, gb = await ag.grad((a * 2 + b * 3 + c * 0).sum(), (x, b))
    same(gx, [2.0, 3.0, 0.0])
    same(gb, [3.0])


async def test_an_intermediate_that_is_itself_an_input_of_the_graph_below() -> None:
    a = leaf([2.0])
    b = a * 3
    detour = b.detach().requires_grad_()
    out = (detour * b).sum()
    ga, gd = await ag.grad(out, (a, detour))
    same(ga, [18.0])
    same(gd, [6.0])


async def test_inputs_may_be_a_mapping_or_one_tensor() -> None:
    x, w = leaf([2.0]), leaf([3.0])
    gx, gw = await ag.grad((x * w).sum(), {"x": x, "w": w})
    same(gx, [3.0])
    same(gw, [2.0])
    (gx,) = await ag.grad((x * w).sum(), x)
    same(gx, [3.0])


async def test_an_input_that_is_modified_afterwards_is_asked_for_in_its_new_place() -> None:
    x = leaf([1.0, 2.0])
    y = x * 2
    y *= 3
    (g,) = await ag.grad((y * 10).sum(), y)
    same(g, [10.0, 10.0])


# -------------------------------------------------------------------- inputs that are not used


async def test_an_unreachable_input_is_an_error_by_default() -> None:
    x, w = leaf([2.0]), leaf([3.0])
    y = (x * x).sum()
    with pytest.raises(UnusedInputError, match=r"the input at index 1, appears to not have been used in the graph. Set allow_unused=True"):
        await ag.grad(y, (x, w))
    # it was noticed before anything ran
    (g,) = await ag.grad(y, x)
    same(g, [4.0])


async def test_an_input_whose_gradient_is_none_is_an_error_too() -> None:
    x, w = leaf([2.0]), leaf([3.0])
    y = OnlyFirst.apply(x * 1, w * 1).sum()
    await assert_awaiting_raises(UnusedInputError, "index 0", ag.grad(y, w, retain_graph=True))
    (g,) = await ag.grad(y, w, allow_unused=True)
    assert g is None


async def test_allow_unused_gives_none() -> None:
    x, w = leaf([2.0]), leaf([3.0])
    gw, gx = await ag.grad((x * x).sum(), (w, x), allow_unused=True)
    assert gw is None
    same(gx, [4.0])


@pytest.mark.parametrize("create_graph", [False, True])
async def test_materialize_grads_gives_zeros(create_graph: bool) -> None:
    x, w = leaf([2.0]), leaf([[3.0, 4.0]])
    gx, gw = await ag.grad((x * x).sum(), (x, w), materialize_grads=True, create_graph=create_graph)
    same(gw, [[0.0, 0.0]])
    assert gw.dtype == np.float64
    assert gw.requires_grad is create_graph
    assert gx.requires_grad is create_graph


async def test_materialize_grads_contradicts_allow_unused_false() -> None:
    x = leaf([2.0])
    y = (x * x).sum()
    with pytest.raises(ArgumentError, match="expected allow_unused to be True or not passed when materialize_grads=True"):
        await ag.grad(y, x, allow_unused=False, materialize_grads=True)
    assert isinstance(ArgumentError(), ValueError)
    await ag.grad(y, x, allow_unused=True, materialize_grads=True)


@pytest.mark.parametrize(
    ("inputs", "error", "words"),
    [
        ([], ArgumentError, "requires non-empty inputs"),
        (3, ArgumentTypeError, "found int"),
        ([3], ArgumentTypeError, "element 0 is a int"),
        (ag.tensor([1.0]), NoGraphError, "the input at index 0, does not require grad"),
    ],
)
async def test_inputs_that_cannot_be_are_refused(inputs: Any, error: type[Exception], words: str) -> None:
    x = leaf([2.0])
    y = (x * x).sum()
    assert_raises(error, words, lambda: ag.grad(y, inputs))
    await y.backward()


# -------------------------------------------------------------------- backward(inputs=...)


async def test_only_listed_leaves_accumulate() -> None:
    x, w, v = leaf([2.0]), leaf([3.0]), leaf([4.0])
    y = (x * w * v).sum()
    await y.backward(inputs=[w, v], retain_graph=True)
    assert x.grad is None
    same(w.grad, [8.0])
    same(v.grad, [6.0])
    await y.backward(inputs=w)
    same(w.grad, [16.0])
    same(v.grad, [6.0])


async def test_a_listed_non_leaf_gets_its_gradient_as_well() -> None:
    x = leaf([2.0])
    y = x * 3
    z = (y * y).sum()
    await z.backward(inputs=[y, x], retain_graph=True)
    same(y.grad, [12.0])
    same(x.grad, [36.0])
    await z.backward(inputs=[y])
    same(y.grad, [24.0])
    same(x.grad, [36.0])


@pytest.mark.parametrize("retain", [False, True])
async def test_a_listed_non_leaf_is_counted_once_however_often_it_is_listed(retain: bool) -> None:
    x = leaf([2.0])
    y = x * 3
    if retain:
        y.retain_grad()
    await (y * y).sum().backward(inputs=[y, y, x, x])
    same(y.grad, [12.0])
    same(x.grad, [36.0])


async def test_unused_inputs_of_backward_are_passed_over() -> None:
    x, w = leaf([2.0]), leaf([3.0])
    await (x * x).sum().backward(inputs=[w, w * 2, x])
    same(x.grad, [4.0])
    assert w.grad is None


async def test_inputs_of_backward_may_be_a_mapping() -> None:
    x, w = leaf([2.0]), leaf([3.0])
    await (x * w).sum().backward(inputs={"weight": w})
    assert x.grad is None
    same(w.grad, [2.0])


@pytest.mark.parametrize(
    ("inputs", "error", "words"),
    [
        ([], ArgumentError, "`inputs` argument to `backward\\(\\)` cannot be empty."),
        ({}, ArgumentError, "cannot be empty"),
        ([ag.tensor([1.0])], NoGraphError, "does not require grad"),
        (["x"], ArgumentTypeError, "element 0 is a str"),
    ],
)
async def test_inputs_of_backward_that_cannot_be_are_refused(inputs: Any, error: type[Exception], words: str) -> None:
    x = leaf([2.0])
    y = (x * x).sum()
    assert_raises(error, words, lambda: y.backward(inputs=inputs))
    await y.backward()
    same(x.grad, [4.0])


# -------------------------------------------------------------------- pruning


async def test_nodes_without_a_path_to_an_input_never_run() -> None:
    x, w = leaf([2.0]), leaf([3.0])
    y = (x * x).sum() + Explodes.apply(w).sum()
    (g,) = await ag.grad(y, x, retain_graph=True)
    same(g, [4.0])
    await y.backward(inputs=[x], retain_graph=True)
    same(x.grad, [4.0])


async def test_nothing_below_an_input_runs() -> None:
    x = leaf([2.0])
    y = Explodes.apply(x)
    (g,) = await ag.grad((y * 3).sum(), y)
    same(g, [3.0])


async def test_nothing_that_is_older_than_every_input_is_even_looked_at() -> None:
    x, w = leaf([2.0]), leaf([3.0])
    old = w
    for _ in range(100):
        old = old * 1.0
    y = x * 2
    z = (y + old).sum()
    seen: list[int] = []
    z.register_hook(lambda g: seen.append(len(ag.graph.current.CURRENT.get().task.nodes_in_graph)))
    (g,) = await ag.grad(z, y)
    same(g, [1.0])
    assert seen[0] < 10


async def test_a_function_is_told_which_gradients_this_pass_needs() -> None:
    needs: list[Any] = []

    class Product(ag.Function):
        inline = True

        @staticmethod
        def forward(ctx: Any, a: Any, b: Any, c: Any) -> Any:
            needs.append(ctx.needs_input_grad)
            ctx.save_for_backward(a, b)
            return a * b

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            needs.append(ctx.needs_input_grad)
            a, b = ctx.saved_tensors
            return g * b if ctx.needs_input_grad[0] else None, g * a if ctx.needs_input_grad[1] else None, None

    x, w = leaf([2.0]), leaf([3.0])
    y = Product.apply(x, w * 1, ag.tensor([1.0])).sum()
    await ag.grad(y, x, retain_graph=True)
    await ag.grad(y, w, retain_graph=True)
    await y.backward(inputs=[w, x], retain_graph=True)
    await y.backward()
    assert needs == [(True, True, False), (True, False, False), (False, True, False), (True, True, False), (True, True, False)]
    same(x.grad, [6.0])


async def test_rows_compute_only_the_gradients_a_pass_needs() -> None:
    calls: list[str] = []

    def first(g: Any, x2: Any) -> Any:
        calls.append("x1")
        return g * x2

    def second(g: Any, x1: Any) -> Any:
        calls.append("x2")
        return g * x1

    def product(x1: Any, x2: Any, /) -> Any:
        return x1 * x2

    row = define("product_of_two", product, x1=first, x2=second)
    try:
        x, w = leaf([2.0]), leaf([3.0])
        y = row(x, w)
        (g,) = await ag.grad(y, w)
        same(g, [2.0])
        assert calls == ["x2"]
    finally:
        del ROWS["product_of_two"]


async def test_a_node_can_be_asked_what_the_pass_wants() -> None:
    x, w = leaf([2.0]), leaf([3.0])
    y = x * w
    assert [y.grad_fn.should_compute_output(i) for i in (0, 1)] == [True, True]
    assert [(x * 2).grad_fn.should_compute_output(i) for i in (0, 1)] == [True, False]
    answers: list[Any] = []
    y.register_hook(lambda g: answers.append([y.grad_fn.task_should_compute_output(i) for i in (0, 1)]))
    await ag.grad(y, x, retain_graph=True)
    await y.backward()
    assert answers == [[True, False], [True, True]]


async def test_views_modified_in_place_are_pruned_per_pass() -> None:
    x, w = leaf([1.0, 2.0, 3.0]), leaf([5.0])
    y = x * 1
    y[0:1] *= w
    z = (y * ag.tensor([1.0, 10.0, 100.0])).sum()
    (gw,) = await ag.grad(z, w, retain_graph=True)
    same(gw, [1.0])
    (gx,) = await ag.grad(z, x, retain_graph=True)
    same(gx, [5.0, 10.0, 100.0])
    await z.backward()
    same(x.grad, [5.0, 10.0, 100.0])
    same(w.grad, [1.0])


def cost(x: Any) -> Any:
    return (x * x).sum()


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda x: ag.grad(cost)(x), r"found function.*`await ag.grad\(cost\(x\), \[x\]\)`, or `await ag.value_and_grad\(cost, x\)`"),  # type: ignore[operator]
        (lambda x: ag.grad(cost, 0)(x), r"value_and_grad\(cost, x\)"),  # type: ignore[operator]
        (lambda x: ag.grad(cost, [x]), r"value_and_grad\(cost, x\)"),
        (lambda x: ag.grad([cost], [x]), "element 0 is a function"),
        (lambda x: ag.grad(lambda x: x), r"value_and_grad\(f, x\)"),
        (lambda x: ag.grad(ag.nn.Linear(1, 1), [x]), r"found Linear.*value_and_grad\(f, x\)"),
        (lambda x: ag.backward(cost), r"value_and_grad\(cost, x\)"),
        (lambda x: ag.grad(cost(x)), r"the inputs are missing.*await ag.grad\(loss, \[x\]\)"),
        (lambda x: ag.grad(cost(x), None), "the inputs are missing"),
    ],
)
async def test_a_function_in_place_of_what_it_returns_is_refused_and_told_how(call: Any, words: str) -> None:
    assert_raises(ArgumentTypeError, words, lambda: call(leaf([1.0])))

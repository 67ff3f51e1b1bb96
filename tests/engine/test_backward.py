"""backward(): roots, seeds, accumulation, retained graphs and higher orders."""

from __future__ import annotations

import asyncio
import math
import warnings
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.errors import ArgumentError, ArgumentTypeError, GraphFreedError, NoGraphError, ShapeError
from tests.support import assert_awaiting_raises, assert_raises, constant, custom_function, leaf, same


@custom_function(lambda a, b: (a * 1, b * 1), inline=True)
def OnlyFirst(ctx: Any, g1: Any, g2: Any) -> Any:
    """Gives its second argument no gradient."""
    return g1, None


# -------------------------------------------------------------------- one root


async def test_the_chain_rule() -> None:
    x = leaf([0.5, 2.0])
    y = np.sin(x * x) / x
    await y.sum().backward()
    v = np.array([0.5, 2.0])
    np.testing.assert_allclose(x.grad.numpy(), 2 * np.cos(v * v) - np.sin(v * v) / v**2, rtol=1e-14)


async def test_a_value_used_several_times_gets_the_sum() -> None:
    x = leaf([3.0])
    y = x * x + x * 5 + x
    await y.sum().backward()
    same(x.grad, [12.0])


async def test_one_node_with_two_edges_to_the_same_input() -> None:
    x = leaf([3.0])
    y = x * 2
    await (y * y).sum().backward()
    same(x.grad, [24.0])


async def test_a_diamond_runs_every_node_once() -> None:
    x = leaf([1.0])
    runs: list[int] = []
    top = x * 2
    top.register_hook(lambda g: runs.append(1))
    y = top
    for _ in range(20):
        y = y + y
    await y.sum().backward()
    same(x.grad, [2.0**21])
    assert runs == [1]


async def test_a_leaf_is_a_root_too() -> None:
    x = leaf([1.0, 2.0])
    await x.backward(constant([3.0, 4.0]))
    same(x.grad, [3.0, 4.0])


async def test_an_unused_output_gets_zeros() -> None:
    x = leaf([[1.0, 5.0], [7.0, 3.0]])
    a, b = np.split(x, 2)
    await (a * 3).sum().backward()
    same(x.grad, [[3.0, 3.0], [0.0, 0.0]])
    assert not b.grad


async def test_a_gradient_that_is_none_reaches_nobody_but_counts() -> None:
    x, w = leaf([1.0]), leaf([1.0])
    shared = w * 2  # gets None from one of its two users
    a, b = OnlyFirst.apply(x, shared)
    await (a + b + shared * 5).sum().backward()
    same(x.grad, [1.0])
    same(w.grad, [10.0])


async def test_a_gradient_of_none_only_leaves_the_leaf_without() -> None:
    x, w = leaf([1.0]), leaf([1.0])
    a, b = OnlyFirst.apply(x, (w * 2) * 3)
    await (a + b).sum().backward()
    assert w.grad is None


async def test_complex_leaves_and_integers_go_their_way() -> None:
    x = leaf([1.0, 2.0, 3.0])
    y = x[ag.tensor([2, 0, 0])]
    await (y * ag.tensor([1, 10, 100])).sum().backward()
    same(x.grad, [110.0, 0.0, 1.0])


# -------------------------------------------------------------------- several roots


async def test_several_roots_sum() -> None:
    x, w = leaf([1.0, 2.0]), leaf([3.0])
    await ag.backward([(x * x).sum(), x * w], [None, constant([1.0, 10.0])])
    same(x.grad, [2.0 + 3.0, 4.0 + 30.0])
    same(w.grad, [21.0])


async def test_a_root_may_repeat() -> None:
    x = leaf([1.0, 2.0])
    y = (x * x).sum()
    await ag.backward([y, y, y], [None, constant(2.0), None])
    same(x.grad, [8.0, 16.0])


async def test_a_repeated_leaf_root() -> None:
    x = leaf([1.0])
    await ag.backward([x, x], [constant([2.0]), constant([3.0])])
    same(x.grad, [5.0])


async def test_roots_may_depend_on_each_other() -> None:
    x = leaf([1.0, 2.0])
    y = x * x
    z = y * 3
    for roots, seeds in (([y, z], [1.0, 10.0]), ([z, y], [10.0, 1.0])):
        x.grad = None
        await ag.backward(roots, [constant([s, s]) for s in seeds], retain_graph=True)
        same(x.grad, [2.0 + 60.0, 4.0 + 120.0])


async def test_several_roots_with_create_graph_and_inputs() -> None:
    x = leaf([2.0])
    a, b = (x**3).sum(), (x * x).sum()
    (g,) = await ag.grad([a, b], x, create_graph=True)
    same(g, [16.0])
    (g2,) = await ag.grad(g.sum(), x)
    same(g2, [14.0])
    await ag.backward([(x * 2).sum(), (x * 3).sum()], inputs=[x])
    same(x.grad, [5.0])


# -------------------------------------------------------------------- seeds


async def test_a_scalar_is_seeded_with_one_whatever_its_shape() -> None:
    for shape in ((), (1,), (1, 1)):
        x = leaf(np.full(shape, 3.0))
        await (x * x).backward()
        same(x.grad, np.full(shape, 6.0))


async def test_the_seed_may_be_an_array_or_a_number() -> None:
    x = leaf([1.0, 2.0])
    await (x * 2).backward(np.array([1, 10]))
    same(x.grad, [2.0, 20.0])
    await (x * 2).sum().backward(3)
    same(x.grad, [8.0, 26.0])


@pytest.mark.parametrize("run", ["backward", "grad"])
@pytest.mark.parametrize(
    ("make", "seed", "error", "words"),
    [
        (lambda x: x * 2, None, ShapeError, "grad can be implicitly created only for scalar outputs; output 0 has shape \\[2\\]"),
        (lambda x: x * 2, [1.0], ShapeError, "Mismatch in shape"),
        (lambda x: x * 2, constant([1.0, 1.0, 1.0]), ShapeError, r"grad_output\[0\] has a shape of \[3\] and output\[0\] has a shape of \[2\]"),
        (lambda x: (x * 2).sum(), ag.tensor([1.0], dtype=np.float64), ShapeError, r"shape of \[1\] and output\[0\] has a shape of \[\]"),
        (lambda x: x * 2, ag.tensor([1.0, 1.0], dtype=np.float32), ArgumentTypeError, "has dtype float32 and output\\[0\\] has dtype float64"),
        (lambda x: x * 2, ag.tensor([1, 1]), ArgumentTypeError, r"\): grad_output\[0\] has dtype int64 and .*float64. Cast it with .astype"),
        (lambda x: x * 2, ag.tensor([1j, 1j]), ArgumentTypeError, "complex"),
        (lambda x: (x * (1 + 2j)).sum(), None, ArgumentTypeError, "real scalar outputs"),
        (lambda x: x * 2, "ones", ArgumentError, "gradient"),
    ],
)
async def test_a_seed_that_does_not_fit_is_refused(run: str, make: Any, seed: Any, error: type[Exception], words: str) -> None:
    x = leaf([1.0, 2.0])
    y = make(x)
    with pytest.raises(error, match=words):
        if run == "backward":
            await y.backward(seed)
        else:
            await ag.grad(y, x, seed)
    assert x.grad is None
    await y.backward(ag.tensor(np.ones(y.shape, y.dtype)))  # nothing happened to the graph
    assert x.grad is not None


async def test_the_number_of_seeds_is_that_of_the_roots() -> None:
    x = leaf([1.0])
    y = (x * 2).sum()
    assert_raises(ArgumentError, "got 2 tensors and 1 gradients", lambda: ag.backward([y, y], [None]))
    assert_raises(ArgumentError, "at least one tensor", lambda: ag.backward([]))


@pytest.mark.parametrize("what", [3, None, "x", np.ones(2)])
async def test_roots_are_tensors(what: Any) -> None:
    assert_raises(ArgumentTypeError, "expected a Tensor", lambda: ag.backward(what))
    assert_raises(ArgumentTypeError, "element 0 is a", lambda: ag.backward([what]))


async def test_a_root_requires_grad() -> None:
    assert_raises(NoGraphError, "does not require grad and does not have a grad_fn", lambda: ag.tensor(3.0).backward())
    x = leaf([1.0])
    with ag.no_grad():
        y = (x * 2).sum()
    assert_raises(NoGraphError, "element 1 of tensors", lambda: ag.backward([(x * 2).sum(), y]))
    assert x.grad is None


# -------------------------------------------------------------------- keeping the graph


async def test_a_second_pass_through_what_was_freed_is_an_error() -> None:
    x = leaf([2.0])
    y = x * x
    await y.sum().backward()
    with pytest.raises(GraphFreedError, match=r"Trying to backward through the graph a second time: MulBackward.*Specify retain_graph=True"):
        await y.sum().backward()
    same(x.grad, [4.0])


async def test_a_kept_graph_can_be_used_again() -> None:
    x = leaf([2.0])
    y = (x * x).sum()
    await y.backward(retain_graph=True)
    await y.backward(retain_graph=True)
    await y.backward()
    same(x.grad, [12.0])
    await assert_awaiting_raises(GraphFreedError, None, y.backward())
    same(x.grad, [12.0])


async def test_nodes_that_saved_nothing_can_run_again() -> None:
    x = leaf([2.0, 3.0])
    y = (-(x + 1 - x[0:1] + x)).reshape(2, 1).sum()  # shapes, indices and axes are saved, but no values
    for _ in range(2):
        await y.backward()
    same(x.grad, [0.0, -4.0])


async def test_shared_parts_are_freed_by_the_first_pass() -> None:
    x = leaf([2.0])
    shared = x * x
    first, second = shared * 2, shared * 3
    await first.sum().backward()
    await assert_awaiting_raises(GraphFreedError, None, second.sum().backward())
    same(x.grad, [8.0])


async def test_only_what_ran_is_freed() -> None:
    x, w = leaf([2.0]), leaf([3.0])
    a, b = x * x, w * w
    y = (a + b).sum()
    await ag.grad(y, x, retain_graph=False)
    await b.sum().backward()
    same(w.grad, [6.0])


async def test_a_function_that_saved_tensors_is_freed_as_well() -> None:
    @custom_function(lambda a: a * a, inline=True, saves=True)
    def Square(ctx: Any, g: Any) -> Any:
        (a,) = ctx.saved_tensors
        return 2 * a * g

    x = leaf([2.0])
    y = Square.apply(x).sum()
    await y.backward(retain_graph=True)
    await y.backward()
    await assert_awaiting_raises(GraphFreedError, "SquareBackward has already released", y.backward())
    same(x.grad, [8.0])


async def test_after_a_failed_pass_the_graph_is_spent_and_says_why() -> None:
    x = leaf([2.0])
    y = x * x

    def fail(g: Any) -> None:
        raise ZeroDivisionError("the hook failed")

    handle = y.register_hook(fail)
    await assert_awaiting_raises(ZeroDivisionError, None, y.sum().backward())
    handle.remove()
    await assert_awaiting_raises(GraphFreedError, "The first pass ended with: ZeroDivisionError: the hook failed", y.sum().backward())


@pytest.mark.parametrize("saves_data", [False, True])
async def test_a_pass_cancelled_after_the_commit_leaves_the_graph_of_one_that_has_happened(saves_data: bool) -> None:
    """Nodes that saved nothing run again; the others say how the first pass ended."""
    x = leaf([1.0, 2.0])

    async def cancelled(_: Any) -> None:
        raise asyncio.CancelledError

    handle = x.register_post_accumulate_grad_hook(cancelled)
    loss = (x * x if saves_data else x + x).sum()
    raised = await assert_awaiting_raises(asyncio.CancelledError, None, loss.backward())
    assert raised.committed
    handle.remove()
    if saves_data:
        await assert_awaiting_raises(GraphFreedError, "The first pass ended with: CancelledError", loss.backward())
    else:
        await loss.backward()
        same(x.grad, [4.0, 4.0])


async def test_after_a_failed_pass_a_kept_graph_can_be_used() -> None:
    x = leaf([2.0])
    y = x * x

    def fail(g: Any) -> None:
        raise ZeroDivisionError

    handle = y.register_hook(fail)
    z = y.sum()
    await assert_awaiting_raises(ZeroDivisionError, None, z.backward(retain_graph=True))
    handle.remove()
    await z.backward()
    same(x.grad, [4.0])


# -------------------------------------------------------------------- higher orders


@pytest.mark.parametrize("order", [1, 2, 3, 4, 5])
async def test_derivatives_of_any_order(order: int) -> None:
    x = leaf(0.7)
    y = np.exp(x * x)
    # the physicists' way: d^n/dx^n exp(x^2) = exp(x^2) p_n(x), p_{n+1} = p_n' + 2 x p_n
    p = np.polynomial.Polynomial([1.0])
    for _ in range(order):
        (y,) = await ag.grad(y, x, create_graph=True)
        p = p.deriv() + np.polynomial.Polynomial([0.0, 2.0]) * p
    np.testing.assert_allclose(y.item(), math.exp(0.49) * p(0.7), rtol=1e-12)


async def test_a_hessian_vector_product() -> None:
    rng = np.random.default_rng(0)
    a = rng.normal(size=(4, 4))
    x, v = leaf(rng.normal(size=4)), constant(rng.normal(size=4))
    y = (x @ ag.tensor(a) @ x) * x.sum()
    (g,) = await ag.grad(y, x, create_graph=True)
    (hv,) = await ag.grad((g * v).sum(), x)
    s, symmetric = x.detach().numpy(), a + a.T
    ones = np.ones(4)
    hessian = symmetric * s.sum() + np.outer(symmetric @ s, ones) + np.outer(ones, symmetric @ s)
    np.testing.assert_allclose(hv.numpy(), hessian @ v.numpy(), rtol=1e-12)


async def test_the_seed_is_part_of_the_graph() -> None:
    x, g = leaf([2.0, 3.0]), leaf([1.0, 10.0])
    (dx,) = await ag.grad(x * x, x, g, create_graph=True)
    dg, dx2 = await ag.grad(dx.sum(), (g, x))
    same(dg, [4.0, 6.0])
    same(dx2, [2.0, 20.0])


async def test_retain_graph_follows_create_graph() -> None:
    x = leaf([2.0])
    y = (x * x).sum()
    await ag.grad(y, x, create_graph=True)
    await ag.grad(y, x, create_graph=True, retain_graph=False)
    await assert_awaiting_raises(GraphFreedError, None, ag.grad(y, x))


async def test_backward_with_create_graph_warns_of_a_cycle_at_the_callers_line() -> None:
    x = leaf([2.0])
    with pytest.warns(UserWarning, match="will create a reference cycle") as caught:
        await (x * x).sum().backward(create_graph=True)
    assert caught[0].filename == __file__ and len(caught) == 1
    with pytest.warns(UserWarning, match="will create a reference cycle") as caught:
        await ag.backward((x * x).sum(), create_graph=True)
    assert caught[0].filename == __file__
    x.grad = None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        await ag.grad((x * x).sum(), x, create_graph=True)
    assert x.grad is None


async def test_gradients_do_not_depend_on_the_callers_grad_mode() -> None:
    x = leaf([2.0])
    y = (x * x * x).sum()
    with ag.no_grad():
        (g,) = await ag.grad(y, x, create_graph=True)
    assert g.requires_grad
    (g2,) = await ag.grad(g.sum(), x)
    same(g2, [12.0])

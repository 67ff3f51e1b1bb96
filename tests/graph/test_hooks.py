"""Hooks on tensors and nodes: what they see, when they run, what they may return, and how they go away."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.errors import ArgumentTypeError, GraphError, HookError, HookTypeError
from tests.support import assert_awaiting_raises, assert_raises, custom_function, leaf, same

# -------------------------------------------------------------------- hooks on tensors


async def test_a_hook_sees_the_summed_gradient_once_per_pass() -> None:
    x = leaf([1.0, 2.0])
    y = x * 2
    seen: list[Any] = []
    y.register_hook(lambda g: seen.append(g.numpy().copy()))
    z = (y * 3 + y * 4).sum()
    await z.backward(retain_graph=True)
    assert len(seen) == 1
    np.testing.assert_array_equal(seen[0], [7.0, 7.0])
    await z.backward()
    assert len(seen) == 2


async def test_a_hook_replaces_the_gradient_for_everything_below() -> None:
    x = leaf([1.0, 2.0])
    y = x * 2
    y.register_hook(lambda g: g * 10)
    await y.sum().backward()
    same(x.grad, [20.0, 20.0])


async def test_hooks_chain_in_order_of_registration() -> None:
    x = leaf([1.0])
    y = x * 1
    y.register_hook(lambda g: g + 1)
    y.register_hook(lambda g: g * 10)
    await y.sum().backward()
    same(x.grad, [20.0])


async def test_a_hook_on_a_leaf_changes_what_is_accumulated() -> None:
    x = leaf([1.0])
    x.register_hook(lambda g: g * 3)
    await (x * 2).sum().backward()
    same(x.grad, [6.0])


async def test_a_hook_on_the_root_sees_the_seed() -> None:
    x = leaf([1.0])
    y = (x * 2).sum()
    y.register_hook(lambda g: g * 5)
    await y.backward()
    same(x.grad, [10.0])


async def test_hooks_of_several_outputs_see_each_its_own() -> None:
    x = leaf([1.0, 2.0, 3.0, 4.0])
    a, b = np.split(x, 2)
    a.register_hook(lambda g: g * 10)
    await (a.sum() + b.sum()).backward()
    same(x.grad, [10.0, 10.0, 1.0, 1.0])


async def test_a_hook_stays_with_the_value_it_was_registered_on() -> None:
    x = leaf([1.0])
    y = x * 1
    seen: list[float] = []
    y.register_hook(lambda g: seen.append(g.item()))
    y *= 5
    await (y * 2).sum().backward()
    assert seen == [10.0]  # the gradient of the value that y had when the hook was registered
    same(x.grad, [10.0])


async def test_a_removed_hook_is_not_called() -> None:
    x = leaf([1.0])
    y = x * 1
    handle = y.register_hook(lambda g: g * 10)
    handle.remove()
    handle.remove()
    with y.register_hook(lambda g: g * 100):
        pass
    await y.sum().backward()
    same(x.grad, [1.0])


async def test_a_hook_removed_before_its_turn_is_not_called() -> None:
    x = leaf([1.0])
    y = x * 1
    calls: list[int] = []
    y.register_hook(lambda g: second.remove())
    second = y.register_hook(lambda g: calls.append(2))
    await y.sum().backward()
    assert calls == []


async def test_a_hook_added_while_hooks_run_waits_for_the_next_pass() -> None:
    x = leaf([1.0])
    y = x * 1
    calls: list[str] = []

    def first(g: Any) -> None:
        calls.append("first")
        y.register_hook(lambda g: calls.append("later"))

    y.register_hook(first)
    z = y.sum()
    await z.backward(retain_graph=True)
    assert calls == ["first"]
    await z.backward()
    assert calls == ["first", "first", "later"]


class Returns:
    """A hook without a name of its own."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self, grad: Any) -> Any:
        return self.value


@pytest.mark.parametrize(
    ("result", "error", "words"),
    [
        (3.0, HookTypeError, "returned float"),
        ("nonsense", HookTypeError, "returned str"),
        (np.ones(2), HookTypeError, "returned ndarray"),
        (ag.tensor(np.ones(3)), HookError, "has changed the size of value"),
        (ag.tensor(np.ones(2, np.float32)), HookTypeError, "has changed the type of value"),
    ],
)
async def test_a_hook_that_returns_nonsense_is_named_and_changes_nothing(result: Any, error: type[Exception], words: str) -> None:
    x = leaf([1.0, 2.0])
    x.grad = ag.tensor(np.ones(2))
    y = x * 2
    y.register_hook(Returns(result))
    caught = await assert_awaiting_raises(error, f"hook 'Returns'.*{words}", y.sum().backward())
    same(x.grad, [1.0, 1.0])
    assert any("MulBackward" in note for note in caught.__notes__)


async def test_the_error_of_a_hook_keeps_its_type() -> None:
    class Mine(Exception):
        pass

    x = leaf([1.0])

    def fails(g: Any) -> None:
        raise Mine("no")

    x.register_hook(fails)
    caught = await assert_awaiting_raises(Mine, "no", (x * 2).sum().backward())
    assert any("AccumulateGrad" in note for note in caught.__notes__)
    assert x.grad is None


def test_a_hook_needs_a_tensor_that_requires_grad_and_a_callable() -> None:
    assert_raises(GraphError, "doesn't require gradient", lambda: ag.tensor([1.0]).register_hook(print))
    x = leaf([1.0])
    assert_raises(ArgumentTypeError, "expected a callable", x.register_hook, 3)
    assert_raises(ArgumentTypeError, "expected a callable", lambda: (x * 2).grad_fn.register_hook(None))
    assert_raises(ArgumentTypeError, "expected a callable", lambda: (x * 2).grad_fn.register_prehook("x"))


async def test_a_hook_is_not_called_where_no_gradient_arrives() -> None:
    @custom_function(lambda a, b: (a * 1, b * 1), inline=True)
    def OnlyFirst(ctx: Any, g1: Any, g2: Any) -> Any:
        return g1, None

    x, w = leaf([1.0]), leaf([1.0])
    a, b = OnlyFirst.apply(x * 1, (hooked := w * 1))
    hooked.register_hook(lambda g: pytest.fail("called without a gradient"))
    await (a + b).sum().backward()
    same(x.grad, [1.0])
    assert w.grad is None


# -------------------------------------------------------------------- hooks on nodes


async def test_a_prehook_replaces_the_gradients_a_node_is_given() -> None:
    x = leaf([1.0, 2.0])
    y = x * 2
    y.grad_fn.register_prehook(lambda grads: (grads[0] * 3,))
    y.grad_fn.register_prehook(lambda grads: None)
    y.grad_fn.register_prehook(lambda grads: (grads[0] + 1,))
    await y.sum().backward()
    same(x.grad, [8.0, 8.0])


async def test_a_prehook_of_a_node_with_several_inputs_gets_all_of_them() -> None:
    x = leaf([1.0, 2.0])
    a, _ = np.split(x, 2)
    seen: list[Any] = []

    def swap(grads: Any) -> Any:
        seen.append([None if g is None else g.item() for g in grads])
        return grads[1], grads[0]

    a.grad_fn.register_prehook(swap)
    await (a * 10).sum().backward()
    assert seen == [[10.0, None]]
    same(x.grad, [0.0, 10.0])


async def test_a_posthook_sees_what_the_node_returned_and_was_given() -> None:
    x, w = leaf([1.0, 2.0]), leaf([3.0, 4.0])
    y = x * w
    seen: list[Any] = []

    def hook(grad_inputs: Any, grad_outputs: Any) -> Any:
        seen.append(([g.numpy().tolist() for g in grad_inputs], [g.numpy().tolist() for g in grad_outputs]))
        return grad_inputs[0] * 10, grad_inputs[1]

    y.grad_fn.register_hook(hook)
    y.grad_fn.register_hook(lambda grad_inputs, grad_outputs: (grad_inputs[0] + 1, grad_inputs[1]))
    await y.sum().backward()
    assert seen == [([[3.0, 4.0], [1.0, 2.0]], [[1.0, 1.0]])]
    same(x.grad, [31.0, 41.0])
    same(w.grad, [1.0, 2.0])


async def test_a_posthook_of_a_leaf_gets_nothing_and_the_gradient() -> None:
    x = leaf([1.0, 2.0])
    seen: list[Any] = []
    x._node.register_hook(lambda grad_inputs, grad_outputs: seen.append((grad_inputs, grad_outputs[0].numpy().tolist())))
    x.register_hook(lambda g: g * 5)
    await (x * 2).sum().backward()
    assert seen == [((), [10.0, 10.0])]  # after the tensor's own hook


async def test_node_hooks_may_be_coroutines() -> None:
    x = leaf([1.0])
    y = x * 2

    async def before(grads: Any) -> Any:
        await asyncio.sleep(0)
        return (grads[0] * 3,)

    async def after(grad_inputs: Any, grad_outputs: Any) -> Any:
        await asyncio.sleep(0)
        return grad_inputs[0] * 5, None

    y.grad_fn.register_prehook(before)
    y.grad_fn.register_hook(after)
    await y.sum().backward()
    same(x.grad, [30.0])


@pytest.mark.parametrize("kind", ["register_hook", "register_prehook"])
@pytest.mark.parametrize(
    ("result", "error", "words"),
    [
        ((), HookError, "returned 0"),
        ("abc", HookTypeError, "returned str"),
        (ag.tensor([1.0, 1.0, 1.0]), HookError, "has changed the size|returned Tensor"),
    ],
)
async def test_a_node_hook_that_returns_nonsense_is_an_error(kind: str, result: Any, error: type[Exception], words: str) -> None:
    x = leaf([1.0, 2.0])
    y = x * 2
    getattr(y.grad_fn, kind)(lambda *args: result)
    caught = await assert_awaiting_raises(HookError, words, y.sum().backward())
    assert x.grad is None
    if kind == "register_hook" and not isinstance(result, ag.Tensor):
        assert isinstance(caught, error)


async def test_node_hooks_can_be_removed() -> None:
    x = leaf([1.0])
    y = x * 2
    handles = [
        y.grad_fn.register_prehook(lambda grads: (grads[0] * 10,)),
        y.grad_fn.register_hook(lambda grad_inputs, grad_outputs: (grad_inputs[0] * 10, None)),
    ]
    for handle in handles:
        handle.remove()
    await y.sum().backward()
    same(x.grad, [2.0])


# -------------------------------------------------------------------- order


async def test_the_order_of_all_kinds_of_hooks() -> None:
    x = leaf([1.0])

    @custom_function(lambda a: a * 2, inline=True)
    def Traced(ctx: Any, g: Any) -> Any:
        order.append("rule")
        return g * 2

    order: list[str] = []
    y = Traced.apply(x)
    # registered against the order in which they run
    y.grad_fn.register_hook(lambda i, o: order.append("posthook"))
    y.grad_fn.register_prehook(lambda o: order.append("prehook"))
    y.retain_grad()
    y.register_hook(lambda g: order.append("tensor hook"))
    x.register_post_accumulate_grad_hook(lambda t: order.append("accumulated"))
    x._node.register_hook(lambda i, o: order.append("leaf posthook"))
    x._node.register_prehook(lambda o: order.append("leaf prehook"))
    x.register_hook(lambda g: order.append("leaf tensor hook"))
    await y.sum().backward()
    assert order == ["tensor hook", "prehook", "rule", "posthook", "leaf tensor hook", "leaf prehook", "leaf posthook", "accumulated"]


async def test_a_retained_gradient_is_what_tensor_hooks_made_of_it_and_prehooks_have_not() -> None:
    x = leaf([1.0])
    y = x * 2
    y.grad_fn.register_prehook(lambda grads: (grads[0] * 100,))
    y.retain_grad()
    y.register_hook(lambda g: g * 3)
    await y.sum().backward()
    same(y.grad, [3.0])
    same(x.grad, [600.0])


# -------------------------------------------------------------------- hooks and grad()


async def test_a_node_that_is_only_captured_runs_tensor_hooks_but_not_its_own() -> None:
    a = leaf([1.0])
    b = 2 * a
    order: list[str] = []
    b.register_hook(lambda g: order.append("tensor hook"))
    b.retain_grad()
    b.grad_fn.register_prehook(lambda o: order.append("prehook"))
    b.grad_fn.register_hook(lambda i, o: order.append("posthook"))
    (gb,) = await ag.grad((b * 3).sum(), b)
    assert order == ["tensor hook"]
    same(gb, [3.0])
    same(b.grad, [3.0])  # retained as well


@pytest.mark.parametrize("further", [False, True])
async def test_accumulating_into_a_non_leaf_runs_the_prehooks_of_its_node(further: bool) -> None:
    a = leaf([1.0])
    b = 2 * a
    order: list[str] = []
    b.register_hook(lambda g: order.append("tensor hook"))

    async def prehook(grads: Any) -> Any:
        order.append("prehook")
        return (grads[0] * 10,)

    b.grad_fn.register_prehook(prehook)
    b.grad_fn.register_hook(lambda i, o: order.append("posthook"))
    await (b * 3).sum().backward(inputs=(b, a) if further else (b,))
    assert order == ["tensor hook", "prehook", *(["posthook"] if further else [])]
    same(b.grad, [3.0])  # a prehook changes what the node is given, not what its tensor gets
    if further:
        same(a.grad, [60.0])


async def test_a_captured_leaf_runs_its_tensor_hooks_and_no_others() -> None:
    a = leaf([1.0])
    order: list[str] = []
    a.register_hook(lambda g: order.append("tensor hook"))
    a._node.register_prehook(lambda o: order.append("prehook"))
    a._node.register_hook(lambda i, o: order.append("posthook"))
    a.register_post_accumulate_grad_hook(lambda t: order.append("accumulated"))
    await ag.grad((a * 3).sum(), a)
    assert order == ["tensor hook"]
    assert a.grad is None


async def test_hooks_off_the_way_to_the_inputs_do_not_run() -> None:
    a, w = leaf([1.0]), leaf([1.0])
    off = w * 2
    off.register_hook(lambda g: pytest.fail("not on the way"))
    w.register_hook(lambda g: pytest.fail("not on the way"))
    (ga,) = await ag.grad((a * 3 + off).sum(), a)
    same(ga, [3.0])


# -------------------------------------------------------------------- retain_grad


async def test_retain_grad_accumulates_over_passes() -> None:
    x = leaf([1.0])
    y = x * 2
    y.retain_grad()
    y.retain_grad()  # idempotent
    assert y.retains_grad and y.grad is None
    z = (y * 3).sum()
    await z.backward(retain_graph=True)
    same(y.grad, [3.0])
    await z.backward()
    same(y.grad, [6.0])


async def test_without_retain_grad_a_non_leaf_keeps_nothing() -> None:
    y = leaf([1.0]) * 2
    await y.sum().backward()
    assert y.grad is None and not y.retains_grad


def test_retain_grad_of_a_leaf_is_nothing_and_of_what_needs_no_gradient_an_error() -> None:
    x = leaf([1.0])
    x.retain_grad()
    assert not x.retains_grad
    assert_raises(GraphError, "can't retain_grad", lambda: ag.tensor([1.0]).retain_grad())


async def test_a_retained_gradient_is_an_array_of_its_own() -> None:
    x = leaf([1.0, 2.0])
    y = x + 0.0
    y.retain_grad()
    seed = ag.tensor(np.array([3.0, 4.0]))
    await y.backward(seed)
    assert not np.shares_memory(y.grad.numpy(), seed.numpy())
    assert not np.shares_memory(y.grad.numpy(), x.grad.numpy())


async def test_a_retained_gradient_has_a_graph_with_create_graph() -> None:
    x = leaf([3.0])
    y = x * x
    y.retain_grad()
    z = (y * y).sum()
    with pytest.warns(UserWarning, match="create_graph"):
        await z.backward(create_graph=True)
    (second,) = await ag.grad(y.grad.sum(), x)
    same(second, [12.0])  # d(2 x^2)/dx
    x.grad = y.grad = None


# -------------------------------------------------------------------- post-accumulate hooks


async def test_a_post_accumulate_hook_gets_the_leaf_with_its_new_gradient() -> None:
    x = leaf([1.0])
    seen: list[float] = []

    def hook(tensor: Any) -> None:
        assert tensor is x
        seen.append(tensor.grad.item())
        tensor.grad = None

    x.register_post_accumulate_grad_hook(hook)
    x.register_post_accumulate_grad_hook(lambda t: seen.append(-1.0 if t.grad is None else t.grad.item()))
    await (x * 2).sum().backward()
    await (x * 3).sum().backward()
    assert seen == [2.0, -1.0, 3.0, -1.0]
    assert x.grad is None


async def test_an_eager_hook_runs_as_soon_as_the_gradient_is_there() -> None:
    x = leaf([1.0])
    order: list[str] = []
    y = x * 2
    y.register_hook(lambda g: order.append("upstream"))
    z = x * 1  # recorded later, so x's gradient is not complete before y's node has run
    x.register_post_accumulate_grad_hook(lambda t: order.append(f"eager {t.grad.item()}"), eager=True)
    early = leaf([1.0])
    late = early * 4
    late.register_hook(lambda g: order.append("other"))
    await (y + z + late).sum().backward()
    assert order.index("eager 3.0") > order.index("upstream")
    same(x.grad, [3.0])
    same(early.grad, [4.0])


def test_a_post_accumulate_hook_needs_a_leaf_that_requires_grad() -> None:
    assert_raises(GraphError, "non-leaf", lambda: (leaf([1.0]) * 2).register_post_accumulate_grad_hook(print))
    assert_raises(GraphError, "require grad", lambda: ag.tensor([1.0]).register_post_accumulate_grad_hook(print))
    assert_raises(ArgumentTypeError, "expected a callable", lambda: leaf([1.0]).register_post_accumulate_grad_hook(1))  # type: ignore[arg-type]


async def test_a_post_accumulate_hook_returns_none() -> None:
    x = leaf([1.0])
    x.register_post_accumulate_grad_hook(lambda t: t)
    caught = await assert_awaiting_raises(HookError, "post accumulate grad hooks should return None", (x * 2).sum().backward())
    assert caught.committed
    same(x.grad, [2.0])

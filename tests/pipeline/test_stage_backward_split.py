"""The backward pass of a stage in two halves: what each of them does, and what it leaves alone."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import nn
from aiograd.engine.halves import ParameterGroup
from aiograd.errors import ArgumentError, ArgumentTypeError, GraphFreedError, ModifiedError, StageBackwardError
from aiograd.graph import get_gradient_edge, register_multi_grad_hook
from aiograd.nn import functional as F
from aiograd.ops import nn_attention, nn_normalization, nn_recurrent
from aiograd.pipeline import stage_backward, stage_backward_input, stage_backward_weight
from tests.engine.cases import bits, leaf
from tests.pipeline.test_stage_backward import Net, fixed, matrix, twins


async def halves(outputs: Any, grads: Any, inputs: Any, weights: Any, *, retain_graph: bool = False) -> tuple[Any, Any]:
    """Both halves, one after the other."""
    weights = list(weights)
    before = [getattr(w, "grad", None) for w in weights]
    dinputs, groups = await stage_backward_input(outputs, grads, inputs, iter(weights))
    assert all(getattr(w, "grad", None) is b for w, b in zip(weights, before, strict=True))
    return dinputs, await stage_backward_weight(iter(weights), groups, retain_graph)


async def same_as_whole(stage: Callable[..., Any], inputs: list[Any], weights: list[Any], grads: Any = None) -> list[Any]:
    """Check that both halves of ``stage(*inputs)`` give what the whole gives, to the bit; returns the gradients of the weights."""
    for tensor in [*inputs, *weights]:
        tensor.grad = None
    whole = await stage_backward(stage(*inputs), _given(grads), inputs)
    expected = bits([*whole, *(w.grad for w in weights)])
    for weight in weights:
        weight.grad = None
    dinputs, dweights = await halves(stage(*inputs), _given(grads), inputs, weights)
    assert bits([*dinputs, *dweights]) == expected
    result = [w.grad for w in weights]
    for tensor in [*inputs, *weights]:
        tensor.grad = None
    return result


def _given(grads: Any) -> Any:
    return grads() if callable(grads) else grads


# -------------------------------------------------------------------- the first half


async def test_the_input_half() -> None:
    one, other = twins()
    x, target = matrix(8, 16, grad=True), matrix(8, 16)
    y = x.detach().requires_grad_()
    dinputs, groups = await stage_backward_input([((one(x) - target) ** 2).sum()], None, [x], one.parameters())
    await ((other(y) - target) ** 2).sum().backward()
    assert isinstance(dinputs, tuple)
    assert bits(dinputs) == bits([y.grad]) == bits([x.grad])
    assert all(p.grad is None for p in one.parameters())
    assert sum(len(group.nodes) for group in groups) == 4


async def test_input_gradients_accumulate_in_the_inputs() -> None:
    x, w = leaf([1.0], grad=[10.0]), leaf([2.0])
    before = x.grad
    (dx,), _ = await stage_backward_input([(x * w).sum()], None, [x], [w])
    assert (dx.item(), x.grad.item(), before.item()) == (2.0, 12.0, 10.0)


async def test_gradients_line_up_with_the_inputs() -> None:
    x, w, unused = leaf([1.0]), leaf([2.0]), leaf([3.0])
    inputs = [object(), x, None, unused, fixed([1.0]), ag.tensor([1, 2]), x]
    dinputs, groups = await stage_backward_input([(x * w).sum()], None, inputs, [w])
    assert [None if d is None else d.item() for d in dinputs] == [None, 2.0, None, None, None, None, None]
    (dw,) = await stage_backward_weight([w], groups)
    assert dw.item() == 1.0


async def test_without_output_gradients_they_are_ones() -> None:
    x, w = matrix(2, 3, grad=True), matrix(3, 2, grad=True)
    grads = await same_as_whole(lambda x: [x @ w], [x], [w], [fixed(np.ones((2, 2)))])
    await halves({"y": (x @ w, None, 3, fixed([1.0]))}, None, [x], [w])
    assert bits([w.grad]) == bits(grads)


@pytest.mark.parametrize("is_view", [False, True])
async def test_outputs_are_detached_in_place(is_view: bool) -> None:
    x, w = matrix(grad=True), matrix(grad=True)
    full = x @ w
    output = full[1:] if is_view else full
    base = weakref.ref(full)
    del full
    other = x  # an output that is a leaf stays one
    await halves([output, other], None, [x], [w])
    assert not output.requires_grad
    assert output.is_leaf
    assert x.requires_grad
    if is_view:
        assert base() is None
    output += 1.0
    assert not output.requires_grad


async def test_from_an_edge() -> None:
    one, other = twins()
    x, g = matrix(8, 16, grad=True), matrix(8, 16)
    y = x.detach().requires_grad_()
    output = one(x)
    edge, gone = get_gradient_edge(output), weakref.ref(output)
    del output
    assert gone() is None
    dinputs, _ = await halves([edge], [g], [x], one.parameters())
    await other(y).backward(g)
    assert bits(dinputs) == bits([y.grad])
    assert bits([p.grad for p in one.parameters()]) == bits([p.grad for p in other.parameters()])


@pytest.mark.parametrize(("output_grads", "kind"), [(None, ArgumentError), ([None], ArgumentError)])
async def test_an_edge_needs_its_gradient(output_grads: Any, kind: type[Exception]) -> None:
    x, w = matrix(grad=True), matrix(grad=True)
    edge = get_gradient_edge(x @ w)
    with pytest.raises(StageBackwardError, match="requires output gradients") as caught:
        await stage_backward_input([edge], output_grads, [x], [w])
    assert isinstance(caught.value.__cause__, kind)


async def test_nothing_to_differentiate() -> None:
    x, w = leaf([1.0]), leaf([1.0])
    assert await stage_backward_input([fixed([1.0]), None, 3], None, [x, 1], [w]) == ((None, None), [])
    assert await stage_backward_weight([w, None, fixed([1.0])], []) == (None, None, None)


# -------------------------------------------------------------------- both halves


async def test_many_microbatches() -> None:
    one, other = twins()
    for _ in range(10):
        x = matrix(8, 16, grad=True)
        y = x.detach().requires_grad_()
        dinputs, _ = await halves([one(x).sum()], None, [x], one.parameters())
        await other(y).sum().backward()
        assert bits(dinputs) == bits([y.grad])
    assert bits([p.grad for p in one.parameters()]) == bits([p.grad for p in other.parameters()])


async def test_weight_halves_may_come_late_and_out_of_order() -> None:
    w = leaf([2.0])
    kept = []
    for i in range(3):
        x = leaf([10.0**i])
        kept.append((await stage_backward_input([(x * w).sum()], None, [x], [w]))[1])
    await stage_backward_weight([w], kept[2])
    assert w.grad.item() == 100.0
    (dw,) = await stage_backward_weight([w], kept[0] + kept[1])  # of two microbatches in one pass
    assert dw.item() == 111.0


async def test_keeping_the_graph_for_another_pass() -> None:
    one, other = twins()
    x = matrix(8, 16, grad=True)
    y = x.detach().requires_grad_()
    _, groups = await stage_backward_input([one(x).sum()], None, [x], one.parameters())
    await stage_backward_weight(one.parameters(), groups, retain_graph=True)
    await other(y).sum().backward(retain_graph=True)
    assert bits([p.grad for p in one.parameters()]) == bits([p.grad for p in other.parameters()])
    for net in (one, other):
        for p in net.parameters():
            p.grad = None
    await stage_backward_weight(one.parameters(), groups)
    await other(y).sum().backward()
    assert bits([p.grad for p in one.parameters()]) == bits([p.grad for p in other.parameters()])
    with pytest.raises(StageBackwardError, match="second time"):
        await stage_backward_weight(one.parameters(), groups)


async def test_keeping_the_graph_in_the_input_half() -> None:
    x, w = matrix(grad=True), matrix(grad=True)
    edge = get_gradient_edge(np.tanh(x @ w))
    g = matrix()
    first, groups = await stage_backward_input([edge], [g], [x], [w], retain_graph=True)
    again, more = await stage_backward_input([edge], [g], [x], [w])
    assert bits(first) == bits(again)
    await stage_backward_weight([w], groups, retain_graph=True)
    single = w.grad
    await stage_backward_weight([w], more)
    assert bits([w.grad]) == bits([single + single])


async def test_the_weights_that_are_listed_get_gradients() -> None:
    x, w, other = leaf([1.0]), leaf([2.0]), leaf([3.0])
    dinputs, result = await halves([(x * w * other).sum()], None, [x], [w, fixed([1.0]), None])
    assert [d.item() for d in dinputs] == [6.0]
    assert (result[0].item(), *result[1:]) == (3.0, None, None)
    assert other.grad is None


async def test_a_part_of_the_groups() -> None:
    x, v, w = leaf([1.0]), leaf([2.0]), leaf([3.0])
    _, groups = await stage_backward_input([(x * v * w).sum()], None, [x], [v, w])
    assert [group.params for group in groups] == [{v}, {w}]
    await stage_backward_weight([w], groups)
    assert (v.grad, w.grad.item()) == (None, 2.0)
    assert [group.is_spent for group in groups] == [False, True]
    await stage_backward_weight([v], groups)
    assert v.grad.item() == 3.0


async def test_weights_of_one_group_go_together() -> None:
    x, w, b = matrix(grad=True), matrix(grad=True), leaf([1.0] * 4)
    _, groups = await stage_backward_input([F.linear(x, w, b)], None, [x], [w, b])
    assert [len(group.nodes) for group in groups] == [2]
    assert {node.name for node in groups[0].intermediates} == {"LinearBackward"}
    with pytest.raises(StageBackwardError, match="can only be computed together"):
        await stage_backward_weight([w], groups)
    assert (w.grad, b.grad) == (None, None)
    assert not groups[0].is_spent
    await stage_backward_weight([b, w], groups)
    assert b.grad is not None


@pytest.mark.parametrize(
    ("weights", "message"),
    [(lambda x, w: [w, "text"], r"weights\[1\] is a str"), (lambda x, w: [w * 2.0], "was made by an operation"), (lambda x, w: w, "expected an iterable"),
     (lambda x, w: 3, "not iterable")],
)  # fmt: skip
async def test_weights_that_are_none(weights: Any, message: str) -> None:
    x, w = leaf([1.0]), leaf([2.0])
    with pytest.raises(StageBackwardError, match=message):
        await stage_backward_input([(x * w).sum()], None, [x], weights(x, w))
    with pytest.raises(StageBackwardError, match=message):
        await stage_backward_weight(weights(x, w), [])


async def test_groups_that_are_none() -> None:
    with pytest.raises(StageBackwardError, match=r"param_groups\[0\] is a dict") as caught:
        await stage_backward_weight([leaf([1.0])], [{"params": set()}])
    assert isinstance(caught.value.__cause__, ArgumentTypeError)


# -------------------------------------------------------------------- graphs of every kind


async def test_a_weight_used_twice_on_one_path() -> None:
    x, w = matrix(grad=True), matrix(grad=True)
    await same_as_whole(lambda x: (x @ w @ w).sum(), [x], [w])


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
async def test_a_shared_weight_in_any_order_of_the_parameters(order: tuple[int, ...]) -> None:
    x, w, b1, b2 = matrix(grad=True), matrix(grad=True), matrix(grad=True), matrix(grad=True)
    weights = [(w, b1, b2)[i] for i in order]
    await same_as_whole(lambda x: (np.maximum(x @ w + b1, 0.0) @ w + b2).sum(), [x], weights)


async def test_an_intermediate_with_several_outputs() -> None:
    x, w = matrix(grad=True), matrix(grad=True)

    class Two(ag.Function):
        @staticmethod
        def forward(ctx: Any, a: Any, b: Any) -> Any:
            ctx.save_for_backward(a, b)
            return a * b, a - b

        @staticmethod
        def backward(ctx: Any, g: Any, h: Any) -> Any:
            a, b = ctx.saved_tensors
            return (g * b + h if ctx.needs_input_grad[0] else None), (g * a - h if ctx.needs_input_grad[1] else None)

    def stage(x: Any) -> Any:
        p, q = Two.apply(x, w)
        return (p * 2.0).sum() + (np.tanh(q) * 3.0).sum()

    await same_as_whole(stage, [x], [w])
    await same_as_whole(lambda x: Two.apply(x, w)[0].sum(), [x], [w])
    await same_as_whole(lambda x: Two.apply(x, w)[1].sum(), [x], [w])


async def test_a_head_that_no_input_reaches() -> None:
    x, w, v = matrix(grad=True), matrix(grad=True), matrix(grad=True)
    grads = await same_as_whole(lambda x: [x @ w, np.tanh(v) * 2.0, v], [x], [v, w], lambda: [fixed(np.ones((4, 4)))] * 3)
    assert None not in grads


async def test_no_input_requires_grad() -> None:
    x, w, v = matrix(), matrix(grad=True), matrix(grad=True)
    await same_as_whole(lambda x: np.tanh(np.tanh(x @ w) @ v.T).sum(), [x], [v, w])
    await same_as_whole(lambda x: np.tanh(np.tanh(x @ w) @ v.T).sum(), [matrix(grad=True)], [v, w])
    await same_as_whole(lambda: np.tanh(w @ v).sum(), [], [v, w])


async def test_a_dead_input() -> None:
    x, dead, w = matrix(grad=True), matrix(grad=True), matrix(grad=True)
    await same_as_whole(lambda x, dead: (x @ w).sum(), [x, dead], [w])
    await same_as_whole(lambda x, dead: (fixed(np.ones((4, 4))) @ w).sum(), [x, dead], [w])


async def test_an_output_that_is_an_input_or_a_weight() -> None:
    x, w = matrix(grad=True), matrix(grad=True)
    await same_as_whole(lambda x: [x, w, x @ w], [x], [w], lambda: [matrix_of(1.0), matrix_of(2.0), matrix_of(3.0)])
    await same_as_whole(lambda x: x, [x], [w], lambda: matrix_of(1.0))
    await same_as_whole(lambda x: w, [x], [w], lambda: matrix_of(1.0))


def matrix_of(number: float) -> Any:
    return fixed(np.full((4, 4), number))


async def test_one_output_inside_the_graph_of_another() -> None:
    x, w, v = matrix(grad=True), matrix(grad=True), matrix(grad=True)

    def stage(x: Any) -> Any:
        hidden = np.tanh(x @ w)
        return [hidden @ v, hidden, v * 2.0]

    await same_as_whole(stage, [x], [v, w], lambda: [matrix_of(1.0), matrix_of(0.1), matrix_of(3.0)])


async def test_a_weight_below_an_input() -> None:
    w, v = matrix(grad=True), matrix(grad=True)
    x = np.tanh(w @ w)  # the input of the stage was itself made from one of its weights
    (dx,), groups = await stage_backward_input([(x @ v).sum()], None, [x], [w, v])
    await stage_backward_weight([w, v], groups)
    got = bits([dx, w.grad, v.grad])
    w.grad = v.grad = None
    x = np.tanh(w @ w)
    (dx,) = await stage_backward((x @ v).sum(), None, [x])
    assert bits([dx, w.grad, v.grad]) == got


async def test_where_gradients_do_not_arrive_there_is_nothing_to_do() -> None:
    class Stop(ag.Function):
        @staticmethod
        def forward(ctx: Any, a: Any) -> Any:
            return a * 1.0

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            return None

    x, w, v = matrix(grad=True), matrix(grad=True), matrix(grad=True)
    dinputs, groups = await stage_backward_input([Stop.apply(x @ w) @ v], None, [x], [w, v])
    assert dinputs == (None,)
    assert [group.params for group in groups] == [{v}]
    assert (await stage_backward_weight([w, v], groups))[0] is None


# -------------------------------------------------------------------- work


@contextmanager
def counting(monkeypatch: pytest.MonkeyPatch, owner: Any, *names: str) -> Iterator[list[str]]:
    """Calls of kernels, by name."""
    calls: list[str] = []
    with monkeypatch.context() as patch:
        for name in names:
            original = getattr(owner, name)

            def counted(*args: Any, original: Any = original, name: str = name, **kwargs: Any) -> Any:
                calls.append(name)
                return original(*args, **kwargs)

            patch.setattr(owner, name, counted)
        yield calls


@pytest.mark.parametrize("row", ["matmul", "linear"])
@pytest.mark.parametrize("wants", [True, False])
async def test_products_of_a_stack_of_linear_layers(monkeypatch: pytest.MonkeyPatch, row: str, wants: bool) -> None:
    layers = 5
    weights = [matrix(grad=True) for _ in range(layers)]
    x = matrix(grad=wants)

    def forward() -> Any:
        hidden = x
        for w in weights:
            hidden = hidden @ w if row == "matmul" else F.linear(hidden, w)
            hidden = np.tanh(hidden)
        return hidden

    with counting(monkeypatch, np, "matmul") as calls:
        output = forward()
        assert len(calls) == layers
        _, groups = await stage_backward_input([output], None, [x], weights)
        assert len(calls) == layers + (layers if wants else layers - 1)
        del calls[:]
        await stage_backward_weight(weights, groups)
        assert len(calls) == layers
        output = forward()
        del calls[:]
        await stage_backward(output, matrix(), [x])
        assert len(calls) == 2 * layers if wants else 2 * layers - 1


async def test_a_function_that_asks_is_run_for_each_half(monkeypatch: pytest.MonkeyPatch) -> None:
    needs: list[tuple[bool, ...]] = []

    class Product(ag.Function):
        @staticmethod
        def forward(ctx: Any, a: Any, b: Any) -> Any:
            ctx.save_for_backward(a, b)
            return ag.tensor(a.detach().numpy() @ b.detach().numpy())

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            needs.append(ctx.needs_input_grad)
            a, b = ctx.saved_tensors
            return (g @ b.T if ctx.needs_input_grad[0] else None), (a.T @ g if ctx.needs_input_grad[1] else None)

    x, w, v = matrix(grad=True), matrix(grad=True), matrix(grad=True)
    output = Product.apply(Product.apply(x, w), v)
    with counting(monkeypatch, np, "matmul") as calls:
        _, groups = await stage_backward_input([output], None, [x], [w, v])
        assert len(calls) == 2
        del output
        gc.collect()
        await stage_backward_weight([w, v], groups)
        assert len(calls) == 4
    assert needs == [(True, False), (True, False), (False, True), (False, True)]
    needs.clear()
    await stage_backward(Product.apply(Product.apply(x, w), v).sum(), None, [x])
    assert needs == [(True, True), (True, True)]


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_function_that_does_not_ask_is_run_once(is_async: bool) -> None:
    runs: list[int] = []

    class Product(ag.Function):
        @staticmethod
        def forward(ctx: Any, a: Any, b: Any) -> Any:
            ctx.save_for_backward(a, b)
            return a @ b

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            runs.append(1)
            a, b = ctx.saved_tensors
            return g @ b.T, a.T @ g

    if is_async:

        async def backward(ctx: Any, g: Any) -> Any:
            await asyncio.sleep(0)
            runs.append(1)
            a, b = ctx.saved_tensors
            return g @ b.T, a.T @ g

        Product.backward = staticmethod(backward)
    x, w = matrix(grad=True), matrix(grad=True)
    _, groups = await stage_backward_input([np.tanh(Product.apply(x, w))], None, [x], [w])
    assert runs == [1]
    assert w.grad is None
    await stage_backward_weight([w], groups)
    assert runs == [1]
    await same_as_whole(lambda x: Product.apply(Product.apply(x, w), w).sum(), [x], [w])


async def test_a_node_of_ones_own_that_asks() -> None:
    asked: list[tuple[bool, bool]] = []

    class Scale(ag.graph.Node):
        def apply(self, grads: Any) -> Any:
            wants = (self.task_should_compute_output(0), self.task_should_compute_output(1))
            asked.append(wants)
            return grads[0] * 2.0 if wants[0] else None, grads[0] * 3.0 if wants[1] else None

    x, w = leaf([1.0]), leaf([1.0])
    node = Scale(ag.graph.collect_next_edges(x, w))
    node.add_input_metadata((1,), np.float64)
    dinputs, result = await halves([ag.graph.GradientEdge(node, 0)], [fixed([1.0])], [x], [w])
    assert (dinputs[0].item(), result[0].item()) == (2.0, 3.0)
    assert asked == [(True, False), (False, True)]


KERNELS: dict[str, tuple[Any, str, Callable[..., Any], list[tuple[int, ...]]]] = {
    "layer_norm": (nn_normalization, "layer_norm_grad", lambda x, w, b: F.layer_norm(x, (4,), w, b), [(4,), (4,)]),
    "lstm": (nn_recurrent, "lstm_grad", lambda x, w, v: ag.ops.nn_recurrent.lstm(x, *_states(), w, v)[0], [(16, 4), (16, 4)]),
    "attention": (nn_attention, "attention_grad", lambda x, w: F.scaled_dot_product_attention(x, w, np.tanh(x)), [(3, 2, 4)]),
}


def _states() -> tuple[Any, Any]:
    return fixed(np.zeros((2, 4))), fixed(np.ones((2, 4)))


@pytest.mark.parametrize("name", KERNELS)
async def test_a_joint_rule_is_run_once(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    module, kernel, stage, shapes = KERNELS[name]
    rng = np.random.default_rng(1)
    weights = [ag.tensor(rng.uniform(-1.0, 1.0, shape)).requires_grad_() for shape in shapes]
    x = ag.tensor(rng.uniform(-1.0, 1.0, (3, 2, 4))).requires_grad_()
    await same_as_whole(lambda x: stage(x, *weights).sum(), [x], weights)
    with counting(monkeypatch, module.kernels, kernel) as calls:
        output = stage(x, *weights)
        _, groups = await stage_backward_input([output], None, [x], weights)
        assert len(calls) == 1
        await stage_backward_weight(weights, groups)
        assert len(calls) == 1


async def test_what_hooks_have_packed_is_unpacked_once() -> None:
    unpacked: list[Any] = []

    async def unpack(value: Any) -> Any:
        await asyncio.sleep(0)
        unpacked.append(value)
        return value

    x, w = matrix(grad=True), matrix(grad=True)
    with ag.graph.saved_tensors_hooks(lambda t: t.detach(), unpack):
        output = x @ w
    _, groups = await stage_backward_input([output], None, [x], [w])
    assert len(unpacked) == 2
    await stage_backward_weight([w], groups, retain_graph=True)
    await stage_backward_weight([w], groups)
    assert len(unpacked) == 2
    with ag.graph.saved_tensors_hooks(lambda t: t.detach(), unpack):
        await same_as_whole(lambda x: np.tanh(x @ w).sum(), [x], [w])


async def test_a_checkpointed_stage_is_computed_again_once() -> None:
    runs: list[int] = []
    x, w, v = matrix(grad=True), matrix(grad=True), matrix(grad=True)

    def region(x: Any) -> Any:
        runs.append(1)
        return np.tanh(x @ w) @ v

    await same_as_whole(lambda x: ag.checkpoint(region, x).sum(), [x], [w, v])
    assert len(runs) == 4  # two forwards, and one recomputation for each of the two ways


# -------------------------------------------------------------------- hooks


async def test_hooks_on_tensors_run_once_and_count() -> None:
    seen: list[str] = []

    def hook(name: str, factor: float) -> Callable[[Any], Any]:
        def called(g: Any) -> Any:
            seen.append(name)
            return g * factor

        return called

    x, w = matrix(grad=True), matrix(grad=True)
    x.register_hook(hook("x", 3.0))
    w.register_hook(hook("w", 5.0))

    def stage(x: Any) -> Any:
        y = x @ w
        y.register_hook(hook("y", 7.0))
        return y.sum()

    await same_as_whole(stage, [x], [w])
    assert sorted(seen[:3]) == ["w", "x", "y"]
    assert seen[3:] == ["y", "x", "w"]


async def test_retained_gradients_come_with_the_input_half() -> None:
    x, w = matrix(grad=True), matrix(grad=True)
    hidden = x @ w
    hidden.retain_grad()
    output = np.tanh(hidden)
    _, groups = await stage_backward_input([output], None, [x], [w])
    kept = hidden.grad
    assert kept is not None
    await stage_backward_weight([w], groups)
    assert hidden.grad is kept


async def test_hooks_on_nodes_run_with_each_half() -> None:
    calls: list[tuple[Any, ...]] = []
    x, w = leaf([2.0]), leaf([3.0])
    output = x * w
    output.grad_fn.register_prehook(lambda grads: (grads[0] * 10.0,))
    output.grad_fn.register_hook(lambda grads, given: calls.append(tuple(g if g is None else g.item() for g in grads)))
    await halves([output], [fixed([1.0])], [x], [w])
    assert calls == [(30.0, None), (None, 20.0)]
    assert (x.grad.item(), w.grad.item()) == (30.0, 20.0)


async def test_hooks_on_several_gradients_run_with_each_half() -> None:
    seen: list[list[bool]] = []
    x, w, v = leaf([2.0]), leaf([3.0]), leaf([4.0])
    hidden = x * w
    register_multi_grad_hook([hidden, w, v], lambda grads: seen.append([g is not None for g in grads]))
    await halves([hidden * v], None, [x], [w, v])
    assert seen == [[True, False, False], [False, True, True]]


async def test_post_accumulate_hooks_run_after_the_weight_half() -> None:
    seen: list[Any] = []
    x, w, eager = leaf([2.0]), leaf([3.0]), leaf([4.0])
    w.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad.item()))
    eager.register_post_accumulate_grad_hook(lambda leaf: seen.append("eager"), eager=True)
    _, groups = await stage_backward_input([x * w * eager], None, [x], [w, eager])
    assert seen == []
    await stage_backward_weight([w, eager], groups)
    assert seen == ["eager", 8.0]


# -------------------------------------------------------------------- failures


class Fails(ag.Function):
    """Raises where the gradient of `b` is wanted."""

    @staticmethod
    def forward(ctx: Any, a: Any, b: Any) -> Any:
        return a * b

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        if ctx.needs_input_grad[1]:
            raise ZeroDivisionError("not today")
        return g, None


async def test_a_weight_half_that_fails_changes_nothing() -> None:
    x, w, v = leaf([1.0]), leaf([2.0]), leaf([3.0])
    _, groups = await stage_backward_input([Fails.apply(x * w, v)], None, [x], [w, v])
    assert x.grad is not None
    with pytest.raises(StageBackwardError, match="Failed to run stage backward for its weights: ZeroDivisionError") as caught:
        await stage_backward_weight([w, v], groups)
    assert "weights: [Tensor(shape=[1], dtype=float64, requires_grad=True leaf)" in str(caught.value)
    assert not caught.value.committed
    assert (w.grad, v.grad) == (None, None)
    with pytest.raises(StageBackwardError, match="second time"):
        await stage_backward_weight([w, v], groups)


async def test_an_input_half_that_fails_changes_nothing() -> None:
    x, w, v = leaf([1.0]), leaf([2.0]), leaf([3.0])
    output = Fails.apply(w, x * v)
    with pytest.raises(StageBackwardError, match="Failed to run stage backward for its inputs: ZeroDivisionError"):
        await stage_backward_input([output], None, [x], [w, v])
    assert (x.grad, w.grad, v.grad) == (None, None, None)
    assert output.requires_grad
    with pytest.raises(StageBackwardError) as caught:
        await stage_backward_input([output * 1.0], None, [x], [w, v])
    assert isinstance(caught.value.__cause__, (GraphFreedError, ZeroDivisionError))


@pytest.mark.parametrize("half", ["input", "weight"])
async def test_cancelling(half: str) -> None:
    x, w, v = leaf([1.0]), leaf([2.0]), leaf([3.0])
    started = asyncio.Event()

    async def stall(g: Any) -> None:
        started.set()
        await asyncio.Event().wait()

    (x if half == "input" else w).register_hook(stall)

    async def run() -> None:
        await halves([x * w * v], None, [x], [w, v])

    running = asyncio.ensure_future(run())
    await started.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (x.grad is None) == (half == "input")
    assert (w.grad, v.grad) == (None, None)


@pytest.mark.parametrize("what", ["given", "returned", "grad"])
async def test_a_gradient_that_is_still_needed_must_not_be_modified(what: str) -> None:
    x, w, b = matrix(grad=True), matrix(grad=True), matrix(grad=True)
    g = matrix()
    (dx,), groups = await stage_backward_input([x + w], [g], [x], [w, b])
    {"given": g, "returned": dx, "grad": x.grad}[what][0] = 5.0
    with pytest.raises(StageBackwardError, match="modified by an inplace operation") as caught:
        await stage_backward_weight([w, b], groups)
    assert isinstance(caught.value.__cause__, ModifiedError)
    assert w.grad is None


async def test_a_gradient_that_is_not_needed_any_more_may_be_modified() -> None:
    x, w = matrix(grad=True), matrix(grad=True)
    g = matrix()
    (dx,), groups = await stage_backward_input([np.tanh(x @ w)], [g], [x], [w])
    g[0] = 5.0
    dx[0] = 5.0
    assert (await stage_backward_weight([w], groups))[0] is w.grad


async def test_a_saved_value_that_is_still_needed_must_not_be_modified() -> None:
    x, w = matrix(grad=True), matrix(grad=True)
    hidden = np.tanh(x)
    _, groups = await stage_backward_input([hidden @ w], None, [x], [w])
    hidden.detach()[0] = 5.0
    with pytest.raises(StageBackwardError, match="modified by an inplace operation"):
        await stage_backward_weight([w], groups)


# -------------------------------------------------------------------- memory


@contextmanager
def reference_counts_only() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def array_of(tensor: Any) -> weakref.ref[Any]:
    return weakref.ref(tensor.detach()._data)


async def test_the_input_half_frees_what_weights_do_not_need() -> None:
    with reference_counts_only():
        x, w, v = matrix(grad=True), matrix(grad=True), matrix(grad=True)
        first = np.tanh(x @ w)
        second = np.tanh(first @ v)
        third = np.exp(second)
        needed, spare = [array_of(first)], [array_of(second), array_of(third)]
        tensors = [weakref.ref(t) for t in (first, second, third)]
        output = third * 2.0
        del first, second, third
        _, groups = await stage_backward_input([output], None, [x], [w, v])
        assert [ref() for ref in spare] == [None, None]
        assert needed[0]() is not None
        assert [ref() for ref in tensors[1:]] == [None, None]
        del output
        await stage_backward_weight([w, v], groups)
        assert needed[0]() is None
        assert tensors[0]() is None


async def test_groups_that_are_never_used_free_everything() -> None:
    with reference_counts_only():
        x, w = matrix(grad=True), matrix(grad=True)
        hidden = np.tanh(x @ w)
        memory, node = array_of(hidden), weakref.ref(hidden.grad_fn)
        _, groups = await stage_backward_input([hidden @ w], None, [x], [w])
        group = weakref.ref(groups[0]) if hasattr(groups[0], "__weakref__") else None
        del hidden, groups
        assert memory() is None
        assert node() is None
        assert group is None or group() is None


@pytest.mark.parametrize("half", ["input", "weight"])
async def test_a_half_that_fails_dies_with_its_error(half: str) -> None:
    with reference_counts_only():
        x, w, v = matrix(grad=True), matrix(grad=True), matrix(grad=True)
        hidden = np.tanh(x @ w)
        memory = array_of(hidden)
        output = Fails.apply(hidden, v) if half == "weight" else Fails.apply(v, hidden)
        del hidden
        with pytest.raises(StageBackwardError):
            await halves([output], None, [x], [w, v])
        del output
        assert memory() is None


async def test_gradients_kept_in_between_go_one_by_one() -> None:
    """When the first layer's weight gets its gradient, those that arrived at later layers are gone."""
    with reference_counts_only():
        x = matrix(grad=True)
        weights = [matrix(grad=True) for _ in range(4)]
        hidden = x
        for w in weights:
            hidden = np.tanh(hidden @ w)
        _, groups = await stage_backward_input([hidden], None, [x], weights)
        del hidden
        kept = [weakref.ref(grad) for w in weights for group in groups if w in group.params for start in group.starts for grad in start.grads]
        alive: list[int] = []
        assert len(kept) == 4
        for w in weights:
            w.register_hook(lambda g: alive.append(sum(ref() is not None for ref in kept)))
        await stage_backward_weight(weights, groups)
        assert alive == [3, 2, 1, 0]
        assert [ref() for ref in kept] == [None] * 4


async def test_nothing_is_left_for_the_collector() -> None:
    with reference_counts_only():
        net, x = Net(8), matrix(4, 8, grad=True)
        for _ in range(2):
            await halves([net(x).sum()], None, [x], net.parameters())
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            gc.collect()
            leaked = [item for item in gc.garbage if isinstance(item, (ag.Tensor, np.ndarray, ag.graph.Node, ParameterGroup))]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
        assert leaked == []


# -------------------------------------------------------------------- large arrays, depth, modules


async def test_large_arrays_and_the_executor() -> None:
    rng = np.random.default_rng(3)
    w = ag.tensor(rng.normal(size=(512, 512)).astype(np.float32)).requires_grad_()
    x = ag.tensor(rng.normal(size=(512, 512)).astype(np.float32)).requires_grad_()
    await same_as_whole(lambda x: (np.tanh(x @ w) @ w + w).sum(), [x], [w])


async def test_deep_stages() -> None:
    x, w = leaf([1.0]), leaf([1.001])

    def stage(x: Any) -> Any:
        for _ in range(5_000):
            x = x * w
        return x.sum()

    await same_as_whole(stage, [x], [w])


async def test_modules_of_every_kind() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0), nn.BatchNorm1d(8))
    x = matrix(5, 8, grad=True).astype(np.float32).detach().requires_grad_()
    layers = list(net)

    def stage(x: Any) -> Any:
        y = layers[2](layers[1](layers[0](x))[None])[0]
        return layers[3](y).sum()

    await same_as_whole(stage, [x], list(net.parameters()))

"""The backward pass of a stage in two halves: what each of them does, and what it leaves alone."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import nn
from aiograd.errors import ArgumentError, ArgumentTypeError, GraphFreedError, ModifiedError, StageBackwardError
from aiograd.graph import get_gradient_edge, register_multi_grad_hook
from aiograd.nn import functional as F
from aiograd.pipeline import stage_backward, stage_backward_input, stage_backward_weight
from aiograd.profiler import profile
from tests.pipeline.stages import Fails, cancelled_in_a_hook, fixed, halves, matrix, matrix_of, same_as_whole, twins
from tests.support import bits, custom_function, leaf
from tests.toy_device import ToyDevice

# -------------------------------------------------------------------- the first half


async def test_the_input_half() -> None:
    one, other = twins()
    x, target = matrix(8, 16, grad=True), matrix(8, 16)
    y = x.detach().requires_grad_()
    dinputs, groups = await stage_backward_input([((one(x) - target) ** 2).sum()], None, [x], one.parameters())
    await ((other(y) - target) ** 2).sum().backward()
    assert isinstance(dinputs, tuple)
    assert bits(*dinputs) == bits(y.grad) == bits(x.grad)
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
    assert bits(w.grad) == bits(*grads)


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
    assert bits(*dinputs) == bits(y.grad)
    assert bits(*(p.grad for p in one.parameters())) == bits(*(p.grad for p in other.parameters()))


@pytest.mark.parametrize("output_grads", [None, [None]])
async def test_an_edge_needs_its_gradient(output_grads: Any) -> None:
    x, w = matrix(grad=True), matrix(grad=True)
    edge = get_gradient_edge(x @ w)
    with pytest.raises(StageBackwardError, match="requires output gradients") as caught:
        await stage_backward_input([edge], output_grads, [x], [w])
    assert isinstance(caught.value.__cause__, ArgumentError)


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
        assert bits(*dinputs) == bits(y.grad)
    assert bits(*(p.grad for p in one.parameters())) == bits(*(p.grad for p in other.parameters()))


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
    assert bits(*(p.grad for p in one.parameters())) == bits(*(p.grad for p in other.parameters()))
    for net in (one, other):
        for p in net.parameters():
            p.grad = None
    await stage_backward_weight(one.parameters(), groups)
    await other(y).sum().backward()
    assert bits(*(p.grad for p in one.parameters())) == bits(*(p.grad for p in other.parameters()))
    with pytest.raises(StageBackwardError, match="second time"):
        await stage_backward_weight(one.parameters(), groups)


async def test_keeping_the_graph_in_the_input_half() -> None:
    x, w = matrix(grad=True), matrix(grad=True)
    edge = get_gradient_edge(np.tanh(x @ w))
    g = matrix()
    first, groups = await stage_backward_input([edge], [g], [x], [w], retain_graph=True)
    again, more = await stage_backward_input([edge], [g], [x], [w])
    assert bits(*first) == bits(*again)
    await stage_backward_weight([w], groups, retain_graph=True)
    single = w.grad
    await stage_backward_weight([w], more)
    assert bits(w.grad) == bits(single + single)


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
    [
        (lambda x, w: [w, "text"], r"weights\[1\] is a str"),
        (lambda x, w: [w * 2.0], "was made by an operation"),
        (lambda x, w: w, "expected an iterable"),
        (lambda x, w: 3, "not iterable"),
    ],
)
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


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
async def test_a_shared_weight_in_any_order_of_the_parameters(order: tuple[int, ...]) -> None:
    x, w, b1, b2 = matrix(grad=True), matrix(grad=True), matrix(grad=True), matrix(grad=True)
    weights = [(w, b1, b2)[i] for i in order]
    await same_as_whole(lambda x: (np.maximum(x @ w + b1, 0.0) @ w + b2).sum(), [x], weights)


async def test_an_intermediate_with_several_outputs() -> None:
    x, w = matrix(grad=True), matrix(grad=True)

    @custom_function(lambda a, b: (a * b, a - b), saves=True)
    def Two(ctx: Any, g: Any, h: Any) -> Any:
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


#: stages of inputs and the weights w and v; the inputs that require grad; gradients of the outputs
STAGES: dict[str, tuple[Callable[..., Any], list[bool], Any]] = {
    "a weight used twice on one path": (lambda w, v, x: (x @ w @ w).sum(), [True], None),
    "no input requires grad": (lambda w, v, x: np.tanh(np.tanh(x @ w) @ v.T).sum(), [False], None),
    "an input requires grad": (lambda w, v, x: np.tanh(np.tanh(x @ w) @ v.T).sum(), [True], None),
    "no input": (lambda w, v: np.tanh(w @ v).sum(), [], None),
    "a dead input": (lambda w, v, x, dead: (x @ w).sum(), [True, True], None),
    "dead inputs": (lambda w, v, x, dead: (fixed(np.ones((4, 4))) @ w).sum(), [True, True], None),
    "an input, a weight and another output": (lambda w, v, x: [x, w, x @ w], [True], lambda: [matrix_of(1.0), matrix_of(2.0), matrix_of(3.0)]),
    "an output that is an input": (lambda w, v, x: x, [True], lambda: matrix_of(1.0)),
    "an output that is a weight": (lambda w, v, x: w, [True], lambda: matrix_of(1.0)),
}


@pytest.mark.parametrize("name", STAGES)
async def test_halves_give_what_the_whole_gives(name: str) -> None:
    stage, wants, grads = STAGES[name]
    w, v = matrix(grad=True), matrix(grad=True)
    await same_as_whole(functools.partial(stage, w, v), [matrix(grad=each) for each in wants], [v, w], grads)


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
    got = bits(dx, w.grad, v.grad)
    w.grad = v.grad = None
    x = np.tanh(w @ w)
    (dx,) = await stage_backward((x @ v).sum(), None, [x])
    assert bits(dx, w.grad, v.grad) == got


async def test_where_gradients_do_not_arrive_there_is_nothing_to_do() -> None:
    @custom_function()
    def stop(ctx: Any, g: Any) -> Any:
        return None

    x, w, v = matrix(grad=True), matrix(grad=True), matrix(grad=True)
    dinputs, groups = await stage_backward_input([stop.apply(x @ w) @ v], None, [x], [w, v])
    assert dinputs == (None,)
    assert [group.params for group in groups] == [{v}]
    assert (await stage_backward_weight([w, v], groups))[0] is None


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
    await cancelled_in_a_hook(x if half == "input" else w, lambda: halves([x * w * v], None, [x], [w, v]))
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


async def test_a_gradient_that_is_a_view_of_one_that_is_still_needed_must_not_be_modified() -> None:
    x, w = matrix(grad=True), matrix(grad=True)
    (dx,), groups = await stage_backward_input([(x.T + w) * 2.0], [matrix()], [x], [w])
    dx[0] = 5.0
    with pytest.raises(StageBackwardError, match="modified by an inplace operation"):
        await stage_backward_weight([w], groups)


@pytest.mark.parametrize("is_swept", [True, False])
async def test_heads_of_several_microbatches_are_summed_in_one_order(is_swept: bool) -> None:
    x, w = fixed([1.0]).requires_grad_(), fixed([1.0]).requires_grad_()
    head = w * 1.0
    if not is_swept:
        head.register_hook(lambda g: g)
    edge = ag.graph.get_gradient_edge(head)
    groups = []
    for first, second in ((1e16, 1.0), (-1e16, 1.0)):
        _, found = await stage_backward_input([x * w, edge, edge], [fixed([0.0]), fixed([first]), fixed([second])], [x], [w], retain_graph=True)
        groups += found
    assert (await stage_backward_weight([w], groups))[0].item() == 2.0  # the first heads of both, then the second ones


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


async def test_stages_on_a_device() -> None:
    with ToyDevice() as device:
        x, w, b = (matrix().to(device.name).requires_grad_() for _ in range(3))
        for grads in (None, lambda: matrix().to(device.name)):
            output = np.tanh(x @ w + b) @ w
            dinputs, groups = await stage_backward_input([output], None if grads is None else [grads()], [x], [w, b])
            result = await stage_backward_weight([w, b], groups)
            assert {t.device for t in (*dinputs, *result)} == {device.name}

        def stage(x: Any) -> Any:
            return (np.tanh(x @ w + b) @ w).sum()

        for tensor in (x, w, b):
            tensor.grad = None
        whole = await stage_backward(stage(x), None, [x])
        expected = [t.tolist() for t in (*whole, w.grad, b.grad)]
        w.grad = b.grad = None
        dinputs, result = await halves(stage(x), None, [x], [w, b])
        assert [t.tolist() for t in (*dinputs, *result)] == expected


@pytest.mark.parametrize("mode", [ag.detect_anomaly, profile, ag.no_grad])
async def test_modes(mode: Any) -> None:
    x, w = matrix(grad=True), matrix(grad=True)
    output = np.tanh(x @ w) @ w
    with mode():
        dinputs, result = await halves([output], None, [x], [w])
    assert None not in (dinputs[0], result[0])


async def test_complex_numbers() -> None:
    x, w = ((matrix() + 1j * matrix()).detach().requires_grad_() for _ in range(2))
    await same_as_whole(lambda x: np.real((x @ w) * w).sum(), [x], [w])


async def test_an_engine_that_runs_one_node_at_a_time_or_all_on_threads() -> None:
    x, w, b = matrix(grad=True), matrix(grad=True), matrix(grad=True)
    for engine in (ag.Engine(concurrency=1), ag.Engine(inline_ns=1.0)):
        async with engine:
            await same_as_whole(lambda x: (np.tanh(x @ w + b) @ w).sum(), [x], [w, b])

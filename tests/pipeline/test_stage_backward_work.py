"""The halves of a stage's backward pass do no work twice, and keep no more than they need."""

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
from aiograd.engine.split_backward import ParameterGroup
from aiograd.errors import StageBackwardError
from aiograd.nn import functional as F
from aiograd.ops import linalg, nn_attention, nn_linear, nn_normalization, nn_recurrent
from aiograd.pipeline import stage_backward, stage_backward_input, stage_backward_weight
from tests.pipeline.stages import Fails, Net, array_of, fixed, halves, matrix, same_as_whole
from tests.support import custom_function, leaf, reference_counts_only

# -------------------------------------------------------------------- work


@contextmanager
def counting(monkeypatch: pytest.MonkeyPatch, name: str, *owners: Any) -> Iterator[list[str]]:
    """Calls of a kernel, by any of the modules that use it."""
    calls: list[str] = []
    with monkeypatch.context() as patch:
        for owner in owners:
            original = getattr(owner, name)

            def counted(*args: Any, original: Any = original, **kwargs: Any) -> Any:
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

    with counting(monkeypatch, "product", linalg, nn_linear) as calls:
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

    @custom_function(lambda a, b: ag.tensor(a.detach().numpy() @ b.detach().numpy()), saves=True)
    def Product(ctx: Any, g: Any) -> Any:
        needs.append(ctx.needs_input_grad)
        a, b = ctx.saved_tensors
        return (g @ b.T if ctx.needs_input_grad[0] else None), (a.T @ g if ctx.needs_input_grad[1] else None)

    x, w, v = matrix(grad=True), matrix(grad=True), matrix(grad=True)
    output = Product.apply(Product.apply(x, w), v)
    with counting(monkeypatch, "product", linalg, nn_linear) as calls:
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

    def joint(ctx: Any, g: Any) -> Any:
        runs.append(1)
        a, b = ctx.saved_tensors
        return g @ b.T, a.T @ g

    async def later(ctx: Any, g: Any) -> Any:
        await asyncio.sleep(0)
        return joint(ctx, g)

    product = custom_function(lambda a, b: a @ b, saves=True)(later if is_async else joint)
    x, w = matrix(grad=True), matrix(grad=True)
    _, groups = await stage_backward_input([np.tanh(product.apply(x, w))], None, [x], [w])
    assert runs == [1]
    assert w.grad is None
    await stage_backward_weight([w], groups)
    assert runs == [1]
    await same_as_whole(lambda x: product.apply(product.apply(x, w), w).sum(), [x], [w])


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
    with counting(monkeypatch, kernel, module.kernels) as calls:
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


@pytest.mark.parametrize("needs_grad", [True, False])
async def test_what_both_halves_need_is_computed_again_once(needs_grad: bool) -> None:
    """Also what weights are made of, and all of a first stage, whose input needs no gradient."""
    runs: list[int] = []
    w, v = matrix(grad=True), matrix(grad=True)

    def region(x: Any) -> Any:
        runs.append(1)
        return np.tanh(x @ np.exp(w)) @ np.sin(v)

    x = matrix(grad=needs_grad)
    for retain in (False, True):
        runs.clear()
        output = ag.checkpoint(region, x).sum()
        _, groups = await stage_backward_input([output], None, [x], [w, v])
        await stage_backward_weight([w, v], groups, retain_graph=retain)
        assert len(runs) == 2  # the forward, and one recomputation
    w.grad = v.grad = None
    await same_as_whole(lambda x: ag.checkpoint(region, x).sum(), [x], [w, v])


async def test_what_was_computed_again_dies_with_its_groups() -> None:
    arrays: list[Any] = []

    def region(x: Any) -> Any:
        middle = np.tanh(x @ w)
        arrays.append(array_of(middle))
        return middle @ np.exp(v)

    with reference_counts_only():
        x, w, v = matrix(grad=True), matrix(grad=True), matrix(grad=True)
        output = ag.checkpoint(region, x).sum()
        _, groups = await stage_backward_input([output], None, [x], [w, v])
        del output
        assert arrays[1]() is not None
        del groups
        assert [ref() for ref in arrays] == [None, None]


# -------------------------------------------------------------------- memory


async def test_the_input_half_frees_what_weights_do_not_need() -> None:
    with reference_counts_only():
        x, w, v = matrix(grad=True), matrix(grad=True), matrix(grad=True)
        zeroth = x + 1.0
        first = zeroth * zeroth  # below a product, which keeps `first` alone
        second = np.tanh(first @ w)
        third = np.exp(second @ v)
        needed, spare = [array_of(first), array_of(second)], [array_of(zeroth), array_of(third)]
        tensors = [weakref.ref(t) for t in (first, second, zeroth, third)]
        output = third * 2.0
        del zeroth, first, second, third
        _, groups = await stage_backward_input([output], None, [x], [w, v])
        assert [ref() for ref in spare] == [None, None]
        assert all(ref() is not None for ref in needed)
        assert [ref() for ref in tensors[2:]] == [None, None]
        del output
        await stage_backward_weight([w, v], groups)
        assert [ref() for ref in needed] == [None, None]
        assert [ref() for ref in tensors] == [None] * 4


@pytest.mark.parametrize(("asks", "gives", "is_kept"), [(True, True, True), (False, True, False), (True, False, False)])
async def test_what_a_function_saved_goes_when_it_has_done_all_its_work(asks: bool, gives: bool, is_kept: bool) -> None:
    @custom_function(lambda a, b: a * b, saves=True)
    def product(ctx: Any, g: Any) -> Any:
        assert not asks or ctx.needs_input_grad
        return g, g

    @custom_function()
    def stop(ctx: Any, g: Any) -> Any:
        return g if gives else None

    with reference_counts_only():
        x, w, v = matrix(grad=True), matrix(grad=True), matrix(grad=True)
        hidden = np.exp(x) * 1.0
        memory = array_of(hidden)
        output = stop.apply(product.apply(hidden, w)) @ v
        del hidden
        _, groups = await stage_backward_input([output], None, [x], [w, v])
        del output
        assert (memory() is not None) == is_kept
        await stage_backward_weight([w, v], groups)
        assert memory() is None


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

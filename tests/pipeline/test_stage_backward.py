"""The backward pass of a stage as a whole: trees of outputs and gradients, inputs lined up, errors, and what is left alive."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.errors import ArgumentError, ArgumentTypeError, GraphFreedError, ShapeError, StageBackwardError
from aiograd.graph import get_gradient_edge
from aiograd.pipeline import stage_backward
from tests.pipeline.stages import cancelled_in_a_hook, fixed, matrix, twins
from tests.support import bits, custom_function, leaf, reference_counts_only


async def test_the_gradients_are_those_of_a_plain_pass() -> None:
    one, other = twins()
    x, target = matrix(8, 16, grad=True), matrix(8, 16)
    y = x.detach().requires_grad_()
    (dx,) = await stage_backward(((one(x) - target) ** 2).sum(), None, [x])
    await ((other(y) - target) ** 2).sum().backward()
    assert bits(dx) == bits(y.grad)
    assert bits(*(p.grad for p in one.parameters())) == bits(*(p.grad for p in other.parameters()))
    assert x.grad is None


async def test_weights_accumulate_over_microbatches_and_inputs_do_not() -> None:
    w = leaf([2.0])
    xs = [leaf([float(i)]) for i in range(3)]
    for x in xs:
        assert [d.item() for d in await stage_backward((x * w).sum(), None, [x])] == [2.0]
        assert x.grad is None
    assert w.grad.item() == 3.0


async def test_an_inputs_earlier_gradient_is_handed_out_with_the_new_one() -> None:
    x = leaf([1.0], grad=[10.0])
    (dx,) = await stage_backward((x * 3.0).sum(), None, [x])
    assert dx.item() == 13.0
    assert x.grad is None


async def test_what_is_no_tensor_or_gets_no_gradient_has_none() -> None:
    x, unused, constant = leaf([1.0]), leaf([1.0]), fixed([1.0])
    result = await stage_backward((x * constant).sum(), None, (object(), x, None, unused, constant, "text"))
    assert isinstance(result, tuple)
    assert [None if d is None else d.item() for d in result] == [None, 1.0, None, None, None, None]


async def test_an_input_listed_twice_has_its_gradient_once() -> None:
    x = leaf([1.0])
    first, second = await stage_backward((x * 3.0).sum(), None, [x, x])
    assert first.item() == 3.0
    assert second is None


async def test_an_input_that_is_no_leaf() -> None:
    source, w = leaf([3.0]), leaf([2.0])
    x = source * 5.0
    (dx,) = await stage_backward((x * w).sum(), None, [x])
    assert dx.item() == 2.0
    assert x.grad is None
    assert not x.retains_grad
    assert (source.grad.item(), w.grad.item()) == (10.0, 15.0)
    x = source * 5.0
    x.retain_grad()
    await stage_backward((x * w).sum(), None, [x])
    assert x.retains_grad


async def test_trees_are_walked_in_parallel() -> None:
    x = leaf([1.0])
    seven = fixed([7.0])
    output = {"a": (x * 2.0, [x * 3.0, None]), "b": x * 100.0, "c": [x * 1000.0], "d": 5, "e": fixed([1.0])}
    grads = {"a": [seven, (seven, None)], "b": seven, "c": None, "d": object(), "e": "whatever"}
    (dx,) = await stage_backward(output, grads, [x])
    assert dx.item() == 7.0 * 105.0


async def test_nothing_to_differentiate() -> None:
    x, w = leaf([1.0], grad=[4.0]), leaf([1.0])
    (dx,) = await stage_backward((fixed([1.0]), None, 3, x * w), (object(), None, None, fixed([0.0])), [x])
    assert dx.item() == 4.0
    (dx,) = await stage_backward([x * w], None, [x])  # None for a list leaves out all of it
    assert dx is None
    assert w.grad.item() == 0.0


@pytest.mark.parametrize(
    ("output", "grads", "kind", "message"),
    [
        (lambda x: (x, x), lambda g: (g,), ArgumentError, "output has 2 entries and its gradient has 1"),
        (lambda x: [(x, x)], lambda g: [g], ArgumentTypeError, r"the gradient of output\[0\], a tuple, is a Tensor"),
        (lambda x: {"y": x}, lambda g: {"z": g}, ArgumentError, "the keys .*'z'.*'y'"),
        (lambda x: {"y": x}, lambda g: [g], ArgumentTypeError, "the gradient of output, a dict, is a list"),
        (lambda x: {"y": [x]}, lambda g: {"y": {"0": g}}, ArgumentTypeError, r"the gradient of output\['y'\], a list, is a dict"),
        (lambda x: (x,), lambda g: ("text",), ArgumentTypeError, r"the gradient of output\[0\] is a str"),
        (lambda x: x, lambda g: None, ShapeError, "only for scalar outputs"),
        (lambda x: x, lambda g: g[:1], ShapeError, "Mismatch in shape"),
        (lambda x: x, lambda g: g.astype(np.float32), ArgumentTypeError, "Mismatch|has dtype"),
        (lambda x: get_gradient_edge(x), lambda g: None, ShapeError, "requires output gradients"),
    ],
)
async def test_gradients_that_do_not_fit(output: Any, grads: Any, kind: type[Exception], message: str) -> None:
    x, g = leaf([1.0, 2.0]), fixed([1.0, 1.0])
    with pytest.raises(StageBackwardError, match=message) as caught:
        await stage_backward(output(x * 2.0), grads(g), [x])
    assert str(caught.value).startswith("Failed to run stage backward")
    assert isinstance(caught.value.__cause__, kind)
    assert x.grad is None


@pytest.mark.parametrize("inputs", [leaf([1.0]), {"x": 1}, 3])
async def test_inputs_that_are_no_sequence(inputs: Any) -> None:
    with pytest.raises(StageBackwardError, match="expected a tuple or list") as caught:
        await stage_backward(leaf([1.0]) * 2.0, fixed([1.0]), inputs)
    assert isinstance(caught.value.__cause__, ArgumentTypeError)


async def test_an_error_says_what_the_stage_was_given() -> None:
    def fails(g: Any) -> Any:
        raise ZeroDivisionError("secret recipe")

    x, w = leaf([1.0, 2.0, 3.0]), leaf([1.0, 2.0, 3.0])
    y = x * 1.0
    y.register_hook(fails)
    with pytest.raises(StageBackwardError) as caught:
        await stage_backward({"y": y * w}, {"y": fixed([123.25, 1.0, 1.0])}, [x, 3])
    text = str(caught.value)
    assert text.startswith("Failed to run stage backward: ZeroDivisionError: secret recipe")
    assert "stage output: {'y': Tensor(shape=[3], dtype=float64, requires_grad=True of MulBackward)}" in text
    assert "output gradient: {'y': Tensor(shape=[3], dtype=float64, requires_grad=False)}" in text
    assert "input: [Tensor(shape=[3], dtype=float64, requires_grad=True leaf), int]" in text
    assert "123.25" not in text
    assert isinstance(caught.value, RuntimeError)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert not caught.value.committed
    assert (x.grad, w.grad) == (None, None)


async def test_an_error_after_the_commit_says_so() -> None:
    x, w = leaf([1.0]), leaf([1.0])

    def fails(leaf: Any) -> None:
        raise ValueError("too late")

    w.register_post_accumulate_grad_hook(fails)
    with pytest.raises(StageBackwardError) as caught:
        await stage_backward((x * w).sum(), None, [x])
    assert caught.value.committed
    assert w.grad.item() == 1.0


async def test_a_second_pass_is_refused() -> None:
    x, w = leaf([1.0]), leaf([1.0])
    loss = (x * w).sum()
    await stage_backward(loss, None, [x])
    with pytest.raises(StageBackwardError, match="second time") as caught:
        await stage_backward(loss, None, [x])
    assert isinstance(caught.value.__cause__, GraphFreedError)


async def test_a_cancellation_is_not_wrapped_and_changes_nothing() -> None:
    x, w = leaf([1.0]), leaf([1.0])
    y = x * 2.0
    await cancelled_in_a_hook(y, lambda: stage_backward((y * w).sum(), None, [x]))
    assert (x.grad, w.grad) == (None, None)


# -------------------------------------------------------------------- edges


async def test_from_an_edge_while_the_output_is_gone() -> None:
    one, other = twins()
    x = matrix(8, 16, grad=True)
    y = x.detach().requires_grad_()
    g = matrix(8, 16)
    output = one(x)
    edge, gone = get_gradient_edge(output), weakref.ref(output)
    memory = weakref.ref(output.detach()._data)
    del output
    assert gone() is None
    assert memory() is None
    (dx,) = await stage_backward(edge, g, [x])
    await other(y).backward(g)
    assert bits(dx) == bits(y.grad)
    assert bits(*(p.grad for p in one.parameters())) == bits(*(p.grad for p in other.parameters()))


async def test_edges_tensors_and_outputs_without_gradient_together() -> None:
    x, w = leaf([2.0]), leaf([3.0])
    y = leaf([2.0])
    g1, g2 = fixed([1.5]), fixed([0.5])
    shared = x * w
    (dx,) = await stage_backward((get_gradient_edge(shared * 2.0), shared * shared, fixed([1.0])), (g1, g2, None), [x])
    first = w.grad
    w.grad = None
    shared = y * w
    await ag.backward([shared * 2.0, shared * shared], [g1, g2])
    assert bits(dx, first) == bits(y.grad, w.grad)


async def test_an_edge_keeps_the_graph_of_a_custom_function_alive() -> None:
    @custom_function(lambda x: x * 3.0)
    def triple(ctx: Any, g: Any) -> Any:
        return g * 3.0

    x = leaf([1.0, 2.0])
    edge = get_gradient_edge(triple.apply(x))
    gc.collect()
    (dx,) = await stage_backward([edge], [fixed([1.0, 10.0])], [x])
    assert dx.tolist() == [3.0, 30.0]


# -------------------------------------------------------------------- memory


@pytest.mark.parametrize("fails", [False, True])
async def test_activations_die_by_reference_count(fails: bool) -> None:
    with reference_counts_only():
        x, w = matrix(grad=True), matrix(grad=True)
        hidden = np.tanh(x @ w)
        output = {"y": [hidden @ w, None], "z": (hidden,)}
        alive = [weakref.ref(hidden), weakref.ref(hidden._data), weakref.ref(output["y"][0].grad_fn), weakref.ref(hidden.grad_fn)]
        grads = {"y": (matrix(2 if fails else 4), None), "z": [matrix()]}
        try:
            await stage_backward(output, grads, [x])
        except StageBackwardError:
            assert fails
        del hidden, output, grads
        assert [ref() for ref in alive] == [None] * 4

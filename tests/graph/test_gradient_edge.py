"""GradientEdge: a place in the graph to start from or to ask for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.errors import ArgumentError, ArgumentTypeError, NoGraphError, ShapeError, UnusedInputError
from aiograd.graph import GradientEdge, get_gradient_edge
from tests.support import assert_awaiting_raises, assert_raises, leaf, same


def test_the_edge_of_a_leaf_and_of_a_result() -> None:
    x = leaf([1.0])
    edge = get_gradient_edge(x)
    assert edge.node.name == "AccumulateGrad" and edge.output_nr == 0
    a, b = np.split(leaf([1.0, 2.0]) * 2, 2)
    assert get_gradient_edge(a).node is get_gradient_edge(b).node
    assert [get_gradient_edge(t).output_nr for t in (a, b)] == [0, 1]


def test_what_has_no_gradient_has_no_edge() -> None:
    assert_raises(NoGraphError, "does not require gradients", lambda: get_gradient_edge(ag.tensor([1.0])))
    assert_raises(ArgumentTypeError, "expected a Tensor", lambda: get_gradient_edge(np.ones(2)))


async def test_an_edge_as_input_needs_no_tensor() -> None:
    x = leaf([1.0, 2.0])
    y = x * 2
    edges = get_gradient_edge(y), get_gradient_edge(x)
    z = (y * 3).sum()
    del y
    gy, gx = await ag.grad(z, edges)
    same(gy, [3.0, 3.0])
    same(gx, [6.0, 6.0])


async def test_an_edge_as_output() -> None:
    x = leaf([1.0, 2.0])
    y = x * x
    edge = get_gradient_edge(y)
    assert_raises(ShapeError, "GradientEdge 0 requires output gradients", lambda: ag.grad(edge, x))
    (gx,) = await ag.grad(edge, x, ag.tensor([1.0, 10.0], dtype=np.float64))
    same(gx, [2.0, 40.0])


async def test_an_edge_of_one_element_is_seeded_with_one() -> None:
    x = leaf([1.0, 2.0])
    edge = get_gradient_edge((x * 3).sum())
    await ag.backward(edge)
    same(x.grad, [3.0, 3.0])


async def test_edges_and_tensors_mix() -> None:
    x = leaf([1.0, 2.0])
    y = x * 2
    z = (y * 3).sum()
    await ag.backward([z, get_gradient_edge(y)], [None, ag.tensor([1.0, 1.0], dtype=np.float64)])
    same(x.grad, [8.0, 8.0])


async def test_an_edge_of_the_leaf_takes_part_in_backward_with_inputs() -> None:
    x, w = leaf([1.0]), leaf([1.0])
    await (x * 2 + w * 3).sum().backward(inputs=[get_gradient_edge(w)])
    assert x.grad is None
    same(w.grad, [3.0])


async def test_an_edge_of_a_non_leaf_has_nothing_to_accumulate_into() -> None:
    x = leaf([1.0])
    y = x * 2
    assert_raises(ArgumentError, "has no tensor to accumulate into", lambda: (y * 3).sum().backward(inputs=[get_gradient_edge(y)]))


async def test_an_edge_stays_valid_when_the_tensor_is_modified() -> None:
    x = leaf([1.0, 2.0])
    y = x * 2
    before = get_gradient_edge(y)
    y *= 5
    after = get_gradient_edge(y)
    first, second = await ag.grad((y * 3).sum(), (before, after))
    same(first, [15.0, 15.0])
    same(second, [3.0, 3.0])


async def test_zeros_for_an_unused_edge_cannot_be_made() -> None:
    x, w = leaf([1.0]), leaf([1.0])
    unused = get_gradient_edge(w * 2)
    (result,) = await ag.grad((x * 2).sum(), unused, allow_unused=True)
    assert result is None
    with pytest.raises(ArgumentError, match="materialize_grads cannot be used when an unused input is a GradientEdge"):
        await ag.grad((x * 2).sum(), unused, materialize_grads=True)
    await assert_awaiting_raises(UnusedInputError, "index 0", ag.grad((x * 2).sum(), unused))


@pytest.mark.parametrize("edge", [GradientEdge("node", 0), GradientEdge(leaf([1.0])._node, 1), GradientEdge(leaf([1.0])._node, "0")])  # type: ignore[arg-type]
async def test_an_edge_that_leads_nowhere_is_refused(edge: Any) -> None:
    x = leaf([1.0])
    assert_raises(ArgumentError, "is a GradientEdge to input", lambda: ag.grad((x * 2).sum(), edge))
    assert_raises(ArgumentError, "is a GradientEdge to input", lambda: ag.backward(edge))


async def test_the_seed_of_an_edge_is_checked() -> None:
    x = leaf([1.0, 2.0])
    edge = get_gradient_edge(x * 2)
    with pytest.raises(ShapeError, match=r"grad_output\[0\] has a shape of \[3\] and output\[0\] has a shape of \[2\]"):
        await ag.backward(edge, ag.tensor([1.0, 1.0, 1.0], dtype=np.float64))
    assert x.grad is None

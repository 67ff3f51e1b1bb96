"""Node and Edge: how the graph is wired, numbered and described, and nodes of the user's own."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.errors import ArgumentError, ArgumentTypeError
from aiograd.graph import Edge, GradientEdge, InputMetadata, Node
from tests.support import assert_awaiting_raises, assert_raises, leaf


class Scale(Node):
    """Multiplies what arrives by a constant."""

    def __init__(self, next_edges: Any, factor: float, shape: tuple[int, ...] = (2,)) -> None:
        super().__init__(next_edges)
        self.add_input_metadata(shape, np.float64)
        self.factor = factor

    def apply(self, grads: Any) -> Any:
        (grad,) = grads
        return (None if grad is None else grad * self.factor,)


class Sink(Node):
    """Keeps what arrives."""

    def __init__(self, inputs: int = 1) -> None:
        super().__init__()
        self.seen: list[Any] = []
        for _ in range(inputs):
            self.add_input_metadata((2,), np.float64)

    def apply(self, grads: Any) -> Any:
        self.seen.append(list(grads))
        return ()


def output_of(node: Node) -> ag.Tensor:
    tensor = ag.tensor([0.0, 0.0], dtype=np.float64)
    ag.graph.create_gradient_edge(tensor, GradientEdge(node, 0))
    return tensor


# -------------------------------------------------------------------- wiring


def test_an_argument_outside_the_graph_has_an_edge_to_nowhere() -> None:
    x = leaf([1.0, 2.0])
    edges = (x + 5).grad_fn.next_edges
    assert edges[0] == Edge(x._node, 0)
    assert edges[1] == Edge(None, 0) and not edges[1]
    assert bool(edges[0])


def test_edges_lead_to_the_nodes_of_the_arguments() -> None:
    x = leaf([1.0, 2.0])
    a, b = x * 2, x * 3
    node = (a * b).grad_fn
    assert [edge.node for edge in node.next_edges] == [a.grad_fn, b.grad_fn]
    assert node.next_edge(1) == Edge(b.grad_fn, 0)
    assert node.num_outputs == 2 and node.num_inputs == 1
    assert a.grad_fn.next_edges[0].node.name == "AccumulateGrad"


def test_nodes_are_named_after_their_operation() -> None:
    x = leaf([1.0, 2.0])

    class Cube(ag.Function):
        @staticmethod
        def forward(ctx: Any, a: Any) -> Any:
            return a * a * a

    assert (x * x).grad_fn.name == "MulBackward"
    assert Cube.apply(x).grad_fn.name == "CubeBackward"
    assert "MulBackward" in repr((x * x).grad_fn)
    assert "MulBackward" in repr(x * x)


def test_a_leaf_has_no_grad_fn_and_an_operation_has() -> None:
    x = leaf([1.0])
    y = x * 2
    assert x.is_leaf and x.grad_fn is None
    assert not y.is_leaf and y.grad_fn is not None
    plain = ag.tensor([1.0]) * 2
    assert plain.is_leaf and plain.grad_fn is None and not plain.requires_grad


def test_input_metadata_describes_the_gradient_that_arrives() -> None:
    x = ag.tensor(np.zeros((2, 3), np.float32), requires_grad=True)
    y = x.sum(axis=0)
    assert y.grad_fn.input_metadata == (InputMetadata((3,), np.dtype(np.float32), "cpu"),)
    assert y.grad_fn.next_edges[0].node.input_metadata == (InputMetadata((2, 3), np.dtype(np.float32), "cpu"),)


def test_metadata_is_a_dict_of_the_users_own() -> None:
    node = (leaf([1.0]) * 2).grad_fn
    node.metadata["note"] = 7
    assert node.metadata == {"note": 7}
    assert (leaf([1.0]) * 2).grad_fn.metadata == {}


async def test_several_edges_into_one_input_are_summed() -> None:
    sink = Sink()
    source = Scale([(sink, 0)], 2.0)
    other = Scale([(sink, 0)], 5.0)
    await ag.backward([output_of(source), output_of(other)], [ag.tensor(np.ones(2))] * 2)
    (seen,) = sink.seen
    np.testing.assert_array_equal(seen[0], [7.0, 7.0])


async def test_one_edge_per_input_keeps_gradients_apart() -> None:
    sink = Sink(inputs=2)
    source = Scale([(sink, 1)], 2.0)
    await output_of(source).backward(ag.tensor(np.ones(2)))
    ((first, second),) = sink.seen
    assert first is None
    np.testing.assert_array_equal(second, [2.0, 2.0])


# -------------------------------------------------------------------- numbers


def test_sequence_numbers_rise_with_every_recorded_operation() -> None:
    x = leaf([1.0])
    a = x * 2
    b = x * 3
    c = a * b
    assert a.grad_fn.sequence_nr < b.grad_fn.sequence_nr < c.grad_fn.sequence_nr
    assert x._node.sequence_nr == 2**64 - 1


def test_a_sequence_number_can_be_set() -> None:
    node = (leaf([1.0]) * 2).grad_fn
    node.set_sequence_nr(12)
    assert node.sequence_nr == 12


@pytest.mark.parametrize("number", [-1, 1.5, True, "3"])
def test_a_sequence_number_is_a_whole_number_from_0(number: Any) -> None:
    node = (leaf([1.0]) * 2).grad_fn
    before = node.sequence_nr
    assert_raises(ArgumentError, "set_sequence_nr", node.set_sequence_nr, number)
    assert node.sequence_nr == before


def test_topological_numbers_count_the_longest_way_to_a_leaf() -> None:
    x = leaf([1.0])
    a = x * 2
    b = a * 3
    c = b + x
    assert x._node.topological_nr == 0
    assert [t.grad_fn.topological_nr for t in (a, b, c)] == [1, 2, 3]


def test_topological_numbers_of_a_deep_graph_need_no_recursion() -> None:
    y = leaf([1.0])
    for _ in range(20_000):
        y = y * 1.0
    assert y.grad_fn.topological_nr == 20_000


def test_topological_number_follows_a_changed_edge() -> None:
    x = leaf([1.0, 1.0])
    far = ((x * 2) * 2) * 2
    node = Scale([(x._node, 0)], 1.0)
    assert node.topological_nr == 1
    node.set_next_edge(0, Edge(far.grad_fn, 0))
    assert node.topological_nr == 4


# -------------------------------------------------------------------- nodes of one's own


async def test_a_node_of_ones_own_between_operations() -> None:
    x = leaf([1.0, 2.0])
    node = Scale(ag.graph.collect_next_edges(x * 3), 10.0)
    assert node.num_inputs == 1 and node.num_outputs == 1
    await (output_of(node) * ag.tensor([1.0, 2.0])).sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), [30.0, 60.0])


async def test_a_node_with_an_async_rule_is_awaited() -> None:
    x = leaf([1.0, 2.0])

    class Slow(Scale):
        async def apply(self, grads: Any) -> Any:  # type: ignore[override]
            await asyncio.sleep(0)
            return (grads[0] * self.factor,)

    await output_of(Slow(ag.graph.collect_next_edges(x), 3.0)).sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), [3.0, 3.0])


async def test_a_node_can_be_awaited_alone() -> None:
    node = Scale([None], 4.0)
    (result,) = await node(np.ones(2))
    np.testing.assert_array_equal(result, [4.0, 4.0])
    x = leaf([3.0, 5.0])
    (result,) = await (x * x[0:1]).grad_fn.next_edges[1].node(np.ones(1))
    np.testing.assert_array_equal(result, [1.0, 0.0])


async def test_a_source_is_a_root_of_its_own() -> None:
    x = leaf([1.0, 2.0])

    class Source(Node):
        def apply(self, grads: Any) -> Any:
            return (np.array([5.0, 6.0]),)

    source = Source(ag.graph.collect_next_edges(x * 2), num_inputs=1)
    await ag.backward(GradientEdge(source, 0), ag.tensor([0.0, 0.0], dtype=np.float64))
    np.testing.assert_array_equal(x.grad.numpy(), [10.0, 12.0])


async def test_a_node_without_a_rule_says_so() -> None:
    with pytest.raises(NotImplementedError, match="defines no apply"):
        await output_of(Node([None], num_inputs=1)).backward(ag.tensor([1.0, 1.0], dtype=np.float64))


async def test_an_edge_added_later_is_followed() -> None:
    x, w = leaf([1.0, 2.0]), leaf([0.0, 0.0])

    class Both(Scale):
        def apply(self, grads: Any) -> Any:
            return [grads[0] * self.factor] * self.num_outputs

    node = Both(ag.graph.collect_next_edges(x), 2.0)
    later = w * 3.0
    node.add_next_edge((later.grad_fn, 0))
    await output_of(node).sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), [2.0, 2.0])
    np.testing.assert_array_equal(w.grad.numpy(), [6.0, 6.0])


async def test_an_edge_added_later_counts_for_grad_as_well() -> None:
    w = leaf([0.0, 0.0])
    node = Scale([None], 2.0)
    middle = w * 3.0
    node.set_next_edge(0, (middle.grad_fn, 0))
    (gradient,) = await ag.grad(output_of(node).sum(), middle)
    np.testing.assert_array_equal(gradient.numpy(), [2.0, 2.0])


async def test_an_edge_added_while_the_pass_runs_is_an_error() -> None:
    x, w = leaf([1.0, 2.0]), leaf([0.0, 0.0])

    class Meddler(Scale):
        def apply(self, grads: Any) -> Any:
            self.add_next_edge((w._node, 0))
            return [grads[0], grads[0]]

    with pytest.raises(ag.errors.GraphError, match="dependency not found for AccumulateGrad"):
        await output_of(Meddler(ag.graph.collect_next_edges(x), 1.0)).sum().backward()
    assert x.grad is None and w.grad is None


async def test_a_cycle_is_noticed() -> None:
    first = Scale([None], 1.0)
    second = Scale([(first, 0)], 1.0)
    first.set_next_edge(0, (second, 0))
    with pytest.raises(ag.errors.GraphError, match="could not compute gradients for some functions"):
        await output_of(Scale([(second, 0)], 1.0)).sum().backward()
    first.set_next_edges([None])


@pytest.mark.parametrize(
    ("edge", "error"),
    [
        (("nonsense", 0), ArgumentTypeError),
        ((Sink(), 3), ArgumentError),
        ((Sink(), -1), ArgumentError),
    ],
)
def test_an_edge_leads_to_an_input_of_a_node(edge: Any, error: type[Exception]) -> None:
    assert_raises(error, "an edge leads to", Node, [edge])
    node = Node([None], num_inputs=1)
    assert_raises(error, "an edge leads to", node.set_next_edge, 0, edge)
    assert node.next_edges == (Edge(None, 0),)


def test_what_was_recorded_where_is_known_in_anomaly_mode() -> None:
    x = leaf([1.0])
    assert (x * 2).grad_fn.thread_id is None
    with ag.detect_anomaly():
        node = (x * 2).grad_fn
    assert node.thread_id is not None and node.task_name is None


async def test_the_recording_task_is_known_in_anomaly_mode() -> None:
    with ag.detect_anomaly():
        node = (leaf([1.0]) * 2).grad_fn
    task = asyncio.current_task()
    assert task is not None and node.task_name == task.get_name()


# -------------------------------------------------------------------- small functions


def test_collect_next_edges_passes_over_what_needs_no_gradient() -> None:
    x = leaf([1.0])
    y = x * 2
    assert ag.graph.collect_next_edges(x, 3, ag.tensor([1.0]), y) == [GradientEdge(x._node, 0), None, None, GradientEdge(y.grad_fn, 0)]
    assert ag.graph.any_requires_grad(3, ag.tensor([1.0]), y)
    assert not ag.graph.any_requires_grad(3, ag.tensor([1.0]))


def test_a_tensor_is_put_at_an_input_of_a_node_only() -> None:
    x = leaf([1.0])
    assert_raises(ArgumentTypeError, "expected a Tensor", lambda: ag.graph.create_gradient_edge(np.ones(1), GradientEdge(x._node, 0)))
    tensor = ag.tensor([1.0])
    assert_raises(ArgumentError, "an edge leads to input 2", lambda: ag.graph.create_gradient_edge(tensor, GradientEdge(Sink(), 2)))
    assert not tensor.requires_grad


async def test_release_variables_frees_what_a_node_saved() -> None:
    x = leaf([1.0, 2.0])
    y = x * x
    y.grad_fn.release_variables()
    await assert_awaiting_raises(ag.errors.GraphFreedError, "second time", y.sum().backward())
    assert x.grad is None

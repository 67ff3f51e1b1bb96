"""GraphTask by hand: dependencies, what runs, what is captured, completion and failure, without any event loop."""

from __future__ import annotations

from typing import Any

import numpy as np

import aiograd as ag
from aiograd.engine.graph_root import GraphRoot
from aiograd.engine.graph_task import GraphTask
from aiograd.engine.placement import RulePlacement
from aiograd.errors import GraphError, UnusedInputError
from aiograd.graph import Node
from tests.support import assert_awaiting_raises, assert_raises


class Step(Node):
    """Passes what arrives on to every edge; keeps nothing."""

    def __init__(self, *children: Node, inputs: int = 1) -> None:
        super().__init__([(child, 0) for child in children])
        for _ in range(inputs):
            self.add_input_metadata((), np.float64)

    def apply(self, grads: Any) -> Any:
        total = sum(g for g in grads if g is not None)
        return [total] * self.num_outputs


def started(*roots: Node, seeds: Any = None, **options: Any) -> GraphTask:
    seeds = [np.float64(1.0)] * len(roots) if seeds is None else seeds
    task = GraphTask([(root, 0) for root in roots], seeds, **options)
    for _ in task.discover(RulePlacement()):
        pass
    task.begin()
    return task


def run(task: GraphTask) -> list[Node]:
    """Run what is ready until nothing is; returns the nodes that ran."""
    order: list[Node] = []
    ledger = task.ledger
    assert ledger is not None
    while ledger.has_ready():
        node, grads = ledger.pop()
        if node in task.plan.captures.at:
            task.plan.capture(node, grads, task.staged)
        outputs = []
        if task.will_run(node):
            order.append(node)
            outputs = node.apply(grads)
        task.complete(node, outputs)
    return order


def test_one_root_is_the_graph_root_and_several_get_one() -> None:
    a, b = Step(), Step()
    task = started(a)
    assert task.plan.root is a and task.nodes_in_graph == frozenset() and task.plan.dependencies == {a: 0}
    task = started(a, b)
    root = task.plan.root
    assert isinstance(root, GraphRoot)
    assert root.num_inputs == 0 and root.num_outputs == 2
    assert task.nodes_in_graph == {a, b}
    assert task.roots == ((a, 0), (b, 0))


def test_every_edge_is_one_dependency() -> None:
    leaf = Step()
    shared = Step(leaf, leaf)
    root = Step(shared, shared, leaf)
    task = started(root)
    assert task.plan.dependencies == {root: 0, shared: 2, leaf: 3}
    assert run(task) == [root, shared, leaf]
    assert task.outstanding == 0 and task.ledger is not None
    task.ledger.check_complete()


def test_a_repeated_root_counts_twice() -> None:
    root = Step()
    task = started(root, root, seeds=[np.float64(2.0), np.float64(3.0)], inputs=[(root, 0)])
    assert task.plan.dependencies[root] == 2
    run(task)
    assert task.plan.captures.results == [5.0]


def test_outstanding_counts_what_is_ready_or_running() -> None:
    leaf = Step()
    a, b = Step(leaf), Step(leaf)
    root = Step(a, b)
    task = started(root)
    ledger = task.ledger
    assert ledger is not None and task.outstanding == 1
    node, grads = ledger.pop()
    assert node is root and task.outstanding == 1
    task.complete(root, root.apply(grads))
    assert task.outstanding == 2
    first, grads = ledger.pop()
    task.complete(first, first.apply(grads))
    assert task.outstanding == 1  # the leaf still waits for the other
    second, grads = ledger.pop()
    task.complete(second, second.apply(grads))
    assert task.outstanding == 1 and ledger.has_ready()
    node, grads = ledger.pop()
    assert node is leaf and grads == [2.0]
    task.complete(leaf, [])
    assert task.outstanding == 0 and not ledger.has_ready()
    assert ledger.completed_nodes == 4


def test_without_inputs_everything_runs_and_with_inputs_what_leads_to_them() -> None:
    wanted, other = Step(), Step()
    left, right = Step(wanted), Step(other)
    root = Step(left, right)
    assert started(root).exec_info is None
    task = started(root, inputs=[(wanted, 0)])
    assert task.exec_info is not None and set(task.exec_info) == {root, left}
    assert set(task.plan.captures.at) == {wanted}
    assert not task.will_run(wanted) and task.gets_gradient(wanted)
    assert not task.gets_gradient(right)
    assert [task.should_compute(root, i) for i in (0, 1)] == [True, False]
    assert run(task) == [root, left]
    assert task.plan.captures.results == [1.0]
    task = started(root, inputs=[(wanted, 0)], accumulate=True)
    assert task.exec_info is not None and set(task.exec_info) == {root, left, wanted}
    assert run(task) == [root, left, wanted]


def test_one_node_may_be_captured_several_times() -> None:
    class Fork(Node):
        def apply(self, grads: Any) -> Any:
            return [np.float64(2.0), np.float64(3.0)]

    wanted = Step(inputs=2)
    root = Fork([(wanted, 0), (wanted, 1)], num_inputs=1)
    task = started(root, inputs=[(wanted, 1), (wanted, 0), (wanted, 1)])
    run(task)
    assert task.plan.captures.results == [3.0, 2.0, 3.0]


def test_a_capture_on_the_way_to_another() -> None:
    below = Step()
    middle = Step(below)
    root = Step(middle)
    task = started(root, inputs=[(middle, 0), (below, 0)])
    assert run(task) == [root, middle]
    assert task.plan.captures.results == [1.0, 1.0]


def test_the_predicted_order_is_that_of_an_undisturbed_pass() -> None:
    rng = np.random.default_rng(0)
    nodes: list[Node] = [Step()]
    for _ in range(40):
        children = [nodes[int(i)] for i in rng.integers(0, len(nodes), size=int(rng.integers(1, 4)))]
        nodes.append(Step(*children))
    for node in nodes:
        if rng.random() < 0.3:
            node.set_sequence_nr(int(rng.integers(1, 10**6)))
    task = started(nodes[-1])
    predicted = task.execution_order()
    assert predicted == run(task)
    assert task.execution_order() == predicted  # also afterwards
    part = started(nodes[-1], inputs=[(nodes[0], 0)], accumulate=True)
    assert part.execution_order() == run(part)


def test_an_input_that_cannot_be_reached_is_refused_before_anything_runs() -> None:
    root, stranger = Step(Step()), Step()
    task = GraphTask([(root, 0)], [np.float64(1.0)], inputs=[(root, 0), (stranger, 0)], require_inputs=True)
    assert_raises(UnusedInputError, "index 1", lambda: list(task.discover(RulePlacement())))
    assert task.outstanding == 0


def test_a_node_that_waits_for_what_never_comes_is_reported() -> None:
    a = Step()
    b = Step(a)
    a.set_next_edges([(b, 0)])  # a cycle
    root = Step(a)
    task = started(root)
    run(task)
    assert task.ledger is not None
    assert_raises(GraphError, "could not compute gradients for some functions: Step", task.ledger.check_complete)
    a.set_next_edges([])


def test_after_a_failure_nothing_is_ready_and_the_first_error_counts() -> None:
    x = ag.tensor([1.0], requires_grad=True)
    leaf = x._node
    assert leaf is not None
    task = started(Node([(leaf, 0)], num_inputs=1))
    task.stage(leaf, [np.ones(1)])  # type: ignore[arg-type]
    first = ZeroDivisionError("first")
    task.fail(first)
    task.fail(ValueError("second"))
    assert task.error is first and task.ledger is not None and not task.ledger.has_ready() and not task.staged.gradients
    task.finish()
    assert task.completed and x.grad is None
    assert "failed" in repr(task)


def test_the_commit_writes_everything_at_once() -> None:
    x, w = ag.tensor([1.0], requires_grad=True), ag.tensor([1.0], requires_grad=True)
    task = started(Step())
    kept: list[Any] = []
    task.stage(x._node, [np.array([2.0], np.float32)])  # type: ignore[arg-type]
    task.stage(w._node, [np.array([3.0], np.float32)])  # type: ignore[arg-type]
    task.staged.retain(kept.append, "gradient")
    assert x.grad is None and w.grad is None and not kept
    task.commit()
    assert x.grad.item() == 2.0 and w.grad.item() == 3.0 and kept == ["gradient"]
    assert task.committed


def test_tasks_are_numbered() -> None:
    first, second = started(Step()), started(Step())
    assert second.id == first.id + 1
    assert f"GraphTask {second.id}" in repr(second)


async def test_the_future_of_an_executed_task_gives_the_captured_gradients() -> None:
    x = ag.tensor([2.0], requires_grad=True)
    y = (x * x).sum()
    async with ag.Engine() as engine:
        task = engine.execute([(y.grad_fn, 0)], [np.ones((), np.float32)], inputs=[(x._node, 0)])
        (g,) = await task.future
        assert g.tolist() == [4.0] and task.completed and task.outstanding == 0
        (again,) = await task.future
        assert again.tolist() == [4.0]
        failed = engine.execute([(y.grad_fn, 0)], [np.ones((), np.float32)])
        await assert_awaiting_raises(ag.errors.GraphFreedError, None, failed.future)
    assert x.grad is None


def test_a_task_that_was_never_started_has_no_future() -> None:
    assert_raises(GraphError, "has not been started", lambda: GraphTask([(Step(), 0)], [np.float64(1.0)]).future)

"""GraphTask: one backward pass. Pure: no loop, no clock, no threads.

A runner (`aiograd.engine.run`) asks for ready nodes, runs them where it sees fit and reports their outputs. The GraphTask brings together
the plan that selects nodes (`Plan`), the gradients that have arrived and the ready nodes (`Ledger`), the staged gradients (`StagedCommit`), the
nodes recorded meanwhile (`RecordedNodes`) and the futures of the result (`PassFutures`). A pass that is part of a larger one has `PassHooks`.

Note [Life of a pass]
    ``discover`` (walk the graph, select the nodes to run) → ``begin`` → ``pop`` / ``complete`` until nothing is outstanding →
    ``commit`` → post-accumulate hooks → final callbacks → ``future`` resolved. ``fail`` at any point before the commit drops everything
    staged. A graph without user code, small enough and in plain order takes the short cut of `aiograd.engine.walk` instead of
    pop/complete; results, order and promises are the same.

Source: PyTorch ``engine.cpp`` and ``graph_task.h``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

from aiograd.engine.ledger import Ledger
from aiograd.engine.pass_futures import PassFutures
from aiograd.engine.pass_hooks import GraphTaskRunner, PassHooks
from aiograd.engine.pass_view import PassView
from aiograd.engine.placement import RulePlacement, examples_of
from aiograd.engine.plan import DISCOVER_STRIDE, BackwardPlan
from aiograd.engine.renumbering import RecordedNodes
from aiograd.engine.selection import Selection
from aiograd.engine.staged_commit import Keeper, StagedCommit
from aiograd.errors import ArgumentError, GraphError, GraphFreedError, UnusedInputError
from aiograd.graph.accumulate_grad import AccumulateGrad, GradTarget, Staged
from aiograd.graph.boundary import to_array, to_tensor
from aiograd.graph.node import Node
from aiograd.graph.programs import expand_programs
from aiograd.graph.reducing import LEAF_REDUCERS, CommitGuard
from aiograd.graph.released import ReleasedVariables
from aiograd.graph.running import CURRENT
from aiograd.running.caller import warn_caller
from aiograd.running.exceptions import summary_of
from aiograd.running.types import Array

_next_id = count(0).__next__


class GraphTask(PassView):
    """One backward pass.

    Args:
        roots: gradient edges ``(node, input number)`` to start from.
        seeds: their gradients, fitted to them.
        inputs: gradient edges, the wanted gradients; None: accumulate into every leaf.
        require_inputs, accumulate, keepers: with `inputs`; see `Selection`.
        plan: the plan to run; given instead of all of the above.
        keep_graph: keep saved values for another pass.
        create_graph: compute with Tensors, so that the pass records a graph for double backward.
        reentrant_depth: how many passes this one is nested in.
        anomaly: None for no anomaly mode; True to check gradients for NaN as well.
        profiler: the profiler that records scopes, or None.
        hooks: the hooks of the larger pass that this one is part of, or None.

    >>> x = ag.tensor([1.0, 2.0], requires_grad=True)
    >>> y = (x * x).sum()
    >>> task = ag.GraphTask([(y.grad_fn, 0)], [np.float32(1.0)])
    >>> task.completed, len(task.roots)
    (False, 1)
    """

    # The first values, which most passes keep; on the class, because setting them for each pass would cost a small one several percent
    #: the nodes that the pass records, with `create_graph`
    recorded: RecordedNodes | None = None
    #: the runner, in a pass that receives gradients from other workers
    runner: GraphTaskRunner | None = None
    #: other participants in the end of the pass; see `aiograd.graph.reducing`
    guards: tuple[CommitGuard, ...] = ()
    #: the error of `fail_externally`, until the runner raises it
    external_error: BaseException | None = None
    completed: bool = False
    error: BaseException | None = None
    #: made by the runner: an object with ``create_future``
    loop: Any = None
    futures: PassFutures | None = None
    #: the rest of `discover`, which is run in slices
    _walk: Iterator[None] = iter(())
    _is_cancelled: bool = False

    def __init__(
        self,
        roots: Sequence[tuple[Node, int]] = (),
        seeds: Sequence[Array] = (),
        *,
        inputs: Sequence[tuple[Node, int]] | None = None,
        require_inputs: bool = False,
        accumulate: bool = False,
        keepers: Sequence[Keeper | None] = (),
        plan: BackwardPlan | None = None,
        keep_graph: bool = False,
        create_graph: bool = False,
        reentrant_depth: int = 0,
        anomaly: bool | None = None,
        profiler: Any = None,
        hooks: PassHooks | None = None,
    ) -> None:
        self.id: int = _next_id()
        if create_graph or anomaly is not None:
            expand_programs([node for node, _ in roots])
        if plan is None:
            if inputs is None:
                plan = BackwardPlan(roots, seeds)
            else:
                plan = Selection(roots, seeds, inputs, require_inputs=require_inputs, accumulate=accumulate, keepers=keepers)
        self.plan: BackwardPlan = plan
        self.keep_graph: bool = keep_graph
        self.create_graph = create_graph
        self.reentrant_depth = reentrant_depth
        self.anomaly = anomaly
        self.profiler = profiler
        self.hooks = hooks
        #: True if the options allow a walk; the graph may still forbid it
        self.may_walk: bool = anomaly is None and profiler is None and (hooks is None or hooks.is_local)
        if create_graph:  # `grad` of one root; leaves that accumulate are not told apart by numbers, and a batch takes longer than its node says
            self.may_walk = self.may_walk and plan.__class__ is Selection and not accumulate and len(roots) == 1 and examples_of(seeds) == 1
        self.staged: StagedCommit = StagedCommit()
        self.released: ReleasedVariables = ReleasedVariables()
        if not keep_graph:
            plan.released = self.released
        self.callbacks: list[Callable[[], Any]] = []
        self.warnings: list[tuple[str, type[Warning]]] = []
        place_of = None if hooks is None or hooks.is_local else hooks.place_of
        if create_graph:
            self.recorded = RecordedNodes(place_of)
        if hooks is not None and not hooks.is_local:
            self.ledger = Ledger(plan, place_of, self.recorded, hooks.sources)

    def __repr__(self) -> str:
        state = "failed" if self.error else "completed" if self.completed else f"{self.outstanding} outstanding"
        return f"<GraphTask {self.id}: {state}>"

    # ---------------------------------------------------------------- nodes

    def discover(self, placement: RulePlacement) -> Iterator[None]:
        """Walk the graph once; see `BackwardPlan.discover`.

        Args:
            placement: decides which rules are cheap enough for the loop.

        Returns:
            An iterator that walks a part of the graph with each step, so that a runner can pause.
        """
        self._walk = self.plan.discover(placement, self.hooks, self.may_walk)
        return self._walk

    def begin(self, runner: GraphTaskRunner | None = None, *, begins: bool = True) -> Ledger:
        """Make the root ready; returns the ledger, which gives out the ready nodes from now on.

        Args:
            runner: woken when gradients come from other workers.
            begins: False if a walk has run the first nodes; `Ledger.resume` then makes nodes ready instead.

        Returns:
            The ledger: the gradients that have arrived, and the ready nodes.
        """
        if self.hooks is not None and not self.hooks.is_local:
            self.runner = runner
        if self.ledger is None:
            self.ledger = Ledger(self.plan, None, self.recorded)
        if begins:
            self.ledger.begin()
        return self.ledger

    def complete(self, node: Node, outputs: Sequence[Array | None]) -> None:
        """Take the fitted gradients that a node returned, one per edge, and make the nodes ready that waited for nothing else.

        Args:
            node: the node that has run.
            outputs: its gradients, None where there is none.
        """
        if node in self.plan.divided:
            self.plan.has_run(node, outputs)
        self.ledger.complete(node, outputs)  # type: ignore[union-attr]

    def is_eager(self, leaf: AccumulateGrad) -> bool:
        """True if the leaf's gradient is accumulated at once instead of at the commit.

        Args:
            leaf: a leaf of the graph.

        Returns:
            True or False.
        """
        return self.hooks is None and leaf.is_eager

    def stage(self, leaf: AccumulateGrad, grads: list[Any]) -> None:
        """Stage the complete gradient of a leaf; see `StagedCommit.stage`.

        Args:
            leaf: the leaf.
            grads: its gradient, in a list of one.
        """
        self.staged.stage(leaf, grads, self.grad_target(leaf))

    def grad_target(self, leaf: AccumulateGrad) -> GradTarget:
        """The holder of the `grad` into which the gradient of a leaf accumulates.

        Args:
            leaf: the leaf.

        Returns:
            The leaf itself, unless the pass is part of a larger one.
        """
        return leaf if self.hooks is None else self.hooks.grad_target(leaf)

    def stage_reduced(self, leaf: AccumulateGrad, staged: Staged) -> None:
        """Stage a gradient that a reducer has taken out of the pass and combined with others.

        Args:
            leaf: the leaf.
            staged: its gradient, with `grad_target` as target.
        """
        self.staged.gradients[leaf] = staged

    def join(self, guard: CommitGuard) -> None:
        """Add a participant in the end of the pass.

        Args:
            guard: awaited before the commit.
        """
        self.guards += (guard,)

    def release_saved(self, node: Node) -> None:
        """Release the saved values of a node that has run, unless another pass needs them.

        Args:
            node: the node that has run.
        """
        if not self.keep_graph and node not in self.plan.kept:
            node.release_variables(self.released)

    def records_for(self, node: Node) -> None:
        """Attribute the nodes that the engine itself records from now on to this node of the pass.

        Args:
            node: the node that runs now.
        """
        if self.recorded is not None:
            self.recorded.running = node

    def collect(self, recorded: Node) -> None:
        """Register a node that this pass has recorded.

        Args:
            recorded: the node that was recorded.
        """
        if self.completed or self.recorded is None:
            return
        current = CURRENT.get()
        node = current.node if current is not None and current.task is self else None
        self.recorded.add(recorded, node, self.plan.dependencies)

    # ---------------------------------------------------------------- gradients of other workers

    @property
    def waiting(self) -> dict[Node, None]:
        """The nodes that wait for gradients from other workers."""
        return {} if self.ledger is None else self.ledger.waiting

    def deliver(self, source: Node, grads: list[Any]) -> None:
        """Take the gradients of one of the nodes in `waiting`, which have come from another worker.

        Args:
            source: the node that the gradients arrive at.
            grads: one for each of its inputs, None where there is none.

        Raises:
            GraphError: the node is not in `waiting`, or not any more.
        """
        if self.ledger is None or source not in self.ledger.waiting:
            raise GraphError(f"{source.name} waits for no gradients in graph task {self.id}")
        if self.error is None:
            self.ledger.deliver(source, grads)
            if self.runner is not None:
                self.runner.wake()

    def fail_externally(self, error: BaseException) -> None:
        """Make the pass fail for a reason outside of it; the runner raises the error at its next step.

        Args:
            error: the reason.
        """
        if self.external_error is None:
            self.external_error = error
            if self.runner is not None:
                self.runner.wake()

    def busy(self) -> list[Node]:
        """The nodes with a rule or hook that has begun and not ended; empty in a pass without a `runner`.

        Returns:
            The nodes, in no particular order.
        """
        return [] if self.runner is None else self.runner.busy()

    def hand_over(self) -> None:
        """Let another pass run in place of this one; that pass, not this one, releases the saved values."""
        self.keep_graph = True

    def adopt(self, other: GraphTask) -> None:
        """Take over the results of the pass that ran in place of this one and succeeded.

        Args:
            other: the pass that has run.
        """
        self.plan.captures.results = other.plan.captures.results
        self.staged.is_done = other.committed

    # ---------------------------------------------------------------- the end

    def delivered(self) -> Iterator[tuple[Node, Array]]:
        """The gradients that the pass writes or returns, each with the node it arrived at.

        Returns:
            An iterator over pairs of node and gradient.
        """
        for leaf, staged in self.staged.gradients.items():
            yield leaf, staged.total
        for _, grad in self.staged.retained:
            yield self.plan.root, to_array(grad, False)
        for node, grad in self.plan.captures.taken():
            yield node, to_array(grad, False)

    def commit(self) -> None:
        """Write every staged gradient in one step; if that raises, none has been written."""
        self.staged.commit()

    def fail(self, error: BaseException, *, is_cancelled: bool = False) -> None:
        """End the pass with this error and drop the staged gradients. A second error is ignored. The runner then runs `release_graph`.

        Args:
            is_cancelled: True if the error is a cancellation, so that `future` is cancelled as well.
            error: the reason, which `future` raises.
        """
        if self.error is not None:
            return
        self.error = error
        self._is_cancelled = is_cancelled
        if self.ledger is not None:
            self.ledger.clear()
        if not self.staged.is_done:
            self.staged.drop()

    def release_graph(self) -> Iterator[None]:
        """Release the saved values of a failed pass, unless the graph is kept; yields now and then. A second pass over the graph names this error.

        Values that another pass has released are skipped (that pass may still be running), and a pass that never began releases nothing. One
        that fails after the commit leaves the graph as one that succeeds does.

        Returns:
            An iterator that releases some nodes with each step.
        """
        error, plan = self.error, self.plan
        if error is None or self.keep_graph or isinstance(error, GraphFreedError):
            return
        try:
            yield from self._walk if plan.dependencies else self.discover(RulePlacement())  # where it was interrupted
        except UnusedInputError:
            return
        if isinstance(error, UnusedInputError) and (self.ledger is None or not (self.ledger.outstanding or self.ledger.completed_nodes)):
            return
        self.released.reason = summary_of(error)
        if self.committed:
            return  # its nodes have run and released their saved values
        for visited, node in enumerate(plan.dependencies):
            if node is not plan.root or plan.runs(node) or node in plan.captures.at:
                node.release_variables(self.released)
            if not visited % DISCOVER_STRIDE:
                yield

    def tell_reducers(self) -> None:
        """Tell the reducers of leaves that the pass has failed. See Note [Reduced leaves] in `reducing`."""
        reducers = tuple(LEAF_REDUCERS)
        if reducers and self.error is not None and not self.committed:
            with contextlib.suppress(UnusedInputError):
                for _ in self._walk:  # where it was interrupted
                    pass
                for reducer in reducers:
                    reducer.pass_failed(self, self.error)

    def finish(self) -> None:
        """End the pass: drop every reference to the graph."""
        self.completed = True
        self.guards = ()
        self.hooks = self.runner = self.ledger = self.recorded = self._shared_hook_state = None
        self.plan.finish(self.error is None)
        self.callbacks.clear()
        self._walk = iter(())
        if self.futures is not None:
            self.futures.settle(self.plan.captures.results, self.error, self._is_cancelled)
        self.staged.drop()

    def queue_callback(self, callback: Callable[[], Any]) -> None:
        """Call (and await) `callback` after the commit, in order; a callback may queue more.

        Args:
            callback: called without arguments; an awaitable result is awaited.

        Raises:
            ArgumentError: it is not callable.
            GraphError: the pass is over.
        """
        if not callable(callback):
            raise ArgumentError(f"queue_callback: expected a callable, found {type(callback).__name__}")
        if self.completed:
            raise GraphError("queue_callback: the pass is over. Final callbacks can only be installed during backward pass.")
        self.callbacks.append(callback)

    def warn(self, message: str, category: type[Warning] = UserWarning) -> None:
        """Collect a warning; each is issued once, in the caller, when the pass is over.

        Args:
            message: the text.
            category: the class of the warning.
        """
        if (message, category) not in self.warnings:
            self.warnings.append((message, category))

    def issue_warnings(self) -> None:
        """Issue the warnings that `warn` collected; if a filter turns one into an exception, the others are dropped."""
        collected, self.warnings = self.warnings, []
        for message, category in collected:
            warn_caller(message, category)

    @property
    def result(self) -> list[Any]:
        """The captured gradients as Tensors, in the order of `inputs`."""
        return [to_tensor(grad) for grad in self.plan.captures.results]

    @property
    def future(self) -> Any:
        """A future that resolves with `result` (or the error) when the pass is over.

        Each access makes another one, so several tasks may await the pass, and cancelling one of them does not affect the others.
        """
        if self.futures is None:
            if self.loop is None:
                raise GraphError(f"GraphTask {self.id} has not been started: it has no future yet")
            self.futures = PassFutures(self.loop)
            if self.completed:
                self.futures.settle(self.plan.captures.results, self.error, self._is_cancelled)
        return self.futures.new()

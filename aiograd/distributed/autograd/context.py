"""Context: one worker's part of one distributed graph, and the gradients of its backward passes.

The worker that opens a context gives it an unguessable id; the first call made in it opens it on another worker. Each worker keeps
its own half of every edge between workers and the gradients of its own leaves. Releasing the context on the worker that opened it drops it
everywhere.

Note [Places]
    Gradients are summed in the order in which the graph was recorded, and the calls of one context may run on a worker in another order
    than they were made in. So a node recorded while a call is served gets a place made of the place of the call on the caller's side and
    of its own number: places compare as sequence numbers of one process would if every call were an ordinary function call. The place of a
    node that was not recorded in the context is its number. Places are negated, since sums go from the node recorded last to the first, and
    end with infinity, so that the nodes recorded by a call come before the call itself.

Note [Message ids]
    The upper half of the number of an edge is derived from the context, its principal, the worker and its incarnation. A worker that was restarted
    and is called again in the same context therefore never reuses the number of an edge from before the restart; and when gradients arrive for
    such an edge, it knows that its part of the graph is lost. Another principal's context of the same id has other numbers, so that an edge of
    the one is answered in the other as any number is that never was.

Source: PyTorch ``distributed/autograd/context``; ids and leases as in `aiograd.distributed.autograd.context_table`.
"""

from __future__ import annotations

import hashlib
import math
import weakref
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any, Protocol

from aiograd.distributed.autograd.nodes import RecvNode, SendNode
from aiograd.errors import ArgumentTypeError, ContextReleasedError, LimitError
from aiograd.graph.accumulate_grad import AccumulateGrad
from aiograd.graph.boundary import BOUNDARY
from aiograd.graph.node import Node
from aiograd.running.caller import called
from aiograd.tensors.core import TensorCore
from aiograd.transaction import History

#: names one pass: the worker that started it, and its number there
PassId = tuple[str, int]
#: the number of passes of a context with a remembered outcome, to answer other workers and late messages
REMEMBERED = 4096


def pass_name(key: bytes, initiator: str, number: int) -> str:
    """A name of a pass for reports, equal on all workers that take part.

    Args:
        key: of its context.
        initiator, number: its `PassId`.

    Returns:
        The name.
    """
    return f"pass {number & 0xFFFF} of {initiator} (context {key.hex()[:8]})"


class DistributedPassRunner(Protocol):
    """Runs the passes of contexts; see the methods of `Context` and `RecvNode.carry`."""

    def backward(
        self, context: Context, roots: tuple[Any, ...], retain_graph: bool, create_graph: bool, mode: str, timeout: float | None
    ) -> Coroutine[Any, Any, None]:
        """Accumulate into every leaf."""

    def grad(
        self, context: Context, outputs: Any, inputs: Any, grad_outputs: Any, mode: str, timeout: float | None, options: Mapping[str, Any]
    ) -> Coroutine[Any, Any, tuple[Any, ...]]:
        """Return the gradients of some inputs."""

    def carry(self, task: Any) -> Coroutine[Any, Any, bool]:
        """Run a local pass over some inputs, if it has to go through other workers."""

    def run(self, context: Context, request: Any) -> Coroutine[Any, Any, Any]:
        """Run a pass."""


class ContextSlot:
    """A leaf's gradient in one context."""

    __slots__ = ("grad", "leaf")

    def __init__(self, leaf: Any) -> None:
        self.grad: Any = None
        #: the Tensor; a strong reference, so that its gradient can be read as long as the context lives
        self.leaf: Any = leaf


class ContextGradients(Mapping[Any, Any]):
    """Gradients by leaf, on this worker only: ``ctx.grads[parameter]``. The sums of the gradients that backward passes of the context have committed.

    A mapping: ``parameter in ctx.grads``, ``dict(ctx.grads)``. Leaves that no pass has reached are not in it. It can be read after the context
    has been released. A gradient can be replaced by another one of its shape and dtype, as clipping does. The gradients of remote parameters
    stay with their workers: `DistributedOptimizer` uses them there, and an exposed function reads them through `current_context`.

    Args:
        slots: where gradients accumulate, by leaf.

    >>> x = ag.tensor([1.0, 2.0], requires_grad=True)
    >>> async with driver.context() as ctx:
    ...     await ctx.backward((await driver.call("left", "cubed", x)).sum())
    >>> ctx.grads, x in ctx.grads
    (<gradients of 1 leaves>, True)
    """

    __slots__ = ("_slots",)

    def __init__(self, slots: Mapping[AccumulateGrad, ContextSlot]) -> None:
        self._slots = slots

    def __getitem__(self, leaf: Any) -> Any:
        if not isinstance(leaf, TensorCore):
            raise ArgumentTypeError(f"ctx.grads: gradients are found by leaf Tensor, not by {type(leaf).__name__}")
        slot = self._slots.get(leaf._node) if isinstance(leaf._node, AccumulateGrad) else None
        if slot is None or slot.grad is None:
            raise KeyError(f"ctx.grads: no backward pass of this context has reached this Tensor of shape {list(leaf.shape)} on this worker")
        if not BOUNDARY.is_tensor(slot.grad):
            slot.grad = BOUNDARY.wrap(slot.grad)
        return slot.grad

    def __setitem__(self, leaf: Any, grad: Any) -> None:
        have = self[leaf]
        if not isinstance(grad, TensorCore) or grad.shape != have.shape or grad.dtype != have.dtype:
            found = f"{grad.dtype} {list(grad.shape)}" if isinstance(grad, TensorCore) else type(grad).__name__
            raise ArgumentTypeError(f"ctx.grads: a gradient is replaced by one like it, a Tensor of {have.dtype} {list(have.shape)}; found {found}")
        self._slots[leaf._node].grad = grad

    def __contains__(self, leaf: object) -> bool:
        try:
            self[leaf]
        except (KeyError, ArgumentTypeError):
            return False
        return True

    def __iter__(self) -> Iterator[Any]:
        return iter([slot.leaf for slot in self._slots.values() if slot.grad is not None and slot.leaf is not None])

    def __len__(self) -> int:
        return sum(slot.grad is not None and slot.leaf is not None for slot in self._slots.values())

    def __repr__(self) -> str:
        return f"<gradients of {len(self)} leaves>"


class Context:
    """One worker's part of a distributed graph.

    Use it as ``async with worker.context() as ctx``; in an exposed function, `current_context` gives the one of the caller.

    ::

        async with worker.context() as ctx:
            left, right = await asyncio.gather(worker.call("left", "encode", x), worker.call("right", "encode", x))
            await ctx.backward(((left - right) ** 2).sum())
            print(ctx.grads[x])

    Args:
        key: 128 random bits.
        origin: name of the worker that opened it.
        principal: the principal that it belongs to.
        here: name of this worker.
        incarnation: of this worker.
        runner: carries out passes.
        edge_limit: as of `Limits.edges_per_context`.

    Attributes:
        id: text for logs: the worker that opened the context and 128 random bits.
        known_workers: names of the workers to which this one has sent messages of this context.
        send_nodes, recv_nodes: nodes by message id; see `SendNode`, `RecvNode`.
        grads: gradients of this worker's leaves.

    >>> x = ag.tensor([1.0, 2.0], requires_grad=True)
    >>> async with driver.context() as ctx:
    ...     y = await driver.call("left", "cubed", x)
    ...     await ctx.backward(y.sum())
    >>> ctx.grads[x]
    tensor([ 3., 12.])
    """

    __slots__ = (
        "key", "origin", "principal", "here", "known_workers", "send_nodes", "recv_nodes", "grads", "slots", "is_released", "opened_at", "openers",
        "counter", "known_counters", "participants", "history", "calls", "next_pass", "turn", "runner", "had_sends", "is_blind", "_salt",
        "_edges", "_places", "_edge_limit", "__weakref__",
    )  # fmt: skip

    def __init__(
        self, key: bytes, origin: str, principal: str, here: str, incarnation: bytes, runner: DistributedPassRunner, edge_limit: int
    ) -> None:
        self.key: bytes = key
        self.origin: str = origin
        self.principal: str = principal
        #: name of this worker
        self.here: str = here
        self.known_workers: set[str] = set()
        self.send_nodes: dict[int, SendNode] = {}
        self.recv_nodes: dict[int, RecvNode] = {}
        self.slots: dict[AccumulateGrad, ContextSlot] = {}
        self.grads: ContextGradients = ContextGradients(self.slots)
        self.is_released: bool = False
        #: workers that have answered a call of this context, and so have it open
        self.opened_at: set[str] = set()
        #: worker that opened it here (name and incarnation) -> time at which its lease ends; empty if this worker's own code opened it
        self.openers: dict[tuple[str, bytes], float] = {}
        #: the latest sign of life of the worker that opened the context in the first place, and the latest that each opener has passed on
        self.counter: int = 0
        self.known_counters: dict[tuple[str, bytes], int] = {}
        #: passes under way here
        self.participants: dict[PassId, Any] = {}
        #: the outcomes of passes with a part on this worker
        self.history: History[PassId] = History(REMEMBERED)
        #: asyncio tasks that serve calls in this context, as an ordered set
        self.calls: dict[Any, None] = {}
        self.next_pass: int = 0
        #: a lock, so that passes started here run one after the other; made by the first pass
        self.turn: Any = None
        self.runner: DistributedPassRunner = runner
        #: True if a Tensor that requires grad had been sent from here when the context was released
        self.had_sends: bool = False
        #: True if passes started here have to ask other workers what takes part; see Note [Predicted edges] in `discovery`
        self.is_blind: bool = False
        maker = b"\0".join((incarnation, here.encode(), principal.encode()))
        self._salt = int.from_bytes(hashlib.blake2b(maker, key=key, digest_size=4).digest(), "little") >> 1
        self._edges = 0
        self._places: weakref.WeakKeyDictionary[Node, tuple[float, ...]] = weakref.WeakKeyDictionary()
        self._edge_limit = edge_limit

    @property
    def in_doubt(self) -> set[PassId]:
        """Passes with an outcome that this worker could not learn, or a commit that not all workers have acknowledged."""
        return self.history.in_doubt

    @property
    def id(self) -> str:
        """Name of the worker that opened the context, and its key in hexadecimal."""
        return f"{self.origin}:{self.key.hex()}"

    def __repr__(self) -> str:
        state = "released" if self.is_released else f"{len(self.send_nodes)} sent, {len(self.recv_nodes)} received"
        return f"<Context {self.id} on {self.here}: {state}>"

    def backward(
        self, *roots: Any, retain_graph: bool = False, create_graph: bool = False, mode: str = "smart", timeout: float | None = None
    ) -> Coroutine[Any, Any, None]:
        """Differentiate `roots` through every worker that they depend on; gradients accumulate in each worker's `grads`, not in ``.grad``.

        All workers commit together or, if anything fails, none does. Passes of one context that are started on one worker run one after
        the other. Cancelling aborts the pass on every worker before the cancellation is raised, unless the pass has been committed.

        Args:
            roots: Tensors of one element of this worker, recorded in this context.
            retain_graph: keep the graph on every worker for another pass.
            create_graph: record the pass itself on every worker, so that the gradients in `grads` can be differentiated in this context
                (second derivatives through remote calls). Keeps the graph as well.
            mode: ``"smart"`` first finds the edges that the roots depend on, so that unused remote results do no harm. ``"fast"`` saves
                that round trip and waits for a gradient on every edge of the context; if an edge is unused, the pass fails at its deadline.
            timeout: seconds for the whole pass; `Limits.default_deadline` by default.

        Returns:
            A coroutine; nothing runs before it is awaited.

        Raises:
            ArgumentError, NoGraphError, ContextReleasedError: at once. When awaited: exceptions of rules on this worker; `RemoteError` for
            those on other workers; `WorkerLostError`, `DeadlineError`; `CommitUnknown` with ``committed`` True if a worker could not be told.
        """
        return called(self.runner.backward(self, roots, retain_graph, create_graph, mode, timeout), "Context.backward")

    def grad(
        self,
        outputs: Any,
        inputs: Any,
        grad_outputs: Any = None,
        *,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        allow_unused: bool | None = None,
        materialize_grads: bool = False,
        mode: str = "smart",
        timeout: float | None = None,
    ) -> Coroutine[Any, Any, tuple[Any, ...]]:
        """The gradients of `outputs` with respect to `inputs`, through every worker between them; nothing is accumulated anywhere.

        `aiograd.grad` of Tensors that came from other workers does the same, in their context; so do `value_and_grad`, `vjp`, `jvp`,
        `jacobian` and `hessian`. Cancelling stops the pass on every worker before the cancellation is raised.

        Args:
            outputs, inputs: Tensors (or GradientEdges) of this worker, one or a sequence; inputs may be leaves or not.
            grad_outputs: gradient of each output, of its shape; may be None for tensors of one element.
            retain_graph: keep saved values for another pass; by default the value of `create_graph`. Nodes that are not between outputs and
                inputs keep them in any case.
            create_graph: record the pass on every worker, so that the results can be differentiated in this context.
            allow_unused: return None for inputs the outputs do not depend on instead of raising; by default the value of `materialize_grads`.
            materialize_grads: return zeros instead of None.
            mode: ``"smart"`` runs only nodes between outputs and inputs. ``"fast"`` saves the messages that find these and runs all nodes that lead
                to any edge of the context; see `backward`.
            timeout: seconds for the whole pass; `Limits.default_deadline` by default.

        Returns:
            A coroutine that returns a tuple with one Tensor (or None) per input.

        Raises:
            ArgumentError, NoGraphError, ShapeError, ContextReleasedError: at once. When awaited: `UnusedInputError`, and the errors of `backward`
            except `CommitUnknown`, since no worker has anything to commit.
        """
        options = {
            "retain_graph": retain_graph, "create_graph": create_graph, "allow_unused": allow_unused, "materialize_grads": materialize_grads,
        }  # fmt: skip
        return called(self.runner.grad(self, outputs, inputs, grad_outputs, mode, timeout, options), "Context.grad")

    # ---------------------------------------------------------------- edges

    def check_open(self) -> None:
        """Raise if the context has been released.

        Raises:
            ContextReleasedError: it has been.
        """
        if self.is_released:
            raise ContextReleasedError(f"context {self.id} has been released on {self.here}; open another with worker.context()")

    def new_edge(self) -> int:
        """A message id that is unique in this context over all workers; see Note [Message ids].

        Returns:
            The id.

        Raises:
            LimitError: there are too many.
        """
        self._edges += 1
        if self._edges + len(self.recv_nodes) > self._edge_limit:
            raise LimitError(
                f"context {self.id} has {self._edge_limit} edges on {self.here}, which is its limit (Limits.edges_per_context): use several contexts"
            )
        return self._salt << 32 | self._edges

    def has_made(self, edge: int) -> bool:
        """True if a message id was made by this worker since it was started.

        Args:
            edge: the id.

        Returns:
            True or False.
        """
        return edge >> 32 == self._salt

    def add_send(self, tensors: list[Any], peer: str) -> SendNode:
        """Make the SendNode for tensors that are sent to `peer`.

        Args:
            tensors: the Tensors that require grad.
            peer: name of the worker they go to.

        Returns:
            The node.
        """
        node = SendNode(tensors, self.new_edge(), peer)
        self.send_nodes[node.edge] = node
        return node

    def add_recv(self, tensors: list[Any], edge: int, peer: str, sequence: int | None = None, behind: list[int] | None = None) -> RecvNode:
        """Make the RecvNode for tensors that came from `peer`.

        Args:
            tensors: the Tensors that came.
            edge: the message's id.
            peer: name of the worker they came from.
            sequence: its sequence number, where one was reserved.
            behind: the edges that are behind them, where `peer` has said so; see Note [Predicted edges] in `discovery`.

        Returns:
            The node.

        Raises:
            LimitError: there are too many.
        """
        if len(self.recv_nodes) + self._edges >= self._edge_limit:
            raise LimitError(f"context {self.id} has {self._edge_limit} edges on {self.here}, which is its limit (Limits.edges_per_context)")
        node = self.recv_nodes[edge] = RecvNode(self, tensors, edge, peer, sequence)
        node.behind = behind
        self.is_blind = self.is_blind or behind is None
        return node

    # ---------------------------------------------------------------- gradients and places

    def slot(self, node: AccumulateGrad) -> ContextSlot:
        """The slot in which the gradient of a leaf accumulates.

        Args:
            node: the leaf's node.

        Returns:
            The slot, which is made where there is none.
        """
        slot = self.slots.get(node)
        if slot is None:
            slot = self.slots[node] = ContextSlot(node.leaf())
        return slot

    def place_of(self, node: Node) -> tuple[float, ...]:
        """The place of a node; see Note [Places].

        Args:
            node: a node of this worker.

        Returns:
            Numbers that order the nodes of all workers as they were recorded.
        """
        place = self._places.get(node)
        return (-node._seq, math.inf) if place is None else place

    def recorder(self, call: tuple[float, ...]) -> Callable[[Node], None]:
        """A function that stores the places of nodes recorded while the call at place `call` is served.

        Args:
            call: the place of the call.

        Returns:
            The function.
        """
        places = self._places

        def record(node: Node) -> None:
            places[node] = (*call, -node._seq, math.inf)

        return record

    def drop(self) -> None:
        """Drop the graph and the gradients."""
        self.is_released = True
        self.had_sends = bool(self.send_nodes)
        self.send_nodes.clear()
        self.recv_nodes.clear()
        self._places.clear()
        self.history.clear()

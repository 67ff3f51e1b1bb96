"""Context: what one worker keeps of one distributed graph, and the gradients of its backward passes.

The worker that opens a context gives it an id nobody can guess; other workers get to know it with the first call made in it. Each keeps
its own half of every edge between workers and the gradients of its own leaves. Releasing it on the worker that opened it drops it
everywhere.

Note [Places]
    Gradients are summed in the order in which the graph was recorded, and the calls of one context may run on a worker in another order
    than they were made in. So a node recorded while a call is served gets a place made of the place of the call on the caller's side and
    of its own number: places compare as the numbers of one process would, had every call been an ordinary function call. The place of a
    node that the context knows nothing of is its number. Places are negated, since sums go from the node recorded last to the first, and
    end with infinity, so that what a call recorded comes before the call itself.

Source: PyTorch ``distributed/autograd/context``; ids and leases as in `aiograd.distributed.contexts`.
"""

from __future__ import annotations

import hashlib
import math
import weakref
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from aiograd.distributed.nodes import RecvNode, SendNode
from aiograd.errors import ArgumentTypeError, ContextReleasedError, LimitError
from aiograd.graph.accumulate_grad import AccumulateGrad
from aiograd.graph.boundary import BOUNDARY
from aiograd.graph.node import Node
from aiograd.tensors.core import TensorCore

if TYPE_CHECKING:
    from aiograd.distributed.driver.part import Part

#: names one pass: the worker that started it, and its number there
PassId = tuple[str, int]


class Runner(Protocol):
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
        #: the Tensor; kept, so that its gradient can be asked for as long as the context lives
        self.leaf = leaf


class ContextGradients(Mapping[Any, Any]):
    """Gradients by leaf, on this worker only: ``ctx.grads[parameter]``. What backward passes of the context have committed, added up.

    A mapping: ``parameter in ctx.grads``, ``dict(ctx.grads)``. Leaves that no pass has reached are not in it. It can be read after the context
    has been released. A gradient can be replaced by another one of its shape and dtype, as clipping does. The gradients of remote parameters
    stay with their workers: `DistributedOptimizer` uses them there, and an exposed function reads them through `current_context`.
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
    """One distributed graph, as one worker sees it.

    Use it as ``async with worker.context() as ctx``; in an exposed function, `current_context` gives the one of the caller.

    ::

        async with worker.context() as ctx:
            left, right = await asyncio.gather(worker.call("left", "encode", x), worker.call("right", "encode", x))
            await ctx.backward(((left - right) ** 2).sum())
            print(ctx.grads[x])

    Attributes:
        id: for people and logs: the worker that opened it and 128 random bits.
        known_workers: names of the workers that this one has sent messages of this context to.
        send_nodes, recv_nodes: by message id; see `SendNode`, `RecvNode`.
        grads: gradients of this worker's leaves.
    """

    __slots__ = (
        "key", "origin", "principal", "here", "known_workers", "send_nodes", "recv_nodes", "grads", "slots", "is_released", "opened_at", "openers",
        "beat", "beats", "parts", "outcomes", "in_doubt", "calls", "next_pass", "turn", "runner", "had_sends", "_salt", "_edges", "_places",
        "_edge_limit", "__weakref__",
    )  # fmt: skip

    def __init__(
        self, key: bytes, origin: str, principal: str, here: str, runner: Runner, edge_limit: int
    ) -> None:
        self.key = key
        self.origin = origin
        self.principal = principal
        #: name of this worker
        self.here = here
        self.known_workers: set[str] = set()
        self.send_nodes: dict[int, SendNode] = {}
        self.recv_nodes: dict[int, RecvNode] = {}
        self.slots: dict[AccumulateGrad, ContextSlot] = {}
        self.grads = ContextGradients(self.slots)
        self.is_released = False
        #: workers that have answered a call of this context, and so know it
        self.opened_at: set[str] = set()
        #: who opened it here (name and incarnation) -> when its lease ends; empty where it was opened by this worker's own code
        self.openers: dict[tuple[str, bytes], float] = {}
        #: the latest sign of life of the worker that opened the context in the first place, and the latest that each opener has passed on
        self.beat = 0
        self.beats: dict[tuple[str, bytes], int] = {}
        #: passes under way here
        self.parts: dict[PassId, Part] = {}
        #: what became of passes that took part here
        self.outcomes: dict[PassId, str] = {}
        #: passes whose outcome this worker could not learn
        self.in_doubt: set[PassId] = set()
        #: asyncio tasks that serve calls in this context, as an ordered set
        self.calls: dict[Any, None] = {}
        self.next_pass = 0
        #: lets the passes started here run one after the other; made by the driver
        self.turn: Any = None
        self.runner = runner
        #: whether anything that requires grad had been sent from here when it was released
        self.had_sends = False
        self._salt = int.from_bytes(hashlib.blake2b(here.encode(), key=key, digest_size=4).digest(), "little") >> 1 << 32
        self._edges = 0
        self._places: weakref.WeakKeyDictionary[Node, tuple[float, ...]] = weakref.WeakKeyDictionary()
        self._edge_limit = edge_limit

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
        """Differentiate `roots` through every worker that they depend on; gradients go to `grads` of each, and to no ``.grad``.

        All workers commit together or, where anything fails, none does. Passes of one context that are started on one worker run one after
        the other. Cancelling aborts the pass on every worker before the cancellation goes on, unless it had been committed.

        Args:
            roots: Tensors of one element of this worker, recorded in this context.
            retain_graph: keep the graph on every worker for another pass.
            create_graph: record the pass itself on every worker, so that the gradients in `grads` can be differentiated in this context
                (second derivatives through remote calls). Keeps the graph as well.
            mode: ``"smart"`` first finds the edges that the roots depend on, so that unused remote results are no matter. ``"fast"`` saves
                that round trip and waits for a gradient on every edge of the context; where one stays unused it fails at its deadline.
            timeout: seconds for the whole pass; `Limits.default_deadline` by default.

        Raises:
            ArgumentError, NoGraphError, ContextReleasedError: at once. When awaited: what the rules of this worker raise; `RemoteError` where
            those of others do; `WorkerLostError`, `DeadlineError`; `CommitUnknown` with ``committed`` True where a worker could not be told.
        """
        return self.runner.backward(self, roots, retain_graph, create_graph, mode, timeout)

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

        `aiograd.grad` of what came from other workers does the same, in the context in which it came; so do `value_and_grad`, `vjp`, `jvp`,
        `jacobian` and `hessian`. Cancelling stops the pass on every worker before the cancellation goes on.

        Args:
            outputs, inputs: Tensors (or GradientEdges) of this worker, one or a sequence; inputs may be leaves or not.
            grad_outputs: gradient of each output, of its shape; may be None for tensors of one element.
            retain_graph: keep saved values for another pass; by default the value of `create_graph`. What does not lie between outputs and
                inputs keeps them in any case.
            create_graph: record the pass on every worker, so that the results can be differentiated in this context.
            allow_unused: return None for inputs the outputs do not depend on instead of raising; by default the value of `materialize_grads`.
            materialize_grads: return zeros instead of None.
            mode: ``"smart"`` runs only what lies between outputs and inputs. ``"fast"`` asks nobody for that and runs what leads to any edge of
                the context; as of `backward`.
            timeout: seconds for the whole pass; `Limits.default_deadline` by default.

        Returns:
            A coroutine that returns a tuple with one Tensor (or None) per input.

        Raises:
            ArgumentError, NoGraphError, ShapeError, ContextReleasedError: at once. When awaited: `UnusedInputError`, and what `backward` raises,
            but never `CommitUnknown`, since no worker has anything to commit.
        """
        options = {
            "retain_graph": retain_graph, "create_graph": create_graph, "allow_unused": allow_unused, "materialize_grads": materialize_grads,
        }  # fmt: skip
        return self.runner.grad(self, outputs, inputs, grad_outputs, mode, timeout, options)

    # ---------------------------------------------------------------- edges

    def check_open(self) -> None:
        """Raise if the context has been released."""
        if self.is_released:
            raise ContextReleasedError(f"context {self.id} has been released on {self.here}; open another with worker.context()")

    def new_edge(self) -> int:
        """A message id that no other message of this context has, on whichever worker.

        Raises:
            LimitError: there are too many.
        """
        self._edges += 1
        if self._edges + len(self.recv_nodes) > self._edge_limit:
            raise LimitError(
                f"context {self.id} has {self._edge_limit} edges on {self.here}, which is its limit (Limits.edges_per_context): use several contexts"
            )
        return self._salt | self._edges

    def add_send(self, tensors: list[Any], peer: str) -> SendNode:
        """A node for tensors on their way to `peer`."""
        node = SendNode(tensors, self.new_edge(), peer)
        self.send_nodes[node.edge] = node
        return node

    def add_recv(self, tensors: list[Any], edge: int, peer: str, sequence: int | None = None) -> RecvNode:
        """A node for tensors that came from `peer`."""
        if len(self.recv_nodes) + self._edges >= self._edge_limit:
            raise LimitError(f"context {self.id} has {self._edge_limit} edges on {self.here}, which is its limit (Limits.edges_per_context)")
        node = self.recv_nodes[edge] = RecvNode(self, tensors, edge, peer, sequence)
        return node

    # ---------------------------------------------------------------- gradients and places

    def slot(self, node: AccumulateGrad) -> ContextSlot:
        """Where the gradient of a leaf accumulates."""
        slot = self.slots.get(node)
        if slot is None:
            slot = self.slots[node] = ContextSlot(node.leaf())
        return slot

    def place_of(self, node: Node) -> tuple[float, ...]:
        """See Note [Places]."""
        place = self._places.get(node)
        return (-node._seq, math.inf) if place is None else place

    def recorder(self, call: tuple[float, ...]) -> Callable[[Node], None]:
        """What notes the places of nodes recorded while the call at place `call` is served."""
        places = self._places

        def record(node: Node) -> None:
            places[node] = (*call, -node._seq, math.inf)

        return record

    def drop(self) -> None:
        """Let go of the graph and the gradients."""
        self.is_released = True
        self.had_sends = bool(self.send_nodes)
        self.send_nodes.clear()
        self.recv_nodes.clear()
        self._places.clear()
        self.outcomes.clear()

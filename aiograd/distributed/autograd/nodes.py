"""SendNode and RecvNode: the nodes at which a graph leaves one worker and arrives at another.

A message with tensors that require grad puts a SendNode into the sender's graph (its edges lead to those tensors) and a RecvNode into the
receiver's (it is the ``grad_fn`` of the received tensors). In backward gradients go the other way: they arrive at the RecvNode, are sent, and leave
the SendNode of the same edge. Both nodes pass gradients on unchanged; sending and waiting is done by the pass.

Source: PyTorch ``sendrpc_backward.h``, ``recvrpc_backward.h``.
"""

from __future__ import annotations

import weakref
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol

from aiograd.errors import ContextError, ContextReleasedError
from aiograd.graph.node import Node
from aiograd.graph.running import CURRENT
from aiograd.running.types import Array


class Outlet(Protocol):
    """The interface of a worker's part of a distributed pass to its RecvNodes."""

    context: Any

    def send(self, node: RecvNode, grads: Sequence[Array | None]) -> None:
        """Send the gradients to the worker that the node's values came from."""


class SendNode(Node):
    """Tensors of this worker's graph were sent to `peer`; their gradients come back as edge `edge`.

    Args:
        tensors: the sent tensors that require grad, each once, in the order of the message.
        edge: the message's id.
        peer: name of the worker that they go to.

    >>> node = dist.SendNode([ag.ones(2, requires_grad=True)], edge=7, peer="left")
    >>> node.edge, node.peer
    (7, 'left')
    """

    __slots__ = ("edge", "peer", "behind", "edits")

    is_inlet = True

    def __init__(self, tensors: Sequence[Any], edge: int, peer: str) -> None:
        super().__init__([(tensor._node, tensor._nr) for tensor in tensors])
        self.edge: int = edge
        self.peer: str = peer
        #: the edges that `peer` was told to be behind this one, and `EDGE_EDITS` then; see Note [Predicted edges] in `discovery`
        self.behind: list[int] | None = None
        self.edits: int = 0
        for tensor in tensors:
            self.add_input_metadata(tensor.shape, tensor.dtype, tensor.device)

    def apply(self, grads: Sequence[Array | None]) -> Sequence[Array | None]:
        """The gradients as they came.

        Args:
            grads: one for each tensor.

        Returns:
            The same.
        """
        return tuple(grads)


class RecvNode(Node):
    """Tensors came from `peer` as edge `edge`; their gradients go back there.

    Args:
        tensors: the received tensors, each once, in the order of the message; the node becomes their ``grad_fn``.
        sequence: its sequence number, reserved when the request was made, so that the order of recording does not depend on the time of the answer.
        context: the context that the tensors are recorded in.
        edge: the message's id.
        peer: name of the worker that they came from.

    >>> x = ag.tensor([1.0, 2.0], requires_grad=True)
    >>> async with driver.context() as ctx:
    ...     y = await driver.call("left", "cubed", x)
    >>> type(y.grad_fn).__name__, y.grad_fn.peer
    ('RecvNode', 'left')
    """

    __slots__ = ("edge", "peer", "behind", "_context", "_runner")

    is_outlet = True

    def __init__(self, context: Any, tensors: Sequence[Any], edge: int, peer: str, sequence: int | None = None) -> None:
        super().__init__()
        if sequence is not None:
            if self._seq != sequence + 1:
                Node.any_reordered = True  # the received values may depend on values sent meanwhile, with higher numbers
            self._seq = sequence
        self.edge: int = edge
        self.peer: str = peer
        #: edges of this worker to `peer` that are all that is behind this one; None: not known. See Note [Predicted edges] in `discovery`
        self.behind: list[int] | None = None
        self._context = weakref.ref(context)
        self._runner = context.runner
        for tensor in tensors:
            nr = self.add_input_metadata(tensor.shape, tensor.dtype, tensor.device)
            tensor._node, tensor._nr = self, nr

    @property
    def context(self) -> Any:
        """The `Context` in which the values came; None once it is gone."""
        return self._context()

    def carry(self, task: Any) -> Coroutine[Any, Any, bool]:
        """Run a local pass that wants some inputs only, and has met this node, through all workers that may lead to them.

        Args:
            task: the local pass, which has not begun.

        Returns:
            A coroutine that returns True if it ran the pass; False if nothing on other workers leads to the wanted inputs.

        Cancelling the coroutine aborts the pass on every worker.
        """
        carrying: Coroutine[Any, Any, bool] = self._runner.carry(task)
        return carrying

    def apply(self, grads: Sequence[Array | None]) -> tuple[()]:
        """Give the gradients to the pass, which sends them.

        Args:
            grads: one for each tensor.

        Returns:
            Nothing: the node has no edges on this worker.

        Raises:
            ContextReleasedError: the context is gone. ContextError: the pass is a local one, or belongs to another context.
        """
        context = self._context()
        if context is None or context.is_released:
            raise ContextReleasedError(
                f"differentiating values that came from {self.peer}: their autograd context is no longer valid, it has been released. "
                "Run backward inside the `async with worker.context()` block in which the call was made."
            )
        current = CURRENT.get()
        participant: Outlet | None = None if current is None else getattr(current.task.hooks, "participant", None)
        if participant is None or participant.context is not context:
            raise ContextError(
                f"differentiating values that came from {self.peer} in context {context.id}: gradients reach other workers by "
                "`await ctx.backward(loss)` of that context only, not by loss.backward() or another context"
            )
        participant.send(self, grads)
        return ()

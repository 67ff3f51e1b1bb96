"""SendNode and RecvNode: where a graph leaves one worker and arrives at another.

A message with tensors that require grad puts a SendNode into the sender's graph (its edges lead to those tensors) and a RecvNode into the
receiver's (it is the ``grad_fn`` of what arrived). In backward gradients go the other way: they arrive at the RecvNode, travel, and leave
the SendNode of the same edge. Both pass gradients on as they are; whatever else happens to them is the business of the pass.

Source: PyTorch ``sendrpc_backward.h``, ``recvrpc_backward.h``.
"""

from __future__ import annotations

import weakref
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from aiograd.errors import ContextError, ContextReleasedError
from aiograd.graph.node import Node
from aiograd.graph.running import CURRENT
from aiograd.types import Array

if TYPE_CHECKING:
    from aiograd.distributed.context import Context


class Outlet(Protocol):
    """A worker's part of a distributed pass, as far as a RecvNode knows it."""

    context: Context

    def send(self, node: RecvNode, grads: Sequence[Array | None]) -> None:
        """Send the gradients to the worker that the node's values came from."""


class SendNode(Node):
    """Tensors of this worker's graph were sent to `peer`; their gradients come back as edge `edge`.

    Args:
        tensors: what was sent and requires grad, each once, in the order of the message.
    """

    __slots__ = ("edge", "peer")

    is_inlet = True

    def __init__(self, tensors: Sequence[Any], edge: int, peer: str) -> None:
        super().__init__([(tensor._node, tensor._nr) for tensor in tensors])
        self.edge = edge
        self.peer = peer
        for tensor in tensors:
            self.add_input_metadata(tensor.shape, tensor.dtype, tensor.device)

    def apply(self, grads: Sequence[Array | None]) -> Sequence[Array | None]:
        """The gradients as they came."""
        return tuple(grads)


class RecvNode(Node):
    """Tensors came from `peer` as edge `edge`; their gradients go back there.

    Args:
        tensors: what came, each once, in the order of the message; becomes part of the graph.
        sequence: its number, reserved when the request was made: where it belongs in the order of recording, whenever the answer came.
    """

    __slots__ = ("edge", "peer", "_context", "_runner")

    is_outlet = True

    def __init__(self, context: Context, tensors: Sequence[Any], edge: int, peer: str, sequence: int | None = None) -> None:
        super().__init__()
        if sequence is not None:
            if self._seq != sequence + 1:
                Node.any_reordered = True  # what came may depend on what was sent meanwhile, whose numbers are higher
            self._seq = sequence
        self.edge = edge
        self.peer = peer
        self._context = weakref.ref(context)
        self._runner = context.runner
        for tensor in tensors:
            nr = self.add_input_metadata(tensor.shape, tensor.dtype, tensor.device)
            tensor._node, tensor._nr = self, nr

    @property
    def context(self) -> Context | None:
        """The context in which the values came, unless it is gone."""
        return self._context()

    def carry(self, task: Any) -> Coroutine[Any, Any, bool]:
        """Run a local pass that wants some inputs only, and has met this node, through all workers that may lead to them.

        Returns:
            A coroutine; whether it did. If not, nothing elsewhere leads to what the pass wants.
        """
        return self._runner.carry(task)

    def apply(self, grads: Sequence[Array | None]) -> tuple[()]:
        """Hand the gradients to the pass, which sends them.

        Raises:
            ContextReleasedError: the context is gone. ContextError: the pass is a local one, or that of another context.
        """
        context = self._context()
        if context is None or context.is_released:
            raise ContextReleasedError(
                f"differentiating values that came from {self.peer}: their autograd context is no longer valid, it has been released. "
                "Run backward inside the `async with worker.context()` block in which the call was made."
            )
        current = CURRENT.get()
        part: Outlet | None = None if current is None else getattr(current.task, "part", None)
        if part is None or part.context is not context:
            raise ContextError(
                f"differentiating values that came from {self.peer} in context {context.id}: gradients reach other workers by "
                "`await ctx.backward(loss)` of that context only, not by loss.backward() or another context"
            )
        part.send(self, grads)
        return ()

"""TorchGraph: what torch has recorded in one call of a module, and its gradients.

Note [Torch's graph is kept for another node]
    Torch frees a graph bit by bit while it runs, unless it is told to keep it. It is told so where the pass keeps the graph, and where other nodes of
    aiograd need the same nodes of torch: gradients that were recorded lead through the graph from which they were computed. Such graphs know of each
    other, weakly. A node that has been released has dropped its graph, so the last of them frees the shared part. In all other cases the graph is not
    kept, which modules compiled by torch insist on.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from aiograd.errors import GraphFreedError, ModifiedError
from aiograd.interop.extras import from_extra

if TYPE_CHECKING:
    import torch
else:
    torch = from_extra("torch", "torch")


class Watched:
    """A torch tensor over memory with writes that aiograd counts by itself.

    Args:
        counter: aiograd's version counter.
        version: the version when torch got the tensor.
        tensor: the torch tensor.
    """

    __slots__ = ("counter", "version", "tensor")

    def __init__(self, counter: Any, version: int, tensor: Any) -> None:
        self.counter = counter
        self.version = version
        self.tensor = tensor

    def tell(self) -> None:
        """Count writes of aiograd in torch's counter too, by which torch finds out if it had saved the tensor."""
        found = self.counter[0]
        if found != self.version:
            self.version = found
            torch.autograd.graph.increment_version(self.tensor)


class TorchGraph:
    """The torch graph from the inputs and parameters of one call to its outputs.

    Args:
        outputs: the outputs that require grad.
        sources: torch leaves that require grad, one for each edge of the node: inputs, then parameters.
        watched: the inputs that share memory, but no version counter.
    """

    __slots__ = ("outputs", "sources", "watched", "_sharing", "__weakref__")

    def __init__(self, outputs: Sequence[Any], sources: Sequence[Any], watched: Sequence[Watched]) -> None:
        self.outputs = outputs
        self.sources = sources
        self.watched = watched
        #: the graphs that share nodes of torch with this one, itself included, as long as some node of aiograd has them; None: there is no other
        self._sharing: weakref.WeakSet[TorchGraph] | None = None

    @property
    def is_shared(self) -> bool:
        """True if another node needs nodes of torch that belong to this graph. See Note [Torch's graph is kept for another node]."""
        return self._sharing is not None and len(self._sharing) > 1

    def with_sources(self, sources: Sequence[Any]) -> TorchGraph:
        """The graph of this one's gradients, which leads to `sources` through it."""
        other = TorchGraph((), sources, self.watched)
        if self._sharing is None:
            self._sharing = weakref.WeakSet((self,))
        self._sharing.add(other)
        other._sharing = self._sharing
        return other

    def gradients(self, grads: Sequence[Any], wanted: Sequence[int], *, keep: bool, create_graph: bool = False) -> list[Any]:
        """Gradients of some sources.

        Args:
            grads: torch tensors, one for each output, None where no gradient arrived.
            wanted: numbers of the sources.
            keep: True if the pass keeps the graph.
            create_graph: True to record the computation.

        Returns:
            Torch tensors, None where an output does not depend on a source.
        """
        for each in self.watched:
            each.tell()
        outputs = self.outputs
        if any(grad is None for grad in grads):
            given = [i for i, grad in enumerate(grads) if grad is not None]
            outputs, grads = [outputs[i] for i in given], [grads[i] for i in given]
        targets = self.sources if len(wanted) == len(self.sources) else [self.sources[i] for i in wanted]
        return run(outputs, grads, targets, keep=keep or self.is_shared, create_graph=create_graph)


def run(outputs: Sequence[Any], grads: Sequence[Any], targets: Sequence[Any], *, keep: bool, create_graph: bool = False) -> list[Any]:
    """Gradients of `targets` from the gradients of `outputs`; both are torch tensors or gradient edges."""
    if not outputs or not targets:
        return [None] * len(targets)
    try:
        engine = getattr(torch.autograd.graph, "_engine_run_backward", None)
        if engine is None:
            return list(torch.autograd.grad(outputs, targets, grads, retain_graph=keep, create_graph=create_graph, allow_unused=True))
        # what `torch.autograd.grad` does after its checks, which take a third as long as the backward of a small layer
        options = {"allow_unreachable": True, "accumulate_grad": False}
        return list(engine(tuple(outputs), tuple(grads), keep or create_graph, create_graph, tuple(targets), **options))
    except RuntimeError as error:
        raised = _translated(error)
        if raised is None:
            raise
        raise raised from error


def _translated(error: RuntimeError) -> Exception | None:
    """The error of aiograd for an error of torch about its graph; None for any other."""
    text = str(error)
    if "modified by an inplace operation" in text:
        return ModifiedError(
            f"{text.partition('. Hint')[0]}. This is torch's count of writes, aiograd's included: an optimizer of either library has stepped, or a "
            "tensor was modified, between this forward and its backward. Clone it before, or step after all passes."
        )
    if "backward through the graph a second time" in text:
        return GraphFreedError(
            "Trying to backward through the torch graph of a wrapped module a second time: its values have been released. Specify retain_graph=True "
            "in the first backward or grad call, of torch too, or record forward anew."
        )
    return None

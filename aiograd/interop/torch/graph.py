"""TorchGraph: what torch has recorded in one call of a module, and its gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from aiograd.errors import GraphFreedError, ModifiedError
from aiograd.interop.extras import from_extra

if TYPE_CHECKING:
    import torch
else:
    torch = from_extra("torch", "torch")


class Watched:
    """A torch tensor over memory whose writes aiograd counts by itself.

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

    __slots__ = ("outputs", "sources", "watched")

    def __init__(self, outputs: Sequence[Any], sources: Sequence[Any], watched: Sequence[Watched]) -> None:
        self.outputs = outputs
        self.sources = sources
        self.watched = watched

    def gradients(
        self, grads: Sequence[Any], wanted: Sequence[int], *, keep: bool, create_graph: bool = False, also: Sequence[Any] = ()
    ) -> list[Any]:
        """Gradients of some sources, and of other places in the graph.

        Args:
            grads: torch tensors, one for each output, None where no gradient arrived.
            wanted: numbers of the sources.
            keep: True if the graph is needed again.
            create_graph: True to record the computation.
            also: gradient edges of torch.

        Returns:
            Torch tensors, None where an output does not depend on a source.
        """
        for each in self.watched:
            each.tell()
        given = [(output, grad) for output, grad in zip(self.outputs, grads, strict=True) if grad is not None]
        targets = [*[self.sources[i] for i in wanted], *also]
        return run(given, targets, keep=keep, create_graph=create_graph)


def run(given: Sequence[tuple[Any, Any]], targets: Sequence[Any], *, keep: bool, create_graph: bool = False) -> list[Any]:
    """Gradients of `targets` (torch tensors or gradient edges), from pairs of output and gradient."""
    if not given or not targets:
        return [None] * len(targets)
    outputs, grads = zip(*given, strict=True)
    try:
        return list(torch.autograd.grad(outputs, targets, grads, retain_graph=keep, create_graph=create_graph, allow_unused=True))
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

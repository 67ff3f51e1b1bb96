"""The backward of a torch graph in two halves: gradients of inputs first, of parameters later, with no product of matrices made twice.

Note [How torch's graph is divided]
    As aiograd divides its own (`aiograd.engine.split_backward`). Call *upper* the torch nodes from which an input can be reached, and *lower* the
    others that lead to a parameter. The first half runs upper nodes only, for the inputs. An upper node with edges to lower ones is a *start*: the
    gradients that arrive there are kept, and the second half calls it again for these edges alone, so that nothing flows to the inputs. Its
    results go to lower nodes in one pass of torch's engine, which adds up as it would have in an undivided pass.

Note [Hooks run once]
    Torch's engine calls the hooks of a tensor where it ends a pass or begins one. So the two halves meet where it does neither: a prehook, which
    comes after all others, keeps the gradients that a start is given, and the second half calls the start without the engine. That is done inside
    of a pass of its own (`_within`) with the edges that are left as targets, since a node asks the running pass which of its gradients are wanted.

Note [Work of the first half]
    A start that makes all its gradients at once would do the work twice. The parameters that it leads to, and the ones that share a lower node with
    one of them, get their gradients in the first half. So do all where a part of the graph was compiled by torch: such a part runs once, and gives
    its memory away as it does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from aiograd.interop.extras import from_extra
from aiograd.interop.torch.graph import TorchGraph, run

if TYPE_CHECKING:
    import torch
else:
    torch = from_extra("torch", "torch")


class TorchStart(NamedTuple):
    """A node that runs in both halves."""

    node: Any
    #: numbers of the edges that are left to the second half
    left: tuple[int, ...]
    #: the gradients that arrived at its inputs in the first
    grads: tuple[Any, ...]


class WeightHalf:
    """The second half: the rest.

    Args:
        graph: the graph of the call.
        starts: the nodes from which it starts.
        roots: edges of outputs that no input reaches, and the gradients that came for them.
        early: by their numbers, the gradients of sources that the first half has made.
    """

    __slots__ = ("graph", "starts", "roots", "early")

    def __init__(self, graph: TorchGraph, starts: Sequence[TorchStart], roots: Sequence[tuple[Any, Any]], early: dict[int, Any]) -> None:
        self.graph = graph
        self.starts = starts
        self.roots = roots
        self.early = early

    @classmethod
    def divide(
        cls, graph: TorchGraph, grads: Sequence[Any], wanted: Sequence[int], left: Sequence[int], *, keep: bool
    ) -> tuple[list[Any], WeightHalf]:
        """Run the first half.

        Args:
            graph: the graph of the call.
            grads: torch tensors, one for each output, None where no gradient arrived.
            wanted: numbers of the sources with gradients that are wanted now.
            left: numbers of the sources left to the second half.
            keep: True if the graph is needed again when both halves have run.

        Returns:
            The gradients that are wanted now, and the second half.
        """
        cut = _Cut(graph, grads, wanted, left)
        early = [i for i in left if i in cut.early]
        given: dict[Any, tuple[Any, ...]] = {}
        handles = [node.register_prehook(functools.partial(_keep, given, node)) for node in cut.starts]
        try:
            results = graph.gradients(grads, [*wanted, *early], keep=keep or len(early) < len(left))
        finally:
            for handle in handles:
                handle.remove()
        starts = [TorchStart(node, numbers, given[node]) for node, numbers in cut.starts.items() if node in given]
        return results[: len(wanted)], cls(graph, starts, cut.roots, dict(zip(early, results[len(wanted) :], strict=True)))

    @property
    def tensors(self) -> list[Any]:
        """The torch tensors that it keeps (None among them)."""
        return [*[grad for start in self.starts for grad in start.grads], *self.early.values()]

    def run(self, wanted: Sequence[int], *, keep: bool) -> list[Any]:
        """Run the second half.

        Args:
            wanted: numbers of the sources with wanted gradients.
            keep: True if the graph is needed again.

        Returns:
            Their gradients, None for a source without one.
        """
        found = dict(self.early)
        late = [i for i in wanted if i not in found]
        if late:
            for each in self.graph.watched:
                each.tell()
            edges, grads = _unzipped([*self.roots, *self._of_starts()])
            found.update(zip(late, run(edges, grads, [self.graph.sources[i] for i in late], keep=keep or self.graph.is_shared), strict=True))
        return [found[i] for i in wanted]

    def _of_starts(self) -> list[tuple[Any, Any]]:
        """The edges that are left of the starts, each with its gradient. See Note [Hooks run once]."""
        found: list[tuple[Any, Any]] = []

        def call() -> None:
            for node, left, grads in self.starts:
                outputs = node(*grads)
                outputs = outputs if isinstance(outputs, tuple) else (outputs,)
                found.extend([(_edge(*node.next_functions[i]), outputs[i]) for i in left if outputs[i] is not None])

        ends = dict.fromkeys(start.node.next_functions[i] for start in self.starts for i in start.left)
        if ends:
            with torch.inference_mode(False):
                anchor = torch.empty(0, requires_grad=True)
                within = _within().apply(call, anchor)
            run([within], [anchor.detach()], [anchor, *[_edge(*end) for end in ends]], keep=True)
        return found


class _Cut:
    """Where a torch graph is divided: one look at its nodes."""

    def __init__(self, graph: TorchGraph, grads: Sequence[Any], wanted: Sequence[int], left: Sequence[int]) -> None:
        edge_of = torch.autograd.graph.get_gradient_edge
        roots = [(edge_of(out), grad) for out, grad in zip(graph.outputs, grads, strict=True) if grad is not None]
        parents: dict[Any, list[Any]] = {}
        children: dict[Any, list[Any]] = {}
        stack = [edge.node for edge, _ in roots]
        while stack:
            node = stack.pop()
            if node not in children:
                children[node] = [child for child, _ in node.next_functions if child is not None]
                for child in children[node]:
                    parents.setdefault(child, []).append(node)
                stack += children[node]
        weights = {i: edge_of(graph.sources[i]).node for i in left}
        upper = _reached([edge_of(graph.sources[i]).node for i in wanted], parents)
        lower = {node for node in _reached(weights.values(), parents) if node not in upper}
        neighbours = {node: [each for each in (*parents.get(node, ()), *children.get(node, ())) if each in lower] for node in lower}
        at_once = [child for node in upper if _is_undivided(node) for child in children.get(node, ()) if child in lower]
        early = _reached(lower if any(map(_is_compiled, children)) else at_once, neighbours)
        #: numbers of the sources that are not left to the second half
        self.early = {i for i, node in weights.items() if node in early}
        late = lower.difference(early)
        #: the nodes from which the second half starts, and the numbers of the edges that each leaves to it
        self.starts: dict[Any, tuple[int, ...]] = {}
        for node in upper:
            numbers = tuple([i for i, (child, _) in enumerate(node.next_functions) if child in late]) if node in children else ()
            if numbers:
                self.starts[node] = numbers
        #: outputs that no input reaches: they begin in the second half
        self.roots = [(edge, grad) for edge, grad in roots if edge.node in late]


def _reached(nodes: Iterable[Any], neighbours: dict[Any, list[Any]]) -> dict[Any, None]:
    """The nodes to which a way leads from one of `nodes`, these included."""
    found: dict[Any, None] = {}
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in found:
            found[node] = None
            stack += neighbours.get(node, ())
    return found


def _unzipped(pairs: Sequence[tuple[Any, Any]]) -> tuple[list[Any], list[Any]]:
    return [first for first, _ in pairs], [second for _, second in pairs]


def _edge(node: Any, nr: int) -> Any:
    return torch.autograd.graph.GradientEdge(node, nr)


def _keep(given: dict[Any, tuple[Any, ...]], node: Any, grads: tuple[Any, ...]) -> None:
    """A prehook that changes nothing."""
    given[node] = grads


def _is_undivided(node: Any) -> bool:
    """True for a node that makes all its gradients at once: a function in Python, and recurrent layers of other libraries."""
    return isinstance(node, torch.autograd.function.BackwardCFunction) or "Rnn" in node.name()


def _is_compiled(node: Any) -> bool:
    """True for a part of the graph that torch has compiled."""
    return bool(node.name() == "CompiledFunctionBackward")


@functools.cache
def _within() -> Any:
    """The class of the node that calls a function in its backward, which so runs inside of a pass of torch."""

    class Within(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, call: Callable[[], None], anchor: Any) -> Any:
            ctx.call = call
            return anchor.clone()

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            ctx.call()
            return None, grad

    return Within

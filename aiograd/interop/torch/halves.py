"""The backward of a torch graph in two halves: gradients of inputs first, those of parameters later, with no product of matrices made twice.

Note [How torch's graph is divided]
    As aiograd divides its own (`aiograd.engine.split_backward`). Call *upper* the torch nodes from which an input can be reached. The first half runs
    upper nodes only, for the inputs. An upper node with edges that lead out of this region and on to a parameter is a *start*: the gradients that
    arrive there are kept, and the second half runs it again for these edges alone, one start at a time, so that nothing flows to the inputs. From
    where those edges lead, the *ends*, everything below is one pass of torch's engine, which adds up as it would have in an undivided pass.

Note [Starts that are not run twice]
    An end that several starts lead to gets a sum, and a start that makes all its gradients at once would do the work twice: there the first half
    computes the gradient of the end. Where that is not to be had alone, the first half does all of the work. The gradients are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from aiograd.interop.extras import from_extra
from aiograd.interop.torch.graph import TorchGraph, run

if TYPE_CHECKING:
    import torch
else:
    torch = from_extra("torch", "torch")


class WeightHalf:
    """The second half: what the first has left.

    Args:
        graph: the graph of the call.
        starts: for each start its input edges, the gradients that arrived there, and the edges to its ends.
        ends: edges of ends, and their gradients, that are known already.
    """

    __slots__ = ("graph", "starts", "ends")

    def __init__(
        self, graph: TorchGraph, starts: Sequence[tuple[Sequence[Any], Sequence[Any], Sequence[Any]]], ends: Sequence[tuple[Any, Any]]
    ) -> None:
        self.graph = graph
        self.starts = starts
        self.ends = ends

    @classmethod
    def divide(cls, graph: TorchGraph, grads: Sequence[Any], wanted: Sequence[int], left: Sequence[int]) -> tuple[list[Any], WeightHalf]:
        """Run the first half.

        Args:
            graph: the graph of the call.
            grads: torch tensors, one for each output, None where no gradient arrived.
            wanted: numbers of the sources whose gradients are wanted now.
            left: numbers of those that are left to the second half.

        Returns:
            The gradients that are wanted now, and the second half.
        """
        cut = _Cut(graph, grads, wanted, left)
        if cut.is_tangled:
            results = graph.gradients(grads, [*wanted, *left], keep=True)
            edges = [torch.autograd.graph.get_gradient_edge(graph.sources[i]) for i in left]
            done = [(edge, grad) for edge, grad in zip(edges, results[len(wanted) :], strict=True) if grad is not None]
            return results[: len(wanted)], cls(graph, [], done)
        arriving = [edge for edges, _ in cut.starts for edge in edges]
        results = graph.gradients(grads, wanted, keep=True, also=[*arriving, *cut.sums])
        found = iter(results[len(wanted) :])
        starts = [(edges, [next(found) for _ in edges], ends) for edges, ends in cut.starts]
        known = [(edge, grad) for edge in cut.sums if (grad := next(found)) is not None]
        return results[: len(wanted)], cls(graph, starts, [*cut.roots, *known])

    def run(self, wanted: Sequence[int], *, keep: bool) -> list[Any]:
        """Run the second half.

        Args:
            wanted: numbers of the sources whose gradients are wanted.
            keep: True if the graph is needed again.

        Returns:
            Their gradients, None for a source without one.
        """
        for each in self.graph.watched:
            each.tell()
        given = [*self.ends]
        for edges, grads, ends in self.starts:
            arrived = [(edge, grad) for edge, grad in zip(edges, grads, strict=True) if grad is not None]
            results = run(*_unzipped(arrived), ends, keep=True)
            given += [(end, grad) for end, grad in zip(ends, results, strict=True) if grad is not None]
        return run(*_unzipped(given), [self.graph.sources[i] for i in wanted], keep=keep)


class _Cut:
    """Where a torch graph is divided: one look at its nodes."""

    def __init__(self, graph: TorchGraph, grads: Sequence[Any], wanted: Sequence[int], left: Sequence[int]) -> None:
        roots = [(torch.autograd.graph.get_gradient_edge(out), grad) for out, grad in zip(graph.outputs, grads, strict=True) if grad is not None]
        #: node -> its parents, each with the number of the input at which the parent's gradient arrives
        parents: dict[Any, list[tuple[Any, int]]] = {}
        children: dict[Any, list[tuple[Any, int]]] = {}
        stack = [edge.node for edge, _ in roots]
        while stack:
            node = stack.pop()
            if node in children:
                continue
            children[node] = [(child, nr) for child, nr in node.next_functions if child is not None]
            for child, nr in children[node]:
                parents.setdefault(child, []).append((node, nr))
                stack.append(child)
        targets = [torch.autograd.graph.get_gradient_edge(graph.sources[i]).node for i in wanted]
        weights = [torch.autograd.graph.get_gradient_edge(graph.sources[i]).node for i in left]
        upper, leads = _above(targets, parents), _above(weights, parents)
        ends: dict[Any, set[Any]] = {}
        for node in upper:
            for child, _ in children.get(node, ()):
                if child in leads and child not in upper:
                    ends.setdefault(child, set()).add(node)
        #: edges of ends whose gradients the first half computes
        self.sums: list[Any] = []
        shared = {end for end, starts in ends.items() if len(starts) > 1 or any(_is_undivided(start) for start in starts)}
        inputs: dict[Any, set[int]] = {}
        for edge, _ in roots:
            inputs.setdefault(edge.node, set()).add(edge.output_nr)
        for node, found in parents.items():
            inputs.setdefault(node, set()).update(nr for _, nr in found)
        edges_of = {node: [_edge(node, nr) for nr in sorted(numbers)] for node, numbers in inputs.items()}
        for end in shared:
            self.sums += edges_of[end]
        #: True if something else leads to such an end: its gradient would be made of what each half has
        self.is_tangled = any(parent not in upper for end in shared for parent, _ in parents[end])
        #: for each start its input edges and the edges to its ends
        self.starts: list[tuple[list[Any], list[Any]]] = []
        by_start: dict[Any, list[Any]] = {}
        for end, starts in ends.items():
            if end not in shared:
                (start,) = starts
                by_start.setdefault(start, []).append(end)
        for start, own in by_start.items():
            self.starts.append((edges_of[start], [edge for end in own for edge in edges_of[end]]))
        #: outputs that no input reaches: they begin in the second half
        self.roots = [(edge, grad) for edge, grad in roots if edge.node in leads and edge.node not in upper]


def _above(nodes: Sequence[Any], parents: dict[Any, list[tuple[Any, int]]]) -> dict[Any, None]:
    """The nodes from which one of `nodes` can be reached, these included."""
    found: dict[Any, None] = {}
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in found:
            found[node] = None
            stack += [parent for parent, _ in parents.get(node, ())]
    return found


def _unzipped(pairs: Sequence[tuple[Any, Any]]) -> tuple[list[Any], list[Any]]:
    return [first for first, _ in pairs], [second for _, second in pairs]


def _edge(node: Any, nr: int) -> Any:
    return torch.autograd.graph.GradientEdge(node, nr)


def _is_undivided(node: Any) -> bool:
    """True for a node that makes all its gradients at once: a function in Python, and recurrent layers of other libraries."""
    return isinstance(node, torch.autograd.function.BackwardCFunction) or "Rnn" in node.name()

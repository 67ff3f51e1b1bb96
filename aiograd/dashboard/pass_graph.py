"""PassGraphs: the graphs of the last backward passes of one process, as they ran; and one graph of a pass across workers, laid out for the page."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from time import perf_counter_ns
from typing import Any, NamedTuple

from aiograd.graph.node import Node
from aiograd.viz.layout import lay_out

#: nodes of a pass that are noted, and passes that are kept
MOST_NODES, MOST_PASSES = 400, 8
#: nodes above which those of one name are drawn as one
MOST_BOXES = 60
#: width of a letter and height of a box, padding within one and around a worker, in pixels
LETTER, TALL, PAD, MARGIN = 6.8, 40.0, 12.0, 26.0


class RanNode(NamedTuple):
    """A node whose rule ran."""

    key: int
    name: str
    nanoseconds: int
    nbytes: int
    #: keys of the nodes that its gradients go to
    next: tuple[int, ...]
    #: of a node where the graph crosses to another worker: the message and that worker; else 0 and ""
    edge: int
    peer: str
    is_outlet: bool


class PassGraphs:
    """The nodes of the last passes that were recorded, by the number of the pass."""

    def __init__(self) -> None:
        self._running: OrderedDict[int, dict[int, RanNode]] = OrderedDict()
        self._ended: OrderedDict[int, dict[int, RanNode]] = OrderedDict()

    def ran(self, task: Any, node: Node, began: int) -> None:
        """A node's rule ran from `began` until now."""
        nodes = self._running.get(task.id)
        if nodes is None:
            nodes = self._running[task.id] = {}
            while len(self._running) > MOST_PASSES:  # of passes that were not recorded to their end
                with contextlib.suppress(KeyError):
                    self._running.popitem(last=False)
        if len(nodes) >= MOST_NODES:
            return
        metadata = [each for each in node.input_metadata if each is not None]
        nbytes = sum(_size(each.shape) * each.dtype.itemsize for each in metadata)
        key = id(node)
        nodes[key] = RanNode(
            key, node.name, perf_counter_ns() - began, nbytes, tuple(id(target) for target in node.next_nodes if target is not None),
            getattr(node, "edge", 0), getattr(node, "peer", ""), bool(getattr(node, "is_outlet", False)),
        )  # fmt: skip

    def ended(self, task: Any) -> None:
        """A pass is over."""
        nodes = self._running.pop(task.id, None)
        if nodes:
            self._ended[task.id] = nodes
            while len(self._ended) > MOST_PASSES:
                with contextlib.suppress(KeyError):
                    self._ended.popitem(last=False)

    def rows(self) -> list[list[list[Any]]]:
        """The passes that are over, oldest first, each as rows for JSON."""
        return [[[*node[:4], list(node.next), *node[5:]] for node in nodes.values()] for nodes in list(self._ended.values())]


def read_rows(rows: Any) -> list[dict[int, RanNode]]:
    """The passes in a report of a worker; those that are malformed are left out."""
    passes: list[dict[int, RanNode]] = []
    for nodes in rows[-MOST_PASSES:] if isinstance(rows, list) else ():
        found: dict[int, RanNode] = {}
        for row in nodes[:MOST_NODES] if isinstance(nodes, list) else ():
            match row:
                case [int(key), str(name), int(ns), int(nbytes), list(targets), int(edge), str(peer), bool(is_outlet)]:
                    following = tuple(each for each in targets[:64] if isinstance(each, int))
                    found[key] = RanNode(key, name[:80], ns, nbytes, following, edge, peer[:128], is_outlet)
        if found:
            passes.append(found)
    return passes


def last_pass(here: str, passes: Mapping[str, Sequence[Mapping[int, RanNode]]]) -> dict[str, Mapping[int, RanNode]]:
    """The last pass of a worker together with the parts of other workers that its messages lead to, by worker."""
    start = next((nodes for nodes in reversed(passes.get(here, ())) if any(node.edge for node in nodes.values())), None)
    if start is None:
        worker = here if passes.get(here) else next((name for name in sorted(passes) if passes[name]), None)
        return {} if worker is None else {worker: passes[worker][-1]}
    found: dict[str, Mapping[int, RanNode]] = {here: start}
    waiting = [here]
    while waiting:
        worker = waiting.pop()
        for node in found[worker].values():
            if not node.is_outlet or node.peer in found:
                continue
            for nodes in reversed(passes.get(node.peer, ())):
                if any(other.edge == node.edge and other.peer == worker and not other.is_outlet for other in nodes.values()):
                    found[node.peer] = nodes
                    waiting.append(node.peer)
                    break
    return found


def picture(parts: Mapping[str, Mapping[int, RanNode]]) -> dict[str, Any]:
    """A pass, laid out: boxes, arrows and the frame of each worker, in pixels, for JSON. Workers stand beside each other."""
    total = sum(map(len, parts.values()))
    boxes: list[dict[str, Any]] = []
    arrows: list[dict[str, Any]] = []
    frames: list[dict[str, Any]] = []
    inlets: dict[tuple[str, int], int] = {}
    outlets: list[tuple[int, str, int, int]] = []
    x = 0.0
    tallest = 0.0
    for worker, nodes in parts.items():
        first = len(boxes)
        groups = _grouped(nodes, total > MOST_BOXES)
        numbers = {key: i for i, group in enumerate(groups) for key in group}
        joined: dict[tuple[int, int], int] = {}
        for node in nodes.values():
            for target in node.next:
                if target in numbers and numbers[target] != numbers[node.key]:
                    pair = numbers[node.key], numbers[target]
                    joined[pair] = joined.get(pair, 0) + nodes[target].nbytes
        pairs = _acyclic(joined)
        labels = [_label([nodes[key] for key in group]) for group in groups]
        sizes = [(len(label) * LETTER + 2 * PAD, TALL) for label in labels]
        layout = lay_out(sizes, pairs, [1.0] * len(pairs))
        width = max(layout.width, len(worker) * LETTER * 1.2)
        for group, label, size, centre in zip(groups, labels, sizes, layout.centres, strict=True):
            members = [nodes[key] for key in group]
            boxes.append({
                "worker": worker, "name": label, "x": round(x + MARGIN + centre[0], 1), "y": round(2 * MARGIN + centre[1], 1),
                "w": round(size[0], 1), "h": size[1], "us": round(sum(node.nanoseconds for node in members) / 1e3, 1),
                "bytes": sum(node.nbytes for node in members),
            })  # fmt: skip
            for node in members:
                if node.edge and node.is_outlet:
                    outlets.append((len(boxes) - 1, node.peer, node.edge, node.nbytes))
                elif node.edge:
                    inlets[worker, node.edge] = len(boxes) - 1
        for (source, target), way in zip(pairs, layout.ways, strict=True):
            points = [[round(x + MARGIN + px, 1), round(2 * MARGIN + py, 1)] for px, py in way]
            arrows.append({"from": first + source, "to": first + target, "bytes": joined[source, target], "crosses": False, "points": points})
        frames.append({"worker": worker, "x": round(x, 1), "w": round(width + 2 * MARGIN, 1), "h": round(layout.height + 3 * MARGIN, 1)})
        tallest = max(tallest, layout.height + 3 * MARGIN)
        x += width + 3 * MARGIN
    crossing: dict[tuple[int, int], int] = {}
    for box, peer, edge, nbytes in outlets:
        target_box = inlets.get((peer, edge))
        if target_box is not None:
            crossing[box, target_box] = crossing.get((box, target_box), 0) + nbytes
    arrows += [{"from": source, "to": target, "bytes": nbytes, "crosses": True, "points": []} for (source, target), nbytes in crossing.items()]
    return {"boxes": boxes, "arrows": arrows, "frames": frames, "width": round(max(x - MARGIN, 0.0), 1), "height": round(tallest, 1), "nodes": total}


def _grouped(nodes: Mapping[int, RanNode], by_name: bool) -> list[list[int]]:
    if not by_name:
        return [[key] for key in nodes]
    groups: dict[tuple[str, str], list[int]] = {}
    for key, node in nodes.items():
        groups.setdefault((node.name, node.peer), []).append(key)
    return list(groups.values())


def _acyclic(joined: Mapping[tuple[int, int], int]) -> list[tuple[int, int]]:
    """The arrows without those that close a circle, which grouping by name may make."""
    after: dict[int, set[int]] = {}
    kept: list[tuple[int, int]] = []
    for source, target in joined:
        stack, seen = [target], {target}
        while stack:
            for following in after.get(stack.pop(), ()):
                if following not in seen:
                    seen.add(following)
                    stack.append(following)
        if source not in seen:
            after.setdefault(source, set()).add(target)
            kept.append((source, target))
    return kept


def _label(members: Sequence[RanNode]) -> str:
    node = members[0]
    name = node.name.removesuffix("Backward")
    if node.edge:
        name = f"{'to' if node.is_outlet else 'from'} {node.peer}"
    return name if len(members) == 1 else f"{name} ×{len(members)}"


def _size(shape: Sequence[int]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size

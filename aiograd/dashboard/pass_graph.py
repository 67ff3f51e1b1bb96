"""PassGraphs: the graphs of the last backward passes of one process, as they ran; and one graph of a pass across workers, laid out for the page."""

from __future__ import annotations

import contextlib
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping, Sequence
from time import perf_counter_ns
from typing import Any, NamedTuple

from aiograd.graph.node import Node
from aiograd.viz.layout import lay_out

#: nodes of a pass that are noted, passes that are kept, and nodes of all of them; a pass of many workers is whole while all of them keep it
MOST_NODES, MOST_PASSES, ALL_NODES = 400, 64, 3200
#: nodes above which all nodes of one name are drawn as one
MOST_BOXES = 60
#: width of a letter and height of a box, padding within one and around a worker, in pixels; letters of the time below a name
LETTER, TALL, PAD, MARGIN = 6.8, 40.0, 12.0, 26.0
TIME_LETTERS = 7
#: leaves stand aside, so that operations that follow each other stand in a line
LEAF_PULL = 0.01


class RanNode(NamedTuple):
    """A node that ran."""

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


class PassPart(NamedTuple):
    """The part of a pass on one worker: its nodes by their keys, and how many more there were than are noted."""

    nodes: Mapping[int, RanNode]
    left_out: int


class FoundPass(NamedTuple):
    """A pass by its parts, and the workers that its messages lead to without their parts being known."""

    parts: dict[str, PassPart]
    missing: set[str]


class PassGraphs:
    """The nodes of the last passes that were recorded, by the number of the pass. One that began while recorded is noted to its end."""

    def __init__(self) -> None:
        self._running: OrderedDict[int, dict[int, RanNode]] = OrderedDict()
        self._left_out: Counter[int] = Counter()
        self._ended: deque[PassPart] = deque()

    def ran(self, task: Any, node: Node, began: int) -> None:
        """A node's rule ran from `began` until now."""
        nodes = self._running.get(task.id)
        if nodes is None:
            nodes = self._running[task.id] = {}
            while len(self._running) > MOST_PASSES:  # of passes that were not recorded to their end
                with contextlib.suppress(KeyError):
                    self._left_out.pop(self._running.popitem(last=False)[0], None)
        if len(nodes) >= MOST_NODES:
            self._left_out[task.id] += 1
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
        nodes, left_out = self._running.pop(task.id, None), self._left_out.pop(task.id, 0)
        if nodes:
            self._ended.append(PassPart(nodes, left_out))
            while len(self._ended) > MOST_PASSES or sum(len(part.nodes) for part in list(self._ended)) > ALL_NODES:
                with contextlib.suppress(IndexError):  # another thread was first
                    self._ended.popleft()

    def rows(self) -> list[list[Any]]:
        """The passes that are over, oldest first, each as the number of nodes that are left out and rows of the others, for JSON."""
        return [[part.left_out, [[*node[:4], list(node.next), *node[5:]] for node in part.nodes.values()]] for part in list(self._ended)]


def read_rows(rows: Any) -> list[PassPart]:
    """The passes in a report of a worker, without the malformed ones."""
    passes: list[PassPart] = []
    for entry in rows[-MOST_PASSES:] if isinstance(rows, list) else ():
        found: dict[int, RanNode] = {}
        match entry:
            case [int(left_out), list(nodes)]:
                pass
            case _:
                continue
        for row in nodes[:MOST_NODES]:
            match row:
                case [int(key), str(name), int(ns), int(nbytes), list(targets), int(edge), str(peer), bool(is_outlet)]:
                    following = tuple(each for each in targets[:64] if isinstance(each, int))
                    found[key] = RanNode(key, name[:80], ns, nbytes, following, edge, peer[:128], is_outlet)
        if found:
            passes.append(PassPart(found, max(0, left_out)))
    return passes


def last_pass(here: str, passes: Mapping[str, Sequence[PassPart]]) -> FoundPass:
    """The last pass of a worker that is whole, with the parts of the workers that its messages lead to; where none is, the last one.

    Passes without messages are looked at only if there are no others.
    """
    latest: FoundPass | None = None
    for start in reversed(passes.get(here, ())):
        if any(node.edge for node in start.nodes.values()):
            found = _followed(here, start, passes)
            if not found.missing:
                return found
            latest = latest or found
    if latest is not None:
        return latest
    worker = here if passes.get(here) else next((name for name in sorted(passes) if passes[name]), None)
    return FoundPass({} if worker is None else {worker: passes[worker][-1]}, set())


def _followed(here: str, start: PassPart, passes: Mapping[str, Sequence[PassPart]]) -> FoundPass:
    """A pass from its part on one worker to all others."""
    found = {here: start}
    waiting = [here]
    while waiting:
        worker = waiting.pop()
        for node in found[worker].nodes.values():
            if not node.is_outlet or node.peer in found:
                continue
            for part in reversed(passes.get(node.peer, ())):
                if any(other.edge == node.edge and other.peer == worker and not other.is_outlet for other in part.nodes.values()):
                    found[node.peer] = part
                    waiting.append(node.peer)
                    break
    return FoundPass(found, {node.peer for part in found.values() for node in part.nodes.values() if node.edge} - found.keys())


def picture(parts: Mapping[str, PassPart]) -> dict[str, Any]:
    """A pass, laid out: boxes, arrows and the frame of each worker, in pixels, for JSON. Workers stand beside each other."""
    total = sum(len(part.nodes) for part in parts.values())
    boxes: list[dict[str, Any]] = []
    arrows: list[dict[str, Any]] = []
    frames: list[dict[str, Any]] = []
    inlets: dict[tuple[str, int], int] = {}
    outlets: list[tuple[int, str, int, int]] = []
    x = 0.0
    tallest = 0.0
    for worker, (nodes, _) in parts.items():
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
        sizes = [(max(len(label), TIME_LETTERS) * LETTER + 2 * PAD, TALL) for label in labels]
        inner = {source for source, _ in pairs}
        layout = lay_out(sizes, pairs, [1.0 if target in inner else LEAF_PULL for _, target in pairs])
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
    return {
        "boxes": boxes, "arrows": arrows, "frames": frames, "width": round(max(x - MARGIN, 0.0), 1), "height": round(tallest, 1), "nodes": total,
        "left_out": sum(part.left_out for part in parts.values()),
    }  # fmt: skip


def _grouped(nodes: Mapping[int, RanNode], by_name: bool) -> list[list[int]]:
    if not by_name:
        return [[key] for key in nodes]
    groups: dict[tuple[str, str], list[int]] = {}
    for key, node in nodes.items():
        groups.setdefault((node.name, node.peer), []).append(key)
    return list(groups.values())


def _acyclic(joined: Mapping[tuple[int, int], int]) -> list[tuple[int, int]]:
    """The arrows without the ones that close a circle, which grouping by name may make."""
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

"""Where to put boxes that arrows join: a layered layout, in numbers only.

Note [Four steps]
    Longest paths give every box its layer. Arrows that pass a layer get a point of their own in it, so that they take up room like boxes.
    Sweeps up and down order each layer by the mean position of the neighbours, which removes most crossings; the best order seen is kept.
    Then sweeps draw every box towards its neighbours as far as its layer's order and the gaps allow. The points of one arrow are drawn
    to their common mean, and in the end moved into as few straight lines as the boxes on both sides permit.

Note [One layer at a time, exactly]
    "As near as possible to these wishes, in this order, with these gaps" is isotonic regression once the gaps are taken out, and pooling
    neighbours that want to overlap solves it in one pass.

Rejected: orthogonal routes (more bends than a small picture bears); placing by network simplex (exact over all layers, four times the code).

Source: Sugiyama, Tagawa, Toda (1981); Gansner, Koutsofios, North, Vo, A Technique for Drawing Directed Graphs (1993), for the weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from aiograd.errors import GraphError

#: between boxes of a layer, between a box and a passing arrow or between two of those, and between layers
GAP = 22.0
PASSING_GAP = 14.0
LAYER_GAP = 38.0

#: sweeps that order, and sweeps that place
ORDER_SWEEPS = 16
PLACE_SWEEPS = 30
#: how strongly the points of one arrow hold together, next to a box and its neighbour
STRAIGHT = 8.0
#: more points than this for passing arrows are not made: the longest arrows then go straight
MAX_POINTS = 20_000

Point = tuple[float, float]


class Layout(NamedTuple):
    """Centres of the boxes, a way for each arrow from the bottom of one box to the top of another, and the size of it all."""

    centres: list[Point]
    #: points in pairs: the way is straight within a pair, and bends from one pair to the next
    ways: list[list[Point]]
    width: float
    height: float


def lay_out(sizes: Sequence[tuple[float, float]], arrows: Sequence[tuple[int, int]], pulls: Sequence[float], layer_gap: float = LAYER_GAP) -> Layout:
    """Place boxes in layers so that every arrow points down.

    Args:
        sizes: width and height of each box.
        arrows: pairs of box numbers.
        pulls: how strongly each arrow pulls its boxes into a line.
        layer_gap: between layers.

    Raises:
        GraphError: arrows go round in a circle.
    """
    layer = _layers(len(sizes), arrows)
    widths = [width for width, _ in sizes]
    chains: list[list[int]] = []
    spare = MAX_POINTS
    for index in sorted(range(len(arrows)), key=lambda i: (layer[arrows[i][1]] - layer[arrows[i][0]], i)):
        source, target = arrows[index]
        between = range(layer[source] + 1, layer[target])
        spare -= len(between)
        points = range(len(widths), len(widths) + (len(between) if spare >= 0 else 0))
        widths.extend([0.0] * len(points))
        layer.extend(between[: len(points)])
        chains.append([index, source, *points, target])
    chains.sort()
    links = [(above, below, pulls[i]) for i, *chain in chains for above, below in pairwise(chain) if layer[below] == layer[above] + 1]
    rows = _ordered(layer, [(above, below) for above, below, _ in links])
    xs = _placed(rows, widths, links, [chain for _, *chain in chains if len(chain) > 2], len(sizes))
    left = min((x - w / 2 for x, w in zip(xs, widths, strict=True)), default=0.0)
    xs = [x - left for x in xs]
    tops: list[float] = []
    bottoms: list[float] = []
    y = 0.0
    for row in rows:
        tall = max((sizes[i][1] for i in row if i < len(sizes)), default=0.0)
        tops.append(y)
        bottoms.append(y + tall)
        y += tall + layer_gap
    centres = [(xs[i], (tops[layer[i]] + bottoms[layer[i]]) / 2) for i in range(len(sizes))]
    ways = _ways([chain for _, *chain in chains], xs, layer, tops, bottoms, centres, sizes)
    return Layout(centres, ways, max((x + w / 2 for x, w in zip(xs, widths, strict=True)), default=0.0), max(0.0, y - layer_gap))


def _layers(count: int, arrows: Sequence[tuple[int, int]]) -> list[int]:
    """The length of the longest way to each box."""
    below: list[list[int]] = [[] for _ in range(count)]
    waiting = [0] * count
    for source, target in arrows:
        below[source].append(target)
        waiting[target] += 1
    layer = [0] * count
    ready = [i for i in range(count) if not waiting[i]]
    for box in ready:  # grows
        for target in below[box]:
            layer[target] = max(layer[target], layer[box] + 1)
            waiting[target] -= 1
            if not waiting[target]:
                ready.append(target)
    if len(ready) < count:
        raise GraphError("drawing a graph whose edges go round in a circle: a backward graph has none. Check what set_next_edges was given.")
    return layer


def _ordered(layer: Sequence[int], links: Sequence[tuple[int, int]]) -> list[list[int]]:
    """The members of each layer from left to right."""
    above: list[list[int]] = [[] for _ in layer]
    below: list[list[int]] = [[] for _ in layer]
    for source, target in links:
        below[source].append(target)
        above[target].append(source)
    rows: list[list[int]] = [[] for _ in range(max(layer, default=-1) + 1)]
    seen = [False] * len(layer)
    for start in range(len(layer)):
        stack = [start] if not above[start] else []
        while stack:
            item = stack.pop()
            if not seen[item]:
                seen[item] = True
                rows[layer[item]].append(item)
                stack.extend(reversed(below[item]))
    place = [0] * len(layer)
    best, fewest, tries = [row[:] for row in rows], _crossings(rows, below, place), 0
    for sweep in range(ORDER_SWEEPS):
        if not fewest or tries > 4:
            break
        down = not sweep % 2
        for row in rows if down else reversed(rows):
            neighbours = above if down else below
            wish = {item: _mean([place[other] for other in neighbours[item]], place[item]) for item in row}
            row.sort(key=lambda item, wish=wish: (wish[item], place[item]))  # type: ignore[misc]
            for i, item in enumerate(row):
                place[item] = i
        found = _crossings(rows, below, place)
        tries += 1
        if found < fewest:
            best, fewest, tries = [row[:] for row in rows], found, 0
    return best


def _mean(numbers: Sequence[float], otherwise: float) -> float:
    return sum(numbers) / len(numbers) if numbers else otherwise


def _crossings(rows: Sequence[Sequence[int]], below: Sequence[Sequence[int]], place: list[int]) -> int:
    """How many pairs of links cross; also notes the place of everything in its row."""
    for row in rows:
        for i, item in enumerate(row):
            place[item] = i
    total = 0
    for row, after in pairwise(rows):
        tree = [0] * (len(after) + 1)  # sums over a prefix
        count = 0
        for item in row:
            ends = sorted(place[other] for other in below[item])
            for end in ends:
                position, before = end + 1, 0
                while position:
                    before += tree[position]
                    position &= position - 1
                total += count - before
            for end in ends:
                position = end + 1
                while position <= len(after):
                    tree[position] += 1
                    position += position & -position
            count += len(ends)
    return total


def _placed(
    rows: Sequence[Sequence[int]], widths: Sequence[float], links: Sequence[tuple[int, int, float]], chains: Sequence[Sequence[int]], boxes: int
) -> list[float]:
    """The x of everything."""
    above: list[list[tuple[int, float]]] = [[] for _ in widths]
    below: list[list[tuple[int, float]]] = [[] for _ in widths]
    for source, target, pull in links:
        below[source].append((target, pull))
        above[target].append((source, pull))
    xs = [0.0] * len(widths)
    gaps: list[list[float]] = []
    for row in rows:
        gaps.append([0.0])
        for left, right in pairwise(row):
            gap = GAP if left < boxes and right < boxes else PASSING_GAP
            gaps[-1].append((widths[left] + widths[right]) / 2 + gap)
        x = -sum(gaps[-1]) / 2
        for item, gap in zip(row, gaps[-1], strict=True):
            x += gap
            xs[item] = x
    means = [0.0] * len(widths)
    for sweep in range(PLACE_SWEEPS):
        for chain in chains:
            mean = sum(xs[item] for item in chain) / len(chain)
            for point in chain[1:-1]:
                means[point] = mean
        both = PLACE_SWEEPS // 2 <= sweep < PLACE_SWEEPS - 1
        order = range(len(rows)) if not sweep % 2 else range(len(rows) - 1, -1, -1)
        for i in order:
            wishes, weights = [], []
            for item in rows[i]:
                if item >= boxes:
                    wishes.append(means[item])
                    weights.append(STRAIGHT)
                    continue
                sides = above[item] + below[item] if both else above[item] if not sweep % 2 else below[item]
                weight = sum(w for _, w in sides)
                wishes.append(sum(xs[other] * w for other, w in sides) / weight if weight else xs[item])
                weights.append(weight or 0.05)
            for item, x in zip(rows[i], _apart(wishes, weights, gaps[i]), strict=True):
                xs[item] = x
    _straighten(rows, gaps, chains, xs)
    return xs


def _straighten(rows: Sequence[Sequence[int]], gaps: Sequence[Sequence[float]], chains: Sequence[Sequence[int]], xs: list[float]) -> None:
    """Move the points of each arrow between their neighbours, so that as many as can be lie above each other."""
    where = {item: (i, place) for i, row in enumerate(rows) for place, item in enumerate(row)}
    for _ in range(3):
        for chain in sorted(chains, key=len, reverse=True):
            run: list[int] = []
            left, right = -math.inf, math.inf
            for point in [*chain[1:-1], None]:
                if point is not None:
                    i, place = where[point]
                    row, gap = rows[i], gaps[i]
                    low = xs[row[place - 1]] + gap[place] if place else -math.inf
                    high = xs[row[place + 1]] - gap[place + 1] if place + 1 < len(row) else math.inf
                    if max(left, low) <= min(right, high):
                        left, right = max(left, low), min(right, high)
                        run.append(point)
                        continue
                x = min(max(sum(xs[member] for member in run) / len(run), left), right) if run else 0.0
                for member in run:
                    xs[member] = x
                if point is not None:
                    run, left, right = [point], low, high


def _apart(wishes: Sequence[float], weights: Sequence[float], gaps: Sequence[float]) -> list[float]:
    """The positions nearest to the wishes that keep the order and the gaps. See Note [One layer at a time, exactly]."""
    blocks: list[tuple[float, float, int]] = []  # mean, weight, how many
    offset = 0.0
    for wish, weight, gap in zip(wishes, weights, gaps, strict=True):
        offset += gap
        mean, heavy, count = wish - offset, weight, 1
        while blocks and blocks[-1][0] > mean:
            other, other_weight, other_count = blocks.pop()
            mean = (mean * heavy + other * other_weight) / (heavy + other_weight)
            heavy += other_weight
            count += other_count
        blocks.append((mean, heavy, count))
    means = [mean for mean, _, count in blocks for _ in range(count)]
    positions: list[float] = []
    offset = 0.0
    for mean, gap in zip(means, gaps, strict=True):
        offset += gap
        positions.append(mean + offset)
    return positions


def _ways(
    chains: Sequence[Sequence[int]],
    xs: Sequence[float],
    layer: Sequence[int],
    tops: Sequence[float],
    bottoms: Sequence[float],
    centres: Sequence[Point],
    sizes: Sequence[tuple[float, float]],
) -> list[list[Point]]:
    """Points of each arrow. Several arrows at one side of a box share it, in the order in which they come."""
    leaving = _ports(chains, xs, sizes, at=0, toward=1)
    arriving = _ports(chains, xs, sizes, at=-1, toward=-2)
    ways: list[list[Point]] = []
    for i, chain in enumerate(chains):
        source, target = chain[0], chain[-1]
        way = [(leaving[i], centres[source][1] + sizes[source][1] / 2), (leaving[i], bottoms[layer[source]])]
        for point in chain[1:-1]:
            way += [(xs[point], tops[layer[point]]), (xs[point], bottoms[layer[point]])]
        ways.append([*way, (arriving[i], tops[layer[target]]), (arriving[i], centres[target][1] - sizes[target][1] / 2)])
    return ways


def _ports(chains: Sequence[Sequence[int]], xs: Sequence[float], sizes: Sequence[tuple[float, float]], *, at: int, toward: int) -> list[float]:
    sides: dict[int, list[int]] = {}
    for i, chain in enumerate(chains):
        sides.setdefault(chain[at], []).append(i)
    ports = [0.0] * len(chains)
    for box, indices in sides.items():
        indices.sort(key=lambda i: (xs[chains[i][toward]], i))
        step = min(16.0, sizes[box][0] * 0.8 / len(indices))
        for number, i in enumerate(indices):
            ports[i] = xs[box] + (number - (len(indices) - 1) / 2) * step
    return ports

"""Drawings of the graph: what they say, that they are well-formed and repeatable, and that nothing in them overlaps."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.errors import ArgumentError, ArgumentTypeError, GraphError, NoGraphError
from aiograd.ops import ROWS
from aiograd.ops import nn as rows
from aiograd.viz import graph_dot, graph_svg
from aiograd.viz.layout import GAP, MAX_POINTS, PASSING_GAP, Layout, lay_out
from aiograd.viz.picture import NAME_LENGTH, shortened
from tests.support import assert_raises, custom_function
from tests.support import random_leaf as leaf
from tests.toy_device import ToyDevice

SVG = "{http://www.w3.org/2000/svg}"


def network() -> tuple[Any, dict[str, Any]]:
    params = {"first.weight": leaf(4, 3), "first.bias": leaf(4), "second.weight": leaf(2, 4)}
    h = rows.linear(ag.tensor(np.ones((5, 3), np.float32)), params["first.weight"], params["first.bias"]).relu()
    return rows.linear(h, params["second.weight"]).sum(), params


def texts(svg: str) -> list[list[str]]:
    """The text in each box."""
    root = ET.fromstring(svg)  # noqa: S314 - our own text
    return [[text.text or "" for text in group.findall(f"{SVG}text")] for group in root.iter(f"{SVG}g") if group.find(f"{SVG}rect") is not None]


# -------------------------------------------------------------------- what is said


def test_dot_in_full() -> None:
    x = leaf(2, 3)
    assert graph_dot((x * 2).sum(), params={"x": x}, edge_shapes=True) == (
        "digraph backward {\n"
        '  node [fontname="Helvetica", fontsize=11];\n'
        '  edge [fontname="Helvetica", fontsize=9, color="#57606a"];\n'
        '  n0 [label="output\\nscalar float32", tooltip="output", shape=box, style="rounded,filled", fillcolor="#24292f", color="#24292f", '
        'fontcolor="#ffffff"];\n'
        '  n1 [label="SumBackward\\nscalar float32", tooltip="SumBackward", shape=box, style="rounded,filled", fillcolor="#f6f8fa", '
        'color="#8c959f"];\n'
        '  n2 [label="MulBackward\\n2×3 float32", tooltip="MulBackward", shape=box, style="rounded,filled", fillcolor="#f6f8fa", '
        'color="#8c959f"];\n'
        '  n3 [label="x\\n2×3 float32", tooltip="x", shape=box, style="filled", fillcolor="#ddf4e4", color="#3d8b57"];\n'
        '  n0 -> n1 [label="scalar"];\n'
        '  n1 -> n2 [label="2×3"];\n'
        '  n2 -> n3 [label="2×3"];\n'
        "}\n"
    )


def test_svg_of_a_network() -> None:
    loss, params = network()
    svg = graph_svg(loss, params=params, saved=True)
    assert texts(svg) == [
        ["output", "scalar float32"], ["SumBackward", "scalar float32", "saves nothing"], ["LinearBackward", "5×2 float32", "saves 112 B"],
        ["ReluBackward", "5×4 float32", "saves 80 B"], ["second.weight", "2×4 float32"], ["LinearBackward", "5×4 float32", "saves 60 B"],
        ["first.weight", "4×3 float32"], ["first.bias", "4 float32"],
    ]  # fmt: skip
    assert svg.count('class="a"') == 7
    assert [box[0] for box in texts(graph_svg(loss))].count("leaf") == 3
    assert all(len(box) == 1 for box in texts(graph_svg(loss, shapes=False)))
    assert "5×4</text>" in graph_svg(loss, shapes=False, edge_shapes=True)


async def test_what_was_saved_is_gone_after_backward() -> None:
    loss, _ = network()
    await loss.backward()
    lines = [line for box in texts(graph_svg(loss, saved=True)) for line in box]
    assert lines.count("released") == 3 and "saves nothing" in lines
    with ag.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        loss, _ = network()
    assert "saves packed values" in graph_svg(loss, saved=True)


def test_roots_of_every_kind() -> None:
    x = leaf(3)
    y, z = x.exp(), x.sin()
    both = [["output 0", "3 float32"], ["ExpBackward", "3 float32"], ["leaf", "3 float32"], ["output 1", "3 float32"], ["SinBackward", "3 float32"]]
    assert texts(graph_svg([y, z])) == both
    assert graph_svg(iter([y, z])) == graph_svg([ag.graph.get_gradient_edge(y), z.grad_fn]) == graph_svg([y, z])
    once = graph_svg(y)
    assert once == graph_svg(ag.graph.get_gradient_edge(y)) == graph_svg(y.grad_fn) == graph_svg(ag.graph.Edge(y.grad_fn, 0))
    assert texts(graph_svg(x, params={"x": x})) == [["output", "3 float32"], ["x", "3 float32"]]
    assert texts(graph_svg([y, y]))[2:] == [["leaf", "3 float32"], ["output 1", "3 float32"]], "drawn once"


def test_custom_functions_devices_several_outputs_and_names() -> None:
    @custom_function(lambda x: (x[:1] * 1, x[1:] * 1))
    def Halves(ctx: Any, g: Any, h: Any) -> Any:
        return np.concatenate([g, h])

    with ToyDevice():
        x = ag.tensor([1.0, 2.0], device="toy:0", requires_grad=True)
        first, second = Halves.apply(x)
        middle = first + second
        boxes = texts(graph_svg(middle.sum(), params={"x": x, "tied": x, "middle": middle, "unused": leaf(2), "plain": ag.tensor([1.0])}))
    assert ["HalvesBackward", "1, 1 float32 toy:0"] in boxes
    assert ["x = tied", "2 float32 toy:0"] in boxes and ["middle (AddBackward)", "1 float32 toy:0"] in boxes
    many = ROWS["unbind"](leaf(5, 2))
    assert ["UnbindBackward", "5 × float32"] in texts(graph_svg(list(many)))
    assert '#fff1e5"' in graph_svg(first), "custom functions stand out"


def test_text_is_escaped() -> None:
    x = leaf(1)
    name = 'a<script>"&\'\\\x00\n\x1b b'
    svg = graph_svg(x * 2, params={name: x})
    assert texts(svg)[-1][0] == "a<script>\"&'\\    b", "what XML cannot hold is a space"
    assert "<script>" not in svg
    dot = graph_dot(x * 2, params={name: x})
    quoted = re.findall(r'label="((?:[^"\\]|\\.)*)"', dot)
    assert quoted[-1].startswith('a<script>\\"&\'\\\\ ') and "\x00" not in dot and "\x1b" not in dot
    assert len(dot.splitlines()) == len(graph_dot(x * 2).splitlines())


def test_long_names_are_shortened_in_the_middle() -> None:
    name = "encoder.layers.11.self_attention.out_projection.weight"
    short = shortened(name)
    assert len(short) == NAME_LENGTH and short.startswith("encoder.layers.11") and short.endswith("projection.weight") and "…" in short
    x = leaf(1)
    svg = graph_svg(x * 2, params={name: x})
    assert f"<title>{name}" in svg and texts(svg)[-1][0] == short


# -------------------------------------------------------------------- repeatable


def test_equal_graphs_give_equal_text() -> None:
    first, params = network()
    ag.tensor([1.0], requires_grad=True).exp().sin()  # other nodes in between
    second, again = network()
    for draw in (graph_svg, graph_dot):
        assert draw(first, params=params, saved=True) == draw(second, params=again, saved=True) == draw(first, params=params, saved=True)


# -------------------------------------------------------------------- large and wrong


def chain(length: int) -> Any:
    x = leaf(1)
    for _ in range(length):
        x = x + 1
    return x


def test_graphs_that_are_too_large_are_refused() -> None:
    x = chain(1000)  # and the leaf
    assert_raises(ArgumentError, r"graph_svg\(\).*more than max_nodes=1000.*intermediate", graph_svg, x)
    assert_raises(ArgumentError, r"graph_dot\(\).*max_nodes=10", graph_dot, x, max_nodes=10)
    assert graph_svg(x, max_nodes=1001).count("AddBackward</text>") == 1000


def test_deep_graphs_need_no_recursion() -> None:
    assert graph_dot(chain(20_000), max_nodes=20_001).count("->") == 20_001


def test_wrong_arguments() -> None:
    assert_raises(NoGraphError, "element 1", lambda: graph_svg([leaf(1), ag.tensor([1.0])]))
    assert_raises(ArgumentTypeError, "element 0 is a int", graph_dot, 3)
    assert_raises(ArgumentError, "at least one", graph_svg, [])
    assert_raises(ArgumentError, "nowhere", lambda: graph_svg(ag.graph.Edge(None, 0)))
    assert_raises(ArgumentTypeError, "params is a list", lambda: graph_svg(leaf(1), params=[leaf(1)]))  # type: ignore[arg-type]
    for draw in (ag.viz.program_svg, ag.viz.program_dot, ag.viz.memory_svg):
        assert_raises(ArgumentTypeError, "expected a program", draw, [])
    assert_raises(ArgumentTypeError, r"params\['w'\] is a float", lambda: graph_svg(leaf(1), params={"w": 1.0}))


def test_a_graph_with_a_circle() -> None:
    class Sink(ag.graph.Node):
        pass

    first = Sink(num_inputs=1)
    second = Sink([(first, 0)], num_inputs=1)
    first.add_next_edge((second, 0))
    try:
        assert_raises(GraphError, "circle", graph_svg, second)
        assert graph_dot(second).count("->") == 3, "Graphviz can draw that"
    finally:
        first.set_next_edges([])


# -------------------------------------------------------------------- what is drawn


def points_of(path: str) -> list[tuple[float, float]]:
    """Points along the lines and curves of a path."""
    found: list[tuple[float, float]] = []
    for command, text in re.findall(r"([MLC])([^MLC]*)", path):
        numbers = [float(number) for number in text.split()]
        corners = list(zip(numbers[::2], numbers[1::2], strict=True))
        if command == "M":
            found += corners
            continue
        corners.insert(0, found[-1])
        for step in range(1, 41):
            level = corners  # de Casteljau: a line is a curve of two corners
            while len(level) > 1:
                level = [tuple(a + (b - a) * step / 40 for a, b in zip(one, two, strict=True)) for one, two in pairwise(level)]
            found += level
    return found


@pytest.mark.parametrize("seed", range(12))
def test_no_line_runs_through_a_label_and_no_label_over_a_box(seed: int) -> None:
    random = Random(seed)
    values: list[Any] = [ag.tensor(np.zeros((12, 12), np.float32), requires_grad=True) for _ in range(3)]
    for _ in range(14):
        one, two = random.choice(values), random.choice(values[-5:])
        values.append(random.choice([lambda a, b: a @ b, lambda a, b: a * b.sum(), lambda a, b: a + b])(one, two))
    root = ET.fromstring(graph_svg(values[-1], edge_shapes=True))  # noqa: S314 - our own text
    labels = [
        (text.text, float(text.get("x")), float(text.get("y")) - 3.6)  # type: ignore[arg-type]
        for text in root.iter(f"{SVG}text")
        if text.get("class") == "e"
    ]
    lines = [points_of(path.get("d", "")) for path in root.iter(f"{SVG}path") if path.get("class") == "a"]
    assert len(lines) == len(labels) > 5
    rects = [rect for group in root.iter(f"{SVG}g") for rect in group.findall(f"{SVG}rect") if group.find(f"{SVG}text") is not None]
    boxes = [[float(rect.get(name)) for name in ("x", "y", "width", "height")] for rect in rects]  # type: ignore[arg-type]
    for text, x, y in labels:
        half = 2.7 * len(text)
        assert not any(abs(px - x) < half and abs(py - y) < 4.5 for line in lines for px, py in line), f"a line runs through {text}"
        assert not any(left - half < x < left + wide + half and top - 4.5 < y < top + tall + 4.5 for left, top, wide, tall in boxes)
        assert sum(abs(x - x2) < half + 2.7 * len(other) and abs(y - y2) < 9 for other, x2, y2 in labels) == 1, "labels keep apart"


# -------------------------------------------------------------------- the layout


def random_graph(random: Random) -> tuple[list[tuple[float, float]], list[tuple[int, int]]]:
    count = random.randrange(1, 40)
    sizes = [(random.uniform(20, 200), random.uniform(10, 60)) for _ in range(count)]
    arrows = [(random.randrange(target), target) for target in range(1, count) for _ in range(random.randrange(0, 4))]
    return sizes, arrows


def lane_of(layout: Layout, sizes: list[tuple[float, float]], low: float, high: float) -> list[tuple[float, float]]:
    """Left and right end of each box that reaches into a band."""
    spans = []
    for (x, y), (width, height) in zip(layout.centres, sizes, strict=True):
        if y + height / 2 > low + 1e-6 and y - height / 2 < high - 1e-6:
            spans.append((x - width / 2, x + width / 2))
    return spans


@pytest.mark.parametrize("seed", range(60))
def test_nothing_overlaps(seed: int) -> None:
    sizes, arrows = random_graph(Random(seed))
    layout = lay_out(sizes, arrows, [1.0] * len(arrows))
    assert layout == lay_out(sizes, arrows, [1.0] * len(arrows))
    boxes = list(zip(layout.centres, sizes, strict=True))
    for i, ((x1, y1), (w1, h1)) in enumerate(boxes):
        assert x1 - w1 / 2 >= -1e-6 and x1 + w1 / 2 <= layout.width + 1e-6 and 0 <= y1 - h1 / 2 + 1e-6 and y1 + h1 / 2 <= layout.height + 1e-6
        for (x2, y2), (w2, h2) in boxes[:i]:
            apart_x, apart_y = abs(x1 - x2) - (w1 + w2) / 2, abs(y1 - y2) - (h1 + h2) / 2
            assert apart_x >= GAP - 1e-6 or apart_y > 0
    for (source, target), way in zip(arrows, layout.ways, strict=True):
        (x1, y1), (w1, h1) = boxes[source]
        (x2, y2), (w2, h2) = boxes[target]
        assert y1 + h1 / 2 < y2 - h2 / 2, "arrows point down"
        assert way[0][1] == y1 + h1 / 2 and abs(way[0][0] - x1) <= w1 * 0.4 + 1e-6
        assert way[-1][1] == y2 - h2 / 2 and abs(way[-1][0] - x2) <= w2 * 0.4 + 1e-6
        assert all(above[1] <= below[1] + 1e-6 for above, below in pairwise(way))
        for (x, top), (_, bottom) in zip(way[2:-2:2], way[3:-2:2], strict=True):
            for left, right in lane_of(layout, sizes, top, bottom):
                assert not left - PASSING_GAP + 1e-6 < x < right + PASSING_GAP - 1e-6, "a passing arrow keeps clear of boxes"


def test_a_chain_stands_in_a_line() -> None:
    layout = lay_out([(40.0, 20.0), (120.0, 20.0), (60.0, 20.0)], [(0, 1), (1, 2)], [1.0, 1.0])
    assert len({round(x, 6) for x, _ in layout.centres}) == 1 and layout.width == 120.0


def test_a_tree_has_no_crossings_and_parents_stand_over_their_children() -> None:
    arrows = [(0, 1), (0, 2), (1, 3), (1, 4), (2, 5), (2, 6)]
    layout = lay_out([(40.0, 20.0)] * 7, arrows, [1.0] * 6)
    xs = [x for x, _ in layout.centres]
    assert xs[1] < xs[2] and xs[3] < xs[4] < xs[5] < xs[6]
    assert abs(xs[1] - (xs[3] + xs[4]) / 2) < 1 and abs(xs[0] - (xs[1] + xs[2]) / 2) < 1


def test_crossings_are_removed() -> None:
    """Two rows joined crosswise: the order of the lower row has to be turned round."""
    arrows = [(0, i) for i in range(1, 5)] + [(1, 8), (2, 7), (3, 6), (4, 5)]
    layout = lay_out([(30.0, 20.0)] * 9, arrows, [1.0] * len(arrows))
    xs = [x for x, _ in layout.centres]
    assert sorted((1, 2, 3, 4), key=lambda i: xs[i]) == [9 - j for j in sorted((5, 6, 7, 8), key=lambda i: xs[i])]


def test_long_arrows_are_straight_where_there_is_room() -> None:
    arrows = [(i, i + 1) for i in range(10)] + [(0, 10)]
    layout = lay_out([(60.0, 20.0)] * 11, arrows, [1.0] * len(arrows))
    assert len({round(x, 6) for x, _ in layout.ways[-1][2:-2]}) == 1


def test_very_many_long_arrows_are_drawn_without_points() -> None:
    count = 300
    arrows = [(i, i + 1) for i in range(count - 1)] + [(i, count - 1) for i in range(count - 2)]
    assert sum(target - source - 1 for source, target in arrows) > MAX_POINTS
    layout = lay_out([(60.0, 20.0)] * count, arrows, [1.0] * len(arrows))
    assert any(len(way) == 4 for way in layout.ways[count:]) and any(len(way) > 50 for way in layout.ways)


def test_the_empty_layout() -> None:
    assert lay_out([], [], []) == Layout([], [], 0.0, 0.0)

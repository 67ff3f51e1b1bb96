"""Graphs and programs as SVG text: the layout drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from aiograd.compiler.program import Program
from aiograd.running.svg import svg_document, svg_text, text_width
from aiograd.viz.layout import LAYER_GAP, Point, lay_out
from aiograd.viz.picture import Box, Kind, Picture, Roots, picture_of, program_picture, shortened

TITLE_SIZE = 13.0
LINE_SIZE = 11.0
LABEL_SIZE = 10.0
PADDING = (12.0, 8.0)
MARGIN = 20.0
#: leaves stand aside, so that operations that follow each other stand in a line
LEAF_PULL = 0.01
#: between layers, where labels of arrows have layers of their own
LABELLED_GAP = 22.0
#: half the width of an arrow's head, and its length
HEAD = (3.5, 7.0)


class _NodeStyle(NamedTuple):
    fill: str
    stroke: str
    text: str
    faint: str
    radius: float
    dashed: bool = False


_NODE_STYLES: dict[Kind, _NodeStyle] = {
    "root": _NodeStyle("#24292f", "#24292f", "#ffffff", "#c9d1d9", 14.0),
    "operation": _NodeStyle("#f6f8fa", "#8c959f", "#1f2328", "#57606a", 7.0),
    "function": _NodeStyle("#fff1e5", "#bc6a2a", "#1f2328", "#7a5233", 7.0),
    "parameter": _NodeStyle("#ddf4e4", "#3d8b57", "#12331f", "#3b6b4c", 2.0),
    "leaf": _NodeStyle("#f3f8f4", "#7fa88c", "#3b4a40", "#5d7566", 2.0, dashed=True),
}

_CLASS = "aiograd-graph"
_RULES = (
    "text{text-anchor:middle}", f".t{{font-size:{TITLE_SIZE:g}px;font-weight:600}}", f".l{{font-size:{LINE_SIZE:g}px}}",
    ".a{fill:none;stroke:#6e7781;stroke-width:1.25}", ".h{fill:#6e7781}", f".e{{font-size:{LABEL_SIZE:g}px;fill:#57606a}}",
)  # fmt: skip


class SvgText(str):
    """The text of an SVG picture; a notebook shows the picture."""

    __slots__ = ()

    def _repr_svg_(self) -> str:
        return str(self)


def graph_svg(
    roots: Roots,
    *,
    params: Mapping[str, Any] | None = None,
    names: Any = None,
    shapes: bool = True,
    edge_shapes: bool = False,
    saved: bool = False,
    max_nodes: int = 1000,
) -> SvgText:
    """The backward graph as an SVG picture; arrows point the way gradients flow, from outputs to leaves.

    The same graph gives the same text.

    Args:
        roots: a Tensor, GradientEdge, Edge or Node, or several: where the graph begins.
        params: names of leaves (or of other tensors), as ``dict(module.named_parameters())``.
        names: a module, which names its parameters; `params` may name further tensors.
        shapes: show shape, dtype and device of the tensor that each node computes the gradient of.
        edge_shapes: write on each arrow the shape of the gradient that goes there.
        saved: show how many bytes each node keeps for backward.
        max_nodes: refuse larger graphs.

    Returns:
        The text of the SVG, a str; as the last line of a notebook's cell it shows the picture.

    Raises:
        NoGraphError, ArgumentTypeError: a root is no tensor with a graph, `params` is no mapping to tensors, or `names` no module.
        ArgumentError: the graph has more nodes.
        GraphError: its edges go round in a circle.
    """
    picture = picture_of("graph_svg()", roots, params=params, names=names, shapes=shapes, edge_shapes=edge_shapes, saved=saved, max_nodes=max_nodes)
    return picture_svg(picture, "Backward graph")


def program_svg(program: Program, *, max_nodes: int = 1000) -> SvgText:
    """The program of a compiled function as an SVG picture; arrows point from results to their arguments.

    Args:
        program: from ``compiled.programs``.
        max_nodes: refuse larger programs.

    Returns:
        The text of the SVG, as of `graph_svg`.

    Raises:
        ArgumentError: the program has more statements, inputs and captured tensors. ArgumentTypeError: it is no program.
    """
    return picture_svg(program_picture("program.svg()", program, max_nodes), "Program")


def picture_svg(picture: Picture, title: str) -> SvgText:
    """A picture drawn: boxes and arrows in its order, each box a group with a rectangle, each arrow a path of class ``a`` and one of class ``h``."""
    boxes, arrows, _ = picture
    sizes = [_size(box) for box in boxes]
    labels = [arrow.label for arrow in arrows if arrow.label]
    joined: list[tuple[int, int]] = []
    pulls: list[float] = []
    #: of each arrow the parts of its way
    parts: list[list[int]] = []
    for arrow in arrows:
        pull = LEAF_PULL if boxes[arrow.target].kind in ("parameter", "leaf") else 1.0
        stops = [arrow.source, arrow.target]
        if arrow.label:  # a label is a box on the arrow's way, so nothing is drawn over it
            stops.insert(1, len(sizes))
            sizes.append((text_width(arrow.label, LABEL_SIZE) + 6, LABEL_SIZE + 2))
        parts.append([*range(len(joined), len(joined) + len(stops) - 1)])
        joined += pairwise(stops)
        pulls += [pull, 1.0][: len(stops) - 1]
    layout = lay_out(sizes, joined, pulls, LABELLED_GAP if labels else LAYER_GAP)
    width, height = layout.width + 2 * MARGIN, layout.height + 2 * MARGIN
    out = [f'<g transform="translate({MARGIN:g} {MARGIN:g})">']
    for numbers in parts:
        *ways, (*points, tip) = [layout.ways[number] for number in numbers]
        line = "".join(map(_curve, [*ways, [*points, (tip[0], tip[1] - HEAD[1])]]))
        out.append(f'<path class="a" d="{line}"/><path class="h" d="{_head(tip)}"/>')
    for box, size, centre in zip(boxes, sizes, layout.centres, strict=False):
        out.append(_draw(box, size, centre))
    for label, (x, y) in zip(labels, layout.centres[len(boxes) :], strict=True):
        out.append(f'<text class="e" x="{x:.1f}" y="{y + LABEL_SIZE * 0.36:.1f}">{svg_text(label)}</text>')
    return SvgText(svg_document(_CLASS, f"{title}: {len(boxes)} nodes", (width, height), _RULES, [*out, "</g>"]))


def _size(box: Box) -> tuple[float, float]:
    """Width and height that hold the text."""
    widths = [text_width(shortened(box.title), TITLE_SIZE) * 1.05, *(text_width(line, LINE_SIZE) for line in box.lines)]
    return max(56.0, max(widths) + 2 * PADDING[0]), TITLE_SIZE + 3 + len(box.lines) * (LINE_SIZE + 4) + 2 * PADDING[1]


def _draw(box: Box, size: tuple[float, float], centre: Point) -> str:
    style = _NODE_STYLES[box.kind]
    (width, height), (x, y) = size, centre
    dashes = ' stroke-dasharray="4 3"' if style.dashed else ""
    rect = (
        f'<rect x="{x - width / 2:.1f}" y="{y - height / 2:.1f}" width="{width:.1f}" height="{height:.1f}" rx="{style.radius:g}" '
        f'fill="{style.fill}" stroke="{style.stroke}"{dashes}/>'
    )
    baseline = y - height / 2 + PADDING[1] + TITLE_SIZE - 1
    texts = [f'<text class="t" x="{x:.1f}" y="{baseline:.1f}" fill="{style.text}">{svg_text(shortened(box.title))}</text>']
    for line in box.lines:
        baseline += LINE_SIZE + 4
        texts.append(f'<text class="l" x="{x:.1f}" y="{baseline:.1f}" fill="{style.faint}">{svg_text(line)}</text>')
    return f"<g><title>{svg_text(' '.join([box.title, *box.lines]))}</title>{rect}{''.join(texts)}</g>"


def _curve(way: Sequence[Point]) -> str:
    """Straight within a layer, and from one layer to the next a curve that leaves and arrives vertically."""
    parts = [f"M{way[0][0]:.1f} {way[0][1]:.1f}"]
    for (x1, y1), (x2, y2), (x3, y3) in zip(way[::2], way[1::2], [*way[2::2], way[-1]], strict=True):
        if (x1, y1) != (x2, y2):
            parts.append(f"L{x2:.1f} {y2:.1f}")
        if (x3, y3) != (x2, y2):
            middle = (y2 + y3) / 2
            parts.append(f"C{x2:.1f} {middle:.1f} {x3:.1f} {middle:.1f} {x3:.1f} {y3:.1f}")
    return "".join(parts)


def _head(tip: Point) -> str:
    """The head of an arrow, which points down."""
    (x, y), (half, length) = tip, HEAD
    return f"M{x - half:.1f} {y - length:.1f}L{x:.1f} {y:.1f}L{x + half:.1f} {y - length:.1f}z"

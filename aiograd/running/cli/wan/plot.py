"""A plot of utilisation over bandwidth, as SVG text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from aiograd.running.svg import svg_document, svg_text

WIDTH, HEIGHT = 640.0, 400.0
LEFT, RIGHT, TOP, BOTTOM = 60.0, 20.0, 44.0, 120.0
#: of the curves; they differ in lightness, too
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#56b4e9", "#cc79a7")
_CLASS = "aiograd-plot"
_RULES = (
    "text{font-size:11px;fill:#57606a;text-anchor:middle}", ".t{font-size:13px;font-weight:600;fill:#24292f}", ".y{text-anchor:end}",
    ".k{text-anchor:start;fill:#24292f}", ".g{stroke:#d0d7de;stroke-width:1}", ".c{fill:none;stroke-width:2}",
)  # fmt: skip


class Curve(NamedTuple):
    """A curve.

    Attributes:
        name: in the key of the plot.
        points: x above 0, ascending, and y from 0 to 1.
    """

    name: str
    points: list[tuple[float, float]]


def plot_svg(title: str, x_title: str, y_title: str, curves: Sequence[Curve]) -> str:
    """Draw curves over a logarithmic axis.

    Args:
        title: of the plot.
        x_title, y_title: of the axes.
        curves: at least one, with points at the same x.

    Returns:
        The text of the SVG; equal arguments give equal text.
    """
    xs = [x for x, _ in curves[0].points]
    low, high = math.log(xs[0]), math.log(xs[-1])
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        part = (math.log(x) - low) / (high - low) if high > low else 0.5
        return LEFT + part * width, TOP + (1 - y) * height

    lines = [f'<text class="t" x="{WIDTH / 2:g}" y="22">{svg_text(title)}</text>']
    for tenth in range(0, 11, 2):
        _, y = place(xs[0], tenth / 10)
        lines.append(f'<path class="g" d="M{LEFT:g} {y:.1f}H{WIDTH - RIGHT:g}"/>')
        lines.append(f'<text class="y" x="{LEFT - 8:g}" y="{y + 4:.1f}">{tenth / 10:g}</text>')
    for x in xs:
        at, y = place(x, 0)
        lines.append(f'<path class="g" d="M{at:.1f} {y:.1f}v5"/><text x="{at:.1f}" y="{y + 18:.1f}">{x:g}</text>')
    lines.append(f'<text x="{LEFT + width / 2:g}" y="{TOP + height + 36:g}">{svg_text(x_title)}</text>')
    middle = TOP + height / 2
    lines.append(f'<text transform="rotate(-90 16 {middle:g})" x="16" y="{middle:g}">{svg_text(y_title)}</text>')
    for number, curve in enumerate(curves):
        colour = COLOURS[number % len(COLOURS)]
        places = [place(*point) for point in curve.points]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        lines.append(f'<path class="c" stroke="{colour}" d="M{path}"/>')
        lines += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
        x, y = LEFT + (number % 2) * width / 2, TOP + height + 58 + 20 * (number // 2)
        lines.append(f'<path class="c" stroke="{colour}" d="M{x:g} {y:g}h18"/>')
        lines.append(f'<text class="k" x="{x + 24:g}" y="{y + 4:g}">{svg_text(curve.name)}</text>')
    return svg_document(_CLASS, title, (WIDTH, HEIGHT), _RULES, lines)

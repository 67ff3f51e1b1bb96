"""The table and the pictures of the figures.

A row is a mapping: ``system``, ``fault``, and the names of `COLUMNS`; or ``skipped``, the reason. ``spread`` has the least and the most of several
runs for some of these names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

#: name in the row -> title in the table, and format
COLUMNS = {
    "useful": ("useful time", "{:.1%}"),
    "p50": ("to the next step, median s", "{:.2f}"),
    "longest": ("longest s", "{:.2f}"),
    "lost": ("samples lost", "{:d}"),
    "twice": ("read twice", "{:d}"),
    "other_bits": ("other bits", "{:d}"),
    "restarted": ("restarted by hand", "{:d}"),
    "faults": ("faults", "{:d}"),
    "runs": ("runs", "{:d}"),
    "load": ("load", "{:.1f}"),
}
#: sizes of a chart, pixels
LABEL, BAR, LINE, MARGIN = 210, 420, 26, 12


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as a table in Markdown; figures that a row lacks are left empty, and a row that was skipped says why."""
    lines = ["| system | fault | " + " | ".join(title for title, _ in COLUMNS.values()) + " |", "|---|---" + "|---:" * len(COLUMNS) + "|"]
    for row in rows:
        if row.get("skipped"):
            cells = [f"skipped: {_cell(row['skipped'])}"] + [""] * (len(COLUMNS) - 1)
        else:
            spread = row.get("spread", {})
            cells = [_figure(row.get(name), form) + _spread(spread.get(name), form) for name, (_, form) in COLUMNS.items()]
        lines.append(f"| {_cell(row.get('system', ''))} | {_cell(row.get('fault', ''))} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def chart(rows: Sequence[Mapping[str, Any]], value: str, title: str) -> str:
    """A picture, as SVG: a bar for each row with this figure.

    Args:
        rows: as for `table`; a skipped one is named with the reason.
        value: the name of the figure, one of `COLUMNS`.
        title: of the picture.

    Raises:
        ValueError: there is no such figure.
    """
    if value not in COLUMNS:
        raise ValueError(f"chart(): no figure is called {value!r}; there are {', '.join(COLUMNS)}")
    _, form = COLUMNS[value]
    shown = [row.get(value) for row in rows if not row.get("skipped")]
    most = max((each for each in shown if each is not None and math.isfinite(each)), default=0.0) or 1.0
    height = 3 * MARGIN + LINE * (len(rows) + 1)
    width = LABEL + BAR + 130
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" font-family="sans-serif" '
        f'font-size="13" role="img" aria-label="{escape(title, quote=True)}">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{MARGIN}" y="{MARGIN + 14}" font-size="15" font-weight="bold" fill="#222222">{escape(title)}</text>',
    ]
    for index, row in enumerate(rows):
        top = 2 * MARGIN + LINE * (index + 1)
        label = escape(f"{row.get('system', '')}, {row.get('fault', '')}")
        parts.append(f'<text x="{MARGIN}" y="{top + 15}" fill="#222222">{label}</text>')
        figure = row.get(value)
        if row.get("skipped"):
            parts.append(f'<text x="{LABEL}" y="{top + 15}" fill="#777777">{escape(_short(row["skipped"]))}</text>')
        elif figure is not None:
            length = BAR * min(1.0, max(0.0, figure / most)) if math.isfinite(figure) else BAR
            color = "#2b6cb0" if math.isfinite(figure) else "#c53030"
            parts.append(f'<rect x="{LABEL}" y="{top + 2}" width="{length:.1f}" height="{LINE - 8}" fill="{color}"/>')
            parts.append(f'<text x="{LABEL + length + 6:.1f}" y="{top + 15}" fill="#222222">{escape(_figure(figure, form))}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _figure(value: Any, form: str) -> str:
    if value is None:
        return ""
    return form.format(value) if math.isfinite(value) else "never"


def _spread(ends: Sequence[float] | None, form: str) -> str:
    """The least and the most, where they are not the same."""
    return f" ({_figure(ends[0], form)}..{_figure(ends[1], form)})" if ends and ends[0] != ends[1] else ""


def _cell(text: Any) -> str:
    return " ".join(str(text).replace("|", "\\|").split())


def _short(text: str) -> str:
    return text if len(text) <= 70 else text[:67] + "..."

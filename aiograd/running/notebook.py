"""HTML for notebooks: the pieces of ``_repr_html_`` of tensors, modules, summaries and schedules.

Text is escaped here and nowhere else. Colours are taken from the page, so light and dark themes both work.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from aiograd.running.late import LateModule

if TYPE_CHECKING:
    import html
else:
    html = LateModule("html")

_HEAD = '<div style="font-weight:600;margin:0.2em 0">'
_CELL = "text-align:left;padding:0.15em 0.7em;white-space:pre"


def card(heading: str, text: str) -> str:
    """A heading with preformatted text below it."""
    return f'<div>{_HEAD}{html.escape(heading)}</div><pre style="margin:0">{html.escape(text)}</pre></div>'


def table(heading: str, columns: Sequence[str], rows: Iterable[Sequence[str]], colours: Sequence[Sequence[str]] | None = None) -> str:
    """A heading with a table below it.

    Args:
        heading: the line above the table.
        columns: the titles of the columns.
        rows: the cells.
        colours: the background of each cell, a CSS colour, or "" for none; None: no cell has one.
    """
    lines = [f"<div>{_HEAD}{html.escape(heading)}</div>", '<table style="border-collapse:collapse">']
    lines.append("<tr>" + "".join(f'<th style="{_CELL}">{html.escape(title)}</th>' for title in columns) + "</tr>")
    for i, row in enumerate(rows):
        cells = []
        for j, cell in enumerate(row):
            colour = "" if colours is None else colours[i][j]
            style = f"{_CELL};background:{colour};color:#1f2328" if colour else _CELL
            cells.append(f'<td style="{style}">{html.escape(cell)}</td>')
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return "".join([*lines, "</table></div>"])


def tree(heading: str, children: Sequence[str]) -> str:
    """A heading that unfolds into its children, which are HTML."""
    if not children:
        return f'<div style="margin-left:1.1em"><code>{html.escape(heading)}</code></div>'
    return f'<details open style="margin-left:0.4em"><summary><code>{html.escape(heading)}</code></summary>{"".join(children)}</details>'


def frame(document: str, title: str, height: int) -> str:
    """A whole HTML document as a part of the page: its scripts run, and reach nothing outside of it.

    Args:
        document: its text.
        title: of the frame, for screen readers.
        height: in pixels.
    """
    attributes = f'title="{html.escape(title)}" sandbox="allow-scripts" style="width:100%;height:{height}px;border:0"'
    return f'<iframe {attributes} srcdoc="{html.escape(document)}"></iframe>'

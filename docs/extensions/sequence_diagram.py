"""``sequence``: a sequence diagram as SVG, in the colours of the page.

The first line of the content names the participants, left to right, with ``|`` between them. Each further line is a message
(``driver -> left: CALL cubed``; ``-->`` for an answer), what one participant does (``left: the forward runs``), or a line across all of them
(``== committed ==``).
"""

from __future__ import annotations

import re
import textwrap
from html import escape
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

COLUMN, MARGIN, LINE, WIDTH = 230, 100, 17, 30
#: of its size that a diagram has at least; where the page is narrower it scrolls
READABLE = 0.78
MESSAGE = re.compile(r"(.+?) (-->|->) (.+?): (.+)")


class Drawing:
    """The lines of a diagram as SVG elements, from top to bottom."""

    def __init__(self, participants: list[str]) -> None:
        self.place = {name: MARGIN + i * COLUMN for i, name in enumerate(participants)}
        self.width = 2 * MARGIN + COLUMN * (len(participants) - 1)
        self.y, self.parts = 62, list[str]()

    def text(self, x: float, lines: list[str], kind: str) -> None:
        for i, line in enumerate(lines):
            self.parts.append(f'<text x="{x}" y="{self.y + i * LINE}" class="{kind}">{escape(line)}</text>')

    def message(self, source: str, target: str, dashed: bool, text: str) -> None:
        start, end = self.place[source], self.place[target]
        lines = textwrap.wrap(text, WIDTH * max(abs(start - end) // COLUMN, 1))
        self.text((start + end) / 2, lines, "message")
        self.y += LINE * (len(lines) - 1) + 7
        tip = end - 9 if end > start else end + 9
        self.parts.append(f'<path d="M{start} {self.y}H{tip}" class="{"answer" if dashed else "call"}"/>')
        self.parts.append(f'<path d="M{end} {self.y}L{tip} {self.y - 4.5}V{self.y + 4.5}Z" class="tip"/>')
        self.y += 27

    def action(self, who: str, text: str) -> None:
        lines = textwrap.wrap(text, WIDTH)
        height = LINE * len(lines) + 9
        self.parts.append(f'<rect x="{self.place[who] - 98}" y="{self.y - 17}" width="196" height="{height}" rx="5" class="action"/>')
        self.text(self.place[who], lines, "did")
        self.y += height + 12

    def across(self, text: str) -> None:
        half = 4 * len(text) + 8
        self.parts.append(f'<path d="M8 {self.y}H{self.width / 2 - half}M{self.width / 2 + half} {self.y}H{self.width - 8}" class="across"/>')
        self.y += 4
        self.text(self.width / 2, [text], "title")
        self.y += 28

    def svg(self, label: str) -> str:
        heads = "".join(
            f'<path d="M{x} 36V{self.y - 8}" class="life"/><rect x="{x - 92}" y="6" width="184" height="30" rx="5" class="head"/>'
            f'<text x="{x}" y="26" class="title head-title">{escape(name)}</text>'
            for name, x in self.place.items()
        )
        size = f'viewBox="0 0 {self.width} {self.y}" style="max-width:{self.width}px;min-width:{self.width * READABLE:.0f}px"'
        picture = f'<svg class="sequence" role="img" aria-label="{escape(label, quote=True)}" {size}>{heads}{"".join(self.parts)}</svg>'
        return f'<div class="sequence-box columns-{len(self.place)}" tabindex="0">{picture}</div><p class="scrolls">The diagram scrolls: →</p>'


class Sequence(SphinxDirective):
    """See the module; the argument is what the diagram shows, for those who cannot see it."""

    required_arguments, final_argument_whitespace, has_content = 1, True, True

    def run(self) -> list[nodes.Node]:
        first, *lines = (line for line in self.content if line.strip())
        drawing = Drawing([name.strip() for name in first.split("|")])
        for line in lines:
            try:
                if line.startswith("=="):
                    drawing.across(line.strip("= "))
                elif found := MESSAGE.fullmatch(line):
                    drawing.message(found[1], found[3], found[2] == "-->", found[4])
                else:
                    who, _, text = line.partition(": ")
                    drawing.action(who, text)
            except KeyError as error:
                raise self.error(f"{line!r}: {error} is no participant") from None
        return [nodes.raw("", drawing.svg(self.arguments[0]), format="html")]


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("sequence", Sequence)
    return {"parallel_read_safe": True}

"""Code and tables that fit pages of every width.

Lines of code that are longer than the page go on in the next line, below their own indentation. Long names in code may break behind a separator.
Tables with much text in three or more columns become a list of their rows where the page is narrow, each cell with the name of its column.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from docutils import nodes
from pygments.formatters import HtmlFormatter
from sphinx.application import Sphinx
from sphinx.highlighting import PygmentsBridge
from sphinx.transforms.post_transforms import SphinxPostTransform

#: a long name may break behind these
SEPARATORS = re.compile(r"(?<=[/_.,(=:\-\[])(?=[^\s/_.,(=:\-\[\])])(?!py\b)")
#: characters of a word from which it may break: in text, in a table, and at least in a line of code; and of a line on the narrowest page
LONG_IN_TEXT, LONG_IN_TABLE, LONG_IN_CODE, NARROWEST = 32, 12, 12, 26
#: stands for a place where a word may break until the HTML is made; no document has this character
BREAK = "\ue000"
#: characters in a cell, and columns, from which a table becomes a list on narrow pages
MUCH, MANY = 24, 3


def breakable(text: str, longest: int) -> str:
    """The text with `BREAK` where words longer than that may break."""
    return re.sub(rf"\S{{{longest + 1},}}", lambda word: SEPARATORS.sub(BREAK, word[0]), text)


class LineFormatter(HtmlFormatter[str]):
    """Each line of code is an element that knows its indentation, and may go on in the next line of the page."""

    def _format_lines(self, tokensource: Any) -> Iterator[tuple[int, str]]:
        tokens = list(tokensource)
        whole = "".join(value for _, value in tokens)
        texts = whole.split("\n")
        indents = [len(text) - len(text.lstrip()) for text in texts]
        marked = iter("\n".join(breakable(text, max(LONG_IN_CODE, NARROWEST - indent)) for text, indent in zip(texts, indents, strict=True)))
        placed = []
        for kind, value in tokens:
            taken: list[str] = []
            rest = len(value)
            while rest:
                character = next(marked)
                taken.append(character)
                rest -= character != BREAK
            placed.append((kind, "".join(taken)))
        for number, (is_code, line) in enumerate(super()._format_lines(placed)):  # type: ignore[misc]
            content = line.removesuffix("\n").replace(BREAK, "<wbr>")
            kind = "line" if texts[number].lstrip().startswith("#") else "line with-remark"
            yield is_code, f'<span class="{kind}" style="--indent: {indents[number]}ch">{content}</span>\n'


class BreakableNames(SphinxPostTransform):
    """Long names may break behind a separator, in text and in its code."""

    default_priority = 900
    formats = ("html",)

    def run(self, **options: Any) -> None:
        for text in list(self.document.findall(nodes.Text)):
            around = {type(parent) for parent in _parents(text)}
            if around & {nodes.literal_block, nodes.doctest_block, nodes.raw, nodes.math, nodes.math_block, nodes.title}:
                continue
            parts = breakable(text, LONG_IN_TABLE if nodes.entry in around else LONG_IN_TEXT).split(BREAK)
            if len(parts) > 1:
                broken = [[nodes.raw("", "<wbr>", format="html"), nodes.Text(part)] for part in parts]
                text.parent.replace(text, [node for pair in broken for node in pair][1:])


class NarrowTables(SphinxPostTransform):
    """Tables with much text have the name of the column in each cell, for pages on which they are lists; heads without names are left out."""

    default_priority = 890
    formats = ("html",)

    def run(self, **options: Any) -> None:
        for table in self.document.findall(nodes.table):
            head = next(table.findall(nodes.thead), None)
            body = next(table.findall(nodes.tbody), None)
            if head is None or body is None:
                continue
            names = [entry.astext() for entry in head[0].children]
            if not any(names):
                head.parent.remove(head)
            rows = [list(row.children) for row in body.children]
            if len(names) < MANY or not any(len(entry.astext()) > MUCH for row in rows for entry in row):
                continue
            table["classes"].append("stacks")
            for row in rows:
                for name, entry in zip(names, row, strict=False):
                    if not entry.astext().strip():
                        entry["classes"].append("empty")
                    elif name.strip():
                        entry.insert(0, nodes.paragraph("", name, classes=["column-name"]))


def _parents(node: nodes.Node) -> Iterator[nodes.Node]:
    while node.parent is not None:
        node = node.parent
        yield node


def setup(app: Sphinx) -> dict[str, Any]:
    PygmentsBridge.html_formatter = LineFormatter
    app.add_post_transform(BreakableNames)
    app.add_post_transform(NarrowTables)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

"""``.. rooms::``: the parts of the package by level, from the table of ``tests/layering.py``."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from tests import rooms


class Rooms(SphinxDirective):
    """One line per part, the highest level first."""

    def run(self) -> list[nodes.Node]:
        text = rooms.rooms()
        return [nodes.literal_block(text, text, language="text")]


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("rooms", Rooms)
    return {"parallel_read_safe": True}

"""``.. stepped:: # first line``: a recorded pass to step through, as a part of the page.

The block of Python of the same document that begins so is run when the document is built; its variable ``steps`` is the record.
"""

from __future__ import annotations

import ast
import asyncio
import linecache
import types
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective


async def run(code: str, file: str) -> dict[str, Any]:
    """Run code that awaits; returns its names. `file` is its name in what is shown."""
    linecache.cache[file] = (len(code), None, code.splitlines(keepends=True), file)
    names: dict[str, Any] = {"__name__": "documented"}
    await types.FunctionType(compile(code, file, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)()
    return names


class Stepped(SphinxDirective):
    """See the module."""

    required_arguments, final_argument_whitespace = 1, True

    def run(self) -> list[nodes.Node]:
        _, _, rest = Path(self.env.doc2path(self.env.docname)).read_text(encoding="utf-8").partition(f"```python\n{self.arguments[0]}\n")
        code = f"{self.arguments[0]}\n{rest.partition('```')[0]}"
        steps = asyncio.run(run(code, self.arguments[0].strip("# ")))["steps"]
        return [nodes.raw("", f'<div class="stepped">{steps._repr_html_()}</div>', format="html")]


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("stepped", Stepped)
    return {"parallel_read_safe": True}

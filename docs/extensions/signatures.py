"""Signatures as a reader writes them: types by their own names, and no value that is longer than a line."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

#: characters of a value that is shown
LONGEST_VALUE = 80


def plain(signature: str | None) -> str | None:
    """A signature with the names of type aliases."""
    return None if signature is None else re.sub(r"TypeAliasForwardRef\('(\w+)'\)", r"\1", signature)


def process(
    app: Sphinx, what: str, name: str, value: Any, options: Any, signature: str | None, returned: str | None
) -> tuple[str | None, str | None]:
    """Clean a signature that autodoc has made."""
    return plain(signature), plain(returned)


class ShortSignatures(SphinxTransform):
    """Types have their own names, without those of modules; the value of an attribute is shown if it is short."""

    default_priority = 500

    def apply(self, **options: Any) -> None:
        for signature in self.document.findall(addnodes.desc_signature):
            for text in list(signature.findall(nodes.Text)):
                if "~" in text:
                    text.parent.replace(text, nodes.Text(re.sub(r"~(?:\w+\.)*(\w+)", r"\1", text)))
            for value in signature.findall(addnodes.desc_annotation):
                if value.astext().startswith(" = ") and len(value.astext()) > LONGEST_VALUE:
                    value.clear()
                    value += nodes.Text(" = …")


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("autodoc-process-signature", process)
    app.add_transform(ShortSignatures)
    return {"parallel_read_safe": True}

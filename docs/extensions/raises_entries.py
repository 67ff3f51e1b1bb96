"""Each error of a ``Raises`` section is an entry of its own.

Docstrings write ``Raises: ShapeError: a shape is wrong. LoopError: there is no running loop.`` in one line where that is short. Napoleon takes what
follows the first name for its text, so entries are parted here before.
"""

from __future__ import annotations

import builtins
import re
from typing import TYPE_CHECKING, Any

import aiograd.errors

if TYPE_CHECKING:
    from sphinx.application import Sphinx

_VALUES = {**vars(builtins), **vars(aiograd.errors)}
_KNOWN = [name for name, value in _VALUES.items() if isinstance(value, type) and issubclass(value, BaseException)]
_NAME = rf"(?:{'|'.join(sorted(name for name in _KNOWN if not name.endswith('Error')))}|[A-Z]\w*Error)"
_NAMES = f"{_NAME}(?:(?:, | and | or ){_NAME})*"
#: the beginning of an entry: names with a text or without, or what is raised later
ENTRY = re.compile(rf"(?:When awaited(?:, {_NAMES})?: |{_NAMES}(?:: |\.?$))")
_BOUNDARY = re.compile(r"(?<=[.;]) ")


def split_entries(text: str) -> list[str]:
    """The entries in the text of a section, which is one line."""
    entries: list[str] = []
    start = 0
    for boundary in _BOUNDARY.finditer(text):
        if ENTRY.match(text, boundary.end()):
            entries.append(text[start : boundary.start()])
            start = boundary.end()
    entries.append(text[start:])
    return [entry.rstrip(".;") if ENTRY.fullmatch(entry) else entry.rstrip(";") for entry in entries]


def part_entries(lines: list[str]) -> list[str]:
    """The lines of a docstring with one line for each entry under ``Raises``."""
    found: list[str] = []
    section: list[str] = []
    indent: int | None = None

    def close() -> None:
        nonlocal indent
        text = " ".join(section)
        if text:
            found.extend(" " * (indent or 0) + "    " + entry for entry in split_entries(text))
            found.append("")
        section.clear()
        indent = None

    for line in lines:
        if indent is not None and line.strip() and len(line) - len(line.lstrip()) <= indent:
            close()
        if indent is None:
            found.append(line)
            if line.strip() == "Raises:":
                indent = len(line) - len(line.lstrip())
        elif line.strip():
            section.append(line.strip())
    if indent is not None:
        close()
    return found


def process(app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Part the entries of a docstring that Sphinx reads."""
    lines[:] = part_entries(lines)


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("autodoc-process-docstring", process, priority=400)  # before napoleon
    return {"parallel_read_safe": True}

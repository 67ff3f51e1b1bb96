"""The rooms of the package by level, as the documentation shows them: each with the first sentence of its docstring, and below it its packages."""

from __future__ import annotations

import ast
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.layering import LEVELS

ROOT = Path(__file__).parent.parent / "aiograd"
#: of a line, and of its name
WIDTH, NAME = 144, 26


def rooms() -> str:
    """The text: a block of lines for each level, the highest first."""
    levels = defaultdict(list)
    for name, level in LEVELS.items():
        levels[level].append(name)
    blocks = ["".join(line for name in levels[level] for line in _room(name)) for level in sorted(levels, reverse=True)]
    return f"{'─' * WIDTH}\n".join(blocks)


def _room(name: str) -> Iterator[str]:
    path = ROOT / name.replace(".", "/")
    yield from _lines(name, path)
    for package in sorted(each.parent for each in path.glob("*/__init__.py")):
        yield from _lines(f"  {package.name}/", package)


def _lines(name: str, path: Path) -> Iterator[str]:
    """A name and the first sentence of the docstring of its module or package."""
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    text = ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or ""
    sentence = re.split(r"\.(?:\s|$)", text, maxsplit=1)[0].replace("`", "")
    first, *rest = textwrap.wrap(sentence, WIDTH - NAME) or [""]
    yield f"{name:{NAME}}{first}\n"
    yield from (f"{'':{NAME}}{line}\n" for line in rest)

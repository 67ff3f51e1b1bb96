"""Docstrings and attribute comments (``#:``) name their subject: none begins with "What" or "Whether",
nor does a sentence of a docstring or the text of an argument."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.layering import statements

ROOT = Path(__file__).parent.parent / "aiograd"
RIDDLE = re.compile(r"(What|Whether)\b", re.IGNORECASE)
#: after the end of a sentence or an empty line; the title of a Note, in brackets, is no sentence
RIDDLE_SENTENCE = re.compile(r"(?:(?<=[.?!])\s+|\n\s*\n\s*)(What|Whether)\b")
#: an entry of Args or Attributes
RIDDLE_ENTRY = re.compile(r"\n\s+[a-z_][\w, ]*: (what|whether)\b")
ATTRIBUTE_COMMENT = re.compile(r"(?:^|\s)#:\s*(.*)")


def complaints(source: str) -> Iterator[tuple[int, str]]:
    """The lines of docstrings and attribute comments that begin so, each with its text."""
    for node in statements(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node, clean=False)
            if text is None:
                continue
            line = node.body[0].lineno
            if RIDDLE.match(text.lstrip()):
                yield line, text.strip().split("\n")[0]
            for found in (*RIDDLE_SENTENCE.finditer(text), *RIDDLE_ENTRY.finditer(text)):
                yield line + text.count("\n", 0, found.start(1)), text[found.start(1) :].split("\n")[0]
    lines = source.split("\n")
    for line, text in enumerate(lines, 1):
        comment = ATTRIBUTE_COMMENT.search(text)
        if comment and RIDDLE.match(comment[1]) and not (line > 1 and lines[line - 2].lstrip().startswith("#:")):
            yield line, comment[1]


def test_nothing_in_the_package_begins_with_a_riddle() -> None:
    sources = {path: path.read_text(encoding="utf-8") for path in sorted(ROOT.rglob("*.py"))}
    assert len(sources) > 20, "the package was found"
    found = [f"{path.relative_to(ROOT)}:{line}: {text}" for path, source in sources.items() for line, text in complaints(source)]
    assert not found, "say what it is, with a noun, or 'True if ...' of a truth value:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ('"""What a module is."""', 1),
        ('class A:\n    """Whether it is so."""', 2),
        ('async def f():\n    """\n    what it does.\n    """', 2),
        ("class A:\n    #: what it has\n    x = 1", 2),
        ("#: Whether it is so\nX = True", 1),
        ("X = 1  #: the number\n#: what it is\nY = 1", 2),
        ('def f():\n    """Do it. What is left\n    over is dropped."""', 2),
        ('def f():\n    """Do it.\n\n    Whether it was done is not told.\n    """', 4),
        ('def f(a, b):\n    """Do it.\n\n    Args:\n        a: the first.\n        b: whether to do it.\n    """', 6),
    ],
)
def test_a_riddle_is_found(source: str, line: int) -> None:
    assert [found for found, _ in complaints(source)] == [line]


def test_other_texts_are_not_complained_about() -> None:
    source = '"""Whatever: Note [What is meant].\n\nNote [What is meant]\n    A word."""\n#: the value, or\n#: what is in its place\nX = 1\n# what?\n'
    assert not list(complaints(source))

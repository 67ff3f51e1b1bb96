"""Counts the sentences of docstrings and comments in which code is a person or has no name.

``python -m tests.prose aiograd/cuda`` prints each with its place, and how many there are in all.

Note [What is counted]
    A sentence ends at ``.``, ``:``, ``;``, ``!`` or ``?`` before a blank, or at an empty line, and has at least two words. Code does not count:
    text in backticks, doctests and literal blocks; nor do comments for tools (``noqa``, ``type: ignore``, ``fmt: skip``).

    *person*: "who", "nobody", "everybody" and the like; name the module, task or worker.
    *riddle*: "what it is", "whatever", "those that"; name the thing by its noun.
    *that of*: "that of", "those of"; repeat the noun.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.layering import statements

PATTERNS: Mapping[str, re.Pattern[str]] = {
    "person": re.compile(r"\b(who|whoever|whom|whose|nobody|everybody|somebody|anybody)\b", re.IGNORECASE),
    "riddle": re.compile(r"\bwhat (it|is|was|they|has|comes|a|the)\b|\bwhatever\b|\bthose (that|which)\b", re.IGNORECASE),
    "that of": re.compile(r"\b(that|those) of\b", re.IGNORECASE),
}

_END = re.compile(r"(?<=[.:;!?])\s+|\n\s*\n")
_CODE = re.compile(r"``.+?``|`.+?`", re.DOTALL)
_LITERAL_BLOCK = re.compile(r"(?m)^(?P<indent> *)\S.*::\n(?:[ ]*\n)*(?:(?P=indent) +\S.*\n?|[ ]*\n)+")
_DOCTEST = re.compile(r"(?m)^ *(?:>>>|\.\.\.)(?: .*)?$")
_FOR_TOOLS = re.compile(r"(noqa|type: ignore|fmt:|pragma:|isort:|!/)")


@dataclass(frozen=True)
class Sentence:
    """A sentence and the line on which it begins."""

    line: int
    text: str

    @property
    def faults(self) -> list[str]:
        """The names of the patterns that occur in it."""
        text = _CODE.sub("code", self.text)
        return [name for name, pattern in PATTERNS.items() if pattern.search(text)]


def sentences(source: str) -> Iterator[Sentence]:
    """The sentences of all docstrings and comments of a module."""
    for line, text in _docstrings(source):
        for literal in (_LITERAL_BLOCK, _DOCTEST):
            text = literal.sub(lambda found: _without_code(found.group()), text)
        yield from _split(line, text)
    for line, text in _comments(source):
        yield from _split(line, text)


def _without_code(block: str) -> str:
    """The line that announces a literal block, and as many empty lines as it had; of a doctest nothing."""
    first, _, rest = block.partition("\n")
    return (first if first.endswith("::") else "") + "\n" * (rest.count("\n") + ("\n" in block))


def _docstrings(source: str) -> Iterator[tuple[int, str]]:
    for node in statements(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            if text is not None:
                yield node.body[0].lineno, text


def _comments(source: str) -> Iterator[tuple[int, str]]:
    """Comments on successive lines as one text."""
    block: list[str] = []
    first = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        text = token.string.lstrip("#: ")
        if token.start[0] != last + 1 and block:
            yield first, "\n".join(block)
            block = []
        if not block:
            first = token.start[0]
        block.append("" if _FOR_TOOLS.match(text) else text)
        last = token.start[0]
    if block:
        yield first, "\n".join(block)


def _split(line: int, text: str) -> Iterator[Sentence]:
    start = 0
    for end, following in [*((found.start(), found.end()) for found in _END.finditer(text)), (len(text), len(text))]:
        sentence = text[start:end]
        if len(sentence.split()) >= 2:
            leading = len(sentence) - len(sentence.lstrip())
            yield Sentence(line + text.count("\n", 0, start + leading), " ".join(sentence.split()))
        start = following


@dataclass
class Count:
    """Sentences of a part of the package."""

    all: int = 0
    faulty: int = 0

    @property
    def share(self) -> float:
        return self.faulty / max(self.all, 1)


def count(sources: Mapping[str, str]) -> dict[str, Count]:
    """The count of each top-level part (a package's name, or a module's), by paths relative to the package."""
    counts: dict[str, Count] = defaultdict(Count)
    for path, source in sources.items():
        part = counts[path.partition("/")[0].removesuffix(".py")]
        for sentence in sentences(source):
            part.all += 1
            part.faulty += bool(sentence.faults)
    return dict(counts)


def main() -> None:
    total = Count()
    for argument in sys.argv[1:] or ["aiograd"]:
        place = Path(argument)
        for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            for sentence in sorted(sentences(path.read_text(encoding="utf-8")), key=lambda each: each.line):
                total.all += 1
                if sentence.faults:
                    total.faulty += 1
                    print(f"{path}:{sentence.line}: {', '.join(sentence.faults)}: {sentence.text}")
    print(f"{total.faulty} of {total.all} sentences: {total.share:.1%}")


if __name__ == "__main__":
    main()

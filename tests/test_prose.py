"""The sentences that ``tests/prose.py`` counts stay few, in the package and in each part of it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.layering import package_sources
from tests.prose import Sentence, count, sentences

ROOT = Path(__file__).parent.parent / "aiograd"

#: of all sentences of the package and of each part, where one is allowed in any case
SHARE = 0.015


def test_the_counted_patterns_are_rare() -> None:
    counts = count(package_sources(ROOT))
    assert sum(part.all for part in counts.values()) > 10_000, "the package was found"
    found = {name: f"{part.faulty} of {part.all}" for name, part in counts.items() if part.faulty > max(1, math.ceil(SHARE * part.all))}
    assert not found, f"`python -m tests.prose aiograd/<part>` lists the sentences to mend: {found}"
    assert sum(part.faulty for part in counts.values()) <= SHARE * sum(part.all for part in counts.values())


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('"""Wait.\n\nTell whoever asks what it is."""', [(3, ["person", "riddle"])]),
        ("x = 1\n#: Those that wait, and\n#: that of the other.", [(2, ["riddle", "that of"])]),
        ('def f():\n    """A name: that of\n    a worker."""', [(2, ["that of"])]),
        ("# one line\n# of two. Nobody\n# knows", [(2, ["person"])]),
        ('"""Call `what it is` and ``whatever``, or :func:`nobody`."""', []),
        ('"""Write::\n\n    nobody = whatever(what, the)\n\nNow, who is it?"""', [(5, ["person"])]),
        ('"""Call.\n\n    >>> nobody or whatever\n\nBut whoever."""', [(5, ["person"])]),
        ("import x  # noqa: whatever it is\nx = 'who is it'", []),
    ],
)
def test_what_is_counted(source: str, expected: list[tuple[int, list[str]]]) -> None:
    assert [(each.line, each.faults) for each in sentences(source) if each.faults] == expected


def test_all_sentences_are_counted() -> None:
    source = '"""One line: two.\n\nThree lines.\n\n    Args:\n        a: four words."""\n# five or more; six words\n'
    assert [each.text for each in sentences(source)] == ["One line:", "Three lines.", "four words.", "five or more;", "six words"]
    assert not Sentence(1, "Those are the words that a reader knows.").faults
    parts = count({"a/b.py": "# who is it", "a/c/d.py": "# one line", "e.py": "# two lines"})
    assert {name: (part.faulty, part.all) for name, part in parts.items()} == {"a": (1, 2), "e": (0, 1)}

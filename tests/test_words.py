"""No identifier takes a word that was given up, see ``tests/words.py``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.layering import package_sources
from tests.words import RENAMES, uses

ROOT = Path(__file__).parent.parent / "aiograd"

#: words and the parts of the package that still have them; a list here only shrinks
LEFT: Mapping[str, str] = {
    "quietly": "kernels ops",
}


def test_words_that_were_given_up_stay_away() -> None:
    left = {word: set(parts.split()) for word, parts in LEFT.items()}
    found = [
        f"{use.path}:{use.line}: {use.identifier} (say {RENAMES[use.word].instead})"
        for use in uses(package_sources(ROOT))
        if use.part not in left.get(use.word, ())
    ]
    assert not found, found


@pytest.mark.parametrize(
    ("path", "source", "expected"),
    [
        ("a.py", "conversation = 1", ["conversation"]),
        ("a.py", "def f(self, _conversations): ...", ["_conversations"]),
        ("a.py", "class FormerRequests: ...", ["FormerRequests"]),
        ("a.py", "call.gave_up = f(ran_quietly=1)", ["gave_up", "ran_quietly"]),
        ("a.py", "from b.going_on import c, d as heirs", ["heirs"]),
        ("a.py", "import b.going_on", ["going_on"]),
        ("a.py", "try: ...\nexcept E as heir: ...", ["heir"]),
        ("a/heir.py", "", ["heir"]),
        ("a.py", "heartbeat = performer = gave = 1", []),
        ("a.py", "'''conversation'''\nconversation + 1", []),
        ("a.py", "driver = 1", ["driver"]),
        ("cuda/a.py", "driver = 1", []),
        ("distributed/autograd/a.py", "part = link = 1", ["part"]),
        ("distributed/rpc/a.py", "part = link = is_link_local = 1", ["link"]),
        ("pipeline/a.py", "host, to_host = b", ["host"]),
        ("cli/a.py", "host = 1", []),
    ],
)
def test_identifiers_with_given_up_words(path: str, source: str, expected: list[str]) -> None:
    assert sorted(use.identifier for use in uses({path: source})) == sorted(expected)

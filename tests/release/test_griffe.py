"""griffe compares descriptions of the public surface; ``make release``, which installs it, runs these tests."""

from __future__ import annotations

import pytest

from tests.release.checks import _griffe_breaks
from tests.release.surface import PROMISED, breaks

pytest.importorskip("griffe", reason="it comes with the extra `release`")
STABLE, PROVISIONAL = PROMISED
LINES = {
    "aiograd.f": "def (x, y=1, /, z=2, *args, k, **kwargs)",
    "aiograd.nn.init.zeros_": "def (x)",
    "aiograd.nn.Linear": "class (size, bias=True): aiograd.nn.Module",
    "aiograd.nn.Linear.forward": "def (self, x)",
    "aiograd.nn.Linear.size": "attribute",
}


@pytest.mark.parametrize(
    ("name", "line", "text"),
    [
        ("aiograd.f", None, "public object was removed"),
        ("aiograd.nn.init.zeros_", None, None),
        ("aiograd.nn.Linear", None, "public object was removed"),
        ("aiograd.nn.Linear.size", None, "public object was removed"),
        ("aiograd.f", "attribute", "public object points to a different kind of object"),
        ("aiograd.f", "def (x, y=2, /, z=2, *args, k, **kwargs)", "parameter default was changed"),
        ("aiograd.nn.Linear", "class (size, bias=True)", "base class was removed"),
        ("aiograd.nn.Linear", "class (size, bias): aiograd.nn.Module", "parameter is now required"),
        ("aiograd.nn.Linear.forward", "def (self, x, y)", "parameter was added as required"),
        ("aiograd.nn.Linear.forward", "def (self)", "parameter was removed"),
        ("aiograd.nn.Linear.forward", "def (self, x, y=1)", None),
    ],
)
def test_griffe_finds_a_break_and_so_does_the_comparison_of_calls(name: str, line: str | None, text: str | None) -> None:
    kept = LINES | {name: line} if line is not None else {each: LINES[each] for each in LINES if not each.startswith(name)}
    earlier, later = {STABLE: LINES, PROVISIONAL: {}}, {STABLE: kept, PROVISIONAL: {}}
    found = [(each.name, each.level, each.text) for each in _griffe_breaks(earlier, later)]
    assert found == [(name, STABLE, text)] * (text is not None)  # of a module without names it says nothing
    assert [each.name for each in breaks(earlier, later)] == [name] * (text is not None or line is None)

"""`make counts`: what is made of callgrind's files, what counts as a change, and that every program runs. Counting itself is `make counts`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.counts import __main__ as counts
from tests.counts import counting, programs
from tests.counts.counting import Change, changes, document, environment, passes, table
from tests.counts.programs import EDGE, GRAPHS, LINK, NAMES
from tests.support import assert_raises

LONG, SHORT = LINK[1:3]


def dumps(name: str, of_pass: int, passes: int = 4, noise: tuple[int, ...] = (0, 0, 0)) -> list[str]:
    """A file of callgrind for a program in which every count begins with 1000 instructions of its own; pairs differ by noise."""
    return [
        f"# callgrind format\ndesc: Trigger: Client Request: {name}: {pair} {times}\n\nevents: Ir\n"
        f"totals: {1000 + times * of_pass + more * (times > passes)}\n"
        for pair, more in enumerate(noise)
        for times in (passes, 2 * passes)
    ]


def test_a_count_is_of_one_pass_without_its_beginning_and_the_median_holds() -> None:
    assert passes(dumps(SHORT, 5000, noise=(0, 80_000, -4))) == {SHORT: 5000}
    program_end = "desc: Trigger: Program termination\ntotals: 7\n"
    assert passes([*dumps(LONG, 9000), *dumps(SHORT, 5000), program_end]) == {SHORT: 5000, LONG: 9000, LINK[0]: 40}
    assert_raises(ValueError, "expected 3 pairs of counts", passes, dumps(SHORT, 5000)[:-1])


def test_changes_of_more_than_three_percent_are_marked() -> None:
    found = changes({"a": 1000, "b": 1000, "c": 1000, "gone": 5}, {"a": 1029, "b": 1031, "c": 960, "new": 3})
    assert found == [Change("a", 1000, 1029), Change("b", 1000, 1031), Change("c", 1000, 960), Change("new", None, 3), Change("gone", 5, None)]
    assert [each.name for each in found if each.is_beyond] == ["b", "c", "new", "gone"]
    rows = [row.split() for row in table(found).splitlines()[1:]]
    assert rows[:3] == [["a", "1.0", "1.0", "+2.90%"], ["b", "1.0", "1.0", "+3.10%", "!"], ["c", "1.0", "1.0", "-4.00%", "!"]]
    assert rows[3:] == [["new", "-", "0.0", "-", "!"], ["gone", "0.0", "-", "-", "!"]]


def test_a_change_is_status_1_unless_it_is_kept_or_of_another_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(counts, "FILE", tmp_path / "counts.json")
    before: dict[str, Any] = document({SHORT: 1000, LONG: 2000})
    assert counts.compare({SHORT: 1010, LONG: 2010}, before, renew=False) == 0
    assert counts.compare({SHORT: 1040, LONG: 2000}, before, renew=False) == 1
    assert counts.compare({SHORT: 1040, LONG: 2000}, {**before, "environment": {"Python": "3.9.0"}}, renew=False) == 0
    assert "changes count for nothing" in capsys.readouterr().out
    assert counts.compare({SHORT: 1040}, before, renew=False) == 1
    assert counts.compare({SHORT: 1040}, before, renew=True) == 0
    assert json.loads((tmp_path / "counts.json").read_text()) == {"environment": environment(), "counts": {SHORT: 1040, LONG: 2000}}


def test_what_a_machine_lacks_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(counting.shutil, "which", lambda name: None)
    assert counts.main([]) == 0
    assert capsys.readouterr().out == "nothing was counted: this machine lacks valgrind, which `apt-get install valgrind` brings\n"
    assert_raises(SystemExit, None, counts.main, ["--names", "fly"])
    assert "no program is called fly; there are chain of 100" in capsys.readouterr().err


def test_the_kept_counts_are_of_the_programs() -> None:
    kept = json.loads(counts.FILE.read_text())
    assert [*kept["counts"]] == [*NAMES, LINK[0]] and all(value > 1000 for value in kept["counts"].values())
    assert kept["counts"][LINK[0]] == round((kept["counts"][LONG] - kept["counts"][SHORT]) / LINK[3])


class Library:
    """In the place of ``marks.c``."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def begin(self) -> None:
        self.said.append("begin")

    def end(self, name: bytes) -> None:
        self.said.append(name.decode())


def test_every_program_runs_and_is_counted_in_pairs() -> None:
    library = Library()
    programs.count(programs.Marks(library), [*NAMES])
    counted = {name: programs.EDGE_PASSES if name == EDGE else GRAPHS[name][1] for name in NAMES}
    expected = [f"{name}: {pair} {times}" for name, few in counted.items() for pair in range(3) for times in (few, 2 * few)]
    assert library.said == [word for name in expected for word in ("begin", name)]

"""A long run that is stopped goes on where it was, and has the same report in the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from aiograd.errors import ArgumentError
from tests.chaos import ledger
from tests.chaos.ledger import Ledger
from tests.sweeps import swept

PIECES = [("seeds", 0, 50), ("seeds", 50, 100), ("cells", 0, 50)]


def carry_out(found: Ledger) -> None:
    """Note each piece that is not done."""
    for piece in found.todo(PIECES):
        number = PIECES.index(piece)
        found.done(piece, runs=50, failures=["é: wrong"] * number, virtual=100.0, real=2.0 ** (number - 1), coverage={"kill": number})


def figures(found: Ledger) -> tuple[Any, ...]:
    return found.runs, sorted(found.failures), found.coverage, found.ratio, found.todo(PIECES)


@pytest.mark.parametrize("first", swept(range(15)))
def test_a_file_that_is_cut_off_anywhere_ends_as_one_that_is_not(tmp_path: Path, first: int) -> None:
    """As after a SIGKILL between any two bytes: each fifteenth of them, and the ends of lines."""
    whole = Ledger(tmp_path, 7)
    carry_out(whole)
    text = whole.path.read_bytes()
    assert figures(whole) == (150, ["é: wrong"] * 3, {"kill": 3}, 300 / 3.5, [])
    ends = [at + after for at, byte in enumerate(text) if byte == ord("\n") for after in (0, 1)]
    for bytes_left in [0, *range(first, len(text) + 1, 15), *ends, len(text)]:
        whole.path.write_bytes(text[:bytes_left])
        again = Ledger(tmp_path, 7)
        carry_out(again)
        assert figures(again) == figures(whole)
        assert again.path.read_bytes() == text, "no byte of a torn line stays"


def test_it_goes_on_with_what_is_left_in_its_order(tmp_path: Path) -> None:
    first = Ledger(tmp_path, (1, 2))
    first.done(PIECES[1], runs=50)
    again = Ledger(tmp_path, (1, 2))
    assert again.todo(PIECES) == [PIECES[0], PIECES[2]]
    again.done(PIECES[1], runs=50)
    assert again.runs == 50 == Ledger(tmp_path, [1, 2]).runs, "a piece counts once"
    assert again.ratio == 0.0


def test_a_folder_of_another_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    carry_out(Ledger(tmp_path, 7))
    with pytest.raises(ArgumentError, match="whose size is 7, expected 8"):
        Ledger(tmp_path, 8)
    monkeypatch.setattr(ledger, "current_commit", lambda: "another")
    with pytest.raises(ArgumentError, match="whose commit is .*expected another"):
        Ledger(tmp_path, 7)


def test_a_file_that_is_damaged_in_its_midst_is_refused(tmp_path: Path) -> None:
    whole = Ledger(tmp_path, 7)
    carry_out(whole)
    lines = whole.path.read_bytes().split(b"\n")
    lines[2] = lines[2][:-5]
    whole.path.write_bytes(b"\n".join(lines))
    with pytest.raises(ArgumentError, match="line 3 of 4 is damaged"):
        Ledger(tmp_path, 7)


def _command(folder: Path, *more: str) -> list[str]:
    options = ["--release", "--only-serving", "--seeds", "125", "--jobs", "1", "--folder", str(folder), *more]
    return [sys.executable, "-m", "tests.chaos", *options]


@pytest.mark.proc
@pytest.mark.sweep
def test_a_run_that_is_killed_and_one_that_ends_early_have_the_report_of_a_whole_one(tmp_path: Path) -> None:
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    pieces = killed / "pieces.jsonl"
    process = subprocess.Popen(_command(killed), stdout=subprocess.DEVNULL, cwd=ledger.ROOT, start_new_session=True)
    while process.poll() is None and (not pieces.exists() or pieces.read_bytes().count(b"\n") < 2):
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert 2 <= len(pieces.read_bytes().splitlines()) < 4, "killed in the midst"
    early = subprocess.run(_command(killed, "--hours", "0"), cwd=ledger.ROOT, capture_output=True, text=True, check=True)
    assert "pieces left          " in early.stdout and "the same command goes on" in early.stdout
    for folder in (killed, whole):
        subprocess.run(_command(folder), cwd=ledger.ROOT, capture_output=True, check=True)
    one, other = (json.loads((folder / "report.json").read_text()) for folder in (killed, whole))
    for report in (one, other):
        assert report["parts"]["serving"].pop("real") > 0 < report["parts"]["serving"].pop("ratio") and report.pop("ratio") > 0
        assert report["parts"]["serving"]["runs"] == 125 and report["parts"]["serving"]["left"] == 0 and report["failures"] == []
    assert one == other
    assert "| serving | 125 | 0 of 3 |" in (killed / "report.md").read_text()

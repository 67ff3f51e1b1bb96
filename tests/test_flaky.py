"""`make flaky`: which files are run how often, what is kept and what the table says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.flaky import __main__ as flaky
from tests.flaky.runs import busy, files, table
from tests.support import assert_raises

TEST = """
import pathlib, pytest
FILE = pathlib.Path(__file__).with_suffix(".count")
@pytest.mark.net
def test_odd():
    count = int(FILE.read_text()) + 1 if FILE.exists() else 0
    FILE.write_text(str(count))
    assert count % 2 == 0, "odd"
@pytest.mark.proc
def test_good(): pass
@pytest.mark.proc
@pytest.mark.sweep
def test_swept(): assert False
def test_neither(): assert False
"""


def test_files_with_tests_of_the_network_or_of_processes_are_found(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TEST)
    (tmp_path / "test_other.py").write_text("def test_it(): pass\n")
    (found,) = files([str(tmp_path)])
    assert found.endswith("test_it.py")
    (tmp_path / "test_broken.py").write_text("import nothing_of_the_kind\n")
    assert_raises(RuntimeError, "nothing_of_the_kind", files, [str(tmp_path)])


def test_a_test_that_fails_now_and_then_is_named_and_a_run_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "test_it.py").write_text(TEST)
    words = ["--tests", str(tmp_path), "--busy", "1", "--out", str(tmp_path / "out"), "--times"]
    assert flaky.main([*words, "1"]) == 0
    assert flaky.main([*words, "2"]) == 1
    said = capsys.readouterr().out
    assert "2 rounds, 1 runs of a file to do, 1 done" in said
    assert "1 of 2: " in said and "test_odd - AssertionError: odd" in said and "test_good" not in said and "test_swept" not in said
    (kept,) = (tmp_path / "out").glob("*.jsonl")
    assert [json.loads(line).get("ran") for line in kept.read_text().splitlines()[1:]] == [2, 2]
    assert [path.name for path in (tmp_path / "out").rglob("*.log")] == ["test_it-1.log"]
    assert flaky.main([*words, "2", "--seconds", "-1", "--anew"]) == 0
    assert "2 runs of a file to do, 0 done" in capsys.readouterr().out


def test_busy_processes_end_with_the_block() -> None:
    with busy(2) as processes:
        assert [process.poll() for process in processes] == [None, None]
    assert all(process.returncode == -9 for process in processes)


def test_a_table_counts_by_folder_and_by_test() -> None:
    lines = [
        {"piece": ["tests/a/test_x.py", 0], "ran": 3, "failures": ["tests/a/test_x.py::t - assert 1 == 2"], "seconds": 2.0},
        {"piece": ["tests/a/test_x.py", 1], "ran": 3, "failures": [], "seconds": 2.4},
        {"piece": ["tests/b/test_y.py", 0], "ran": 0, "failures": ["pytest ended with status -9, see log"], "seconds": 1.0},
    ]
    rows = table(lines).splitlines()
    assert [row.split() for row in rows[1:3]] == [["tests/a", "2", "6", "1", "4"], ["tests/b", "1", "0", "1", "1"]]
    assert rows[3:] == ["1 of 2: tests/a/test_x.py::t - assert 1 == 2", "1 of 1: tests/b/test_y.py: pytest ended with status -9, see log"]

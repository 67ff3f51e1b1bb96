"""The matrix: what rows ask for, what is made of bounds, and the table. The runs themselves are `make matrix`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from tests.matrix import __main__ as matrix
from tests.matrix import environments, releases
from tests.matrix.bounds import UnboundedError, lowest, project, requirements, tools
from tests.matrix.environments import LeftOutError, interpreter, words
from tests.matrix.rows import EXTRAS, ROWS, SAMPLE, SAMPLE_TESTS, TESTS, Environment, Result, Row, described, table
from tests.releases import builds
from tests.support import assert_raises

TABLE: dict[str, Any] = {
    "name": "it",
    "dependencies": ["numpy>=2.1", "uvloop>=0.21; sys_platform != 'win32'", "aiohttp>=3.14.1,<3.15", "old>=1; python_version < '3.12'"],
    "optional-dependencies": {
        "kernels": ["numba>=0.61,!=0.62"], "all": ["it[kernels,torch]", "numpy>=2.2,<3"], "torch": ["torch==2.13.0", "near~=1.4.2"], "open": ["pip"],
        "low": ["numpy>=2"],
        "dev": ["it[kernels]", "pytest>=9,<10", "ruff>=0.17", "hypothesis>=6", "pytest-xdist>=3"],
    },
}  # fmt: skip


def pins(*extras: str, python: str = "3.13") -> list[str]:
    return lowest(requirements(TABLE, extras, python))


def test_the_lowest_versions_are_the_lower_bounds() -> None:
    assert pins() == ["numpy==2.1", "uvloop==0.21", "aiohttp==3.14.1"]
    assert pins(python="3.11") == ["numpy==2.1", "uvloop==0.21", "aiohttp==3.14.1", "old==1"]


def test_extras_name_extras_and_the_highest_of_lower_bounds_holds() -> None:
    assert pins("all") == ["numpy==2.2", "uvloop==0.21", "aiohttp==3.14.1", "numba==0.61", "torch==2.13.0", "near==1.4.2"]
    assert pins("all", "low")[0] == "numpy==2.2"
    assert_raises(UnboundedError, "pip has no lower bound", pins, "open")
    assert tools(TABLE) == ["pytest>=9,<10", "hypothesis>=6", "pytest-xdist>=3"]


def test_every_requirement_of_the_project_has_a_lower_bound() -> None:
    found = project()
    listed = [*found["dependencies"], *(each for extra in found["optional-dependencies"].values() for each in extra)]
    for text in listed:
        requirement = Requirement(text)
        if requirement.name != found["name"] and not text.startswith("numpy<"):
            lowest([requirement])
    for extra in EXTRAS:
        assert lowest(requirements(found, (extra,), "3.13"))


def test_rows_have_names_of_their_own_and_their_tests_are_there() -> None:
    names = [row.name for row in ROWS]
    assert len({*names}) == len(names) and {*SAMPLE} < {*names}
    assert all((environments.ROOT / path).exists() for path in (*TESTS, *SAMPLE_TESTS))
    described_rows = {(row.environment, *sorted(row.variables.items())) for row in ROWS}
    assert len(described_rows) == len(ROWS), "no two rows are the same"


def test_an_environment_has_this_checkout_what_runs_tests_and_pins() -> None:
    found = words(Environment(lowest=True, extras=("kernels",)), "3.13")
    assert found[:2] == ["--editable", f"{environments.ROOT}[kernels]"]
    assert [each for each in found if each.startswith("numpy==")] == ["numpy==2.1.2"] and any(each.startswith("numba==") for each in found)
    assert not [each for each in words(Environment(), "3.13") if "==" in each]


def test_a_python_that_is_not_there_is_a_row_that_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.cpus.pythons.find", lambda version: None)
    said = "no Python 3.99 on the path or in pyenv; `uv python install 3.99` or `pyenv install 3.99` brings it"
    assert_raises(LeftOutError, said, interpreter, Environment("3.99"))
    result = matrix.run(Row("Python 3.99", Environment("3.99")), ["tests/graph"], 1)
    assert result.left_out == said and f"| left out: {said} |" in table([result])


def test_a_row_runs_its_tests_with_its_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    test = tmp_path / "test_it.py"
    test.write_text(
        "import os, sys, pytest\n"
        "def test_it(): assert os.environ['PYTHONHASHSEED'] == '4242' and sys.flags.hash_randomization\n"
        "def test_wrong(): assert not __debug__\n"
        "@pytest.mark.sweep\ndef test_swept(): assert False\n"
        "def test_skipped(): pytest.skip('here')\n"
    )
    monkeypatch.setattr(matrix, "OUT", tmp_path / "out")
    assert matrix.main(["--rows", "hash seed 4242", "--tests", str(test), "--releases", "--jobs", "1"]) == 1
    said = capsys.readouterr().out
    assert "PYTHONHASHSEED=4242 | 1 | 1 | 1 |" in said and "1 passed, 1 failed, 1 skipped" in said
    assert "hash seed 4242: " in said and "test_wrong" in said and "test_swept" not in said
    assert "PYTHONHASHSEED=4242 | 1 | 1 | 1 |" in (tmp_path / "out" / "matrix.md").read_text()
    assert matrix.main(["--rows", "optimized", "--tests", f"{test}::test_wrong", "--releases", "--jobs", "1"]) == 0


def test_a_table_has_environments_commands_and_failures() -> None:
    results = [Result("one", "Python 3.13", "python -m pytest", 3, 1, 2, 4.4, ("t::a - wrong",)), Result("two", "", "", left_out="no such thing")]
    assert table(results).splitlines()[2:] == [
        "| one | Python 3.13 | 3 | 1 | 2 | 4 |",
        "| two | left out: no such thing | | | | |",
        "",
        "one: python -m pytest",
        "",
        "one: t::a - wrong",
    ]
    assert described({"Python": "3.13.0", "numpy": "2.1.0", "uvloop": ""}) == "Python 3.13.0, numpy 2.1.0"


def test_unknown_rows_are_refused_and_known_ones_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert_raises(SystemExit, None, matrix.main, ["--rows", "windows"])
    assert "no row is called windows; there are lowest" in capsys.readouterr().err
    assert matrix.main(["--list"]) == 0
    assert "development mode" in capsys.readouterr().out


def test_a_release_that_git_does_not_know_is_left_out_and_one_that_fails_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "git has no commit no-such" in releases.row("no-such").left_out
    numbers = {"call": [1.0]}
    monkeypatch.setattr(builds, "package", lambda release: builds.ROOT / "old")
    answers = iter([numbers, {"refused": "WorkerLostError", "text": "gone"}, numbers])
    monkeypatch.setattr(builds, "together", lambda server, caller: next(answers))
    monkeypatch.setattr(releases, "_states", lambda folder, target: (True, "read"))
    result = releases.row("v1")
    assert (result.passed, result.failed) == (2, 1) and result.failures == ("serves: failed with WorkerLostError: gone",)
    assert result.environment == "serves: failed with WorkerLostError: gone; calls: work together; states: read"

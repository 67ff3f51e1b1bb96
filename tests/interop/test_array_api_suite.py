"""Where the conformance suite of the Array API comes from, and what is said where it cannot be had."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.interop import __main__ as everything
from tests.interop import array_api


def without_network(command: list[str], **options: Any) -> Any:
    return subprocess.CompletedProcess(command, 128, stderr="Cloning into 'x'...\nfatal: unable to access 'x': Could not resolve host\n")


@pytest.mark.parametrize("case", ["no network", "no git", "a wrong folder"])
def test_a_suite_that_cannot_be_had_is_one_line_and_the_other_tests_run(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("ARRAY_API_TESTS", raising=False)
    monkeypatch.setattr(array_api.subprocess, "run", without_network)
    if case == "no git":
        monkeypatch.setattr(array_api.shutil, "which", lambda name: None)
    if case == "a wrong folder":
        monkeypatch.setenv("ARRAY_API_TESTS", str(tmp_path))
    ran: list[Any] = []
    monkeypatch.setattr(everything.pytest, "main", lambda arguments: ran.append(arguments) or 0)
    monkeypatch.setattr("sys.argv", ["tests.interop", "--folder", str(tmp_path / "suite")])
    assert everything.main() == 1 and len(ran) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "Array API" in line]
    expected = {"no network": "Could not resolve host", "no git": "found no git", "a wrong folder": f"ARRAY_API_TESTS={tmp_path}"}[case]
    assert "MISSING" in line and expected in line and "set ARRAY_API_TESTS" in line


def test_a_copy_of_the_suite_is_taken_from_the_folder_that_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "given" / "array_api_tests").mkdir(parents=True)
    monkeypatch.setenv("ARRAY_API_TESTS", str(tmp_path / "given"))
    assert (array_api.place(tmp_path / "out") / "array_api_tests").is_dir()

"""The command line, run as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import aiograd as ag
from aiograd import cli


def test_doctor_says_what_there_is_and_that_it_works(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    printed = capsys.readouterr().out
    for word in (ag.__version__, "numpy", "BLAS", "kernels", "event loop", "works"):
        assert word in printed


async def recorded(path: Path) -> None:
    with ag.profiler.profile() as profile:
        x = ag.tensor([1.0, 2.0], requires_grad=True)
        await (x * x).sum().backward()
    profile.chrome_trace(path)


def test_trace_merges_and_prints_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second, merged = (tmp_path / name for name in ("a.json", "b.json", "merged.json"))
    ag.run(recorded(first))
    ag.run(recorded(second))
    assert cli.main(["trace", str(first), str(second), "-o", str(merged)]) == 0
    printed = capsys.readouterr().out
    assert "mul" in printed and "sum" in printed and str(merged) in printed
    events = json.loads(merged.read_text())["traceEvents"]
    assert len({event["pid"] for event in events}) == 2, "two processes, told apart"


def test_a_missing_trace_is_one_line_on_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trace", str(tmp_path / "none.json")]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("aiograd trace:") and captured.err.count("\n") == 1


@pytest.mark.parametrize("words", [[], ["unknown"], ["trace"]])
def test_wrong_words_are_explained(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(words)
    assert stop.value.code == 2
    assert "usage: aiograd" in capsys.readouterr().err

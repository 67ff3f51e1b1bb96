"""The demo keeps its promises, notices when it does not, and can be read everywhere."""

from __future__ import annotations

import asyncio
import io
import json
import re
from pathlib import Path

import pytest

from aiograd.running import cli
from aiograd.running.cli.demo import Options, show, story
from aiograd.running.cli.demo.alone import rate
from aiograd.running.cli.demo.data import Digits, batches
from aiograd.running.cli.demo.display import Display
from aiograd.running.cli.demo.model import BLOCKS, Network, cut
from aiograd.running.cli.demo.story import identical
from tests.sweeps import swept


@pytest.mark.proc
@pytest.mark.slow
@pytest.mark.parametrize("on", swept(["local", "join"]))
def test_the_demo_loses_a_worker_and_arrives_at_the_same_bits(on: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "--on", on, "--epochs", "2", "--output", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    killed = ("killed with SIGKILL", "WorkerLostError", "worker1 runs again", "in the same step")
    for words in ("have the same bits", *killed, "epoch    2/2", "everything promised was so"):
        assert words in printed, printed
    assert len(re.findall("^  ✓ ", printed, re.MULTILINE)) == 6 and "\r" not in printed
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {"driver", "worker0", "worker1"}


@pytest.mark.proc
@pytest.mark.slow
async def test_a_broken_promise_is_said_and_is_the_exit_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(story, "identical", lambda some, others: False)
    stream = io.StringIO()
    assert await show(Options(epochs=1, workers=1, kill=False, output=tmp_path), Display(stream)) == 1
    assert stream.getvalue().count("  ✗ ") == 2 and "2 of the promised checks FAILED" in stream.getvalue()


@pytest.mark.proc
@pytest.mark.slow
async def test_a_replica_that_is_not_absorbed_is_a_broken_promise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the kill nothing is lost, and the demo says so."""
    monkeypatch.setattr(story.os, "kill", lambda pid, number: None)
    monkeypatch.setattr(story._Demo, "train", lambda demo: asyncio.sleep(0))
    monkeypatch.setattr(story._Demo, "conclude", lambda demo, weights: asyncio.sleep(0))
    stream = io.StringIO()
    assert await show(Options(epochs=1, workers=1, output=tmp_path), Display(stream)) == 1
    assert re.search("✗ the others computed its part", stream.getvalue()) and stream.getvalue().count("  ✗ ") == 1


@pytest.mark.parametrize("parts", range(1, len(BLOCKS) + 1))
def test_the_parts_of_the_network_are_the_network(parts: int) -> None:
    whole = Network(seed=3).state_dict()
    pieces = [Network(blocks, seed=3).state_dict() for blocks in cut(parts)]
    assert all(pieces) and sum(map(len, pieces)) == len(whole)
    assert identical({name: value for piece in pieces for name, value in piece.items()}, whole)
    assert not identical(Network(seed=4).state_dict(), whole)


def test_every_image_is_in_one_batch_of_an_epoch_and_none_is_for_both_purposes() -> None:
    digits = Digits.load()
    assert len(digits.labels) + len(digits.test_labels) == 1797 and digits.images.shape[1:] == (1, 8, 8)
    seen = [index for batch in batches(len(digits.labels), 5) for index in batch]
    assert sorted(seen) == list(range(len(digits.labels)))
    assert seen != [index for batch in batches(len(digits.labels), 6) for index in batch]
    assert len(digits.batches(0)) == digits.steps


def test_the_rate_falls() -> None:
    rates = [rate(epoch, 10) for epoch in range(10)]
    assert rates == sorted(rates, reverse=True) and rates[-1] > 0


def test_the_display_gets_by_with_few_signs() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    display = Display(stream)
    with display.bar(10) as bar:
        bar.step(5, "half of it")
        display.note("scissors", "✂")
        assert display.check(True, "this is so") and not display.check(False, "日本 " * 50)
    stream.seek(0)
    text = stream.read()
    assert text.startswith("  -- scissors\n  ok this is so\n  FAILED ?? ??") and "\n         ?? ??" in text
    assert len(display.failures) == 1

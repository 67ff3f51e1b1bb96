"""`aiograd wan`: its table and its plot."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from aiograd.running import cli
from aiograd.running.cli.wan.modelled_work import ModelledNetwork, layer_sizes
from aiograd.running.cli.wan.plot import Curve, plot_svg
from aiograd.running.cli.wan.simulated_methods import UP, Measurement, Setting, SimulatedLines, methods, payload_round
from aiograd.testing import simulated_run

SMALL = ["wan", "--workers", "12", "--few", "3", "--parameters", "6e4", "--step-seconds", "0.1", "--steps", "5", "--latency", "0.01"]


def _table(printed: str) -> dict[float, list[float]]:
    """The rows of a table by Mbit/s."""
    rows = [list(map(float, line.split())) for line in printed.splitlines() if re.fullmatch(r"[\d. ]+", line) and line.strip()]
    return {row[0]: row[1:] for row in rows}


def test_the_table_says_what_was_run_and_a_seed_repeats_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    texts = []
    for number in range(2):
        path = tmp_path / str(number) / "wan.svg"
        assert cli.main([*SMALL, "--mbit", "10,1", "--loss", "0.01", "--seed", "3", "--svg", str(path)]) == 0
        texts.append((capsys.readouterr().out.replace(str(path), ""), path.read_text()))
    assert texts[0] == texts[1]
    printed, svg = texts[0]
    assert "60,000 parameters, 0.1 s per step, rounds of 5 steps; seed 3" in printed and "1 % of the packets lost" in printed
    assert re.search(r"^A  DataParallel, 3 workers: 2 steps of the library$", printed, re.MULTILINE)
    assert re.search(r"^\w  LocalSteps, 12 workers: requests of 2 rounds, payloads of TopK.*no parameters", printed, re.MULTILINE)
    table = _table(printed)
    assert list(table) == [1, 10], "ascending"
    assert ElementTree.fromstring(svg).get("class") == "aiograd-plot"  # noqa: S314 - it was made here
    for name in ("DataParallel, 3 workers", "LocalSteps, 12 workers"):
        assert f">{name}</text>" in svg
    assert cli.main([*SMALL, "--mbit", "10", "--loss", "0.01", "--seed", "4"]) == 0
    assert _table(capsys.readouterr().out)[10] != table[10], "another seed loses other packets"


def _setting(**options: Any) -> Setting:
    given = {"parameters": 60_000, "step_seconds": 0.05, "steps": 5, "mbit": 1.0, "coordinator_mbit": 1000, "latency": 1e-4, "loss": 0, "seed": 1}
    return Setting(**{**given, **options})


def test_the_figures_are_those_of_the_lines() -> None:
    """Two lines that differ by ten: what a step sends does not change, and takes ten times as long."""
    few, sent = 3, 4 / 3 * 4 * 60_000
    for method in methods(few, few, 2):
        fast, slow = (method.measure(_setting(mbit=mbit)) for mbit in (1.0, 0.1))
        for measurement in (fast, slow):
            assert measurement.utilisation == pytest.approx(0.05 / measurement.seconds) and measurement.seconds > 0.05
        assert fast.utilisation > slow.utilisation
        if "DataParallel" in method.name:
            assert 2 * sent < fast.bytes < 2 * sent * 1.1, "a ring sends and receives so much"
            for measurement, rate, most in ((fast, 125_000, 1.1), (slow, 12_500, 1.35)):
                assert sent / rate < measurement.seconds - 0.05 < most * sent / rate, "never faster than the line, and hardly slower"
        else:
            assert fast.bytes < 4000


def test_payloads_take_the_time_of_the_rounds_that_they_stand_for() -> None:
    """A round of requests with payloads and answers of the right sizes takes almost as long as a round of the library."""
    size, more = sum(map(UP.packed_size, layer_sizes(60_000))), 1200

    async def payloads(setting: Setting) -> Measurement:
        return await SimulatedLines(setting, 3).coordinate(partial(payload_round, sizes=(size, 2 * size)), are_peers=False)

    for setting in (_setting(mbit=0.25), _setting(mbit=10.0, latency=0.05)):
        rounds = methods(3, 3, 2)[2].measure(setting)
        modelled = simulated_run(payloads, setting).value
        assert 0 < setting.steps * (rounds.bytes - modelled.bytes) < more
        assert 0 < setting.steps * (rounds.seconds - modelled.seconds) < more / (setting.mbit * 125_000)


def test_layers_have_all_parameters() -> None:
    for parameters in (1, 7, 8, 1001):
        sizes = layer_sizes(parameters)
        assert sum(sizes) == parameters and 0 < min(sizes) and max(sizes) - min(sizes) <= 1
        assert sum(each.numel() for each in ModelledNetwork(parameters, 0.0, 1).parameters()) == parameters


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--mbit", "1,fast"], "expected a number, found 'fast'"),
        (["--mbit", "1,0"], "expected a number above 0"),
        (["--parameters", "1.5"], "expected a whole number such as 1000 or 1e6"),
        (["--workers", "0"], "above 0"),
        (["--loss", "1"], "from 0 to below 1"),
        (["--seed", "-1"], "at least 0"),
        (["--seed", "x"], "at least 0"),
        (["--step-seconds", "inf"], "above 0"),
        (["--latency", "nan"], "above 0"),
    ],
)
def test_options_that_cannot_be(capsys: pytest.CaptureFixture[str], words: list[str], says: str) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["wan", *words])
    captured = capsys.readouterr()
    assert caught.value.code == 2 and says in captured.err and captured.out == ""


def test_a_plot_places_points_by_the_logarithm() -> None:
    svg = plot_svg(
        "a < b", "x", "y", [Curve("one & two", [(1.0, 0.0), (10.0, 0.5), (100.0, 1.0)]), Curve("other", [(1.0, 1.0), (10.0, 1.0), (100.0, 1.0)])]
    )
    root = ElementTree.fromstring(svg)  # noqa: S314 - it was made here
    circles = [(float(each.get("cx", "")), float(each.get("cy", ""))) for each in root.iter("{http://www.w3.org/2000/svg}circle")]
    (x0, y0), (x1, y1), (x2, y2) = circles[:3]
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2) and y0 - y1 == pytest.approx(y1 - y2, abs=0.2) and x0 < x1 and y0 > y1
    assert {y for _, y in circles[3:]} == {y2}
    texts = [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"a < b", "one & two", "other", "10", "0.4"} <= set(texts)
    plot_svg("one point", "x", "y", [Curve("it", [(3.0, 0.5)])])

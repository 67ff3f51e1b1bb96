"""`aiograd wan`: its table and its plot."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from aiograd.running import cli
from aiograd.running.cli.wan.plot import Curve, plot_svg
from aiograd.running.cli.wan.simulated_methods import Setting, methods

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
    assert re.search(r"^\w  LocalSteps, 12 workers: 1 round: .* payloads of TopK", printed, re.MULTILINE)
    table = _table(printed)
    assert list(table) == [1, 10], "ascending"
    assert ElementTree.fromstring(svg).get("class") == "aiograd-plot"  # noqa: S314 - it was made here
    for name in ("DataParallel, 3 workers", "LocalSteps, 12 workers"):
        assert f">{name}</text>" in svg
    assert cli.main([*SMALL, "--mbit", "10", "--loss", "0.01", "--seed", "4"]) == 0
    assert _table(capsys.readouterr().out)[10] != table[10], "another seed loses other packets"


def test_the_figures_are_those_of_the_lines() -> None:
    """Two lines that differ by ten: what a step sends does not change, and takes a tenth of the time."""
    parameters, seconds, few = 60_000, 0.05, 3
    fast, slow = (
        {
            method.name: method.measure(
                Setting(parameters=parameters, step_seconds=seconds, steps=5, mbit=mbit, coordinator_mbit=1000, latency=1e-4, loss=0, seed=1)
            )
            for method in methods(few, few)
        }
        for mbit in (1.0, 0.1)
    )
    assert list(fast) == list(dict.fromkeys(method.name for method in methods(few, few)))
    sent = 2 * (few - 1) / few * 4 * parameters
    for name in ("DataParallel", "DistributedDataParallel"):
        assert 2 * sent < fast[name].bytes < 2 * sent * 1.1, "a ring sends and receives so much"
        assert fast[name].seconds == pytest.approx(sent / 125_000, rel=0.15)
        assert slow[name].seconds == pytest.approx(sent / 12_500, rel=0.15)
        assert fast["LocalSteps"].bytes < fast[name].bytes / 20
    for measurements in (fast, slow):
        for measurement in measurements.values():
            assert measurement.utilisation == pytest.approx(seconds / measurement.seconds)
            assert measurement.seconds > seconds
    assert slow["LocalSteps"].utilisation < fast["LocalSteps"].utilisation


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--mbit", "1,fast"], "expected a number, found 'fast'"),
        (["--mbit", "1,0"], "expected a number above 0"),
        (["--parameters", "1.5"], "expected a whole number such as 1000 or 1e6"),
        (["--workers", "0"], "above 0"),
        (["--loss", "1"], "from 0 to below 1"),
        (["--step-seconds", "inf"], "above 0"),
        (["--latency", "nan"], "above 0"),
    ],
)
def test_options_that_cannot_be(capsys: pytest.CaptureFixture[str], words: list[str], says: str) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["wan", *words])
    assert caught.value.code == 2 and says in capsys.readouterr().err


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

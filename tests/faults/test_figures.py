"""Figures and pictures of the table of faults, against an oracle that looks at one position and one fault at a time."""

from __future__ import annotations

import json
import math
import random
import xml.etree.ElementTree as ET
from collections import Counter

import pytest

from tests.faults import task
from tests.faults.figures import figures, nearest_rank, other_bits
from tests.faults.report import chart, table


def line(t, began, step=0, first=0, count=1, bits="", kind="step", who="replica0"):
    return {"t": t, "began": began, "kind": kind, "step": step, "first": first, "count": count, "bits": bits, "who": who, "pid": 1}


def test_an_undisturbed_run_is_wholly_useful():
    lines = [line(number + 1.0, float(number), number, 8 * number, 8) for number in range(10)]
    found = figures(lines, (), 0.0, 10.0, 8.0)
    assert found.useful == pytest.approx(1.0)
    assert (found.to_next, found.p50, found.p99, found.longest, found.lost, found.twice) == ((), 0.0, 0.0, 0.0, 0, 0)


def test_recovery_is_the_first_step_that_began_after_the_fault():
    lines = [line(1.0, 0.0), line(2.0, 1.0), line(5.0, 1.5), line(4.5, 4.0), line(4.2, 4.1)]
    assert figures(lines, [1.2, 0.5, 4.1], 0.0, 10.0, 1.0).to_next == (1.5, 3.8, math.inf)
    assert figures(lines, [{"t": 0.5}], 0.0, 10.0, 1.0).longest == 1.5


def test_lost_positions_lie_between_the_first_and_the_last_used():
    lines = [line(1.0, 0.0, first=10, count=5), line(2.0, 1.0, first=13, count=5), line(3.0, 2.0, first=20, count=1)]
    found = figures(lines, (), 0.0, 3.0, 1.0)
    assert (found.lost, found.twice) == (2, 2)  # 18 and 19; 13 and 14
    assert found.useful == pytest.approx(9 / 3)


@pytest.mark.parametrize(
    ("slow_from", "held", "useful", "to_next"),
    [
        (None, 0.0, 1.0, 0.2),  # waited out between two steps
        (None, 0.3, 0.97, 0.5),  # a link that is cut holds the step that is under way
        (0.0, 0.0, 0.75, 0.3),  # a slow link: steps of twice the time
    ],
)
def test_links_that_are_cut_or_slow(slow_from, held, useful, to_next):
    """Steps of 0.1 s for 10 s; a link is struck at 4.95, in the midst of a step; what is slow is so from the step after it on."""
    lines, now = [], 0.0
    while now < 10.0 - 1e-9:
        seconds = 0.1 + (held if now < 4.95 < now + 0.1 else 0.0) + (0.1 if slow_from is not None and now > 4.95 else 0.0)
        lines.append(line(now + seconds, now, len(lines), len(lines)))
        now += seconds
    found = figures(lines, [4.95], 0.0, 10.0, 10.0)
    assert found.useful == pytest.approx(useful, abs=0.02)
    assert found.to_next[0] == pytest.approx(to_next - 0.05)
    assert (found.lost, found.twice) == (0, 0)


def test_lines_of_other_kinds_and_json_texts():
    lines = [json.dumps(line(1.0, 0.0, count=4)), line(1.5, 1.0, first=90, kind="runs")]
    found = figures(lines, [0.5], 0.0, 2.0, 1.0)
    assert found.useful == 2.0
    assert found.to_next == (math.inf,)


@pytest.mark.parametrize("seed", range(50))
def test_against_the_oracle(seed):
    generator = random.Random(seed)
    lines = []
    for _ in range(generator.randrange(40)):
        began = generator.uniform(0, 20)
        lines.append(line(began + generator.expovariate(2), began, first=generator.randrange(60), count=generator.randrange(1, 9)))
    faults = [generator.uniform(0, 22) for _ in range(generator.randrange(6))]
    found = figures(lines, faults, 5.0, 15.0, 3.0)

    uses = Counter(position for each in lines for position in range(each["first"], each["first"] + each["count"]))
    timely = {position for each in lines if 5.0 <= each["t"] <= 15.0 for position in range(each["first"], each["first"] + each["count"])}
    assert found.useful == pytest.approx(len(timely) / 10.0 / 3.0)
    assert found.twice == sum(count - 1 for count in uses.values())
    assert found.lost == (sum(position not in uses for position in range(min(uses), max(uses))) if uses else 0)
    for struck, seconds in zip(sorted(faults), found.to_next, strict=True):
        after = sorted((each["began"], each["t"]) for each in lines if each["began"] > struck)
        assert seconds == (after[0][1] - struck if after else math.inf)
    assert found.longest == max(found.to_next, default=0.0)
    for share, percentile in ((0.5, found.p50), (0.99, found.p99)):
        assert percentile == nearest_rank(found.to_next, share)


def test_nearest_rank():
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert [nearest_rank(values, share) for share in (0.0, 0.2, 0.21, 0.5, 0.99, 1.0)] == [1.0, 1.0, 2.0, 3.0, 5.0, 5.0]
    assert nearest_rank([], 0.5) == 0.0


@pytest.mark.parametrize(("began", "ended", "rate"), [(1.0, 1.0, 1.0), (2.0, 1.0, 1.0), (0.0, 1.0, 0.0), (0.0, 1.0, float("nan"))])
def test_figures_of_no_time_and_of_no_rate(began, ended, rate):
    with pytest.raises(ValueError, match="expected an end after the beginning"):
        figures([], [], began, ended, rate)


def test_other_bits_are_counted_by_step():
    calm = [line(1.0, 0.0, step, bits=f"{step}") for step in range(4)]
    assert other_bits([line(1.0, 0.0, 0, bits="0"), line(1.0, 0.0, 2, bits="x"), line(1.0, 0.0, 9, bits="9"), line(1.0, 0.0, 3)], calm) == 1


ROWS = [
    {"system": "one", "fault": "kill", "useful": 0.987, "p50": 0.125, "longest": math.inf, "lost": 0, "twice": 3, "faults": 5},
    {"system": "two|", "fault": "kill", "skipped": "two is not installed: <no> such\nversion"},
]


def test_the_table():
    head, _, one, two = table(ROWS).splitlines()
    assert head.startswith("| system | fault | useful time | to the next step, median s | longest s |")
    assert one.startswith("| one | kill | 98.7% | 0.12 | never | 0 | 3 |")
    assert two.startswith("| two\\| | kill | skipped: two is not installed: <no> such version |")
    assert len({each.replace("\\|", "").count("|") for each in (head, one, two)}) == 1


def test_the_least_and_the_most_of_several_runs_stand_beside_the_median():
    row = {**ROWS[0], "load": 2.0, "runs": 3, "spread": {"useful": (0.951, 0.99), "p50": (0.1, math.inf), "load": (2.0, 2.0)}}
    *_, text = table([row]).splitlines()
    assert text.startswith("| one | kill | 98.7% (95.1%..99.0%) | 0.12 (0.10..never) | never | 0 | 3 |")
    assert text.endswith("| 5 | 3 | 2.0 |")


def test_the_chart_is_a_picture_with_a_bar_for_each_row_that_has_the_figure():
    picture = chart(ROWS, "useful", "Useful & more")
    root = ET.fromstring(picture)  # noqa: S314 - it is ours
    texts = [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[0] == "Useful & more"
    assert "98.7%" in texts
    assert any("<no> such" in text for text in texts)
    assert len(list(root.iter("{http://www.w3.org/2000/svg}rect"))) == 2  # the ground and a bar
    ET.fromstring(chart(ROWS, "longest", "never ends"))  # noqa: S314 - it is ours
    ET.fromstring(chart([], "useful", "nothing"))  # noqa: S314 - it is ours
    with pytest.raises(ValueError, match="no figure is called 'speed'"):
        chart(ROWS, "speed", "")


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 5, 7])
def test_the_parts_of_a_step_are_its_positions(parts):
    shares = [task.share(step, part, parts) for step in (0, 1) for part in range(parts)]
    positions = [position for first, count in shares for position in range(first, first + count)]
    assert positions == list(range(2 * task.BATCH))

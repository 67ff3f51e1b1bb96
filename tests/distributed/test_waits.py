"""Reports of waits: cycles against brute force, JSON from peers, and the text."""

from __future__ import annotations

import copy
import itertools
import json
import pickle
import random
from collections.abc import Iterator, Sequence
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from aiograd import distributed as dist
from aiograd.distributed import waits
from aiograd.errors import ArgumentError, ProtocolError
from tests.support import assert_raises

Work = tuple[str, str]
Edges = Sequence[tuple[Work, Work]]


def report_of(edges: Edges) -> dist.WaitReport:
    return dist.WaitReport(tuple(dist.Wait(*start, *end) for start, end in edges))


def distances(start: Work, edges: Edges) -> dict[Work, int]:
    """Edges of the shortest way of at least one edge from a node to each node that it reaches."""
    found: dict[Work, int] = {}
    reached = {start}
    for length in itertools.count(1):
        reached = {end for begin, end in edges if begin in reached and end not in found}
        if not reached:
            return found
        found |= dict.fromkeys(reached, length)
    raise AssertionError


def graphs() -> Iterator[Edges]:
    """Every graph of up to three nodes, and random ones."""
    small = [("a", "s"), ("a", "t"), ("b", "s")]
    every = list(itertools.product(small, small))
    for count in range(len(every) + 1):
        yield from itertools.combinations(every, count)
    generator = random.Random(7)
    for _ in range(300):
        nodes = [(f"w{generator.randrange(6)}", f"t{generator.randrange(4)}") for _ in range(generator.randrange(1, 16))]
        yield [(generator.choice(nodes), generator.choice(nodes)) for _ in range(generator.randrange(3 * len(nodes)))]


def test_cycles_are_one_shortest_of_each_part_by_brute_force() -> None:
    seen = {"cycles": 0, "several": 0, "longest": 0}
    for edges in graphs():
        cycles = report_of(edges).cycles
        reach = {node: distances(node, edges) for node in {node for edge in edges for node in edge}}
        parts = {frozenset(other for other in reach if other in reach[node] and node in reach[other]) for node in reach if node in reach[node]}
        assert cycles == tuple(sorted(cycles))
        assert {cycle[0] for cycle in cycles} == {min(part) for part in parts} and len(cycles) == len(parts)
        for cycle in cycles:
            assert len(cycle) == len({*cycle}) == reach[cycle[0]][cycle[0]], "no shorter one goes through its first node"
            assert all(edge in edges for edge in itertools.pairwise((*cycle, cycle[0])))
        seen["cycles"] += len(cycles)
        seen["several"] += len(cycles) > 1
        seen["longest"] = max(seen["longest"], *map(len, cycles), 0)
    assert seen["cycles"] > 500 and seen["several"] > 50 and seen["longest"] >= 5, seen


def test_of_several_shortest_cycles_the_least_is_found_whatever_the_order() -> None:
    a, b, c, d = (("w", name) for name in "abcd")
    edges = [(a, c), (c, a), (a, b), (b, a), (c, d), (d, c)]
    for order in itertools.permutations(edges):
        assert report_of(order).cycles == ((a, b),)


def test_two_passes_that_wait_for_each_others_workers_are_no_cycle() -> None:
    report = report_of([(("a", "pass 1"), ("b", "pass 1")), (("b", "pass 2"), ("a", "pass 2"))])
    assert report.cycles == ()


def test_what_waits_for_no_worker_is_in_no_cycle() -> None:
    assert dist.WaitReport((dist.Wait("a", ""), dist.Wait("a", "", "", ""))).cycles == ()


def test_a_chain_of_any_length_needs_no_stack() -> None:
    works = [("w", f"{i:06}") for i in range(10_000)]
    assert report_of(list(itertools.pairwise(works))).cycles == ()
    assert report_of([*itertools.pairwise(works), (works[-1], works[0])]).cycles == (tuple(works),)


def test_a_thousand_workers_with_five_waits_each() -> None:
    generator = random.Random(3)
    works = [(f"worker{i}", f"pass {j}") for i in range(1000) for j in range(5)]
    ring = [works[i] for i in generator.sample(range(1, len(works)), 40)]
    report = report_of([*zip(works, [works[0]] * len(works), strict=True), *zip(ring, (*ring[1:], ring[0]), strict=True)])
    first = ring.index(min(ring))
    assert report.cycles == ((works[0],), (*ring[first:], *ring[:first])), "a self-loop, which all reach, and the ring"
    assert len(str(report)) < 50_000 and "5,040 waits on 1,000 workers, 2 cycles" in str(report)


# ---------------------------------------------------------------- values


FULL = dist.WaitReport(
    (dist.Wait("a", "call ü", "b", "pass 1", "f\n", "x.py:1", 1.25, 'say "ü"'), dist.Wait("b", "pass 1", seconds=3)),
    (dist.HeldLoop("c", 0.5, "y.py:2"),),
    {"d": "no answer", "e": "\ud800"},
    0.125,
)


@pytest.mark.parametrize("report", [dist.WaitReport(), FULL], ids=["empty", "full"])
def test_a_report_survives_json(report: dist.WaitReport) -> None:
    text = report.to_json()
    again = dist.WaitReport.from_json(text)
    assert again == report and hash(again) == hash(report) and again.to_json() == text
    assert dist.WaitReport.from_json(text.encode()) == report
    assert set(json.loads(text)) == {"cycles", "waits", "held", "silent", "seconds"}


@pytest.mark.parametrize("report", [dist.WaitReport(), FULL], ids=["empty", "full"])
def test_a_report_can_be_copied_and_pickled(report: dist.WaitReport) -> None:
    for again in (copy.copy(report), copy.deepcopy(report), pickle.loads(pickle.dumps(report))):  # noqa: S301
        assert again == report and again.cycles == report.cycles and again.to_json() == report.to_json()
        with pytest.raises(TypeError):
            again.silent["b"] = "no"  # type: ignore[index]


def test_reports_cannot_be_changed() -> None:
    silent = {"a": "no answer"}
    report = dist.WaitReport([dist.Wait("a", "t")], silent=silent)  # type: ignore[arg-type]
    silent["b"] = "later"
    assert report.waits == (dist.Wait("a", "t"),) and report.silent == {"a": "no answer"}
    with pytest.raises(FrozenInstanceError):
        report.waits[0].task = "u"  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        report.seconds = 1.0  # type: ignore[misc]
    with pytest.raises(TypeError):
        report.silent["b"] = "no"  # type: ignore[index]
    assert dist.WaitReport(silent={"a": "x"}) != dist.WaitReport(silent={"a": "y"})


NO_NUMBERS: tuple[Any, ...] = (-1, float("nan"), float("inf"), True, "1", None, 1 << 60, 1e300, 10**5000)


@pytest.mark.parametrize("seconds", NO_NUMBERS, ids=[f"{i}" for i in range(len(NO_NUMBERS))])
def test_seconds_are_finite_numbers(seconds: Any) -> None:
    for make in (lambda: dist.Wait("a", "t", seconds=seconds), lambda: dist.HeldLoop("a", seconds, ""), lambda: dist.WaitReport(seconds=seconds)):
        assert_raises(ArgumentError, "seconds", make)


def test_values_of_other_types_are_refused() -> None:
    assert_raises(ArgumentError, "task is 1", dist.Wait, "a", 1)
    assert_raises(ArgumentError, "waits", dist.WaitReport, (dist.HeldLoop("a", 1.0, ""),))
    assert_raises(ArgumentError, "held", dist.WaitReport, (), 5)
    assert_raises(ArgumentError, "silent", dist.WaitReport, (), (), {"a": 1})


def test_long_texts_are_cut() -> None:
    wait = dist.Wait("a", "t" * 9999, message="ü" * 501)
    assert len(wait.task) == len(wait.message) == waits.TEXT and wait.task.endswith("…")
    assert dist.WaitReport.from_json(dist.WaitReport((wait,)).to_json()).waits == (wait,)


MALFORMED = {
    "no text": None,
    "no JSON": "{",
    "deep": "[" * 100_000,
    "a number of many digits": '{"seconds": 1' + "0" * 5000 + "}",
    "no object": "[]",
    "waits that are none": '{"waits": 5}',
    "a row that is none": '{"waits": [5]}',
    "a row without a task": '{"waits": [{"worker": "a"}]}',
    "a worker that is none": '{"waits": [{"worker": 1, "task": "t"}]}',
    "seconds that are none": '{"waits": [{"worker": "a", "task": "t", "seconds": NaN}]}',
    "infinite seconds": '{"seconds": 1e999}',
    "huge seconds": '{"seconds": 1' + "0" * 400 + "}",
    "held loops that are none": '{"held": [{"worker": "a"}]}',
    "silent workers that are none": '{"silent": []}',
    "a reason that is none": '{"silent": {"a": []}}',
    "broken bytes": b"\xff{}",
    "too long": " " * (waits.MOST_CHARACTERS + 1),
}


@pytest.mark.parametrize("text", MALFORMED.values(), ids=MALFORMED)
def test_malformed_reports_of_a_peer_are_typed_errors(text: Any) -> None:
    error = assert_raises(ProtocolError, "malformed report of waits", dist.WaitReport.from_json, text)
    assert len(str(error)) < 400


def test_cycles_of_a_peer_are_not_believed_and_unknown_names_are_left_out() -> None:
    text = '{"cycles": [[["a", "t"]]], "later": 1, "waits": [{"worker": "a", "task": "t", "later": 2}]}'
    report = dist.WaitReport.from_json(text)
    assert report == dist.WaitReport((dist.Wait("a", "t"),)) and report.cycles == ()


def test_too_many_rows_of_a_peer_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "MOST_ROWS", 3)
    many = dist.WaitReport(tuple(dist.Wait("a", f"{i}") for i in range(9)), (dist.HeldLoop("a", 1.0, ""),) * 9, {f"{i}": "" for i in range(9)})
    few = dist.WaitReport.from_json(many.to_json())
    assert (len(few.waits), len(few.held), len(few.silent)) == (3, 3, 3)


# ---------------------------------------------------------------- text


def test_the_text_shows_cycles_then_held_loops_then_waits_by_length() -> None:
    report = dist.WaitReport(
        (
            dist.Wait("left", "call f", "right", "call g", "f", "service.py:41", 12.0, "answer"),
            dist.Wait("driver", "pass 3", "left", "call f", "RecvNode", "train.py:7", 31.0, "gradient"),
            dist.Wait("right", "call g", "left", "call f", "g", "service.py:57", 4.5, "answer"),
            dist.Wait("left", "pass 4", what="executor", seconds=2),
        ),
        (dist.HeldLoop("third", 3.25, "slow.py:9"),),
        {"fourth": "no answer within 1 s"},
        0.25,
    )
    assert str(report).splitlines() == [
        "4 waits on 3 workers, 1 cycle, 1 loop held up, 1 worker silent; asked in 0.25 s",
        "",
        "cycle 1",
        "  12 s    left   call f  -> right  call g  f  service.py:41  answer",
        "  4.50 s  right  call g  -> left   call f  g  service.py:57  answer",
        "",
        "held loops",
        "  third  3.25 s  slow.py:9",
        "",
        "waits",
        "  31 s    driver  pass 3  -> left   call f  RecvNode  train.py:7     gradient",
        "  12 s    left    call f  -> right  call g  f         service.py:41  answer",
        "  4.50 s  right   call g  -> left   call f  g         service.py:57  answer",
        "  2.00 s  left    pass 4                    executor",
        "",
        "silent",
        "  fourth  no answer within 1 s",
    ]
    assert str(dist.WaitReport()) == "0 waits, 0 cycles; asked in 0.00 s"


def test_the_text_ends_somewhere_and_obeys_nothing() -> None:
    rows = [dist.Wait(f"w{i}", "t", f"w{i}", "t", message="\x1b[2J\u202e\n" * 90) for i in range(2000)]
    lines = str(dist.WaitReport(tuple(rows), silent={f"s{i}": "x" for i in range(200)})).splitlines()
    assert len(lines) < 500 and max(map(len, lines)) <= waits.WIDTH
    assert all(line.isprintable() for line in lines)
    assert "  and 1,950 rows more" in lines and "  and 1,950 cycles more" in lines and "  and 150 rows more" in lines

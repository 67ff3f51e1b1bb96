"""Timelines: what follows from events, simulated or measured, and how they are drawn and exported."""

from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiograd.errors import ArgumentError, ArgumentTypeError
from aiograd.pipeline import Action, Costs, Timeline, TimelineEvent, make_schedule, simulate
from aiograd.pipeline.schedule.named import build_named
from aiograd.profiler import merge_traces
from tests.pipeline.schedule.rows import named_schedules, schedule

SVG = "{http://www.w3.org/2000/svg}"
ONE = Costs(1, 1, 1)


def measured(text: str, **options: object) -> Timeline:
    """``"0 0F0 0 1; ..."``: rank, action, start, end."""
    events = (part.split() for part in text.split(";"))
    return Timeline.from_events(((int(rank), Action.parse(action), float(start), float(end)) for rank, action, start, end in events), **options)


# -------------------------------------------------------------------- what follows from events


def test_a_measured_run():
    timeline = measured("0 0F0 100 101; 1 1F0 101.5 103; 1 1B0 103 106; 0 0I0 106.5 107.5; 0 0W0 108 109; 0 0SEND_F0 101 101.5", name="run")
    assert timeline.events[0] == TimelineEvent(0, Action.parse("0F0"), 100, 101)
    assert (timeline.ranks, timeline.stage_to_rank, timeline.name) == (2, (0, 1), "run")
    assert timeline.busy == (3, 4.5)
    assert timeline.cost == 9  # rank 0, from 100 to 109
    assert timeline.bubble == 4.5  # against the 4.5 of the busier rank
    assert timeline.bubble_rate == 0.5
    assert timeline.duration == 9
    assert timeline.peak_activations == (1, 1)


def test_the_cost_is_that_of_the_longest_rank_and_the_duration_that_of_all():
    timeline = simulate(build_named("ZB-H2", 4, 8), ONE)
    assert timeline.cost == 24
    assert timeline.duration == 27  # the last rank starts three later


def test_computations_at_the_same_time_are_counted_once():
    timeline = measured("0 0F0 0 2; 0 1F0 1 3; 0 1B0 1.5 2; 0 0B0 5 6")
    assert timeline.busy == (4,)
    assert measured("0 0F0 0 5; 0 1F0 1 3").cost == 5
    assert timeline.peak_activations == (1,)  # two stages of a rank, half each


def test_activations_are_kept_to_the_end_of_their_backward():
    options = {"activation_memory": 8, "weight_memory": 3}
    assert measured("0 0F0 0 1; 0 0F1 1 2; 0 0I0 2 3; 0 0I1 3 4; 0 0W0 4 5; 0 0W1 5 6", **options).peak_activations == (16,)
    assert measured("0 0F0 0 1; 0 0I0 1 2; 0 0F1 2 3; 0 0I1 3 4; 0 0F2 4 5; 0 0B2 5 6", **options).peak_activations == (14,)
    assert measured("0 0F0 0 1; 0 0I0 1 3; 0 0F1 2 4", **options).peak_activations == (16,)  # F1 begins before I0 is done
    assert measured("0 0F0 0 0; 0 0B0 0 0; 0 0F1 0 0; 0 0B1 0 0", **options).peak_activations == (8,)
    assert measured("0 0F0 0 1; 0 0I0 1 2", activation_memory=1, weight_memory=2).peak_activations == (1,)
    assert measured("0 0F0 0 1; 0 0I0 1 2; 0 0W0 2 3", activation_memory=1, weight_memory=2).peak_activations == (2,)


@given(named_schedules(ranks=5, microbatches=8), st.tuples(*[st.floats(0.1, 5)] * 3), st.floats(0, 1))
def test_simulated_events_are_a_timeline_of_the_same_figures(one, times, communication):
    simulated = simulate(one, Costs(*times, communication=communication))
    taken = Timeline.from_events(list(simulated.events), name=simulated.name)
    for field in Timeline.__slots__:
        assert getattr(taken, field) == getattr(simulated, field), field


@given(named_schedules(ranks=4, microbatches=8), st.lists(st.floats(0.1, 5), min_size=48, max_size=48), st.floats(0, 1))
def test_costs_can_be_told_from_a_timeline(one, times, communication):
    costs = Costs(times[: one.num_stages], times[16 : 16 + one.num_stages], times[32 : 32 + one.num_stages], communication)
    timeline = simulate(one.lower(), costs)
    found = timeline.costs()
    assert found.forward == pytest.approx(costs.forward)
    if any(event.action.kind.is_send for event in timeline.events):
        assert found.communication == pytest.approx(communication)
    if one.name not in ("ForwardOnly", "DualPipeV"):
        backward = [i + w for i, w in zip(found.input_backward, found.weight_backward, strict=True)]
        assert backward == pytest.approx([i + w for i, w in zip(costs.input_backward, costs.weight_backward, strict=True)])
    if one.name.startswith("Z"):
        assert found.weight_backward == pytest.approx(costs.weight_backward)


def test_a_schedule_is_searched_for_measured_costs():
    slow_last = simulate(build_named("1F1B", 2, 6), Costs([1, 2], [1, 2], [1, 2]))
    costs = slow_last.costs(activation_memory=3, weight_memory=1)
    assert (costs.activation_memory, costs.weight_memory, costs.communication) == (3, 1, 0)
    found = simulate(make_schedule("auto", 2, 6, costs=costs), costs)
    assert found.cost < slow_last.cost
    assert found.cost <= simulate(build_named("ZB-H2", 2, 6), costs).cost


@pytest.mark.parametrize(
    ("events", "error", "text"),
    [
        ([], ArgumentError, "without any computation"),
        ([(0, Action.parse("0SEND_F0"), 0, 1)], ArgumentError, "without any computation"),
        ([(0, Action.parse("0F0"), 1, 0)], ArgumentError, "start <= end"),
        ([(0, Action.parse("0F0"), 0, math.nan)], ArgumentError, "start <= end"),
        ([(-1, Action.parse("0F0"), 0, 1)], ArgumentError, "rank -1"),
        ([(0, Action.parse("0F0"), 0, 1), (1, Action.parse("0F1"), 0, 1)], ArgumentError, "ranks 0 and 1"),
        ([(0, "0F0", 0, 1)], ArgumentTypeError, r"\(int, str, int, int\)"),
        ([(0, Action.parse("0F0"), "0", 1)], ArgumentTypeError, "event 0"),
        ([Action.parse("0F0")], ArgumentTypeError, "not Action"),
    ],
)
def test_events_that_are_none(events, error, text):
    with pytest.raises(error, match=text):
        Timeline.from_events(events)


def test_costs_of_a_stage_that_was_not_measured():
    with pytest.raises(ArgumentError, match="stage 0"):
        measured("1 1F0 0 1").costs()


# -------------------------------------------------------------------- SVG


def picture(timeline: Timeline, **options: object) -> ET.Element:
    return ET.fromstring(timeline.svg(**options))  # noqa: S314 - our own text


def boxes(root: ET.Element) -> list[tuple[str, float, float, float, str, str]]:
    """The kind of an element, its left, top, width, colour and text."""
    found = []
    for group in root.iter(f"{SVG}g"):
        labels = [text.text or "" for text in group.findall(f"{SVG}text")]
        for nr, rect in enumerate(group.findall(f"{SVG}rect")):
            place = [float(rect.get(key)) for key in ("x", "y", "width")]
            found.append((group.find(f"{SVG}title").text, *place, rect.get("fill"), labels[nr] if nr < len(labels) else ""))
    return found


def texts(root: ET.Element) -> list[str]:
    return ["".join(element.itertext()) for element in root.iter(f"{SVG}text")]


def test_boxes_are_to_scale_in_the_row_of_their_rank_with_their_microbatch():
    timeline = simulate(build_named("ZB-H1", 3, 5), Costs(2, 3, 1.5, 0.5))
    root = picture(timeline)
    found = boxes(root)
    assert [text for text, *_ in found] == [f"rank {e.rank}, {e.action}: {e.start:.6g} to {e.end:.6g}" for e in timeline.events]
    left = min(x for _, x, *_ in found)
    scale = max(x + width for _, x, _, width, *_ in found) - left
    tops = sorted({y for _, _, y, *_ in found})
    assert len(tops) == 3
    for event, (_, x, y, width, _, label) in zip(timeline.events, found, strict=True):
        assert x - left == pytest.approx(event.start / timeline.duration * scale, abs=0.02)
        assert width == pytest.approx((event.end - event.start) / timeline.duration * scale, abs=0.02)
        assert y == tops[event.rank]
        assert label == str(event.action.microbatch)
    colours = {(re.search(r"\d([FIWB])", text)[1], colour) for text, _, _, _, colour, _ in found}
    assert len(colours) == len({colour for _, colour in colours}) == 3
    assert [part for part in texts(root) if part.startswith("rank ")] == ["rank 0", "rank 1", "rank 2"]
    assert {"F forward", "I input backward", "W weight backward", "3", "0"} <= set(texts(root))  # legend, peak memory, axis
    assert "B full backward" not in texts(root)


def test_nothing_is_drawn_outside_of_the_picture_or_over_something_else():
    for name, chunks, width in (("1F1B", 1, None), ("DualPipeV", 2, None), ("ZBV", 2, 700), ("Interleaved1F1B", 3, 3000)):
        root = picture(simulate(build_named(name, 4, 8, chunks), Costs(2, 3, 1.5, 0.5)), width=width)
        if width is not None:
            assert float(root.get("width")) == width
        rows: dict[float, list[tuple[float, float]]] = {}
        for _, x, y, wide, *_ in boxes(root):
            assert 0 <= x
            assert x + wide <= float(root.get("width"))
            rows.setdefault(y, []).append((x, x + wide))
        for spans in rows.values():
            spans.sort()
            assert all(end <= start + 0.02 for (_, end), (start, _) in pairwise(spans))


def test_stages_of_a_rank_differ_in_colour():
    found = boxes(picture(simulate(build_named("Interleaved1F1B", 2, 4, 3), ONE)))
    by_stage = {text.split(", ")[1][:2]: colour for text, *_, colour, _ in found}
    assert len({by_stage["0F"], by_stage["2F"], by_stage["4F"]}) == 3
    assert by_stage["0F"] == by_stage["1F"]


def test_the_parts_of_an_overlap_stand_above_each_other():
    timeline = simulate(build_named("DualPipeV", 2, 6, 2), ONE)
    overlaps = [box for box in boxes(picture(timeline)) if "OVERLAP" in box[0]]
    (text, x1, y1, width1, colour1, label1), (same, x2, y2, width2, colour2, label2) = overlaps[:2]
    forward, backward = Action.parse(re.search(r"\(.*\)OVERLAP_F_B", text)[0]).parts
    assert (text, x1, width1) == (same, x2, width2)
    assert y1 < y2
    assert colour1 != colour2
    assert (label1, label2) == (str(forward.microbatch), str(backward.microbatch))


def test_transfers_are_not_drawn_and_parameters_only_where_they_take_time():
    one = build_named("1F1B", 2, 4)
    lowered = simulate(one.lower(unshard=True), Costs(1, 1, 1, 0.5))
    assert lowered.svg() == simulate(one, Costs(1, 1, 1, 0.5)).svg()
    root = picture(measured("0 0UNSHARD 0 2; 0 0F0 2 3; 0 0B0 3 5; 0 0RESHARD 5 5"))
    assert [box[0].split(":")[0] for box in boxes(root)] == ["rank 0, 0UNSHARD", "rank 0, 0F0", "rank 0, 0B0"]
    assert "parameters" in texts(root)


def test_numbers_that_do_not_fit_are_left_out():
    found = boxes(picture(simulate(build_named("ZB-H1", 2, 30), ONE), width=300))
    assert any(label == "" for *_, label in found)
    assert all(width > 10 for _, _, _, width, _, label in found if label)


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", 'a"b&c', "line\nbreak\x00\x1b", "x" * 500, "‮"])
def test_names_are_text(name):
    timeline = measured("0 0F0 0 1; 0 0B0 1 3", name=name)
    root = picture(timeline)
    assert {element.tag for element in root.iter()} <= {f"{SVG}{tag}" for tag in ("svg", "title", "style", "rect", "text", "g", "line")}
    title = root.find(f"{SVG}title").text
    assert title.endswith("1 rank, cost 3, bubble 0.0 %")
    assert len(title) < 120
    if name.isprintable() and len(name) < 60:
        assert title.startswith(name)


@pytest.mark.parametrize("width", [310, 420, None])
@pytest.mark.parametrize("name", ["", "W" * 300])
def test_all_text_is_within_the_picture_and_none_over_another(width, name):
    """By an estimate of how wide letters are, on the wide side."""
    costs = Costs(1, 1, 1, activation_memory=1.37e9, weight_memory=5e8)
    timeline = simulate(build_named("DualPipeV", 3, 6, 2), costs)
    root = picture(Timeline(timeline.events, ranks=3, memory=costs, name=name), width=width)
    plot_end = max(x + wide for _, x, _, wide, *_ in boxes(root))
    lines: dict[str, list[tuple[float, float]]] = {}
    for element in root.iter(f"{SVG}text"):
        if "m" in element.get("class", ""):
            continue  # inside of a box, or under the axis
        wide = 6.0 * len(element.text) * (1.2 if element.get("class") == "t" else 1)
        x = float(element.get("x")) - (wide if "e" in element.get("class", "") else 0)
        lines.setdefault(element.get("y"), []).append((x, x + wide))
        assert 0 <= x
        assert x + wide <= float(root.get("width"))
        if element.get("class") == "f e" and element.text != "peak memory":
            assert x > plot_end
    for spans in lines.values():
        assert all(end < start for (_, end), (start, _) in pairwise(sorted(spans)))


def test_the_same_timeline_gives_the_same_picture():
    assert simulate(build_named("ZBV", 3, 7, 2), ONE).svg() == simulate(build_named("ZBV", 3, 7, 2), ONE).svg()


def test_measured_times_start_at_zero():
    early, late = (measured(f"0 0F0 {start} {start + 1}; 0 0B0 {start + 2} {start + 4}").svg() for start in (0, 4096))
    assert early == late


@pytest.mark.parametrize(
    ("width", "error"), [(150, ArgumentError), (-1, ArgumentError), (math.nan, ArgumentError), (1e12, ArgumentError), ("9", ArgumentTypeError)]
)
def test_widths_that_are_none(width, error):
    with pytest.raises(error, match="pixels"):
        measured("0 0F0 0 1").svg(width=width)


def test_a_timeline_without_duration_can_be_drawn():
    assert len(boxes(picture(measured("0 0F0 1 1; 0 0B0 1 1")))) == 2


# -------------------------------------------------------------------- Chrome trace


def test_the_trace_has_a_row_per_rank_and_what_it_did():
    timeline = simulate(build_named("1F1B", 2, 3), Costs(1, 1, 1, 0.25))
    trace = timeline.chrome_trace(unit=1000)
    names = {event["tid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    assert sorted(names.values()) == ["rank 0", "rank 1"]
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {(names[event["tid"]], event["name"], event["ts"], event["dur"]) for event in slices} == {
        (f"rank {e.rank}", str(e.action), e.start * 1000, (e.end - e.start) * 1000) for e in timeline.events
    }
    assert {event["cat"] for event in slices} == {"forward", "full backward"}
    assert slices[0]["args"] == {"stage": 0, "microbatch": 0}


def test_arrows_lead_from_rank_to_rank():
    timeline = simulate(build_named("ZBV", 2, 3, 2), ONE)
    events = timeline.chrome_trace()["traceEvents"]
    around = {
        (event["ph"], event["id"]): next(
            e["name"] for e in events if e["ph"] == "X" and e["tid"] == event["tid"] and e["ts"] <= event["ts"] < e["ts"] + e["dur"]
        )
        for event in events if event["ph"] in "sf"
    }  # fmt: skip
    arrows = {(around["s", nr], around["f", nr]) for kind, nr in around if kind == "s"}
    forward = {(f"{stage}F{mb}", f"{stage + 1}F{mb}") for stage in (0, 2) for mb in range(3)}
    backward = {(f"{stage}I{mb}", f"{stage - 1}I{mb}") for stage in (1, 3) for mb in range(3)}
    assert arrows == forward | backward


def test_transfers_and_overlaps_in_a_trace():
    timeline = simulate(build_named("DualPipeV", 2, 4, 2).lower(), Costs(1, 1, 1, 0.5))
    events = timeline.chrome_trace(unit=1)["traceEvents"]
    begins = {event["id"]: event for event in events if event["ph"] == "b"}
    ends = {event["id"]: event for event in events if event["ph"] == "e"}
    assert begins.keys() == ends.keys()
    lengths = {event["name"]: ends[nr]["ts"] - event["ts"] for nr, event in begins.items()}
    assert lengths["0SEND_F0"] == 0.5
    assert lengths["1RECV_F0"] == 0
    assert any(event.get("cat") == "overlap" for event in events)


def test_a_trace_can_be_written_and_laid_beside_others(tmp_path):
    path = tmp_path / "pipeline.json"
    timeline = simulate(schedule("0F0 0B0 / 1F0 1B0", name="two"), ONE)
    trace = timeline.chrome_trace(path)
    assert json.loads(path.read_text()) == trace
    merged = merge_traces([path, measured("0 0F0 7 8; 0 0B0 8 9").chrome_trace()])
    assert len({event["pid"] for event in merged["traceEvents"]}) == 2
    assert sum(event["ph"] == "X" for event in merged["traceEvents"]) == 6
    assert min(event["ts"] for event in merged["traceEvents"] if event["ph"] == "X") == 0


@pytest.mark.parametrize(("unit", "error"), [(0, ArgumentError), (-1, ArgumentError), (math.inf, ArgumentError), ("s", ArgumentTypeError)])
def test_units_that_are_none(unit, error):
    with pytest.raises(error, match="microseconds"):
        measured("0 0F0 0 1").chrome_trace(unit=unit)

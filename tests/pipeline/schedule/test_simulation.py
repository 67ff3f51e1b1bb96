"""Simulated times: the published tables and formulas, and what holds for every schedule."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiograd.errors import ArgumentError, ArgumentTypeError, ScheduleError
from aiograd.pipeline import ActionKind, Costs, Schedule, simulate
from aiograd.pipeline.schedule.dependencies import fact_of, facts_needed
from aiograd.pipeline.schedule.named import build_named
from tests.pipeline.schedule.published import CASES, LARGER
from tests.pipeline.schedule.rows import named_schedules, rows, schedule
from tests.sweeps import swept

K = ActionKind
ONE = Costs(1, 1, 1)
#: forward, input backward, weight backward, with weight backward the shortest, as the formulas want it
TIMES = [(1, 1, 1), (2, 2, 1), (1, 1.2, 0.8), (3, 2, 1), (1, 2, 1)]
#: ranks, microbatches
SIZES = [(1, 4), (2, 4), (2, 7), (3, 6), (4, 8), (4, 12), (5, 15), (8, 16)]


def run(name: str, ranks: int, microbatches: int, chunks: int = 1, costs: Costs = ONE):
    return simulate(build_named(name, ranks, microbatches, chunks), costs)


# -------------------------------------------------------------------- published


@pytest.mark.parametrize(
    ("name", "chunks", "small", "large"),
    [
        ("GPipe", 1, 15, 33), ("1F1B", 1, 15, 33), ("ZB-H1", 1, 13, 27), ("ZB-H2", 1, 12, 24), ("Interleaved1F1B", 2, 13.5, 28.5),
        ("LoopedBFS", 2, 13.5, 28.5), ("ZB1P", 2, 12.5, 25.5), ("ZBV", 2, 12, 24), ("DualPipeV", 2, 13, 27),
    ],
)  # fmt: skip
def test_costs_in_units(name, chunks, small, large):
    assert (run(name, 2, 4, chunks).cost, run(name, 4, 8, chunks).cost) == (small, large)


@pytest.mark.parametrize("case", CASES)
def test_the_paper_s_bubble_rates(case):
    found = [round(run(name, case.ranks, case.microbatches, 1, case.costs).bubble_rate, 4) for name in ("1F1B", "ZB-H1", "ZB-H2")]
    assert found == [case.one_f_one_b, case.zb_h1, case.zb_h2]


@pytest.mark.parametrize("case", CASES)
def test_the_paper_s_formula_for_interleaved_1f1b(case):
    """Which is a little optimistic: the simulated schedule takes at least as long."""
    bubble = (case.ranks - 1) * case.work / case.microbatches / case.chunks + ((2 * case.chunks - 1) * case.ranks - 2) * case.times[3]
    assert round(bubble / (case.work + bubble), 4) == case.interleaved
    assert case.interleaved <= run("Interleaved1F1B", case.ranks, case.microbatches, case.chunks, case.costs).bubble_rate <= case.interleaved + 0.005


SIMULATED = [pytest.param(rates, id=f"{rates.ranks}-{rates.microbatches}") for rates in LARGER if rates.ranks * rates.microbatches <= 3072]


@pytest.mark.parametrize("rates", swept(SIMULATED, keep=2))
def test_bubble_rates_of_larger_pipelines(rates):
    """Two of the rates say what the costs must have been; the other two are then right, and so are these by simulation."""
    names = (("1F1B", 1), ("ZB-H1", 1), ("ZB-H2", 1), ("ZBV", 2))
    found = [run(name, rates.ranks, rates.microbatches, chunks, rates.costs).bubble_rate for name, chunks in names]
    assert found[:3] == pytest.approx([rates.one_f_one_b, rates.zb_h1, rates.zb_h2], abs=5e-4)
    assert found[3] == pytest.approx(rates.zb_v, rel=0.06)  # which depends on how F and I share what is left, too


@pytest.mark.parametrize("rates", LARGER, ids=lambda rates: f"{rates[0]}-{rates[1]}")
def test_the_paper_s_formula_for_interleaved_1f1b_in_larger_pipelines(rates):
    bubble = (rates.ranks - 1) / 2 + (3 * rates.ranks - 2) * rates.costs.communication
    assert bubble / (rates.microbatches + bubble) == pytest.approx(rates.interleaved, abs=0.001)


@pytest.mark.parametrize(
    ("times", "zb_v", "dual_pipe_v"),
    [((2, 2, 1), 3.0, 7.5), ((1, 1.2, 0.8), 1.2, 3.6), ((1, 2, 1), 3.0, 5.5), ((3, 1, 1), 6.0, 9.0), ((1, 1, 1.5), 0.5, 3.0)],
)
def test_bubbles_in_a_v(times, zb_v, dual_pipe_v):
    assert run("ZBV", 4, 12, 2, Costs(*times)).bubble == pytest.approx(zb_v)
    assert run("DualPipeV", 4, 12, 2, Costs(*times)).bubble == pytest.approx(dual_pipe_v)


def test_peaks_in_units():
    expected = {"GPipe": (8, 8, 8, 8), "1F1B": (4, 3, 2, 1), "ZB-H1": (4, 3.5, 3, 2.5), "ZBV": (4, 4, 4, 4)}
    assert {name: run(name, 4, 8, 2 if name == "ZBV" else 1).peak_activations for name in expected} == expected


@pytest.mark.parametrize("times", [(1, 1, 1), (2, 2, 1)])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (4, 12), (6, 15)])
def test_the_formula_of_dual_pipe_v(times, ranks, microbatches):
    """In times of a stage, of which there are 2 × ranks: (stages / 2 − 1) × (F&B + B − 3W)."""
    forward, inputs, weights = (time / 2 for time in times)
    expected = (ranks - 1) * ((forward + inputs + weights) + (inputs + weights) - 3 * weights)
    assert run("DualPipeV", ranks, microbatches, 2, Costs(*times)).bubble == pytest.approx(expected)


# -------------------------------------------------------------------- formulas


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_bubbles(times, p, m):
    f, i, w = times
    costs, total, zero = Costs(*times), f + i + w, (p - 1) * (f + i - w)
    expected = {("GPipe", 1): (p - 1) * total, ("1F1B", 1): (p - 1) * total, ("ZB-H1", 1): zero}
    if m >= 2 * p - 1:
        expected["ZB-H2", 1] = max(0, (p - 1) * (f + i - 2 * w))
    for chunks in (2, 3):
        expected["LoopedBFS", chunks] = (p - 1) * total / chunks
        if m % p == 0:
            expected |= {("Interleaved1F1B", chunks): (p - 1) * total / chunks, ("ZB1P", chunks): zero / chunks}
    for (name, chunks), bubble in expected.items():
        found = run(name, p, m, chunks, costs)
        assert found.bubble == pytest.approx(bubble, abs=1e-9), name
        assert found.bubble_rate == pytest.approx(bubble / (m * total + bubble), abs=1e-9), name


@pytest.mark.parametrize("times", [(5, 5, 5), (5, 4, 3), (4, 5, 3)])
@pytest.mark.parametrize(("p", "m"), [(2, 2), (2, 4), (3, 3), (3, 9), (4, 4), (4, 12), (8, 16)])
def test_what_transfers_add(times, p, m):
    apart, together = Costs(*times), Costs(*times, communication=0.1)
    expected = {"GPipe": 2 * (p - 1), "1F1B": 2 * (p - 1) * m / p + 2 * (p - 2), "ZB-H1": 4 * (p - 1) if m > p else 4 * p - 6}
    if m >= 2 * p - 1:
        expected["ZB-H2"] = 2 * (p - 1)
    for name, transfers in expected.items():
        assert run(name, p, m, 1, together).cost - run(name, p, m, 1, apart).cost == pytest.approx(transfers * 0.1), name


@pytest.mark.parametrize("times", TIMES[:3])
@pytest.mark.parametrize("p", [2, 4, 7])
def test_few_microbatches(times, p):
    f, i, w = times
    assert run("1F1B", p, p, 1, Costs(*times)).cost == pytest.approx((2 * p - 1) * (f + i + w))
    for m in range(1, p + 1):
        for name in ("ZB-H1", "ZB-H2"):
            assert run(name, p, m, 1, Costs(*times)).cost == pytest.approx((m + p - 1) * (f + i) + w)


def test_long_weight_backwards_break_the_formulas():
    costs = Costs(1, 1, 1.5)
    assert [run(name, 4, 12, 1, costs).bubble for name in ("ZB-H1", "ZB-H2")] == [3.0, 0.0]


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (5, 15), (8, 24)])
def test_peaks(p, m):
    expected = {
        ("GPipe", 1): lambda r: m,
        ("1F1B", 1): lambda r: p - r,
        ("ZB-H1", 1): lambda r: p - r + r / 2,
        ("ZB-H2", 1): lambda r: 2 * p - 2 * r - 1 + r,
        ("ZBV", 2): lambda r: p,
        ("DualPipeV", 2): lambda r: (2 * p + 1) / 2,
    }
    for v in (2, 3):
        expected["LoopedBFS", v] = lambda r: m
        expected["Interleaved1F1B", v] = lambda r, v=v: ((v - 1) * p + 2 * (p - 1 - r) + 1) / v
        expected["ZB1P", v] = lambda r, v=v: ((v - 1) * p + p - r) / v + r / v / 2
    for (name, chunks), peak in expected.items():
        assert run(name, p, m, chunks).peak_activations == pytest.approx([peak(rank) for rank in range(p)]), name


@pytest.mark.parametrize("p", range(1, 13))
def test_the_small_memory_of_v_half_and_v_min(p):
    """In microbatches, as their paper counts: all memory is kept until W."""
    costs = Costs(1, 1, 1, activation_memory=1, weight_memory=1)
    assert max(run("V-Half", p, 3 * p, 2, costs).peak_activations) == (p + 2) // 2
    assert max(run("V-Min", p, 3 * p, 2, costs).peak_activations) == (p + 4) // 3
    plain = run("1F1B", p, 3 * p, 1, costs)
    for name in ("V-Half", "V-Min"):
        assert run(name, p, 3 * p, 2, costs).bubble_rate <= plain.bubble_rate


# -------------------------------------------------------------------- every schedule


@given(named_schedules(), st.tuples(*[st.floats(0.1, 5)] * 3), st.floats(0, 2))
def test_no_rank_does_two_things_at_once_or_too_early(one, times, communication):
    costs = Costs(*times, communication=communication)
    timeline = simulate(one, costs)
    share = one.num_ranks / one.num_stages
    length = {K.F: times[0], K.I: times[1], K.W: times[2], K.B: times[1] + times[2]}
    ends = {fact_of(part): event.end for event in timeline.events for part in event.action.computations}
    free = [0.0] * one.num_ranks
    for event in timeline.events:
        needed = [(fact, part) for part in event.action.computations for fact in facts_needed(part, one.stage_to_rank, False)]
        arrivals = [ends[fact] + (communication if one.stage_to_rank[fact[1]] != event.rank else 0) for fact, _ in needed]
        assert event.start == pytest.approx(max([free[event.rank], *arrivals]))  # neither too early nor later than need be
        assert event.end - event.start == pytest.approx(share * sum(length[part.kind] for part in event.action.computations))
        free[event.rank] = event.end
    assert sum(1 for event in timeline.events) == sum(action is not None for row in one.ranks for action in row)
    assert [[event.action for event in timeline.events if event.rank == rank] for rank in range(one.num_ranks)] == [
        [action for action in row if action] for row in one.ranks
    ]


@given(named_schedules(ranks=4, microbatches=9), st.tuples(*[st.floats(0.1, 5)] * 3), st.floats(0, 2), st.booleans())
def test_lowering_changes_no_times(one, times, communication, defer):
    costs = Costs(*times, communication=communication)
    plain, lowered = simulate(one, costs), simulate(one.lower(defer, unshard=True, reduce_gradients=True), costs)
    assert [event for event in lowered.events if event.action.kind.is_compute] == list(plain.events)
    assert (lowered.cost, lowered.bubble, lowered.peak_activations) == (plain.cost, plain.bubble, plain.peak_activations)
    sends = {event.action.other_end: event.end for event in lowered.events if event.action.kind.is_send}
    receives = {event.action: event.end for event in lowered.events if event.action.kind.is_receive}
    assert receives == sends


def test_times_of_stages_that_differ():
    one = schedule("0F0 0F1 0B0 0B1 / 1F0 1B0 1F1 1B1")
    timeline = simulate(one, Costs([1, 3], [1, 2], 1))
    assert [(str(event.action), event.start, event.end) for event in timeline.events if event.rank == 1] == [
        ("1F0", 1, 4), ("1B0", 4, 7), ("1F1", 7, 10), ("1B1", 10, 13),
    ]  # fmt: skip
    assert (timeline.cost, timeline.busy) == (15, (6, 12))
    assert timeline.bubble == 3  # 15 − 12, the work of the busier rank
    with pytest.raises(ArgumentError, match="times of 3 stages, and the pipeline has 2"):
        simulate(one, Costs([1, 2, 3], 1, 1))


def test_stages_share_the_time_of_their_rank():
    timeline = simulate(build_named("ZBV", 2, 4, 2), Costs(2, 4, 6, activation_memory=8, weight_memory=2))
    assert {event.action.kind: event.end - event.start for event in timeline.events} == {K.F: 1, K.I: 2, K.W: 3}
    assert timeline.peak_activations == simulate(build_named("ZBV", 2, 4, 2), Costs(1, 2, 3, activation_memory=8, weight_memory=2)).peak_activations


def test_forward_only():
    timeline = run("ForwardOnly", 2, 3, 2, Costs(2, 5, 5))
    assert timeline.cost == 6
    assert timeline.peak_activations == (3, 3)


@pytest.mark.parametrize(
    "text",
    [
        "0F0 0B0 / 1B0 1F0",
        "0B0 0F0 / 1F0 1B0",
        "0F0 0F0 0B0 / 1F0 1B0",
        "0F0 0B0",
        "0F0 0W0 0I0 / 1F0 1B0",
        "0F0 0F1 0B1 0B0 / 1F0 1F1 1B0",
        "1F0 0F0 0B0 1B0",
    ],
)
def test_malformed_schedules_are_refused(text):
    with pytest.raises(ScheduleError):
        simulate(Schedule(rows(text), stages=2, stage_to_rank=[0, len(rows(text)) - 1]), ONE)


def test_ranks_that_wait_for_each_other_are_refused():
    with pytest.raises(ScheduleError, match="wait for each other"):
        simulate(schedule("0F0 0B0 0F1 0B1 / 1F1 1B1 1F0 1B0"), ONE)


@pytest.mark.parametrize("arguments", [("1F1B", ONE), (schedule("0F0 0B0"), None), (schedule("0F0 0B0"), (1, 1, 1))])
def test_other_types(arguments):
    with pytest.raises(ArgumentTypeError, match="Schedule and its Costs"):
        simulate(*arguments)


# -------------------------------------------------------------------- costs


@pytest.mark.parametrize("bad", [-1, math.nan, math.inf, [1, -1], 10**400])
def test_impossible_costs(bad):
    with pytest.raises(ArgumentError, match="finite and not below zero"):
        Costs(bad, 1, 1)


@pytest.mark.parametrize("bad", ["1", None, True, [1, "1"], 1j])
def test_costs_of_other_types(bad):
    with pytest.raises(ArgumentTypeError, match="must be a number"):
        Costs(1, bad, 1)
    with pytest.raises(ArgumentTypeError, match="must be a number"):
        Costs(1, 1, 1, communication=bad)


def test_something_takes_time():
    with pytest.raises(ArgumentError, match="nothing takes any time"):
        Costs(0, [0, 0], 0)

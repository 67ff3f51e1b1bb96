"""The search for a schedule: against the published ones, against the best there is where that can be counted out, and its parts."""

from __future__ import annotations

import random
from itertools import product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from aiograd.errors import ArgumentError, ArgumentTypeError
from aiograd.pipeline import ActionKind, Costs, Schedule, make_schedule, simulate
from aiograd.pipeline.schedule.layout import stage_layout
from aiograd.pipeline.schedule.named import FAMILIES, build_named
from aiograd.pipeline.schedule.named.row import Size
from aiograd.pipeline.schedule.search.bound import lower_bound
from aiograd.pipeline.schedule.search.descent import descend
from aiograd.pipeline.schedule.search.greedy import greedily
from aiograd.pipeline.schedule.search.machine import Machine, Order
from aiograd.pipeline.schedule.search.rounds import in_rounds
from tests.pipeline.schedule.published import CASES
from tests.pipeline.schedule.rows import named_schedules

K = ActionKind
times = st.tuples(*[st.floats(0.1, 5)] * 3)


def fits(schedule: Schedule, costs: Costs, limit: float | None) -> bool:
    return limit is None or max(simulate(schedule, costs).peak_activations) <= limit * (1 + 1e-9)


def best_named(size: Size, costs: Costs, limit: float | None) -> float:
    """The least cost of a named schedule within the limit, infinity if there is none."""
    built = [build_named(family.name, *size) for family in FAMILIES if family.name != "ForwardOnly" and not family.check(size)]
    return min((simulate(one, costs).cost for one in built if fits(one, costs, limit)), default=float("inf"))


def machine_of(one: Schedule, costs: Costs, limit: float | None = None) -> Machine:
    return Machine(one.stage_to_rank, one.num_ranks, one.num_microbatches, costs, limit)


# -------------------------------------------------------------------- the whole


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("memory", [1, 2])
def test_the_paper_s_heuristic_gives_the_paper_s_rates(case, memory):
    machine = Machine(range(case.ranks), case.ranks, case.microbatches, case.costs, memory * case.ranks * case.costs.activation_memory)
    orders = in_rounds(machine)
    assert machine.fits(orders)
    assert round(1 - case.work / max(machine.time(orders).spans), 4) == (case.zb_1p if memory == 1 else case.zb_2p)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("memory", [1, 2])
def test_published_rates_are_met_or_beaten_within_the_same_memory(case, memory):
    limit = memory * case.ranks * case.costs.activation_memory
    one = make_schedule("auto", case.ranks, case.microbatches, costs=case.costs, memory_limit=limit)
    timeline = simulate(one, case.costs)
    assert max(timeline.peak_activations) <= limit * (1 + 1e-9)
    published, found = case.zb_1p if memory == 1 else case.zb_2p, round(timeline.bubble_rate, 4)
    can_be_better = lower_bound(machine_of(one, case.costs, limit)) < case.work / (1 - published) * (1 - 1e-4)
    assert found <= published / 2 if can_be_better else found == published


def orders_of_rank(machine: Machine, rank: int) -> list[Order]:
    """All orders of a rank in which F comes before I and I before W, within the limit of memory."""
    steps = [3 * stage + kind for stage in machine.stages_of[rank] for kind in range(3)]
    found: list[Order] = []

    def extend(order: Order, counts: dict[int, int]) -> None:
        if len(order) == machine.microbatches * len(steps):
            found.append(order)
        for step in steps:
            if counts[step] < machine.microbatches and (step % 3 == 0 or counts[step - 1] > counts[step]):
                extend([*order, step], counts | {step: counts[step] + 1})

    extend([], dict.fromkeys(steps, 0))
    return [order for order in found if machine.peak(order) <= machine.limit]


@pytest.mark.parametrize("seed", range(24))
def test_small_pipelines_get_the_best_schedule_there_is(seed):
    rng = random.Random(seed)
    size = Size(*rng.choice([(2, 2, 1), (2, 3, 1), (3, 2, 1), (1, 3, 1), (2, 1, 2), (1, 2, 2)]))
    costs = Costs(*(round(rng.uniform(0.2, 3), 1) for _ in range(3)), rng.choice((0, 0.3)), 1, rng.choice((0.3, 0.5, 1)))
    limit = rng.choice((None, 1, 1.5, 2, 2.5))
    best = float("inf")
    for layout in ("loop", "v") if size.chunks > 1 else ("loop",):
        machine = Machine(stage_layout(size.ranks, size.stages, layout), size.ranks, size.microbatches, costs, limit)
        for orders in product(*(orders_of_rank(machine, rank) for rank in range(size.ranks))):
            timing = machine.time(list(orders))
            if timing is not None:
                best = min(best, max(timing.spans))
        assert best >= lower_bound(machine) * (1 - 2e-9)
    assert simulate(make_schedule("auto", *size, costs=costs, memory_limit=limit), costs).cost == pytest.approx(best, rel=1e-8)


@pytest.mark.parametrize("seed", range(16))
def test_no_named_schedule_is_better(seed):
    rng = random.Random(seed)
    size = Size(rng.randint(1, 4), rng.randint(1, 6), rng.choice((1, 1, 2, 2, 3)))
    per_stage = [[round(rng.uniform(0.2, 3), 2) for _ in range(size.stages)] for _ in range(3)]
    costs = Costs(*(per_stage if seed % 4 == 0 else [column[0] for column in per_stage]), rng.choice((0, 0.05, 0.5)))
    limit = rng.choice((None, 1, size.ranks / 2 + 0.5, size.ranks, 2 * size.ranks))
    one = make_schedule("AUTO", *size, costs=costs, memory_limit=limit)
    assert (one.num_ranks, one.num_microbatches, one.num_stages) == (size.ranks, size.microbatches, size.stages)
    assert fits(one, costs, limit)
    assert simulate(one, costs).cost <= best_named(size, costs, limit) * (1 + 1e-8)
    for kind in (K.F, K.I, K.W):  # the sums of gradients are in the order of microbatches
        for stage, home in enumerate(one.stage_to_rank):
            found = [action.microbatch for action in one.ranks[home] if (action.stage, action.kind) == (stage, kind)]
            assert found == list(range(size.microbatches))
    assert one == make_schedule("auto", *size, costs=costs, memory_limit=limit)


def test_no_bubble_in_the_memory_of_1f1b_with_two_stages_per_rank():
    one = make_schedule("auto", 4, 12, 2, memory_limit=4)
    assert simulate(one, Costs(1, 1, 1)).bubble_rate == pytest.approx(0)
    assert make_schedule("auto", 4, 12, 2, costs=Costs(1, 1, 1), memory_limit=4) == one


def test_of_equally_fast_schedules_the_smaller_is_taken():
    costs = Costs(1, 1, 1)
    assert max(simulate(make_schedule("auto", 4, 12, 2), costs).peak_activations) == 4
    assert simulate(make_schedule("auto", 1, 6), costs).peak_activations == (1,)


def test_a_stage_that_is_slower_than_others():
    costs = Costs([1, 1, 2, 1], [1, 1, 2, 1], [0.5, 0.5, 1, 0.5])
    timeline = simulate(make_schedule("auto", 4, 16, costs=costs, memory_limit=4), costs)
    assert timeline.busy == (40, 40, 80, 40)
    assert timeline.bubble_rate == pytest.approx(0)
    assert best_named(Size(4, 16, 1), costs, 4) > 81


@pytest.mark.parametrize(("chunks", "limit"), [(1, 0.99), (2, 0.5), (1, 0)])
def test_limits_that_hold_no_microbatch(chunks, limit):
    with pytest.raises(ArgumentError, match="does not hold the activations of one microbatch, 1"):
        make_schedule("auto", 2, 4, chunks, memory_limit=limit)
    assert make_schedule("auto", 2, 4, chunks, memory_limit=1).num_microbatches == 4


@pytest.mark.parametrize(
    ("arguments", "options", "error"),
    [
        ((0, 4), {}, ArgumentError),
        ((2, 0), {}, ArgumentError),
        ((2, 4, 0), {}, ArgumentError),
        ((2.0, 4), {}, ArgumentTypeError),
        ((2, True), {}, ArgumentTypeError),
        ((2, 4), {"costs": (1, 1, 1)}, ArgumentTypeError),
        ((2, 4), {"memory_limit": "2"}, ArgumentTypeError),
        ((2, 4), {"memory_limit": float("nan")}, ArgumentError),
        ((2, 4), {"memory_limit": -1, "costs": Costs(1, 1, 1, activation_memory=0)}, ArgumentError),
        ((2, 4), {"costs": Costs([1, 2, 3], 1, 1)}, ArgumentError),
    ],
)
def test_arguments_that_do_not_fit(arguments, options, error):
    with pytest.raises(error):
        make_schedule("auto", *arguments, **options)


# -------------------------------------------------------------------- the machine


@given(named_schedules(), times, st.floats(0, 2), st.floats(0, 2))
def test_the_machine_times_and_weighs_like_simulate(one, each, communication, weight_memory):
    assume(not one.is_forward_only and one.name != "LoopedBFS")  # whose backwards are the other way round
    costs = Costs(*each, communication, 1, weight_memory)
    machine = machine_of(one, costs)
    orders = machine.orders_of(one)
    split = machine.schedule_of(orders, "split").validate()
    timeline = simulate(split, costs)
    timing = machine.time(orders)
    assert max(timing.spans) == pytest.approx(timeline.cost)
    assert [machine.peak(order) for order in orders] == pytest.approx(timeline.peak_activations)
    starts = sorted(start for row in machine.starts(orders, timing) for start in row)
    assert starts == pytest.approx([event.start for event in timeline.events])
    assert timeline.cost <= simulate(one, costs).cost * (1 + 1e-9)  # taking B and OVERLAP_F_B apart delays nothing
    assert timeline.cost >= lower_bound(machine) * (1 - 1e-8)


def test_orders_that_wait_for_each_other():
    assert Machine([0, 1], 2, 1, Costs(1, 1, 1), None).time([[1, 0, 2], [3, 4, 5]]) is None


@given(st.data())
def test_repair_keeps_everything_and_the_limit(data):
    chunks, microbatches = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 5))
    machine = Machine([0] * chunks, 1, microbatches, Costs(1, 1, 1), data.draw(st.floats(1, 4)))
    order = data.draw(st.permutations([step for step in range(3 * chunks) for _ in range(microbatches)]))
    repaired = machine.repaired(order)
    if repaired is None:
        return
    assert sorted(repaired) == sorted(order)
    assert machine.peak(repaired) <= machine.limit
    assert [step for step in repaired if step % 3 < 2] == [step for step in order if step % 3 < 2]
    counts = dict.fromkeys(order, 0)
    for step in repaired:
        assert step % 3 == 0 or counts[step - 1] > counts[step]  # F before I before W
        counts[step] += 1


def test_repair_moves_weights_only_as_far_as_needed():
    machine = Machine([0], 1, 3, Costs(1, 1, 1), 2)
    assert machine.repaired([0, 0, 1, 0, 1, 1, 2, 2, 2]) == [0, 0, 1, 2, 0, 1, 1, 2, 2]
    assert machine.repaired([0, 0, 0, 1, 1, 1, 2, 2, 2]) is None
    assert machine.repaired([0, 1, 0, 2, 1, 0, 1, 2, 2]) == [0, 1, 0, 2, 1, 0, 1, 2, 2]
    assert machine.repaired([0, 0, 1, 1, 1, 0, 2, 2, 2]) is None  # I before F


# -------------------------------------------------------------------- heuristics


@settings(deadline=None)
@given(
    st.tuples(st.integers(1, 4), st.integers(1, 7), st.integers(1, 4)), times, st.floats(0, 1), st.floats(1, 5), st.booleans(),
    st.sampled_from(["loop", "v"]), st.data(),
)  # fmt: skip
def test_greedy_never_gets_stuck(size, each, communication, limit, short_gaps, layout, data):
    ranks, microbatches, chunks = size
    costs = Costs(*each, communication, 1, data.draw(st.floats(0, 1)))
    machine = Machine(stage_layout(ranks, ranks * chunks, layout), ranks, microbatches, costs, limit)
    caps = data.draw(st.none() | st.lists(st.integers(1, 4), min_size=ranks * chunks, max_size=ranks * chunks))
    orders = greedily(machine, short_gaps, caps)
    assume(orders is not None or caps is None)  # caps may leave later stages without what they wait for
    machine.schedule_of(orders, "").validate()
    assert machine.fits(orders)


@given(st.integers(1, 6), st.integers(1, 9), times, st.floats(0, 1), st.floats(0, 8), st.data())
def test_rounds_are_schedules_or_nothing(ranks, microbatches, each, communication, limit, data):
    machine = Machine(range(ranks), ranks, microbatches, Costs(*each, communication), limit)
    ahead = data.draw(st.none() | st.lists(st.integers(1, microbatches), min_size=ranks, max_size=ranks))
    orders = in_rounds(machine, ahead)
    if orders is not None:
        machine.schedule_of(orders, "").validate()
        assert machine.fits(orders)
    elif ahead is None:
        assert limit < ranks + 1


def test_rounds_take_as_many_ahead_as_asked():
    machine = Machine(range(3), 3, 8, Costs(1, 1, 1), None)
    orders = in_rounds(machine, [6, 3, 2])
    assert [order.index(3 * stage + 1) for stage, order in enumerate(orders)] == [6, 3, 2]
    assert in_rounds(machine, [2, 3, 1]) is None  # more than come in


@settings(deadline=None)
@given(named_schedules(ranks=4, microbatches=8, chunks=3), times, st.floats(0, 1), st.floats(0.5, 1.5))
def test_moving_actions_never_makes_a_schedule_worse(one, each, communication, slack):
    assume(not one.is_forward_only)
    costs = Costs(*each, communication)
    free = machine_of(one, costs)
    orders = free.orders_of(one)
    machine = machine_of(one, costs, max(map(free.peak, orders)) + slack)
    better = descend(machine, orders, lower_bound(machine), 30_000)
    machine.schedule_of(better, "").validate()
    assert machine.fits(better)
    assert machine.time(better).score <= machine.time(orders).score


def test_moving_actions_finds_what_is_missing():
    """1F1B, of which only the weight backwards are in the wrong places."""
    costs = Costs(1, 1, 1)
    one = build_named("1F1B", 3, 6)
    machine = machine_of(one, costs, 3)
    assert simulate(one, costs).cost == 24
    assert max(machine.time(descend(machine, machine.orders_of(one), 0, 100_000)).spans) <= 21

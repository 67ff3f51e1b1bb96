"""Slots of activations: the published examples, an independent count of what is alive, and what cannot be planned."""

from __future__ import annotations

import re
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiograd.errors import ArgumentError, ScheduleError
from aiograd.pipeline import ActionKind, Schedule, SlotAssignment, rank_slots
from aiograd.pipeline.schedule.named import build_named
from tests.pipeline.schedule.rows import named_schedules, schedule

K = ActionKind
INTERLEAVED = "0F0 2F0 0F1 2B0 0B0 2F1 2B1 0B1 0F2 2F2 2B2 0B2 / 1F0 1F1 1F2 1B0 1B1 1B2"


def alive_at_once(plan: SlotAssignment, shared: bool) -> int:
    """The most lives that share a cell, by counting them at each."""
    lives = {(key[1] if shared else key, life) for key, life in plan.lives.items()}
    last = max(end for _, (_, end) in lives)
    return max(sum(start <= step <= end for _, (start, end) in lives) for step in range(last + 1))


def test_input_backwards_do_not_release():
    plan = rank_slots(schedule("0F0 0F1 0I0 0F2 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3"), 0)
    assert (plan.rank, plan.num_slots) == (0, 3)
    assert plan.slots == {(0, 0): 0, (0, 1): 1, (0, 2): 2, (0, 3): 0}
    assert (plan.lives[0, 0], plan.lives[0, 2]) == ((0, 4), (3, 9))


def test_granularity():
    one = schedule(INTERLEAVED)
    keys = [(0, 0), (2, 0), (0, 1), (2, 1), (0, 2), (2, 2)]
    each, shared = one.slots()[0], one.slots("microbatch")[0]
    assert (each.num_slots, shared.num_slots) == (3, 2)
    assert [each.slots[key] for key in keys] == [0, 1, 2, 0, 0, 1]
    assert [each.lives[key] for key in keys] == [(0, 4), (1, 3), (2, 7), (5, 6), (8, 11), (9, 10)]
    assert [shared.slots[key] for key in keys] == [0, 0, 1, 1, 0, 0]
    assert [shared.lives[key] for key in keys] == [(0, 4), (0, 4), (2, 7), (2, 7), (8, 11), (8, 11)]
    assert rank_slots(one, 0, [2]).slots == {(2, 0): 0, (2, 1): 0, (2, 2): 0}
    assert [plan.rank for plan in one.slots()] == [0, 1] and one.slots()[1].num_slots == 3


def test_lives_that_touch_in_a_cell_differ():
    """Both ends count: what an overlap releases cannot hold what it makes."""
    plan = rank_slots(schedule("0F0 1F0 (0F1;1B0)OVERLAP_F_B 0B0 1F1 1B1 0B1"), 0)
    assert plan.slots[0, 1] == 2
    assert rank_slots(schedule("0F0 (0F1;0B0)OVERLAP_F_B 0B1"), 0).num_slots == 2
    assert rank_slots(schedule("(0F0;0B0)OVERLAP_F_B"), 0).lives == {(0, 0): (0, 0)}


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8)])
def test_known_peaks(ranks, microbatches):
    for name, slots in (("GPipe", [microbatches] * ranks), ("1F1B", list(range(ranks, 0, -1)))):
        assert [plan.num_slots for plan in build_named(name, ranks, microbatches).slots()] == slots
    assert [plan.num_slots for plan in build_named("ZBV", ranks, microbatches, 2).slots()] == [2 * ranks] * ranks


@given(named_schedules().filter(lambda one: not one.is_forward_only), st.booleans(), st.booleans())
def test_slots_are_disjoint_and_as_few_as_can_be(one, lowered, shared):
    one = one.lower() if lowered else one
    for rank, plan in enumerate(one.slots("microbatch" if shared else "stage_microbatch")):
        assert set(plan.slots) == set(plan.lives) == {(s, m) for s in one.stages_of(rank) for m in range(one.num_microbatches)}
        for (left, a), (right, b) in combinations(plan.lives.items(), 2):
            if a[0] <= b[1] and b[0] <= a[1] and not (shared and left[1] == right[1]):
                assert plan.slots[left] != plan.slots[right]
        assert set(plan.slots.values()) == set(range(plan.num_slots))
        assert plan.num_slots == alive_at_once(plan, shared)
        for (stage, microbatch), (start, end) in plan.lives.items() if not shared else ():
            first, last = (
                [part.kind for part in one.ranks[rank][step].computations if (part.stage, part.microbatch) == (stage, microbatch)]
                for step in (start, end)
            )
            assert first == [K.F] and last in ([K.B], [K.W])


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"granularity": "layer"}, "Unsupported granularity 'layer'"),
        ({"stages": ()}, "must not be empty"),
        ({"stages": (0, 0)}, "must be unique"),
        ({"stages": (1,)}, "stage 1 does not live on rank 0"),
        ({"rank": 1}, "not present"),
        ({"rank": -1}, "not present"),
    ],
)
def test_what_is_asked_for_is_checked(options, reason):
    with pytest.raises(ArgumentError, match=reason):
        rank_slots(**{"schedule": schedule("0F0 0B0"), "rank": 0} | options)


@pytest.mark.parametrize(
    ("text", "reason", "step"),
    [
        ("0F0 0F0", "multiple forwards", 1),
        ("0F0 0I0 0I0", "multiple input backwards", 2),
        ("0F0 0B0 0W0", "multiple release actions", 2),
        ("0F0 0B0 0B0", "multiple release actions", 2),
        ("0B0", "Forward actions", None),
        ("0F0", "Backward release actions", None),
        ("0F0 0I0", "Backward release actions", None),
        ("0F0 0W0", "without input backward", 1),
        ("0F0 0W0 0I0", "before its input backward", 1),
        ("0B0 0F0", "ends before its forward", 0),
        ("0I0 0F0 0W0", "input backward (I) before its forward", 0),
    ],
)
def test_lives_that_make_no_sense_are_refused(text, reason, step):
    with pytest.raises(ScheduleError, match=re.escape(reason)) as refused:
        schedule(text).slots()
    error = refused.value
    assert (error.rank, error.step, error.stage, error.microbatch) == (0, step, 0, 0)


def test_a_microbatch_outside_is_no_schedule_and_a_huge_one_is_told_at_once():
    with pytest.raises(ArgumentError, match="cannot have 1 microbatches"):
        schedule("0F1", microbatches=1)
    with pytest.raises(ScheduleError, match=r"Forward actions .* microbatch 1"):
        Schedule(schedule("0F0 0F999999999 0B0").ranks).slots()

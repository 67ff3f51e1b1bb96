"""Schedules as values: their sizes, their text, their CSV, and what cannot be one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiograd.errors import ArgumentError, ArgumentTypeError, ScheduleError
from aiograd.pipeline import Action, Schedule
from aiograd.pipeline.schedule.named import build_named
from tests.pipeline.schedule.rows import named_schedules, row, rows, schedule

TWO = "0F0 0F1 . 0B0 . 0B1 / . 1F0 1B0 1F1 1B1 ."
V = "0F0 3F0 3B0 0B0 / 1F0 2F0 2B0 1B0"
OVERLAP = "0F0 0F1 3F0 (0F2;3B0)OVERLAP_F_B / . 1F0 . . ."


def test_sizes_are_derived():
    two, v = schedule(TWO), schedule(V)
    assert (two.num_ranks, two.num_stages, two.num_microbatches, two.stage_to_rank) == (2, 2, 2, (0, 1))
    assert (v.num_ranks, v.num_stages, v.num_microbatches, v.stage_to_rank) == (2, 4, 1, (0, 1, 1, 0))
    assert (v.stages_of(0), v.stages_of(1)) == ((0, 3), (1, 2))
    assert schedule("(0F0;1B4)OVERLAP_F_B").num_microbatches == 5


def test_sizes_are_taken():
    given = schedule("0F0 / 1F0", stages=3, microbatches=4, stage_to_rank=(0, 1, 0), name="mine")
    assert (given.num_stages, given.num_microbatches, given.stage_to_rank, given.name) == (3, 4, (0, 1, 0), "mine")


def test_ranks_may_be_a_mapping():
    assert Schedule(dict(enumerate(rows(TWO)))) == schedule(TWO)
    with pytest.raises(ScheduleError, match="ranks 0 to 1, found"):
        Schedule({0: row("0F0"), 2: row("1F0")})


@pytest.mark.parametrize(
    ("arguments", "error", "reason"),
    [
        (([],), ScheduleError, "at least one rank"),
        (([[]],), ArgumentError, "microbatches"),
        (("0F0",), ArgumentTypeError, "sequence of rows, not str"),
        ((3,), ArgumentTypeError, "sequence of rows"),
        (([3],), ArgumentTypeError, "rank 0 of a schedule .* sequence of actions, not int"),
        ((["0F0"],), ArgumentTypeError, "rank 0 of a schedule .* not str"),
        (([[None, "0F0"]],), ArgumentTypeError, "rank 0, step 1"),
        ((rows("0F0 2F0"),), ScheduleError, "stage 1 of 3"),
    ],
)
def test_what_is_no_schedule(arguments, error, reason):
    with pytest.raises(error, match=reason):
        Schedule(*arguments)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"stages": 1}, "up to number 1 of its stages cannot have 1"),
        ({"microbatches": 1}, "up to number 1 of its microbatches cannot have 1"),
        ({"stages": 4}, "stage 2 of 4"),
        ({"stage_to_rank": (0, 2)}, "one rank of 0 to 1"),
        ({"stage_to_rank": (0, 1), "stages": 3}, "for each of 3 stages"),
        ({"stage_to_rank": (0,)}, "cannot have 1 stages"),
        ({"stage_to_rank": (0, "1")}, "one rank of 0 to 1"),
        ({"stages": "2"}, "int or None, not str"),
        ({"microbatches": 2.0}, "int or None, not float"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(options, reason):
    with pytest.raises(ArgumentError, match=reason):
        schedule(TWO, **options)


def test_a_schedule_is_a_value():
    one, other = schedule(TWO), schedule(TWO, name="other")
    assert one == other and hash(one) == hash(other)
    assert one != schedule(TWO, microbatches=3) and one != schedule(V) and one != 3
    with pytest.raises(AttributeError):
        one.ranks = ()


def test_text_is_an_aligned_grid():
    assert str(schedule("0F0 . (0F11;1B0)OVERLAP_F_B / . 2F0")).splitlines() == [
        "        Rank 0                Rank 1",
        "Step 0: 0F0",
        "Step 1:                       2F0",
        "Step 2: (0F11;1B0)OVERLAP_F_B",
    ]
    assert repr(schedule(TWO, name="mine")) == "<Schedule mine: 2 ranks, 2 stages, 2 microbatches, compute-only>"


def test_forms_are_told_apart():
    plain = schedule(TWO, name="mine")
    lowered = plain.lower()
    assert (plain.is_lowered, lowered.is_lowered) == (False, True)
    assert plain.compute_only() is plain
    assert lowered.compute_only() == plain.with_ranks([[action for action in part if action] for part in plain.ranks])
    assert lowered.name == "mine"
    assert schedule("0F0 0F1 / 1F0 1F1").is_forward_only and not plain.is_forward_only
    assert not schedule("0F0 (0F1;1B0)OVERLAP_F_B").is_forward_only


def test_csv_has_a_row_per_rank_and_a_cell_per_step():
    two = schedule(TWO)
    assert two.to_csv() == "0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1,\n"
    assert two.to_csv(comms=False) == two.to_csv()
    assert two.to_csv(comms=True) == two.lower().to_csv() == two.lower().to_csv(comms=True)
    assert "SEND" in two.to_csv(comms=True) and "SEND" not in two.lower().to_csv(comms=False)


@given(named_schedules(), st.booleans(), st.booleans(), st.booleans())
def test_csv_is_read_back(plain, lowered, defer, parameters):
    one = plain.lower(defer, unshard=parameters, reduce_gradients=parameters) if lowered else plain
    assert Schedule.from_csv(one.to_csv()) == one
    assert Schedule.from_csv(one.to_csv().replace("\n", "\r\n")) == one


@pytest.mark.parametrize(
    ("text", "reason", "rank", "step"),
    [
        ("", "at least one rank", None, None),
        ("0F0,0B0\n\n", "rank 1 of 2 has no stage", 1, None),
        ("0F0,0B0,0Foo\n", "rank 0, step 2.*'0Foo' is no action", 0, 2),
        ("0F0,0B0\n1F0,1F\n", "rank 1, step 1", 1, 1),
        ("0B0,0F0\n", "without its forward", 0, 0),
        ('"0F0,0B0\n', "row 0 is no CSV", 0, None),
        ('0F0,"0B0"x\n', "row 0 is no CSV", 0, None),
        ("0F0,0F999999999\n", "2 forwards", 0, None),
        ("0F0,999999999F0\n", "stage 1 of 1000000000", None, None),
    ],
)
def test_bad_csv_is_refused(text, reason, rank, step):
    with pytest.raises(ScheduleError, match=reason) as refused:
        Schedule.from_csv(text)
    assert (refused.value.rank, refused.value.step) == (rank, step)


def test_csv_is_text():
    with pytest.raises(ArgumentTypeError, match="bytes"):
        Schedule.from_csv(b"0F0,0B0\n")


@given(st.data())
def test_damaged_csv_is_a_schedule_or_refused(data):
    """Cells swapped, dropped, doubled or replaced: what is left is a schedule that runs, or a typed error; nothing hangs."""
    one = data.draw(named_schedules(3, 5, 2))
    ranks = [list(part) for part in (one.lower() if data.draw(st.booleans()) else one).ranks]
    for _ in range(data.draw(st.integers(1, 3))):
        part, other = (data.draw(st.sampled_from(ranks)) for _ in range(2))
        here = data.draw(st.integers(0, len(part) - 1))
        there = data.draw(st.integers(0, len(other) - 1))
        match data.draw(st.integers(0, 3)):
            case 0:
                part[here], other[there] = other[there], part[here]
            case 1:
                part[here] = None
            case 2:
                part.insert(here, other[there])
            case 3:
                part[here] = data.draw(st.sampled_from([Action.parse("0B0"), Action.parse("1RECV_F0"), Action.parse("0UNSHARD")]))
    text = "\n".join(",".join("" if action is None else str(action) for action in part) for part in ranks) + "\n"
    try:
        found = Schedule.from_csv(text)
    except ArgumentError:
        return
    lowered = found if found.is_lowered else found.lower()
    assert Schedule.from_csv(lowered.to_csv()) == lowered


def test_a_large_schedule_round_trips():
    one = build_named("Interleaved1F1B", 16, 16, 4)
    assert Schedule.from_csv(one.to_csv(comms=True)) == one.lower()

"""Impossible schedules, and the errors that name their fault."""

from __future__ import annotations

import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from aiograd.errors import ScheduleError
from aiograd.pipeline import Schedule
from tests.pipeline.schedule.rows import named_schedules, rows, schedule


@pytest.mark.parametrize(
    "text",
    [
        "0F0 0B0",
        "0F0 0B0 / 1F0 1B0",
        "0F0 0I0 0W0 / 1F0 1I0 1W0",
        "0F0 0B0 / 1F0 1I0 1W0",
        "0F0 0F1 0I0 0B1 0W0 / 1F0 1I0 1F1 1W0 1B1",
        ". 0F0 . 0B0 . / 1F0 1B0",
        "0F0 0F1 / 1F0 1F1",
        "0F0 1F0 0F1 1B0 (1F1;0B0)OVERLAP_F_B 1B1 0B1",
        "0F0 0SEND_F0 0RECV_B0 0B0 / 1RECV_F0 1F0 1B0 1SEND_B0",
        "0UNSHARD 0F0 0RESHARD 0UNSHARD 0B0 0REDUCE_GRAD 0RESHARD",
        "0UNSHARD 0F0 1F0 1B0 0B0",
    ],
)
def test_what_can_run(text):
    one = schedule(text)
    assert one.validate() is one


#: schedule, part of the message, and rank, step, stage and microbatch
PLACES = [
    # One row by itself.
    ("0B0 0F0 / 1F0 1B0", "full backward (B) of stage 0, microbatch 0 without its forward (F)", (0, 0, 0, 0)),
    ("0F0 0F1 0I0 0W0 0I1 0W1 / 1F0 1I0 1I1 1W0 1F1 1W1", "input backward (I) of stage 1, microbatch 1 without its forward", (1, 2, 1, 1)),
    ("0F0 0W0 0I0 / 1F0 1B0", "weight backward (W) of stage 0, microbatch 0 without its input backward", (0, 1, 0, 0)),
    ("0F0 0B0 / 1F0 1B0 0F0", "0F0 of stage 0, microbatch 0, which is assigned to rank 0", (1, 2, 0, 0)),
    ("0F0 . 0F0 0B0", "repeats 0F0 of step 0", (0, 2, 0, 0)),
    ("0F0 0B0 0B0", "repeats 0B0 of step 1", (0, 2, 0, 0)),
    ("0F0 0I0 0B0 0W0", "0B0 of stage 0, microbatch 0 repeats 0I0", (0, 2, 0, 0)),
    ("0F0 0B0 0I0 0W0", "0I0 of stage 0, microbatch 0 repeats 0B0", (0, 2, 0, 0)),
    ("0F0 0B0 0W0", "after a full backward (B), which includes it", (0, 2, 0, 0)),
    ("(0F0;0B0)OVERLAP_F_B", "without its forward (F) in an earlier step", (0, 0, 0, 0)),
    # Parameters.
    ("0F0 0B0 0RESHARD", "not gathered at this point", (0, 2, 0, None)),
    ("0UNSHARD 0UNSHARD 0F0 0B0", "gathered already", (0, 1, 0, None)),
    ("0UNSHARD 0F0 0RESHARD 0B0", "UNSHARD them first", (0, 3, 0, 0)),
    ("0F0 0UNSHARD 0B0", "UNSHARD them first", (0, 0, 0, 0)),
    ("0F0 0F1 0B0 0REDUCE_GRAD 0B1", "1 backwards still to come", (0, 3, 0, None)),
    ("0F0 0I0 0REDUCE_GRAD 0W0", "1 backwards still to come", (0, 2, 0, None)),
    ("0F0 0B0 0REDUCE_GRAD 0REDUCE_GRAD", "repeats 0REDUCE_GRAD", (0, 3, 0, None)),
    ("0F0 0B0 / 1F0 1B0 0UNSHARD", "assigned to rank 0", (1, 2, 0, None)),
    # Transfers.
    ("0SEND_F0 0F0 0RECV_B0 0B0 / 1RECV_F0 1F0 1B0 1SEND_B0", "SEND_F of stage 0, microbatch 0 without the forward", (0, 0, 0, 0)),
    ("0F0 0SEND_F0 0RECV_B0 0B0 / 1RECV_F0 1F0 1SEND_B0 1B0", "without the backward", (1, 2, 1, 0)),
    ("0F0 0SEND_F0 0RECV_B0 0B0 / 0RECV_F0 1RECV_F0 1F0 1B0 1SEND_B0", "assigned to rank 0", (1, 0, 0, 0)),
    ("0F0 0SEND_F0 1F0 1B0 0B0", "moves nothing between two ranks", (0, 1, 0, 0)),
    ("0F0 0SEND_F0 0RECV_B0 0B0 0SEND_B0 / 1RECV_F0 1F0 1B0 1SEND_B0", "moves nothing between two ranks", (0, 4, 0, 0)),
    ("0F0 0RECV_F0 0B0", "moves nothing between two ranks", (0, 1, 0, 0)),
    # All together.
    ("0F0 0B0 0F1 0B1 / 1F1 1B1 1F0 1B0", "the ranks wait for each other forever", (0, 1, 0, 0)),
    ("0F0 1B0 1F0 0B0", "full backward (B) of stage 1, microbatch 0 without", (0, 1, 1, 0)),
    ("1F0 0F0 1B0 0B0", "(1F0) for F of stage 0, microbatch 0", (0, 0, 1, 0)),
    ("0F0 0F1 1F0 (1F1;0B0)OVERLAP_F_B 1B0 1B1 0B1", "((1F1;0B0)OVERLAP_F_B) for I of stage 1, microbatch 0", (0, 3, 1, 1)),
    ("0F0 0SEND_F0 0RECV_B0 0B0 / 1F0 1RECV_F0 1B0 1SEND_B0", "(1F0) for RECV_F of stage 1, microbatch 0", (0, 2, 0, 0)),
    ("0RECV_B0 0F0 0SEND_F0 0B0 / 1RECV_F0 1F0 1B0 1SEND_B0", "rank 1 at step 0 (1RECV_F0) for SEND_F of stage 0", (0, 0, 0, 0)),
]


@pytest.mark.parametrize(("text", "reason", "place"), PLACES)
def test_the_place_of_an_error_is_shown(text, reason, place):
    with pytest.raises(ScheduleError, match=re.escape(reason)) as refused:
        schedule(text).validate()
    error = refused.value
    assert (error.rank, error.step, error.stage, error.microbatch) == place
    message, grid = str(error).split("\n\n")
    assert message.startswith(f"rank {place[0]}, step {place[1]}: ")
    marked = [line for line in grid.splitlines() if "<-- ERROR HERE" in line]
    assert len(marked) == 1 and marked[0].startswith(f"Step {place[1]}:") and marked[0].endswith(f"(rank {place[0]})")
    assert str(schedule(text).ranks[place[0]][place[1]]) in marked[0]


@pytest.mark.parametrize(
    ("text", "options", "reason", "rank", "stage"),
    [
        ("0F0 0B0 / 1F0", {}, "stage 1 has 0 backwards (B=0, I=0, W=0), expected 1", 1, 1),
        ("0F0 0F1 0B0 / 1F0 1F1 1B0 1B1", {}, "stage 0 has 1 backwards", 0, 0),
        ("0F0 0B0 / 1F0 1F1 1B0 1B1", {}, "stage 0 has 1 forwards (F), expected 2", 0, 0),
        ("0F0 0B0", {"microbatches": 2}, "stage 0 has 1 forwards (F), expected 2", 0, 0),
        ("0F0 0F1 / 1F0", {}, "stage 1 has 1 forwards (F), expected 2", 1, 1),
        ("0F0 0I0 / 1F0 1B0", {}, "stage 0 has 1 input backwards (I) and 0 weight backwards (W)", 0, 0),
        ("0F0 0B0", {"stage_to_rank": (0, 0)}, "stage 1 has 0 forwards", 0, 1),
        ("0F0 0B0 / ", {}, "rank 1 of 2 has no stage", 1, None),
        ("0F0 0B0 / . .", {}, "rank 1 of 2 has no stage", 1, None),
        ("0F0 0SEND_F0 0RECV_B0 0B0 / 1RECV_F0 1F0 1B0", {}, "lacks 1SEND_B0, the other end of 0RECV_B0 between ranks 1 and 0", 1, 1),
        ("0F0 0RECV_B0 0B0 / 1RECV_F0 1F0 1B0 1SEND_B0", {}, "lacks 0SEND_F0", 0, 0),
        ("0F0 0SEND_F0 0RECV_B0 0B0 / 1F0 1B0 1SEND_B0", {}, "lacks 1RECV_F0", 1, 1),
    ],
)
def test_what_is_missing_is_named(text, options, reason, rank, stage):
    with pytest.raises(ScheduleError, match=re.escape(reason)) as refused:
        schedule(text, **options).validate()
    assert (refused.value.rank, refused.value.stage) == (rank, stage)


def test_long_schedules_are_shown_around_the_error():
    forwards = " ".join(f"0F{microbatch}" for microbatch in range(500))
    with pytest.raises(ScheduleError) as refused:
        schedule(f"{forwards} 0B0 0B0 {forwards.replace('F', 'B')}").validate()
    lines = str(refused.value).splitlines()
    assert len(lines) == 30 and lines[3] == lines[-1] == "..."
    assert [line for line in lines if "ERROR" in line] == ["Step 0501: 0B0  <-- ERROR HERE (rank 0)"]


@given(named_schedules())
def test_named_schedules_can_run(one):
    one.validate()
    for defer in (False, True):
        one.lower(defer).validate()
        one.lower(defer, unshard=True, reduce_gradients=True).validate()


@given(named_schedules(4, 6, 2), st.booleans(), st.data())
def test_every_action_counts(one, lowered, data):
    """Without any one of its actions no schedule can run, unless that was its only backward."""
    whole = one.lower() if lowered else one
    places = [(rank, step) for rank, part in enumerate(whole.ranks) for step, action in enumerate(part) if action]
    rank, step = data.draw(st.sampled_from(places))
    rest = [list(part) for part in whole.ranks]
    rest[rank][step] = None
    less = whole.with_ranks(rest)
    assume(not less.is_forward_only or whole.is_forward_only)
    with pytest.raises(ScheduleError):
        less.validate()


def test_a_stage_on_two_ranks():
    with pytest.raises(ScheduleError, match="a stage lives on one rank") as refused:
        Schedule(rows("0F0 0B0 / 0F0 0B0 1F0 1B0")).validate()
    assert (refused.value.rank, refused.value.step) == (1, 0)


def test_a_stage_on_two_ranks_of_which_one_has_no_other():
    with pytest.raises(ScheduleError, match="0F1 of stage 0, microbatch 1, which is assigned to rank 0: a stage lives on one rank") as refused:
        Schedule(rows("0F0 0B0 1F0 1B0 1F1 1B1 / . 0F1 0B1"), stages=2).validate()
    assert (refused.value.rank, refused.value.step, refused.value.stage) == (1, 1, 0)

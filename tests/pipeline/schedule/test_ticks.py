"""Numbers of ticks, against the published ones, and schedules that do not progress."""

from __future__ import annotations

import pytest
from hypothesis import given

from aiograd.errors import ScheduleError
from aiograd.pipeline import tick_count
from aiograd.pipeline.schedule import lowering, ticks
from aiograd.pipeline.schedule.dependencies import facts_needed
from aiograd.pipeline.schedule.named import build_named
from tests.pipeline.schedule.rows import named_schedules, schedule
from tests.pipeline.schedule.test_lowering import TWO, V


def test_published_numbers():
    assert tick_count(schedule(TWO)) == 11
    assert tick_count(schedule(V)) == 24
    assert tick_count(build_named("ZB1P", 2, 8, 2).merge()) == 113


def test_receiving_later_takes_fewer_ticks_here():
    assert tick_count(schedule(TWO).lower()) == 10
    assert tick_count(build_named("ZB1P", 2, 8, 2).merge().lower()) == 97


def test_idle_cells_do_not_count():
    assert tick_count(schedule("0F0 . . 0B0")) == 2
    assert tick_count(schedule("0UNSHARD . 0F0 0B0")) == 3


def test_an_overlap_is_one_tick():
    assert tick_count(schedule("0F0 1F0 0F1 1B0 (1F1;0B0)OVERLAP_F_B 1B1 0B1")) == 7


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("0F0 0SEND_F0 . 0RECV_B0 0B0 / 1RECV_F0 1F0 1B0", (0, 3, 0, 0)),
        ("0RECV_B0 0F0 0SEND_F0 0B0 / 1RECV_F0 1F0 1B0 1SEND_B0", (0, 0, 0, 0)),
        ("0SEND_F0 0F0 / 1RECV_F0 1F0", (0, 0, 0, 0)),
    ],
)
def test_what_does_not_progress_is_refused(text, place):
    with pytest.raises(ScheduleError, match=r"(?s)not progressing.*ERROR HERE") as refused:
        tick_count(schedule(text))
    error = refused.value
    assert (error.rank, error.step, error.stage, error.microbatch) == place


def test_a_malformed_compute_schedule_is_refused():
    with pytest.raises(ScheduleError, match="Malformed compute schedule"):
        tick_count(schedule("0F0 0B0 0F1 0B1 / 1F1 1B1 1F0 1B0"))


@given(named_schedules())
def test_every_schedule_gets_to_its_end(one):
    for defer in (False, True):
        lowered = one.lower(defer)
        longest = max(len(part) for part in lowered.ranks)
        assert longest <= tick_count(lowered) <= sum(len(part) for part in lowered.ranks)


@pytest.mark.parametrize("name", ["GPipe", "ZBV"])
def test_the_work_goes_with_the_number_of_actions(name, monkeypatch):
    """And not with that of ranks times ticks: most ranks wait most of the time here."""
    looks = []
    for module in (ticks, lowering):
        monkeypatch.setattr(module, "facts_needed", lambda *args: looks.append(args[0]) or facts_needed(*args))
    compute = build_named(name, 32, 2, 2 if name == "ZBV" else 1)
    lowered = compute.lower(defer_receives=False)
    actions = sum(part is not None for row in compute.ranks for part in row)
    assert actions <= len(looks) <= 3 * actions
    looks.clear()
    count = tick_count(lowered)
    actions = sum(part is not None for row in lowered.ranks for part in row)
    assert actions <= len(looks) <= 3 * actions < count * 32

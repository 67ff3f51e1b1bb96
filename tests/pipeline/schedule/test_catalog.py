"""One way to every schedule: the named ones as they are, and the search behind "auto"."""

from __future__ import annotations

import pytest

from aiograd.errors import ArgumentError, ArgumentTypeError
from aiograd.pipeline import make_schedule
from aiograd.pipeline.schedule import catalog
from aiograd.pipeline.schedule.costs import Costs
from aiograd.pipeline.schedule.named import build_named
from tests.pipeline.schedule.rows import schedule


def test_named_schedules():
    assert make_schedule("1F1B", 2, 4) == build_named("1F1B", 2, 4)
    assert make_schedule("zbv", 2, 4, 2, costs=Costs(1, 1, 1)) == build_named("ZBVZeroBubble", 2, 4, 2)


@pytest.mark.parametrize("name", ["auto", "AUTO"])
def test_auto_is_searched(name, monkeypatch):
    found, costs = schedule("0F0 0B0"), Costs(1, 1, 1)

    def search(*arguments, **options):
        assert (arguments, options) == ((1, 2, 3), {"costs": costs, "memory_limit": 4.0})
        return found

    monkeypatch.setattr(catalog, "search_schedule", search)
    assert make_schedule(name, 1, 2, 3, costs=costs, memory_limit=4.0) is found


def test_what_is_found_can_run():
    make_schedule("auto", 2, 3, costs=Costs(1, 1, 1)).validate()


def test_a_limit_is_not_ignored():
    with pytest.raises(ArgumentError, match=r"GPipe takes the memory it takes; memory_limit=2\.0"):
        make_schedule("gpipe", 2, 4, memory_limit=2.0)


def test_unknown_names_are_told():
    with pytest.raises(ArgumentError, match=r"'ScheduleThatDoesNotExist'.*and auto"):
        make_schedule("ScheduleThatDoesNotExist", 2, 4)
    with pytest.raises(ArgumentTypeError, match="not int"):
        make_schedule(3, 2, 4)

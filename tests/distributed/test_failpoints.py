"""Failpoints: without effect unless they are observed, and armed for one visit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from aiograd.distributed import failpoints
from aiograd.distributed.failpoints import POINTS, arm, observe, reach
from aiograd.errors import ArgumentError

POINT, OTHER = "bwd.after_accumulate", "commit.half"


@pytest.fixture(autouse=True)
def _nothing_stays_armed() -> Iterator[None]:
    yield
    assert failpoints._listeners == ()


def test_points_are_observed_until_told_to_stop() -> None:
    seen: list[str] = []
    reach("not checked unless points are observed")
    stop, again = observe(seen.append), observe(seen.append)
    reach(POINT)
    stop()
    stop()
    reach(OTHER)
    again()
    reach(OTHER)
    assert seen == [POINT, POINT, OTHER]


def test_an_action_is_called_once_at_its_visit() -> None:
    calls: list[int] = []
    with arm(POINT, lambda: calls.append(failpoint.hits), hit=3) as failpoint:
        for _ in range(2):
            reach(POINT)
            reach(OTHER)
        assert calls == [] and not failpoint.has_fired
        reach(POINT)
        reach(POINT)
        assert calls == [3] and failpoint.has_fired and failpoint.hits == 4
    reach(POINT)
    assert failpoint.hits == 4


def test_only_visits_that_count_are_counted() -> None:
    here = False
    calls: list[str] = []
    with arm(POINT, lambda: calls.append("called"), when=lambda: here):
        reach(POINT)
        here = True
        reach(POINT)
    assert calls == ["called"]


def test_names_are_checked() -> None:
    with pytest.raises(ArgumentError, match=r"no failpoint 'bwd\.typo'; there are: fwd\.before_receive"):
        arm("bwd.typo", print)
    with pytest.raises(ArgumentError, match="counted from 1"):
        arm(POINT, print, hit=0)
    with arm(POINT, print), pytest.raises(ArgumentError, match="no failpoint"):
        reach("bwd.typo")
    assert len(POINTS) == 17 and all(meaning for meaning in POINTS.values())

"""Failpoints: silent unless somebody listens, armed for one visit, and read from the environment of real processes."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from aiograd.distributed import failpoints
from aiograd.distributed.failpoint_actions import arm_from_environment
from aiograd.distributed.failpoints import POINTS, FailpointError, FailpointPlan, arm, observe, parse, reach
from aiograd.errors import ArgumentError

POINT, OTHER = "bwd.after_accumulate", "commit.half"


@pytest.fixture(autouse=True)
def _nothing_stays_armed() -> Iterator[None]:
    yield
    assert failpoints._listeners == ()


def test_points_are_observed_until_told_to_stop() -> None:
    seen: list[str] = []
    reach("not looked at while nobody listens")
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


def test_plans_are_parsed() -> None:
    text = "bwd.after_accumulate=kill9@3; fwd.in_compute=sleep:0.5;commit.half=raise ;fwd.mid_send=stop@2;"
    assert parse(text) == (
        FailpointPlan("bwd.after_accumulate", "kill9", None, 3),
        FailpointPlan("fwd.in_compute", "sleep", 0.5, 1),
        FailpointPlan("commit.half", "raise", None, 1),
        FailpointPlan("fwd.mid_send", "stop", None, 2),
    )
    assert parse("") == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("commit.half", "expected POINT=ACTION"),
        ("commit.half=kill9@x", "expected POINT=ACTION"),
        ("commit.quarter=kill9", "no failpoint 'commit.quarter'"),
        ("commit.half=explode", "no action 'explode'; expected one of kill9, stop, raise, sleep"),
        ("commit.half=sleep", "sleep takes seconds"),
        ("commit.half=kill9:3", "the other actions take nothing"),
        ("commit.half=kill9@0", "counted from 1"),
        ("commit.half=sleep:1.2.3", "no number"),
    ],
)
def test_plans_that_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        parse(text)


def test_the_environment_arms() -> None:
    assert arm_from_environment({}) == ()
    with pytest.raises(ArgumentError):
        arm_from_environment({"AIOGRAD_FAILPOINT": f"{POINT}=raise;{OTHER}=typo"})
    raising, sleeping = arm_from_environment({"AIOGRAD_FAILPOINT": f"{POINT}=raise@2;{OTHER}=sleep:0.01"})
    with raising, sleeping:
        reach(POINT)
        with pytest.raises(FailpointError, match=POINT):
            reach(POINT)
        start = time.perf_counter()
        reach(OTHER)
        assert time.perf_counter() - start >= 0.01


@pytest.mark.proc
def test_a_real_process_is_killed_at_its_visit() -> None:
    script = (
        "from aiograd.distributed.failpoint_actions import arm_from_environment as arm\n"
        "from aiograd.distributed.failpoints import reach\n"
        "arm()\n"
        "for number in range(5):\n"
        "    print(number, flush=True)\n"
        f"    reach({POINT!r})\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], env={"AIOGRAD_FAILPOINT": f"{POINT}=kill9@3", "OPENBLAS_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    assert (run.returncode, run.stdout.split()) == (-signal.SIGKILL, ["0", "1", "2"])

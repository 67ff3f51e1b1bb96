"""The rule by which a silent peer is lost, on arrivals of any kind."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiograd.distributed import FailureDetector, Limits
from aiograd.errors import ArgumentTypeError

LIMITS = Limits()
GAPS = st.lists(st.floats(0.0, 10.0), max_size=60)
ANY_LIMITS = st.builds(Limits, heartbeat=st.floats(0.01, 10.0), missed_heartbeats=st.integers(1, 10), held=st.floats(0.1, 100.0))


def after(gaps: list[float], limits: Limits = LIMITS) -> tuple[FailureDetector, float]:
    detector, now = FailureDetector(limits, 0.0), 0.0
    for gap in gaps:
        now += gap
        detector.heard(now)
    return detector, now


@given(GAPS, ANY_LIMITS)
def test_the_rule(gaps: list[float], limits: Limits) -> None:
    """Worked out here once more, by the weighted sums of all gaps."""
    detector, now = after(gaps, limits)
    times = np.cumsum([0.0, *gaps])
    real = [float(b - a) for a, b in itertools.pairwise(times)]
    silence = limits.heartbeat * limits.missed_heartbeats
    means = [silence]
    for gap in real:
        means.append(7 / 8 * means[-1] + gap / 8)
    deviation = sum(abs(gap - mean) / 4 * (3 / 4) ** (len(real) - 1 - at) for at, (gap, mean) in enumerate(zip(real, means, strict=False)))
    expected = now + min(max(means[-1] + 4 * deviation + limits.heartbeat, silence / 2), silence)
    assert detector.deadline == pytest.approx(expected, rel=1e-6)


@given(GAPS, ANY_LIMITS)
def test_it_is_never_later_than_the_silence_nor_sooner_than_half_of_it(gaps: list[float], limits: Limits) -> None:
    detector, now = after(gaps, limits)
    assert now + limits.silence / 2 <= detector.deadline <= now + limits.silence
    detector.is_patient = True
    assert detector.deadline == now + limits.silence


@given(GAPS, st.floats(0.001, 100.0))
def test_a_time_before_the_last_one_counts_for_nothing(gaps: list[float], earlier: float) -> None:
    detector, now = after(gaps)
    before = detector.deadline, detector.mean_gap, detector.gap_deviation
    detector.heard(now - earlier)
    detector.held(now - earlier, 1.0, "a/b.py:1")
    assert (detector.deadline, detector.mean_gap, detector.gap_deviation) == before and detector.held_at is None


@given(GAPS, st.floats(0.0, 5.0), st.floats(0.0, 20.0), ANY_LIMITS)
def test_a_loop_that_is_held_up_is_waited_for(gaps: list[float], wait: float, seconds: float, limits: Limits) -> None:
    detector, last = after(gaps, limits)
    before, now = detector.deadline, last + wait
    detector.held(now, seconds, "a/b.py:1")
    assert detector.deadline == max(before, now - seconds + limits.held)
    assert (detector.held_at, detector.held_line) == (now, "a/b.py:1") and detector.held_seconds == pytest.approx(seconds)
    detector.held(now + 1.0, seconds, "a/c.py:2")  # said late: a hold does not begin anew
    assert detector.deadline == max(before, now - seconds + limits.held) and detector.held_line == "a/c.py:2"
    assert "a/c.py:2" in detector.reason(now + 31.0) and f"{seconds + 31.0:.1f} s" in detector.reason(now + 31.0)
    detector.heard(now + 2.0)
    assert (detector.held_at, detector.held_seconds, detector.held_line) == (None, 0.0, "")
    assert detector.deadline <= now + 2.0 + limits.silence and "nothing was heard" in detector.reason(now + 3.0)


@pytest.mark.parametrize("wrong", ["x", None, math.nan, math.inf, -math.inf, 1j])
def test_what_is_no_time_is_refused_and_changes_nothing(wrong: Any) -> None:
    detector, now = after([0.5, 0.25])
    before = detector.deadline, detector.mean_gap, detector.gap_deviation, detector.last, detector.held_at
    calls: list[Callable[[], Any]] = [
        lambda: FailureDetector(LIMITS, wrong),
        lambda: detector.begin(wrong),
        lambda: detector.heard(wrong),
        lambda: detector.held(wrong, 1.0, ""),
        lambda: detector.held(now, wrong, ""),
        lambda: detector.excuse(wrong),
        lambda: detector.reason(wrong),
    ]
    for call in calls:
        with pytest.raises(ArgumentTypeError, match="expected seconds of the loop's clock, found"):
            call()
    assert (detector.deadline, detector.mean_gap, detector.gap_deviation, detector.last, detector.held_at) == before
    with pytest.raises(ArgumentTypeError, match="expected dist.Limits"):
        FailureDetector(None, 0.0)  # type: ignore[arg-type]


@given(GAPS, st.floats(0.0, 5.0))
def test_what_is_excused_is_no_gap(gaps: list[float], seconds: float) -> None:
    detector, now = after(gaps)
    mean, deviation, wait = detector.mean_gap, detector.gap_deviation, detector.deadline - now
    detector.excuse(now + seconds)
    detector.excuse(now - 1.0)
    assert (detector.mean_gap, detector.gap_deviation) == (mean, deviation) and detector.deadline == pytest.approx(now + seconds + wait)


def test_regular_arrivals_make_it_quick_and_a_new_way_makes_it_forget() -> None:
    detector, now = after([0.25] * 80)
    assert detector.deadline - now == pytest.approx(0.75, abs=0.02)
    detector.forget()
    assert detector.deadline == now + 1.5
    detector, now = after([0.5] * 80)
    assert detector.deadline - now == pytest.approx(1.0, abs=0.02)
    detector.begin(now + 7.0)
    assert detector.deadline == now + 8.5


def false_losses(seconds: float, seed: int) -> int:
    """How often a peer is lost that sends a heartbeat each sixth of the silence, over a way that takes 20 ms more or less and has spikes."""
    random = np.random.default_rng(seed)
    sent = np.arange(0.0, seconds, LIMITS.silence / 6)
    way = 0.02 * np.exp(0.6 * random.standard_normal(len(sent)))
    way += np.where(random.random(len(sent)) < 0.01, 0.3 * random.random(len(sent)), 0.0)
    arrivals: list[float] = np.maximum.accumulate(sent + way).tolist()  # in order, as over any connection
    detector, lost = FailureDetector(LIMITS, 0.0), 0
    quickest = math.inf
    for now in arrivals:
        lost += now >= detector.deadline
        detector.heard(now)
        quickest = min(quickest, detector.deadline - now)
    assert quickest < 0.8, "it is quick at times"
    return lost


@pytest.mark.parametrize("seed", range(20))
def test_jitter_loses_nothing(seed: int) -> None:
    """A million seconds, in twenty parts."""
    assert false_losses(50_000.0, seed) == 0

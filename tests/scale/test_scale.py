"""A short version of ``python -m tests.scale``: replicas of a pipeline train to the same bits whoever is lost, and what a driver does grows no faster
than the number of its workers."""

from __future__ import annotations

import functools
import math

import pytest

from aiograd.testing import simulated_run
from tests.scale.growth import grow
from tests.scale.training import Size, train

#: more replicas than members of a small group, and as many hosts as need a tree
SIZE = Size(stages=2, replicas=18, workers=44, microbatches=2, steps=10)


@pytest.mark.sim
@pytest.mark.sweep
def test_parameters_have_the_bits_of_the_undisturbed_run() -> None:
    undisturbed = simulated_run(train, SIZE, 0, seed=0).value
    disturbed = simulated_run(train, SIZE._replace(churn=4.0, unconfirmed=3), 0, seed=0).value
    assert disturbed.lost >= 3 and disturbed.counts["replaced"] == disturbed.lost
    unconfirmed = disturbed.counts["unconfirmed"]  # one on purpose, and losses that fall between a vote and its commit
    assert disturbed.counts["given up"] and 1 <= unconfirmed <= 3
    assert len(set(undisturbed.digests)) == SIZE.stages, "replicas differ"
    assert undisturbed.digests == disturbed.digests
    confirmed = [(mine, other) for mine, other in zip(undisturbed.losses, disturbed.losses, strict=True) if not math.isnan(other)]
    assert len(confirmed) == SIZE.steps - unconfirmed and all(mine == other for mine, other in confirmed)


@pytest.mark.sim
def test_what_a_driver_sends_grows_no_faster_than_the_number_of_its_workers() -> None:
    silent = functools.partial(grow, heartbeat=10.0)  # no heartbeat among the frames of the work
    few, many = (simulated_run(silent, count, seed=0).value for count in (30, 90))
    for name in ("frames of the driver meanwhile", "frames of the driver in a step (call, backward, release)", "frames of all in a step"):
        assert many.figures[name] <= 1.1 * many.workers / few.workers * few.figures[name], name
    assert many.figures["connections in all"] <= 2 * many.workers

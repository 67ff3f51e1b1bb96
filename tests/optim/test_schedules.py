"""Schedules against their definitions, and in sequence."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

import aiograd as ag
from aiograd import nn, optim
from aiograd.errors import ArgumentError
from tests.support import assert_raises


def optimizer() -> optim.SGD:
    return optim.SGD([{"params": [nn.Parameter([1.0])], "lr": 1.0}, {"params": [nn.Parameter([1.0])], "lr": 0.1}])


def course(make: Callable[[optim.Optimizer], optim.LRScheduler], steps: int) -> list[float]:
    """Rates of the first group, before each step."""
    o = optimizer()
    schedule = make(o)
    rates = []
    for _ in range(steps):
        rates.append(o.param_groups[0]["lr"])
        assert o.param_groups[1]["lr"] == pytest.approx(0.1 * rates[-1])
        assert schedule.get_last_lr() == [group["lr"] for group in o.param_groups]
        o.step([ag.tensor([1.0])] * 2)
        schedule.step()
    return rates


CASES: dict[str, tuple[Callable[[optim.Optimizer], optim.LRScheduler], list[float]]] = {
    "step": (lambda o: optim.StepLR(o, 2, 0.5), [1, 1, 0.5, 0.5, 0.25]),
    "milestones": (lambda o: optim.MultiStepLR(o, [1, 3], 0.1), [1, 0.1, 0.1, 0.01, 0.01]),
    "exponential": (lambda o: optim.ExponentialLR(o, 0.5), [1, 0.5, 0.25, 0.125]),
    "cosine": (lambda o: optim.CosineAnnealingLR(o, 4), [1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, 0, (1 - math.sqrt(0.5)) / 2]),
    "linear": (lambda o: optim.LinearLR(o, 0.2, 1.0, 4), [0.2, 0.4, 0.6, 0.8, 1.0, 1.0]),
    "lambda": (lambda o: optim.LambdaLR(o, lambda t: 1 / (1 + t)), [1, 1 / 2, 1 / 3, 1 / 4]),
    "lambdas": (lambda o: optim.LambdaLR(o, [lambda t: 2.0**t, lambda t: 2.0**t]), [1, 2, 4]),
    "sequence": (
        lambda o: optim.SequentialLR(
            o, [optim.LinearLR(o, 0.5, 1.0, 2), optim.ExponentialLR(o, 0.5), optim.LambdaLR(o, lambda t: 7.0)], [2, 5]
        ),
        [0.5, 0.75, 1, 0.5, 0.25, 7, 7],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_rates_follow_the_definition(name: str) -> None:
    make, wanted = CASES[name]
    assert course(make, len(wanted)) == pytest.approx(wanted)


def test_cosine_ends_at_its_floor() -> None:
    o = optim.SGD([nn.Parameter([1.0])], lr=1.0)
    schedule = optim.CosineAnnealingLR(o, 10, eta_min=0.3)
    for _ in range(10):
        schedule.step()
    assert o.param_groups[0]["lr"] == pytest.approx(0.3)


@pytest.mark.parametrize("name", CASES)
def test_a_schedule_continues_from_its_state(name: str) -> None:
    make, _ = CASES[name]
    o = optimizer()
    schedule = make(o)
    for _ in range(2):
        schedule.step()
    state, options = schedule.state_dict(), o.state_dict()
    other = optimizer()
    other.load_state_dict(options)
    again = make(other)
    again.load_state_dict(state)
    assert [group["lr"] for group in other.param_groups] == [group["lr"] for group in o.param_groups]
    again.step()
    schedule.step()
    assert again.get_last_lr() == schedule.get_last_lr()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda o: optim.StepLR(o, 0),
        lambda o: optim.CosineAnnealingLR(o, 0),
        lambda o: optim.LinearLR(o, 0.0),
        lambda o: optim.LinearLR(o, 0.5, total_iters=0),
        lambda o: optim.LambdaLR(o, [lambda t: 1.0]),
        lambda o: optim.SequentialLR(o, [], []),
        lambda o: optim.SequentialLR(o, [optim.StepLR(o, 1)], [1]),
        lambda o: optim.SequentialLR(o, [optim.StepLR(o, 1), optim.StepLR(optimizer(), 1)], [1]),
        lambda o: optim.StepLR(o, 1).load_state_dict({"last_epoch": 1, "base_lrs": [1.0]}),
    ],
)
def test_schedules_that_make_no_sense_are_refused(wrong: Any) -> None:
    assert_raises(ArgumentError, None, lambda: wrong(optimizer()))

"""Schedules against their definitions, and in sequence."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import nn, optim
from aiograd.errors import ArgumentError, ArgumentTypeError
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


WRONG_TYPES: list[Any] = [
    lambda o: optim.StepLR("sgd", 1),
    lambda o: optim.LambdaLR(None, lambda t: 1.0),
    lambda o: optim.OneCycleLR(None, 0.1, 5),
    lambda o: optim.ReduceLROnPlateau([]),
    lambda o: optim.StepLR(o, "1"),
    lambda o: optim.StepLR(o, None),
    lambda o: optim.StepLR(o, True),
    lambda o: optim.StepLR(o, 1, "0.1"),
    lambda o: optim.StepLR(o, np.ones(2)),
    lambda o: optim.MultiStepLR(o, 3),
    lambda o: optim.MultiStepLR(o, "12"),
    lambda o: optim.MultiStepLR(o, [1, None]),
    lambda o: optim.MultiStepLR(o, [1], None),
    lambda o: optim.ExponentialLR(o, "x"),
    lambda o: optim.CosineAnnealingLR(o, "10"),
    lambda o: optim.CosineAnnealingLR(o, 10, None),
    lambda o: optim.LinearLR(o, "a"),
    lambda o: optim.LinearLR(o, 0.5, total_iters=None),
    lambda o: optim.LambdaLR(o, 0.5),
    lambda o: optim.LambdaLR(o, [0.5, 0.5]),
    lambda o: optim.LambdaLR(o, lambda t: None),
    lambda o: optim.LambdaLR(o, lambda t: "x"),
    lambda o: optim.CosineAnnealingWarmRestarts(o, "1"),
    lambda o: optim.CosineAnnealingWarmRestarts(o, 1, None),
    lambda o: optim.SequentialLR(o, None, []),
    lambda o: optim.SequentialLR(o, [o], []),
    lambda o: optim.SequentialLR(o, [optim.StepLR(o, 1), optim.StepLR(o, 1)], 1),
    lambda o: optim.SequentialLR(o, [optim.StepLR(o, 1), optim.StepLR(o, 1)], ["1"]),
    lambda o: optim.OneCycleLR(o, "x", 5),
    lambda o: optim.OneCycleLR(o, [0.1, None], 5),
    lambda o: optim.OneCycleLR(o, 0.1, "5"),
    lambda o: optim.OneCycleLR(o, 0.1, epochs="2", steps_per_epoch=3),
    lambda o: optim.OneCycleLR(o, 0.1, 5, div_factor=None),
    lambda o: optim.OneCycleLR(o, 0.1, 5, base_momentum="x"),
    lambda o: optim.ReduceLROnPlateau(o, factor="x"),
    lambda o: optim.ReduceLROnPlateau(o, patience=None),
    lambda o: optim.ReduceLROnPlateau(o, min_lr="x"),
    lambda o: optim.ReduceLROnPlateau(o).step(None),
    lambda o: optim.ReduceLROnPlateau(o).step([1.0, 2.0]),
]  # fmt: skip
WRONG_VALUES: list[Any] = [
    lambda o: optim.OneCycleLR(o, 0.1, 5, div_factor=0),
    lambda o: optim.OneCycleLR(o, 0.1, 5, final_div_factor=0.0),
    lambda o: optim.OneCycleLR(o, [0.1], 5),
    lambda o: optim.StepLR(o, 1).load_state_dict({"last_epoch": None, "base_lrs": [1.0, 1.0]}),
    lambda o: optim.StepLR(o, 1).load_state_dict({"last_epoch": 1, "base_lrs": [1.0, "x"]}),
    lambda o: optim.ReduceLROnPlateau(o).load_state_dict({**optim.ReduceLROnPlateau(o).state_dict(), "best": None}),
    lambda o: optim.StepLR(o, 1).load_state_dict(3),
    lambda o: optim.StepLR(o, 1).load_state_dict({"last_epoch": 1, "base_lrs": 3}),
    lambda o: optim.StepLR(o, 1).load_state_dict({"last_epoch": 1.5, "base_lrs": [1.0, 1.0]}),
    lambda o: optim.ReduceLROnPlateau(o).load_state_dict({**optim.ReduceLROnPlateau(o).state_dict(), "last_epoch": 1.5}),
]


@pytest.mark.parametrize("place", range(len(WRONG_TYPES) + len(WRONG_VALUES)))
def test_wrong_arguments_of_schedules_are_named(place: int) -> None:
    wrong = [*WRONG_TYPES, *WRONG_VALUES][place]
    error = ArgumentTypeError if place < len(WRONG_TYPES) else ArgumentError
    assert_raises(error, r"^(\w+LR|CosineAnnealingWarmRestarts|ReduceLROnPlateau)\b.*(expected|found)", lambda: wrong(optimizer()))


def test_numbers_of_numpy_are_numbers() -> None:
    o = optimizer()
    schedule = optim.StepLR(o, np.int64(2), np.float32(0.5))
    schedule.load_state_dict({"last_epoch": np.int64(2), "base_lrs": [np.float32(1.0), 1.0]})
    assert schedule.get_last_lr() == [0.5, 0.5] and optim.MultiStepLR(o, np.array([3, 1])).milestones == [1, 3]
    plateau = optim.ReduceLROnPlateau(o, patience=np.int64(0), min_lr=np.float32(0.25))
    plateau.step(ag.tensor(1.0))
    plateau.step(np.float32(2.0))
    assert plateau.num_bad_epochs == 0 and plateau.min_lrs == [0.25, 0.25]

"""LBFGS: it finds minima, leaves nothing half done, and goes on from its state; averages of weights; rates that follow a measure or a cycle."""

from __future__ import annotations

import asyncio
import copy
import math
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import nn, optim
from aiograd.errors import ArgumentError, ArgumentTypeError
from tests.support import assert_awaiting_raises, assert_raises, cancel, draw

VALLEY = [-1.2, 1.0]


def rosenbrock(x: Any) -> Any:
    return (1 - x[0]) ** 2 + 100 * (x[1] - x[0] * x[0]) ** 2


def problem(**options: Any) -> tuple[ag.Tensor, optim.LBFGS, Any]:
    x = ag.tensor(VALLEY, dtype=np.float64, requires_grad=True)
    optimizer = optim.LBFGS([x], **options)

    async def closure() -> Any:
        optimizer.zero_grad()
        loss = rosenbrock(x)
        await loss.backward()
        return loss

    return x, optimizer, closure


async def test_it_reaches_the_minimum_of_a_curved_valley() -> None:
    x, optimizer, closure = problem(max_iter=100, line_search_fn="strong_wolfe")
    first = await optimizer.step(closure)
    assert float(first) == pytest.approx(24.2)
    np.testing.assert_allclose(x.detach().numpy(), [1, 1], atol=1e-3)
    assert optimizer.state[x]["func_evals"] < 100


async def test_a_quadratic_is_solved_in_as_many_iterations_as_it_has_axes() -> None:
    a = ag.tensor(np.diag([1.0, 4.0, 9.0]))
    x = ag.tensor([3.0, -1.0, 2.0], dtype=np.float64, requires_grad=True)
    optimizer = optim.LBFGS([x], max_iter=12, line_search_fn="strong_wolfe")

    def loss_of() -> Any:
        return x @ a @ x / 2

    async def closure() -> Any:
        optimizer.zero_grad()
        loss = loss_of()
        await loss.backward()
        return loss

    await optimizer.step(closure)
    np.testing.assert_allclose(x.detach().numpy(), 0, atol=1e-5)


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
async def test_two_steps_are_those_of_a_restart_between_them(search: Any) -> None:
    options = {"lr": 0.001 if search is None else 1.0, "max_iter": 4, "line_search_fn": search}
    x, optimizer, closure = problem(**options)
    y, other, again = problem(**options)
    await optimizer.step(closure)
    await other.step(again)
    state = copy.deepcopy(other.state_dict())
    z, third, resumed = problem(**options)
    z.detach()[...] = y.detach()
    third.load_state_dict(state)
    await optimizer.step(closure)
    await third.step(resumed)
    assert z.tolist() == x.tolist() != VALLEY
    assert third.state[z]["n_iter"] == optimizer.state[x]["n_iter"] > 4


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
async def test_a_step_that_fails_or_is_cancelled_changes_nothing(search: Any) -> None:
    x, optimizer, closure = problem(max_iter=5, lr=1e-3, line_search_fn=search)
    await optimizer.step(closure)
    before, saved = x.tolist(), copy.deepcopy(optimizer.state_dict()["state"])
    calls = 0

    async def fails() -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            assert x.tolist() != before
            raise ValueError("no loss")
        return await closure()

    await assert_awaiting_raises(ValueError, "no loss", optimizer.step(fails))
    reached = asyncio.Event()

    async def waits() -> Any:
        loss = await closure()
        if x.tolist() != before:
            reached.set()
            await asyncio.Event().wait()
        return loss

    task = asyncio.create_task(optimizer.step(waits))
    await reached.wait()
    await cancel(task)
    now = optimizer.state_dict()["state"]
    assert x.tolist() == before
    assert now[0]["n_iter"] == saved[0]["n_iter"] and now[0]["d"].tolist() == saved[0]["d"].tolist()


async def test_several_parameters_and_ones_without_gradient() -> None:
    a, b, c = (ag.tensor(value, dtype=np.float64, requires_grad=True) for value in ([[2.0, 1.0]], 3.0, [7.0]))
    optimizer = optim.LBFGS([a, b, c], max_iter=30, line_search_fn="strong_wolfe")

    async def closure() -> Any:
        optimizer.zero_grad()
        loss = ((a - 1) ** 2).sum() + (b - 2) ** 4
        await loss.backward()
        return loss

    await optimizer.step(closure)
    np.testing.assert_allclose(a.detach().numpy(), 1, atol=1e-3)
    np.testing.assert_allclose(b.item(), 2, atol=0.1)
    assert c.tolist() == [7.0]


async def test_what_makes_no_sense_is_refused() -> None:
    x, optimizer, _ = problem()
    for options in ({"lr": 0.0}, {"max_iter": 0}, {"history_size": 0}, {"line_search_fn": "armijo"}):
        with pytest.raises(ArgumentError):
            optim.LBFGS([x], **options)
    assert_raises(ArgumentError, None, lambda: optim.LBFGS([{"params": [x]}, {"params": [ag.tensor([1.0], requires_grad=True)]}]))
    await assert_awaiting_raises(ArgumentTypeError, None, optimizer.step(None))
    await assert_awaiting_raises(ArgumentTypeError, "return the loss", optimizer.step(lambda: None))
    with pytest.raises(ArgumentError, match="expected \\[2\\]"):
        optimizer.load_state_dict({"state": {0: {"d": np.ones(3)}}, "param_groups": [{"params": [0]}]})
    assert x.tolist() == VALLEY


# -------------------------------------------------------------------- averages


def test_an_average_follows_the_weights() -> None:
    model = nn.Sequential(nn.Linear(2, 2, dtype=np.float64), nn.BatchNorm1d(2, dtype=np.float64))
    average = optim.ExponentialMovingAverage(model, 0.75)
    wanted, x = None, draw(5, 2)
    for step in range(4):
        model(x)
        model[0].weight.detach()[...] = draw(2, 2, at=step)
        average.update_parameters(model)
        wanted = draw(2, 2, at=step) if wanted is None else 0.75 * wanted + 0.25 * draw(2, 2, at=step)
    np.testing.assert_allclose(average.module[0].weight.numpy(), wanted)
    assert average.module[1].running_mean.tolist() == model[1].running_mean.tolist()
    assert not any(p.requires_grad for p in average.module.parameters())
    other = optim.ExponentialMovingAverage(nn.Sequential(nn.Linear(2, 2, dtype=np.float64), nn.BatchNorm1d(2, dtype=np.float64)), 0.75)
    other.load_state_dict(average.state_dict())
    assert other.n_averaged == 4
    for each in (average, other):
        each.update_parameters(model)
    assert other(x).tolist() == average(x).tolist()
    smooth = optim.ExponentialMovingAverage(model, 0.5, use_buffers=True)
    smooth.update_parameters(model)
    model(x + 100.0)
    smooth.update_parameters(model)
    assert smooth.module[1].running_mean.tolist() != model[1].running_mean.tolist()
    assert_raises(ArgumentError, "parameters", lambda: average.update_parameters(nn.Linear(2, 2)))
    assert_raises(ArgumentError, None, optim.ExponentialMovingAverage, model, 1.0)
    assert_raises(ArgumentTypeError, None, optim.ExponentialMovingAverage, 3)
    assert_raises(ArgumentError, None, average.load_state_dict, {"module": {}})


# -------------------------------------------------------------------- rates


def two_groups(cls: Any = optim.SGD, **options: Any) -> optim.Optimizer:
    made: optim.Optimizer = cls([{"params": [nn.Parameter([1.0])], "lr": 1.0}, {"params": [nn.Parameter([1.0])], "lr": 0.1}], **options)
    return made


def test_a_rate_falls_when_a_measure_gets_no_better() -> None:
    optimizer = two_groups()
    schedule = optim.ReduceLROnPlateau(optimizer, factor=0.5, patience=1, threshold=0.1, threshold_mode="abs", cooldown=1, min_lr=[0.2, 0.0])
    rates = []
    for measure in (5.0, 4.95, 4.95, 4.95, 4.95, 4.95, 4.95, 3.0, 4.0, ag.tensor(4.0), 4.0, 4.0):
        schedule.step(measure)
        rates.append(schedule.get_last_lr()[0])
    assert rates == [1, 1, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25, 0.25, 0.2, 0.2, 0.2]
    other = optim.ReduceLROnPlateau(two_groups(), factor=0.5, patience=1)
    other.load_state_dict(schedule.state_dict())
    assert (other.best, other.num_bad_epochs, other.last_epoch) == (3.0, schedule.num_bad_epochs, 12)
    rising = optim.ReduceLROnPlateau(two_groups(), mode="max", patience=0)
    rising.step(1.0)
    rising.step(1.00001)
    assert rising.get_last_lr()[0] == pytest.approx(0.1)
    for options in ({"mode": "less"}, {"factor": 1.0}, {"min_lr": [0.1]}, {"threshold_mode": "part"}):
        with pytest.raises(ArgumentError):
            optim.ReduceLROnPlateau(optimizer, **options)
    assert_raises(ArgumentError, None, schedule.load_state_dict, {"best": 1.0})


def test_a_cosine_starts_again() -> None:
    optimizer = two_groups()
    schedule = optim.CosineAnnealingWarmRestarts(optimizer, 2, 2, eta_min=0.0)
    rates = [schedule.get_last_lr()[0]]
    for _ in range(8):
        schedule.step()
        rates.append(schedule.get_last_lr()[0])
    high, low = (1 + math.sqrt(0.5)) / 2, (1 - math.sqrt(0.5)) / 2
    assert rates == pytest.approx([1, 0.5, 1, high, 0.5, low, 1, (1 + math.cos(math.pi / 8)) / 2, high])
    assert_raises(ArgumentError, None, optim.CosineAnnealingWarmRestarts, optimizer, 0)


@pytest.mark.parametrize("cls", [optim.SGD, optim.Adam])
def test_one_cycle_of_rate_and_momentum(cls: Any) -> None:
    optimizer = two_groups(cls, **({"momentum": 0.5} if cls is optim.SGD else {}))
    schedule = optim.OneCycleLR(optimizer, [2.0, 0.2], total_steps=11, pct_start=0.5, anneal_strategy="linear", div_factor=10, final_div_factor=100)
    rates, momenta = [], []
    for step in range(11):
        rates.append(optimizer.param_groups[0]["lr"])
        momenta.append(optimizer.param_groups[0]["momentum"] if cls is optim.SGD else optimizer.param_groups[0]["betas"][0])
        assert optimizer.param_groups[1]["lr"] == pytest.approx(rates[-1] / 10)
        if step < 10:
            schedule.step()
    rise = 4.5
    wanted = [0.2 + 1.8 * t / rise if t <= rise else 2 + (0.002 - 2) * (t - rise) / (10 - rise) for t in range(11)]
    assert rates == pytest.approx(wanted)
    assert momenta == pytest.approx([0.95 - 0.1 * t / rise if t <= rise else 0.85 + 0.1 * (t - rise) / (10 - rise) for t in range(11)])
    schedule.step()
    assert_raises(ArgumentError, "one more", schedule.step)
    three = optim.OneCycleLR(two_groups(), 1.0, epochs=2, steps_per_epoch=5, cycle_momentum=False, three_phase=True)
    assert three.get_last_lr()[0] == pytest.approx(1 / 25)
    for options in ({}, {"total_steps": 0}, {"total_steps": 5, "pct_start": 2.0}, {"total_steps": 5, "anneal_strategy": "cubic"}):
        with pytest.raises(ArgumentError):
            optim.OneCycleLR(optimizer, 1.0, **options)
    assert_raises(ArgumentError, "momentum", lambda: optim.OneCycleLR(two_groups(optim.Adagrad), 1.0, total_steps=5))

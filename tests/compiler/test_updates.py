"""Optimizers' steps inside of compiled steps: as statements, and as the call where anything has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import nn
from aiograd.optim.optimizer import Optimizer

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "decay": lambda p: ag.optim.SGD(p, 0.05, weight_decay=0.1, maximize=True),
    "nesterov": lambda p: ag.optim.SGD(p, 0.05, momentum=0.9, nesterov=True),
    "damped": lambda p: ag.optim.SGD(p, 0.05, momentum=0.9, dampening=0.3),
    "adam with decay": lambda p: ag.optim.Adam(p, 0.01, weight_decay=0.02, amsgrad=True, maximize=True),
    "sgd": lambda p: ag.optim.SGD(p, 0.05),
    "momentum": lambda p: ag.optim.SGD(p, 0.05, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: ag.optim.Adam(p, 0.01),
    "amsgrad": lambda p: ag.optim.Adam(p, 0.01, amsgrad=True),
    "adamw": lambda p: ag.optim.AdamW(p, 0.01),
    "groups": lambda p: ag.optim.SGD([{"params": p[:2]}, {"params": p[2:], "lr": 0.01}], 0.05),
}


class Case:
    def __init__(self, make: Callable[[Any], Any]) -> None:
        ag.seed(3)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        self.params = [*self.model.parameters()]
        self.optimizer = make(self.params)

    async def step(self, x: Any) -> Any:
        self.optimizer.zero_grad()
        loss = (self.model(x) ** 2).mean()
        await loss.backward()
        self.optimizer.step()
        return loss

    def state(self) -> list[Any]:
        found = [p.detach().numpy().tobytes() for p in self.params] + [p._vc for p in self.params]
        for p in self.params:
            for name, value in self.optimizer.state.get(p, {}).items():
                found.append((name, value.detach().numpy().tobytes() if isinstance(value, ag.Tensor) else value))
        return found


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls of `Optimizer.step`."""
    found: list[Any] = []
    before = Optimizer._collected

    def counted(optimizer: Any, gradients: Any) -> Any:
        found.append(optimizer)
        return before(optimizer, gradients)

    monkeypatch.setattr(Optimizer, "_collected", counted)
    return found


def inputs(count: int) -> list[Any]:
    numbers = np.random.default_rng(0)
    return [ag.asarray(numbers.standard_normal((5, 4)).astype(np.float32)) for _ in range(count)]


async def both(make: Callable[[Any], Any], disturb: dict[int, Callable[[Case], Any]], calls: list[Any]) -> list[int]:
    """Ten steps, eager and compiled, with the same bits, `disturb` carried out before some; returns which compiled ones called the optimizer."""
    results, called = [], []
    for compiled in (False, True):
        case, found = Case(make), []
        run: Any = ag.compile(case.step) if compiled else case.step
        for n, x in enumerate(inputs(10)):
            if n in disturb:
                disturb[n](case)
            calls.clear()
            await run(x)
            found.append(case.state())
            if compiled and calls:
                called.append(n)
        results.append(found)
        if compiled:
            assert run.statistics().breaks == 0, run.statistics()
            assert "def step():  #" in run.programs[-1].source and "optimizer" in run.programs[-1].source
    assert results[0] == results[1]
    return called


@pytest.mark.parametrize("name", OPTIMIZERS)
async def test_steps_are_statements(name: str, calls: list[Any]) -> None:
    assert await both(OPTIMIZERS[name], {}, calls) == [0]


@pytest.mark.parametrize("name", OPTIMIZERS)
async def test_options_are_read_at_every_run(name: str, calls: list[Any]) -> None:
    def change(case: Case) -> None:
        for group in case.optimizer.param_groups:
            group["lr"] *= 0.5
            if "betas" in group:
                group["betas"] = (0.8, 0.99)

    assert await both(OPTIMIZERS[name], {4: change, 7: change}, calls) == [0]


async def test_what_has_changed_is_left_to_the_optimizer(calls: list[Any]) -> None:
    def gets_momentum(case: Case) -> None:
        case.optimizer.param_groups[0]["momentum"] = 0.5

    def loses_momentum(case: Case) -> None:
        case.optimizer.param_groups[0]["momentum"] = 0.0

    assert await both(OPTIMIZERS["sgd"], {4: gets_momentum, 6: loses_momentum}, calls) == [0, 4, 5]

    def loses_decay(case: Case) -> None:
        case.optimizer.param_groups[0]["weight_decay"] = 0.0

    assert await both(lambda p: ag.optim.SGD(p, 0.05, weight_decay=0.1), {4: loses_decay}, calls) == [0, *range(4, 10)]

    def loads(case: Case) -> None:
        case.optimizer.load_state_dict(case.optimizer.state_dict())

    assert (await both(OPTIMIZERS["adam"], {4: loads}, calls))[:2] == [0, 4]

    def counts_on(case: Case) -> None:
        case.optimizer.state[case.params[1]]["step"] += 3

    assert await both(OPTIMIZERS["adam"], {4: counts_on}, calls) == [0, *range(4, 10)]

    def takes_one_away(case: Case) -> None:
        del case.optimizer.param_groups[0]["params"][1]

    assert await both(OPTIMIZERS["sgd"], {4: takes_one_away}, calls) == [0, *range(4, 10)]

    def adds_one(case: Case) -> None:
        case.optimizer.add_param_group({"params": [ag.tensor(np.ones(2, np.float32), requires_grad=True)]})

    assert await both(OPTIMIZERS["momentum"], {4: adds_one}, calls) == [0, *range(4, 10)]


async def test_a_step_that_fails_leaves_what_the_eager_one_leaves(calls: list[Any]) -> None:
    results = []
    for compiled in (False, True):
        case = Case(OPTIMIZERS["sgd"])
        run = ag.compile(case.step) if compiled else case.step
        xs = inputs(3)
        for x in xs:
            await run(x)
        case.params[2].register_hook(lambda grad: grad * np.float32(1e38))
        with pytest.raises(FloatingPointError), np.errstate(over="raise"):
            case.optimizer.param_groups[0]["lr"] = 1e30
            await run(xs[0])
        results.append(case.state())
    assert results[0] == results[1]

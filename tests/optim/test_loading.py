"""Saved states of optimizers, averages and schedules: what the next step could not use is refused, and nothing has changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import nn, optim
from aiograd.errors import ArgumentError

#: optimizers, with a slot of each that a state may lack where its option was switched on after the last step
KINDS: dict[str, tuple[Callable[[list[Any]], Any], dict[str, Any]]] = {
    "SGD": (lambda p: optim.SGD(p, 0.1, momentum=0.9), {"momentum_buffer": {"momentum": 0.0}}),
    "Adam": (lambda p: optim.Adam(p, 0.1, amsgrad=True), {"max_exp_avg_sq": {"amsgrad": False}}),
    "RMSprop": (
        lambda p: optim.RMSprop(p, 0.1, momentum=0.9, centered=True),
        {"momentum_buffer": {"momentum": 0.0}, "grad_avg": {"centered": False}},
    ),
    "Adagrad": (lambda p: optim.Adagrad(p, 0.1), {}),
    "Adadelta": (lambda p: optim.Adadelta(p, 0.1), {}),
    "NAdam": (lambda p: optim.NAdam(p, 0.1), {}),
    "RAdam": (lambda p: optim.RAdam(p, 0.1), {}),
}


def stepped(kind: str, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
    """A parameter and its optimizer, which has taken a step."""
    p = nn.Parameter(np.ones((2, 2)))
    optimizer = KINDS[kind][0]([p])
    optimizer.param_groups[0].update(options or {})
    p.grad = ag.tensor(np.full((2, 2), 0.5))
    optimizer.step()
    return p, optimizer


@pytest.mark.parametrize("kind", KINDS)
def test_each_part_of_a_state_is_needed_and_checked(kind: str) -> None:
    p, optimizer = stepped(kind)
    state = copy.deepcopy(optimizer.state_dict())
    entry, before = state["state"][0], optimizer.state_dict()["state"][0]
    for name, value in entry.items():
        wrong: list[Any] = ["x", [value], np.ones(3), np.full((2, 2), 1j)]
        wrong += [] if name in KINDS[kind][1] else [None]
        wrong += [3.0] if isinstance(value, ag.Tensor) else [-1.0, float("nan")]
        spoilt = [{**entry, name: each} for each in wrong]
        if name not in KINDS[kind][1]:
            spoilt.append({other: each for other, each in entry.items() if other != name})
        for each in spoilt:
            if not each:
                continue
            with pytest.raises(ArgumentError, match=rf"{kind}\.load_state_dict: .*{name}"):
                optimizer.load_state_dict({**state, "state": {0: each}})
    assert all(before[name] is each or before[name].tolist() == each.tolist() for name, each in optimizer.state[p].items())


@pytest.mark.parametrize(("kind", "slot"), [(kind, slot) for kind, (_, slots) in KINDS.items() for slot in slots])
@pytest.mark.parametrize("none", [False, True])
def test_an_option_that_was_switched_on_after_the_last_step(kind: str, slot: str, none: bool) -> None:
    """Its slot begins with zeros, as it would have without the save."""
    options = KINDS[kind][1][slot]
    p, optimizer = stepped(kind, options)
    assert slot not in optimizer.state.get(p, {})
    optimizer.param_groups[0].update({name: not value if isinstance(value, bool) else 0.9 for name, value in options.items()})
    q, other = stepped(kind)
    state = copy.deepcopy(optimizer.state_dict())
    if none:  # as PyTorch writes it
        state["state"].setdefault(0, {})[slot] = None
    other.load_state_dict(state)
    q._data[...] = p._data
    for each, each_optimizer in ((p, optimizer), (q, other)):
        each.grad = ag.tensor(np.full((2, 2), 0.25))
        each_optimizer.step()
    assert p.tolist() == q.tolist()


async def lbfgs() -> tuple[Any, Any, Callable[[], Any]]:
    p = nn.Parameter(np.array([1.0, 2.0]))
    optimizer = optim.LBFGS([p], max_iter=3)

    async def closure() -> Any:
        optimizer.zero_grad()
        loss = ((p - 3) ** 4).sum()
        await loss.backward()
        return loss

    await optimizer.step(closure)
    return p, optimizer, closure


LBFGS_STATES: dict[str, Any] = {
    "n_iter": ("x", -1, 1.5), "d": (None, 3.0, np.ones(3), [1.0]), "prev_flat_grad": (None, 2.0), "t": (None, "x"), "H_diag": (None, [1.0]),
    "old_dirs": ([], 3.0, [1.0]), "ro": ([], [None]), "old_stps": ([np.ones(3)],),
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in LBFGS_STATES.items() for value in values])
async def test_states_of_lbfgs(name: str, value: Any) -> None:
    p, optimizer, closure = await lbfgs()
    state = copy.deepcopy(optimizer.state_dict())
    assert state["state"][0]["old_dirs"], "it remembers steps"
    with pytest.raises(ArgumentError, match=rf"LBFGS\.load_state_dict: .*{name}"):
        optimizer.load_state_dict({**state, "state": {0: {**state["state"][0], name: value}}})
    options = {"max_eval": None, "tolerance_grad": "x", "tolerance_change": float("nan")}
    for option, wrong in options.items():
        with pytest.raises(ArgumentError, match=option):
            optimizer.load_state_dict({**state, "param_groups": [{**state["param_groups"][0], option: wrong}]})
    q, other, other_closure = await lbfgs()
    optimizer.load_state_dict(state)
    assert (await optimizer.step(closure)).item() == (await other.step(other_closure)).item() and p.tolist() == q.tolist()


@pytest.mark.parametrize("updates", [-1, "x", 1.5, None])
def test_states_of_averages(updates: Any) -> None:
    model = nn.Linear(2, 1)
    average = optim.ExponentialMovingAverage(model)
    average.update_parameters(model)
    before = average.module.weight.tolist()
    state = {name: each + 1.0 for name, each in average.state_dict()["module"].items()}
    with pytest.raises(ArgumentError, match="n_averaged is .*, expected a whole number"):
        average.load_state_dict({"module": state, "n_averaged": updates})
    assert average.module.weight.tolist() == before and average.n_averaged == 1


@pytest.mark.parametrize("kind", ["StepLR", "ReduceLROnPlateau"])
def test_states_of_schedules(kind: str) -> None:
    optimizer = optim.SGD([nn.Parameter(np.ones(2))], lr=1.0)
    schedule: Any = optim.StepLR(optimizer, 2) if kind == "StepLR" else optim.ReduceLROnPlateau(optimizer)
    state = schedule.state_dict()
    for name in state:
        wrong = [3.0, [None], ["x"], [1.0, 2.0]] if name == "base_lrs" else ["x", None, float("nan"), [1], *([] if name == "best" else [-1, 1.5])]
        for value in wrong:
            with pytest.raises(ArgumentError, match=rf"{kind}\.load_state_dict: .*{name}"):
                schedule.load_state_dict({**{other: 2.0 for other in state if other != "base_lrs"}, "base_lrs": [2.0], name: value})
    with pytest.raises(ArgumentError, match="load_state_dict: expected"):
        schedule.load_state_dict(3)
    assert schedule.state_dict() == state and optimizer.param_groups[0]["lr"] == 1.0

"""Models, losses and states for the tests of a trainer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import numpy as np

import aiograd as ag
from aiograd import nn, serving
from aiograd.engine.run import current_engine
from tests.support import bits


def network() -> Any:
    """A model with parameters, buffers and random draws, the same each time."""
    ag.seed(3)
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.25), nn.Linear(8, 1))


def examples(rows: int = 40) -> tuple[Any, Any]:
    """Rows and targets, the same each time."""
    x = np.random.default_rng(7).standard_normal((rows, 3)).astype(np.float32)
    return x, x.sum(axis=1, keepdims=True)


def squares(model: Any, x: Any, y: Any) -> Any:
    """The mean of squares."""
    return ((model(x) - y) ** 2).mean()


async def cancels_itself(model: Any, x: Any, y: Any) -> Any:
    """A loss that is cancelled, and not by the step."""
    squares(model, x, y)
    raise asyncio.CancelledError


def everything(trainer: serving.Trainer) -> Any:
    """All that a step changes: parameters, gradients, buffers, modes, the optimizer's state, versions and counts."""
    model, optimizer = trainer.server.model, trainer.optimizer
    state = {
        number: {name: value.tolist() if isinstance(value, ag.Tensor) else value for name, value in values.items()}
        for number, values in optimizer.state_dict()["state"].items()
    }
    return (
        bits(*model.state_dict().values()),
        bits(*[parameter.grad for parameter in model.parameters()]),
        [module.training for module in model.modules()],
        state,
        [(version.number, version.digest) for version in trainer.server.versions],
        trainer.server.current.number,
        trainer.steps,
    )


def phase_of(trainer: serving.Trainer) -> str:
    """"candidate" or "probation" while the gate of a trainer compares two versions, else "idle"."""
    comparison = trainer._comparison
    return "idle" if comparison is None else "probation" if comparison.is_probation else "candidate"


@contextlib.asynccontextmanager
async def learning(
    loss: Any = squares, model: Any = None, *, rows: int = 40, optimizer: Any = None, serve: Any = None, **options: Any
) -> AsyncIterator[serving.Trainer]:
    """A trainer that is not entered, with examples in its buffer, on a server of its own; no gate of passes is left behind."""
    model = network() if model is None else model
    async with serving.Server(model, **(serve or {})) as server:
        buffer = serving.ReplayBuffer(1000, seed=1)
        if rows:
            buffer.add(*examples(rows))
        made = ag.optim.AdamW(model.parameters(), lr=0.01) if optimizer is None else optimizer(model.parameters())
        yield serving.Trainer(server, made, loss, **{"buffer": buffer, "batch": 8, **options})
        assert current_engine().pass_gates == []


class Mover:
    """A loss under which SGD of rate 1 moves all parameters by `step`."""

    def __init__(self, step: float) -> None:
        self.step = step

    def __call__(self, model: Any, *columns: Any) -> Any:
        return sum(-(parameter * self.step).sum() for parameter in model.parameters())


def by_one(parameters: Any) -> Any:
    """The optimizer for a `Mover`."""
    return ag.optim.SGD(parameters, lr=1.0)

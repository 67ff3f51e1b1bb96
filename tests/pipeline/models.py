"""Models in stages, and the serial run of the same microbatches, to which pipelines are compared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

import aiograd as ag
from aiograd.pipeline import Action, Pipeline, Schedule

SIZE = 5


def mean_square(output: Any, target: Any) -> Any:
    return ((output - target) ** 2).mean()


def blocks(count: int, *, size: int = SIZE, dtype: Any = np.float32) -> list[Any]:
    """Modules of the same size, with the same parameters each time."""
    made = [ag.nn.Sequential(ag.nn.Linear(size, size), ag.nn.Tanh()) for _ in range(count)]
    rng = np.random.default_rng(7)
    for module in made:
        module.load_state_dict({name: rng.normal(size=value.shape).astype(dtype) * 0.6 for name, value in module.state_dict().items()})
        module.to(dtype=dtype)
    return made


def data(rows: int, *, size: int = SIZE, dtype: Any = np.float32, seed: int = 3) -> tuple[Any, Any]:
    """A batch and its target."""
    rng = np.random.default_rng(seed)
    return tuple(ag.tensor(rng.normal(size=(rows, size)).astype(dtype)) for _ in range(2))  # type: ignore[return-value]


def chunks(value: Any, count: int) -> list[Any]:
    """A Tensor in pieces along its first axis, as numpy cuts it."""
    ends = np.cumsum([len(part) for part in np.array_split(np.arange(value.shape[0]), count)])
    return [value[end - size : end] for end, size in zip(ends, np.diff(ends, prepend=0), strict=True)]


async def serial(stages: Sequence[Any], microbatches: int, x: Any, target: Any, loss_fn: Any = mean_square, scale: bool = True) -> list[float]:
    """Microbatches one after the other, without any pipeline; gradients go to ``grad``. Returns the losses."""
    losses = []
    for part, wanted in zip(chunks(x, microbatches), chunks(target, microbatches), strict=True):
        for stage in stages:
            part = stage(*part) if isinstance(part, tuple) else stage(part)
            part = await part if hasattr(part, "send") else part
        loss = loss_fn(part, wanted)
        await loss.backward(ag.tensor(np.full(loss.shape, 1 / microbatches if scale else 1, loss.dtype)))
        losses.append(loss.item())
    return losses


async def as_serial(
    alone: Sequence[Any], cut: Sequence[Any], order: Schedule, batch: Any, loss_fn: Any = mean_square, *, stages: Any = None, **options: Any
) -> Pipeline:
    """Fail unless a step of a pipeline has the losses and the gradients of the serial run; returns the pipeline.

    Args:
        alone, cut: the modules of the serial run, and of the pipeline.
        stages: of the pipeline, where they are not its modules.
        options: of the pipeline.
    """
    losses = await serial(alone, order.num_microbatches, *batch, loss_fn, options.get("scale_gradients", True))
    pipe = Pipeline(stages or cut, order, loss_fn=loss_fn, **options)
    assert values(await pipe.step(*batch)) == losses
    assert gradients(cut) == gradients(alone)
    return pipe


def gradients(modules: Iterable[Any]) -> list[Any]:
    """Bytes of the gradients of all parameters, None where there is none."""
    return [None if p.grad is None else (p.grad.dtype.str, p.grad.numpy().tobytes()) for module in modules for p in module.parameters()]


def values(losses: Iterable[Any]) -> list[float]:
    return [loss.item() for loss in losses]


def schedule(text: str) -> Schedule:
    """A schedule from its rows, which ``/`` separates."""
    return Schedule([[Action.parse(cell) for cell in row.split()] for row in text.split("/")])


ONE_FORWARD_ONE_BACKWARD = schedule("0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3 / 1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3")
ZERO_BUBBLE = schedule("0F0 0F1 0I0 0W0 0F2 0I1 0W1 0F3 0I2 0W2 0I3 0W3 / 1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1F3 1I3 1W2 1W3")
#: weights last, and in another order than the microbatches
LATE_WEIGHTS = schedule("0F0 0F1 0F2 0I0 0I1 0I2 0W2 0W0 0W1 / 1F0 1I0 1F1 1I1 1F2 1I2 1W1 1W2 1W0")
#: the second rank holds the turn: stages 1 and 2
TURN = schedule("0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1 / 1F0 2F0 1F1 2F1 2I0 1I0 2W0 1W0 2B1 1B1")

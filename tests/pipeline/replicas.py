"""Pipelines in replicas, for tests: stages on workers, and what one process computes from the same microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import aiograd as ag
from aiograd import distributed as dist
from aiograd.pipeline import StepRandom
from tests.pipeline.models import chunks, mean_square
from tests.pipeline.remote import Block, Last


async def place_replicas(driver: dist.Worker, names: Sequence[Sequence[str]], kind: Any = Block, last: Any = Last, **options: Any) -> list[list[Any]]:
    """A replica for each list of workers, with a stage on each."""
    return [
        [
            await driver.remote_module(name, last if index == len(replica) - 1 else kind, index, **options)
            for index, name in enumerate(replica)
        ]
        for replica in names
    ]


async def serial_replicas(
    stages: Sequence[Any],
    microbatches: Sequence[int],
    x: Any,
    target: Any,
    *,
    random: StepRandom | None = None,
    parts: Sequence[tuple[Any, Any]] | None = None,
    restore: Any = None,
) -> list[float]:
    """A step of several replicas in one process: the gradient of each, microbatch by microbatch, and the sum of these in order, which is added to
    ``grad``. Returns the losses.

    Args:
        stages: the model; the last gives outputs.
        microbatches: of each replica.
        x, target: the batch.
        random: of the step.
        parts: the microbatches, where they are not made by splitting the batch.
        restore: called before each replica but the first, as they begin with the same buffers.
    """
    parameters = [parameter for stage in stages for parameter in stage.parameters()]
    count = sum(microbatches)
    parts = parts or list(zip(chunks(x, count), chunks(target, count), strict=True))
    rows = sum(part.shape[0] for part, _ in parts)
    before, total, losses = [parameter.grad for parameter in parameters], [None] * len(parameters), []
    first = 0
    for replica, size in enumerate(microbatches):
        mine = parts[first : first + size]
        seed = sum(part.shape[0] for part, _ in mine) / rows / size
        for parameter in parameters:
            parameter.grad = None
        if replica and restore is not None:
            restore()
        for number, (part, wanted) in enumerate(mine, start=first):
            for index, stage in enumerate(stages):
                if random is None:
                    part = stage(part)
                else:
                    with random.at(index, number):
                        part = stage(part)
            loss = mean_square(part, wanted)
            await loss.backward(ag.tensor(np.full(loss.shape, seed, loss.dtype)))
            losses.append(loss.item())
        total = [_sum(so_far, parameter.grad) for so_far, parameter in zip(total, parameters, strict=True)]
        first += size
    for parameter, have, grad in zip(parameters, before, total, strict=True):
        parameter.grad = _sum(have, grad)
    return losses


def _sum(have: Any, grad: Any) -> Any:
    return grad if have is None else have if grad is None else have + grad


def bits_of(modules: Sequence[Any]) -> list[bytes]:
    """The bits of parameters and buffers."""
    return [value.detach().numpy().tobytes() for module in modules for value in module.state_dict().values()]

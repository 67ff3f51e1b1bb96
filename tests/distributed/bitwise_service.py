"""The service of the worker processes of `test_bitwise`; imported there by name."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import aiograd as ag
import aiograd.distributed as dist
from tests.distributed.passes_kit import Here, Stage
from tests.distributed.workers import context_here

#: numbers that a process has drawn before it does anything of use
_naps = Random(0)


async def weigh(here: Here, x: Any) -> Any:
    if getattr(here.call, "__func__", None) is not Stage.local:
        await asyncio.sleep(_naps.uniform(0, 0.003))  # functions do not run in the order in which they were called
    return x * here.weight


def make() -> Stage:
    made = Stage(("driver", "b", "c", "d"), seed=11)
    made.functions["weigh"] = weigh
    return made


stage = make()
service = stage.service()


@service.function
async def advance(count: int) -> None:
    """Record many nodes, as a process does that has been busy."""
    y = ag.tensor([1.0], requires_grad=True) * 1
    for _ in range(count):
        y = y + 1


@service.function
async def gradient() -> Any:
    """The context's gradient of this worker's weight."""
    ctx, worker = context_here(), dist.current_worker()
    weight = stage.weights[worker.name]
    return ctx.grads[weight] if weight in ctx.grads else None

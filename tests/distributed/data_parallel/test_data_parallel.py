"""Replicas in one process: the bits of a serial run, and the state of all of them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import distributed as dist
from aiograd.errors import ArgumentError, ArgumentTypeError, EngineClosedError, ModeError, RemoteError
from tests.distributed.data_parallel.models import BatchNet, Net, PartlyUsed, batches, bits, module_of, numbers, replicas_behind, serial, service
from tests.distributed.workers import workers

NAMES = ("w0", "w1", "w2")
SGD = {"optimizer": ag.optim.SGD, "optimizer_options": {"lr": 0.1, "momentum": 0.9}}


@contextlib.asynccontextmanager
async def replicated(module: Any, *args: Any, names: tuple[str, ...] = NAMES, **options: Any) -> AsyncIterator[tuple[dist.DataParallel, list[dist.Worker]]]:
    """Replicas on workers of this process."""
    async with workers("driver", *names, service=service) as opened:
        options = {**SGD, **options}
        async with await dist.DataParallel.create(opened[0], names, module, *args, **options) as replicas:
            yield replicas, list(opened)


def all_bits(replicas: dist.DataParallel, opened: list[dist.Worker]) -> list[dict[str, bytes]]:
    hosts = replicas_behind(replicas, opened)
    assert all(parameter.grad is None for host in hosts for parameter in module_of(host).parameters())
    return [bits(module_of(host).state_dict()) for host in hosts]


OPTIMIZERS = [
    (ag.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (ag.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    (ag.optim.RMSprop, {"lr": 0.01}),
]


@pytest.mark.parametrize(("optimizer", "options"), OPTIMIZERS)
@pytest.mark.parametrize("count", [1, 2, 3])
async def test_steps_have_the_bits_of_one_process(count: int, optimizer: Any, options: dict[str, Any]) -> None:
    given = batches(4, (4,) * count)
    async with replicated(Net, names=NAMES[:count], optimizer=optimizer, optimizer_options=options) as (replicas, opened):
        losses = [numbers(await replicas.step(shards)) for shards in given]
        found = all_bits(replicas, opened)
    alone = Net()
    assert losses == await serial(alone, optimizer(alone.parameters(), **options), given)
    assert found == [bits(alone.state_dict())] * count

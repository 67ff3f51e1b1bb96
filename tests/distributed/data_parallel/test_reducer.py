"""Gradients that are combined over a group while backward runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import distributed as dist
from aiograd.distributed.data_parallel.reducer import GradientReducer
from tests.distributed.groups import everywhere, groups

NAMES = ("w0", "w1", "w2")


def net(seed: int = 0) -> Any:
    ag.seed(seed)
    return ag.nn.Sequential(ag.nn.Linear(5, 7), ag.nn.Tanh(), ag.nn.Linear(7, 3))


def shard(rank: int) -> Any:
    return ag.tensor(np.random.default_rng(rank).standard_normal((4, 5)).astype(np.float32))


async def alone(count: int, **options: Any) -> list[Any]:
    """The mean of the gradients of all shards, added up in the order of the ranks."""
    total: list[Any] = []
    for rank in range(count):
        model = net(**options)
        await model(shard(rank)).square().mean().backward()
        grads = [p.grad.numpy() for p in model.parameters()]
        total = grads if not total else [a + b for a, b in zip(total, grads, strict=True)]
    return [each / np.float32(count) for each in total]


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("bucket_bytes", [1, 100, 1 << 20])
async def test_gradients_are_the_mean_in_the_order_of_the_ranks(count: int, bucket_bytes: int) -> None:
    expected = await alone(count)
    async with groups(*NAMES[:count]) as (_, joined):

        async def step(group: dist.Group) -> list[Any]:
            model = net()
            GradientReducer(group, model.parameters(), bucket_bytes=bucket_bytes).attach()
            await model(shard(group.rank)).square().mean().backward()
            return [p.grad.numpy().tobytes() for p in model.parameters()]

        for found in await everywhere(joined, step):
            assert found == [each.tobytes() for each in expected]

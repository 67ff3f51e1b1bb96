"""A training that runs on any cluster, and goes on from a checkpoint."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

import aiograd as ag
import aiograd.distributed as dist
from aiograd.errors import DistributedError

SERVICE = "tests.ray.service:service"


async def train(cluster: dist.Cluster, steps: int, trouble: Callable[[int], Awaitable[Any]] | None = None) -> tuple[list[float], list[bytes]]:
    """Losses and final weights of a chain of one block per worker.

    The driver keeps the state after each step. A step that fails is taken again from there, when all workers are back.

    Args:
        trouble: awaited before each step, given its number.
    """
    driver = cluster.driver
    random = np.random.default_rng(0)
    x, target = (ag.asarray(random.standard_normal((16, 8)).astype(np.float32)) for _ in range(2))
    losses: list[float] = []
    states: list[dict[str, Any]] = []

    async def prepare() -> tuple[list[Any], Any]:
        blocks = [await driver.remote_module(name, "Block", seed) for seed, name in enumerate(cluster.workers)]
        for block, state in zip(blocks, states, strict=False):
            await block.load_state_dict(state)
        return blocks, dist.DistributedOptimizer(driver, "SGD", blocks, lr=0.1)

    async def step(blocks: list[Any], optimizer: Any) -> float:
        async with driver.context() as ctx:
            y: Any = x
            for block in blocks:
                y = await block(y)
            loss = ((y - target) ** 2).mean()
            await ctx.backward(loss)
            await optimizer.step(ctx)
        states[:] = [await block.state_dict() for block in blocks]
        return float(loss.item())

    blocks, optimizer = await prepare()
    while len(losses) < steps:
        if trouble is not None:
            await trouble(len(losses))
        try:
            losses.append(await step(blocks, optimizer))
        except DistributedError:
            for name in cluster.workers:
                await cluster.wait_running(name)
            blocks, optimizer = await prepare()
    return losses, [value.numpy().tobytes() for state in states for value in state.values()]

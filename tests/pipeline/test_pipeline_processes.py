"""Pipelines over real worker processes, and HTTP between them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aiograd.distributed import LocalCluster
from aiograd.pipeline import Pipeline, make_schedule
from tests.pipeline.models import blocks, data, mean_square, serial, values
from tests.pipeline.remote import place

pytestmark = pytest.mark.proc

SERVICE = "tests.pipeline.remote:service"


async def expected(count: int, microbatches: int, x: Any, target: Any) -> tuple[list[float], list[bytes]]:
    alone = blocks(count)
    losses = await serial(alone, microbatches, x, target)
    return losses, [b"".join(p.grad.numpy().tobytes() for p in module.parameters()) for module in alone]


async def test_processes_give_the_same_bits_and_one_may_be_killed() -> None:
    x, target = data(12)
    losses, bits = await expected(3, 6, x, target)
    async with LocalCluster(3, service=SERVICE) as cluster:
        first, second, spare = cluster.workers
        killed = asyncio.Event()
        for name in ("GPipe", "1F1B", "ZB-H1"):
            modules = await place(cluster.driver, [first, second, None])
            async with Pipeline(modules, make_schedule(name, 3, 6), loss_fn=mean_square) as pipe:
                assert values(await pipe.step(x, target)) == losses
            assert [await module.ref.call("gradient") for module in modules[:2]] == bits[:2]
            assert b"".join(p.grad.numpy().tobytes() for p in modules[2].parameters()) == bits[2]

        async def respawn(stage: int) -> Any:
            killed.set()
            return (await place(cluster.driver, [None] * stage + [spare]))[stage]

        modules = await place(cluster.driver, [first, second, None])
        seen = 0

        def last(y: Any) -> Any:
            nonlocal seen
            seen += 1
            if seen == 3:
                loop.call_soon_threadsafe(kill)
            return modules[2](y)

        def kill() -> None:
            nonlocal killing
            killing = asyncio.ensure_future(modules[1].ref.call("end"))

        loop = asyncio.get_running_loop()
        killing: asyncio.Future[Any] | None = None
        async with Pipeline([*modules[:2], last], make_schedule("1F1B", 3, 6), loss_fn=mean_square, respawn=respawn) as pipe:
            assert values(await pipe.step(x, target)) == losses
            if killing is not None:
                await asyncio.wait([killing])
                killing.exception()
            assert killed.is_set() and pipe.stages[1].peer == spare
            assert [await module.ref.call("gradient") for module in pipe.stages[:2]] == bits[:2]

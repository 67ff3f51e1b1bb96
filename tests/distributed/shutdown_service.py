"""The service of the worker processes of `test_shutdown`: work that does not end by itself, forward and backward."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import aiograd as ag
import aiograd.distributed as dist

service = dist.Service()
reached: list[str] = []


class OnLoop(ag.Function):
    """Its rule waits for ever."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 2

    @staticmethod
    async def backward(ctx: Any, g: Any) -> Any:
        reached.append("rule")
        await asyncio.Event().wait()


class OnThread(ag.Function):
    """Its rule never returns from its thread."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        reached.append("rule")
        time.sleep(1000)


@service.function
async def on_loop(x: ag.Tensor) -> ag.Tensor:
    return OnLoop.apply(x)


@service.function
async def on_thread(x: ag.Tensor) -> ag.Tensor:
    return OnThread.apply(x)


@service.function
def never_returns(x: ag.Tensor) -> ag.Tensor:
    reached.append("function")
    time.sleep(1000)
    return x


@service.function
async def exits() -> None:
    raise SystemExit(7)


@service.function
async def has_begun() -> bool:
    return bool(reached)

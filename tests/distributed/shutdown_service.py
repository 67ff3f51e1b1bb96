"""The service of the worker processes of `test_shutdown`: work that does not end by itself, forward and backward."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import aiograd as ag
import aiograd.distributed as dist
from tests.support import custom_function

service = dist.Service()
reached: list[str] = []


@custom_function()
async def OnLoop(ctx: Any, g: Any) -> Any:
    """Wait for ever."""
    reached.append("rule")
    await asyncio.Event().wait()


@custom_function()
def OnThread(ctx: Any, g: Any) -> Any:
    """Never return from the thread."""
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

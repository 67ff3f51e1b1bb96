"""The service of the worker processes of `test_cluster`; imported there by name."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import time
from typing import Any

import aiograd.distributed as dist

service = dist.Service()


@service.function
def double(x: Any) -> Any:
    return x * 2.0


@service.function
async def double_at(peer: str, x: Any) -> Any:
    """As `double`, computed by another worker."""
    return await dist.current_worker().call(peer, "double", x)


@service.function
async def process() -> int:
    return os.getpid()


@service.function
async def variable(name: str) -> str | None:
    return os.environ.get(name)


@service.function
async def limit_on_contexts() -> int:
    return dist.current_worker().limits.contexts


@service.function
async def complain(text: str) -> None:
    print(text)
    print(text, file=sys.stderr)


@service.function
async def wait_forever() -> None:
    print("begun", flush=True)
    await asyncio.Event().wait()


@service.function
def sleep_in_a_thread(seconds: float) -> None:
    print("begun", flush=True)
    time.sleep(seconds)


@service.function
async def hold_the_loop_up(seconds: float) -> None:
    print("begun", flush=True)
    time.sleep(seconds)  # noqa: ASYNC251 - that is the point


@service.function
def boom(key: str) -> None:
    raise KeyError(key)


@service.function
async def encodings() -> list[str]:
    core = dist.current_worker()._core
    return [core.encoding.name, core.gradient_encoding.name]


@service.function
async def collector_thresholds() -> list[int]:
    return list(gc.get_threshold())


@service.reference
class Counter:
    def __init__(self) -> None:
        self.count = 0

    def add(self, n: int) -> int:
        self.count += n
        return self.count


class NoService:
    pass


no_service: Any = NoService()

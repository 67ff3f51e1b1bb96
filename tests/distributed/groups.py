"""Groups of workers for tests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from aiograd import distributed as dist
from tests.distributed.workers import workers


@contextlib.asynccontextmanager
async def groups(*names: str, **options: Any) -> AsyncIterator[tuple[list[dist.Worker], list[dist.Group]]]:
    """A group of workers, closed on all of them at the end."""
    async with workers(*names, **options) as opened:
        joined = await asyncio.gather(*(dist.join_group(worker, names) for worker in opened))
        yield list(opened), list(joined)
        await asyncio.gather(*(group.aclose() for group in joined))


async def everywhere(joined: list[dist.Group], operation: Callable[[dist.Group], Coroutine[Any, Any, Any]]) -> list[Any]:
    """The results, or errors, of an operation that all members carry out."""
    return await asyncio.gather(*map(operation, joined), return_exceptions=True)

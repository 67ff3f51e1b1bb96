"""progress: a bar for an asynchronous loop, on the standard error stream."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterable, AsyncIterator
from typing import Any, TextIO, TypeVar

T = TypeVar("T")

_WIDTH = 24


async def progress(
    batches: AsyncIterable[T], description: str = "", *, total: int | None = None, file: TextIO | None = None, every: float = 0.1
) -> AsyncIterator[T]:
    """The batches, with a bar that shows how many have been taken: ``async for batch in ag.data.progress(loader, "epoch 1")``.

    Args:
        batches: a `DataLoader` or another asynchronous iterable.
        description: text before the bar.
        total: how many there will be; None: their ``len()``, if they have one.
        file: the stream to write to; None: standard error, and nothing is written where that is no terminal.
        every: seconds between two drawings.
    """
    stream = sys.stderr if file is None else file
    shows = file is not None or stream.isatty()
    if total is None:
        try:
            total = len(batches)  # type: ignore[arg-type]
        except TypeError:
            total = None
    clock = asyncio.get_running_loop().time
    started = drawn = clock()
    count = 0
    iterator: Any = aiter(batches)
    try:
        async for batch in iterator:
            yield batch
            count += 1
            now = clock()
            if shows and now - drawn >= every:
                drawn = now
                stream.write("\r" + _line(description, count, total, now - started))
                stream.flush()
    finally:
        if hasattr(iterator, "aclose"):
            await iterator.aclose()
        if shows:
            stream.write("\r" + _line(description, count, total, clock() - started) + "\n")
            stream.flush()


def _line(description: str, count: int, total: int | None, seconds: float) -> str:
    rate = f"{count / seconds:.1f}/s" if seconds > 0 else ""
    start = f"{description} " if description else ""
    if not total:
        return f"{start}{count} {rate}".rstrip()
    full = min(_WIDTH * count // total, _WIDTH)
    return f"{start}[{'#' * full}{'.' * (_WIDTH - full)}] {count}/{total} {rate}".rstrip()

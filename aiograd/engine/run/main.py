"""``aiograd.run``: a coroutine from beginning to end on a loop of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from aiograd.engine.run.engine import aclose_default_engine

try:
    import uvloop
except ImportError:  # it does not exist for every platform
    uvloop = None  # type: ignore[assignment]


def run(main: Coroutine[Any, Any, Any], *, debug: bool | None = None) -> Any:
    """Run a coroutine to its end on a fresh event loop, uvloop's where it is installed, and close the default engine.

    Args:
        main: the coroutine.
        debug: asyncio's debug mode.
    """
    with asyncio.Runner(debug=debug, loop_factory=_loop_factory()) as runner:
        return runner.run(_main(main))


async def _main(main: Coroutine[Any, Any, Any]) -> Any:
    try:
        return await main
    finally:
        await aclose_default_engine()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    return None if uvloop is None else uvloop.new_event_loop

"""``aiograd.run``: a coroutine from beginning to end on a loop of its own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any

from aiograd.engine.run.allocator import tune_malloc as tune_process_malloc
from aiograd.engine.run.current import aclose_default_engine
from aiograd.engine.run.loop import loop_is_running
from aiograd.engine.run.tuned_gc import tuned_gc
from aiograd.errors import ArgumentTypeError, LoopError


def run(main: Coroutine[Any, Any, Any], *, debug: bool | None = None, tune_gc: bool = True, tune_malloc: bool = True) -> Any:
    """Run a coroutine to its end on a fresh event loop, uvloop's where it is installed, and close the default engine.

    Args:
        main: the coroutine.
        debug: asyncio's debug mode.
        tune_gc: keep pauses of Python's garbage collector short while the coroutine runs, see `tuned_gc`; False leaves it as it is.
        tune_malloc: let the process keep memory that it has freed, see `aiograd.tune_malloc`; False leaves the allocator as it is.

    Returns:
        The result of the coroutine.

    Raises:
        ArgumentTypeError: `main` is no coroutine. LoopError: a loop is running already, as in a notebook; `main` has been closed.
    """
    if not asyncio.iscoroutine(main):
        raise ArgumentTypeError(f"ag.run: expected a coroutine, as in ag.run(main()), found {type(main).__name__}")
    if loop_is_running():
        name = getattr(main, "__qualname__", "main")[:].rpartition(".")[2]
        main.close()
        raise LoopError(f"ag.run({name}()) inside a running event loop, such as a notebook's: use `await {name}()`")
    if tune_malloc:
        tune_process_malloc()
    with asyncio.Runner(debug=debug, loop_factory=uvloop_factory()) as runner:
        return runner.run(_main(main, tune_gc))


async def _main(main: Coroutine[Any, Any, Any], tune_gc: bool) -> Any:
    async with tuned_gc() if tune_gc else contextlib.nullcontext():
        try:
            return await main
        finally:
            await aclose_default_engine()


def uvloop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """The function that makes a loop of uvloop; None where it is not installed."""
    try:
        import uvloop  # a program that runs on another loop does without it
    except ImportError:  # it does not exist for every platform
        return None
    return uvloop.new_event_loop

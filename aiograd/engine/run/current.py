"""The engine of the running code: of the block around it, or the default one of its loop."""

from __future__ import annotations

import asyncio

from aiograd.engine.loop_budget import LoopBudget
from aiograd.engine.run.engine import DEFAULT_ENGINES, ENGINES, ENGINES_LOCK, ENTERED_ENGINE, Engine
from aiograd.engine.run.loop import not_none


def passes_in_flight() -> int:
    """Passes that run or wait for their turn, on all engines of the process."""
    with ENGINES_LOCK:
        return sum(len(engine._runners) for engine in ENGINES)


def current_engine() -> Engine:
    """The engine of the innermost ``async with Engine()`` of this task on this loop, else the loop's default one.

    Returns:
        The engine. It is made where the loop has none.
    """
    loop = asyncio.get_running_loop()
    engine = ENTERED_ENGINE.get()
    if engine is not None and engine._loop is not None and engine._loop() is loop and not engine._closed:
        return engine
    engine = DEFAULT_ENGINES.get(loop)
    if engine is None or engine._closed:
        engine = DEFAULT_ENGINES[loop] = Engine()
    return engine


def turns_of(engine: Engine) -> LoopBudget:
    """The turns of an engine's loop, for what computes on it beside passes."""
    engine._bind(asyncio.get_running_loop())
    turns: LoopBudget = not_none(engine._loop_budget)
    return turns


async def aclose_default_engine() -> None:
    """Close the running loop's default engine, if it has one; the next pass makes another.

    Cancelling it stops the waiting; the engine is closed all the same.

    >>> x = ag.tensor([1.0, 2.0], requires_grad=True)
    >>> await (x * x).sum().backward()
    >>> await ag.aclose_default_engine()
    """
    engine = DEFAULT_ENGINES.pop(asyncio.get_running_loop(), None)
    if engine is not None:
        await engine.aclose()

"""Run a coroutine to its end on a simulated loop, and say how the run went.

The counterpart of ``asyncio.run`` for tests: a fresh `SimulatedLoop` per call, so a thousand seeds are a thousand independent runs. An
error leaves with a note for seeing it again: seed, order, Python version, step and trace hash.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from aiograd.errors import ArgumentTypeError
from aiograd.running.caller import type_found
from aiograd.testing.clock import ExecutorKind, Order, SimulatedLoop
from aiograd.testing.jobs import JobRunner
from aiograd.testing.suspension import describe_task

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Simulation(Generic[T]):
    """The result of a simulated run.

    Attributes:
        value: the result of the coroutine.
        time: virtual seconds it took.
        steps: steps of the loop it took, the points between which anything can happen.
        trace_hash: equal for equal runs, see `SimulatedLoop.trace_hash`.
        leftover_tasks: tasks that the coroutine left behind, one line each; they were cancelled.

    >>> simulation = ag.testing.simulated_run(lambda: asyncio.sleep(3600, result="done"), seed=1)
    >>> simulation.value, simulation.time, simulation.leftover_tasks
    ('done', 3600.0, ())
    """

    value: T
    time: float
    steps: int
    trace_hash: str
    leftover_tasks: tuple[str, ...]


def simulated_run(
    main: Callable[..., Coroutine[Any, Any, T]],
    *args: Any,
    seed: int | str | None = None,
    order: Order = "fifo",
    executor: ExecutorKind | Callable[[SimulatedLoop], JobRunner] = "inline",
    cancel_at: int | None = None,
) -> Simulation[T]:
    """Run ``main(*args)`` on a fresh `SimulatedLoop`. Call it where no loop runs.

    Args:
        main: a coroutine function.
        args: its arguments.
        seed: as for `SimulatedLoop`, like `order` and `executor`.
        cancel_at: cancel `main` right before this step of the loop, counted from 1. To cancel at every point where a program can be
            cancelled, run it once, then once for each number up to `Simulation.steps`.
        order: in which order the loop runs handles that are ready.
        executor: the runner of the engine's jobs.

    Returns:
        The value with the figures of the run.

    Raises:
        ArgumentTypeError: `main` is no coroutine function, for instance a coroutine.
        DeadlockError: tasks wait for something that can no longer happen.
        Exception: the error of `main`, with a note on how to repeat the run.
    """
    if not callable(main):
        found = type_found(main)
        if isinstance(main, Coroutine):
            main.close()
            found = f"the coroutine {getattr(main, '__qualname__', '')}, made by a call: pass the function, and its arguments after it"
        raise ArgumentTypeError(f"simulated_run: expected a coroutine function, found {found}")
    loop = SimulatedLoop(seed, order=order, executor=executor)

    try:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner_loop, coroutine = runner.get_loop(), main(*args)
            if not asyncio.iscoroutine(coroutine):
                raise ArgumentTypeError(f"simulated_run: {main!r:.100} returned {type_found(coroutine)}; expected a coroutine function")
            task = runner_loop.create_task(coroutine, name="main")
            if cancel_at is not None:
                loop.at_step(cancel_at, task.cancel)
            value = loop.run_until_complete(task)
            left = tuple(sorted(map(describe_task, asyncio.all_tasks(loop))))
            return Simulation(value, loop.time(), loop.steps, loop.trace_hash, left)
    except BaseException as error:
        version = ".".join(map(str, sys.version_info[:2]))
        error.add_note(
            f"simulated_run(seed={seed!r}, order={order!r}, cancel_at={cancel_at!r}) on Python {version}: ended at virtual time {loop.time():g} s "
            f"after {loop.steps} steps, trace hash {loop.trace_hash}"
        )
        raise

"""profile and scope: the context managers."""

from __future__ import annotations

import os
import statistics
import time
from types import TracebackType
from typing import Any, Self

from aiograd.engine.run import running_loop
from aiograd.errors import ArgumentError, ArgumentTypeError, LoopError
from aiograd.profiler.chrome_trace import Origin, build_trace
from aiograd.profiler.event import Event
from aiograd.profiler.recorder import Recorder
from aiograd.profiler.table import SortKey, records_of, render
from aiograd.running.caller import type_found
from aiograd.running.chrome_trace import PathLike, write_trace
from aiograd.running.modes import ModeScope, current_mode


class scope:
    """Name what runs inside: ``with scope("attention"):``, also ``async with``. Does nothing where no profile is on.

    Args:
        name: the name in the table and the trace.

    Raises:
        ArgumentTypeError: `name` is no str.

    >>> x = ag.tensor([1.0, 2.0], requires_grad=True)
    >>> with ag.profiler.profile() as profile:
    ...     with ag.profiler.scope("layer"):
    ...         y = x * x
    >>> sorted(event.name for event in profile.events)
    ['layer', 'mul']
    """

    __slots__ = ("_name", "_recorder", "_began")

    def __init__(self, name: str) -> None:
        if not isinstance(name, str):
            raise ArgumentTypeError(f"profiler.scope(): expected a name, a str, found {type_found(name)}")
        self._name = name
        self._recorder: Recorder | None = None
        self._began = 0

    def __enter__(self) -> Self:
        self._recorder = current_mode().profiler
        self._began = time.perf_counter_ns()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._recorder is not None:
            self._recorder.add(self._name, "scope", self._name, self._began, time.perf_counter_ns())

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.__exit__(kind, error, trace)


class _BoundScope(scope):
    """A scope of one profile, whichever is on."""

    __slots__ = ("_bound",)

    def __init__(self, recorder: Recorder, name: str) -> None:
        super().__init__(name)
        self._bound = recorder

    def __enter__(self) -> Self:
        super().__enter__()
        self._recorder = self._bound
        return self


class profile(ModeScope):
    """Record what runs inside, in this asyncio task and in those it starts (which go on recording when the block is left).

    Use it with ``with`` or ``async with``, more than once if you like; of nested profiles the inner one records.

    Args:
        shapes: note the shapes of outputs.
        memory: note the bytes of outputs.
        loop_lag: seconds between two samples of how late the running event loop is; None takes none.

    Raises:
        ArgumentError: `loop_lag` is not above 0. LoopError: on entering, where lag is to be sampled and no event loop is running.

    >>> x = ag.tensor([1.0, 2.0], requires_grad=True)
    >>> with ag.profiler.profile() as profile:
    ...     y = x * x
    >>> [event.name for event in profile.events]
    ['mul']
    """

    def __init__(self, *, shapes: bool = False, memory: bool = False, loop_lag: float | None = None) -> None:
        if loop_lag is not None and not loop_lag > 0:
            raise ArgumentError(f"profile(loop_lag={loop_lag}): expected a number of seconds above 0, or None")
        self._recorder = Recorder(shapes=shapes, memory=memory)
        self._origin = Origin(time.perf_counter_ns(), time.time_ns())
        self._loop_lag = loop_lag
        self._samplers: list[_LagSampler] = []
        super().__init__(profiler=self._recorder)

    def __enter__(self) -> Self:
        if self._loop_lag is not None:
            self._samplers.append(_LagSampler(self._recorder, self._loop_lag))
        return super().__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        super().__exit__(kind, error, trace)
        if self._samplers:
            self._samplers.pop().stop()

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.__exit__(kind, error, trace)

    def scope(self, name: str) -> scope:
        """A named scope that this profile records.

        Args:
            name: the name in tables and traces.

        Returns:
            A context manager.
        """
        return _BoundScope(self._recorder, name)

    @property
    def recorder(self) -> Recorder:
        """The recorder of the events; give it to a worker (``worker.profiler = p.recorder``) to record the work it does for other workers."""
        return self._recorder

    @property
    def events(self) -> tuple[Event, ...]:
        """The events recorded so far, in order of start."""
        return tuple(sorted(list(self._recorder.events), key=lambda event: (event.start, -event.duration)))

    def table(self, *, sort_by: SortKey = "self", limit: int | None = 30) -> str:
        """The time by operation, as text.

        ``self`` is without what ran inside; waiting for other threads counts as the pass's own. ``share`` is the share of ``self`` in the whole.

        Args:
            sort_by: ``name``, ``calls``, ``self``, ``total``, ``forward``, ``backward``, ``mean`` or ``memory``.
            limit: how many rows; None for all.

        Returns:
            The text, one line for each operation.

        Raises:
            ArgumentError: no such order.
        """
        events = self.events
        text = render(records_of(events), sort_by=sort_by, limit=limit)
        lags = sorted(event.duration for event in events if event.category == "lag")
        if lags:
            median, high, most = (lag / 1e6 for lag in (statistics.median(lags), lags[min(len(lags) - 1, int(len(lags) * 0.99))], lags[-1]))
            text += f"\nloop lag: median {median:.2f} ms, p99 {high:.2f} ms, max {most:.2f} ms, {len(lags)} samples"
        return text

    def chrome_trace(self, path: PathLike | None = None, *, process_name: str | None = None, clock_offset: float = 0.0) -> dict[str, Any]:
        """The events as a Chrome trace, for Perfetto or ``chrome://tracing``.

        Forward and backward of one operation are joined by an arrow; threads and tasks have rows of their own.

        Args:
            path: where to write it as JSON; None: nowhere.
            process_name: the name of this process, for a trace of several processes.
            clock_offset: seconds to add to this machine's clock to get the common one.

        Returns:
            The trace: a dict as JSON has it.
        """
        trace = build_trace(
            self.events, self._origin, pid=os.getpid(), process_name=process_name or f"process {os.getpid()}", clock_offset=clock_offset
        )
        if path is not None:
            write_trace(trace, path)
        return trace


class _LagSampler:
    """Notes again and again how late a loop calls back. Started on the running loop; holds it no longer than it is stopped."""

    def __init__(self, recorder: Recorder, interval: float) -> None:
        loop = running_loop()
        if loop is None:
            raise LoopError("profile(loop_lag=...) outside of an event loop: there is no loop whose lag could be sampled. Enter it in a coroutine.")
        self._loop: Any = loop
        self._recorder = recorder
        self._interval = interval
        self._due = 0
        self._handle: Any = None
        self._next()

    def _next(self) -> None:
        self._due = time.perf_counter_ns() + int(self._interval * 1e9)  # the clock of some loops stands still while they are busy
        self._handle = self._loop.call_later(self._interval, self._sample)

    def _sample(self) -> None:
        now = time.perf_counter_ns()
        self._recorder.add("loop lag", "lag", "(loop lag)", min(now, self._due), now)
        self._next()

    def stop(self) -> None:
        """Take no more samples."""
        self._handle.cancel()
        self._loop = None

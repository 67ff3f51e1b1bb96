"""Sampling: the part of the work that is recorded while a dashboard watches, so that watching stays cheap.

Note [Windows]
    Recording everything would slow a fast training loop down: each recorded operation costs some microseconds, and a pass that is recorded cannot
    take the engine's short ways. Recording a pass here and there would show no loop at all. So recording happens in windows: everything is
    recorded until an allowance of events is used up, then nothing until it has grown again. Steps that make few events are recorded without a gap.
    While a window is open the recorder is the profiler of the process's default mode; work for peers is recorded where the peer's own part is
    (see `aiograd.distributed.observing`) or the window is open. Without a dashboard there is no recorder and no cost.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Callable, Mapping, MutableSequence, Sequence
from time import perf_counter_ns
from typing import Any, cast

from aiograd.dashboard.pass_graph import PassGraphs
from aiograd.dashboard.pipeline_steps import PipelineSteps
from aiograd.engine.graph_root import GraphRoot
from aiograd.errors import AiogradError
from aiograd.graph.node import Node
from aiograd.pipeline import simulate
from aiograd.profiler.event import Event
from aiograd.profiler.recorder import Recorder
from aiograd.running.modes import DEFAULT_MODE

#: the allowance at which a window opens, and the most that it grows to, in seconds' worth of events
OPENS, MOST = 0.5, 2.0
#: windows that are remembered
WINDOWS = 256
#: nanoseconds from one comparison of a pipeline with its schedule to the next
COMPARE_NS = 2_000_000_000


class EventRing:
    """The last events, numbered from 1. Threads may append while one reads.

    Args:
        capacity: how many are kept.
        allowance: permits each event.
    """

    def __init__(self, capacity: int, allowance: Allowance) -> None:
        self._ring: deque[tuple[int, Event]] = deque(maxlen=capacity)
        self._numbers = itertools.count(1)
        self._allowance = allowance
        #: called with each event that is not kept
        self.on_spent: Callable[[], None] = _nothing

    def append(self, event: Event) -> None:
        """Keep an event, if the allowance permits."""
        if self._allowance.take():
            self._ring.append((next(self._numbers), event))
        else:
            self.on_spent()

    def after(self, number: int, most: int) -> list[tuple[int, Event]]:
        """The latest events with higher numbers, at most so many, in order."""
        found: list[tuple[int, Event]] = []
        while True:
            try:
                for entry in reversed(self._ring):
                    if entry[0] <= number or len(found) >= most:
                        break
                    found.append(entry)
                return found[::-1]
            except RuntimeError:  # another thread appended meanwhile
                found.clear()


def _nothing() -> None:
    pass


class Allowance:
    """A number of events that may be recorded, which grows with time. See Note [Windows].

    Args:
        rate: events per second.
    """

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.left = rate * OPENS
        self._grown_at: float | None = None

    def restart(self, rate: float) -> None:
        """Begin anew with as much as opens a window."""
        self.rate = rate
        self.left = rate * OPENS
        self._grown_at = None

    def take(self) -> bool:
        """Use up one event; False if none is left."""
        if self.left < 1:
            return False
        self.left -= 1
        return True

    def grow(self, now: float) -> None:
        """Let it grow up to this time, in seconds."""
        if self._grown_at is not None:
            self.left = min(self.rate * MOST, self.left + (now - self._grown_at) * self.rate)
        self._grown_at = now

    @property
    def is_ample(self) -> bool:
        """True if a window may open."""
        return self.left >= self.rate * OPENS


class SampledRecorder(Recorder):
    """Records into a ring, as long as its allowance lasts, and notes the graphs of passes and the steps of pipelines.

    Args:
        ring: keeps the events.
        graphs: keeps the graphs.
        steps: keeps the steps of pipelines.
    """

    def __init__(self, ring: EventRing, graphs: PassGraphs, steps: PipelineSteps) -> None:
        super().__init__(shapes=True, memory=True, lines=True)
        self.events = cast(MutableSequence[Event], ring)
        self._graphs = graphs
        self._steps = steps
        self._promises: dict[str, str] = {}
        self._compared_at = 0

    def _ran(self, began: int, task: Any, node: Node, track: int | None = None) -> None:
        if not isinstance(node, GraphRoot):
            self._graphs.ran(task, node, began)
        super()._ran(began, task, node, track)

    def end_pass(self, began: int, task: Any) -> None:
        """A backward pass is over."""
        self._graphs.ended(task)
        super().end_pass(began, task)


    def end_pipeline_action(self, began: int, step: Sequence[int], rank: int, action: Any) -> None:
        """A rank of a pipeline has carried out an action."""
        if action.kind.is_compute:
            self._steps.acted(step, rank, action, began, perf_counter_ns())
        super().end_pipeline_action(began, step, rank, action)

    def end_pipeline_step(self, began: int, pipeline: Any, step: Sequence[int], computations: Sequence[Mapping[int, int]]) -> None:
        """A step of a pipeline has ended; now and then it is compared with what its schedule promises for the times that were measured."""
        ended = perf_counter_ns()
        if ended - self._compared_at > COMPARE_NS:
            self._compared_at = ended
            with contextlib.suppress(AiogradError):  # the stages of other workers are not measured here
                ideal = simulate(pipeline.schedule, pipeline.timeline.costs())
                self._promises[pipeline.schedule.name] = f"{100 * ideal.bubble_rate:.0f} % by the schedule at these times"
        promise = self._promises.get(pipeline.schedule.name)
        self._steps.ended(step, pipeline.schedule.name, promise, computations, began, ended)
        name = f"PP:step {pipeline.schedule.name}" + ("" if promise is None else f": {promise}")
        self.add(name, "scope", "PP:step", began, ended)


class Sampler:
    """Opens and closes the windows of one worker.

    Args:
        rate: events per second.
        capacity: how many are kept.
    """

    def __init__(self, rate: float, capacity: int) -> None:
        self.allowance = Allowance(rate)
        self.ring = EventRing(capacity, self.allowance)
        self.graphs = PassGraphs()
        self.steps = PipelineSteps()
        self._recorder = SampledRecorder(self.ring, self.graphs, self.steps)
        self._lock = threading.Lock()
        self.is_open = False
        #: beginning and end of the last windows, in nanoseconds of ``time.perf_counter_ns``; the end is 0 while one is open
        self.windows: deque[list[int]] = deque(maxlen=WINDOWS)
        self.ring.on_spent = self.close

    def tick(self, now: float) -> None:
        """Let the allowance grow, and open or close the window."""
        self.allowance.grow(now)
        if self.allowance.left < 1:
            self.close()
        elif not self.is_open and self.allowance.is_ample:
            with self._lock:
                if DEFAULT_MODE.profiler is None:
                    DEFAULT_MODE.change({"profiler": self._recorder})
                self.is_open = True
                self.windows.append([perf_counter_ns(), 0])

    def close(self) -> None:
        """Record nothing more."""
        if not self.is_open:
            return
        with self._lock:
            if self.is_open and self.windows:
                self.windows[-1][1] = perf_counter_ns()
            self.is_open = False
            if DEFAULT_MODE.profiler is self._recorder:
                DEFAULT_MODE.change({"profiler": None})

    def recorder(self, is_recorded: bool) -> SampledRecorder | None:
        """The recorder for work for a peer, or None. `is_recorded`: the peer records its part."""
        return self._recorder if (self.is_open or is_recorded) and self.allowance.left >= 1 else None

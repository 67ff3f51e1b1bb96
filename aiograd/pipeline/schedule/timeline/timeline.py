"""When each rank of a pipeline did what, simulated or measured, and what follows from it: cost, bubble, peak memory, pictures."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from aiograd.errors import ArgumentError, ArgumentTypeError
from aiograd.pipeline.schedule.action import Action, ActionKind
from aiograd.pipeline.schedule.costs import Costs
from aiograd.pipeline.schedule.timeline.chrome_trace import timeline_trace
from aiograd.pipeline.schedule.timeline.data import TimelineData, TimelineEvent
from aiograd.pipeline.schedule.timeline.svg import timeline_svg
from aiograd.running.chrome_trace import PathLike, write_trace

_K = ActionKind


class Timeline(TimelineData):
    """The actions of the ranks of a pipeline with their times. Immutable; made by `simulate` or by `from_events`.

    Attributes:
        events: all actions by start, then by rank; actions of a rank that start together keep the rank's order.
        ranks: number of ranks.
        stage_to_rank: for each stage its rank.
        cost, bubble: see Note [Measures] in `data`; in the unit of the events.
        bubble_rate: share of the cost that is bubble, 0 to 1.
        duration: from the first start on any rank to the last end on any, transfers not counted.
        busy: for each rank the time it computed.
        peak_activations: for each rank the most activations it kept at once, in the unit of `Costs.activation_memory`.
        name: the name in pictures.
        memory: the memory of an activation and of what waits for a weight gradient, as in `Costs`.
        stages: the number of stages, where the last ones have no events.

    >>> schedule = ag.pipeline.make_schedule("1F1B", ranks=2, microbatches=2)
    >>> timeline = ag.pipeline.simulate(schedule, ag.pipeline.Costs(1, 1, 1))
    >>> timeline.ranks, timeline.duration, round(timeline.bubble_rate, 2)
    (2, 9.0, 0.33)
    """

    __slots__ = ()

    @classmethod
    def from_events(
        cls,
        events: Iterable[TimelineEvent | tuple[int, Action, float, float]],
        *,
        activation_memory: float = 1.0,
        weight_memory: float = 0.5,
        name: str = "",
    ) -> Timeline:
        """The timeline of a run that was measured.

        Args:
            events: rank, action, start and end of each action; starts and ends on one clock, mostly in seconds. Actions of one rank come in the order
                of their starts.
            activation_memory: as for `Costs`.
            weight_memory: as for `Costs`.
            name: the name of the run in pictures.

        Returns:
            The timeline; its times count from the clock's zero, as given.

        Raises:
            ArgumentTypeError: something else than events.
            ArgumentError: no computation, an end before its start, a stage on two ranks.
        """
        taken = [_event(position, event) for position, event in enumerate(events)]
        homes: dict[int, int] = {}
        for event in taken:
            for part in event.action.computations:
                if homes.setdefault(part.stage, event.rank) != event.rank:
                    raise ArgumentError(f"a timeline with stage {part.stage} on ranks {homes[part.stage]} and {event.rank}: a stage lives on one")
        if not homes:
            raise ArgumentError(f"a timeline of {len(taken)} events without any computation (F, I, W, B): there is nothing to measure")
        memory = Costs(1, 1, 1, 0, activation_memory, weight_memory)
        return cls(taken, ranks=max(event.rank for event in taken) + 1, memory=memory, name=name)

    def costs(self, *, communication: float | None = None, activation_memory: float = 1.0, weight_memory: float = 0.5) -> Costs:
        """The average times of each stage, to simulate other schedules or to search one (`make_schedule("auto", ..., costs=...)`).

        Full backwards are taken for half an input backward and half a weight backward where none were measured apart.

        Args:
            communication: time of a transfer; None takes the average of the SENDs among the events, 0 if there are none.
            activation_memory: as for `Costs`.
            weight_memory: as for `Costs`.

        Returns:
            `Costs` with one number per stage.

        Raises:
            ArgumentError: a stage without any forward.
        """
        times: defaultdict[tuple[int, ActionKind], list[float]] = defaultdict(list)
        sends: list[float] = []
        for event in self.events:
            if event.action.kind.is_send:
                sends.append(event.end - event.start)
            elif event.action.parts is None and event.action.kind.is_compute:
                times[event.action.stage, event.action.kind].append(event.end - event.start)
        columns: dict[ActionKind, list[float]] = {_K.F: [], _K.I: [], _K.W: []}
        for stage in range(len(self.stage_to_rank)):
            if not times[stage, _K.F]:
                raise ArgumentError(f"no forward of stage {stage} was measured by itself: its costs cannot be told from this timeline")
            columns[_K.F].append(_mean(times[stage, _K.F]))
            for kind in (_K.I, _K.W):
                columns[kind].append(_mean(times[stage, kind]) if times[stage, kind] else _mean(times[stage, _K.B]) / 2)
        between = _mean(sends) if communication is None else communication
        return Costs(columns[_K.F], columns[_K.I], columns[_K.W], between, activation_memory, weight_memory)

    def svg(self, *, width: float | None = None) -> str:
        """The timeline as an SVG picture: one row per rank, one colour per kind, the microbatch in each box.

        The same timeline gives the same text.

        Args:
            width: of the picture in pixels; None: wide enough for the numbers to be read.

        Returns:
            The text of the SVG. In a notebook a timeline shows itself as this picture.

        Raises:
            ArgumentError: a width that leaves no room.
        """
        return timeline_svg(self, width)

    def chrome_trace(self, path: PathLike | None = None, *, unit: float = 1e6) -> dict[str, Any]:
        """The timeline as a Chrome trace, for Perfetto or ``chrome://tracing``: a row per rank, arrows where values go to another rank.

        Args:
            path: where to write it as JSON; None: nowhere.
            unit: microseconds in the unit of the timeline: 1e6 for seconds, 1e3 for milliseconds.

        Returns:
            The trace: a dict as JSON has it.

        Raises:
            ArgumentError: a unit that is not above zero.
        """
        trace = timeline_trace(self, unit)
        if path is not None:
            write_trace(trace, path)
        return trace

    def _repr_svg_(self) -> str:
        return self.svg()

    def __repr__(self) -> str:
        name = f" {self.name}" if self.name else ""
        return f"<Timeline{name}: {self.ranks} ranks, cost {self.cost:g}, bubble rate {self.bubble_rate:.4f}, {len(self.events)} events>"


def _event(position: int, event: Any) -> TimelineEvent:
    if not isinstance(event, tuple) or len(event) != 4:
        raise ArgumentTypeError(f"event {position} of a timeline must be a tuple of rank, Action, start and end, not {type(event).__name__}")
    rank, action, start, end = event
    if not (isinstance(rank, int) and isinstance(action, Action) and isinstance(start, float | int) and isinstance(end, float | int)):
        found = ", ".join(type(value).__name__ for value in event)
        raise ArgumentTypeError(f"event {position} of a timeline must be (rank: int, Action, start: float, end: float), not ({found})")
    if rank < 0 or not (math.isfinite(start) and math.isfinite(end) and start <= end):
        raise ArgumentError(f"event {position} of a timeline, {action}: expected a rank from 0 and start <= end, found rank {rank}, {start} to {end}")
    return TimelineEvent(rank, action, float(start), float(end))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0

"""The data of a timeline: the actions of each rank with their times, and measures of them. Its operations are methods of `Timeline`.

Pictures take this class, so that they need not import `Timeline`, which draws them.

Note [Measures]
    *Cost* is the longest time of a rank from the start of its first computation to the end of its last. Ranks need not start together: where steps
    follow each other, the time before a rank's first computation is not lost. *Bubble* is the part of the cost beyond the work of the busiest rank,
    since no order of the same work takes less; where ranks have equal work that is microbatches × (F + I + W).

    Activations count from the start of a forward to the end of the input backward; the part that the weight backward needs counts to its end. Each
    stage of a rank counts for its share of `activation_memory` and `weight_memory`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

from aiograd.pipeline.schedule.action import Action, ActionKind
from aiograd.pipeline.schedule.costs import Costs

_K = ActionKind


class TimelineEvent(NamedTuple):
    """One action of one rank.

    Attributes:
        rank: the rank.
        action: the action.
        start: the time at which it began.
        end: the time at which it was done; for a SEND, at which the other side has it.

    >>> schedule = ag.pipeline.make_schedule("1F1B", ranks=2, microbatches=2)
    >>> ag.pipeline.simulate(schedule, ag.pipeline.Costs(1, 1, 1)).events[0]
    TimelineEvent(rank=0, action=0F0, start=0.0, end=1.0)
    """

    rank: int
    action: Action
    start: float
    end: float


class TimelineData:
    """A record of the actions of a pipeline's ranks, their times and their cost. Immutable. See `Timeline` for the attributes."""

    __slots__ = ("events", "ranks", "stage_to_rank", "cost", "bubble", "bubble_rate", "duration", "busy", "peak_activations", "name")

    def __init__(self, events: Sequence[TimelineEvent], *, ranks: int, memory: Costs, name: str, stages: int = 0) -> None:
        self.events: tuple[TimelineEvent, ...] = tuple(sorted(events, key=lambda event: (event.start, event.rank)))
        self.ranks: int = ranks
        self.name: str = name
        rows: list[list[TimelineEvent]] = [[] for _ in range(ranks)]
        homes: dict[int, int] = {}
        for event in self.events:
            if event.action.kind.is_compute:
                rows[event.rank].append(event)
                homes.update((part.stage, event.rank) for part in event.action.computations)
        self.stage_to_rank: tuple[int, ...] = tuple(homes.get(stage, -1) for stage in range(max(stages, max(homes) + 1)))
        spans = [(row[0].start, max(event.end for event in row)) for row in rows if row]
        self.busy: tuple[float, ...] = tuple(map(_busy, rows))
        self.cost: float = max(end - start for start, end in spans)
        self.duration: float = max(end for _, end in spans) - min(start for start, _ in spans)
        self.bubble: float = max(0.0, self.cost - max(self.busy))
        self.bubble_rate: float = self.bubble / self.cost if self.cost else 0.0
        share = ranks / len(self.stage_to_rank)
        self.peak_activations: tuple[float, ...] = tuple(_peak(row, memory.activation_memory * share, memory.weight_memory * share) for row in rows)


def _busy(row: Sequence[TimelineEvent]) -> float:
    """The time covered by events, which may overlap."""
    total, until = 0.0, -math.inf
    for event in row:
        if event.end > until:
            total += event.end - max(event.start, until)
            until = event.end
    return total


def _peak(row: Sequence[TimelineEvent], activations: float, weights: float) -> float:
    whole = partial = 0  # activations kept as a whole, and activations with only the part for the weights left; counted, so that nothing is rounded
    peak = 0.0
    open_: list[tuple[float, ActionKind]] = []  # ends of backwards that are under way
    for event in row:
        while open_ and open_[0][0] <= event.start:
            kind = heapq.heappop(open_)[1]
            whole -= kind is not _K.W
            partial += (kind is _K.I) - (kind is _K.W)
            peak = max(peak, whole * activations + partial * weights)
        for part in event.action.computations:
            if part.kind is _K.F:
                whole += 1
            else:
                heapq.heappush(open_, (event.end, part.kind))
        peak = max(peak, whole * activations + partial * weights)
    return peak

"""The machine of the search: schedules as lists of small integers, timed thousands of times a second.

Note [Orders]
    An *order* is the row of a rank as a list of *steps*: 3 × stage + 0 for F, + 1 for I, + 2 for W. Microbatches are not written down: the n-th step
    of a number belongs to microbatch n, since every stage takes its microbatches in order. So gradients are summed in the order of microbatches after
    any change of an order.

    Times equal the ones from `simulate`, as the tests check.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from aiograd.pipeline.schedule.action import Action, ActionKind
from aiograd.pipeline.schedule.costs import Costs
from aiograd.pipeline.schedule.schedule import Schedule

Order: TypeAlias = list[int]
Orders: TypeAlias = list[Order]

FORWARD, INPUT, WEIGHT = 0, 1, 2
_KINDS = (ActionKind.F, ActionKind.I, ActionKind.W)
_STEPS = {ActionKind.F: (FORWARD,), ActionKind.I: (INPUT,), ActionKind.W: (WEIGHT,), ActionKind.B: (INPUT, WEIGHT)}

#: relative tolerance of comparisons of times and of memory, far above rounding and far below what matters
TOLERANCE = 1e-9


class Timing(NamedTuple):
    """The times that follow from the orders of all ranks.

    Attributes:
        spans: for each rank the time from the start of its first step to the end of its last.
        ends: for each step the times at which it ended, by microbatch.
    """

    spans: list[float]
    ends: list[list[float]]

    @property
    def score(self) -> tuple[float, float]:
        """The objective that the search minimizes: the longest span, and then the sum of squares of all spans."""
        return max(self.spans), sum(span * span for span in self.spans)


class Machine:
    """A pipeline of known layout, costs and memory.

    Args:
        homes: for each stage its rank.
        ranks: number of ranks.
        microbatches: number of microbatches.
        costs: the costs of one microbatch.
        memory_limit: most activations of a rank, in the unit of `Costs.activation_memory`; None for no limit.
    """

    __slots__ = (
        "homes", "ranks", "microbatches", "stages_of", "duration", "source", "lag", "home", "whole", "partial", "limit", "work", "steps_timed",
    )  # fmt: skip

    def __init__(self, homes: Sequence[int], ranks: int, microbatches: int, costs: Costs, memory_limit: float | None) -> None:
        self.homes = tuple(homes)
        self.ranks = ranks
        self.microbatches = microbatches
        stages = len(homes)
        times = costs.stage_times(stages, ranks)
        self.stages_of = [[stage for stage in range(stages) if homes[stage] == rank] for rank in range(ranks)]
        #: by step: how long it takes; the step of another stage that gives its input, or -1; how long that is on its way; the rank
        self.duration = [time for stage in times for time in stage]
        self.source = [-1] * (3 * stages)
        self.lag = [0.0] * (3 * stages)
        self.home = [homes[step // 3] for step in range(3 * stages)]
        for stage in range(stages):
            if stage > 0:
                self.source[3 * stage + FORWARD] = 3 * (stage - 1) + FORWARD
            if stage < stages - 1:
                self.source[3 * stage + INPUT] = 3 * (stage + 1) + INPUT
        for step, source in enumerate(self.source):
            if source >= 0 and self.home[source] != self.home[step]:
                self.lag[step] = costs.communication
        share = ranks / stages
        #: memory of one stage and microbatch, before and after I
        self.whole = costs.activation_memory * share
        self.partial = costs.weight_memory * share
        self.limit = float("inf") if memory_limit is None else memory_limit * (1 + TOLERANCE)
        self.work = [microbatches * sum(sum(times[stage]) for stage in own) for own in self.stages_of]
        #: the number of steps timed so far: the cost of the search
        self.steps_timed = 0

    def time_of(self, stage: int) -> list[float]:
        """Times of F, I and W of a stage."""
        return self.duration[3 * stage : 3 * stage + 3]

    def time(self, orders: Orders) -> Timing | None:
        """Times orders; None where ranks would wait for each other forever."""
        duration, source, lag = self.duration, self.source, self.lag
        ends: list[list[float]] = [[] for _ in duration]
        free = [0.0] * self.ranks
        positions = [0] * self.ranks
        waiting: dict[int, int] = {}
        runnable = list(range(self.ranks - 1, -1, -1))
        while runnable:
            rank = runnable.pop()
            order, now = orders[rank], free[rank]
            for position in range(positions[rank], len(order)):
                step = order[position]
                own = ends[step]
                giver = source[step]
                if giver >= 0:
                    given = ends[giver]
                    if len(given) <= len(own):
                        waiting[giver] = rank
                        positions[rank] = position
                        break
                    arrival = given[len(own)] + lag[step]
                    now = max(now, arrival)
                now += duration[step]
                own.append(now)
                if step in waiting:
                    runnable.append(waiting.pop(step))
            else:
                positions[rank] = len(order)
            free[rank] = now
        self.steps_timed += sum(positions)
        if waiting:
            return None
        spans = [now - ends[order[0]][0] + duration[order[0]] for now, order in zip(free, orders, strict=True)]
        return Timing(spans, ends)

    def starts(self, orders: Orders, timing: Timing) -> list[list[float]]:
        """When each step of each rank starts."""
        result = []
        for order in orders:
            counts = [0] * len(self.duration)
            row = []
            for step in order:
                row.append(timing.ends[step][counts[step]] - self.duration[step])
                counts[step] += 1
            result.append(row)
        return result

    def peak(self, order: Order) -> float:
        """The most that a rank keeps at once."""
        whole = partial = 0
        peak = 0.0
        for step in order:
            kind = step % 3
            whole += (kind == FORWARD) - (kind == INPUT)
            partial += (kind == INPUT) - (kind == WEIGHT)
            peak = max(peak, whole * self.whole + partial * self.partial)
        return peak

    def fits(self, orders: Orders) -> bool:
        """True if every rank keeps to the limit of memory."""
        return all(self.peak(order) <= self.limit for order in orders)

    def repaired(self, order: Order) -> Order | None:
        """The order with W done earlier where memory would run out; None if that does not help, or I comes before F or W before I."""
        counts = [0] * len(self.duration)
        whole = partial = 0
        early = [0] * len(self.duration)  # steps already done early, to be left out where they stand
        result: Order = []
        for position, step in enumerate(order):
            kind = step % 3
            if early[step]:
                early[step] -= 1
                continue
            if kind != FORWARD and counts[step] >= counts[step - 1]:
                return None
            if kind == FORWARD:
                while (whole + 1) * self.whole + partial * self.partial > self.limit:
                    pull = self._next_weight(order, position, counts, early)
                    if pull < 0:
                        return None
                    early[pull] += 1
                    counts[pull] += 1
                    partial -= 1
                    result.append(pull)
            whole += (kind == FORWARD) - (kind == INPUT)
            partial += (kind == INPUT) - (kind == WEIGHT)
            if kind == INPUT and whole * self.whole + partial * self.partial > self.limit:
                return None
            counts[step] += 1
            result.append(step)
        return result

    @staticmethod
    def _next_weight(order: Order, position: int, counts: list[int], early: list[int]) -> int:
        """The first W from a position on that could be done now, or -1."""
        skip = early.copy()
        for step in order[position:]:
            if step % 3 == WEIGHT:
                if skip[step]:
                    skip[step] -= 1
                elif counts[step] < counts[step - 1]:
                    return step
        return -1

    def orders_of(self, schedule: Schedule) -> Orders:
        """The orders of a compute-only schedule: B taken apart, and OVERLAP_F_B."""
        computations = ([part for action in row if action for part in action.computations] for row in schedule.ranks)
        return [[3 * part.stage + kind for part in row for kind in _STEPS[part.kind]] for row in computations]

    def schedule_of(self, orders: Orders, name: str) -> Schedule:
        """The schedule that orders stand for."""
        rows = []
        for order in orders:
            counts = [0] * len(self.duration)
            row = []
            for step in order:
                row.append(Action(step // 3, _KINDS[step % 3], counts[step]))
                counts[step] += 1
            rows.append(row)
        return Schedule(rows, stages=len(self.homes), microbatches=self.microbatches, stage_to_rank=self.homes, name=name)

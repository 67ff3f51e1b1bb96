"""A schedule made in the order of time, for any number of stages per rank and any limit of memory: a free rank takes the next step that is possible.

Note [Taking possible steps]
    Of all ranks the one that can start first starts next: the I or F that it can start earliest, I before F, later stages before earlier
    ones, and W where it would wait or needs the memory.

Note [Room for begun microbatches]
    With several stages per rank, early stages could take all memory with forwards, with no room left for the later stages of these microbatches. So a
    forward is taken only if, after it, the microbatches the rank has begun can still be finished one after the other, oldest first: each finds room
    for the rest of its forwards in what those before it leave. The oldest microbatch of all can then always go on, on every rank, so the schedule
    never gets stuck.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

from aiograd.pipeline.schedule.search.machine import FORWARD, INPUT, WEIGHT, Machine, Orders

#: start and step
_Choice: TypeAlias = tuple[float, int]


def greedily(machine: Machine, short_gaps: bool, caps: Sequence[int] | None = None) -> Orders | None:
    """Make a schedule; see Note [Taking possible steps].

    Args:
        machine: the pipeline.
        short_gaps: True: W go into all gaps; else into gaps that are as long as a W.
        caps: for each stage the most microbatches between its F and I; None: as memory allows.

    Returns:
        The orders, or None where not even one microbatch has room.
    """
    return _Greedy(machine, short_gaps, caps).make()


class _Greedy:
    def __init__(self, machine: Machine, short_gaps: bool, caps: Sequence[int] | None) -> None:
        self.machine = machine
        self.short_gaps = short_gaps
        self.caps = caps
        #: by step: when it ended, by microbatch
        self.ends: list[list[float]] = [[] for _ in machine.duration]
        self.now = [0.0] * machine.ranks
        self.whole = [0] * machine.ranks
        self.partial = [0] * machine.ranks
        self.orders: Orders = [[] for _ in range(machine.ranks)]

    def make(self) -> Orders | None:
        machine = self.machine
        choices = [self.choose(rank) for rank in range(machine.ranks)]
        left = 3 * machine.microbatches * len(machine.homes)
        while left:
            rank, choice = -1, None
            for other, offered in enumerate(choices):
                if offered is not None and (choice is None or offered[0] < choice[0]):
                    rank, choice = other, offered
            if choice is None:
                return None
            left -= 1
            for other in self.take(rank, *choice):
                choices[other] = self.choose(other)
        return self.orders

    def take(self, rank: int, start: float, step: int) -> set[int]:
        """Carries a step out; returns the ranks that may choose otherwise now."""
        machine, kind = self.machine, step % 3
        self.now[rank] = start + machine.duration[step]
        self.ends[step].append(self.now[rank])
        self.orders[rank].append(step)
        self.whole[rank] += (kind == FORWARD) - (kind == INPUT)
        self.partial[rank] += (kind == INPUT) - (kind == WEIGHT)
        taker = step + 3 if kind == FORWARD else step - 3 if kind == INPUT else -1
        return {rank, machine.home[taker]} if 0 <= taker < len(machine.home) else {rank}

    def choose(self, rank: int) -> _Choice | None:
        """The best next step of a rank among the steps that can be timed by now; None if there is none."""
        self.machine.steps_timed += 8 * len(self.machine.stages_of[rank])  # the cost of this choice, in steps timed
        now = self.now[rank]
        best: tuple[float, int, int] | None = None  # start, F after I, later stages first
        for stage in self.machine.stages_of[rank]:
            for step in (3 * stage + INPUT, 3 * stage + FORWARD):
                arrival = self.arrival(step)
                if arrival < math.inf:
                    offered = max(arrival, now), step % 3 == FORWARD, -step
                    if (best is None or offered < best) and (step % 3 == INPUT or self.may_begin(rank, stage)):
                        best = offered
        weight = self.next_weight(rank)
        if weight < 0:
            return None if best is None else (best[0], -best[2])
        if best is None:
            return now, weight
        start, step = best[0], -best[2]
        if start > now and (self.short_gaps or self.machine.duration[weight] <= start - now):
            return now, weight
        if step % 3 == FORWARD and not self.has_room(rank):
            return now, weight
        return start, step

    def arrival(self, step: int) -> float:
        """The time at which the input of a step's next microbatch is there; infinity if it is not known."""
        nr = len(self.ends[step])
        if nr >= self.machine.microbatches or (step % 3 == INPUT and len(self.ends[step - 1]) <= nr):
            return math.inf
        source = self.machine.source[step]
        if source < 0:
            return 0.0
        given = self.ends[source]
        return given[nr] + self.machine.lag[step] if len(given) > nr else math.inf

    def next_weight(self, rank: int) -> int:
        """A pending W, of the stage with the fewest W so far; -1 if there is none."""
        done = [
            (len(self.ends[3 * stage + WEIGHT]), -stage)
            for stage in self.machine.stages_of[rank]
            if len(self.ends[3 * stage + WEIGHT]) < len(self.ends[3 * stage + INPUT])
        ]
        return -3 * min(done)[1] + WEIGHT if done else -1

    def has_room(self, rank: int) -> bool:
        """True if memory lets a rank take a forward without any W first."""
        return (self.whole[rank] + 1) * self.machine.whole + self.partial[rank] * self.machine.partial <= self.machine.limit

    def may_begin(self, rank: int, stage: int) -> bool:
        """True if a rank may take the next forward of a stage, if need be after W; see Note [Room for begun microbatches]."""
        begun, ended = len(self.ends[3 * stage]), len(self.ends[3 * stage + INPUT])
        if self.caps is not None and begun - ended >= self.caps[stage]:
            return False
        machine, stages = self.machine, self.machine.stages_of[rank]
        held = self.whole[rank] + 1
        if held * machine.whole > machine.limit:
            return False
        if (held + len(stages) - 1) * machine.whole <= machine.limit:
            return True  # room for the rest of any one microbatch
        done = [(len(self.ends[3 * own]) + (own == stage), len(self.ends[3 * own + INPUT])) for own in stages]
        for microbatch in range(min(inputs for _, inputs in done), max(forwards for forwards, _ in done)):
            rest = sum(forwards <= microbatch for forwards, _ in done)
            if (held + rest) * machine.whole > machine.limit:
                return False
            held -= sum(inputs <= microbatch < forwards for forwards, inputs in done)
        return True

"""The heuristic of the zero-bubble paper for one stage per rank: a schedule made in rounds, with W wherever there is a gap.

Note [Rounds]
    First every stage takes forwards ahead, from the last stage to the first as many as fit until its first input backward can start and
    memory allows. Then come rounds: in each, stages take at most one forward, first to last, and then exactly one input backward, last to
    first. A stage stays at least as far ahead as the next one. W go where a stage would otherwise wait, where memory runs out, and to the
    end; the first stage, once out of forwards, does what W it has before each input backward.

Source: Qi et al., "Zero Bubble Pipeline Parallelism", 2024, section 3.1.
"""

from __future__ import annotations

from collections.abc import Sequence

from aiograd.pipeline.schedule.search.machine import FORWARD, INPUT, WEIGHT, Machine, Orders


def in_rounds(machine: Machine, ahead: Sequence[int] | None = None) -> Orders | None:
    """Makes a schedule; see Note [Rounds].

    Args:
        machine: a pipeline with one stage per rank.
        ahead: for each stage how many forwards it takes before its first input backward, not increasing from stage to stage; None: found out.

    Returns:
        The orders, or None where memory does not suffice for `ahead`.
    """
    return _Rounds(machine).make(ahead)


class _Stage:
    """One stage while its order is made."""

    __slots__ = ("number", "times", "now", "whole", "partial", "bubble", "forwards", "inputs", "weights", "order")

    def __init__(self, number: int, times: Sequence[float]) -> None:
        self.number = number
        #: of F, I, W
        self.times = times
        #: the end of its last step so far
        self.now = 0.0
        #: microbatches before and after I
        self.whole = self.partial = 0
        self.bubble = 0.0
        #: when each F and I ended
        self.forwards: list[float] = []
        self.inputs: list[float] = []
        self.weights = 0
        self.order: list[int] = []


class _Rounds:
    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.stages = [_Stage(stage, machine.time_of(stage)) for stage in range(machine.ranks)]
        self.lag = max(machine.lag)
        self.possible = True

    def make(self, ahead: Sequence[int] | None) -> Orders | None:
        microbatches = self.machine.microbatches
        for stage in self.stages:
            self.forward(stage)
        for stage, more in zip(self.stages, self.more_ahead() if ahead is None else [count - 1 for count in ahead], strict=True):
            for _ in range(more):
                self.forward(stage)
        self.backwards()
        while self.possible and len(self.stages[0].inputs) < microbatches:
            for stage in self.stages:
                if len(stage.forwards) < microbatches:
                    self.forward(stage)
            self.backwards()
        if not self.possible:
            return None
        for stage in self.stages:
            self.weights(stage, microbatches - stage.weights)
        self.machine.steps_timed += 12 * microbatches * len(self.stages)  # the cost of a step here, in steps timed
        return [stage.order for stage in self.stages]

    def more_ahead(self) -> list[int]:
        """How many more forwards each stage takes before its first input backward."""
        more = [0] * len(self.stages)
        gradient = 0.0  # when the first input backward of the stage ends
        for stage in reversed(self.stages):
            j, now = stage.number, stage.now
            if stage is self.stages[-1]:
                gradient = now + stage.times[INPUT]
                continue
            arrival = gradient + self.lag
            while len(stage.forwards) + more[j] < self.machine.microbatches and self.has_room(stage, more[j]):
                if now + stage.times[FORWARD] > arrival:
                    break
                now += stage.times[FORWARD]
                more[j] += 1
            gradient = max(now, arrival) + stage.times[INPUT]
        for j in range(1, len(more)):  # strictly fewer than the stage before, where there are as many microbatches
            while more[j] > 0 and more[j] >= more[j - 1] and 1 + more[j] < self.machine.microbatches:
                more[j] -= 1
        return more

    def has_room(self, stage: _Stage, more: int = 0) -> bool:
        """True if memory lets a stage take one forward beyond `more` others."""
        machine = self.machine
        return (stage.whole + more + 1) * machine.whole + stage.partial * machine.partial <= machine.limit

    def largest_bubble(self) -> float:
        return max(stage.bubble for stage in self.stages)

    def forward(self, stage: _Stage) -> None:
        while not self.has_room(stage):
            if not stage.partial:
                self.possible = False
                return
            self.weights(stage, 1)
        arrival = 0.0
        if stage.number > 0:
            given = self.stages[stage.number - 1].forwards
            if len(given) <= len(stage.forwards):
                self.possible = False
                return
            arrival = given[len(stage.forwards)] + self.lag
        if stage.inputs:
            self.fill(stage, arrival)
        if stage.order:
            stage.bubble += max(0.0, arrival - stage.now)
        stage.now = max(stage.now, arrival) + stage.times[FORWARD]
        stage.forwards.append(stage.now)
        stage.whole += 1
        stage.order.append(3 * stage.number + FORWARD)

    def backwards(self) -> None:
        """One input backward of each stage."""
        for stage in reversed(self.stages):
            if len(stage.forwards) <= len(stage.inputs):
                self.possible = False
            if not self.possible:
                return
            arrival = 0.0
            if stage is not self.stages[-1]:
                arrival = self.stages[stage.number + 1].inputs[len(stage.inputs)] + self.lag
                self.fill(stage, arrival)
            if stage.number == 0 and len(stage.forwards) == self.machine.microbatches:
                self.weights(stage, stage.partial)
            stage.bubble += max(0.0, arrival - stage.now)
            stage.now = max(stage.now, arrival) + stage.times[INPUT]
            stage.inputs.append(stage.now)
            stage.whole -= 1
            stage.partial += 1
            stage.order.append(3 * stage.number + INPUT)

    def fill(self, stage: _Stage, until: float) -> None:
        """Do W until another input arrives."""
        while stage.partial and stage.now + stage.times[WEIGHT] <= until:
            self.weights(stage, 1)
        gap = until - stage.now
        if stage.partial and gap > 0 and gap > self.largest_bubble() - stage.bubble:
            self.weights(stage, 1)

    def weights(self, stage: _Stage, count: int) -> None:
        stage.weights += count
        stage.partial -= count
        stage.now += count * stage.times[WEIGHT]
        stage.order += [3 * stage.number + WEIGHT] * count

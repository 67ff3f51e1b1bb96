"""Carries a schedule out on paper: when each action starts and ends if computations and transfers take known times.

Note [The machine]
    A rank carries out its row from left to right, one computation at a time. A computation starts when the rank is free and its inputs are there: a
    value made on the same rank at once, one from another rank `communication` after it was made. Transfers keep no rank from computing, and a receive
    does not block the rank, only the computation that needs it. So a schedule takes the same time before and after lowering. The two parts of an
    OVERLAP_F_B start together and end together, after the time of both: nothing is gained by them here. Actions on parameters (UNSHARD, RESHARD,
    REDUCE_GRAD) take no time.

Source: the simulator of Qi et al., "Zero Bubble Pipeline Parallelism", 2024; the tests reproduce its tables.
"""

from __future__ import annotations

from aiograd.errors import ArgumentTypeError
from aiograd.pipeline.schedule.action import Action, ActionKind
from aiograd.pipeline.schedule.costs import Costs
from aiograd.pipeline.schedule.dependencies import Fact, fact_of, facts_needed
from aiograd.pipeline.schedule.schedule import Schedule
from aiograd.pipeline.schedule.timeline.data import TimelineEvent
from aiograd.pipeline.schedule.timeline.timeline import Timeline

_K = ActionKind


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """The times at which the actions of a schedule start and end; see Note [The machine].

    Args:
        schedule: compute-only or lowered.
        costs: the costs of one microbatch.

    Returns:
        The timeline, which knows cost, bubble and peak memory. Time counts from the first start.

    Raises:
        ScheduleError: the schedule cannot run, see `Schedule.validate`.
        ArgumentError: `costs` are given for another number of stages.
        ArgumentTypeError: something else than a Schedule and Costs.
    """
    if not isinstance(schedule, Schedule) or not isinstance(costs, Costs):
        raise ArgumentTypeError(f"simulate takes a Schedule and its Costs, not {type(schedule).__name__} and {type(costs).__name__}")
    return _Simulation(schedule.validate(), costs).run()


class _Simulation:
    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.schedule = schedule
        self.costs = costs
        self.homes = schedule.stage_to_rank
        self.rows = [[action for action in row if action is not None] for row in schedule.ranks]
        self.times = {
            (kind, stage): time
            for stage, (forward, inputs, weights) in enumerate(costs.stage_times(schedule.num_stages, schedule.num_ranks))
            for kind, time in ((_K.F, forward), (_K.I, inputs), (_K.W, weights), (_K.B, inputs + weights))
        }
        #: the time of each fact, for the rank that made it
        self.there: dict[Fact, float] = {}
        self.free = [0.0] * schedule.num_ranks
        self.events: list[TimelineEvent] = []

    def run(self) -> Timeline:
        waiting: dict[Fact, int] = {}  # a fact is needed by one rank only
        positions = [0] * len(self.rows)
        runnable = list(range(len(self.rows)))
        while runnable:
            rank = runnable.pop()
            row = self.rows[rank]
            while positions[rank] < len(row):
                action = row[positions[rank]]
                missing = self.carry_out(rank, action)
                if missing is not None:
                    waiting[missing] = rank
                    break
                for part in action.parts or (action,):
                    waiter = waiting.pop(fact_of(part), None)
                    if waiter is not None:
                        runnable.append(waiter)
                positions[rank] += 1
        return Timeline(self.events, ranks=len(self.rows), memory=self.costs, name=self.schedule.name)

    def carry_out(self, rank: int, action: Action) -> Fact | None:
        """Time one action; returns the fact that it waits for and that has not been timed yet, None if it was timed."""
        parts = action.parts or (action,)
        ready = 0.0
        for part in parts:
            for fact in facts_needed(part, self.homes, self.schedule.is_lowered):
                made = self.there.get(fact)
                if made is None:
                    return fact
                ready = max(ready, made + (self.costs.communication if self.crosses(fact, rank) else 0.0))
        if action.kind.is_compute:
            start = max(ready, self.free[rank])
            end = self.free[rank] = start + sum(self.times[part.kind, part.stage] for part in parts)
        else:
            start = end = ready if action.kind.has_microbatch else self.free[rank]
        for part in parts:
            self.there[fact_of(part)] = end
        arrival = end + self.costs.communication if action.kind.is_send else end
        self.events.append(TimelineEvent(rank, action, start, arrival))
        return None

    def crosses(self, fact: Fact, rank: int) -> bool:
        """True if something has to be moved to the rank: what another rank made, or sent."""
        return self.homes[fact[1]] != rank

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

from collections.abc import Callable, Mapping, Sequence

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
    homes, is_lowered = schedule.validate().stage_to_rank, schedule.is_lowered
    rows = [[action for action in row if action is not None] for row in schedule.ranks]
    times = action_times(costs, schedule.num_stages, schedule.num_ranks)
    events = timed(rows, lambda part: facts_needed(part, homes, is_lowered), times, costs.communication)
    return Timeline(events, ranks=len(rows), memory=costs, name=schedule.name)


def action_times(costs: Costs, stages: int, ranks: int) -> dict[tuple[ActionKind, int], float]:
    """The time of each kind of computation of each stage.

    Raises:
        ArgumentError: times given for another number of stages.
    """
    return {
        (kind, stage): time
        for stage, (forward, inputs, weights) in enumerate(costs.stage_times(stages, ranks))
        for kind, time in ((_K.F, forward), (_K.I, inputs), (_K.W, weights), (_K.B, inputs + weights))
    }


def timed(
    rows: Sequence[Sequence[Action]],
    needs: Callable[[Action], Sequence[Fact]],
    times: Mapping[tuple[ActionKind, int], float],
    communication: float,
) -> list[TimelineEvent]:
    """Starts and ends of the actions of rows; see Note [The machine]. Rows that wait for each other end where they do so.

    Args:
        rows: the actions of each rank.
        needs: the facts that a single action waits for, each of which one rank needs.
        times: by kind and stage.
        communication: the time of a transfer.
    """
    made: dict[Fact, tuple[float, int]] = {}  # the time of each fact, and the rank that made it
    free = [0.0] * len(rows)
    events: list[TimelineEvent] = []

    def carry_out(rank: int, action: Action) -> Fact | None:
        """Time one action; returns the fact that it waits for and that has not been timed yet, None if it was timed."""
        parts = action.parts or (action,)
        ready = 0.0
        for part in parts:
            for fact in needs(part):
                found = made.get(fact)
                if found is None:
                    return fact
                ready = max(ready, found[0] + (communication if found[1] != rank else 0.0))
        if action.kind.is_compute:
            start = max(ready, free[rank])
            end = free[rank] = start + sum(times[part.kind, part.stage] for part in parts)
        else:
            start = end = ready if action.kind.has_microbatch else free[rank]
        made.update((fact_of(part), (end, rank)) for part in parts)
        events.append(TimelineEvent(rank, action, start, end + communication if action.kind.is_send else end))
        return None

    waiting: dict[Fact, int] = {}
    positions = [0] * len(rows)
    runnable = list(range(len(rows)))
    while runnable:
        rank = runnable.pop()
        row = rows[rank]
        while positions[rank] < len(row):
            action = row[positions[rank]]
            missing = carry_out(rank, action)
            if missing is not None:
                waiting[missing] = rank
                break
            for part in action.parts or (action,):
                waiter = waiting.pop(fact_of(part), None)
                if waiter is not None:
                    runnable.append(waiter)
            positions[rank] += 1
    return events

"""Counts the steps of a schedule when every action, transfers included, takes one.

A coarse measure that needs no costs: it shows whether a pass over the schedule has made it longer, and that it gets to its end.
"""

from __future__ import annotations

from aiograd.errors import ScheduleError
from aiograd.pipeline.schedule.dependencies import carry_out, facts_needed
from aiograd.pipeline.schedule.grid import format_grid
from aiograd.pipeline.schedule.schedule import Schedule


def tick_count(schedule: Schedule) -> int:
    """Number of ticks until every rank is at the end of its row.

    In a tick each rank, in order, carries out its next action if the action's inputs are there, and idles otherwise; ranks that idle look again at
    the end of the tick, so that a message that a later rank has just sent can be received in the tick.

    Args:
        schedule: a lowered schedule; a compute-only one is lowered first, with its receives as early as possible. Idle cells do not count.

    Returns:
        The number.

    Raises:
        ScheduleError: no rank can go on, though there is more to do.
    """
    if not schedule.is_lowered:
        schedule = schedule.lower(defer_receives=False)
    homes = schedule.stage_to_rank
    rows = [[action for action in row if action is not None] for row in schedule.ranks]
    ticks, stuck = carry_out(rows, lambda part: facts_needed(part, homes, True), looks_again=True)
    if stuck:
        rank, place, _ = stuck[0]
        step = [step for step, action in enumerate(schedule.ranks[rank]) if action is not None][place]
        action = rows[rank][place]
        raise ScheduleError(
            f"the schedule is not progressing: rank {rank} waits at step {step} ({action}) for something that never comes\n\n"
            f"{format_grid(schedule.ranks, (rank, step))}",
            rank=rank, step=step, stage=action.stage, microbatch=action.microbatch,
        )  # fmt: skip
    return ticks

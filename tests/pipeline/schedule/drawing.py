"""Timetables of schedules: who does what when, if F, I and W take one unit of time and B two, and transfers none."""

from __future__ import annotations

from collections.abc import Mapping

from aiograd.pipeline.schedule.action import Action, ActionKind
from aiograd.pipeline.schedule.dependencies import fact_of, facts_needed
from aiograd.pipeline.schedule.schedule import Schedule

K = ActionKind
EQUAL: Mapping[ActionKind, float] = {K.F: 1, K.I: 1, K.W: 1, K.B: 2}


def starts(schedule: Schedule, times: Mapping[ActionKind, float] = EQUAL) -> list[list[tuple[Action, float, float]]]:
    """For each rank its actions with start and end, each as early as rank and inputs allow."""
    ends: dict[object, float] = {}
    free = [0.0] * schedule.num_ranks
    rows = [[action for action in row if action] for row in schedule.compute_only().ranks]
    result: list[list[tuple[Action, float, float]]] = [[] for _ in rows]
    while any(len(done) < len(row) for done, row in zip(result, rows, strict=True)):
        progress = False
        for rank, row in enumerate(rows):
            while len(result[rank]) < len(row):
                action = row[len(result[rank])]
                needs = [fact for part in action.computations for fact in facts_needed(part, schedule.stage_to_rank, False)]
                if not all(fact in ends for fact in needs):
                    break
                start = max([free[rank], *(ends[fact] for fact in needs)])
                free[rank] = start + sum(times[part.kind] for part in action.computations)
                ends |= {fact_of(part): free[rank] for part in action.computations}
                result[rank].append((action, start, free[rank]))
                progress = True
        assert progress, "stuck"
    return result


def cost(schedule: Schedule, times: Mapping[ActionKind, float] = EQUAL) -> float:
    """The longest time of a rank from the start of its first action to the end of its last."""
    return max(row[-1][2] - row[0][1] for row in starts(schedule, times))


def draw(schedule: Schedule) -> list[str]:
    """One line per rank, four characters per unit of time."""
    lines = []
    for rank, row in enumerate(starts(schedule)):
        text, now = f"rank {rank} | ", 0.0
        for action, start, end in row:
            text += " .  " * int(start - now)
            label = ";".join(map(str, action.computations))
            text += f"{label:{'-' if end - start > 1 else ' '}<{int(end - start) * 4 - 1}} "
            now = end
        lines.append(text.rstrip())
    return lines

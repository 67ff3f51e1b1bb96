"""PipelineSteps: the last steps of pipelines with every action, as one process has recorded them; and the last whole one, of all workers.

Note [Whole steps]
    Events are recorded in windows (Note [Windows] in `sampling`), which end in the middle of steps, and a worker records a step only if it may. A
    part of a step looks like a step with other times and another bubble. So actions of steps are noted here besides: a step is noted from its
    first action to its last if it began in a window, also where the window ends first. The process of the pipeline knows how much each rank computes
    in a step, which is drawn when all of it is there, from all workers. Every worker keeps the last steps, so that some are on all of them.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from aiograd.errors import AiogradError
from aiograd.pipeline.schedule.action import Action
from aiograd.pipeline.schedule.timeline.timeline import Timeline

#: steps that are kept, and actions of all of them together; a step with more is not kept
MOST_STEPS, MOST_ACTIONS = 16, 4000
#: more ranks than any pipeline has
MOST_RANKS = 4096

#: rank, text of the action, begin and length in microseconds
ActionRow = tuple[int, str, float, float]


class PipelineSteps:
    """The last steps that were recorded in this process."""

    def __init__(self) -> None:
        self._actions: OrderedDict[str, list[tuple[int, Action, int, int]]] = OrderedDict()
        self._ended: deque[tuple[str, str, str | None, list[list[tuple[int, int]]], int, int]] = deque(maxlen=MOST_STEPS)

    def acted(self, step: Sequence[int], rank: int, action: Action, began: int, ended: int) -> None:
        """A rank has computed something.

        Args:
            step: two ints that all processes know the step by.
            began, ended: ``perf_counter_ns``.
        """
        key = _key(step)
        actions = self._actions.get(key)
        if actions is None:
            actions = self._actions[key] = []
            while len(self._actions) > MOST_STEPS:
                with contextlib.suppress(KeyError):  # another thread was first
                    self._actions.popitem(last=False)
        if len(actions) <= MOST_ACTIONS:
            actions.append((rank, action, began, ended))

    def ended(self, step: Sequence[int], name: str, promise: str | None, computations: Iterable[Mapping[int, int]], began: int, ended: int) -> None:
        """A step is over, in the process of its pipeline.

        Args:
            step: as for `acted`.
            name: of the schedule.
            promise: the bubble by the schedule, in words.
            computations: for each replica the number of computations by rank.
            began, ended: ``perf_counter_ns``.
        """
        self._ended.append((_key(step), name, promise, [list(each.items()) for each in computations], began, ended))

    def rows(self, ahead: int) -> dict[str, Any]:
        """The steps as rows for JSON, oldest first; times in microseconds of the wall clock.

        Args:
            ahead: nanoseconds of the wall clock before ``perf_counter_ns``.
        """
        left, chosen = MOST_ACTIONS, list[list[Any]]()
        for key, actions in reversed(list(self._actions.items())):
            taken = list(actions)
            left -= len(taken)
            if left < 0:
                left += len(taken)
                continue
            rows = [[rank, str(action), (began + ahead) // 1000, (ended - began) // 1000] for rank, action, began, ended in taken]
            chosen.append([key, rows])
        ended = [[*row[:4], (row[4] + ahead) // 1000, (row[5] + ahead) // 1000] for row in list(self._ended)]
        return {"actions": chosen[::-1], "ended": ended}


class EndedStep(NamedTuple):
    """A step that is over, as the process of its pipeline tells it; times in microseconds."""

    key: str
    name: str
    promise: str
    #: for each replica the number of computations by rank
    computations: list[dict[int, int]]
    end: float


class WorkerSteps(NamedTuple):
    """The steps in a worker's report."""

    actions: Mapping[str, list[ActionRow]]
    ended: list[EndedStep]


class WholeStep(NamedTuple):
    """A step of which every computation is known."""

    key: str
    name: str
    promise: str
    #: the events of each replica, and the worker of each rank
    replicas: list[list[tuple[int, Action, float, float]]]
    workers: Mapping[int, str]

    @property
    def events(self) -> list[tuple[int, Action, float, float]]:
        """Rank, action, begin and end in microseconds, of all replicas."""
        return [event for replica in self.replicas for event in replica]


def read_steps(rows: Any, offset: float) -> WorkerSteps:
    """The steps in a report of a worker, without the malformed ones.

    Args:
        rows: as `PipelineSteps.rows` makes them, or anything.
        offset: microseconds to add to the worker's clock.
    """
    actions: dict[str, list[ActionRow]] = {}
    ended: list[EndedStep] = []
    given = rows if isinstance(rows, dict) else {}
    for row in _listed(given.get("actions"))[-MOST_STEPS:]:
        match row:
            case [str(key), list(events)]:
                actions[key[:80]] = [event for each in events[:MOST_ACTIONS] if (event := _event(each, offset)) is not None]
    for row in _listed(given.get("ended"))[-MOST_STEPS:]:
        match row:
            case [str(key), str(name), promise, list(replicas), int(), int(end)]:
                counts = [_counts(each) for each in replicas[:MOST_RANKS]]
                if counts and all(counts):
                    ended.append(EndedStep(key[:80], name[:80], promise[:160] if isinstance(promise, str) else "", counts, end + offset))
    return WorkerSteps(actions, ended)


def last_step(steps: Mapping[str, WorkerSteps], shown: str = "") -> WholeStep | None:
    """The last step of which all computations are known. See Note [Whole steps].

    Args:
        steps: by worker.
        shown: the step that is shown already, before which none is looked for.
    """
    for ended in sorted((step for each in steps.values() for step in each.ended), key=lambda step: step.end, reverse=True):
        if ended.key == shown:
            return None
        found: dict[tuple[int, str], ActionRow] = {}
        workers: dict[int, str] = {}
        for worker, each in steps.items():
            for row in each.actions.get(ended.key, ()):
                before = found.get(row[:2])
                if before is None or before[2] < row[2]:  # done again elsewhere, for a worker that was lost
                    found[row[:2]] = row
                    workers[row[0]] = worker
        by_rank: dict[int, list[ActionRow]] = {}
        for row in found.values():
            by_rank.setdefault(row[0], []).append(row)
        wanted = {rank: count for replica in ended.computations for rank, count in replica.items()}
        if any(len(by_rank.get(rank, ())) != count for rank, count in wanted.items()):
            continue
        with contextlib.suppress(AiogradError):
            replicas = [
                [(rank, _action(text), begin, begin + length) for rank in replica for _, text, begin, length in by_rank.get(rank, ())]
                for replica in ended.computations
            ]
            for replica in replicas:
                Timeline.from_events(replica)
            return WholeStep(ended.key, ended.name, ended.promise, replicas, workers)
    return None


def step_picture(step: WholeStep) -> dict[str, Any]:
    """A step for JSON: a row for each rank, and boxes with row, part of the row and their number, kind, microbatch, stage, begin and length.

    Times are in microseconds from the first begin. The bubble, as `Timeline` has it, is taken of the slowest replica.
    """
    timelines = [Timeline.from_events(replica) for replica in step.replicas]
    begin = min(event[2] for event in step.events)
    ranks = sorted({event[0] for event in step.events})
    boxes = []
    for event in (event for timeline in timelines for event in timeline.events):
        parts = event.action.computations
        for part, each in enumerate(parts):
            where = [ranks.index(event.rank), part, len(parts), each.kind.value, each.microbatch, each.stage]
            boxes.append([*where, round(event.start - begin), round(event.end - event.start)])
    return {
        "name": step.name,
        "promise": step.promise,
        "us": round(max(event[3] for event in step.events) - begin),
        "bubble": round(max(timelines, key=lambda timeline: timeline.cost).bubble_rate, 4),
        "ranks": [{"label": f"rank {rank}", "worker": step.workers.get(rank, "")} for rank in ranks],
        "boxes": boxes,
    }


def _key(step: Sequence[int]) -> str:
    return "-".join(f"{word:x}" for word in step)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _event(row: Any, offset: float) -> ActionRow | None:
    match row:
        case [int(rank), str(text), int() | float() as begin, int() | float() as length] if 0 <= rank < MOST_RANKS and 0 <= length < 1e15:
            return (rank, text[:80], begin + offset, length) if abs(begin) < 1e18 else None
    return None


def _counts(rows: Any) -> dict[int, int]:
    """The number of computations by rank; empty where it is malformed."""
    counts: dict[int, int] = {}
    for row in _listed(rows)[:MOST_RANKS]:
        match row:
            case [int(rank), int(count)] if 0 <= rank < MOST_RANKS and 0 < count <= MOST_ACTIONS:
                counts[rank] = count
            case [int(), 0]:  # a rank without computations, of a schedule that has such
                pass
            case _:
                return {}
    return counts


def _action(text: str) -> Action:
    action = Action.parse(text)
    if action is None or not action.kind.is_compute:
        raise AiogradError(f"{text!r} is no computation of a pipeline")
    return action

"""How long a rank keeps activations, and in which slot: a plan for storage, made from the schedule alone.

Note [Lives and slots]
    Activations of a stage and microbatch live from their F to their B or W, both cells included (an I does not release them, since the
    W after it needs them). Lives that share a cell need different slots. Going through them by their start and taking the lowest free slot
    uses no more slots than are alive at once at some cell, which is the least possible.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NoReturn, TypeAlias, get_args

from aiograd.errors import ArgumentError, ScheduleError
from aiograd.pipeline.schedule.action import Action, ActionKind
from aiograd.pipeline.schedule.data import ScheduleData

Granularity: TypeAlias = Literal["stage_microbatch", "microbatch"]
#: stage and microbatch
Key: TypeAlias = tuple[int, int]
#: first and last cell, both included
Life: TypeAlias = tuple[int, int]

_K = ActionKind


@dataclass(frozen=True, slots=True)
class SlotAssignment:
    """The places where one rank keeps its activations.

    Attributes:
        rank: the rank.
        num_slots: the number of slots that it needs.
        slots: for each stage and microbatch its slot.
        lives: for each stage and microbatch the positions in the row from which and up to which its slot is taken.

    >>> schedule = ag.pipeline.make_schedule("1F1B", ranks=2, microbatches=2)
    >>> assignment = ag.pipeline.rank_slots(schedule, 0)
    >>> assignment.num_slots, assignment.slots
    (2, mappingproxy({(0, 0): 0, (0, 1): 1}))
    """

    rank: int
    num_slots: int
    slots: Mapping[Key, int]
    lives: Mapping[Key, Life]


def rank_slots(
    schedule: ScheduleData, rank: int, stages: Sequence[int] | None = None, *, granularity: Granularity = "stage_microbatch"
) -> SlotAssignment:
    """The plan of one rank.

    Args:
        schedule: compute-only or lowered; positions count the cells of its row.
        rank: the rank of the row.
        stages: the stages of the rank to plan; None takes all.
        granularity: "stage_microbatch": each stage and microbatch has a slot of its own; "microbatch": all stages of a microbatch share one.

    Returns:
        The slot of each activation.

    Raises:
        ArgumentError: an unknown granularity, no stages, one twice or one of another rank, a rank that is not there.
        ScheduleError: a life without beginning or end, with two, or that ends before it begins.
    """
    if granularity not in get_args(Granularity):
        raise ArgumentError(f"Unsupported granularity {granularity!r} of activation slots: expected one of {get_args(Granularity)}")
    if not 0 <= rank < schedule.num_ranks:
        raise ArgumentError(f"rank {rank} is not present in the schedule, which has ranks 0 to {schedule.num_ranks - 1}")
    chosen = tuple(schedule.stages_of(rank) if stages is None else stages)
    if not chosen:
        raise ArgumentError(f"the stages whose activations are given slots must not be empty; rank {rank} has stages {schedule.stages_of(rank)}")
    if len(set(chosen)) != len(chosen):
        raise ArgumentError(f"the stages whose activations are given slots must be unique, found {chosen}")
    for stage in chosen:
        if stage not in schedule.stages_of(rank):
            raise ArgumentError(f"stage {stage} does not live on rank {rank}, which has stages {schedule.stages_of(rank)}")
    lives = _lives(schedule, rank, chosen)
    if granularity == "microbatch":
        for microbatch in range(schedule.num_microbatches):
            shared = [lives[stage, microbatch] for stage in chosen]
            life = min(start for start, _ in shared), max(end for _, end in shared)
            lives.update(((stage, microbatch), life) for stage in chosen)
    slots: dict[Key, int] = {}
    by_life: dict[tuple[Life, int | Key], int] = {}
    taken: list[tuple[int, int]] = []  # last position, slot
    free: list[int] = []
    count = 0
    for key, life in sorted(lives.items(), key=lambda item: (item[1], item[0])):
        group = life, key[1] if granularity == "microbatch" else key
        if group not in by_life:
            while taken and taken[0][0] < life[0]:
                heapq.heappush(free, heapq.heappop(taken)[1])
            if not free:
                heapq.heappush(free, count)
                count += 1
            by_life[group] = heapq.heappop(free)
            heapq.heappush(taken, (life[1], by_life[group]))
        slots[key] = by_life[group]
    return SlotAssignment(rank, count, MappingProxyType(slots), MappingProxyType(lives))


def _lives(schedule: ScheduleData, rank: int, stages: Sequence[int]) -> dict[Key, Life]:
    """The life of each stage and microbatch, every irregularity refused."""
    starts: dict[Key, int] = {}
    inputs: dict[Key, int] = {}
    ends: dict[Key, tuple[int, ActionKind]] = {}
    for step, action in enumerate(schedule.ranks[rank]):
        for part in action.computations if action is not None else ():
            if part.stage not in stages or part.microbatch is None:
                continue
            key = part.stage, part.microbatch
            if part.kind is _K.F:
                if key in starts:
                    _fail("multiple forwards (F)", part, rank, step)
                starts[key] = step
            elif part.kind is _K.I:
                if key in inputs:
                    _fail("multiple input backwards (I)", part, rank, step)
                inputs[key] = step
            else:
                if key in ends:
                    _fail("multiple release actions (B or W)", part, rank, step)
                ends[key] = step, part.kind
    for what, found in (("Forward actions (F)", starts), ("Backward release actions (B or W)", ends)):
        for stage in stages:
            for microbatch in range(schedule.num_microbatches):
                if (stage, microbatch) not in found:
                    text = f"{what} are missing on rank {rank}, the first of stage {stage}, microbatch {microbatch}"
                    raise ScheduleError(text, rank=rank, stage=stage, microbatch=microbatch)
    for key, (step, kind) in ends.items():
        if kind is _K.W and key not in inputs:
            _fail("a weight backward (W) without input backward (I)", Action(key[0], kind, key[1]), rank, step)
        if step < starts[key]:
            _fail("a life that ends before its forward (F)", Action(key[0], kind, key[1]), rank, step)
        if kind is _K.W and step < inputs[key]:
            _fail("a weight backward (W) before its input backward (I)", Action(key[0], kind, key[1]), rank, step)
    for key, step in inputs.items():
        if step < starts[key]:
            _fail("an input backward (I) before its forward (F)", Action(key[0], _K.I, key[1]), rank, step)
    return {key: (start, ends[key][0]) for key, start in starts.items()}


def _fail(reason: str, part: Action, rank: int, step: int) -> NoReturn:
    raise ScheduleError(
        f"cannot give slots to activations: rank {rank}, step {step} ({part}): {reason} of stage {part.stage}, microbatch {part.microbatch}",
        rank=rank, step=step, stage=part.stage, microbatch=part.microbatch,
    )  # fmt: skip

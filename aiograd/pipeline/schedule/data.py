"""The data of a schedule: rows of actions, and where each stage lives. Its operations are methods of `Schedule`.

Passes over schedules (validation, lowering, slots) take this class, so that none of them needs the one that calls them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Self, TypeAlias, TypeVar

from aiograd.errors import ArgumentError, ArgumentTypeError, ScheduleError
from aiograd.pipeline.schedule.action import Action

Row: TypeAlias = tuple[Action | None, ...]
T = TypeVar("T")


class ScheduleData:
    """The actions of each rank of a pipeline, in order. Immutable. See `Schedule` for the arguments.

    Raises:
        ArgumentTypeError, ArgumentError, ScheduleError: as for `Schedule`.
    """

    __slots__ = ("_ranks", "_stage_to_rank", "_microbatches", "_name", "_lowered")

    def __init__(
        self,
        ranks: Sequence[Sequence[Action | None]] | Mapping[int, Sequence[Action | None]],
        *,
        stages: int | None = None,
        microbatches: int | None = None,
        stage_to_rank: Sequence[int] | None = None,
        name: str = "",
    ) -> None:
        self._ranks = _rows(ranks)
        self._name = name
        self._lowered = False
        top_stage = top_microbatch = -1
        homes: dict[int, int] = {}
        for rank, row in enumerate(self._ranks):
            for action in row:
                if action is None:
                    continue
                self._lowered = self._lowered or not action.kind.is_compute
                for part in action.parts or (action,):
                    homes.setdefault(part.stage, rank)
                    top_stage = max(top_stage, part.stage)
                    if part.microbatch is not None:
                        top_microbatch = max(top_microbatch, part.microbatch)
        self._microbatches = _count("microbatches", microbatches, top_microbatch)
        if stage_to_rank is not None:
            self._stage_to_rank = tuple(stage_to_rank)
            stages = len(self._stage_to_rank) if stages is None else stages
            if len(self._stage_to_rank) != stages or not all(rank in range(len(self._ranks)) for rank in self._stage_to_rank):
                raise ArgumentError(
                    f"stage_to_rank needs one rank of 0 to {len(self._ranks) - 1} for each of {stages} stages, found {self._stage_to_rank}"
                )
        stages = _count("stages", stages, top_stage)
        if stage_to_rank is None:
            homeless = next((stage for stage in range(stages) if stage not in homes), None)
            if homeless is not None:
                raise ScheduleError(f"no rank has an action of stage {homeless} of {stages}; add them, or give stage_to_rank", stage=homeless)
            self._stage_to_rank = tuple(homes[stage] for stage in range(stages))

    @property
    def ranks(self) -> tuple[Row, ...]:
        """For each rank its actions in order, None for an idle step."""
        return self._ranks

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self._ranks)

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self._stage_to_rank)

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches."""
        return self._microbatches

    @property
    def stage_to_rank(self) -> tuple[int, ...]:
        """For each stage the rank it lives on."""
        return self._stage_to_rank

    @property
    def name(self) -> str:
        """Its name in texts."""
        return self._name

    @property
    def is_lowered(self) -> bool:
        """True if it has actions that move data, see Note [Two forms]."""
        return self._lowered

    @property
    def is_forward_only(self) -> bool:
        """True if no rank has any part of a backward."""
        return not any(part.kind.is_backward for row in self._ranks for action in row if action for part in action.computations)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that live on a rank, ascending."""
        return tuple(stage for stage, home in enumerate(self._stage_to_rank) if home == rank)

    def with_ranks(self, ranks: Sequence[Sequence[Action | None]]) -> Self:
        """The same stages, microbatches and name with other rows."""
        return type(self)(ranks, stages=self.num_stages, microbatches=self._microbatches, stage_to_rank=self._stage_to_rank, name=self._name)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ScheduleData):
            return NotImplemented
        return (self._ranks, self._stage_to_rank, self._microbatches) == (other._ranks, other._stage_to_rank, other._microbatches)

    def __hash__(self) -> int:
        return hash((self._ranks, self._stage_to_rank, self._microbatches))


def _rows(ranks: Sequence[Sequence[Action | None]] | Mapping[int, Sequence[Action | None]]) -> tuple[Row, ...]:
    if isinstance(ranks, Mapping):
        if sorted(ranks) != list(range(len(ranks))):
            raise ScheduleError(f"a schedule of {len(ranks)} ranks needs rows for ranks 0 to {len(ranks) - 1}, found {sorted(ranks)}")
        ranks = [ranks[rank] for rank in range(len(ranks))]
    rows = tuple(tuple(_iterable(row, f"rank {rank}", "actions")) for rank, row in enumerate(_iterable(ranks, "ranks", "rows")))
    if not rows:
        raise ScheduleError("a schedule needs at least one rank, found none")
    for rank, row in enumerate(rows):
        for step, action in enumerate(row):
            if action is not None and not isinstance(action, Action):
                raise ArgumentTypeError(
                    f"rank {rank}, step {step} of a schedule must be an Action or None, not {type(action).__name__}; see Action.parse"
                )
    return rows


def _iterable(value: Iterable[T], name: str, of: str) -> Iterable[T]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ArgumentTypeError(f"{name} of a schedule must be a sequence of {of}, not {type(value).__name__}")
    return value


def _count(what: str, given: int | None, highest: int) -> int:
    if given is not None and type(given) is not int:
        raise ArgumentTypeError(f"{what} of a schedule is an int or None, not {type(given).__name__}")
    count = highest + 1 if given is None else given
    if count < max(1, highest + 1):
        raise ArgumentError(f"a schedule with actions up to number {highest} of its {what} cannot have {count} {what}")
    return count

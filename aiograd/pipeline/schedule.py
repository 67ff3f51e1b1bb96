"""A pipeline schedule: what each rank does, in order. Pure data, which other modules check, lower, simulate, draw and run.

Note [Two forms]
    A schedule is built *compute-only*: F, I, W, B and OVERLAP_F_B, with idle cells where the author wants them. `Schedule.lower` adds what
    data has to move in between (SEND and RECV, UNSHARD and RESHARD, REDUCE_GRAD); `Schedule.is_lowered` tells the two apart. A rank carries
    its row out from left to right and waits where something it needs is not there yet, so idle cells are for reading, not for timing.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias, TypeVar

from aiograd.errors import ArgumentError, ArgumentTypeError, ScheduleError
from aiograd.pipeline.action import Action
from aiograd.pipeline.grid import format_grid
from aiograd.pipeline.liveness import Granularity, SlotAssignment, assign_slots
from aiograd.pipeline.lowering import lower_schedule, merge_backwards
from aiograd.pipeline.validation import check_schedule

Row: TypeAlias = tuple[Action | None, ...]
T = TypeVar("T")


class Schedule:
    """What each rank of a pipeline does, in order. Immutable.

    Args:
        ranks: for each rank its actions, None for an idle step; a mapping from rank number to actions is taken too.
        stages: number of stages; None takes one more than the highest stage that occurs.
        microbatches: number of microbatches; None takes one more than the highest that occurs.
        stage_to_rank: for each stage the rank it lives on; None takes the rank whose row has the stage.
        name: what it is called in texts. Does not take part in comparisons.

    Raises:
        ArgumentTypeError: something else than actions and None in the rows.
        ArgumentError: numbers that do not fit each other.
        ScheduleError: no ranks, ranks that are not 0 to p - 1, or a stage that no rank has.
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
        """What it is called in texts."""
        return self._name

    @property
    def is_lowered(self) -> bool:
        """Whether it has actions that move data, see Note [Two forms]."""
        return self._lowered

    @property
    def is_forward_only(self) -> bool:
        """Whether no rank has any part of a backward."""
        return not any(part.kind.is_backward for row in self._ranks for action in row if action for part in action.computations)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that live on a rank, ascending."""
        return tuple(stage for stage, home in enumerate(self._stage_to_rank) if home == rank)

    def with_ranks(self, ranks: Sequence[Sequence[Action | None]]) -> Schedule:
        """The same stages, microbatches and name with other rows."""
        return Schedule(ranks, stages=self.num_stages, microbatches=self._microbatches, stage_to_rank=self._stage_to_rank, name=self._name)

    def compute_only(self) -> Schedule:
        """The schedule without the actions that lowering adds (and as it is, where there are none)."""
        if not self._lowered:
            return self
        return self.with_ranks([[action for action in row if action is None or action.kind.is_compute] for row in self._ranks])

    def validate(self) -> Schedule:
        """Checks that the schedule can run: everything once, in an order that gets to its end.

        Returns:
            The schedule itself.

        Raises:
            ScheduleError: it cannot; names rank, step, stage and microbatch and shows the grid around them.
        """
        check_schedule(self)
        return self

    def merge(self) -> Schedule:
        """I and W of one stage and microbatch that follow each other directly (idle cells aside) become one B."""
        return merge_backwards(self)

    def lower(self, defer_receives: bool = True, *, unshard: bool = False, reduce_gradients: bool = False) -> Schedule:
        """Adds what has to move between and around the computations.

        Args:
            defer_receives: receives stand right before what needs them, as far as that cannot block; otherwise as early as the data is sent.
            unshard: add UNSHARD and RESHARD for stages whose parameters are sharded.
            reduce_gradients: add REDUCE_GRAD after the last backward of each stage.

        Raises:
            ScheduleError: a compute action can never run ("malformed"), or the schedule is lowered already.
        """
        return lower_schedule(self, defer_receives, unshard=unshard, reduce_gradients=reduce_gradients)

    def slots(self, granularity: Granularity = "stage_microbatch") -> tuple[SlotAssignment, ...]:
        """For each rank where its activations are kept: which slot each takes, reusing those that are free again.

        Args:
            granularity: "stage_microbatch": each stage and microbatch takes a slot of its own; "microbatch": the stages of a rank share one per
                microbatch.

        Raises:
            ScheduleError: activations whose life cannot be told.
        """
        return assign_slots(self, granularity)

    def to_csv(self, comms: bool | None = None) -> str:
        """The schedule as CSV: one row per rank, one cell per step, blank for idle.

        Args:
            comms: True: lowered, False: compute-only, None: as it is.
        """
        schedule = self
        if comms is not None and comms != self._lowered:
            schedule = self.lower() if comms else self.compute_only()
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([["" if action is None else str(action) for action in row] for row in schedule._ranks])
        return text.getvalue()

    @classmethod
    def from_csv(cls, text: str, *, name: str = "") -> Schedule:
        """Reads what `to_csv` writes, and validates it.

        Args:
            text: CSV of a compute-only or a lowered schedule.
            name: what it is called in texts.

        Raises:
            ScheduleError: a cell that is no action, or a schedule that cannot run.
        """
        if not isinstance(text, str):
            raise ArgumentTypeError(f"Schedule.from_csv takes the text of a CSV file, not {type(text).__name__}")
        ranks: list[list[Action | None]] = []
        try:
            for rank, row in enumerate(csv.reader(io.StringIO(text, newline=""), strict=True)):
                ranks.append([_read_cell(cell, rank, step) for step, cell in enumerate(row)])
        except csv.Error as error:
            raise ScheduleError(f"cannot read a pipeline schedule: row {len(ranks)} is no CSV ({error})", rank=len(ranks)) from error
        return cls(ranks, name=name).validate()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schedule):
            return NotImplemented
        return (self._ranks, self._stage_to_rank, self._microbatches) == (other._ranks, other._stage_to_rank, other._microbatches)

    def __hash__(self) -> int:
        return hash((self._ranks, self._stage_to_rank, self._microbatches))

    def __repr__(self) -> str:
        form = "lowered" if self._lowered else "compute-only"
        size = f"{self.num_ranks} ranks, {self.num_stages} stages, {self._microbatches} microbatches"
        return f"<Schedule {self._name or 'without name'}: {size}, {form}>"

    def __str__(self) -> str:
        return format_grid(self._ranks)


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


def _read_cell(cell: str, rank: int, step: int) -> Action | None:
    try:
        return Action.parse(cell)
    except ArgumentError as error:
        raise ScheduleError(f"cannot read rank {rank}, step {step} of a pipeline schedule: {error}", rank=rank, step=step) from error

"""A pipeline schedule: what each rank does, in order, and what can be asked of it. Its data is in `data`.

Note [Two forms]
    A schedule is built *compute-only*: F, I, W, B and OVERLAP_F_B, with idle cells where the author wants them. `Schedule.lower` adds what
    data has to move in between (SEND and RECV, UNSHARD and RESHARD, REDUCE_GRAD); `Schedule.is_lowered` tells the two apart. A rank carries
    its row out from left to right and waits where something it needs is not there yet, so idle cells are for reading, not for timing.
"""

from __future__ import annotations

import csv
import io

from aiograd.errors import ArgumentError, ArgumentTypeError, ScheduleError
from aiograd.pipeline.schedule.action import Action
from aiograd.pipeline.schedule.data import ScheduleData
from aiograd.pipeline.schedule.grid import format_grid, grid_html
from aiograd.pipeline.schedule.liveness import Granularity, SlotAssignment, rank_slots
from aiograd.pipeline.schedule.lowering import lower_rows, merge_backwards
from aiograd.pipeline.schedule.validation import check_schedule


class Schedule(ScheduleData):
    """The actions of each rank of a pipeline, in order. Immutable.

    Args:
        ranks: for each rank its actions, None for an idle step; a mapping from rank number to actions is taken too.
        stages: number of stages; None takes one more than the highest stage that occurs.
        microbatches: number of microbatches; None takes one more than the highest that occurs.
        stage_to_rank: for each stage the rank it lives on; None takes the rank with the stage in its row.
        name: the name in messages. Does not take part in comparisons.

    Raises:
        ArgumentTypeError: something else than actions and None in the rows.
        ArgumentError: numbers that do not fit each other.
        ScheduleError: no ranks, ranks that are not 0 to p - 1, or a stage that no rank has.

    >>> schedule = ag.pipeline.make_schedule("1F1B", ranks=2, microbatches=2)
    >>> print(schedule)
            Rank 0 Rank 1
    Step 0: 0F0
    Step 1:        1F0
    Step 2:        1B0
    Step 3: 0F1    1F1
    Step 4: 0B0    1B1
    Step 5:
    Step 6: 0B1
    >>> schedule.num_stages, schedule.num_microbatches
    (2, 2)
    """

    __slots__ = ()

    def compute_only(self) -> Schedule:
        """The schedule without the actions that lowering adds (and as it is, where there are none).

        Returns:
            A schedule; the same object where there is nothing to leave out.
        """
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
        """I and W of one stage and microbatch that follow each other directly (idle cells aside) become one B.

        Returns:
            Another schedule.
        """
        return self.with_ranks([merge_backwards(row) for row in self._ranks])

    def lower(self, defer_receives: bool = True, *, unshard: bool = False, reduce_gradients: bool = False) -> Schedule:
        """Add the transfers between the computations, and the actions on parameters around them.

        Args:
            defer_receives: receives stand right before their consumers, as far as that cannot block; otherwise as early as the data is sent.
            unshard: add UNSHARD and RESHARD for stages with sharded parameters.
            reduce_gradients: add REDUCE_GRAD after the last backward of each stage.

        Returns:
            Another schedule, with `is_lowered` True.

        Raises:
            ScheduleError: a compute action can never run ("malformed"), or the schedule is lowered already.
        """
        if self._lowered:
            raise ScheduleError(f"cannot lower {self!r} again: take its compute_only() first")
        options = {"defer": defer_receives, "unshard": unshard, "reduce_gradients": reduce_gradients}
        return self.with_ranks(lower_rows(self._ranks, self._stage_to_rank, self._microbatches, **options))

    def slots(self, granularity: Granularity = "stage_microbatch") -> tuple[SlotAssignment, ...]:
        """For each rank the slots of its activations; a slot is used again when it is free.

        Args:
            granularity: "stage_microbatch": each stage and microbatch takes a slot of its own; "microbatch": the stages of a rank share one per
                microbatch.

        Returns:
            One plan for each rank.

        Raises:
            ScheduleError: the life of an activation cannot be told.
        """
        return tuple(rank_slots(self, rank, granularity=granularity) for rank in range(self.num_ranks))

    def to_csv(self, comms: bool | None = None) -> str:
        """The schedule as CSV: one row per rank, one cell per step, blank for idle.

        Args:
            comms: True: lowered, False: compute-only, None: as it is.

        Returns:
            The text.
        """
        schedule: Schedule = self
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
            name: the name in messages.

        Returns:
            The schedule.

        Raises:
            ScheduleError: a cell that is no action, or a schedule that cannot run.
            ArgumentTypeError: `text` is no str.
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

    def _repr_html_(self) -> str:
        return grid_html(repr(self), self._ranks)

    def __repr__(self) -> str:
        form = "lowered" if self._lowered else "compute-only"
        size = f"{self.num_ranks} ranks, {self.num_stages} stages, {self._microbatches} microbatches"
        return f"<Schedule {self._name or 'without name'}: {size}, {form}>"

    def __str__(self) -> str:
        return format_grid(self._ranks)


def _read_cell(cell: str, rank: int, step: int) -> Action | None:
    try:
        return Action.parse(cell)
    except ArgumentError as error:
        raise ScheduleError(f"cannot read rank {rank}, step {step} of a pipeline schedule: {error}", rank=rank, step=step) from error

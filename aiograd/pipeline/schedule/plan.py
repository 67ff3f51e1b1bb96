"""StepPlan: a schedule made ready to be carried out: rows for training and for evaluation, and where the loss is computed."""

from __future__ import annotations

from collections.abc import Sequence

from aiograd.pipeline.schedule.action import Action, ActionKind
from aiograd.pipeline.schedule.schedule import Schedule

_K = ActionKind


class StepPlan:
    """The actions of each rank in a step.

    Args:
        schedule: compute-only or lowered.
        loss_apart: the loss is computed on a rank of its own, behind the last, as if it were one more stage: where the last stage is on another
            worker and the loss function is not.

    Raises:
        ScheduleError: the schedule cannot run.
    """

    __slots__ = ("forward", "training", "evaluation", "stage_to_rank", "microbatches", "loss_apart")

    def __init__(self, schedule: Schedule, loss_apart: bool = False) -> None:
        schedule.validate()
        plain = schedule.compute_only()
        forward = plain.with_ranks([[part for action in row if action for part in action.computations if part.kind is _K.F] for row in plain.ranks])
        #: the schedule of evaluations
        self.forward = forward
        self.evaluation = _rows(forward.lower())
        lowered = schedule
        if loss_apart:
            lowered = with_loss_stage(plain).lower()
        elif not schedule.is_lowered:
            lowered = schedule.lower()
        self.training = () if schedule.is_forward_only else _rows(lowered)
        self.stage_to_rank = lowered.stage_to_rank
        self.microbatches = schedule.num_microbatches
        self.loss_apart = loss_apart


def with_loss_stage(schedule: Schedule) -> Schedule:
    """The schedule with one more stage on one more rank, which turns outputs into their gradients as they come.

    Args:
        schedule: compute-only.
    """
    last = schedule.num_stages - 1
    home = schedule.ranks[schedule.stage_to_rank[last]]
    order = [part.microbatch for action in home if action for part in action.computations if part.kind is _K.F and part.stage == last]
    row: Sequence[Action | None] = [Action(last + 1, kind, microbatch) for microbatch in order for kind in (_K.F, _K.B)]
    return Schedule(
        [*schedule.ranks, row],
        stages=last + 2,
        microbatches=schedule.num_microbatches,
        stage_to_rank=(*schedule.stage_to_rank, schedule.num_ranks),
        name=schedule.name,
    )


def _rows(schedule: Schedule) -> tuple[tuple[Action, ...], ...]:
    return tuple(tuple(action for action in row if action is not None) for row in schedule.ranks)

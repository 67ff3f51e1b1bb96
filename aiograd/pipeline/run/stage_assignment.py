"""StageAssignment: the stages and rows of the ranks in one process, and their form on the way to a worker, which checks it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from aiograd.errors import ArgumentError, ArgumentTypeError, DeviceError
from aiograd.pipeline.schedule.action import Action, ActionKind
from aiograd.pipeline.step.stage import Stage


class ExecutedAction(NamedTuple):
    """An action that was carried out, in seconds of the loop's clock."""

    rank: int
    action: Action
    began: float
    ended: float


class StageAssignment(NamedTuple):
    """The stages of the ranks in one process, and their rows of the schedule."""

    stages: Mapping[int, Stage]
    #: by rank
    training: Mapping[int, Sequence[Action]]
    evaluation: Mapping[int, Sequence[Action]]
    stage_to_rank: tuple[int, ...]
    microbatches: int
    #: stage that ends in the loss, and the one that ends in the results
    loss_stage: int
    last_stage: int
    loss_fn: Callable[..., Any] | None
    scale: float
    #: lost workers are replaced
    recovers: bool
    handlers: Mapping[ActionKind, Callable[[Action], Any]] = {}
    #: takes the actions that are carried out
    events: list[ExecutedAction] | None = None

    def rows(self, trains: bool) -> Mapping[int, Sequence[Action]]:
        """The rows of a step, or of an evaluation, by rank."""
        return self.training if trains else self.evaluation

    def end(self, trains: bool) -> int:
        """The stage that ends in the loss, or in an evaluation in the results."""
        return self.loss_stage if trains else self.last_stage

    def numbered(self, number: int, stages: Mapping[int, Stage]) -> StageAssignment:
        """The assignment of a replica, with ranks that have numbers of their own.

        Args:
            number: of the replica.
            stages: of the replica.
        """
        first = number * (max(self.stage_to_rank) + 1)
        return self._replace(
            stages=stages,
            training={first + rank: row for rank, row in self.training.items()},
            evaluation={first + rank: row for rank, row in self.evaluation.items()},
            stage_to_rank=tuple(first + rank for rank in self.stage_to_rank),
        )

    def to_wire(self) -> dict[str, Any]:
        """As `parse` takes it on another worker, where the modules come with the call."""
        return {
            "stages": {str(index): [stage.where, stage.device, stage.pass_indices] for index, stage in self.stages.items()},
            "training": {str(rank): " ".join(map(str, row)) for rank, row in self.training.items()},
            "evaluation": {str(rank): " ".join(map(str, row)) for rank, row in self.evaluation.items()},
            "stage_to_rank": list(self.stage_to_rank),
            "microbatches": self.microbatches,
            "loss_stage": self.loss_stage,
            "last_stage": self.last_stage,
            "scale": self.scale,
            "recovers": self.recovers,
        }

    @classmethod
    def parse(cls, modules: list[Any], options: dict[str, Any]) -> StageAssignment:
        """The assignment from the request of a pipeline on another worker.

        Raises:
            ArgumentError: the request is malformed.
        """
        try:
            stages = {
                int(index): Stage(module, where=where, device=device, pass_indices=bool(flag))
                for (index, (where, device, flag)), module in zip(options["stages"].items(), modules, strict=True)
            }
            training, evaluation = (
                {int(rank): tuple(map(_action, text.split())) for rank, text in options[mode].items()} for mode in ("training", "evaluation")
            )
            assignment = cls(
                stages=stages,
                training=training,
                evaluation=evaluation,
                stage_to_rank=tuple(map(int, options["stage_to_rank"])),
                microbatches=int(options["microbatches"]),
                loss_stage=int(options["loss_stage"]),
                last_stage=int(options["last_stage"]),
                loss_fn=None,
                scale=float(options["scale"]),
                recovers=bool(options["recovers"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError, DeviceError) as error:
            raise ArgumentError(f"a malformed request for stages of a pipeline: {type(error).__name__}: {error}") from error
        assignment.check()
        return assignment

    def check(self) -> None:
        """Raise unless stages, rows and numbers fit each other."""
        mine = {self.stage_to_rank[index] for index in self.stages if 0 <= index < len(self.stage_to_rank)}
        is_strange = any(not 0 <= index < len(self.stage_to_rank) for index in self.stages)
        if is_strange or not mine >= self.training.keys() | self.evaluation.keys():
            raise ArgumentError("a malformed request for stages of a pipeline: its ranks and stages do not fit each other")
        for action in (action for rows in (self.training, self.evaluation) for row in rows.values() for action in row):
            for part in action.parts or (action,):
                if part.stage not in self.stages or (part.microbatch or 0) >= self.microbatches:
                    raise ArgumentError(f"a malformed request for stages of a pipeline: {action} is about nothing that is here")


def _action(text: str) -> Action:
    action = Action.parse(text)
    if action is None:
        raise ArgumentTypeError("an idle step")
    return action

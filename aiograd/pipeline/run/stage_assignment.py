"""StageAssignment: the stages and rows of the ranks in one process, and their form on the way to a worker, which checks it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from aiograd.coordination.message_form import encode, parse
from aiograd.errors import ArgumentError, ArgumentTypeError, DeviceError
from aiograd.pipeline.run.messages import StageOptions, StagesRequest
from aiograd.pipeline.schedule.action import Action, ActionKind
from aiograd.pipeline.step.links import StageLink, StageLinks, links_of
from aiograd.pipeline.step.stage import Stage

#: fields of a `StageAssignment` that a `StagesRequest` has too
_SENT_AS_THEY_ARE = ("microbatches", "loss_stage", "last_stage", "scale", "recovers", "absorbs")


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
    #: the work for a step is kept while it is not committed, in case it is repeated without a lost worker
    absorbs: bool | None = None
    #: the named values between all stages of the pipeline
    links: StageLinks = StageLinks()
    handlers: Mapping[ActionKind, Callable[[Action], Any]] = {}
    #: takes the actions that are carried out
    events: list[ExecutedAction] | None = None

    def rows(self, trains: bool) -> Mapping[int, Sequence[Action]]:
        """The rows of a step, or of an evaluation, by rank."""
        return self.training if trains else self.evaluation

    def end(self, trains: bool) -> int:
        """The stage that ends in the loss, or in an evaluation in the results."""
        return self.loss_stage if trains else self.last_stage

    def linked(self) -> StageAssignment:
        """The assignment with the links between its stages.

        Raises:
            ArgumentError: see `links_of`.
        """
        return self._replace(links=links_of(self.stages, self.last_stage, self.loss_stage, self.loss_fn is not None))

    def numbered(self, number: int, stages: Mapping[int, Stage]) -> StageAssignment:
        """The assignment of a replica, with ranks that have numbers of their own.

        Args:
            number: of the replica.
            stages: of the replica. They have the links of the assignment, and may leave out `gives` and `takes`.

        Raises:
            ArgumentError: they have other links.
        """
        if any(stage.gives or stage.takes for stage in stages.values()) and self._replace(stages=stages).linked().links != self.links:
            raise ArgumentError(
                "Pipeline: the stages of a replica give and take other values than those of the first one; expected the same `gives` and `takes`"
            )
        first = number * (max(self.stage_to_rank) + 1)
        return self._replace(
            stages=stages,
            training={first + rank: row for rank, row in self.training.items()},
            evaluation={first + rank: row for rank, row in self.evaluation.items()},
            stage_to_rank=tuple(first + rank for rank in self.stage_to_rank),
        )

    def to_wire(self) -> dict[str, Any]:
        """As `parse` takes it on another worker, where the modules come with the call."""
        request = StagesRequest(
            stages={str(index): StageOptions(stage.where, stage.device, stage.pass_indices) for index, stage in self.stages.items()},
            training={str(rank): " ".join(map(str, row)) for rank, row in self.training.items()},
            evaluation={str(rank): " ".join(map(str, row)) for rank, row in self.evaluation.items()},
            stage_to_rank=list(self.stage_to_rank),
            links=[(name, source, to) for name, source, to in self.links.links] or None,
            entries=[stage for stage in self.links.entries if stage in self.stages] or None,
            **{name: getattr(self, name) for name in _SENT_AS_THEY_ARE},
        )
        return encode(request)  # type: ignore[no-any-return]

    @classmethod
    def parse(cls, modules: list[Any], options: Any) -> StageAssignment:
        """The assignment from the request of a pipeline on another worker.

        Args:
            modules: of the stages.
            options: the wire value of a `StagesRequest`.

        Raises:
            ProtocolError: the request is malformed. ArgumentError: its stages, rows and numbers do not fit each other.
        """
        request = parse(StagesRequest, options)
        try:
            assignment = cls(
                stages={
                    int(index): Stage(module, where=stage.where, device=stage.device, pass_indices=stage.pass_indices)  # type: ignore[arg-type]
                    for (index, stage), module in zip(request.stages.items(), modules, strict=True)
                },
                training={int(rank): tuple(map(_action, text.split())) for rank, text in request.training.items()},
                evaluation={int(rank): tuple(map(_action, text.split())) for rank, text in request.evaluation.items()},
                stage_to_rank=tuple(request.stage_to_rank),
                links=StageLinks(tuple(StageLink(*each) for each in request.links or ()), dict.fromkeys(request.entries or (), ())),
                loss_fn=None,
                **{name: getattr(request, name) for name in _SENT_AS_THEY_ARE},
            )
        except (TypeError, ValueError, DeviceError) as error:
            raise ArgumentError(f"a StagesRequest with stages or rows that cannot be made: {type(error).__name__}: {error}") from error
        assignment.check()
        return assignment

    def check(self) -> None:
        """Raise unless stages, rows and numbers fit each other."""
        mine = {self.stage_to_rank[index] for index in self.stages if 0 <= index < len(self.stage_to_rank)}
        is_strange = any(not 0 <= index < len(self.stage_to_rank) for index in self.stages)
        for name, source, destination in self.links.links:
            if not source <= destination < len(self.stage_to_rank):
                count = len(self.stage_to_rank)
                raise ArgumentError(
                    f"a StagesRequest with {name!r} from stage {source} to stage {destination}; expected a later stage, below {count}"
                )
        if is_strange or not mine >= self.training.keys() | self.evaluation.keys():
            ranks, count = sorted(self.training.keys() | self.evaluation.keys()), len(self.stage_to_rank)
            raise ArgumentError(
                f"a StagesRequest for stages {sorted(self.stages)} with rows of ranks {ranks}; expected stages below {count}, and rows of their ranks"
            )
        for action in (action for rows in (self.training, self.evaluation) for row in rows.values() for action in row):
            for part in action.parts or (action,):
                if part.stage not in self.stages or (part.microbatch or 0) >= self.microbatches:
                    raise ArgumentError(
                        f"a StagesRequest with the action {action}; expected stages {sorted(self.stages)} and microbatches below {self.microbatches}"
                    )


def _action(text: str) -> Action:
    action = Action.parse(text)
    if action is None:
        raise ArgumentTypeError("an idle step")
    return action

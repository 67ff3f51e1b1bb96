"""LostRanks: the members of a pipeline in replicas that are lost and whose place nothing fills, and the steps that the others take without them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from aiograd.errors import PipelineError, WorkerLostError
from aiograd.pipeline.run.messages import AbsorbedRows
from aiograd.pipeline.run.remote_stages import RemoteStages
from aiograd.pipeline.run.stage_assignment import StageAssignment
from aiograd.pipeline.schedule.absorption import AbsorptionPlan, OriginAction, absorb
from aiograd.pipeline.schedule.action import Action, ActionKind
from aiograd.pipeline.schedule.schedule import Schedule

_K = ActionKind


class LostRanks:
    """The lost members.

    Args:
        training, evaluation: the schedules of each replica.
    """

    def __init__(self, training: Schedule, evaluation: Schedule) -> None:
        self._schedules = {True: training, False: evaluation}
        self.remotes: list[RemoteStages] = []

    def find(self, worker: str) -> RemoteStages | None:
        """The lost member of a worker, if there is one."""
        return next((each for each in self.remotes if each.owner == worker), None)

    def plan(self, replicas: Sequence[StageAssignment], trains: bool = True, more: Sequence[RemoteStages] = ()) -> AbsorptionPlan:
        """The rows of a step without the lost members.

        Args:
            replicas: the pipeline's.
            trains: with backward.
            more: members that are lost as well.

        Raises:
            PipelineError: all replicas lost a stage.
        """
        number = {id(replica): place for place, replica in enumerate(replicas)}
        lost = set()
        for remote in (*self.remotes, *more):
            first = min(remote.replica.stage_to_rank)
            lost |= {(number[id(remote.replica)], rank - first) for rank in remote.ranks}
        return absorb(self._schedules[trains], len(replicas), lost)

    def lose(self, remote: RemoteStages, replicas: Sequence[StageAssignment], error: WorkerLostError) -> None:
        """Note that a member is lost.

        Raises:
            WorkerLostError: no replica has its stages any more.
        """
        try:
            self.plan(replicas, more=[remote])
        except PipelineError as cause:
            raise WorkerLostError(
                f"a pipeline lost worker {remote.owner} and with it a stage: {cause}. Nothing has changed",
                worker=remote.owner, stage=error.stage, is_gone=error.is_gone,
            ) from error  # fmt: skip
        self.remotes.append(remote)

    def step(self, replicas: Sequence[StageAssignment], trains: bool) -> AbsorbedStep | None:
        """A step without the lost members; None: there are none."""
        return AbsorbedStep(self.plan(replicas, trains), replicas) if self.remotes else None


class AbsorbedStep(NamedTuple):
    """A step in which members do what lost ones had to."""

    plan: AbsorptionPlan
    replicas: Sequence[StageAssignment]

    def rank_of(self, origin: int, stage: int, microbatch: int) -> int:
        """The rank that computes a stage of a microbatch."""
        return self.replicas[self.plan.replica_of(origin, stage, microbatch)].stage_to_rank[stage]

    def adders(self) -> dict[str, int]:
        """By lost stage, numbered through, the rank that adds up its gradients: of the replica before it that has the stage, else of the next one.

        So the places of the replicas whose gradients a rank adds to the sum follow each other.
        """
        schedule = self.plan.schedule
        found = {}
        for origin, stage in self.plan.absorbed:
            living = [each for each in range(self.plan.replicas) if (each, schedule.stage_to_rank[stage]) not in self.plan.lost]
            replica = max((each for each in living if each < origin), default=living[0])
            found[str(origin * schedule.num_stages + stage)] = self.replicas[replica].stage_to_rank[stage]
        return found

    def rows_of(self, remote: RemoteStages, shares: Sequence[tuple[float, int]]) -> AbsorbedRows:
        """The part of a member.

        Args:
            remote: the member.
            shares: of all replicas: factor of losses, and number of the first microbatch.
        """
        schedule = self.plan.schedule
        stages, microbatches = schedule.num_stages, schedule.num_microbatches
        place = next(number for number, replica in enumerate(self.replicas) if replica is remote.replica)
        first = min(remote.replica.stage_to_rank)
        return AbsorbedRows(
            replica=place,
            rows={str(rank): " ".join(map(str, _lowered(self.plan.rows[place, rank - first], stages))) for rank in sorted(remote.ranks)},
            homes={
                str(origin * stages + stage): [self.rank_of(origin, stage, microbatch) for microbatch in range(microbatches)]
                for origin in range(self.plan.replicas)
                for stage in range(stages)
            },
            adders=self.adders(),
            scales=[scale for scale, _ in shares],
            firsts=[number for _, number in shares],
        )


def _lowered(row: Sequence[OriginAction], stages: int) -> list[Action]:
    """A row with stages numbered through over all replicas, and with every transfer, also from a stage of the rank to another one.

    A rank receives a value where it is needed, and sends it where it is made.
    """
    found = []
    for origin, action in row:
        stage, kind, microbatch = origin * stages + action.stage, action.kind, action.microbatch
        is_forward = kind is _K.F
        comes = action.stage > 0 if is_forward else kind is _K.I and action.stage < stages - 1
        goes = action.stage < stages - 1 if is_forward else kind is _K.I and action.stage > 0
        if comes:
            found.append(Action(stage, _K.RECV_F if is_forward else _K.RECV_B, microbatch))
        found.append(Action(stage, kind, microbatch))
        if goes:
            found.append(Action(stage, _K.SEND_F if is_forward else _K.SEND_B, microbatch))
    return found


def placed(parts: Sequence[Any], name: str) -> list[Any] | None:
    """The results of a step after a loss, by microbatch of all replicas, from the parts of its members.

    Args:
        parts: `StageResults`, each with None for the results of others.
        name: the field.
    """
    lists = [values for part in parts if (values := getattr(part, name)) is not None]
    return [next((value for value in column if value is not None), None) for column in zip(*lists, strict=True)] or None

"""LostRanks: the members of a pipeline in replicas that are lost and whose place nothing fills, and the steps that the others take without them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from aiograd.errors import PipelineError, WorkerLostError
from aiograd.pipeline.run.kept_step import known_values
from aiograd.pipeline.run.messages import AbsorbedRows
from aiograd.pipeline.run.remote_stages import RemoteStages
from aiograd.pipeline.run.stage_assignment import StageAssignment
from aiograd.pipeline.schedule.absorption import AbsorptionPlan, OriginAction, absorb
from aiograd.pipeline.schedule.action import Action, ActionKind
from aiograd.pipeline.schedule.schedule import Schedule
from aiograd.pipeline.step.rank import Key

_K = ActionKind


class LostRanks:
    """The lost members.

    Args:
        training, evaluation: the schedules of each replica.
    """

    def __init__(self, training: Schedule, evaluation: Schedule) -> None:
        self._schedules = {True: training, False: evaluation}
        self.remotes: list[RemoteStages] = []
        #: with and without backward, the step that was taken last: making one takes longer than a short step
        self._steps: dict[bool, AbsorbedStep] = {}

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
        if not self.remotes:
            return None
        known = self._steps.get(trains)
        if known is None or not known.fits(replicas, self.remotes):
            known = self._steps[trains] = AbsorbedStep(self.plan(replicas, trains), replicas, self.remotes)
        return known


class AbsorbedStep:
    """A step in which members do what lost ones had to.

    Args:
        plan: its rows.
        replicas: the pipeline's.
        lost: the lost members.
    """

    def __init__(self, plan: AbsorptionPlan, replicas: Sequence[StageAssignment], lost: Sequence[RemoteStages]) -> None:
        self.plan = plan
        self.replicas = list(replicas)
        self._lost = list(lost)
        #: the rows of members, by their ranks
        self._texts: dict[tuple[int, ...], dict[str, str]] = {}

    def fits(self, replicas: Sequence[StageAssignment], lost: Sequence[RemoteStages]) -> bool:
        """True if replicas and lost members are still the same."""
        return _are_same(self.replicas, replicas) and _are_same(self._lost, lost)

    def rank_of(self, origin: int, stage: int, microbatch: int) -> int:
        """The rank that computes a stage of a microbatch."""
        return self.replicas[self.plan.replica_of(origin, stage, microbatch)].stage_to_rank[stage]

    @functools.cached_property
    def homes(self) -> dict[str, list[int]]:
        """By stage, numbered through, the rank that computes each microbatch."""
        stages, microbatches = self.plan.schedule.num_stages, self.plan.schedule.num_microbatches
        return {
            str(origin * stages + stage): [self.rank_of(origin, stage, microbatch) for microbatch in range(microbatches)]
            for origin in range(self.plan.replicas)
            for stage in range(stages)
        }

    @functools.cached_property
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

    def rows_of(self, remote: RemoteStages, shares: Sequence[tuple[float, int]], repeats: int | None, known: set[Key]) -> AbsorbedRows:
        """The part of a member.

        Args:
            remote: the member.
            shares: of all replicas: factor of losses, and number of the first microbatch.
            repeats: where the step is repeated: the number that it had at first.
            known: the values that need not be sent.
        """
        place = next(number for number, replica in enumerate(self.replicas) if replica is remote.replica)
        first, ranks = min(remote.replica.stage_to_rank), tuple(sorted(remote.ranks))
        if ranks not in self._texts:
            rows = {rank: _lowered(self.plan.rows[place, rank - first], self.plan.schedule.num_stages) for rank in ranks}
            self._texts[ranks] = {str(rank): " ".join(map(str, row)) for rank, row in rows.items()}
        return AbsorbedRows(
            replica=place,
            rows=self._texts[ranks],
            homes=self.homes,
            adders=self.adders,
            scales=[scale for scale, _ in shares],
            firsts=[number for _, number in shares],
            repeats=repeats,
            known=known_values(known) if known else None,
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


def _are_same(mine: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(mine) == len(others) and all(one is other for one, other in zip(mine, others, strict=True))


def placed(parts: Sequence[Any], name: str) -> list[Any] | None:
    """The results of a step after a loss, by microbatch of all replicas, from the parts of its members.

    Args:
        parts: `StageResults`, each with None for the results of others.
        name: the field.
    """
    lists = [values for part in parts if (values := getattr(part, name)) is not None]
    return [next((value for value in column if value is not None), None) for column in zip(*lists, strict=True)] or None

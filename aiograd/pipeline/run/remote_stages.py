"""RemoteStages: the ranks of a pipeline that live on one worker, as the coordinating process sees them; and the places of stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from aiograd.errors import ArgumentError
from aiograd.pipeline.run.stage_assignment import StageAssignment
from aiograd.pipeline.step.stage import Stage


class RemoteStages:
    """The ranks of a pipeline that live on one worker."""

    __slots__ = ("owner", "assignment", "replica", "is_new", "ref")

    def __init__(self, owner: str, assignment: StageAssignment, replica: StageAssignment) -> None:
        #: name of the worker
        self.owner = owner
        self.assignment = assignment
        #: the assignment of the whole replica
        self.replica = replica
        #: it does not have the state of the other replicas yet
        self.is_new = True
        #: reference to the `StageMember`
        self.ref: Any = None

    @property
    def ranks(self) -> set[int]:
        """The ranks that live there."""
        return {self.assignment.stage_to_rank[stage] for stage in self.assignment.stages}

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages that live there."""
        return tuple(sorted(self.assignment.stages))

    @property
    def name(self) -> str:
        """Its name in messages, unique within the pipeline."""
        return f"rank {' and '.join(map(str, sorted(self.ranks)))} on worker {self.owner}"


def stages_on(
    replica: StageAssignment, stages: Mapping[int, Stage], owners: Iterable[str | None], among: set[int] | None = None
) -> list[RemoteStages]:
    """The ranks on each of some workers."""
    found: list[RemoteStages] = []
    for owner in dict.fromkeys(owners):
        if owner is not None:
            ranks = {replica.stage_to_rank[index] for index, stage in stages.items() if owner_of(stage) == owner}
            found.append(RemoteStages(owner, part_of(replica, stages, ranks if among is None else ranks & among), replica))
    return found


def part_of(replica: StageAssignment, stages: Mapping[int, Stage], ranks: set[int]) -> StageAssignment:
    """The part of an assignment for some ranks."""
    return replica._replace(
        stages={index: stage for index, stage in stages.items() if replica.stage_to_rank[index] in ranks},
        training={rank: row for rank, row in replica.training.items() if rank in ranks},
        evaluation={rank: row for rank, row in replica.evaluation.items() if rank in ranks},
    )


def owners_of(replica: StageAssignment) -> list[str | None]:
    """Names of the workers of a replica, in the order of its stages; None for this process.

    Raises:
        ArgumentError: the stages of one rank live in different places.
    """
    homes: dict[int, str | None] = {}
    for index, stage in replica.stages.items():
        rank, owner = replica.stage_to_rank[index], owner_of(stage)
        if homes.setdefault(rank, owner) != owner:
            raise ArgumentError(
                f"Pipeline: rank {rank} has stages {place_of(homes[rank])} and {place_of(owner)}; all stages of a rank have to live in one place"
            )
    return list(homes.values())


def check_apart(replicas: Sequence[StageAssignment], remotes: Sequence[RemoteStages]) -> None:
    """Raise unless all replicas are divided in the same way, on workers of their own."""
    doubled = sorted(owner for owner, count in Counter(remote.owner for remote in remotes).items() if count > 1)
    if doubled:
        raise ArgumentError(f"Pipeline: stages of several replicas on {', '.join(doubled)}; a worker takes part in one")
    divisions = [{remote.stages for remote in remotes if remote.replica is replica} for replica in replicas]
    for number, (replica, division) in enumerate(zip(replicas, divisions, strict=True)):
        if sum(map(len, division)) < len(replica.stages):
            raise ArgumentError(f"Pipeline: replica {number} has stages in this process; all stages of replicas have to live on workers")
        if division != divisions[0]:
            raise ArgumentError(
                f"Pipeline: the workers of replica {number} have the stages {sorted(division)}, those of replica 0 {sorted(divisions[0])}; "
                "replicas have to be divided alike"
            )


def owner_of(stage: Stage) -> str | None:
    """Name of the worker that a stage lives on; None for this process."""
    return str(reference(stage).owner) if stage.is_remote else None


def reference(stage: Stage) -> Any:
    """The reference to a stage's module on another worker."""
    return getattr(stage.module, "ref", stage.module)


def place_of(owner: str | None) -> str:
    """The place of an owner's stages, in words."""
    return "in this process" if owner is None else f"on worker {owner}"

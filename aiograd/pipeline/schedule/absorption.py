"""The rows of a pipeline in replicas after a loss: the stages of lost ranks are computed by the same ranks of other replicas.

Note [Dealing]
    The microbatches of a lost stage are dealt round, in their order, to the replicas in which the rank of the stage lives, so that they come to
    each spread over the step. Where several replicas lost a stage, the first microbatches of all of them are dealt before the second ones; where a
    lost rank had several stages, the round goes on from one stage to the next, so that ranks differ by one microbatch at most as well.

Note [Taking over in bubbles]
    The rows are made in the order of time, on a clock on which F, I and W take one tick each and transfers none: in each tick every free rank takes
    a computation whose inputs are there. Backwards are split, since only the I holds up other stages; a W is taken where there is nothing else.
    Four ways are tried, an I or an F first, replicas in ascending or in descending order, and the shortest rows are taken, of equal ones the first.
    In 120 drawn losses of one or two of 4 × 4 ranks (1F1B, 4, 8 and 16 microbatches) they took at most 1 tick longer than the rank with most
    work would take without a wait, 0.5 on average; a single way takes up to 1 to 4 longer.

Note [Room in each rank]
    A rank holds the activations of a microbatch from its F to its W, and no more of them than 1F1B lets it hold (the number of stages from its own
    to the last; fewer where the schedule holds fewer) and two. It takes an F only if, after it, every older microbatch that it has to do can still
    be done there, one after the other, oldest first. So the oldest of all can go on on every rank, and the rows never get stuck: the rule of
    Note [Room for begun microbatches] in `search.greedy`, with the microbatches that have not begun, since microbatches of several replicas do not
    come in order.

Source: Gandhi et al., "ReCycle: Resilient Training of Large DNNs using Pipeline Adaptation", 2024 (arXiv 2405.14009): microbatches of a failed worker
go to its peers, and decoupled backwards let them fit into bubbles.
"""

from __future__ import annotations

import itertools
from bisect import insort
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, TypeAlias

from aiograd.errors import ArgumentError, ArgumentTypeError, PipelineError
from aiograd.pipeline.schedule.action import Action, ActionKind
from aiograd.pipeline.schedule.costs import Costs
from aiograd.pipeline.schedule.dependencies import facts_needed
from aiograd.pipeline.schedule.schedule import Schedule
from aiograd.pipeline.schedule.simulation import action_times, timed
from aiograd.pipeline.schedule.timeline.data import TimelineEvent
from aiograd.pipeline.schedule.timeline.timeline import Timeline

#: replica and rank
Place: TypeAlias = tuple[int, int]
#: the replica that a microbatch belongs to, and a computation on it
OriginAction: TypeAlias = tuple[int, Action]
#: origin, stage, microbatch
Share: TypeAlias = tuple[int, int, int]
#: microbatch and origin: less is older
_Age: TypeAlias = tuple[int, int]

_K = ActionKind
#: activations that a rank may hold beyond those of 1F1B
_MORE: Final = 2


@dataclass(frozen=True, slots=True)
class AbsorptionPlan:
    """The computations of every living rank of a pipeline in replicas in a step after a loss; made by `absorb`. Immutable.

    Attributes:
        schedule: the schedule of each replica before the loss.
        replicas: the number of replicas.
        lost: replica and rank of each lost rank, ascending.
        rows: for each living (replica, rank) its computations in order, each with its origin: the replica whose microbatch it is.
        taken: for each (origin, stage, microbatch) that was taken over the replica that computes it.

    >>> schedule = ag.pipeline.make_schedule("1F1B", ranks=2, microbatches=2)
    >>> plan = ag.pipeline.absorb(schedule, 2, [(0, 1)])
    >>> plan.rows[1, 1]
    ((0, 1F0), (0, 1I0), (1, 1F0), (1, 1I0), (0, 1F1), (0, 1I1), (0, 1W0), (1, 1F1), (1, 1I1), (1, 1W0), (0, 1W1), (1, 1W1))
    """

    schedule: Schedule
    replicas: int
    lost: tuple[Place, ...]
    rows: Mapping[Place, tuple[OriginAction, ...]]
    taken: Mapping[Share, int]

    def replica_of(self, origin: int, stage: int, microbatch: int) -> int:
        """The replica that computes a stage of a microbatch.

        Args:
            origin: the replica that the microbatch belongs to.
            stage: the stage.
            microbatch: its number among those of the origin.

        Returns:
            The replica: the origin, unless it lost the stage.
        """
        return self.taken.get((origin, stage, microbatch), origin)

    @property
    def absorbed(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """For each lost (replica, stage) the replicas that compute it, ascending."""
        found: dict[tuple[int, int], set[int]] = {}
        for (origin, stage, _), replica in self.taken.items():
            found.setdefault((origin, stage), set()).add(replica)
        return {lost: tuple(sorted(replicas)) for lost, replicas in sorted(found.items())}

    def timeline(self, costs: Costs | None = None) -> Timeline:
        """The times at which the computations start and end, with cost, bubble, peak memory and picture; see `simulate`.

        Ranks, stages and microbatches of all replicas are numbered through, replica by replica. A microbatch with a number of another replica is
        one that was taken over. A lost rank has an empty row.

        Args:
            costs: the costs of one microbatch; None: F, I and W of a rank take 1 each, and transfers nothing.

        Returns:
            The timeline.

        Raises:
            ArgumentError: `costs` are given for another number of stages. ArgumentTypeError: something else than Costs.
        """
        if costs is not None and not isinstance(costs, Costs):
            raise ArgumentTypeError(f"the timeline of a plan takes Costs or None, not {type(costs).__name__}")
        costs = Costs(1, 1, 1) if costs is None else costs
        ranks, stages, microbatches = self.schedule.num_ranks, self.schedule.num_stages, self.schedule.num_microbatches
        rows: list[Sequence[Action]] = [
            [_numbered(action, 0, origin * microbatches) for origin, action in self.rows.get((replica, rank), ())]
            for replica in range(self.replicas)
            for rank in range(ranks)
        ]
        events = timed(
            rows,
            lambda part: facts_needed(part, self.schedule.stage_to_rank, False),
            action_times(costs, stages, ranks),
            costs.communication,
        )
        shown = [
            TimelineEvent(event.rank, _numbered(event.action, event.rank // ranks * stages, 0), event.start, event.end) for event in events
        ]
        name = f"{self.schedule.name or 'pipeline'}, {self.replicas} replicas, {len(self.lost)} lost"
        return Timeline(shown, ranks=len(rows), stages=self.replicas * stages, memory=costs, name=name)

    def __repr__(self) -> str:
        lost = ", ".join(f"rank {rank} of replica {replica}" for replica, rank in self.lost) or "nothing"
        return f"<AbsorptionPlan {self.schedule.name or 'without name'}: {self.replicas} replicas, lost: {lost}>"


def absorb(schedule: Schedule, replicas: int, lost: Collection[Place]) -> AbsorptionPlan:
    """The rows of a pipeline in replicas after a loss: other replicas compute what lost ranks had to.

    Each stage of each microbatch is computed as a whole by one rank: its own, or, where that is lost, by the same rank of another replica. The
    microbatches of a lost stage are dealt evenly, and computed where their new ranks would wait for others, as far as that goes; backwards are
    split into I and W for that. The same arguments give the same plan. A replica that neither lost a rank nor takes anything over keeps the order
    of the schedule.

    Over a whole step of 1F1B, with F = I = W and 1 of 4 replicas without a rank, the plan takes 1.05, 1.13 and 1.23 times as long for as many, twice
    as many and four times as many microbatches as stages, whichever of 4 ranks is lost; 4/3 is the limit for ever more of them.

    Args:
        schedule: the schedule of each replica, compute-only or lowered. Stages live on the same ranks in all of them.
        replicas: the number of replicas, at least 1.
        lost: (replica, rank) of each rank that is lost.

    Returns:
        The plan: a row for each rank that lives.

    Raises:
        PipelineError: all replicas lost a stage; it has the stage and the rank.
        ArgumentError: a rank that is not there, or fewer than 1 replica. ScheduleError: the schedule cannot run.
        ArgumentTypeError: values of other types, such as a schedule for each replica.

    >>> schedule = ag.pipeline.make_schedule("1F1B", ranks=4, microbatches=8)
    >>> plan = ag.pipeline.absorb(schedule, 4, [(0, 3)])
    >>> plan.absorbed
    {(0, 3): (1, 2, 3)}
    >>> [plan.replica_of(0, 3, microbatch) for microbatch in range(8)]
    [1, 2, 3, 1, 2, 3, 1, 2]
    >>> plan.timeline().duration / ag.pipeline.simulate(schedule, ag.pipeline.Costs(1, 1, 1)).duration
    1.1212121212121211
    """
    gone = _checked(schedule, replicas, lost)
    plain = schedule.validate().compute_only()
    taken = _dealt(plain, replicas, gone)
    touched = {replica for replica, _ in gone} | set(taken.values())
    kept = {
        (replica, rank): tuple((replica, part) for part in _computations(row))
        for replica in range(replicas)
        if replica not in touched
        for rank, row in enumerate(plain.ranks)
    }
    ways = itertools.product((False, True), (False, True))
    made = min((_Clock(plain, sorted(touched), gone, taken, *way).run() for way in ways), key=lambda found: found[0])[1] if touched else {}
    return AbsorptionPlan(schedule, replicas, tuple(sorted(gone)), MappingProxyType(dict(sorted((kept | made).items()))), MappingProxyType(taken))


def _checked(schedule: Any, replicas: Any, lost: Any) -> set[Place]:
    """The lost ranks.

    Raises:
        ArgumentError, ArgumentTypeError, PipelineError: as for `absorb`.
    """
    if not isinstance(schedule, Schedule):
        raise ArgumentTypeError(
            f"absorb takes the one Schedule of all replicas, not {type(schedule).__name__}: a stage can be taken over only where all replicas have "
            "the same stages on the same ranks"
        )
    if isinstance(replicas, bool) or not isinstance(replicas, int):
        raise ArgumentTypeError(f"absorb takes the number of replicas, an int, not {type(replicas).__name__}")
    if replicas < 1:
        raise ArgumentError(f"absorb needs at least 1 replica, found {replicas}")
    if isinstance(lost, str | Mapping) or not isinstance(lost, Iterable):
        raise ArgumentTypeError(f"absorb takes lost ranks as a collection of (replica, rank), not {type(lost).__name__}")
    gone: set[Place] = set()
    for place in lost:
        if not (isinstance(place, tuple) and len(place) == 2 and all(type(number) is int for number in place)):
            raise ArgumentTypeError(f"a lost rank is a tuple of two ints, (replica, rank), not {place!r}")
        if not (0 <= place[0] < replicas and 0 <= place[1] < schedule.num_ranks):
            raise ArgumentError(
                f"rank {place[1]} of replica {place[0]} cannot be lost: the pipeline has replicas 0 to {replicas - 1} with ranks 0 to "
                f"{schedule.num_ranks - 1} each"
            )
        gone.add(place)
    for stage, rank in enumerate(schedule.stage_to_rank):
        if all((replica, rank) in gone for replica in range(replicas)):
            raise PipelineError(
                f"stage {stage} of the pipeline is lost in all of {replicas} replicas (rank {rank} of each), so nothing is left that could compute "
                "it; restore it from a checkpoint",
                stage=stage, rank=rank,
            )  # fmt: skip
    return gone


def _dealt(schedule: Schedule, replicas: int, gone: set[Place]) -> dict[Share, int]:
    """For each (origin, stage, microbatch) of a lost rank the replica that takes it over; see Note [Dealing]."""
    taken: dict[Share, int] = {}
    for rank in range(schedule.num_ranks):
        origins = [replica for replica in range(replicas) if (replica, rank) in gone]
        takers = itertools.cycle(replica for replica in range(replicas) if (replica, rank) not in gone)
        for share in itertools.product(schedule.stages_of(rank), range(schedule.num_microbatches), origins):
            stage, microbatch, origin = share
            taken[origin, stage, microbatch] = next(takers)
    return taken


def _computations(row: Iterable[Action | None]) -> Iterable[Action]:
    """The computations of a row, one by one, backwards split."""
    for action in row:
        for part in action.computations if action is not None else ():
            if part.kind is _K.B:
                yield Action(part.stage, _K.I, part.microbatch)
                yield Action(part.stage, _K.W, part.microbatch)
            else:
                yield part


def _most_held(schedule: Schedule, rank: int) -> int:
    """The most activations of one stage and microbatch that a rank may hold; see Note [Room in each rank]."""
    held = most = 0
    for part in _computations(schedule.ranks[rank]):
        held += (part.kind is _K.F) - (part.kind is _K.W)
        most = max(most, held)
    return min(most, sum(schedule.num_stages - stage for stage in schedule.stages_of(rank))) + _MORE


def _numbered(action: Action, first_stage: int, first_microbatch: int) -> Action:
    return Action(action.stage + first_stage, action.kind, (action.microbatch or 0) + first_microbatch)


class _Rank:
    """A living rank while rows are made: what it can do by now, and what it holds."""

    __slots__ = ("limit", "descending", "forwards", "inputs", "weights", "row", "held", "ages", "to_begin", "begun")

    def __init__(self, limit: int | None, descending: bool) -> None:
        #: the most that it may hold; None: forwards only, of which nothing is kept
        self.limit = limit
        self.descending = descending
        #: computations with their inputs there, the preferred ones first
        self.forwards: list[tuple[tuple[int, int, int], Share]] = []
        self.inputs: list[tuple[tuple[int, int, int], Share]] = []
        self.weights: list[tuple[tuple[int, int, int], Share]] = []
        self.row: list[OriginAction] = []
        self.held = 0
        #: microbatches that it has to do, oldest first; of each the number of stages to begin, and of those between F and W
        self.ages: list[_Age] = []
        self.to_begin: dict[_Age, int] = {}
        self.begun: dict[_Age, int] = {}

    def expect(self, age: _Age) -> None:
        """It will have to compute one more stage of a microbatch."""
        if age not in self.to_begin:
            self.to_begin[age] = self.begun[age] = 0
            insort(self.ages, age)
        self.to_begin[age] += 1

    def offer(self, kind: ActionKind, share: Share) -> None:
        """The inputs of a computation are there."""
        origin, stage, microbatch = share
        ready = self.forwards if kind is _K.F else self.inputs if kind is _K.I else self.weights
        insort(ready, ((microbatch, -origin if self.descending else origin, -stage), share))

    def take(self, forwards_first: bool) -> tuple[ActionKind, Share] | None:
        """Takes the preferred one of what it can do; None: it has to wait."""
        forward = next((entry for entry in self.forwards if self.may_begin(entry[1])), None) if forwards_first or not self.inputs else None
        if forward is not None:
            self.forwards.remove(forward)
            return self.did(_K.F, forward[1])
        for kind, ready in ((_K.I, self.inputs), (_K.W, self.weights)):
            if ready:
                return self.did(kind, ready.pop(0)[1])
        return None

    def did(self, kind: ActionKind, share: Share) -> tuple[ActionKind, Share]:
        origin, stage, microbatch = share
        age = microbatch, origin
        change = 0 if self.limit is None else (kind is _K.F) - (kind is _K.W)
        self.held += change
        self.begun[age] += change
        self.to_begin[age] -= kind is _K.F
        if not self.to_begin[age] and not self.begun[age]:
            self.ages.remove(age)
        self.row.append((origin, Action(stage, kind, microbatch)))
        return kind, share

    def may_begin(self, share: Share) -> bool:
        """True if there is room for one more F; see Note [Room in each rank]."""
        if self.limit is None:
            return True
        room = self.limit - self.held - 1
        for age in self.ages:
            if room < 0 or age >= (share[2], share[0]):
                break
            if self.to_begin[age] > room:
                return False
            room += self.begun[age]
        return room >= 0


class _Clock:
    """Makes rows tick by tick, in one way; see Note [Taking over in bubbles]."""

    def __init__(
        self, schedule: Schedule, replicas: Sequence[int], gone: set[Place], taken: Mapping[Share, int], forwards_first: bool, descending: bool
    ) -> None:
        self.schedule = schedule
        self.taken = taken
        self.forwards_first = forwards_first
        self.trains = not schedule.is_forward_only
        limits = [_most_held(schedule, rank) if self.trains else None for rank in range(schedule.num_ranks)]
        self.ranks = {
            (replica, rank): _Rank(limit, descending) for replica in replicas for rank, limit in enumerate(limits) if (replica, rank) not in gone
        }
        for origin, stage, microbatch in itertools.product(replicas, range(schedule.num_stages), range(schedule.num_microbatches)):
            share = origin, stage, microbatch
            self.rank_of(share).expect((microbatch, origin))
            if stage == 0:
                self.rank_of(share).offer(_K.F, share)

    def rank_of(self, share: Share) -> _Rank:
        """The rank that computes a stage of a microbatch."""
        return self.ranks[self.taken.get(share, share[0]), self.schedule.stage_to_rank[share[1]]]

    def run(self) -> tuple[int, dict[Place, tuple[OriginAction, ...]]]:
        """The number of ticks, and the rows."""
        ticks = 0
        while any(rank.ages for rank in self.ranks.values()):
            done = [rank.take(self.forwards_first) for rank in self.ranks.values()]
            for found in done:
                if found is not None:
                    self.release(*found)
            ticks += 1
        return ticks, {place: tuple(rank.row) for place, rank in self.ranks.items()}

    def release(self, kind: ActionKind, share: Share) -> None:
        """Offers what has waited for a computation."""
        origin, stage, microbatch = share
        if kind is _K.F and stage + 1 < self.schedule.num_stages:
            self.offer(_K.F, (origin, stage + 1, microbatch))
        elif kind is _K.F and self.trains:
            self.offer(_K.I, share)
        elif kind is _K.I:
            self.offer(_K.W, share)
            if stage > 0:
                self.offer(_K.I, (origin, stage - 1, microbatch))

    def offer(self, kind: ActionKind, share: Share) -> None:
        self.rank_of(share).offer(kind, share)

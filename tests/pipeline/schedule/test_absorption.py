"""Plans after a loss, carried out by a machine of the tests; the times of some against published bounds and against the best that there is."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

import aiograd as ag
from aiograd.errors import ArgumentError, ArgumentTypeError, PipelineError, ScheduleError
from aiograd.pipeline import Action, ActionKind, Costs, Schedule, absorb, make_schedule, simulate
from aiograd.pipeline.schedule.absorption import AbsorptionPlan
from tests.pipeline.schedule.rows import named_schedules, row, schedule, written
from tests.sweeps import swept

K = ActionKind
ONE = Costs(1, 1, 1)
Place = tuple[int, int]


def losses(replicas: int, ranks: int, most: int) -> Iterator[tuple[Place, ...]]:
    """Every loss of so many ranks that leaves each stage somewhere."""
    places = list(itertools.product(range(replicas), range(ranks)))
    for count in range(1, most + 1):
        for lost in itertools.combinations(places, count):
            if Counter(rank for _, rank in lost).most_common(1)[0][1] < replicas:
                yield lost


def carried_out(plan: AbsorptionPlan, trains: bool = True) -> dict[Place, int]:
    """Carries a plan out, each rank as far as it gets, in turn, and checks all that a plan promises but the room.

    Returns:
        For each rank the most activations that it held from F to W.
    """
    sch, done, heads = plan.schedule, {}, dict.fromkeys(plan.rows, 0)
    held, most = Counter(), Counter()
    moved = True
    while moved:
        moved = False
        for place, actions in plan.rows.items():
            while heads[place] < len(actions):
                origin, action = actions[heads[place]]
                kind, stage, microbatch = action.kind, action.stage, action.microbatch
                if kind is K.F:
                    needs = [(K.F, origin, stage - 1, microbatch)] if stage else []
                elif kind is K.I:
                    needs = [(K.F, origin, stage, microbatch)] + [(K.I, origin, stage + 1, microbatch)] * (stage + 1 < sch.num_stages)
                else:
                    assert kind is K.W, "computations only, backwards split"
                    needs = [(K.I, origin, stage, microbatch)]
                if not all(need in done for need in needs):
                    break
                assert (kind, origin, stage, microbatch) not in done, "nothing is done twice"
                assert sch.stage_to_rank[stage] == place[1], "only a peer has the stage's weights"
                done[kind, origin, stage, microbatch] = place
                held[place] += kind is K.F
                most[place] = max(most[place], held[place])
                held[place] -= kind is K.W
                heads[place] += 1
                moved = True
    assert all(heads[place] == len(actions) for place, actions in plan.rows.items()), "the ranks wait for each other forever"
    shares = list(itertools.product(range(plan.replicas), range(sch.num_stages), range(sch.num_microbatches)))
    kinds = (K.F, K.I, K.W) if trains else (K.F,)
    assert done.keys() == {(kind, *share) for kind in kinds for share in shares}, "everything once"
    for share in shares:
        (place,) = {done[(kind, *share)] for kind in kinds}  # whole, on one rank
        assert place not in plan.lost
        assert place[0] == plan.replica_of(*share)
        assert (share[0], sch.stage_to_rank[share[1]]) in plan.lost or place[0] == share[0], "nothing else moves"
    for stage, rank in enumerate(sch.stage_to_rank):
        counts = [sum(done[K.F, origin, stage, m] == place for origin in range(plan.replicas) for m in range(sch.num_microbatches))
                  for place in plan.rows if place[1] == rank]  # fmt: skip
        assert max(counts) - min(counts) <= 1, f"shares of stage {stage}"
    return dict(most)


@pytest.mark.parametrize("replicas", swept([3, 2, 4]))
def test_every_loss_of_up_to_three_ranks(replicas):
    sch = make_schedule("1F1B", 3, 4)
    found = 0
    for lost in losses(replicas, 3, 3):
        plan = absorb(sch, replicas, lost)
        assert set(plan.rows) == set(itertools.product(range(replicas), range(3))) - set(lost)
        for (_, rank), most in carried_out(plan).items():
            assert most <= 3 - rank + 2
        found += 1
    assert found == {2: 6 + 12 + 8, 3: 9 + 36 + 81, 4: 12 + 66 + 220}[replicas]


@given(sch=named_schedules(ranks=4, microbatches=9, chunks=3), replicas=st.integers(2, 4), data=st.data())
def test_any_schedule_and_any_loss(sch, replicas, data):
    """Ranks with several stages in loops and in a V, overlaps, more microbatches held and fewer."""
    places = list(itertools.product(range(replicas), range(sch.num_ranks)))
    lost = data.draw(
        st.sets(st.sampled_from(places), max_size=3).filter(lambda lost: max(Counter(rank for _, rank in lost).values(), default=0) < replicas)
    )
    plan = absorb(sch, replicas, lost)
    most = carried_out(plan, not sch.is_forward_only)
    assert set(plan.rows) == set(places) - lost
    if not sch.is_forward_only:
        for (_, rank), held in most.items():
            assert held <= sch.slots()[rank].num_slots + 2
    assert absorb(sch.lower(), replicas, sorted(lost, reverse=True)).rows == plan.rows
    counts = {place: sum(action.kind is K.F for _, action in actions) for place, actions in plan.rows.items()}
    for rank in range(sch.num_ranks):
        of_rank = [count for place, count in counts.items() if place[1] == rank]
        assert max(of_rank) - min(of_rank) <= 1, "ranks with several stages take over no more than others"


@pytest.mark.parametrize(("microbatches", "most", "least"), [(4, 1.10, 22 / 21), (8, 1.15, 37 / 33), (16, 1.25, 70 / 57)])
def test_one_of_four_replicas_without_a_rank(microbatches, most, least):
    """Over a whole step of 1F1B. The last stage takes longest: 3 ticks until it begins, three computations for each of 4/3 of the microbatches, and
    its last I, before which at most three W can be put off, goes back through all stages."""
    sch = make_schedule("1F1B", 4, microbatches)
    whole = simulate(sch, ONE).duration
    times = [absorb(sch, 4, [(0, rank)]).timeline().duration / whole for rank in range(4)]
    assert max(times) == pytest.approx(least)
    assert max(times) <= most
    assert times == [absorb(sch, 4, [(3, rank)]).timeline().duration / whole for rank in range(4)], "whichever replica it is"


def can_be_done(plan: AbsorptionPlan, ticks: float) -> bool:
    """True if the ranks can do what the plan gives them, in the same room, in so many ticks. Tries all orders, but none with too much left.

    A state has for each microbatch the number of F and of I that are done, and the set of stages whose W is. Microbatches of equal homes are alike.
    """
    stages = plan.schedule.num_stages
    homes = sorted(
        tuple(plan.replica_of(origin, stage, microbatch) for stage in range(stages))
        for origin in range(plan.replicas) for microbatch in range(plan.schedule.num_microbatches)
    )  # fmt: skip
    groups = [len(list(group)) for _, group in itertools.groupby(homes)]
    starts = [0, *itertools.accumulate(groups)][:-1]

    def sorted_in_groups(state: Iterable[tuple[int, int, int]]) -> tuple[tuple[int, int, int], ...]:
        state = list(state)
        return tuple(each for start, count in zip(starts, groups, strict=True) for each in sorted(state[start : start + count]))

    def choices(state: tuple[tuple[int, int, int], ...], replica: int, stage: int) -> list[tuple[int, tuple[int, int, int]] | None]:
        """What a rank can do next, each with its change; None: it waits, perhaps to leave room."""
        mine = [nr for nr, home in enumerate(homes) if home[stage] == replica]
        held = sum(state[nr][0] > stage and not state[nr][2] >> stage & 1 for nr in mine)
        has_room = held < min(plan.schedule.num_microbatches, stages - stage) + 2
        found: dict[object, tuple[int, tuple[int, int, int]]] = {}
        must_wait = True
        for nr in mine:
            forwards, inputs, weights = state[nr]
            if forwards == stage and has_room:
                found.setdefault((homes[nr], state[nr], K.F), (nr, (1, 0, 0)))
            if forwards == stages and inputs == stages - 1 - stage:
                found.setdefault((homes[nr], state[nr], K.I), (nr, (0, 1, 0)))
                must_wait = False
            if inputs > stages - 1 - stage and not weights >> stage & 1:
                found.setdefault((homes[nr], state[nr], K.W), (nr, (0, 0, 1 << stage)))
                must_wait = False
        return [*found.values(), *([None] if must_wait else [])]  # an I or W takes no room, so to wait instead is never better

    def work(state: tuple[tuple[int, int, int], ...], replica: int, stage: int) -> int:
        return sum(
            (forwards <= stage) + (inputs < stages - stage) + (not weights >> stage & 1)
            for (forwards, inputs, weights), home in zip(state, homes, strict=True) if home[stage] == replica
        )  # fmt: skip

    ranks = sorted({(home[stage], stage) for home in homes for stage in range(stages)})
    goal = ((stages, stages, 2**stages - 1),) * len(homes)
    now = {((0, 0, 0),) * len(homes)}
    for left in range(int(ticks) - 1, -1, -1):
        following = set()
        for state in now:
            for chosen in itertools.product(*(choices(state, *rank) for rank in ranks)):
                changed = list(state)
                for nr, change in filter(None, chosen):
                    changed[nr] = tuple(map(sum, zip(changed[nr], change, strict=True)))
                following.add(sorted_in_groups(changed))
        now = {state for state in following if all(work(state, *rank) <= left for rank in ranks)}
    return goal in now


@pytest.mark.parametrize(
    ("replicas", "microbatches", "lost"),
    swept([*((2, microbatches, lost) for microbatches in (2, 3) for lost in losses(2, 2, 2) if lost[0][0] == 0),
           (3, 2, [(0, 0), (0, 1)]), (3, 2, [(0, 0), (1, 0)]), (3, 2, [(0, 1), (2, 1)]), (3, 2, [(0, 0), (2, 1)])], keep=7),
)  # fmt: skip
def test_the_best_order_of_the_smallest(replicas, microbatches, lost):
    plan = absorb(make_schedule("1F1B", 2, microbatches), replicas, lost)
    assert can_be_done(plan, plan.timeline().duration)
    assert not can_be_done(plan, plan.timeline().duration - 1)


def test_near_the_bound_of_the_rank_with_most_work():
    """Which the note gives figures for: no rank with work ends sooner than it begins at its first stage, with no wait."""
    draw = random.Random(0)
    beyond = []
    for _ in range(40):
        sch = make_schedule("1F1B", 4, draw.choice((4, 8, 16)))
        lost = draw.choice(list(losses(4, 4, 2)))
        plan = absorb(sch, 4, lost)
        bound = max(len(actions) + min(action.stage for _, action in actions) for actions in plan.rows.values())
        beyond.append(plan.timeline().duration - bound)
    assert min(beyond) >= 0
    assert sum(beyond) / len(beyond) <= 1.0
    assert max(beyond) <= 3


def test_replicas_that_have_nothing_to_do_with_a_loss_keep_their_order():
    sch = make_schedule("1F1B", 2, 2)
    plan = absorb(sch, 4, [(0, 1)])  # two microbatches: replicas 1 and 2 take one each
    assert plan.absorbed == {(0, 1): (1, 2)}
    assert [action for _, action in plan.rows[3, 0]] == row("0F0 0F1 0I0 0W0 0I1 0W1")
    whole = absorb(sch, 2, ())
    assert (whole.absorbed, whole.taken, whole.lost) == ({}, {}, ())
    assert {place: written([[action for _, action in actions]]) for place, actions in whole.rows.items()} == {
        (replica, rank): written([row(text)])
        for replica in (0, 1) for rank, text in enumerate(("0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1W0 1F1 1I1 1W1"))
    }  # fmt: skip


def test_several_stages_of_a_rank_are_dealt_in_one_round():
    plan = absorb(make_schedule("ZBV", 2, 5, 2), 3, [(1, 0)])
    assert plan.absorbed == {(1, 0): (0, 2), (1, 3): (0, 2)}
    assert Counter(plan.taken.values()) == {0: 5, 2: 5}
    assert [plan.replica_of(1, 0, m) for m in range(5)] == [0, 2, 0, 2, 0]
    assert [plan.replica_of(1, 3, m) for m in range(5)] == [2, 0, 2, 0, 2]
    assert [plan.replica_of(1, 1, m) for m in range(5)] == [1] * 5


def test_the_first_microbatches_of_all_who_lost_a_stage_come_first():
    plan = absorb(make_schedule("1F1B", 2, 3), 3, [(0, 1), (2, 1)])
    carried_out(plan)
    first = [origin for origin, action in plan.rows[1, 1] if action.microbatch == 0 and action.kind is K.F]
    last = [origin for origin, action in plan.rows[1, 1] if action.microbatch == 2 and action.kind is K.F]
    assert sorted(first) == sorted(last) == [0, 1, 2]
    forwards = [action.microbatch for _, action in plan.rows[1, 1] if action.kind is K.F]
    assert forwards == sorted(forwards)


def test_forwards_only():
    plan = absorb(make_schedule("ForwardOnly", 3, 4), 2, [(0, 1)])
    assert {action.kind for actions in plan.rows.values() for _, action in actions} == {K.F}
    carried_out(plan, trains=False)
    assert plan.timeline().duration == 2 * 4 + 2  # one tick until stage 1 begins, eight microbatches, one until stage 2 is done


def test_the_timeline_of_a_plan():
    plan = absorb(make_schedule("1F1B", 2, 3), 2, [(1, 1)])
    timeline = plan.timeline()
    assert (timeline.ranks, timeline.stage_to_rank) == (4, (0, 1, 2, -1))
    assert {(event.rank, event.action) for event in timeline.events if event.rank == 1} == {
        (1, Action(1, action.kind, 3 * origin + action.microbatch)) for origin, action in plan.rows[0, 1]
    }
    assert timeline.busy == (9, 18, 9, 0)
    assert timeline.peak_activations[1] <= 3
    svg = timeline.svg()
    assert svg.count("<g><title>rank 1, ") == 18
    assert "1F1B, 2 replicas, 1 lost: 4 ranks" in svg
    slower = plan.timeline(Costs((1, 2), 1, 1, communication=0.5))
    assert slower.duration > timeline.duration
    free = plan.timeline(Costs(1, 1, 1))
    assert free.events == timeline.events
    with pytest.raises(ArgumentTypeError, match="takes Costs or None, not int"):
        plan.timeline(3)
    with pytest.raises(ArgumentError, match="has times of 3 stages, and the pipeline has 2"):
        plan.timeline(Costs((1, 2, 3), 1, 1))
    assert repr(plan) == "<AbsorptionPlan 1F1B: 2 replicas, lost: rank 1 of replica 1>"


def test_a_plan_cannot_be_changed():
    plan = absorb(make_schedule("1F1B", 2, 2), 2, [(0, 0)])
    with pytest.raises(TypeError):
        plan.rows[0, 0] = ()
    with pytest.raises(AttributeError):
        plan.lost = ()
    assert plan == absorb(make_schedule("1F1B", 2, 2), 2, {(0, 0)})
    assert plan == absorb(make_schedule("1F1B", 2, 2), 2, [(0, 0), (0, 0)])


@pytest.mark.parametrize(
    ("replicas", "lost", "error", "message"),
    [
        (2, [(2, 0)], ArgumentError, "rank 0 of replica 2 cannot be lost: the pipeline has replicas 0 to 1 with ranks 0 to 2 each"),
        (2, [(0, 3)], ArgumentError, "rank 3 of replica 0 cannot be lost"),
        (2, [(-1, 0)], ArgumentError, "rank 0 of replica -1 cannot be lost"),
        (0, [], ArgumentError, "at least 1 replica, found 0"),
        (2.0, [], ArgumentTypeError, "the number of replicas, an int, not float"),
        (True, [], ArgumentTypeError, "the number of replicas, an int, not bool"),
        (2, [0], ArgumentTypeError, r"a tuple of two ints, \(replica, rank\), not 0"),
        (2, [(0, 0, 0)], ArgumentTypeError, "a tuple of two ints"),
        (2, [(0, True)], ArgumentTypeError, "a tuple of two ints"),
        (2, "00", ArgumentTypeError, "as a collection of .* not str"),
        (2, {(0, 0): 1}, ArgumentTypeError, "as a collection of .* not "),
        (2, None, ArgumentTypeError, "as a collection of .* not NoneType"),
    ],
)
def test_bad_input(replicas, lost, error, message):
    with pytest.raises(error, match=message):
        absorb(make_schedule("1F1B", 3, 3), replicas, lost)


def test_a_stage_that_is_lost_everywhere():
    with pytest.raises(PipelineError, match=r"stage 1 of the pipeline is lost in all of 3 replicas \(rank 1 of each\)") as caught:
        absorb(make_schedule("1F1B", 2, 2), 3, [(0, 1), (1, 1), (2, 1), (0, 0)])
    assert (caught.value.stage, caught.value.rank) == (1, 1)
    with pytest.raises(PipelineError, match="stage 0 of the pipeline is lost in all of 1 replicas"):
        absorb(make_schedule("1F1B", 2, 2), 1, [(0, 0)])


def test_schedules_that_cannot_be_absorbed():
    one = make_schedule("1F1B", 2, 2)
    with pytest.raises(ArgumentTypeError, match="the one Schedule of all replicas, not list: .* the same stages on the same ranks"):
        absorb([one, make_schedule("ZBV", 2, 4, 2)], 2, [(0, 0)])
    with pytest.raises(ScheduleError, match="wait for each other forever"):
        absorb(schedule("0F0 0B0 0F1 0B1 / 1F0 1F1 1B0 1B1"), 2, [(0, 0)])


def test_it_is_public():
    assert ag.pipeline.absorb is absorb
    assert isinstance(absorb(Schedule([row("0F0 0B0")]), 2, [(0, 0)]), ag.pipeline.AbsorptionPlan)

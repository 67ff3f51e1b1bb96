"""Every state with every event, from the tables; and the numbers that go with them: rounds, leases, promises, and who is told again."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest

from aiograd.errors import TransactionError
from aiograd.transaction import (
    AbortDecided,
    Acknowledged,
    Applied,
    Apply,
    ApplyFailed,
    Ask,
    ClearDoubt,
    Collect,
    CommitDecided,
    Coordinator,
    Drop,
    Failed,
    Heard,
    History,
    MarkInDoubt,
    Outcome,
    OutcomeReply,
    OwnerClosed,
    Participant,
    ParticipantsJoined,
    ParticipantsLeft,
    PeerLost,
    Prepared,
    Settle,
    Tell,
    TellFailed,
    Tick,
    TransactionEvent,
    TransactionState,
    Trouble,
    Unanswered,
)
from aiograd.transaction.events import AllPrepared, Lapsed, LeaseEnded
from aiograd.transaction.states import COORDINATOR_OUTCOMES, COORDINATOR_TRANSITIONS, LISTENER, OUTCOMES, REPLIES, TRANSITIONS, TransitionRule

EVENTS: Mapping[type[TransactionEvent], TransactionEvent] = {
    type(event): event
    for event in (
        Prepared(7.0), Failed(), Heard(), PeerLost(), Tick(), OutcomeReply("x", Outcome.PREPARED), Unanswered("x"), LeaseEnded(), CommitDecided(),
        AbortDecided(), Applied(), ApplyFailed(), OwnerClosed(),
    )
}  # fmt: skip
TO_COORDINATOR: Mapping[type[TransactionEvent], TransactionEvent] = {
    type(event): event
    for event in (
        ParticipantsJoined(("x",)), ParticipantsLeft(("x",)), Prepared(7.0, "x"), Collect(), AllPrepared(), Lapsed(), Failed(), PeerLost(),
        Applied(), ApplyFailed(), Acknowledged("x"), TellFailed("x", Trouble.LOST), Settle(),
    )
}  # fmt: skip


def participant(state: TransactionState, **options: Any) -> Participant:
    made = Participant("c", lease=10.0, pause=1.0, **options)
    made.others = ("x", "y")
    made.state = state
    if state is TransactionState.UNCERTAIN:
        made.asked = frozenset("c")
    return made


def coordinator(state: TransactionState) -> Coordinator:
    made = Coordinator("c", pause=1.0)
    made.voters |= {"x", "y"}
    made.state = state
    if state in (TransactionState.COMMITTED, TransactionState.ABORTED):
        made.unacknowledged = frozenset("xy")
    return made


def everything(machine: Any) -> dict[str, Any]:
    return {name: getattr(machine, name) for name in type(machine).__slots__}


def test_the_tables_say_something_of_everything() -> None:
    assert TRANSITIONS.keys() == OUTCOMES.keys() == set(TransactionState)
    assert all(row.keys() == EVENTS.keys() for row in TRANSITIONS.values())
    assert COORDINATOR_TRANSITIONS.keys() == COORDINATOR_OUTCOMES.keys()
    assert all(row.keys() == TO_COORDINATOR.keys() for row in COORDINATOR_TRANSITIONS.values())
    assert REPLIES.keys() == {(outcome, is_his) for outcome in Outcome for is_his in (True, False)}
    assert OUTCOMES.keys() >= {state for state, _ in LISTENER}


#: what a participant is to do when it comes from one state to another; else nothing, except to ask
DOES = {
    (TransactionState.PREPARED, TransactionState.COMMITTING): [Apply()],
    (TransactionState.UNCERTAIN, TransactionState.COMMITTING): [Apply()],
    (TransactionState.ACTIVE, TransactionState.ABORTED): [Drop()],
    (TransactionState.PREPARED, TransactionState.ABORTED): [Drop()],
    (TransactionState.UNCERTAIN, TransactionState.ABORTED): [Drop()],
    (TransactionState.PREPARED, TransactionState.IN_DOUBT): [MarkInDoubt(), Drop()],
    (TransactionState.UNCERTAIN, TransactionState.IN_DOUBT): [MarkInDoubt(), Drop()],
    (TransactionState.IN_DOUBT, TransactionState.ABORTED): [ClearDoubt()],
    (TransactionState.PREPARED, TransactionState.UNCERTAIN): [Ask(("c",))],
}


@pytest.mark.parametrize("kind", EVENTS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("state", TransactionState)
def test_a_participant(state: TransactionState, kind: type[TransactionEvent]) -> None:
    then = TRANSITIONS[state][kind]
    machine = participant(state)
    before = everything(machine)
    if then is TransitionRule.REFUSED:
        with pytest.raises(TransactionError, match=rf"^{kind.__name__} cannot happen to a participant that is {state}$"):
            machine.handle(EVENTS[kind], 1.0)
        assert everything(machine) == before
    elif then in (TransitionRule.NOTHING, TransitionRule.REPLY):  # x has answered that it is prepared, which says nothing
        assert machine.handle(EVENTS[kind], 1.0) == [] and everything(machine) == before
    else:
        assert machine.handle(EVENTS[kind], 1.0) == DOES.get((state, then), []) and machine.state is then


@pytest.mark.parametrize("kind", TO_COORDINATOR, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("state", COORDINATOR_TRANSITIONS)
def test_a_coordinator(state: TransactionState, kind: type[TransactionEvent]) -> None:
    then = COORDINATOR_TRANSITIONS[state][kind]
    machine = coordinator(state)
    before = everything(machine)
    if then is TransitionRule.REFUSED:
        with pytest.raises(TransactionError, match=rf"^{kind.__name__} cannot happen to a coordinator that is {state}$"):
            machine.handle(TO_COORDINATOR[kind], 1.0)
        assert everything(machine) == before
    elif then is TransitionRule.NOTHING:
        assert machine.handle(TO_COORDINATOR[kind], 1.0) == [] and everything(machine) == before
    else:
        commands = machine.handle(TO_COORDINATOR[kind], 1.0)
        assert machine.state is then
        if (state, then) == (TransactionState.ACTIVE, TransactionState.COMMITTING):
            assert commands == [Apply()]
        elif state is not then:
            tell = Tell(("x", "y"), Outcome.COMMITTED if then is TransactionState.COMMITTED else Outcome.ABORTED)
            assert commands == ([tell] if then is TransactionState.COMMITTED else [Drop(), tell]) and machine.unacknowledged == {"x", "y"}


# ---------------------------------------------------------------- a participant asks


def test_the_coordinator_is_asked_first_then_the_others_and_again_after_a_pause() -> None:
    machine = participant(TransactionState.ACTIVE)
    assert machine.handle(Prepared(5.0), 1.0) == [] and machine.due == 5.0
    assert machine.handle(Tick(), 5.0) == [Ask(("c",))] and machine.due is None
    assert machine.handle(Tick(), 5.0) == [], "a round is under way"
    assert machine.handle(Unanswered("x"), 5.5) == [] and machine.handle(Unanswered("c"), 6.0) == [Ask(("x", "y"))]
    assert machine.handle(OutcomeReply("x", Outcome.PREPARED), 6.5) == [] and machine.asked == {"y"}
    assert machine.handle(OutcomeReply("y", Outcome.UNKNOWN), 6.5) == [] and machine.due == 7.5
    assert machine.handle(Tick(), 7.5) == [Ask(("c",))]


def test_one_that_cannot_ask_its_coordinator_asks_the_others_and_one_that_knows_nobody_waits() -> None:
    machine = participant(TransactionState.PREPARED)
    machine.coordinator = ""
    assert machine.handle(PeerLost(), 0.0) == [Ask(("x", "y"))]
    alone = participant(TransactionState.PREPARED)
    alone.coordinator, alone.others = "", ()
    assert alone.handle(Tick(), 0.0) == [] and alone.due == 1.0 and alone.state is TransactionState.UNCERTAIN
    assert alone.handle(Tick(), 20.0) == [] and alone.handle(Tick(), 21.0) == [MarkInDoubt(), Drop()]


@pytest.mark.parametrize("outcome", Outcome)
@pytest.mark.parametrize("peer", ["c", "x"])
def test_what_an_answer_means(peer: str, outcome: Outcome) -> None:
    machine = participant(TransactionState.UNCERTAIN)
    machine.asked = frozenset({peer, "y"})
    commands = machine.handle(OutcomeReply(peer, outcome), 0.0)
    if outcome is Outcome.COMMITTED:
        assert commands == [Apply()]
    elif outcome is Outcome.ABORTED or (outcome, peer) == (Outcome.UNKNOWN, "c"):
        assert commands == [Drop()]
    elif outcome is Outcome.UNDECIDED or peer == "c":
        assert commands == [] and machine.state is TransactionState.PREPARED and machine.due == 1.0
    else:
        assert commands == [] and machine.asked == {"y"}


def test_a_lease_ends_when_nobody_can_tell_for_all_of_it_and_for_some_rounds() -> None:
    def silent(machine: Participant, now: float) -> list[Any]:
        machine.handle(Tick(), now)
        return [command for peer in "cxy" for command in machine.handle(Unanswered(peer), now) if not isinstance(command, Ask)]

    machine = participant(TransactionState.PREPARED)
    assert silent(machine, 5.0) == [] == silent(machine, 10.0) == silent(machine, 14.9)
    assert silent(machine, 15.0) == [MarkInDoubt(), Drop()] and machine.state is TransactionState.IN_DOUBT
    frozen = participant(TransactionState.PREPARED)
    assert silent(frozen, 5.0) == [] == silent(frozen, 50.0), "it has not asked often enough"
    assert silent(frozen, 51.0) == [MarkInDoubt(), Drop()]
    hears = participant(TransactionState.PREPARED)
    assert silent(hears, 0.0) == silent(hears, 9.0) == hears.handle(Heard(), 9.5) == []
    assert silent(hears, 10.5) == silent(hears, 11.0) == silent(hears, 12.0) == silent(hears, 20.0) == []
    assert silent(hears, 20.5) == [MarkInDoubt(), Drop()]


def test_one_that_is_active_lasts_as_long_as_it_hears_something() -> None:
    machine = participant(TransactionState.ACTIVE, due=10.0)
    assert machine.handle(Heard(), 5.0) == [] and machine.due == 15.0
    assert machine.handle(Tick(), 15.0) == [Drop()] and machine.due is None
    endless = participant(TransactionState.ACTIVE)
    assert endless.handle(Heard(), 5.0) == [] and endless.due is None


def test_one_that_has_nothing_to_apply_leaves_no_doubt() -> None:
    machine = participant(TransactionState.PREPARED, is_read_only=True)
    assert not machine.is_doubtful and participant(TransactionState.PREPARED).is_doubtful
    assert machine.handle(OwnerClosed(), 0.0) == [Drop()]
    assert machine.state is TransactionState.IN_DOUBT and machine.outcome is Outcome.UNKNOWN, "what was decided it does not know all the same"


@pytest.mark.parametrize("state", TransactionState)
def test_one_that_does_not_vote_says_nothing_but_that_it_was_told(state: TransactionState) -> None:
    machine = participant(state, votes=False)
    assert machine.outcome is (Outcome.COMMITTED if state in (TransactionState.COMMITTING, TransactionState.COMMITTED) else Outcome.UNKNOWN)
    for (listening, kind), then in LISTENER.items():
        if listening is state:
            wanted = [Apply()] if then is TransactionState.COMMITTING else []
            assert machine.handle(EVENTS[kind], 0.0) == wanted and machine.state is (then if isinstance(then, TransactionState) else state)


def test_a_commit_in_one_phase_is_applied_once_however_often_it_is_told_and_again_if_that_fails() -> None:
    machine = participant(TransactionState.ACTIVE, votes=False)
    assert machine.handle(CommitDecided(), 0.0) == [Apply()] and machine.handle(CommitDecided(), 0.0) == [] == machine.handle(ApplyFailed(), 0.0)
    assert machine.handle(CommitDecided(), 0.0) == [Apply()] and machine.handle(Applied(), 0.0) == [] == machine.handle(CommitDecided(), 0.0)


# ---------------------------------------------------------------- a coordinator decides, and tells


def test_it_decides_with_the_last_vote_its_own_included() -> None:
    machine = Coordinator("c", pause=1.0)
    machine.handle(ParticipantsJoined(("x", "y")), 0.0)
    machine.handle(ParticipantsJoined(("z",), votes=False), 0.0)
    assert machine.handle(Prepared(peer="x"), 0.0) == machine.handle(Prepared(peer="c"), 0.0) == machine.handle(Prepared(peer="x"), 0.0) == []
    assert machine.missing(0.0) == ("y",) and not machine.is_decided
    assert machine.handle(Prepared(peer="y"), 0.0) == [Apply()] and machine.outcome is Outcome.UNDECIDED
    assert machine.handle(Applied(), 0.0) == [Tell(("x", "y", "z"), Outcome.COMMITTED)] and machine.outcome is Outcome.COMMITTED
    alone = Coordinator("c", pause=1.0)
    assert alone.handle(Prepared(peer="c"), 0.0) == [Apply()] and alone.handle(Applied(), 0.0) == []


def test_it_decides_nothing_on_promises_that_are_over() -> None:
    machine = Coordinator("c", pause=1.0)
    machine.handle(ParticipantsJoined(("x", "y")), 0.0)
    assert machine.handle(Collect(), 0.0) == [Ask(("x", "y"))]
    machine.handle(Prepared(5.0, "x"), 1.0)
    assert machine.handle(Collect(), 2.0) == [Ask(("y",))], "which has not promised anything yet: that is no round"
    machine.handle(Prepared(9.0, "y"), 3.0)
    assert machine.handle(Collect(), 4.9) == []
    assert machine.handle(Collect(), 5.0) == [Ask(("x",))] and machine.handle(Collect(), 6.0) == [Ask(("x",))]
    assert machine.handle(Collect(), 7.0) == [Drop(), Tell(("x", "y"), Outcome.ABORTED)], "three times is enough"
    late = Coordinator("c", pause=1.0)
    late.handle(ParticipantsJoined(("x",)), 0.0)
    late.handle(Prepared(5.0, "x"), 1.0)
    assert late.handle(Prepared(math.inf, "c"), 5.0) == [Drop(), Tell(("x",), Outcome.ABORTED)]


def test_who_has_taken_the_place_of_another_votes_in_its_place() -> None:
    machine = Coordinator("c", pause=1.0)
    machine.handle(ParticipantsJoined(("x", "y")), 0.0)
    machine.handle(Prepared(peer="x"), 0.0)
    machine.handle(ParticipantsLeft(("y",)), 0.0)
    machine.handle(ParticipantsJoined(("z",)), 0.0)
    assert machine.handle(Collect(), 0.0) == [Ask(("x", "z"))], "x is asked anew: it may be gone as well"
    machine.handle(Prepared(peer="x"), 0.0)
    machine.handle(Prepared(peer="z"), 0.0)
    assert machine.handle(Prepared(peer="c"), 0.0) == [Apply()] and machine.others == ("x", "z")
    machine.handle(Applied(), 0.0)
    machine.handle(ParticipantsLeft(("x",)), 0.0)
    assert machine.unacknowledged == {"z"}


def test_who_is_told_again_and_until_when() -> None:
    machine = coordinator(TransactionState.COMMITTED)
    again = [Tell(("x",), Outcome.COMMITTED, 1.0)]
    lost, busy = TellFailed("x", Trouble.LOST), TellFailed("x", Trouble.BUSY)
    assert machine.handle(lost, 0.0) == machine.handle(lost, 0.0) == again and machine.handle(lost, 0.0) == []
    assert machine.handle(busy, 0.0) == again and machine.handle(TellFailed("x", Trouble.REFUSED), 0.0) == []
    assert machine.handle(TellFailed("y", Trouble.LOST), 0.0) == [Tell(("y",), Outcome.COMMITTED, 1.0)]
    machine.tell_until = 5.0
    assert machine.handle(busy, 4.0) == again and machine.handle(busy, 4.1) == []
    assert machine.handle(Settle(), 9.0) == [Tell(("x", "y"), Outcome.COMMITTED)]
    machine.tell_until = math.inf
    assert machine.handle(lost, 9.0) == machine.handle(lost, 9.0) == again and machine.handle(lost, 9.0) == [], "as often as the first time"
    machine.tell_until = 5.0
    machine.handle(Acknowledged("x"), 9.0)
    assert machine.handle(busy, 0.0) == [] and machine.handle(Settle(), 9.0) == [Tell(("y",), Outcome.COMMITTED)]
    machine.handle(Acknowledged("y"), 9.0)
    assert machine.handle(Settle(), 9.0) == [] and not machine.unacknowledged


def test_who_turns_out_to_have_taken_part_in_what_was_given_up_is_told() -> None:
    machine = coordinator(TransactionState.ABORTED)
    assert machine.handle(ParticipantsJoined(("x", "z"), votes=False), 0.0) == [Tell(("z",), Outcome.ABORTED)]
    assert machine.unacknowledged == {"x", "y", "z"}
    assert machine.handle(ParticipantsJoined(("x", "z"), votes=False), 0.0) == []


# ---------------------------------------------------------------- what is remembered


def test_the_oldest_are_forgotten_except_those_that_somebody_may_ask_for() -> None:
    history: History[int] = History(3)
    for number in range(3):
        history.remember(number, Outcome.COMMITTED)
    history.held.add(0)
    history.in_doubt.add(1)
    for number in range(3, 6):
        history.remember(number, Outcome.ABORTED)
    assert [*history.outcomes] == [0, 1, 5] and 2 not in history and 5 in history
    assert history.outcome(0) is Outcome.COMMITTED and history.outcome(2) is Outcome.UNKNOWN
    history.held.discard(0)
    history.remember(6, Outcome.ABORTED)
    assert [*history.outcomes] == [1, 5, 6]
    history.clear()
    assert not history.outcomes and history.in_doubt == {1}

"""Everything that a coordinator and two or three participants can come to, and that the check of it finds what is wrong with others than these."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from aiograd.transaction import (
    AbortDecided,
    Acknowledged,
    Applied,
    CommitDecided,
    Coordinator,
    Failed,
    Outcome,
    Participant,
    PeerLost,
    Tick,
    TransactionEvent,
    TransactionState,
    Unanswered,
)
from aiograd.transaction.events import AllPrepared, ApplyFailed, Heard, LeaseEnded
from aiograd.transaction.states import COORDINATOR_TRANSITIONS, OUTCOMES, REPLIES, TRANSITIONS, StateTransitions, TransitionRule
from tests.sweeps import swept
from tests.transaction.explorer import Broken, Explorer


class Brief(Participant):
    """One that asks once before its lease may end: it only makes fewer worlds."""

    rounds = 1


#: how many worlds there are, up to names of participants: it changes with the tables, so look twice at why
WORLDS: Mapping[str, tuple[int, Callable[[], Explorer]]] = {
    "one participant": (206, lambda: Explorer(1)),
    "two": (3_807, lambda: Explorer(2)),
    "two, one of which only listens": (2_180, lambda: Explorer(2, listeners=1)),
    "three": (32_156, lambda: Explorer(3, participant=Brief)),
    "three, one of which only listens": (22_580, lambda: Explorer(3, participant=Brief, listeners=1)),
}


@pytest.mark.parametrize("name", swept(WORLDS, keep=2))
def test_no_world_is_wrong(name: str) -> None:
    count, explorer = WORLDS[name]
    assert explorer().explore() == count


# ---------------------------------------------------------------- the test of the test


def changed(
    table: Mapping[TransactionState, StateTransitions],
    *cells: tuple[TransactionState, type[TransactionEvent], TransactionState | TransitionRule],
) -> Mapping[TransactionState, StateTransitions]:
    """A table with other cells."""
    rows = {state: dict(row) for state, row in table.items()}
    for state, event, then in cells:
        rows[state][event] = then
    return rows


def participant(*cells: tuple[TransactionState, type[TransactionEvent], TransactionState | TransitionRule], **others: Any) -> dict[str, Any]:
    return {"participant": type("Wrong", (Brief,), {"transitions": changed(TRANSITIONS, *cells), **others})}


def coordinator(*cells: tuple[TransactionState, type[TransactionEvent], TransactionState | TransitionRule], **others: Any) -> dict[str, Any]:
    table = changed(COORDINATOR_TRANSITIONS, *cells)
    return {"participant": Brief, "coordinator": type("Wrong", (Coordinator,), {"transitions": table, **others})}


class Hasty(Coordinator):
    """One that waits for its own vote only."""

    def _decide(self, now: float) -> Any:
        return self.handle(AllPrepared(), now) if self.name in self.promises else []


class Stubborn(Participant):
    """One whose lease never ends."""

    def _question(self, peers: tuple[str, ...], now: float) -> Any:
        self.since = now
        return super()._question(peers, now)


ATOMICITY, ORDER, EARLY, CIRCLE, ENDLESS, UNACKNOWLEDGED = (
    "applied here and dropped there", "decided before everybody was prepared", "applied before it was decided", "goes on for ever", "does not end",
    "somebody is never told",
)  # fmt: skip
WRONG: Mapping[str, tuple[str, dict[str, Any]]] = {
    "decides without votes": (ORDER, {"participant": Brief, "coordinator": Hasty}),
    "gives up by itself when it is prepared": (ATOMICITY, participant((TransactionState.PREPARED, Failed, TransactionState.ABORTED))),
    "drops what it has prepared when contact is lost": (ATOMICITY, participant((TransactionState.PREPARED, PeerLost, TransactionState.ABORTED))),
    "takes time for a decision": (ATOMICITY, participant((TransactionState.PREPARED, Tick, TransactionState.ABORTED))),
    "applies when nobody answers": (EARLY, participant((TransactionState.UNCERTAIN, Unanswered, TransactionState.COMMITTING))),
    "drops what it has prepared when nobody answers": (ATOMICITY, participant((TransactionState.UNCERTAIN, Unanswered, TransactionState.ABORTED))),
    "leaves no mark when its lease ends": (ATOMICITY, participant((TransactionState.UNCERTAIN, LeaseEnded, TransactionState.ABORTED))),
    "says that it has aborted when it is in doubt": (ATOMICITY, participant(outcomes={**OUTCOMES, TransactionState.IN_DOUBT: Outcome.ABORTED})),
    "says that it has aborted when it is prepared": (ATOMICITY, participant(outcomes={**OUTCOMES, TransactionState.PREPARED: Outcome.ABORTED})),
    "takes ignorance of others for an abort": (ATOMICITY, participant(replies={**REPLIES, (Outcome.UNKNOWN, False): AbortDecided})),
    "takes ignorance of others for a commit": (EARLY, participant(replies={**REPLIES, (Outcome.UNKNOWN, False): CommitDecided})),
    "takes what is undecided for a commit": (EARLY, participant(replies={**REPLIES, (Outcome.UNDECIDED, True): CommitDecided})),
    "takes one that is prepared for a sign of life": (CIRCLE, participant(replies={**REPLIES, (Outcome.PREPARED, False): Heard})),
    "gives up a commit that failed once": (ATOMICITY, participant((TransactionState.COMMITTING, ApplyFailed, TransactionState.ABORTED))),
    "hears of no abort": (ENDLESS, participant(
        (TransactionState.PREPARED, AbortDecided, TransitionRule.NOTHING), (TransactionState.UNCERTAIN, AbortDecided, TransitionRule.NOTHING),
    )),
    "never asks": (ENDLESS, participant(
        (TransactionState.PREPARED, Tick, TransitionRule.NOTHING), (TransactionState.PREPARED, PeerLost, TransitionRule.NOTHING),
    )),
    "keeps what it has for ever": (CIRCLE, {"participant": type("Wrong", (Stubborn, Brief), {})}),
    "a coordinator that forgets before everybody knows": (ATOMICITY, {"participant": Brief, "forgets": lambda c: True}),
    "a coordinator that loses heart after its decision": (EARLY, coordinator((TransactionState.COMMITTED, PeerLost, TransactionState.ABORTED))),
    "a coordinator that says that it commits before it has": (
        EARLY,
        coordinator(outcomes={**Coordinator.outcomes, TransactionState.COMMITTING: Outcome.COMMITTED}),
    ),
    "a coordinator that does not note that it has committed": (CIRCLE, coordinator((TransactionState.COMMITTING, Applied, TransitionRule.NOTHING))),
    "a coordinator that hears no acknowledgement": (UNACKNOWLEDGED, coordinator((TransactionState.COMMITTED, Acknowledged, TransitionRule.NOTHING))),
}


class Loose(Explorer):
    """A world in which contact may be lost whenever it can."""

    def _to_coordinator(self, c: Any, ps: Any) -> Any:
        yield from super()._to_coordinator(c, ps)
        if c.state is TransactionState.COMMITTED:
            yield "c loses somebody", PeerLost()


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_found(name: str) -> None:
    how, classes = WRONG[name]
    with pytest.raises(Broken, match=how) as caught:
        Loose(2, **classes).explore()
    assert caught.value.__notes__

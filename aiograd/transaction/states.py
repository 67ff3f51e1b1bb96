"""The states of a transaction, on the coordinator and on participants, and the effect of each event in each state.

Note [Participant]
    ::

          Prepared             CommitDecided             Applied
        ACTIVE ─────► PREPARED ─────────────► COMMITTING ───────► COMMITTED
          │            │ ▲  ▲                  ▲      │
          │       Tick,│ │  └───── ApplyFailed │ ─────┘
          │    PeerLost│ │Heard                │
          │            ▼ │                     │CommitDecided
          │           UNCERTAIN ───────────────┘
          │            │      │LeaseEnded,
          │Failed,     │Abort-│OwnerClosed
          │Tick,       │Decided
          │PeerLost,   ▼      ▼
          └──────► ABORTED ◄─ IN_DOUBT
                          AbortDecided

    A participant that is ACTIVE may abort by itself, since its coordinator cannot have decided to commit without it. Once it is PREPARED it may
    neither apply nor drop its changes until it learns the decision. If the decision does not come it is UNCERTAIN: it asks the coordinator, then the
    others, again and again. Any of them that has committed or aborted settles it. An answer that shows that nothing is decided yet makes it PREPARED
    again, and it continues to wait. If no worker can tell until its lease ends, it drops its changes and stays IN_DOUBT: it knows neither "committed"
    nor "aborted", and answers so to every question.

    One that is *read-only* has nothing to apply, so no doubt is left behind. One that does not even vote, a *listener*, is only told, and then
    applies as much as is possible: a commit in one phase. Its answers tell nothing about the decision, except that it was told of a commit.

Note [Presumed abort]
    A coordinator remembers that it has committed until all participants have acknowledged that. So a coordinator that knows nothing of a transaction
    never committed it. A participant that knows nothing of it proves nothing: it may have forgotten.

Note [Coordinator]
    ::

               Prepared by all         Applied
        ACTIVE ────────────► COMMITTING ─────► COMMITTED
          │                      │                 │ tells the others until each has acknowledged it
          │Failed, PeerLost,     │ApplyFailed
          │Lapsed                ▼
          └──────────────────► ABORTED

    The moment of decision is the moment in which the coordinator applies its own changes: that may fail, and then nothing was decided. Since a
    participant drops its prepared changes when its lease ends, a coordinator decides only while the promises of all participants to keep theirs hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, StrEnum

from aiograd.transaction import events as on
from aiograd.transaction.events import Outcome


class TransactionState(StrEnum):
    """The state of a transaction on one worker.

    >>> ag.transaction.Coordinator("left", pause=1.0).state
    <TransactionState.ACTIVE: 'active'>
    """

    ACTIVE = "active"
    PREPARED = "prepared"
    UNCERTAIN = "uncertain"
    COMMITTING = "committing"
    COMMITTED = "committed"
    ABORTED = "aborted"
    IN_DOUBT = "in doubt"


class TransitionRule(Enum):
    """Effect of an event that leads to no other state."""

    #: it changes nothing: it comes late, or again, or has no say here
    NOTHING = "nothing"
    #: it cannot happen; `TransactionError` is raised and nothing changes
    REFUSED = "refused"
    #: an answer to a question means what `REPLIES` says
    REPLY = "reply"


_ACTIVE, _PREPARED, _UNCERTAIN, _COMMITTING, _COMMITTED, _ABORTED, _IN_DOUBT = TransactionState
_NOTHING, _REFUSED, _REPLY = TransitionRule

StateTransitions = Mapping[type[on.TransactionEvent], TransactionState | TransitionRule]

#: of a participant that waits for nothing more, after either decision: an event comes late, or cannot come
_DECIDED: StateTransitions = {
    on.Prepared: _REFUSED,
    on.Failed: _NOTHING,
    on.Heard: _NOTHING,
    on.PeerLost: _NOTHING,
    on.Tick: _NOTHING,
    on.OutcomeReply: _NOTHING,
    on.Unanswered: _NOTHING,
    on.LeaseEnded: _REFUSED,
    on.Applied: _REFUSED,
    on.ApplyFailed: _REFUSED,
    on.OwnerClosed: _NOTHING,
}

#: of a participant; see Note [Participant]
TRANSITIONS: Mapping[TransactionState, StateTransitions] = {
    TransactionState.ACTIVE: {
        on.Prepared: _PREPARED,
        on.Failed: _ABORTED,
        on.Heard: _ACTIVE,
        on.PeerLost: _ABORTED,
        on.Tick: _ABORTED,  # it has got no message for too long
        on.OutcomeReply: _NOTHING,
        on.Unanswered: _NOTHING,
        on.LeaseEnded: _REFUSED,
        on.CommitDecided: _REFUSED,  # a commit is not decided without it
        on.AbortDecided: _ABORTED,
        on.Applied: _REFUSED,
        on.ApplyFailed: _REFUSED,
        on.OwnerClosed: _ABORTED,
    },
    TransactionState.PREPARED: {
        on.Prepared: _REFUSED,
        on.Failed: _NOTHING,  # it may not give up by itself any more
        on.Heard: _PREPARED,
        on.PeerLost: _UNCERTAIN,
        on.Tick: _UNCERTAIN,
        on.OutcomeReply: _REPLY,
        on.Unanswered: _NOTHING,
        on.LeaseEnded: _REFUSED,
        on.CommitDecided: _COMMITTING,
        on.AbortDecided: _ABORTED,
        on.Applied: _REFUSED,
        on.ApplyFailed: _REFUSED,
        on.OwnerClosed: _IN_DOUBT,
    },
    TransactionState.UNCERTAIN: {
        on.Prepared: _REFUSED,
        on.Failed: _NOTHING,
        on.Heard: _PREPARED,
        on.PeerLost: _NOTHING,  # it is asking already
        on.Tick: _UNCERTAIN,
        on.OutcomeReply: _REPLY,
        on.Unanswered: _UNCERTAIN,
        on.LeaseEnded: _IN_DOUBT,
        on.CommitDecided: _COMMITTING,
        on.AbortDecided: _ABORTED,
        on.Applied: _REFUSED,
        on.ApplyFailed: _REFUSED,
        on.OwnerClosed: _IN_DOUBT,
    },
    TransactionState.COMMITTING: {
        **_DECIDED,
        on.CommitDecided: _NOTHING,  # told again
        on.AbortDecided: _NOTHING,  # a decision stays
        on.Applied: _COMMITTED,
        on.ApplyFailed: _PREPARED,  # nothing was applied; it asks again, and tries again
    },
    TransactionState.COMMITTED: {**_DECIDED, on.CommitDecided: _NOTHING, on.AbortDecided: _NOTHING},
    TransactionState.ABORTED: {
        **_DECIDED,
        on.Prepared: _NOTHING,  # it was given up while its work went on
        on.CommitDecided: _REFUSED,
        on.AbortDecided: _NOTHING,
    },
    TransactionState.IN_DOUBT: {
        **_DECIDED,
        on.CommitDecided: _REFUSED,  # it has nothing to apply any more
        on.AbortDecided: _ABORTED,  # it was right to drop its changes
    },
}

#: where a participant that does not vote goes instead
LISTENER: Mapping[tuple[TransactionState, type[on.TransactionEvent]], TransactionState | TransitionRule] = {
    (TransactionState.ACTIVE, on.CommitDecided): _COMMITTING,
    (TransactionState.ABORTED, on.CommitDecided): _NOTHING,
}

#: (outcome, True if the coordinator has answered) -> the event that the answer is to a participant. See Note [Presumed abort]
REPLIES: Mapping[tuple[Outcome, bool], type[on.TransactionEvent]] = {
    (Outcome.COMMITTED, True): on.CommitDecided,
    (Outcome.COMMITTED, False): on.CommitDecided,
    (Outcome.ABORTED, True): on.AbortDecided,
    (Outcome.ABORTED, False): on.AbortDecided,
    (Outcome.UNDECIDED, True): on.Heard,
    (Outcome.UNDECIDED, False): on.Heard,  # no decision can have been made without it
    (Outcome.PREPARED, True): on.Heard,
    (Outcome.PREPARED, False): on.Unanswered,  # it does not know either
    (Outcome.UNKNOWN, True): on.AbortDecided,
    (Outcome.UNKNOWN, False): on.Unanswered,
}

#: the outcome that a participant in this state answers to questions
OUTCOMES: Mapping[TransactionState, Outcome] = {
    TransactionState.ACTIVE: Outcome.UNDECIDED,
    TransactionState.PREPARED: Outcome.PREPARED,
    TransactionState.UNCERTAIN: Outcome.PREPARED,
    TransactionState.COMMITTING: Outcome.COMMITTED,
    TransactionState.COMMITTED: Outcome.COMMITTED,
    TransactionState.ABORTED: Outcome.ABORTED,
    TransactionState.IN_DOUBT: Outcome.UNKNOWN,
}

#: of a coordinator that has decided: an event comes too late to change that, or cannot come
_COORDINATOR_DECIDED: StateTransitions = {
    on.Prepared: _NOTHING,
    on.Collect: _NOTHING,
    on.AllPrepared: _REFUSED,
    on.Lapsed: _REFUSED,
    on.Failed: _NOTHING,
    on.PeerLost: _NOTHING,
    on.Applied: _REFUSED,
    on.ApplyFailed: _REFUSED,
}

#: of a coordinator; see Note [Coordinator]
COORDINATOR_TRANSITIONS: Mapping[TransactionState, StateTransitions] = {
    TransactionState.ACTIVE: {
        on.ParticipantsJoined: _ACTIVE,
        on.ParticipantsLeft: _ACTIVE,
        on.Prepared: _ACTIVE,
        on.Collect: _ACTIVE,
        on.AllPrepared: _COMMITTING,
        on.Lapsed: _ABORTED,
        on.Failed: _ABORTED,
        on.PeerLost: _ABORTED,
        on.Applied: _REFUSED,
        on.ApplyFailed: _REFUSED,
        on.Acknowledged: _NOTHING,
        on.TellFailed: _NOTHING,
        on.Settle: _NOTHING,
    },
    TransactionState.COMMITTING: {
        **_COORDINATOR_DECIDED,
        on.ParticipantsJoined: _REFUSED,
        on.ParticipantsLeft: _REFUSED,
        on.Applied: _COMMITTED,
        on.ApplyFailed: _ABORTED,
        on.Acknowledged: _NOTHING,
        on.TellFailed: _NOTHING,
        on.Settle: _NOTHING,
    },
    TransactionState.COMMITTED: {
        **_COORDINATOR_DECIDED,
        on.ParticipantsJoined: _REFUSED,
        on.ParticipantsLeft: _COMMITTED,
        on.Acknowledged: _COMMITTED,
        on.TellFailed: _COMMITTED,
        on.Settle: _COMMITTED,
    },
    TransactionState.ABORTED: {
        **_COORDINATOR_DECIDED,
        on.ParticipantsJoined: _ABORTED,  # a late participant is told
        on.ParticipantsLeft: _ABORTED,
        on.Acknowledged: _ABORTED,
        on.TellFailed: _NOTHING,  # a worker that is not told will ask
        on.Settle: _ABORTED,
    },
}

#: the outcome that a coordinator in this state answers; UNDECIDED while it applies its own part, which may still fail
COORDINATOR_OUTCOMES: Mapping[TransactionState, Outcome] = {
    TransactionState.ACTIVE: Outcome.UNDECIDED,
    TransactionState.COMMITTING: Outcome.UNDECIDED,
    TransactionState.COMMITTED: Outcome.COMMITTED,
    TransactionState.ABORTED: Outcome.ABORTED,
}

"""Transactions over several workers: all of them apply their prepared changes, or none does. Pure: it decides, and its callers act.

`Coordinator` and `Participant` take events and give commands; `states` has the tables of the effect of each event in each state.
Backward passes, steps of pipelines and steps of optimizers each have an asyncio shell, which turns messages and timers into events.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiograd.running.lazy import on_first_use
from aiograd.transaction.commands import Apply, Ask, ClearDoubt, Drop, MarkInDoubt, Tell, TransactionCommand
from aiograd.transaction.coordinator import Coordinator
from aiograd.transaction.events import (
    AbortDecided,
    Acknowledged,
    Applied,
    ApplyFailed,
    Collect,
    CommitDecided,
    Failed,
    Heard,
    Outcome,
    OutcomeReply,
    OwnerClosed,
    ParticipantsJoined,
    ParticipantsLeft,
    PeerLost,
    Prepared,
    Settle,
    TellFailed,
    Tick,
    TransactionEvent,
    Trouble,
    Unanswered,
)
from aiograd.transaction.history import History
from aiograd.transaction.participant import Participant
from aiograd.transaction.states import TransactionState

if not TYPE_CHECKING:  # an unknown name is told with the nearest one
    __getattr__, __dir__ = on_first_use(__name__)

__all__ = [
    "Coordinator", "Participant", "History", "TransactionState", "Outcome", "Trouble",
    "TransactionEvent", "Prepared", "Failed", "PeerLost", "Applied", "ApplyFailed", "Heard", "Tick", "CommitDecided", "AbortDecided", "OutcomeReply",
    "Unanswered", "OwnerClosed", "ParticipantsJoined", "ParticipantsLeft", "Collect", "Acknowledged", "TellFailed", "Settle",
    "TransactionCommand", "Ask", "Tell", "Apply", "Drop", "MarkInDoubt", "ClearDoubt",
]  # fmt: skip

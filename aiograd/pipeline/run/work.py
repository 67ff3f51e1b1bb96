"""PipelineWork: one step of a pipeline in one process: the values for the ranks that live there, and those on their way to others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from aiograd.coordination.session import StepWork
from aiograd.pipeline.run.mailbox import Mailbox
from aiograd.pipeline.run.outbox import StepOutbox
from aiograd.pipeline.step.rank import BACKWARD, FORWARD, Key, base_of


class PipelineWork(StepWork):
    """One step of a pipeline in one process.

    Args:
        step: its number.
        ranks: the ranks that live here.
        recovers: lost workers are replaced.
    """

    __slots__ = ("mailboxes", "outbox", "keeps_outputs", "undo", "witnesses", "stage_to_rank", "known", "_left")

    def __init__(self, step: int, ranks: Iterable[int], recovers: bool) -> None:
        super().__init__(step)
        self.mailboxes = {rank: Mailbox() for rank in ranks}
        self.outbox = StepOutbox(step, recovers)
        #: the outputs are wanted, too
        self.keeps_outputs = False
        #: undoes the step's changes beside gradients, if it is prepared and then dropped
        self.undo: Callable[[], None] | None = None
        #: references to members of other replicas, which may know the outcome
        self.witnesses: Sequence[Any] = ()
        #: the rank of each stage
        self.stage_to_rank: Sequence[int] = ()
        #: the values that need not be sent
        self.known: set[Key] = set()
        #: of a step that was given up while it ran: the values that had come for it
        self._left: dict[Key, Any] = {}

    def put(self, rank: int, key: Key, value: Any) -> None:
        """Hand a value to a rank, here or elsewhere, unless it has it."""
        if self.known and (key in self.known or (base_of(key[0]), *key[1:]) in self.known):
            return
        mailbox = self.mailboxes.get(rank)
        if mailbox is not None:
            mailbox.put(key, value)
        else:
            self.outbox.post(rank, key, value)

    def take_left(self) -> dict[Key, Any]:
        """Take the values that have come and that no rank has taken. For the running task, at its end."""
        left, self._left = self._left, {}
        for mailbox in self.mailboxes.values():
            left |= mailbox.values
        return left

    def members(self) -> list[Any]:
        """See `StepWork.members`."""
        return self.outbox.members

    def messages(self) -> list[tuple[asyncio.Future[Any], str | None, str]]:
        """See `OpenStep`."""
        found: list[tuple[asyncio.Future[Any], str | None, str]] = []
        for mailbox in self.mailboxes.values():
            for future, (kind, stage, microbatch) in mailbox.waiting():
                _, _, number = kind.partition(" ")
                sender = int(number) if number else {FORWARD: stage - 1, BACKWARD: stage + 1}.get(kind, -1)
                # after a loss, stages are numbered through over all replicas, and any replica may have the sender
                is_known = sender >= 0 and stage < len(self.stage_to_rank)
                owner = self.outbox.owner_of(self.stage_to_rank[sender]) if is_known else None
                found.append((future, owner, f"{kind} of stage {stage}, microbatch {microbatch}"))
        return found

    def release(self, *, is_committed: bool) -> None:
        """The step is over: release everything, and undo its changes unless it is committed."""
        self.outbox.close()
        if self.runner is not None:
            self._left = self.take_left()
        for mailbox in self.mailboxes.values():
            mailbox.clear()
        undo, self.undo = self.undo, None
        if undo is not None and not is_committed:
            undo()
        super().release(is_committed=is_committed)

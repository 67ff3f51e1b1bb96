"""PipelineSession: one step of a pipeline, as one host sees it: its transaction, and the values for the ranks that live there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from aiograd.coordination.session import HostWorker, StepSession
from aiograd.pipeline.run.mailbox import Mailbox
from aiograd.pipeline.run.outbox import StepOutbox
from aiograd.pipeline.step.rank import Key
from aiograd.transaction import TransactionState

#: whose steps they are, in messages
SUBJECT = "a pipeline"


class PipelineSession(StepSession):
    """One step of a pipeline, as one host sees it.

    Args:
        step: its number.
        ranks: those that live here.
        recovers: lost workers are replaced.
        worker: the one of the host; None in the process that has the pipeline, which decides.
        on_end: told when the step is over here.
    """

    __slots__ = ("mailboxes", "outbox", "keeps_outputs", "undo")

    def __init__(self, step: int, ranks: Iterable[int], recovers: bool, worker: HostWorker | None, on_end: Callable[[Any], None]) -> None:
        self.mailboxes = {rank: Mailbox() for rank in ranks}
        self.outbox = StepOutbox(step, recovers)
        #: the outputs are wanted, too
        self.keeps_outputs = False
        #: puts back what the step has changed beside gradients, where it is prepared and then dropped
        self.undo: Callable[[], None] | None = None
        super().__init__(step, SUBJECT, worker, on_end)

    def put(self, rank: int, key: Key, value: Any) -> None:
        """Hand a value to a rank, here or elsewhere."""
        mailbox = self.mailboxes.get(rank)
        if mailbox is not None:
            mailbox.put(key, value)
        else:
            self.outbox.post(rank, key, value)

    def _others(self) -> Iterable[Any]:
        return self.outbox.hosts

    def _let_go(self) -> None:
        self.outbox.close()
        for mailbox in self.mailboxes.values():
            mailbox.clear()
        undo, self.undo = self.undo, None
        if undo is not None and self.state is not TransactionState.COMMITTED:
            undo()

"""RemoteLocalMember: a member of a training with local steps, as the coordinating process sees it."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

from aiograd.data.ledger import BatchPlace
from aiograd.distributed.local_steps.round_messages import LocalResult
from aiograd.distributed.objects.references import RemoteRef


class RemoteContribution(NamedTuple):
    """The result of local steps, which waits for a round here and on its member."""

    number: int
    batches: list[BatchPlace]
    result: LocalResult
    #: the number of the contribution that was in exchange meanwhile; None: there was none
    carried: int | None


class RemoteLocalMember:
    """A member on a worker.

    Args:
        owner: name of the worker.
        module, optimizer, outer, ref: the module, its optimizers and its `LocalStepsMember` there.

    Attributes:
        version: of the base there; -1: it has none, or one of another training.
        is_new: nothing of its own state is kept when it gets the base.
        computing: the task that waits for a computation; None: there is none.
        number, batches: of this computation: its number, and its batches.
        contribution: the result of the computation before, until a round has it; None: there is none.
        can_carry: the next computation may begin while the contribution is in exchange: the member is where its last computation has ended.
        is_fresh: the next computation begins with a fresh inner optimizer.
    """

    def __init__(self, owner: str, module: RemoteRef, optimizer: RemoteRef, outer: RemoteRef, ref: RemoteRef) -> None:
        self.owner = owner
        self.module = module
        self.optimizer = optimizer
        self.outer = outer
        self.ref: Any = ref
        self.version = -1
        self.is_new = True
        self.computing: asyncio.Task[None] | None = None
        self.number = 0
        self.batches: list[BatchPlace] = []
        self.contribution: RemoteContribution | None = None
        self.can_carry = self.is_fresh = False

    @property
    def name(self) -> str:
        """Its name in messages."""
        return f"the member on {self.owner}"

    @property
    def parts(self) -> tuple[RemoteRef, ...]:
        """References to its optimizers and module."""
        return self.outer, self.optimizer, self.module

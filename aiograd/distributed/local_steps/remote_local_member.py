"""RemoteLocalMember: a member of a training with local steps, as the coordinating process sees it."""

from __future__ import annotations

import asyncio
from typing import Any

from aiograd.data.ledger import BatchPlace
from aiograd.distributed.local_steps.round_messages import LocalResult
from aiograd.distributed.objects.references import RemoteRef


class RemoteLocalMember:
    """A member on a worker.

    Args:
        owner: name of the worker.
        module, optimizer, outer, ref: the module, its optimizers and its `LocalStepsMember` there.

    Attributes:
        version: of the base there; -1: it has none, or one of another training.
        is_new: nothing of its own state is kept when it gets the base.
        number, batches, began: of the last computation: its number, its batches, and the version of the base at which it began.
        result: the result of it, until a round has it; None: there is none.
        computing: the task that waits for it.
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
        self.number = self.began = 0
        self.batches: list[BatchPlace] = []
        self.result: LocalResult | None = None
        self.computing: asyncio.Task[None] | None = None
        self.is_fresh = False

    @property
    def name(self) -> str:
        """Its name in messages."""
        return f"the member on {self.owner}"

    @property
    def parts(self) -> tuple[RemoteRef, ...]:
        """References to its optimizers and module."""
        return self.outer, self.optimizer, self.module

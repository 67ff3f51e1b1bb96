"""Session: one step, as one host sees it, from the first value that comes for it to its end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

from aiograd.graph.accumulate_grad import AccumulateGrad
from aiograd.pipeline.rank import Key
from aiograd.pipeline.run.local import Site
from aiograd.pipeline.run.mailbox import Mailbox
from aiograd.pipeline.run.outbox import Outbox
from aiograd.pipeline.run.watch import COMMITTED, DROPPED, OPEN, PREPARED, UNKNOWN


class Session:
    """One step, as one host sees it."""

    __slots__ = ("step", "mailboxes", "outbox", "site", "runner", "state", "trains", "keeps_outputs", "heard", "driver", "leaves", "watcher")

    def __init__(self, step: int, ranks: Iterable[int], recovers: bool) -> None:
        self.step = step
        self.mailboxes = {rank: Mailbox() for rank in ranks}
        self.outbox = Outbox(step, recovers)
        self.site: Site | None = None
        #: the task that carries it out
        self.runner: asyncio.Task[Any] | None = None
        #: see `watch`
        self.state = OPEN
        #: with backward
        self.trains = False
        #: the outputs are wanted, too
        self.keeps_outputs = False
        #: time of the loop of the last sign of life
        self.heard = asyncio.get_running_loop().time()
        #: the driver's own host, if it can be asked
        self.driver: Any = None
        #: whose gradients are prepared
        self.leaves: frozenset[AccumulateGrad] = frozenset()
        #: sees to it that the step does not stay for ever
        self.watcher: asyncio.Task[None] | None = None

    @property
    def others(self) -> Sequence[Any]:
        """The hosts that this one exchanges values with."""
        return self.outbox.hosts

    @property
    def is_in_doubt(self) -> bool:
        """Whether gradients are prepared, or were, and it is not known what was decided."""
        return self.trains and self.state in (PREPARED, UNKNOWN)

    def hear(self) -> None:
        """There is a sign of life of whoever drives the step."""
        self.heard = asyncio.get_running_loop().time()

    def put(self, rank: int, key: Key, value: Any) -> None:
        """Hand a value to a rank, here or elsewhere."""
        mailbox = self.mailboxes.get(rank)
        if mailbox is not None:
            mailbox.put(key, value)
        else:
            self.outbox.post(rank, key, value)

    def drop(self, state: str = DROPPED) -> None:
        """The step is over: let go of everything."""
        if self.state != COMMITTED:
            self.state = state
        if self.state != UNKNOWN:
            self.leaves = frozenset()
        self.site = None
        self.outbox.close()
        for mailbox in self.mailboxes.values():
            mailbox.clear()
        if self.runner is not None:
            self.runner.cancel()
        self.runner = None
        if self.watcher is not None and self.watcher is not asyncio.current_task():
            self.watcher.cancel()
        self.watcher = None

"""StepOutbox: the values on their way from one process to ranks on others.

Note [Repeating what was sent]
    Where lost workers are replaced, an outbox keeps what it has sent until the step is over. A replacement begins with nothing: it carries out its
    ranks' actions from the first to the last, on the same inputs, and gives the same values again, to ranks that drop what they have already.
    So all it needs of the others is that they repeat what they had sent. An undelivered message is sent again until it is delivered, or until the
    rank is somewhere else: it may be that only the two of them have lost contact.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from aiograd.errors import ArgumentError, PipelineError, UnknownPeerError
from aiograd.pipeline.step.message import StageMessage
from aiograd.pipeline.step.rank import BACKWARD, ENTRY, FORWARD, TARGET, Key
from aiograd.steps.coordinator import GONE
from aiograd.steps.session import PAUSE

_KINDS = {ENTRY: tuple, FORWARD: tuple, BACKWARD: list, TARGET: tuple}


class Entry:
    """A value on its way."""

    __slots__ = ("rank", "key", "value", "is_delivered")

    def __init__(self, rank: int, key: Key, value: Any) -> None:
        self.rank = rank
        self.key = key
        self.value = value
        self.is_delivered = False


class StepOutbox:
    """The values of one step on their way to ranks on other workers.

    Args:
        step: its number.
        keeps: see Note [Repeating what was sent].
    """

    def __init__(self, step: int, keeps: bool) -> None:
        self._step = step
        self._keeps = keeps
        #: where each rank is: how often it has been replaced, and its host
        self._routes: dict[int, tuple[int, Any]] = {}
        self._entries: dict[Entry, None] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        #: fails when a value could not be delivered
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._idle: asyncio.Future[None] | None = None

    def route(self, peers: Mapping[str, Sequence[Any]]) -> set[int]:
        """Learn where ranks are; returns those that are somewhere else than before."""
        changed = set()
        for name, (generation, ref) in peers.items():
            rank = int(name)
            known = self._routes.get(rank)
            if known is None or known[0] < generation:
                self._routes[rank] = (generation, ref)
                if known is not None:
                    changed.add(rank)
        return changed

    @property
    def hosts(self) -> list[Any]:
        """The hosts of ranks elsewhere, each once."""
        return list(dict.fromkeys(ref for _, ref in self._routes.values()))

    def post(self, rank: int, key: Key, value: Any) -> None:
        """Send a value, and go on."""
        entry = Entry(rank, key, tuple(value) if isinstance(value, StageMessage) else value)
        self._entries[entry] = None
        task = asyncio.get_running_loop().create_task(self._send(entry), name=f"aiograd:pipeline:send {key[0]}")
        self._tasks.add(task)
        task.add_done_callback(self._sent)

    def _sent(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self.failure.done():
            self.failure.set_exception(error)
            self.failure.exception()

    async def _send(self, entry: Entry) -> None:
        while True:
            route = self._routes.get(entry.rank)
            if route is None:
                raise PipelineError(f"rank {entry.rank} of a pipeline is nowhere: a value for its stage {entry.key[1]} cannot be sent")
            try:
                await route[1].call("receive", self._step, entry.rank, *entry.key, entry.value)
                break
            except UnknownPeerError as error:
                raise PipelineError(
                    f"a value for stage {entry.key[1]} of a pipeline, on rank {entry.rank}, cannot be sent: {error}. Workers that have neighbouring "
                    "stages have to know each other: Worker.add_peer"
                ) from error
            except GONE:
                if not self._keeps:
                    raise
            if self._routes[entry.rank] is route:
                await asyncio.sleep(PAUSE)
        entry.is_delivered = True
        if not self._keeps:
            del self._entries[entry]
        if self._idle is not None and self.is_idle and not self._idle.done():
            self._idle.set_result(None)

    async def repeat(self, ranks: set[int]) -> None:
        """Send again what has been delivered to these ranks. Cancelling stops it."""
        for entry in [entry for entry in self._entries if entry.rank in ranks and entry.is_delivered]:
            await self._send(entry)

    @property
    def is_idle(self) -> bool:
        """True if everything has been delivered."""
        return all(entry.is_delivered for entry in self._entries)

    async def drain(self) -> None:
        """Wait until everything has been delivered, if need be to replacements."""
        while not self.is_idle:
            self._idle = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._idle, self.failure], return_when=asyncio.FIRST_COMPLETED)
            if self.failure.done():
                self.failure.result()

    def close(self) -> list[asyncio.Task[None]]:
        """Give up what is on its way and let go of what was kept; returns what still ends."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        self._entries.clear()
        self.failure.cancel()
        return tasks


def received(kind: str, value: Any) -> Any:
    """A value that came from another worker, as the rank takes it.

    Raises:
        ArgumentError: it makes no sense.
    """
    expected = _KINDS.get(kind)
    if expected is None or value.__class__ is not expected:
        raise ArgumentError(f"a malformed value between ranks of a pipeline: {kind[:40]!r} of type {type(value).__name__}")
    if kind == FORWARD:
        if len(value) != 2 or value[1].__class__ is not tuple or any(flag.__class__ is not bool for flag in value[1]):
            raise ArgumentError("a malformed message between ranks of a pipeline")
        return StageMessage(*value)
    if kind == ENTRY and (len(value) != 2 or value[0].__class__ is not tuple or value[1].__class__ is not dict):
        raise ArgumentError("malformed arguments for the first stage of a pipeline")
    return value

"""StepOutbox: the values on their way from one process to ranks on others.

Note [Repeating sent values]
    Where lost workers are replaced, an outbox keeps its sent values until the step is over. A replacement begins with nothing: it carries out its
    ranks' actions from the first to the last, on the same inputs, and gives the same values again, to ranks that drop the values that they have
    already. So all it needs of the others is that they send their values again. An undelivered message is sent again until it is delivered, or until
    the rank is somewhere else: it may be that only the two of them have lost contact.

Note [Values that go together]
    A message costs far more than a small value. So the values that are posted for a rank in one turn of the loop, such as the microbatches at the
    beginning of a step, travel together, up to `TOGETHER` of them and `TOGETHER_BYTES` of their tensors; and their delivery is confirmed with
    the next message of the other member (`RemoteRef.post`), until this one has nothing more to send and waits for that.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from typing import Any

from aiograd.coordination.coordinator import GONE
from aiograd.coordination.message_form import encode
from aiograd.coordination.session import PAUSE
from aiograd.errors import DistributedError, LimitError, PipelineError, UnknownPeerError
from aiograd.pipeline.run.messages import RankValue
from aiograd.pipeline.step.message import StageMessage
from aiograd.pipeline.step.rank import Key
from aiograd.running.trees import leaves_of
from aiograd.tensors.core import TensorCore

#: values that travel together, at most, and bytes of their tensors
TOGETHER, TOGETHER_BYTES = 16, 64 << 10


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
        keeps: see Note [Repeating sent values].
    """

    def __init__(self, step: int, keeps: bool) -> None:
        self._step = step
        self._keeps = keeps
        #: where each rank is: how often it has been replaced, and its member
        self._routes: dict[int, tuple[int, Any]] = {}
        self._entries: dict[Entry, None] = {}
        self._undelivered = 0
        #: by rank, posted values that are not on their way yet; see Note [Values that go together]
        self._queues: dict[int, list[Entry]] = {}
        self._flushing: asyncio.Handle | None = None
        #: True while a caller waits until everything has been delivered
        self._drains = False
        self._tasks: set[asyncio.Task[None]] = set()
        #: fails when a value could not be delivered
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._idle: asyncio.Future[None] | None = None

    def route(self, peers: Mapping[str, Sequence[Any]]) -> set[int]:
        """Learn the places of ranks; returns the ranks with another place than before."""
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
    def members(self) -> list[Any]:
        """The members with the ranks that live elsewhere, each once."""
        return list(dict.fromkeys(ref for _, ref in self._routes.values()))

    def owner_of(self, rank: int) -> str:
        """Name of the worker with a rank that lives elsewhere; "" where it lives here."""
        route = self._routes.get(rank)
        return "" if route is None else str(route[1].owner)

    def post(self, rank: int, key: Key, value: Any) -> None:
        """Send a value, and go on."""
        entry = Entry(rank, key, tuple(value) if isinstance(value, StageMessage) else value)
        self._entries[entry] = None
        self._undelivered += 1
        if not self._queues:
            self._flushing = asyncio.get_running_loop().call_soon(self._flush)
        self._queues.setdefault(rank, []).append(entry)

    def _flush(self) -> None:
        """Send the posted values."""
        queues, self._queues = self._queues, {}
        for rank, entries in queues.items():
            for batch in _batches(entries):
                self._start(self._send(rank, batch), f"send {batch[0].key[0]}")

    def _start(self, sending: Coroutine[Any, Any, None], what: str) -> None:
        task = asyncio.get_running_loop().create_task(sending, name=f"aiograd:pipeline:{what}")
        self._tasks.add(task)
        task.add_done_callback(self._sent)

    def _sent(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self.failure.done():
            self.failure.set_exception(error)
            self.failure.exception()

    async def _send(self, rank: int, entries: list[Entry]) -> None:
        while True:
            route = self._routes.get(rank)
            stage = entries[0].key[1]
            if route is None:
                raise PipelineError(f"rank {rank} of a pipeline is nowhere: a value for its stage {stage} cannot be sent")
            try:
                await route[1].post([encode(RankValue(self._step, rank, *entry.key, entry.value)) for entry in entries], waits=self._drains)
                break
            except UnknownPeerError as error:
                raise PipelineError(
                    f"a value for stage {stage} of a pipeline, on rank {rank}, cannot be sent: {error}. Workers with neighbouring "
                    "stages, or stages that take each other's values, have to know each other: Worker.add_peer"
                ) from error
            except LimitError:
                if len(entries) == 1:
                    raise
                for entry in entries:
                    await self._send(rank, [entry])
                return
            except GONE:
                if not self._keeps:
                    raise
            if self._routes[rank] is route:
                await asyncio.sleep(PAUSE)
        for entry in entries:
            if not entry.is_delivered:
                entry.is_delivered = True
                self._undelivered -= 1
            if not self._keeps:
                self._entries.pop(entry, None)
        if self._idle is not None and not self._undelivered and not self._idle.done():
            self._idle.set_result(None)

    async def repeat(self, ranks: set[int]) -> None:
        """Send the delivered values of these ranks again. Cancelling stops it."""
        for entry in [entry for entry in self._entries if entry.rank in ranks and entry.is_delivered]:
            await self._send(entry.rank, [entry])

    async def drain(self) -> None:
        """Wait until everything has been delivered, if need be to replacements."""
        self._drains = True
        urged = {self._routes[entry.rank][1] for entry in self._entries if not entry.is_delivered and entry.rank in self._routes}
        urged -= {self._routes[rank][1] for rank in self._queues if rank in self._routes}
        self._flush()
        for member in urged:  # it may not have confirmed values yet
            self._start(_urge(member), "urge")
        while self._undelivered:
            self._idle = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._idle, self.failure], return_when=asyncio.FIRST_COMPLETED)
            if self.failure.done():
                self.failure.result()

    def close(self) -> list[asyncio.Task[None]]:
        """Cancel sending and drop the kept values; returns the tasks that still end."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if self._flushing is not None:
            self._flushing.cancel()
        self._queues.clear()
        self._entries.clear()
        self.failure.cancel()
        return tasks


def _batches(entries: list[Entry]) -> Iterator[list[Entry]]:
    """Values for one rank, by message; see Note [Values that go together]."""
    if len(entries) == 1:
        yield entries
        return
    batch: list[Entry] = []
    total = 0
    for entry in entries:
        size = sum(tensor.size * tensor.dtype.itemsize for tensor in leaves_of(entry.value, TensorCore))
        if batch and (len(batch) == TOGETHER or total + size > TOGETHER_BYTES):
            yield batch
            batch, total = [], 0
        batch.append(entry)
        total += size
    yield batch


async def _urge(member: Any) -> None:
    """Make a member confirm its values at once. If it cannot be reached, the values themselves show it."""
    with contextlib.suppress(DistributedError):
        await member.post([])

"""Leases: batches that count once, when the step with them is committed.

Note [Leaving a loop early]
    The place is in the ledger of the epoch, which counts a batch as read only when its lease is left with the step committed. A lease that was handed
    out and not entered waits again when the next loop begins. So a loop may be left at any point, and nothing has to be closed for the place to be
    right. Reading ends with the iterator: reads that have begun are cancelled, threads end with their last call, and batches of a sequence that were
    read ahead are dropped and read again. Batches of a stream stay with the epoch, since a stream is read forward only.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Protocol

from aiograd.data.epoch import Epoch
from aiograd.data.ledger import BatchPlace
from aiograd.data.reading import LoadedBatch, ReadAhead, ReaderThreads
from aiograd.errors import ModeError
from aiograd.running.random import Generator, drawing_from


class LeasedLoader(Protocol):
    """A loader, as far as its leases need it."""

    workers: int
    prefetch: int
    _epoch: Epoch | None

    def _go_on(self) -> Epoch: ...

    def _end(self, epoch: Epoch) -> None: ...


class BatchLease:
    """A batch that is handed out: ``async with lease as batch``, once. `DataLoader.leases` gives it.

    Args:
        holder: the epoch that has begun.
        place: the place of the batch.
        loaded: the batch.
        generator: draws the random numbers of the batch.

    Attributes:
        epoch: the epoch that the batch belongs to, counted from 0.
        number: number of the batch in the epoch, counted from 0.
        indices: a list of the indices of the examples of this rank; of a stream, their positions in it.

    Raises:
        ModeError: on entering: it was entered before, or was not entered before the loop went on or was left, or the loader has loaded another state.

    >>> loader = ag.data.DataLoader(range(4), batch_size=2)
    >>> leases = loader.leases()
    >>> lease = await anext(leases)
    >>> async with lease as batch:
    ...     print(batch)
    tensor([0, 1])
    >>> loader.state_dict()["batches"]
    1
    >>> await leases.aclose()
    """

    __slots__ = ("epoch", "number", "indices", "_batch", "_place", "_holder", "_generator", "_scope")

    def __init__(self, holder: Epoch, place: BatchPlace, loaded: LoadedBatch, generator: Generator) -> None:
        self._place = place
        self.epoch: int = place.epoch
        self.number: int = place.number
        self.indices: list[Any] = loaded.indices
        self._batch = loaded.value
        self._holder = holder
        self._generator = generator
        self._scope: AbstractContextManager[None] | None = None
        holder.unentered[place] = generator

    @property
    def _can_be_entered(self) -> bool:
        return self._holder.unentered.get(self._place) is self._generator

    async def __aenter__(self) -> Any:
        if not self._can_be_entered:
            raise ModeError(
                f"entering {self}: it was entered before, its loop was left or has gone past it, or its loader is at another place; enter every "
                "lease once, before the next is asked for"
            )
        del self._holder.unentered[self._place]
        self._holder.entered += 1
        batch, self._batch = self._batch, None
        self._scope = drawing_from(self._generator)
        self._scope.__enter__()
        return batch

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._holder.entered -= 1
        if error is None or was_committed(error):
            self._holder.read(self._place)
        else:
            self._holder.ledger.give_back(self._place)
        if self._scope is not None:
            self._scope.__exit__(None, None, None)

    def __repr__(self) -> str:
        return f"BatchLease(epoch={self.epoch}, number={self.number})"


def was_committed(error: BaseException) -> bool:
    """True if an error says that the step that raised it was committed: itself, its cause, or an error of a group."""
    looked_at: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in looked_at:
        if getattr(each, "committed", False) is True:
            return True
        if isinstance(each, BaseExceptionGroup) and any(map(was_committed, each.exceptions)):
            return True
        looked_at.add(id(each))
        each = each.__cause__
    return False


class BatchLeases(AsyncIterator[BatchLease]):
    """The rest of an epoch in leases; `DataLoader.leases` makes it.

    Args:
        loader: the loader.
        rank, size: the part of every batch that is handed out.

    >>> leases = ag.data.DataLoader(range(4), batch_size=2).leases()
    >>> async for lease in leases:
    ...     async with lease as batch:
    ...         break
    >>> await leases.aclose()
    """

    def __init__(self, loader: LeasedLoader, rank: int, size: int) -> None:
        self._loader = loader
        self._rank, self._size = rank, size
        self._epoch: Epoch | None = None
        self._reads: ReadAhead | None = None
        self._last: BatchLease | None = None
        self._is_closed = False

    def __aiter__(self) -> BatchLeases:
        return self

    async def __anext__(self) -> BatchLease:
        self._check_last()
        while (current := await self._current()) is not None:
            epoch, reads = current
            place, lease = epoch.ledger.take(), None
            try:
                ahead = itertools.islice(epoch.ledger.upcoming(), self._loader.prefetch)
                loaded = await reads.batch(place.number, [each.number for each in ahead])
                if reads is not self._reads or epoch is not self._loader._epoch:
                    continue  # closed, or the loader is at another place
                if loaded is not None:
                    lease = self._last = BatchLease(epoch, place, loaded, epoch.generator(place.number, self._rank))
                    return lease
            except Exception:  # of the source: the loop most likely ends here
                await self._end_reads()
                raise
            finally:
                if lease is None:
                    epoch.ledger.give_back(place)
            if not epoch.ledger.open:
                self._loader._end(epoch)
                await self.aclose()
            break
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """End what reads, and wait for its end; the place of the loader stays. Idempotent. Cancelled, it has cancelled the reads and no longer waits.

        >>> leases = ag.data.DataLoader(range(4), batch_size=2, workers=1).leases()
        >>> lease = await anext(leases)
        >>> await leases.aclose()
        """
        self._is_closed = True
        await self._end_reads()

    def __del__(self) -> None:
        if self._reads is not None:
            self._reads.abandon()

    def _check_last(self) -> None:
        """Raise where the last lease was not entered; it waits again."""
        last, self._last = self._last, None
        if last is not None and last._can_be_entered:
            del last._holder.unentered[last._place]
            last._holder.ledger.give_back(last._place)
            raise ModeError(f"the loop goes on, but {last} was not entered; use it as `async with lease as batch`, or leave the loop")

    async def _current(self) -> tuple[Epoch, ReadAhead] | None:
        """The epoch that the loader is in, and its reads; None where the epoch of this loop has ended, or the loop is closed."""
        while not self._is_closed and not (self._epoch is not None and self._epoch.has_ended):
            if self._epoch is None or self._epoch is not self._loader._epoch:
                if self._reads is not None:  # they read for a place that the loader has left
                    await self._end_reads()
                    continue
                self._epoch = self._loader._go_on()
                self._epoch.return_unentered()
            if self._reads is None:
                threads = ReaderThreads(self._loader.workers)
                self._reads = ReadAhead(functools.partial(_read, self._epoch, threads, self._rank, self._size), threads)
            return self._epoch, self._reads
        await self.aclose()
        return None

    async def _end_reads(self) -> None:
        reads, self._reads = self._reads, None
        if reads is not None:
            await reads.aclose()


async def _read(epoch: Epoch, threads: ReaderThreads, rank: int, size: int, number: int) -> LoadedBatch | None:
    """Read a batch, with draws that belong to it."""
    with drawing_from(epoch.generator(number, rank).fork()):
        return await epoch.batches.read(threads, number, rank, size)

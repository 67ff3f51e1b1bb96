"""An epoch of a loader: its batches by number, and a ledger of the batches that were read.

Note [Where a stream stands]
    A stream is read forward only. Its iterator belongs to the epoch, not to the loop over it: batches that were read ahead when a loop is left wait
    for the next loop, and so does an example that a thread still reads; a batch that is given back is not read again. An iterator that raised, or was
    cancelled as it awaited something, gives nothing more, which must not pass for the end of the stream. So another one is made and goes to the same
    place: by the state of the source, or past the examples before it. Where the source is an iterator itself and has no state, neither is possible,
    and reading on is an error. Therefore leases do not cancel such an iterator when their loop is left: the one example that it awaits waits for
    the next loop, or is dropped with the loader.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from typing import Any

from aiograd.data.batch_reader import BatchReader
from aiograd.data.ledger import BatchLedger, BatchPlace
from aiograd.data.reading import LoadedBatch, ReaderThreads
from aiograd.errors import DataError, ModeError
from aiograd.running.random import Generator, drawing_from, generator_of
from aiograd.running.random_streams import RandomStream, entropy_of

_END = object()
#: last part of the spawn key of a batch sampler's generator; the generator of a batch has the number of the batch there
_OF_SAMPLER = 2**32 - 1


class SequenceBatches:
    """The batches of a sequence in one epoch.

    Args:
        reader: reads them.
        order: generator of the order; None: the order of the source, and of a batch sampler that draws from the default generator.
        first: number of the first batch that is read.
        was_begun: True if an epoch has begun before.
    """

    source_state = None
    is_leased = False

    def __init__(self, reader: BatchReader, order: Generator | None, first: int, was_begun: bool) -> None:
        self._reader = reader
        self._generator = order
        self._order: Any = None
        self._sampler: Iterator[Any] | None = None
        #: the default generator of the batch sampler
        self._draws: Generator | None = None
        self._first, self._sampled = first, 0
        self._was_begun, self._has_sampled = was_begun, False
        #: indices that the sampler gave, by batch, until the batch is read: another iteration may give others
        self._indices: dict[int, Any] = {}

    async def read(self, threads: ReaderThreads, number: int, rank: int = 0, size: int = 1) -> LoadedBatch | None:
        """Read the rows of a rank of a batch; None behind the end."""
        indices = self.indices_of(number)
        if indices is None:
            return None
        if self._reader.is_by_example:
            return LoadedBatch(await self._reader.example(threads, indices), [indices])
        own = share(indices, rank, size)
        return LoadedBatch(await self._reader.rows(threads, indices, own), list(own))

    def forget(self, number: int, first: int) -> None:
        """Forget a batch that was read; all batches before `first` were read, too."""
        self._indices.pop(number, None)
        self._first = first

    def indices_of(self, number: int) -> Any:
        """The indices of a batch; by example: the index; None behind the end."""
        reader = self._reader
        if reader.batch_sampler is not None:
            while self._sampled <= number and (indices := self._next_sample(reader.batch_sampler)) is not _END:
                if not hasattr(indices, "__len__") or isinstance(indices, str):
                    raise DataError(f"DataLoader: the batch sampler gave {indices!r} as batch {self._sampled}; expected a list of indices")
                if self._sampled >= self._first:
                    self._indices[self._sampled] = indices
                self._sampled += 1
            return self._indices.get(number)
        if self._order is None:
            count = len(reader.source)
            self._order = range(count) if self._generator is None else self._generator.clone().permutation(count).tolist()
        if reader.batch_size is None:
            return self._order[number] if number < len(self._order) else None
        indices = list(self._order[number * reader.batch_size : (number + 1) * reader.batch_size])
        return None if not indices or (reader.drop_last and len(indices) < reader.batch_size) else indices

    def _next_sample(self, batch_sampler: Iterable[Any]) -> Any:
        """The next batch of the sampler, which draws from a generator of the epoch. After an error the sampler begins anew, in the same order."""
        if self._sampler is None:
            if hasattr(batch_sampler, "__next__") and (self._has_sampled or (self._was_begun and self._first)):
                raise DataError(
                    f"DataLoader: the batch sampler ({type(batch_sampler).__name__}) is an iterator, which raised or has gone past the place of a "
                    "loaded state, and cannot begin again; give the loader an object with __iter__ that makes a new iterator"
                )
            entropy, spawn_key = (None, ()) if self._generator is None else _seed_of(self._generator)
            self._draws = None if entropy is None else generator_of(RandomStream(entropy, (*spawn_key, _OF_SAMPLER)))
            self._has_sampled, self._sampled = True, 0
        with nullcontext() if self._draws is None else drawing_from(self._draws):
            sampler, self._sampler = iter(batch_sampler) if self._sampler is None else self._sampler, None
            indices = next(sampler, _END)
        self._sampler = sampler  # it has not raised
        return indices


class StreamBatches:
    """The batches of a stream in one epoch; see Note [Where a stream stands].

    Args:
        reader: collates them.
        first: number of the first batch that is read.
        source_state: state of the source behind the batch before; None: it has none.
        was_begun: True if the source has been read from before.
        before: the batches that were read from the source before, which read no more where it has a state; None: there are none.
    """

    def __init__(self, reader: BatchReader, first: int, source_state: Any, was_begun: bool, before: StreamBatches | None) -> None:
        self._reader = reader
        self._iterator: Any = None
        #: the batch that the iterator is in, its examples so far, and the number of examples to leave out before them
        self._number = first
        self._examples: list[Any] = []
        self._skip = 0
        self._has_ended = False
        self._was_begun, self._has_started = was_begun, False
        #: the call that reads an example on a thread, and the task that awaits one of an iterator
        self._call: Future[Any] | None = None
        self._pull: asyncio.Task[Any] | None = None
        #: the event loop of an asynchronous iterator
        self._iterator_loop: asyncio.AbstractEventLoop | None = None
        self.is_leased = False
        #: batches that are not read, and states of the source behind batches, both by number
        self._buffer: dict[int, list[Any]] = {}
        self._states = {first - 1: copy.deepcopy(source_state)}
        self._first = first
        self._turn: asyncio.Lock | None = None
        self._turn_loop: Any = None
        self._is_left = False
        if before is not None and hasattr(reader.source, "state_dict"):
            before._is_left = True
        #: the call of an earlier epoch that still reads
        self._call_before: Future[Any] | None = None if before is None else before._call or before._call_before

    @property
    def source_state(self) -> Any:
        """The state of the source behind the batches that were read, which does not change with it; None: it has none."""
        state = self._states.get(self._first - 1)
        return state_of(self._reader.source) if state is None and not self._first else copy.deepcopy(state)

    async def read(self, threads: ReaderThreads, number: int, rank: int = 0, size: int = 1) -> LoadedBatch | None:
        """Read the rows of a rank of a batch; None behind the end."""
        async with self._one_at_a_time():
            while number >= self._number and not self._has_ended:
                await self._read_next(threads)
        examples = self._buffer.get(number)
        if examples is None:
            return None
        first = number * self._batch_size
        indices = list(range(first, first + len(examples)))
        if self._reader.is_by_example:
            return LoadedBatch(await self._reader.collated_example(threads, examples[0]), indices)
        return LoadedBatch(await self._reader.collated(threads, share(examples, rank, size), like=examples), share(indices, rank, size))

    def forget(self, number: int, first: int) -> None:
        """Forget a batch that was read; all batches before `first` were read, too."""
        self._buffer.pop(number, None)
        for before in range(self._first - 1, first - 1):
            self._states.pop(before, None)
        self._first = first

    @property
    def _batch_size(self) -> int:
        return self._reader.batch_size or 1

    def _one_at_a_time(self) -> asyncio.Lock:
        loop: Any
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # a plain `for`
            loop = None
        if self._turn is None or self._turn_loop is not loop:
            self._turn, self._turn_loop = asyncio.Lock(), loop
        return self._turn

    async def _read_next(self, threads: ReaderThreads) -> None:
        """Read the next batch, or find the end."""
        while not self._has_ended and len(self._examples) < self._batch_size:
            example = await self._next_example(threads)
            if example is _END:
                self._has_ended = True
            elif self._skip:
                self._skip -= 1
            else:
                self._examples.append(example)
        examples, self._examples = self._examples, []
        if examples and (len(examples) == self._batch_size or not self._reader.drop_last):
            self._states[self._number] = state_of(self._reader.source)
            self._buffer[self._number] = examples
            self._number += 1

    async def _next_example(self, threads: ReaderThreads) -> Any:
        source = self._reader.source
        is_async = hasattr(source, "__aiter__")
        loop = asyncio.get_running_loop() if is_async else None
        if loop is not self._iterator_loop:
            self._iterator = self._pull = None  # an asynchronous iterator ends with its loop
        if self._call_before is not None and not self._call_before.done():
            earlier = asyncio.wrap_future(self._call_before)
            earlier.add_done_callback(lambda done: done.cancelled() or done.exception())
            await asyncio.wait([earlier])
        self._call_before = None
        if self._iterator is None:
            self._go_to_place()
            self._iterator_loop = loop
            self._iterator = aiter(source) if is_async else await threads.call(iter, source)
        if not is_async:
            await asyncio.sleep(0)  # the loop's turn between two examples
        if self._is_left:
            return _END
        if is_async and self.is_leased and self._is_iterator:
            return await self._kept_pull()
        if threads.count and not is_async:
            return await self._on_thread(threads)
        iterator, self._iterator = self._iterator, None
        example = await anext(iterator, _END) if is_async else next(iterator, _END)
        self._iterator = iterator  # it has neither raised nor been cancelled
        return example

    async def _on_thread(self, threads: ReaderThreads) -> Any:
        """The next example, which the next call takes if this one is cancelled."""
        if self._call is None or self._call.cancelled():
            self._call = threads.submit(next, self._iterator, _END)
        try:
            example = await asyncio.shield(asyncio.wrap_future(self._call))
        except Exception:
            self._iterator = self._call = None
            raise
        self._call = None
        return example

    async def _kept_pull(self) -> Any:
        """The next example of an asynchronous iterator, which the next call takes if this one is cancelled."""
        if self._pull is None:
            self._pull = asyncio.get_running_loop().create_task(_pulled(self._iterator), name="aiograd:example")
        try:
            example = await asyncio.shield(self._pull)
        except Exception:
            self._iterator = self._pull = None
            raise
        self._pull = None
        return example

    def __del__(self) -> None:
        if self._pull is not None and not self._pull.get_loop().is_closed():
            self._pull.get_loop().call_soon_threadsafe(self._pull.cancel)

    @property
    def _is_iterator(self) -> bool:
        source = self._reader.source
        return hasattr(source, "__anext__" if hasattr(source, "__aiter__") else "__next__")

    def _go_to_place(self) -> None:
        """Prepare the source so that a new iterator goes on with the batch that is read next."""
        source, state = self._reader.source, self._states.get(self._number - 1)
        self._examples, self._skip, self._call = [], 0, None
        if state is not None:
            source.load_state_dict(copy.deepcopy(state))
            return
        self._skip = self._number * self._batch_size
        if self._is_iterator and (self._has_started or (self._was_begun and self._skip)):
            raise DataError(
                f"DataLoader: reading batch {self._number} of {type(source).__name__}, which is an iterator: it raised, was cancelled or lost its "
                "loop, or has gone past the place of a loaded state, and cannot begin again. Give the loader an object with __iter__ or __aiter__ "
                "that makes a new iterator, or with state_dict() and load_state_dict()"
            )
        self._has_started = True
        if not self._skip:
            self._states[self._number - 1] = state_of(source)


async def _pulled(iterator: Any) -> Any:
    return await anext(iterator, _END)


class Epoch:
    """An epoch that has begun.

    Args:
        batches: its batches.
        ledger: notes which of them were read.
        order: generator of its order; None: the order of the source.
        draws: generator that the generators of its batches come from; None: nothing of it is leased.
    """

    __slots__ = ("batches", "ledger", "order", "draws", "unentered", "entered", "has_ended", "_seed")

    def __init__(self, batches: SequenceBatches | StreamBatches, ledger: BatchLedger, order: Generator | None, draws: Generator | None) -> None:
        self.batches: SequenceBatches | StreamBatches = batches
        self.ledger: BatchLedger = ledger
        self.order: Generator | None = order
        self.draws: Generator | None = draws
        #: leases that were handed out and not entered: place and generator, a new one for every lease
        self.unentered: dict[BatchPlace, Generator] = {}
        #: how many leases were entered and not left
        self.entered: int = 0
        self.has_ended: bool = False
        #: entropy and spawn key of `draws`
        self._seed: tuple[Any, tuple[int, ...]] | None = None

    def read(self, place: BatchPlace) -> None:
        """Note that a batch that is handed out was read."""
        self.ledger.read(place)
        self.batches.forget(place.number, self.ledger.first.number)

    def generator(self, number: int, rank: int) -> Generator:
        """The generator of the draws of a rank in a batch, from its start: the same wherever and whenever the batch is computed.

        Args:
            number: number of the batch in the epoch.
            rank: the rank that computes its rows of the batch.

        Returns:
            A generator, independent of the order of the epoch and of the generators of other batches and ranks.
        """
        if self._seed is None:
            if self.draws is None:
                raise ModeError(f"batch {number} has no draws of its own: nothing of its epoch is leased")
            self._seed = _seed_of(self.draws)
        entropy, spawn_key = self._seed
        return generator_of(RandomStream(entropy, (*spawn_key, number, rank)))

    def return_unentered(self) -> None:
        """Batches of leases that were not entered wait again, and the leases can no longer be entered."""
        places, self.unentered = list(self.unentered), {}
        for place in places:
            self.ledger.give_back(place)


def state_of(source: Any) -> Any:
    """A copy of the state of a stream; None: it has none."""
    return copy.deepcopy(source.state_dict()) if hasattr(source, "state_dict") else None


def _seed_of(generator: Generator) -> tuple[Any, tuple[int, ...]]:
    """Entropy and spawn key."""
    state = generator.state_dict()
    return entropy_of(state["seed"]), tuple(state["spawn_key"])


def share(rows: Any, rank: int, size: int) -> Any:
    """The rows of a rank, as ``numpy.array_split(rows, size)[rank]`` gives them."""
    whole, rest = divmod(len(rows), size)
    first = rank * whole + min(rank, rest)
    return rows[first : first + whole + (rank < rest)]

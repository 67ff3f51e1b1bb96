"""DataLoader: batches by ``async for``, and by ``for`` where nothing has to be awaited.

Note [Where an epoch stands]
    The order of a shuffled epoch comes from a generator that is forked for it. So the state is small: the state of that generator, and how many
    batches have been taken. Batches that were read ahead and not taken do not count. A loader that continues draws the same order again and begins
    behind the batches that were taken, without reading them. A stream is read from its beginning up to there, unless it has ``state_dict()`` and
    ``load_state_dict()`` itself: then its state after the last batch that was taken is kept.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from aiograd.array_functions.names import with_other_names
from aiograd.data.collation import collate as stacked
from aiograd.data.reading import LoadedBatch, Read, ReaderThreads, read_ahead
from aiograd.engine.run.together import together
from aiograd.errors import ArgumentError, ArgumentTypeError
from aiograd.running.random import Generator, default_generator
from aiograd.tensors.core import TensorCore
from aiograd.tensors.creation import tensor

_END = object()


class DataLoader:
    """Batches of a source, read ahead while the consumer works: ``async for batch in loader``. Each loop is one epoch.

    A plain ``for batch in loader`` reads each batch when it is asked for, where there are no workers and nothing has to be awaited.
    PyTorch's names of arguments, ``dataset``, ``num_workers`` and ``collate_fn``, are taken too.

    Args:
        source: a sequence (``__getitem__`` and ``__len__``; ``__getitem__`` may be ``async def``, ``__getitems__`` may give many examples at once),
            an iterable, or an asynchronous iterable.
        batch_size: examples of a batch; None: examples one by one, as they are.
        shuffle: True to draw a new order for every epoch; of sequences only.
        generator: draws the orders; None: forks of the default generator.
        workers: how many threads read; 0: reading happens on the event loop, between its other work. For processes see `ProcessSource`.
        prefetch: how many batches are read ahead.
        drop_last: True to leave a last batch out that is not full.
        collate: makes a batch of a list of examples, on the threads; None: `aiograd.data.collate`. Without batches it is given single examples.
        batch_sampler: an iterable of lists of indices, instead of `batch_size`, `shuffle` and `drop_last`; iterated anew for every epoch.
        pin_memory, persistent_workers: accepted for PyTorch's sake; threads are made for an epoch, and copies to a device take any memory.

    Attributes:
        epoch: how many epochs have ended.

    Leaving the loop early, by ``break``, an error or cancellation, ends what reads; the next loop is a new epoch, unless a state was loaded.

    Raises:
        ArgumentError: arguments that do not go together. ArgumentTypeError: a source that is none, or a plain ``for`` where something has to be
            awaited.

    >>> loader = ag.data.DataLoader(np.arange(5.0), batch_size=2)
    >>> async for batch in loader:
    ...     print(batch)
    tensor([0., 1.], dtype=float64)
    tensor([2., 3.], dtype=float64)
    tensor([4.], dtype=float64)
    >>> len(loader), loader.epoch
    (3, 1)
    """

    @with_other_names
    def __init__(
        self,
        source: Any,
        batch_size: int | None = None,
        *,
        shuffle: bool = False,
        generator: Generator | None = None,
        workers: int = 0,
        prefetch: int = 2,
        drop_last: bool = False,
        collate: Callable[[Any], Any] | None = None,
        batch_sampler: Iterable[Sequence[int]] | None = None,
        pin_memory: bool = False,
        persistent_workers: bool = False,
    ) -> None:
        is_sequence = hasattr(source, "__getitem__") and hasattr(source, "__len__")
        if not is_sequence and not hasattr(source, "__iter__") and not hasattr(source, "__aiter__"):
            raise ArgumentTypeError(f"DataLoader: expected a sequence, an iterable or an asynchronous iterable, found {type(source).__name__}")
        if batch_size is not None and (isinstance(batch_size, bool) or not isinstance(batch_size, (int, np.integer)) or batch_size < 1):
            raise ArgumentError(f"DataLoader(batch_size={batch_size!r}): expected an int above 0, or None")
        for name, number in (("workers", workers), ("prefetch", prefetch)):
            if isinstance(number, bool) or not isinstance(number, int) or number < 0:
                raise ArgumentError(f"DataLoader({name}={number!r}): expected an int of at least 0")
        if batch_sampler is not None and (batch_size is not None or shuffle or drop_last):
            raise ArgumentError("DataLoader: a batch_sampler takes the place of batch_size, shuffle and drop_last; give one or the other")
        if drop_last and batch_size is None:
            raise ArgumentError("DataLoader(drop_last=True): expected a batch_size")
        if not is_sequence and (shuffle or batch_sampler is not None):
            raise ArgumentError(f"DataLoader: {type(source).__name__} has no len() and no indices, so it cannot be shuffled or sampled")
        self.source = source
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.generator = generator
        self.workers = workers
        self.prefetch = prefetch
        self.drop_last = drop_last
        self.collate = collate
        self.batch_sampler = batch_sampler
        self.epoch = 0
        self._is_sequence = is_sequence
        self._is_async = inspect.iscoroutinefunction(getattr(type(source), "__getitem__", None))
        #: batches taken in this epoch, the generator of its order, and the state of the source after the last one
        self._taken = 0
        self._order: Generator | None = None
        self._source_state: Any = None
        #: the next loop continues where these stand
        self._resumes = False
        #: number of the loop that takes the batches
        self._loop_number = 0

    @property
    def dataset(self) -> Any:
        """The source, by PyTorch's name."""
        return self.source

    @property
    def num_workers(self) -> int:
        """How many threads read, by PyTorch's name."""
        return self.workers

    def __len__(self) -> int:
        """Batches of an epoch.

        Raises:
            TypeError: the source or the sampler has no length.
        """
        if self.batch_sampler is not None:
            return len(self.batch_sampler)  # type: ignore[arg-type]
        size = self.batch_size or 1
        return len(self.source) // size if self.drop_last else -(-len(self.source) // size)

    async def __aiter__(self) -> AsyncIterator[Any]:
        number = self._begin()
        threads = ReaderThreads(self.workers)
        batches = read_ahead(self._reads(threads), self.prefetch)
        try:
            async for loaded in batches:
                self._take(number, loaded)
                yield loaded.value
            self._end(number)
        finally:
            await batches.aclose()  # type: ignore[attr-defined]
            await threads.aclose()

    def __iter__(self) -> Iterator[Any]:
        if self.workers:
            raise _awaits(f"its workers={self.workers} have to be awaited")
        if self._is_async or (hasattr(self.source, "__aiter__") and not self._is_sequence):
            raise _awaits(f"the examples of {type(self.source).__name__} have to be awaited")
        return self._in_turn()

    def _in_turn(self) -> Iterator[Any]:
        number = self._begin()
        for read in self._reads(ReaderThreads(0)):
            loaded = _at_once(read())
            if loaded is None:
                break
            self._take(number, loaded)
            yield loaded.value
        self._end(number)

    def _begin(self) -> int:
        """Begin an epoch, or go on with one that was loaded; the number of the loop."""
        self._loop_number += 1
        if not self._resumes:
            self._taken, self._source_state = 0, None
            self._order = (self.generator or default_generator()).fork() if self.shuffle else None
        self._resumes = False
        return self._loop_number

    def _take(self, number: int, loaded: LoadedBatch) -> None:
        if number == self._loop_number:
            self._taken += 1
            self._source_state = loaded.source_state

    def _end(self, number: int) -> None:
        if number == self._loop_number:
            self.epoch += 1
            self._taken, self._order, self._source_state = 0, None, None

    # ---------------------------------------------------------------- reading

    def _reads(self, threads: ReaderThreads) -> Iterator[Read]:
        """How to read each batch that is left of the epoch."""
        if not self._is_sequence:
            yield from self._stream_reads(threads)
            return
        for indices in itertools.islice(self._batches(), self._taken, None):
            yield _SequenceRead(self, threads, indices)

    def _batches(self) -> Iterator[Any]:
        """The indices of each batch; of each example without batches."""
        if self.batch_sampler is not None:
            yield from self.batch_sampler
            return
        count = len(self.source)
        order = range(count) if self._order is None else self._order.clone().permutation(count).tolist()
        if self.batch_size is None:
            yield from order
            return
        for first in range(0, count, self.batch_size):
            part = order[first : first + self.batch_size]
            if len(part) == self.batch_size or not self.drop_last:
                yield list(part)

    def _stream_reads(self, threads: ReaderThreads) -> Iterator[Read]:
        skip = self._taken * (self.batch_size or 1)
        if self._source_state is not None:
            self.source.load_state_dict(self._source_state)
            skip = 0
        stream = _StreamRead(self, threads, skip)
        while True:
            yield stream.read

    async def _examples(self, threads: ReaderThreads, indices: Sequence[int]) -> Any:
        if hasattr(self.source, "__getitems__"):
            return await threads.call(self.source.__getitems__, list(indices))
        if self._is_async:
            return await together(self.source[i] for i in indices)
        if self.workers:
            return await threads.call(lambda: [self.source[i] for i in indices])
        found = []
        for i in indices:
            found.append(self.source[i])
            await asyncio.sleep(0)  # the loop's turn between two examples
        return found

    async def _batch(self, threads: ReaderThreads, indices: Any) -> Any:
        if self.batch_size is None and self.batch_sampler is None:
            example = (await together([self.source[indices]]))[0] if self._is_async else await threads.call(self.source.__getitem__, indices)
            return example if self.collate is None else await threads.call(self.collate, example)
        if self.collate is None and isinstance(self.source, (np.ndarray, TensorCore)):
            whole: Any = self.source  # all rows at once
            return await threads.call(lambda: tensor(whole[np.asarray(indices)]) if isinstance(whole, np.ndarray) else whole[list(indices)])
        return await threads.call(self.collate or stacked, await self._examples(threads, indices))

    async def read(self, indices: Sequence[int]) -> Any:
        """The batch of some examples of a sequence, apart from any epoch: the place of the loader stays.

        Cancelling stops the reading.

        Args:
            indices: of the examples.

        Returns:
            The batch, as the loop over the loader gives it.

        Raises:
            ArgumentTypeError: the source is a stream, which has no indices.

        >>> await ag.data.DataLoader(np.arange(5.0), batch_size=2).read([4, 0])
        tensor([4., 0.], dtype=float64)
        """
        if not self._is_sequence:
            raise ArgumentTypeError(f"DataLoader.read: {type(self.source).__name__} is a stream; expected a source with len() and indices")
        threads = ReaderThreads(self.workers)
        try:
            return await self._batch(threads, indices)
        finally:
            await threads.aclose()

    # ---------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """The place of the loader, in mid-epoch too: behind the last batch that was taken.

        Returns:
            Numbers, texts and dicts of them, which `ag.save` keeps.
        """
        return {
            "epoch": self.epoch,
            "batches": self._taken,
            "order": None if self._order is None else self._order.state_dict(),
            "generator": None if self.generator is None else self.generator.state_dict(),
            "source": self._source_state,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`: the next loop takes up the epoch behind the batches that had been taken.

        Args:
            state: the result of `state_dict`.

        Raises:
            ArgumentError: `state` is none, or one of another kind of loader; nothing has changed.
        """
        if not isinstance(state, Mapping) or state.keys() != {"epoch", "batches", "order", "generator", "source"}:
            raise ArgumentError("DataLoader.load_state_dict: expected epoch, batches, order, generator and source, as state_dict() returns them")
        if (state["generator"] is None) != (self.generator is None) or (state["order"] is not None and not self.shuffle):
            raise ArgumentError("DataLoader.load_state_dict: one of the two loaders shuffles, or has a generator of its own, and the other has not")
        if min(int(state["epoch"]), int(state["batches"])) < 0:
            raise ArgumentError(f"DataLoader.load_state_dict: epoch {state['epoch']}, batches {state['batches']}; expected numbers of at least 0")
        order = None if state["order"] is None else Generator(0).load_state_dict(state["order"])
        if self.generator is not None:
            self.generator.load_state_dict(state["generator"])
        self.epoch, self._taken, self._source_state = int(state["epoch"]), int(state["batches"]), state["source"]
        self._order = order
        self._resumes = order is not None or not self.shuffle
        self._loop_number += 1  # a loop that still runs counts no more

    def __repr__(self) -> str:
        size = f", batch_size={self.batch_size}" if self.batch_size is not None else ""
        return f"DataLoader({type(self.source).__name__}{size}, epoch={self.epoch}, batches={self._taken})"


def _awaits(what: str) -> ArgumentTypeError:
    return ArgumentTypeError(f"DataLoader: `for` over it, but {what}; write `async for`, in an `async def`")


def _at_once(read: Awaitable[LoadedBatch | None]) -> LoadedBatch | None:
    """The result of a read that only offers its turn and waits for nothing."""
    steps: Any = read
    try:
        while steps.send(None) is None:
            pass
    except StopIteration as ended:
        return ended.value  # type: ignore[no-any-return]
    steps.close()
    raise _awaits("its source or its collate function awaits something")


class _SequenceRead:
    """The read of one batch of a sequence."""

    __slots__ = ("_loader", "_threads", "_indices")

    def __init__(self, loader: DataLoader, threads: ReaderThreads, indices: Any) -> None:
        self._loader, self._threads, self._indices = loader, threads, indices

    async def __call__(self) -> LoadedBatch:
        return LoadedBatch(await self._loader._batch(self._threads, self._indices))


class _StreamRead:
    """Reads batches of a stream, one after the other."""

    def __init__(self, loader: DataLoader, threads: ReaderThreads, skip: int) -> None:
        self._loader, self._threads, self._skip = loader, threads, skip
        self._turn = asyncio.Lock()
        self._iterator: Any = None
        self._ended = False

    async def _next(self) -> Any:
        source = self._loader.source
        if hasattr(source, "__aiter__"):
            if self._iterator is None:
                self._iterator = aiter(source)
            return await anext(self._iterator, _END)
        if self._iterator is None:
            self._iterator = await self._threads.call(iter, source)
        await asyncio.sleep(0)  # the loop's turn between two examples
        return await self._threads.call(next, self._iterator, _END)

    async def read(self) -> LoadedBatch | None:
        """The next batch; None at the end."""
        loader = self._loader
        async with self._turn:
            examples: list[Any] = []
            while not self._ended and len(examples) < (loader.batch_size or 1):
                example = await self._next()
                self._ended = example is _END
                if self._ended:
                    break
                if self._skip:
                    self._skip -= 1
                else:
                    examples.append(example)
            if not examples or (loader.drop_last and len(examples) < (loader.batch_size or 1)):
                return None
            state = loader.source.state_dict() if hasattr(loader.source, "state_dict") else None
        if loader.batch_size is None:
            value = examples[0] if loader.collate is None else await self._threads.call(loader.collate, examples[0])
        else:
            value = await self._threads.call(loader.collate or stacked, examples)
        return LoadedBatch(value, state)

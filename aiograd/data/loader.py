"""DataLoader: batches by ``async for``, and by ``for`` where nothing has to be awaited; leased, so that every one counts once.

Note [Where an epoch stands]
    The order of a shuffled or sampled epoch comes from a generator that is forked for it. So the state is small: the state of that generator, the
    number of batches taken without a gap, and the numbers of batches taken beyond it. Batches that were read ahead and not taken do not count. A
    loader that continues draws the same order again and begins behind the batches that were taken, without reading them. A stream is read from its
    beginning up to there, unless it has ``state_dict()`` and ``load_state_dict()`` itself: then a copy of its state behind the batches that were
    taken is kept, between epochs too.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from aiograd.array_functions.names import with_other_names
from aiograd.data.batch_reader import BatchReader
from aiograd.data.epoch import Epoch, SequenceBatches, StreamBatches, state_of
from aiograd.data.leases import BatchLeases
from aiograd.data.ledger import BatchLedger
from aiograd.data.reading import LoadedBatch, Read, ReaderThreads, outcome_of, read_ahead
from aiograd.errors import ArgumentError, ArgumentTypeError
from aiograd.running.random import Generator, default_generator


class DataLoader:
    """Batches of a source, read ahead while the consumer works: ``async for batch in loader``. Each loop is one epoch.

    A plain ``for batch in loader`` reads each batch when it is asked for, where there are no workers and nothing has to be awaited.
    PyTorch's names of arguments, ``dataset``, ``num_workers`` and ``collate_fn``, are taken too.

    Args:
        source: a sequence (``__getitem__`` and ``__len__``; ``__getitem__`` may be ``async def``, ``__getitems__`` may give many examples at once),
            an iterable, or an asynchronous iterable.
        batch_size: examples of a batch; None: examples one by one, as they are.
        shuffle: True to draw a new order for every epoch; of sequences only.
        generator: its forks draw the orders of epochs; None: forks of the default generator.
        workers: how many threads read; 0: reading happens on the event loop, between its other work. For processes see `ProcessSource`.
        prefetch: how many batches are read ahead.
        drop_last: True to leave a last batch out that is not full.
        collate: makes a batch of a list of examples, on the threads; None: `aiograd.data.collate`. Without batches it is given single examples.
        batch_sampler: an iterable of lists of indices, instead of `batch_size`, `shuffle` and `drop_last`; iterated anew for every epoch,
            with a generator of the epoch as the default generator: its draws come again when an epoch is resumed, and on every rank.
        pin_memory, persistent_workers: accepted for PyTorch's sake; threads are made for an epoch, and copies to a device take any memory.

    Attributes:
        epoch: how many epochs have ended.

    Leaving the loop early, by ``break``, an error or cancellation, ends what reads; the next loop is a new epoch, unless a state was loaded. `leases`
    keeps the place instead, and the batch of a step that failed comes again.

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
            if not _is_count(number):
                raise ArgumentError(f"DataLoader({name}={number!r}): expected an int of at least 0")
        if batch_sampler is not None and (batch_size is not None or shuffle or drop_last):
            raise ArgumentError("DataLoader: a batch_sampler takes the place of batch_size, shuffle and drop_last; give one or the other")
        if drop_last and batch_size is None:
            raise ArgumentError("DataLoader(drop_last=True): expected a batch_size")
        if not is_sequence and (shuffle or batch_sampler is not None):
            raise ArgumentError(f"DataLoader: {type(source).__name__} has no len() and no indices, so it cannot be shuffled or sampled")
        if isinstance(source, dict) and not all(i in source for i in range(len(source))):
            raise ArgumentTypeError("DataLoader: found a dict whose keys are not 0, 1, ...; give a sequence, such as list(source.items())")
        if generator is not None and not isinstance(generator, Generator):
            raise ArgumentTypeError(f"DataLoader(generator={generator!r}): expected a Generator, as ag.Generator(0), or None")
        if collate is not None and not callable(collate):
            raise ArgumentTypeError(f"DataLoader(collate={collate!r}): expected a function of a list of examples, or None")
        if batch_sampler is not None and not isinstance(batch_sampler, Iterable):
            raise ArgumentTypeError(f"DataLoader(batch_sampler={batch_sampler!r}): expected an iterable of lists of indices, or None")
        self.source: Any = source
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.generator = generator
        self.workers = workers
        self.prefetch = prefetch
        self.drop_last = drop_last
        self.collate = collate
        self.batch_sampler = batch_sampler
        self.epoch: int = 0
        self._is_sequence = is_sequence
        #: an epoch has a generator of its order
        self._draws_order = shuffle or batch_sampler is not None
        self._is_async = inspect.iscoroutinefunction(getattr(type(source), "__getitem__", None))
        #: the epoch that has begun and not ended
        self._epoch: Epoch | None = None
        #: the next loop continues it
        self._resumes = False
        #: an epoch has begun
        self._was_begun = False

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
        epoch = self._begin()
        threads = ReaderThreads(self.workers)
        batches = read_ahead(self._reads(epoch, threads), self.prefetch)
        try:
            async for loaded in batches:
                self._take(epoch)
                yield loaded.value
            self._end(epoch)
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
        epoch = self._begin()
        for read in self._reads(epoch, ReaderThreads(0, is_for_plain_loop=True)):
            loaded = _at_once(outcome_of(read))
            if loaded is None:
                break
            self._take(epoch)
            yield loaded.value
        self._end(epoch)

    def leases(self, rank: int = 0, size: int = 1) -> BatchLeases:
        """The rest of the epoch, in batches of which each counts once: when the step with it is committed.

        ::

            async for lease in loader.leases():
                async with lease as (inputs, classes):
                    await replicas.step(...)                    # raises: the batch comes again next

        A batch is read when its `BatchLease` is left without an error, or with one that says that the step was committed: `committed` is True, of the
        error itself, of its cause (as for asyncio's `TimeoutError`), or of an error in a group. Else it comes again next. `state_dict` counts the
        batches that were read. A loop that is left early keeps the place at once, for the next `leases()` and for `state_dict`. Where no epoch has
        begun, one begins; `epoch` counts it when the loop finds its end. `load_state_dict` moves a loop that runs.

        Random draws belong to the batch: within ``async with``, and where the batch is read, the default generator is one of this batch and rank,
        from its start. So a batch that comes again, in another process too, is computed with the same draws. Several tasks may take from one loop.

        Args:
            rank, size: which rows of every batch: ``numpy.array_split(rows, size)[rank]``. A rank may have none in a small batch: its Tensors then
                have no rows, and a `collate` of your own is given an empty list.

        Returns:
            An asynchronous iterator over `BatchLease`. `aclose` ends what reads; without it that ends with the iterator, or the epoch.

        Raises:
            ArgumentError: no such rank, or more than one where single examples are read. By the iterator, ModeError: the last lease was not entered;
            DataError: an iterator that cannot begin again; and errors of the source and of `collate`. The place has not changed then.

        >>> loader = ag.data.DataLoader(range(4), batch_size=2)
        >>> async for lease in loader.leases():
        ...     async with lease as batch:
        ...         print(lease.epoch, lease.number, lease.indices, batch)
        0 0 [0, 1] tensor([0, 1])
        0 1 [2, 3] tensor([2, 3])
        """
        if not _is_count(rank) or not _is_count(size) or rank >= size:
            raise ArgumentError(f"DataLoader.leases(rank={rank!r}, size={size!r}): expected ints with 0 <= rank < size")
        if size > 1 and self.batch_size is None and self.batch_sampler is None:
            raise ArgumentError(f"DataLoader.leases(rank={rank}, size={size}): single examples have no rows to divide; give the loader a batch_size")
        return BatchLeases(self, rank, size)

    def _begin(self) -> Epoch:
        """Begin an epoch, or go on with one that was loaded."""
        epoch = self._epoch
        if not self._resumes or epoch is None:
            order = (self.generator or default_generator()).fork() if self._draws_order else None
            epoch = self._enter(order, order, BatchLedger(None, {"epoch": self.epoch, "batches": 0, "ahead": []}))
        self._resumes = False
        self._was_begun = True
        return epoch

    def _go_on(self) -> Epoch:
        """Go on with the epoch, or begin one; with draws that belong to its batches."""
        self._resumes = True
        epoch = self._begin()
        epoch.batches.is_leased = True
        if epoch.draws is None:
            epoch.draws = (self.generator or default_generator()).fork()
        return epoch

    def _enter(self, order: Generator | None, draws: Generator | None, ledger: BatchLedger, source_state: Any = None) -> Epoch:
        """Be in another epoch, or at another place of this one."""
        before = None if self._epoch is None else self._epoch.batches
        self._leave()
        reader = self._reader()
        first = ledger.first.number
        batches: SequenceBatches | StreamBatches
        if self._is_sequence:
            batches = SequenceBatches(reader, order, first, self._was_begun)
        else:
            batches = StreamBatches(reader, first, source_state, self._was_begun, before if isinstance(before, StreamBatches) else None)
        self._epoch = Epoch(batches, ledger, order, draws)
        return self._epoch

    def _reader(self) -> BatchReader:
        return BatchReader(self.source, self.batch_size, self.drop_last, self.collate, self.batch_sampler, self._is_async)

    def _leave(self) -> None:
        if self._epoch is not None:
            self._epoch.return_unentered()
        self._epoch = None

    def _take(self, epoch: Epoch) -> None:
        """Take the next batch of an epoch, which counts as read."""
        epoch.read(epoch.ledger.take())

    def _end(self, epoch: Epoch) -> None:
        epoch.has_ended = True
        if epoch is self._epoch:
            self.epoch += 1
            self._leave()

    def _reads(self, epoch: Epoch, threads: ReaderThreads) -> Iterator[Read]:
        """A function for each batch that is left of an epoch, which reads it; behind the end without end."""
        for place in epoch.ledger.upcoming():
            yield functools.partial(epoch.batches.read, threads, place.number)

    @property
    def is_within_lease(self) -> bool:
        """True if a lease of the epoch has been entered and not left."""
        return self._epoch is not None and self._epoch.entered > 0

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
            return await outcome_of(functools.partial(self._reader().rows, threads, indices, indices))
        finally:
            await threads.aclose()

    # ---------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """The place of the loader, in mid-epoch too: behind the last batch that was taken.

        Returns:
            Numbers, texts and dicts of them, which `ag.save` keeps.
        """
        epoch = self._epoch
        read: dict[str, Any] = {"batches": 0, "ahead": []} if epoch is None else epoch.ledger.state_dict()
        order, draws = (None, None) if epoch is None else (epoch.order, epoch.draws)
        source = None if self._is_sequence else state_of(self.source) if epoch is None else epoch.batches.source_state
        return {
            "epoch": self.epoch,
            "batches": read["batches"],
            "ahead": [number for _, number in read["ahead"]],
            "order": None if order is None else order.state_dict(),
            "draws": None if draws is None or draws is order else draws.state_dict(),
            "generator": None if self.generator is None else self.generator.state_dict(),
            "source": source,
            "kind": self._kind(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`: the next loop takes up the epoch behind the batches that had been taken.

        Args:
            state: the result of `state_dict`.

        Raises:
            ArgumentError: `state` is none, or one of another kind of loader: of a stream instead of a sequence, or in mid-epoch of other batches or
                examples. Nothing has changed.
        """
        self._change_to(state)()

    def _change_to(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """Check a state; returns a function that goes there, which does not fail."""
        if not isinstance(state, Mapping) or not _KEYS <= state.keys() <= _KEYS | _LATER_KEYS:
            raise ArgumentError("DataLoader.load_state_dict: expected epoch, batches, order, generator and source, as state_dict() returns them")
        if (state["generator"] is None) != (self.generator is None) or (state["order"] is not None and not self._draws_order):
            raise ArgumentError("DataLoader.load_state_dict: one of the two loaders shuffles, or has a generator of its own, and the other has not")
        try:
            epoch, ahead = int(state["epoch"]), [[int(state["epoch"]), number] for number in state.get("ahead", ())]
        except (TypeError, ValueError, OverflowError) as error:
            raise ArgumentError(f"DataLoader.load_state_dict: epoch or ahead are no numbers ({error})") from None
        ledger = BatchLedger(None, {"epoch": epoch, "batches": state["batches"], "ahead": ahead})
        is_within = ledger.first.number > 0 or bool(ahead)
        self._check_kind(state.get("kind"), is_within)
        if state["source"] is not None and (self._is_sequence or not hasattr(self.source, "load_state_dict")):
            raise ArgumentError(
                f"DataLoader.load_state_dict: the state has one of its source, but {type(self.source).__name__} "
                f"{'is a sequence' if self._is_sequence else 'has no load_state_dict()'}; expected the state of a loader of such a source"
            )
        order, draws, own = (
            None if each is None else Generator(0).load_state_dict(each) for each in (state["order"], state.get("draws"), state["generator"])
        )
        source = copy.deepcopy(state["source"])

        def change() -> None:
            if self.generator is not None and own is not None:
                self.generator.load_state_dict(own.state_dict())
            self.epoch = epoch
            self._resumes = order is not None or not (self.shuffle or (self.batch_sampler is not None and not is_within))
            if self._resumes:
                self._enter(order, draws or order, ledger, source)
            else:
                self._leave()

        return change

    def _kind(self) -> dict[str, Any]:
        """The properties of the loader on which a place depends, but for the order."""
        examples = None
        if self._is_sequence:
            with contextlib.suppress(Exception):  # not known now, as of a ProcessSource that is not entered
                examples = len(self.source)
        return {
            "source": "sequence" if self._is_sequence else "stream",
            "examples": examples,
            "batch_size": None if self.batch_size is None else int(self.batch_size),
            "sampler": self.batch_sampler is not None,
        }

    def _check_kind(self, found: Any, is_within: bool) -> None:
        """Raise if a place of another kind is none here; a place between epochs is one for batches of any size."""
        own = self._kind()
        if found is None:  # of a state from before there were kinds
            return
        if not isinstance(found, Mapping) or found.keys() != own.keys():
            raise ArgumentError(f"DataLoader.load_state_dict: found kind {found!r}; expected {sorted(own)}, as state_dict() returns them")
        for name in own if is_within else ("source",):
            if own[name] != found[name] and (name != "examples" or None not in (own[name], found[name])):
                raise ArgumentError(
                    f"DataLoader.load_state_dict: the state is of a loader with {name}={found[name]!r}, and this one has {name}={own[name]!r}, so "
                    "examples would be repeated or left out; load it into a loader that is made as the one that was saved"
                )

    def __repr__(self) -> str:
        taken = 0 if self._epoch is None else self._epoch.ledger.first.number
        size = f", batch_size={self.batch_size}" if self.batch_size is not None else ""
        return f"DataLoader({type(self.source).__name__}{size}, epoch={self.epoch}, batches={taken})"


#: keys of every state, and keys that are missing in states of earlier releases
_KEYS, _LATER_KEYS = {"epoch", "batches", "order", "generator", "source"}, {"ahead", "draws", "kind"}


def _is_count(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= 0


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

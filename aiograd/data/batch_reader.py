"""BatchReader: how the examples of a source become a batch."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from aiograd.data.collation import collate as stacked
from aiograd.data.collation import without_rows
from aiograd.data.reading import ReaderThreads
from aiograd.engine.run.together import together
from aiograd.errors import DataError
from aiograd.tensors.core import TensorCore
from aiograd.tensors.creation import tensor


@dataclass(frozen=True, slots=True)
class BatchReader:
    """The source of a loader, and its arguments on which a batch depends."""

    source: Any
    batch_size: int | None
    drop_last: bool
    collate: Callable[[Any], Any] | None
    batch_sampler: Iterable[Sequence[int]] | None
    is_async: bool

    @property
    def is_by_example(self) -> bool:
        """True if every batch is a single example, as it is."""
        return self.batch_size is None and self.batch_sampler is None

    async def examples(self, threads: ReaderThreads, indices: Sequence[int]) -> Any:
        """Examples of a sequence."""
        if hasattr(self.source, "__getitems__"):
            return await threads.call(self.source.__getitems__, list(indices))
        if self.is_async:
            return await together(self.source[i] for i in indices)
        if threads.count:
            return await _awaited(await threads.call(lambda: [self.source[i] for i in indices]), threads)
        found = []
        for i in indices:
            found.append(self.source[i])
            await asyncio.sleep(0)  # the loop's turn between two examples
        return await _awaited(found, threads)

    async def example(self, threads: ReaderThreads, index: int) -> Any:
        """One example of a sequence, collated by itself."""
        found = (await together([self.source[index]]))[0] if self.is_async else await threads.call(self.source.__getitem__, index)
        return await self.collated_example(threads, found)

    async def collated_example(self, threads: ReaderThreads, example: Any) -> Any:
        """An example that is a batch by itself."""
        return example if self.collate is None else await threads.call(self.collate, example)

    async def rows(self, threads: ReaderThreads, indices: Sequence[int], own: Sequence[int]) -> Any:
        """The rows of a sequence at some of the indices of a batch, which may be none."""
        if self.collate is None and isinstance(self.source, (np.ndarray, TensorCore)):
            whole: Any = self.source  # all rows at once
            places = np.asarray(own) if len(own) else np.zeros(0, np.int64)
            return await threads.call(lambda: tensor(whole[places]) if isinstance(whole, np.ndarray) else whole[places.tolist()])
        if len(own):
            return await self.collated(threads, await self.examples(threads, own))
        if not len(indices) and self.collate is None:
            raise DataError(
                f"DataLoader: found a batch of no indices; no example of {type(self.source).__name__} says what its rows would be. Expected at least "
                "one index, an array as the source, or a collate function that makes a batch of an empty list"
            )
        return await self.collated(threads, [], like=[] if self.collate else await self.examples(threads, indices[:1]))

    async def collated(self, threads: ReaderThreads, examples: Sequence[Any], like: Sequence[Any] = ()) -> Any:
        """A batch of examples; one without rows is like a batch of the examples in `like`, unless a function of the user collates it."""
        if not len(examples) and self.collate is None:
            return await threads.call(without_rows, like[0])
        return await threads.call(self.collate or stacked, examples)


async def _awaited(examples: list[Any], threads: ReaderThreads) -> list[Any]:
    """Examples, of which a plain ``__getitem__`` has returned some as coroutines; these run together where there is time."""
    coroutines = [each for each in examples if inspect.iscoroutine(each)]
    if not coroutines:
        return examples
    if threads.is_for_plain_loop:
        try:
            results = iter([await each for each in coroutines])
        finally:
            for each in coroutines:
                each.close()
    else:
        results = iter(await together(coroutines))
    return [next(results) if inspect.iscoroutine(each) else each for each in examples]

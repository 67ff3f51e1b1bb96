"""Sources that scripts take for granted: a base class, tensors side by side, and parts of a source.

Anything with ``__getitem__`` and ``__len__`` serves as well.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from aiograd.errors import ArgumentError, ArgumentTypeError, IndexRangeError
from aiograd.running.random import Generator, default_generator
from aiograd.tensors.tensor import Tensor


class Dataset:
    """Base class of sources, for scripts that name one: subclasses define ``__getitem__``, and ``__len__`` where they have a length.

    >>> class Squares(ag.data.Dataset):
    ...     def __len__(self):
    ...         return 4
    ...
    ...     def __getitem__(self, index):
    ...         return float(index**2)
    >>> list(ag.data.DataLoader(Squares(), batch_size=2))
    [tensor([0., 1.]), tensor([4., 9.])]
    """

    def __getitem__(self, index: Any) -> Any:
        """The example at `index`.

        Args:
            index: an int.

        Returns:
            The example.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no __getitem__()")


class TensorDataset(Dataset):
    """Rows of tensors: example i is the tuple of row i of each.

    Args:
        *tensors: at least one; their first axes are of one length.

    Raises:
        ArgumentError: no tensors, or lengths that differ. ArgumentTypeError: something else than Tensors.

    >>> rows = ag.data.TensorDataset(ag.tensor([[1.0], [2.0]]), ag.tensor([0, 1]))
    >>> len(rows), rows[1]
    (2, (tensor([2.]), tensor(1)))
    """

    def __init__(self, *tensors: Tensor) -> None:
        if not all(hasattr(tensor, "shape") for tensor in tensors):
            raise ArgumentTypeError(f"TensorDataset: expected Tensors, found {', '.join(type(tensor).__name__ for tensor in tensors)}")
        if not tensors or len({tensor.shape[:1] for tensor in tensors} | {()}) != 2:
            found = ", ".join(str(list(tensor.shape)) for tensor in tensors) or "none"
            raise ArgumentError(f"TensorDataset: found tensors of shapes {found}; expected at least one, all with as many rows")
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: Any) -> tuple[Tensor, ...]:
        """The rows at `index`, in a tuple.

        Args:
            index: an int, or anything that indexes a Tensor.

        Returns:
            A Tensor of each.
        """
        return tuple(tensor[index] for tensor in self.tensors)


class Subset(Dataset):
    """The examples of a source at some indices.

    Args:
        dataset: a sequence of examples, which may be awaitable.
        indices: ints in any order, also several times; negative ones count from the end.

    Attributes:
        dataset, indices: as given, the indices as a list.

    Raises:
        ArgumentTypeError: the source has no length, or indices that are no ints. IndexRangeError: there is no example at an index.

    >>> rows = ag.data.Subset("abcd", [2, 0, -1])
    >>> len(rows), rows[0], rows[2]
    (3, 'c', 'd')
    """

    def __init__(self, dataset: Any, indices: Sequence[int]) -> None:
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            raise ArgumentTypeError(f"Subset: expected a source with len() and indices, found {type(dataset).__name__}")
        places = np.asarray(indices.tolist() if hasattr(indices, "tolist") else list(indices))
        places = places if places.size else np.zeros(0, np.int64)
        if places.ndim != 1 or places.dtype.kind not in "iu":
            raise ArgumentTypeError(f"Subset: expected indices that are ints, found {places.dtype} of shape {list(places.shape)}")
        count = len(dataset)
        wrong = places[(places < -count) | (places >= count)]
        if len(wrong):
            raise IndexRangeError(f"Subset: found index {wrong[0]}, but {type(dataset).__name__} has {count} examples")
        self.dataset: Any = dataset
        self.indices: list[int] = places.tolist()
        if hasattr(dataset, "__getitems__"):
            self.__getitems__: Callable[[Sequence[int]], Any] = lambda some: dataset.__getitems__([self.indices[i] for i in some])

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: Any) -> Any:
        """The example at `index` of the subset.

        Args:
            index: an int.

        Returns:
            The example of the source, or a coroutine of it.
        """
        return self.dataset[self.indices[index]]


def random_split(dataset: Any, lengths: Sequence[float], generator: Generator | None = None) -> list[Subset]:
    """Parts of a source that have no example in common, drawn at random.

    Args:
        dataset: a sequence of examples.
        lengths: number of examples of each part, with the sum ``len(dataset)``; or fractions with the sum 1. Fractions are rounded down, and the
            remaining examples go to the first parts, one to each.
        generator: draws the order; None: the default generator.

    Returns:
        A `Subset` for each length.

    Raises:
        ArgumentError: lengths that are negative or do not sum to the length of the source, or to 1. ArgumentTypeError: a source without a length.

    >>> train, valid = ag.data.random_split(range(10), [0.75, 0.25], ag.Generator(0))
    >>> len(train), len(valid), sorted([*train, *valid])
    (8, 2, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
    """
    count, sizes = len(Subset(dataset, []).dataset), list(lengths)
    if any(isinstance(part, (float, np.floating)) for part in lengths) and math.isclose(sum(lengths), 1) and min(lengths) >= 0:
        sizes = [math.floor(count * part) for part in lengths]
        rest = count - sum(sizes)
        sizes = [size + (i < rest) for i, size in enumerate(sizes)]
    if any(not isinstance(size, (int, np.integer)) or size < 0 for size in sizes) or sum(sizes) != count:
        raise ArgumentError(f"random_split: found lengths {list(lengths)} for {count} examples; expected ints that sum to {count}, or fractions to 1")
    order = (generator or default_generator()).permutation(count).tolist()
    return [Subset(dataset, order[end - size : end]) for size, end in zip(sizes, itertools.accumulate(sizes), strict=True)]

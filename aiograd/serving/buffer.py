"""The replay buffer: rows to learn from, the latest or a sample of all."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from aiograd.errors import ArgumentError, ServingError
from aiograd.running.random_streams import RandomStream, stream_of
from aiograd.serving.answers import rows_of
from aiograd.serving.arguments import checked_count
from aiograd.serving.versions import Array
from aiograd.tensors.core import host_array


class ReplayBuffer:
    """Rows of examples, bounded in number and bytes. It has copies of its own.

    The first `add` fixes the number of columns and their dtypes and row shapes. Memory grows with the rows, up to the bounds.

        >>> buffer = ag.serving.ReplayBuffer(100, seed=1)
        >>> buffer.add(np.zeros((150, 4), np.float32), np.arange(150))
        >>> x, y = buffer.sample(3)
        >>> len(buffer), buffer.seen, x.shape, bool((y >= 50).all())
        (100, 150, (3, 4), True)

    Args:
        rows: the most rows it keeps.
        bytes: the most bytes of its arrays; None for no bound.
        policy: "latest" keeps the last rows; "reservoir" keeps a sample of all rows that were added, each with the same probability.
        seed: seed of the draws, an int of at least 0.

    Attributes:
        seen: number of rows that were added, kept or not.

    Raises:
        ArgumentError: settings that cannot be.
    """

    def __init__(self, rows: int, *, bytes: int | None = None, policy: Literal["latest", "reservoir"] = "latest", seed: int = 0) -> None:
        if policy not in ("latest", "reservoir"):
            raise ArgumentError(f"ReplayBuffer(policy={policy!r}): expected 'latest' or 'reservoir'")
        self.rows: int = checked_count("ReplayBuffer(rows=)", rows)
        self.bytes: int | None = None if bytes is None else checked_count("ReplayBuffer(bytes=)", bytes)
        self.policy: Literal["latest", "reservoir"] = policy
        self.seen: int = 0
        self._bounds = {"rows": self.rows, "bytes": self.bytes, "policy": policy}
        self._random = RandomStream(checked_count("ReplayBuffer(seed=)", seed, 0))
        self._columns: list[Array] = []  # row n of the latest is at n modulo capacity
        self._capacity = self.rows

    def __len__(self) -> int:
        """Number of rows that it keeps."""
        return min(self.seen, self._capacity)

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays, at most `bytes`."""
        return sum(column.nbytes for column in self._columns)

    def add(self, *columns: Any) -> None:
        """Add rows; over the bounds, the oldest or drawn ones make room.

        Args:
            columns: Tensors or arrays of numbers with one length, at least 1; the first axis counts rows.

        Raises:
            ArgumentError: the columns do not fit together, or differ from the first rows in dtypes or shapes; nothing was added.
        """
        arrays, capacity = self._checked("ReplayBuffer.add", columns)
        count = len(arrays[0])
        storage = self._columns or [array[:0] for array in arrays]
        if (more := min(capacity, self.seen + count) - len(storage[0])) > 0:  # memory grows to twice its size, up to the capacity
            more = min(capacity - len(storage[0]), max(more, len(storage[0])))
            storage = [np.concatenate((column, np.empty((more, *column.shape[1:]), column.dtype))) for column in storage]
        fresh = count if self.policy == "latest" else max(0, min(count, capacity - self.seen))
        rows = np.arange(max(0, fresh - capacity), fresh)
        places = (self.seen + rows) % capacity
        if fresh < count:
            drawn = self._random.numpy.integers(0, np.arange(self.seen + fresh, self.seen + count) + 1)
            hits = np.flatnonzero(drawn < capacity)[::-1]
            slots, latest = np.unique(drawn[hits], return_index=True)  # of rows that draw one place, the last has it
            rows, places = np.concatenate((rows, fresh + hits[latest])), np.concatenate((places, slots))
        for column, array in zip(storage, arrays, strict=True):
            column[places] = array[rows]
        self._columns, self._capacity = storage, capacity
        self.seen += count

    def sample(self, count: int) -> tuple[Array, ...]:
        """Draw rows: without replacement while there are `count` of them, else with replacement.

        Args:
            count: number of rows, at least 1.

        Returns:
            A new array of `count` rows for each column.

        Raises:
            ArgumentError: the count is less than 1. ServingError: the buffer is empty.
        """
        count = checked_count("ReplayBuffer.sample(count=)", count)
        if not len(self):
            raise ServingError("ReplayBuffer.sample: the buffer is empty; add rows first")
        places = self._random.numpy.choice(len(self), count, replace=count > len(self))
        return tuple(column[places] for column in self._columns)

    def state_dict(self) -> dict[str, Any]:
        """Rows, counts and the state of the draws, as `ag.save` writes them.

        Returns:
            A dict for `load_state_dict`.
        """
        columns = [column[: len(self)].copy() for column in self._columns]
        return {**self._bounds, "seen": self.seen, "columns": columns, "random": self._random.as_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`: the same rows, and the same draws to the bit.

        Args:
            state: the state of a buffer with the same bounds and policy.

        Raises:
            ArgumentError: the state is malformed, or of another buffer; nothing was changed.
        """
        what = "ReplayBuffer.load_state_dict"
        if not isinstance(state, Mapping) or set(state) != {*self._bounds, "seen", "columns", "random"}:
            raise ArgumentError(f"{what}: expected a dict as state_dict() returns it")
        if (found := {name: state[name] for name in self._bounds}) != self._bounds:
            raise ArgumentError(f"{what}: the state is of a buffer with {found}, expected {self._bounds}")
        random, seen = stream_of(state["random"]), state["seen"]
        if type(seen) is not int or seen < 0 or not isinstance(state["columns"], (list, tuple)):
            raise ArgumentError(f"{what}: expected a number of rows and a list of columns")
        arrays, capacity = self._checked(what, state["columns"]) if seen else ([], self.rows)
        if seen and len(arrays[0]) != min(seen, capacity):
            raise ArgumentError(f"{what}: found {len(arrays[0])} rows, expected {min(seen, capacity)} after {seen}")
        self._columns, self._capacity = [np.array(array) for array in arrays], capacity
        self.seen, self._random = seen, random

    def _checked(self, what: str, columns: Any) -> tuple[list[Array], int]:
        """Columns like those before as arrays in the byte order of this machine, and the most rows like these."""
        arrays = [host_array(column) for column in rows_of(columns, what)]
        found, expected = (", ".join(f"{array.dtype.name} {list(array.shape[1:])}" for array in each) for each in (arrays, self._columns))
        if self._columns and found != expected:
            raise ArgumentError(f"{what}: found rows of {found}, expected {expected} as in the first add; cast or reshape them")
        row_bytes = sum(array.itemsize * math.prod(array.shape[1:]) for array in arrays)
        capacity = min(self.rows, self.bytes // row_bytes) if self.bytes is not None and row_bytes else self.rows
        if not capacity:
            raise ArgumentError(f"{what}: a row has {row_bytes} bytes, the buffer room for {self.bytes}; give it more")
        return [array.astype(array.dtype.newbyteorder("="), copy=False) for array in arrays], capacity

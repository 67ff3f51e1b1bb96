"""Pinned memory: kept, bounded, and never given out while a copy uses it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aiograd.cuda.driver.staging import LARGEST_ARRAY, Staging, size_class

KIB = 1 << 10


class Host:
    """Memory at made-up addresses, and events that are done when a test says so or somebody waits."""

    def __init__(self, limit: int = 1 << 30) -> None:
        self.live: dict[int, int] = {}
        self.done: set[Any] = set()
        self.waited: list[Any] = []
        self._next = 1 << 20
        self.staging = Staging(self.allocate, lambda address: self.live.pop(address) and None, self.done.__contains__, self.wait, limit)

    def allocate(self, nbytes: int) -> int:
        self._next += 1 << 30
        self.live[self._next] = nbytes
        return self._next

    def wait(self, event: Any) -> None:
        self.waited.append(event)
        self.done.add(event)


def test_sizes_double() -> None:
    assert [size_class(n) for n in (1, 64 * KIB, 64 * KIB + 1, 4 << 20)] == [64 * KIB, 64 * KIB, 128 * KIB, 4 << 20]


def test_a_block_comes_back_when_its_copy_is_done() -> None:
    host = Host()
    first = host.staging.take(10)
    host.staging.give(first, "a")
    second = host.staging.take(10)
    assert second is not first, "the copy still reads it"
    host.done.add("a")
    assert host.staging.take(10) is first
    assert host.staging.pinned == 128 * KIB


def test_at_the_limit_the_oldest_copy_is_waited_for() -> None:
    host = Host(limit=128 * KIB)
    blocks = [host.staging.take(10) for _ in range(2)]
    for block, event in zip(blocks, "ab", strict=True):
        host.staging.give(block, event)
    assert host.staging.take(10) is blocks[0]
    assert host.waited == ["a"]
    assert host.staging.pinned == 128 * KIB


def test_at_the_limit_blocks_of_other_sizes_make_room() -> None:
    host = Host(limit=192 * KIB)
    host.staging.give(host.staging.take(128 * KIB), "a")
    block = host.staging.take(10)
    again = host.staging.take(10)
    assert again is not block
    assert host.waited == ["a"] and host.staging.pinned == 128 * KIB == sum(host.live.values())


def test_one_block_may_exceed_the_limit() -> None:
    host = Host(limit=64 * KIB)
    assert host.staging.take(256 * KIB).size == 256 * KIB


def test_trimming_spares_what_copies_use() -> None:
    host = Host()
    blocks = [host.staging.take(10) for _ in range(3)]
    for block, event in zip(blocks, (None, "a", "b"), strict=True):
        host.staging.give(block, event)
    host.done.add("b")
    host.staging.trim()
    assert list(host.live) == [blocks[1].address]
    host.staging.close()
    assert host.live == {} and host.staging.pinned == 0


@pytest.mark.parametrize(("shape", "dtype"), [((0, 3), np.float32), ((LARGEST_ARRAY + 1,), np.uint8), ((2,), object)])
def test_some_arrays_are_not_pinned(shape: tuple[int, ...], dtype: Any) -> None:
    host = Host()
    array = host.staging.array(shape, np.dtype(dtype))
    assert array.shape == shape and array.dtype == dtype and not host.live


def test_held_arrays_leave_the_limit_to_copies() -> None:
    host = Host(limit=192 * KIB)
    held = [host.staging.array((64 * KIB,), np.dtype(np.uint8)) for _ in range(3)]
    beyond = host.staging.array((64 * KIB,), np.dtype(np.uint8))
    assert host.staging.lent(beyond.ctypes.data) is None and host.staging.pinned == 192 * KIB
    assert all(host.staging.lent(array.ctypes.data) is not None for array in held)
    held.pop()
    again = host.staging.array((64 * KIB,), np.dtype(np.uint8))
    assert host.staging.lent(again.ctypes.data) is not None and host.staging.pinned == 192 * KIB


def test_spare_bytes_come_from_a_free_block_and_go_back() -> None:
    host = Host()
    assert host.staging.spare(100) is None, "nothing is pinned for it"
    block = host.staging.take(100)
    host.staging.give(block, "a")
    assert host.staging.spare(100) is None, "the copy still reads it"
    host.done.add("a")
    assert host.staging.spare(100 * KIB) is None, "another size"
    spare = host.staging.spare(100)
    assert spare is not None and spare.shape == (100,) and spare.dtype == np.uint8
    assert host.staging.lent(spare.ctypes.data) is block and host.staging.spare(100) is None
    del spare
    assert host.staging.take(100) is block and host.staging.pinned == 64 * KIB == sum(host.live.values())


def test_spare_bytes_are_not_waited_for() -> None:
    """The device's thread waits for a copy while it has the staging memory to itself; no other thread waits with it."""
    host = Host(limit=64 * KIB)
    host.staging.give(host.staging.take(10), "a")
    asked: list[Any] = []
    wait = host.wait
    host.staging._wait = lambda event: (asked.append(host.staging.spare(10)), wait(event))[1]
    host.staging.take(10)
    assert asked == [None] and host.waited == ["a"]

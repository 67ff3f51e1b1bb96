"""The bookkeeping of an allocator that keeps a device's memory: blocks, their owners and free ones.

Pure: it moves numbers about and calls nothing. `aiograd.cuda.driver.hardware` gets segments from the device and gives them back.

Note [Streams and free blocks]
    Getting memory from a CUDA device, and giving it back, waits for the device; a pass that did so for each array would never run ahead of it.
    So memory comes in large segments, which are cut into blocks. A block that is freed goes to the free list of the stream that frees it
    and may be given out again for that stream at once: earlier work of the stream still runs before later work. To any other stream it
    is worth nothing until the device has been waited for (`settle`), and so free neighbours are joined only where they belong to one stream.

Note [Sizes]
    Blocks are multiples of 512 bytes. Those up to 1 MiB are cut from segments of 2 MiB, others from segments of at least 20 MiB or their own
    size, so that a few small blocks that live long do not keep large ones from being joined. The smallest block that fits is taken, the lowest
    of those.

Rejected: the device's own stream-ordered pool (each call costs a microsecond more and says less about the places of blocks); size classes
without splitting (up to twice the memory).

Source: the sizes come from PyTorch's CUDACachingAllocator.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable
from dataclasses import dataclass, field

_ROUND = 512
_MIB = 1 << 20
#: blocks up to this size come from small segments
_SMALL = _MIB
_SMALL_SEGMENT = 2 * _MIB
_LARGE_SEGMENT = 20 * _MIB
#: up to which size a block is cut from a common large segment
_SHARED = 10 * _MIB


@dataclass(slots=True, eq=False)
class Segment:
    """Memory that came from the device in one piece."""

    address: int
    size: int
    is_small: bool


@dataclass(slots=True, eq=False)
class Block:
    """A part of a segment; to the world above, a handle to memory."""

    address: int
    size: int
    segment: Segment
    #: the stream it was taken for, or freed on
    stream: Hashable
    is_free: bool = True
    #: neighbours in the segment
    before: Block | None = field(default=None, repr=False)
    after: Block | None = field(default=None, repr=False)


def round_up(nbytes: int) -> int:
    """The size of the block that is given for so many bytes."""
    return max(_ROUND, -(-nbytes // _ROUND) * _ROUND)


def segment_sizes(nbytes: int) -> tuple[int, ...]:
    """Sizes of segment to ask the device for, best first; the last is as small as can be."""
    size = round_up(nbytes)
    if size <= _SMALL:
        return (_SMALL_SEGMENT,)
    exact = -(-size // (2 * _MIB)) * 2 * _MIB
    return (_LARGE_SEGMENT, exact) if size < _SHARED else (exact,)


class MemoryPool:
    """Segments of one device, and the blocks they are cut into."""

    def __init__(self) -> None:
        self.segments: dict[int, tuple[Segment, Block]] = {}
        #: stream and kind of segment -> free blocks by size and address
        self._free: dict[tuple[Hashable, bool], list[tuple[int, int, Block]]] = {}
        self.allocated = self.reserved = 0
        self.peak_allocated = self.peak_reserved = 0
        self.allocations = self.frees = self.out_of_memory = 0

    def take(self, nbytes: int, stream: Hashable) -> Block | None:
        """A block for a stream from the present segments; None if a new segment is needed (`segment_sizes`, `add`)."""
        size = round_up(nbytes)
        is_small = size <= _SMALL
        blocks = self._free.get((stream, is_small))
        if not blocks:
            return None
        found = bisect_left(blocks, (size, 0))
        if found == len(blocks):
            return None
        block = blocks.pop(found)[2]
        rest = block.size - size
        if rest >= (_ROUND if is_small else _SMALL):
            self._cut(block, size)
        block.is_free = False
        self.allocations += 1
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def add(self, address: int, size: int, nbytes: int, stream: Hashable) -> None:
        """Add a segment that the device gave for a block of so many bytes; all of it is one free block."""
        segment = Segment(address, size, round_up(nbytes) <= _SMALL)
        block = Block(address, size, segment, stream)
        self.segments[address] = (segment, block)
        self._insert(block)
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def give(self, block: Block, stream: Hashable) -> None:
        """Take a block back, in the order of a stream.

        Raises:
            RuntimeError: the block has been given back before: a mistake of the caller.
        """
        if block.is_free:
            raise RuntimeError(f"memory at {block.address:#x} ({block.size} bytes) was freed twice")
        self.frees += 1
        self.allocated -= block.size
        block.is_free = True
        block.stream = stream
        self._insert(self._join(block))

    def settle(self, stream: Hashable, *others: Hashable) -> None:
        """Let the free blocks of the streams `others` (without any: of all streams) serve another stream; their work is done."""
        moved = [
            entry[2] for (home, _), blocks in self._free.items() if home != stream and (not others or home in others) for entry in blocks
        ]
        for block in moved:
            self._remove(block)
        for block in moved:
            block.stream = stream
        for block in moved:
            if block.size:  # not swallowed by a neighbour yet
                self._remove(block)  # put there already when it swallowed one
                self._insert(self._join(block))

    def release_idle(self) -> list[int]:
        """Forget the segments without a block in use; returns their addresses."""
        idle = [address for address, (segment, block) in self.segments.items() if block.is_free and block.size == segment.size]
        for address in idle:
            segment, block = self.segments.pop(address)
            self._remove(block)
            self.reserved -= segment.size
        return idle

    def stats(self) -> dict[str, int]:
        """Bytes and counts; see the protocol of drivers."""
        return {
            "allocated": self.allocated, "reserved": self.reserved,
            "peak_allocated": self.peak_allocated, "peak_reserved": self.peak_reserved,
            "allocations": self.allocations, "frees": self.frees, "out_of_memory": self.out_of_memory,
        }  # fmt: skip

    def _cut(self, block: Block, size: int) -> None:
        rest = Block(block.address + size, block.size - size, block.segment, block.stream, before=block, after=block.after)
        if block.after is not None:
            block.after.before = rest
        block.after = rest
        block.size = size
        self._insert(rest)

    def _join(self, block: Block) -> Block:
        """The block with its free neighbours of the same stream in it. They leave their lists; it is in none."""
        before, after = block.before, block.after
        if after is not None and after.is_free and after.stream == block.stream:
            self._remove(after)
            self._swallow(block, after)
        if before is not None and before.is_free and before.stream == block.stream:
            self._remove(before)
            self._swallow(before, block)
            block = before
        return block

    @staticmethod
    def _swallow(block: Block, after: Block) -> None:
        block.size += after.size
        block.after = after.after
        if after.after is not None:
            after.after.before = block
        after.size = 0

    def _insert(self, block: Block) -> None:
        insort(self._free.setdefault((block.stream, block.segment.is_small), []), (block.size, block.address, block))

    def _remove(self, block: Block) -> None:
        blocks = self._free.get((block.stream, block.segment.is_small), [])
        found = bisect_left(blocks, (block.size, block.address))
        if found < len(blocks) and blocks[found][2] is block:
            del blocks[found]

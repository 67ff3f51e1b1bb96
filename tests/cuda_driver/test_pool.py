"""The bookkeeping of device memory: blocks never overlap, streams never get each other's, nothing is lost."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from aiograd.cuda.driver.pool import Block, MemoryPool, round_up, segment_sizes
from tests.support import assert_raises

MIB = 1 << 20


def grown(pool: MemoryPool, nbytes: int, stream: int = 0, address: int = 1 << 30) -> Block:
    """A block, from a new segment at `address` where needed."""
    block = pool.take(nbytes, stream)
    if block is None:
        size = segment_sizes(nbytes)[0]
        pool.add(address, size, nbytes, stream)
        block = pool.take(nbytes, stream)
    assert block is not None
    return block


def test_sizes_are_rounded_and_segments_chosen_by_kind() -> None:
    assert [round_up(n) for n in (0, 1, 512, 513)] == [512, 512, 512, 1024]
    assert segment_sizes(10) == (2 * MIB,)
    assert segment_sizes(MIB) == (2 * MIB,)
    assert segment_sizes(MIB + 1) == (20 * MIB, 2 * MIB)
    assert segment_sizes(10 * MIB) == (10 * MIB,)
    assert segment_sizes(11 * MIB + 1) == (12 * MIB,)


def test_what_is_freed_is_given_again_to_the_same_stream_at_once() -> None:
    pool = MemoryPool()
    first = grown(pool, 1000)
    address = first.address
    pool.give(first, 0)
    assert pool.take(900, 0).address == address  # type: ignore[union-attr]


def test_another_stream_gets_it_only_after_the_device_was_waited_for() -> None:
    pool = MemoryPool()
    block = grown(pool, 3 * MIB)
    pool.give(block, 0)
    assert pool.take(3 * MIB, 1) is None
    pool.settle(1)
    assert pool.take(3 * MIB, 1) is not None


def test_settling_one_stream_leaves_the_others_their_blocks() -> None:
    pool = MemoryPool()
    blocks = [grown(pool, 11 * MIB, stream, address=(stream + 1) << 30) for stream in (1, 2)]
    for block in blocks:
        pool.give(block, block.stream)
    pool.settle(0, 2)
    taken = pool.take(11 * MIB, 0)
    assert taken is not None and taken.address == 3 << 30
    assert pool.take(11 * MIB, 0) is None
    assert pool.take(11 * MIB, 1) is not None


def test_a_block_freed_on_another_stream_belongs_to_that_one() -> None:
    pool = MemoryPool()
    block = grown(pool, 11 * MIB, stream=0)
    pool.give(block, 5)
    assert pool.take(11 * MIB, 0) is None
    assert pool.take(11 * MIB, 5) is block


def test_neighbours_are_joined_within_a_stream_only() -> None:
    pool = MemoryPool()
    left, middle, right = (grown(pool, 4 * MIB) for _ in range(3))
    assert right.address - left.address == 8 * MIB
    pool.give(left, 0)
    pool.give(right, 1)
    pool.give(middle, 0)
    assert left.size == 8 * MIB, "left and middle"
    assert pool.release_idle() == []
    pool.settle(0)
    assert pool.release_idle() == [1 << 30]
    assert pool.reserved == 0


def test_the_smallest_block_that_fits_is_taken() -> None:
    pool = MemoryPool()
    pool.add(1 << 30, 40 * MIB, 40 * MIB, 0)
    pool.add(2 << 30, 12 * MIB, 12 * MIB, 0)
    block = pool.take(11 * MIB, 0)
    assert block is not None and block.address == 2 << 30


def test_what_is_left_of_a_large_block_stays_with_it_unless_it_is_large() -> None:
    """Crumbs between large blocks would serve nobody and keep their neighbours apart."""
    pool = MemoryPool()
    pool.add(1 << 30, 14 * MIB, 14 * MIB, 0)
    block = pool.take(13 * MIB + 1, 0)
    assert block is not None and block.size == 14 * MIB
    pool.give(block, 0)
    block = pool.take(12 * MIB, 0)
    assert block is not None and block.size == 12 * MIB and pool.take(2 * MIB, 0) is not None


def test_small_blocks_never_come_from_large_segments() -> None:
    pool = MemoryPool()
    pool.give(grown(pool, 4 * MIB), 0)
    assert pool.take(1000, 0) is None


def test_freeing_twice_is_noticed() -> None:
    pool = MemoryPool()
    block = grown(pool, 100)
    pool.give(block, 0)
    assert_raises(RuntimeError, "freed twice", pool.give, block, 0)


def test_statistics_count_what_happens() -> None:
    pool = MemoryPool()
    blocks = [grown(pool, 700) for _ in range(3)]
    for block in blocks[:2]:
        pool.give(block, 0)
    stats = pool.stats()
    assert stats["allocated"] == 1024 and stats["peak_allocated"] == 3 * 1024
    assert stats["reserved"] == stats["peak_reserved"] == 2 * MIB
    assert (stats["allocations"], stats["frees"]) == (3, 2)


class PoolMachine(RuleBasedStateMachine):
    """Random programs on a pool, beside a list of who has what."""

    blocks: Bundle[Block] = Bundle("blocks")

    def __init__(self) -> None:
        super().__init__()
        self.pool = MemoryPool()
        self.taken: list[Block] = []
        self.next_address = 1 << 30

    @rule(target=blocks, nbytes=st.one_of(st.integers(0, 5000), st.integers(MIB - 2, 15 * MIB)), stream=st.integers(0, 2))
    def take(self, nbytes: int, stream: int) -> Block:
        block = self.pool.take(nbytes, stream)
        if block is None:
            size = segment_sizes(nbytes)[-1 if nbytes % 2 else 0]
            self.pool.add(self.next_address, size, nbytes, stream)
            self.next_address += size  # side by side, so that joining across segments would show
            block = self.pool.take(nbytes, stream)
        assert block is not None and block.size >= nbytes and block.address % 512 == 0
        self.taken.append(block)
        return block

    @rule(block=consumes(blocks), stream=st.integers(0, 2))
    def give(self, block: Block, stream: int) -> None:
        self.taken.remove(block)
        self.pool.give(block, stream)

    @rule(stream=st.integers(0, 2), others=st.sets(st.integers(0, 2), max_size=2))
    def settle(self, stream: int, others: set[int]) -> None:
        self.pool.settle(stream, *others)

    @rule()
    def release_idle(self) -> None:
        for address in self.pool.release_idle():
            assert address not in self.pool.segments

    @invariant()
    def segments_are_covered_by_blocks_without_gaps(self) -> None:
        seen, free = [], set()
        for segment, block in self.pool.segments.values():
            address, before, current = segment.address, None, block
            while current is not None:
                assert current.address == address and current.before is before and current.size > 0
                if before is not None and before.is_free and current.is_free:
                    assert before.stream != current.stream, "free neighbours of one stream are joined"
                (free.add(current) if current.is_free else seen.append(current))
                address, before, current = address + current.size, current, current.after
            assert address == segment.address + segment.size
        assert {id(b) for b in seen} == {id(b) for b in self.taken}
        listed = [entry[2] for entries in self.pool._free.values() for entry in entries]
        assert len(listed) == len(free) and set(listed) == free, "every free block is in exactly one list"
        for (stream, is_small), entries in self.pool._free.items():
            assert entries == sorted(entries, key=lambda entry: entry[:2])
            assert all(e[2].stream == stream and e[2].segment.is_small == is_small and e[:2] == (e[2].size, e[2].address) for e in entries)

    @invariant()
    def the_sums_are_right(self) -> None:
        assert self.pool.allocated == sum(block.size for block in self.taken)
        assert self.pool.reserved == sum(segment.size for segment, _ in self.pool.segments.values())
        assert self.pool.peak_allocated >= self.pool.allocated and self.pool.peak_reserved >= self.pool.reserved


TestPoolMachine = PoolMachine.TestCase

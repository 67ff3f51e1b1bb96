"""The order in which messages leave, and that they are cut without being copied."""

from __future__ import annotations

import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiograd.distributed.rpc.frames import FrameKind
from aiograd.distributed.rpc.limits import Limits
from aiograd.distributed.rpc.outbox import Outgoing, SessionOutbox
from aiograd.errors import ArgumentError, LimitError

LIMITS = Limits()
MIB = 1 << 20


def outgoing(id, *message):
    return Outgoing(FrameKind.REQUEST, id, message, LIMITS)


def drain(outbox):
    """(id, offset, bytes) of everything that is left."""
    found = []
    while (taken := outbox.take()) is not None:
        message, offset, parts = taken
        found.append((message.id, offset, b"".join(parts)))
    return found


def owner(part):
    """The object whose memory a slice is of."""
    return part.obj if isinstance(part, memoryview) else part


@given(st.lists(st.integers(0, 40), max_size=6), st.integers(1, 30))
def test_fragments_make_up_the_message(sizes, frame_bytes):
    buffers = [bytes([65 + index]) * size for index, size in enumerate(sizes)]
    outbox = SessionOutbox(frame_bytes)
    outbox.put(outgoing(1, *buffers))
    assert outbox.unsent == sum(sizes)
    found = drain(outbox)
    assert b"".join(body for _, _, body in found) == b"".join(buffers)
    assert [offset for _, offset, _ in found] == list(range(0, sum(sizes) or 1, frame_bytes))
    assert all(len(body) == frame_bytes for _, _, body in found[:-1])
    assert not outbox
    assert outbox.unsent == 0


def test_nothing_is_copied():
    head, array, tail = b"h" * 100, np.arange(400_000, dtype=np.float64), bytearray(b"t" * 50)
    outbox = SessionOutbox(MIB)
    tracemalloc.start()
    try:
        outbox.put(outgoing(1, head, array.data, tail))
        frames = []
        while (taken := outbox.take()) is not None:
            frames.append(list(taken[2]))
        assert tracemalloc.get_traced_memory()[1] < 10_000
    finally:
        tracemalloc.stop()
    assert [len(parts) for parts in frames] == [2, 1, 1, 2]  # the head with the first part of the array, ..., the last part with the tail
    assert sum(len(part) for parts in frames for part in parts) == 3_200_150
    owners = [owner(part) for parts in frames for part in parts]
    assert owners[0] is head
    assert owners[-1] is tail
    assert all(each is array for each in owners[1:-1])


def test_a_message_of_one_frame_goes_out_as_it_was_given():
    message = (b"head", memoryview(b"body"))
    outbox = SessionOutbox(MIB)
    outbox.put(outgoing(1, *message))
    taken = outbox.take()
    assert taken is not None
    assert all(part is given for part, given in zip(taken[2], message, strict=True))


def test_buffers_of_any_items_count_in_bytes():
    array = np.arange(6, dtype=np.int32).reshape(2, 3)
    message = outgoing(1, b"ab", array.data, np.empty((0, 3)).data, np.array(7.0).data)
    assert message.total == 2 + 24 + 8
    outbox = SessionOutbox(MIB)
    outbox.put(message)
    assert drain(outbox) == [(1, 0, b"ab" + array.tobytes() + np.array(7.0).tobytes())]
    with pytest.raises(ArgumentError, match=r"shape \(2, 2\) with strides \(12, 8\)"):
        outgoing(1, array[:, ::2].data)


def test_a_message_above_the_limit_is_refused():
    with pytest.raises(LimitError, match=r"message of 11 bytes is above Limits\.message_bytes=10"):
        Outgoing(FrameKind.REQUEST, 1, [b"x" * 11], Limits(message_bytes=10))


def test_a_large_message_does_not_hold_up_small_ones():
    """The figures of the promise: behind 100 MiB, a small message waits for one frame."""
    outbox = SessionOutbox(MIB)
    block = bytes(MIB)
    outbox.put(outgoing(1, *[block] * 100))
    order = []
    for id in range(2, 52):
        taken = outbox.take()
        assert taken is not None
        order.append(taken[0].id)
        outbox.put(outgoing(id, b"x"))
        taken = outbox.take()
        assert taken is not None
        order.append(taken[0].id)
    assert order == [each for id in range(2, 52) for each in (1, id)]


def test_large_messages_share():
    outbox = SessionOutbox(10)
    for id in range(3):
        outbox.put(outgoing(id, b"x" * 35))
    assert [id for id, _, _ in drain(outbox)] == [0, 1, 2] * 4


def test_small_messages_that_never_end_do_not_starve_a_large_one():
    outbox = SessionOutbox(1000)
    outbox.put(outgoing(0, b"x" * 100_000))
    sent: Counter[bool] = Counter()
    for id in range(1, 2000):
        outbox.put(outgoing(id, b"y" * 36))
        taken = outbox.take()
        assert taken is not None
        sent[taken[0].id == 0] += sum(map(len, taken[2]))
    assert 0.3 < sent[True] / sent[False] * 36 / 100 < 3  # overhead included, each gets about half


def test_what_is_withdrawn_is_not_sent():
    outbox = SessionOutbox(10)
    small, large, other = outgoing(1, b"x"), outgoing(2, b"y" * 25), outgoing(3, b"z" * 15)
    for message in (small, large, other):
        outbox.put(message)
        outbox.put(message)  # once is enough
    assert outbox.unsent == 41
    outbox.withdraw(small)
    outbox.withdraw(small)
    taken = outbox.take()
    assert taken is not None
    assert taken[0] is large
    outbox.withdraw(large)
    assert outbox.unsent == 15
    assert [id for id, _, _ in drain(outbox)] == [3, 3]
    outbox.withdraw(other)
    assert outbox.unsent == 0
    outbox.put(large)  # again, from its beginning
    assert b"".join(body for _, _, body in drain(outbox)) == b"y" * 25


def test_an_interruption_takes_out_what_was_sent_in_part():
    outbox = SessionOutbox(10)
    messages = [outgoing(id, b"x" * size) for id, size in enumerate((25, 8, 3, 30, 9))]
    for message in messages:
        outbox.put(message)
    assert [outbox.take()[0].id for _ in range(3)] == [1, 0, 2]  # type: ignore[index]
    assert outbox.interrupt(4) == [messages[0]]
    assert outbox.unsent == 39
    outbox.put(messages[0])
    found = drain(outbox)
    assert all(len(body) <= 4 for _, _, body in found)
    assert [sum(len(body) for id, _, body in found if id == each) for each in range(5)] == [25, 0, 0, 30, 9]
    assert not outbox
    outbox.put(messages[1])
    outbox.clear()
    assert not outbox
    assert outbox.unsent == 0


def test_messages_that_are_held_wait_for_company_and_precede_it():
    outbox = SessionOutbox(32)
    held = [outgoing(id, b"y") for id in range(3)]
    for index, message in enumerate(held):
        outbox.hold(message, 5.0 + index)
    assert not outbox and outbox.take() is None and outbox.unsent == 3 and outbox.held_until == 5.0
    outbox.put(held[0])
    assert not outbox, "it is there already"
    outbox.withdraw(held[1])
    outbox.put(outgoing(9, b"x"))
    outbox.release()
    assert [id for id, _, _ in drain(outbox)] == [0, 2, 9]
    assert outbox.unsent == 0 and outbox.held_until > 1e9 and not any(message.queued for message in held)


def test_messages_that_are_held_survive_an_interruption():
    outbox = SessionOutbox(32)
    outbox.hold(outgoing(1, b"y"), 5.0)
    assert outbox.interrupt(32) == []
    assert [id for id, _, _ in drain(outbox)] == [1]
    outbox.hold(last := outgoing(2, b"y"), 5.0)
    outbox.clear()
    assert not outbox and outbox.unsent == 0 and not last.queued

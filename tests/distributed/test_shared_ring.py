"""Rings in shared memory: both sides compute the same places, bodies never overlap, and nonsense is refused."""

from __future__ import annotations

from random import Random

import pytest

from aiograd.distributed.rpc.frames import HEADER
from aiograd.distributed.rpc.shared.ring import MARK, NAME_BYTES, TOKEN_BYTES, Ring, SharedRecord, pack, unpack
from aiograd.errors import ProtocolError

SIZE = 1024


def ring(memory: bytearray) -> Ring:
    return Ring(memoryview(memory))


@pytest.mark.parametrize("seed", range(50))
def test_bodies_arrive_whole_whatever_their_lengths_and_however_late_they_are_read(seed: int) -> None:
    rng, memory = Random(seed), bytearray(SIZE)
    sender, receiver = ring(memory), ring(memory)
    on_their_way: list[bytes] = []
    told: list[bytes] = []
    sent = 0
    for _ in range(2000):
        body = rng.randbytes(rng.choice([1, 63, 64, 65, 300, 512, SIZE]))
        if rng.random() < 0.5 and sender.has_room(len(body)):
            sender.take(len(body))[:] = body
            on_their_way.append(body)
            sent += 1
        if rng.random() < 0.5 and on_their_way:
            body = on_their_way.pop(0)
            assert receiver.has_room(len(body))
            assert receiver.take(len(body)) == body
            if (record := receiver.release()) is not None:
                told.append(unpack(record)[1])
        if rng.random() < 0.5 and told:
            sender.released(told.pop(0))
    assert sent > 100
    assert receiver.end - receiver.begin < SIZE


def test_a_full_ring_takes_nothing_until_something_was_copied_out() -> None:
    memory = bytearray(SIZE)
    sender, receiver = ring(memory), ring(memory)
    assert not sender.has_room(SIZE + 1)
    sender.take(SIZE // 2)
    sender.take(SIZE // 2)
    assert not sender.has_room(1)
    receiver.take(SIZE // 2)
    record = receiver.release()
    assert record is not None
    sender.released(unpack(record)[1])
    assert sender.has_room(SIZE // 2) and not sender.has_room(SIZE // 2 + 1)


def test_a_position_that_was_released_before_or_not_put_in_is_refused() -> None:
    sender = ring(bytearray(SIZE))
    sender.take(512)
    for position in (0, 513, 1 << 63):
        with pytest.raises(ProtocolError) as caught:
            sender.released(position.to_bytes(8, "little"))
        assert caught.value.code == "shared"
    sender.released((512).to_bytes(8, "little"))
    with pytest.raises(ProtocolError):
        sender.released((512).to_bytes(8, "little"))


def test_records_are_read_as_they_were_written() -> None:
    for kind, content in (
        (SharedRecord.INVITE, bytes(NAME_BYTES + TOKEN_BYTES)),
        (SharedRecord.DECLINE, b""),
        (SharedRecord.BODIES, bytes(HEADER.size)),
        (SharedRecord.BODIES, bytes(3 * HEADER.size)),
        (SharedRecord.RELEASED, bytes(8)),
    ):
        assert unpack(pack(kind, content)) == (kind, content)


@pytest.mark.parametrize(
    "record",
    [
        MARK,
        MARK + b"\0",
        MARK + b"\5",
        MARK + b"\2more",
        pack(SharedRecord.BODIES),
        pack(SharedRecord.BODIES, bytes(HEADER.size + 1)),
        pack(SharedRecord.INVITE, bytes(NAME_BYTES)),
        pack(SharedRecord.RELEASED, bytes(9)),
    ],
)
def test_malformed_records_are_refused(record: bytes) -> None:
    with pytest.raises(ProtocolError) as caught:
        unpack(record)
    assert caught.value.code == "shared"

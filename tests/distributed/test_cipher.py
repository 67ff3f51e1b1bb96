"""Records: sealed frames open once, on the connection and in the direction they were made for, and in no other case."""

from __future__ import annotations

import random

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given
from hypothesis import strategies as st

from aiograd.distributed.rpc.cipher import KEPT_RECORDS, LARGE, MAX_BYTES, MAX_RECORDS, TAG_BYTES, Open, Seal
from aiograd.errors import AuthenticationError, LimitError, ProtocolError

KEY, OTHER_KEY = bytes(range(32)), bytes(range(1, 33))
FRAME_BYTES = 1 << 20
#: on both sides of the place where the way of sealing changes
SIZES = (0, 1, 200, LARGE - 1, LARGE, LARGE + 1, FRAME_BYTES)


def pair(frame_bytes: int = FRAME_BYTES) -> tuple[Seal, Open]:
    return Seal(KEY, frame_bytes), Open(KEY, frame_bytes)


def noise(size: int) -> bytes:
    return random.Random(size).randbytes(size)


def refusal(opener: Open, record: bytes | memoryview) -> str:
    """The text with which a record is refused, after checking that the opener is none the worse for it."""
    before = opener._next
    with pytest.raises(AuthenticationError) as caught:
        opener.open(record)
    assert opener._next == before
    assert caught.value.__context__ is None or caught.value.__suppress_context__
    return str(caught.value)


# ---- what goes in comes out


@pytest.mark.parametrize("size", SIZES)
def test_a_record_is_what_the_standard_construction_gives(size: int) -> None:
    seal, opener = pair()
    frame = noise(size)
    for counter in range(3):
        record = bytes(seal.seal([frame]))
        assert record == AESGCM(KEY).encrypt(counter.to_bytes(12, "big"), frame, None)
        assert len(record) == size + TAG_BYTES
        assert opener.open(record) == frame


@given(
    cuts=st.lists(st.sampled_from([0, 1, 15, 16, 17, 52, 1000, LARGE // 2, LARGE]), max_size=6),
    as_type=st.lists(st.sampled_from([bytes, bytearray, memoryview]), min_size=6, max_size=6),
)
def test_pieces_are_sealed_as_one_frame(cuts: list[int], as_type: list[type]) -> None:
    seal, opener = pair()
    parts = [kind(noise(size)) for size, kind in zip(cuts, as_type, strict=False)]
    for _ in range(2):
        assert bytes(opener.open(seal.seal(parts))) == b"".join(parts)


@pytest.mark.parametrize("count", [10, LARGE])
def test_pieces_may_be_views_of_wider_items(count: int) -> None:
    seal, opener = pair()
    for kind in "d?b":
        wide = memoryview(noise(8 * count)).cast(kind)
        assert opener.open(seal.seal([b"head", wide])) == b"head" + wide.tobytes()


@pytest.mark.parametrize("size", [100, LARGE])
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_records_may_come_as_any_bytes(size: int, kind: type) -> None:
    seal, opener = pair()
    assert opener.open(kind(seal.seal([noise(size)]))) == noise(size)


@pytest.mark.parametrize("size", [16, LARGE])
def test_equal_frames_make_different_records(size: int) -> None:
    seal, _ = pair()
    records = {bytes(seal.seal([bytes(size)])) for _ in range(5)}
    assert len(records) == 5


# ---- what an attacker can do


def test_no_byte_can_be_altered() -> None:
    seal, opener = pair()
    record = bytes(seal.seal([b"some frame"]))
    texts = set()
    for at in range(len(record)):
        for bit in range(8):
            altered = bytearray(record)
            altered[at] ^= 1 << bit
            texts.add(refusal(opener, altered))
    assert len(texts) == 1
    assert opener.open(record) == b"some frame"


def test_no_byte_of_a_large_record_can_be_altered() -> None:
    seal, opener = pair()
    record = bytearray(seal.seal([noise(LARGE)]))
    ends = [*range(40), *range(len(record) - 40, len(record))]
    for at in [*ends, *random.Random(0).sample(range(len(record)), 200)]:
        record[at] ^= 0x80
        refusal(opener, record)
        record[at] ^= 0x80
    assert opener.open(record) == noise(LARGE)


@pytest.mark.parametrize("size", [50, LARGE])
def test_records_cannot_be_cut_or_extended(size: int) -> None:
    seal, opener = pair()
    record = bytes(seal.seal([noise(size)]))
    lengths = range(len(record)) if size < 1000 else (0, 8, 15, 16, 17, LARGE - 1, LARGE, len(record) - 16, len(record) - 1)
    for length in lengths:
        refusal(opener, record[:length])
    for more in (b"\0", record, bytes(16)):
        refusal(opener, record + more)
        refusal(opener, more + record)
    assert opener.open(record) == noise(size)


@pytest.mark.parametrize("size", [10, LARGE])
def test_records_of_others_do_not_open(size: int) -> None:
    """An earlier connection and the other direction have another key."""
    refusal(pair()[1], Seal(OTHER_KEY, FRAME_BYTES).seal([noise(size)]))


def test_parts_of_two_records_do_not_make_one() -> None:
    seal, opener = pair()
    one, two = (bytes(seal.seal([noise(40)])) for _ in range(2))
    for mixed in (one[:8] + two[8:], two[:8] + one[8:], one[:-16] + two[-16:], two[:-16] + one[-16:], one[:30] + two[30:]):
        refusal(opener, mixed)


@given(st.binary(max_size=200))
def test_foreign_bytes_are_refused(record: bytes) -> None:
    refusal(pair()[1], record)


def test_oversized_records_are_refused_before_they_are_looked_at() -> None:
    opener = Open(KEY, 100)
    refusal(opener, Seal(KEY, 1000).seal([bytes(101)]))
    assert opener.open(Seal(KEY, 1000).seal([bytes(100)])) == bytes(100)


# ---- records that come again, too early or not at all


def test_records_open_one_after_the_other_and_once() -> None:
    seal, opener = pair()
    records = [bytes(seal.seal([b"%d" % number])) for number in range(20)]
    for number, record in enumerate(records):
        for other in (*records[:number], *records[number + 1 :]):
            refusal(opener, other)
        assert opener.open(record) == b"%d" % number
    assert opener.open(seal.seal([b"next"])) == b"next"


def test_a_counter_is_a_part_of_what_is_sealed() -> None:
    """It is not sent, so whoever leaves a record out cannot make up for it."""
    seal, opener = pair()
    records = [bytes(seal.seal([b"x"])) for _ in range(3)]
    assert len({len(record) for record in records}) == 1 and len(records[0]) == 1 + TAG_BYTES
    assert opener.open(records[0]) == b"x"
    for wrong in (records[2], (1).to_bytes(8, "big") + records[2], (1).to_bytes(8, "big") + records[1]):
        refusal(opener, wrong)
    assert [opener.open(record) for record in records[1:]] == [b"x", b"x"]


# ---- heads and bodies

HEAD = 48


def nowhere(head: bytes | bytearray | memoryview) -> None:
    """No place for the body."""


@pytest.mark.parametrize("size", SIZES)
def test_a_large_frame_opens_as_its_head_and_a_body_of_its_own(size: int) -> None:
    seal, opener = pair()
    frame = noise(size)
    found = [opener.open_in_place(seal.seal([frame]), HEAD, nowhere) for _ in range(2)]
    for head, body in found:
        assert head + bytes(body or b"") == frame
        if body is not None:
            assert len(head) == HEAD and not body.readonly
    if size >= LARGE:
        found[0][1][:] = bytes(size - HEAD)  # type: ignore[index]
        assert found[1][1] == frame[HEAD:], "nobody else has it"


def test_a_body_is_decrypted_to_its_place_and_to_no_other_length() -> None:
    seal, opener = pair()
    frame = noise(LARGE)
    memory = bytearray(2 * LARGE)
    heads: list[bytes] = []

    def place(length: int, head: bytes | bytearray | memoryview) -> memoryview:
        heads.append(bytes(head))
        return memoryview(memory)[100 : 100 + length]

    _, body = opener.open_in_place(seal.seal([frame]), HEAD, lambda head: place(LARGE - HEAD, head))
    assert heads == [frame[:HEAD]] and memory[100 : 100 + LARGE - HEAD] == frame[HEAD:] == body
    assert not any(memory[:100]) and not any(memory[100 + LARGE - HEAD :])
    for length in (LARGE - HEAD - 1, LARGE - HEAD + 1, 0):
        before = bytes(memory)
        _, body = opener.open_in_place(seal.seal([frame]), HEAD, lambda head, length=length: place(length, head))
        assert memory == before and body == frame[HEAD:]


def test_a_forged_record_changes_nothing_but_the_place_of_its_body() -> None:
    seal, opener = pair()
    frame = noise(LARGE)
    record = bytes(seal.seal([frame]))
    memory = bytearray(LARGE - HEAD)
    for position in (0, HEAD, LARGE // 2, LARGE - 1, LARGE, len(record) - 1):
        forged = bytearray(record)
        forged[position] ^= 1
        with pytest.raises(AuthenticationError):
            opener.open_in_place(forged, HEAD, lambda head: memoryview(memory))
        assert opener._next == 0
    for other in (record[:-1], record + b"x", bytes(Seal(OTHER_KEY, FRAME_BYTES).seal([frame])), bytes(FRAME_BYTES + TAG_BYTES + 1)):
        with pytest.raises(AuthenticationError):
            opener.open_in_place(other, HEAD, nowhere)
    assert opener.open_in_place(record, HEAD, nowhere) == (frame[:HEAD], frame[HEAD:])
    with pytest.raises(AuthenticationError):
        opener.open_in_place(record, HEAD, nowhere)
    opener._next = MAX_RECORDS
    with pytest.raises(AuthenticationError):
        opener.open_in_place(AESGCM(KEY).encrypt(MAX_RECORDS.to_bytes(12, "big"), frame, None), HEAD, nowhere)


# ---- limits


def test_a_frame_that_is_too_large_is_not_sealed() -> None:
    for frame_bytes in (100, LARGE):
        seal, opener = pair(frame_bytes)
        with pytest.raises(LimitError, match=f"{frame_bytes + 1} bytes.*at most {frame_bytes}"):
            seal.seal([bytes(frame_bytes), b"x"])
        assert opener.open(seal.seal([bytes(frame_bytes)])) == bytes(frame_bytes)


def test_a_key_protects_so_many_records_and_no_more() -> None:
    seal, opener = pair()
    seal._counter = opener._next = MAX_RECORDS - 1
    assert opener.open(seal.seal([b"last"])) == b"last"
    for _ in range(2):
        with pytest.raises(ProtocolError, match="new one") as caught:
            seal.seal([b""])
        assert caught.value.code == "key_exhausted"
    refusal(opener, AESGCM(KEY).encrypt(MAX_RECORDS.to_bytes(12, "big"), b"beyond", None))


def test_a_key_protects_so_many_bytes_and_no_more() -> None:
    seal, _ = pair()
    seal._bytes = MAX_BYTES - 10
    seal.seal([bytes(10)])
    with pytest.raises(ProtocolError) as caught:
        seal.seal([b"x"])
    assert caught.value.code == "key_exhausted"


# ---- buffers that are used again


def test_records_and_frames_stay_as_they_are_while_somebody_holds_them() -> None:
    seal, opener = pair()
    draw = random.Random(1)
    frames = [draw.randbytes(draw.choice([LARGE, LARGE + 5, 3 * LARGE, 100])) for _ in range(20)]
    records = [seal.seal([frame]) for frame in frames]
    opened = [memoryview(opener.open(record))[3:] for record in records]  # a part keeps the whole
    seal.seal([bytes(LARGE)])
    assert [bytes(view) for view in opened] == [frame[3:] for frame in frames]
    again = Open(KEY, FRAME_BYTES)
    assert [bytes(again.open(record)) for record in records] == frames


def test_a_large_buffer_serves_again_once_it_is_free() -> None:
    seal, _ = pair()

    def owners(count: int) -> set[int]:
        ids = set()
        for size in range(count):
            record = seal.seal([bytes(LARGE + size)])
            ids.add(id(record.obj))  # type: ignore[union-attr]
            del record
        return ids

    seal.seal([bytes(LARGE + 100)])
    assert len(owners(20)) == 1
    assert [len(buffer) for buffer in seal._buffers._buffers] == [LARGE + 100 + TAG_BYTES]


def test_a_connection_keeps_few_buffers() -> None:
    seal, _ = pair()
    held = [seal.seal([bytes(LARGE)]) for _ in range(10)]
    assert len({id(record.obj) for record in held}) == 10  # type: ignore[union-attr]
    assert len(seal._buffers._buffers) == KEPT_RECORDS
    held.clear()
    for size in (LARGE, 2 * LARGE, 4 * LARGE, LARGE):
        assert len(seal.seal([bytes(size)])) == size + TAG_BYTES
    assert len(seal._buffers._buffers) == KEPT_RECORDS
    assert max(len(buffer) for buffer in seal._buffers._buffers) == 4 * LARGE + TAG_BYTES  # one that was too small has been replaced


def test_a_refused_large_record_leaves_earlier_frames_alone() -> None:
    seal, opener = pair()
    frame = opener.open(seal.seal([noise(LARGE)]))
    altered = bytearray(seal.seal([bytes(LARGE)]))
    altered[100] ^= 1
    refusal(opener, altered)
    assert frame == noise(LARGE)


def test_nothing_shows_a_key() -> None:
    seal, opener = pair()
    with pytest.raises(AuthenticationError) as caught:
        opener.open(bytes(100))
    for text in (repr(seal), repr(opener), str(caught.value)):
        assert KEY.hex() not in text and repr(KEY)[2:12] not in text

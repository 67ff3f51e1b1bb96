"""Frame headers: what goes in comes out, each malformation has its code, and the bytes of a header never change."""

from __future__ import annotations

import random
import re
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiograd.distributed.rpc import frames as module
from aiograd.distributed.rpc.frames import HEADER, FrameKind, pack_header, parse
from aiograd.distributed.rpc.limits import Limits
from aiograd.errors import ProtocolError, VersionMismatch
from tests.distributed.mutation import cases, mutate

LIMITS = Limits(message_bytes=10_000, frame_bytes=1_000)
U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
WITH_BODY = (FrameKind.REQUEST, FrameKind.RESPONSE, FrameKind.FAILURE)
CONTROL = tuple(kind for kind in FrameKind if kind not in WITH_BODY)
DEFAULTS = {
    "magic": b"AGRD", "version": 5, "kind": 1, "flags": 7, "id": 5, "offset": 0, "total": 4, "length": 4, "deadline_ms": 250, "sent_ms": 70,
    "watermark": 3,
}  # fmt: skip


def build(body: bytes = b"body", **changes: object) -> bytes:
    """A REQUEST frame with some fields of its header changed."""
    return HEADER.pack(*(DEFAULTS | {"length": len(body)} | changes).values()) + body


def control(kind: FrameKind = FrameKind.PROBE, body: bytes = b"", **changes: object) -> bytes:
    return build(body, **({"kind": kind, "flags": 0, "total": 0, "deadline_ms": 0} | changes))


@given(
    kind=st.sampled_from(WITH_BODY),
    message_id=st.integers(1, 2**64 - 1),
    request_kind=st.integers(0, 255),
    pieces=st.lists(st.binary(max_size=200), max_size=4),
    before=st.integers(0, 4_000),
    after=st.integers(0, 4_000),
    deadline_ms=U32,
    sent_ms=U32,
    watermark=U64,
)
def test_what_is_packed_is_parsed(kind, message_id, request_kind, pieces, before, after, deadline_ms, sent_ms, watermark):
    body = b"".join(pieces)
    if not body:
        before = after = 0
    request_kind *= kind is FrameKind.REQUEST
    header = pack_header(
        kind, message_id, pieces, request_kind=request_kind, offset=before, total=before + len(body) + after, deadline_ms=deadline_ms,
        sent_ms=sent_ms, watermark=watermark,
    )  # fmt: skip
    found = parse(header + body, LIMITS)
    assert found[:-1] == (kind, request_kind, message_id, before, before + len(body) + after, deadline_ms, sent_ms, watermark)
    assert found.body == body


@pytest.mark.parametrize("kind", CONTROL)
def test_control_frames(kind):
    message_id = 0 if kind in (FrameKind.HEARTBEAT, FrameKind.GOODBYE) else 9
    body = bytes(16) if kind is FrameKind.ENDED else b""
    assert parse(pack_header(kind, message_id, [body], watermark=2**64 - 1) + body, LIMITS) == (kind, 0, message_id, 0, 0, 0, 0, 2**64 - 1, body)


def test_a_heartbeat_may_have_a_body_which_belongs_to_no_message():
    body = bytes(range(24))
    assert parse(pack_header(FrameKind.HEARTBEAT, 0, [body]) + body, LIMITS)[3:] == (0, 0, 0, 0, 0, body)


def test_the_body_is_a_view_of_the_frame():
    frame = bytearray(build())
    body = parse(memoryview(frame), LIMITS).body
    assert body.obj is frame and body.nbytes == 4


@pytest.mark.parametrize(
    ("kind", "message_id", "fields", "body", "expected"),
    [
        (
            FrameKind.REQUEST, 5, {"request_kind": 7, "total": 4, "deadline_ms": 250, "sent_ms": 258, "watermark": 3}, [b"bo", b"dy"],
            "41475244 05 01 0700 0500000000000000 0000000000000000 0400000000000000 04000000 fa000000 02010000 0300000000000000",
        ),
        (
            FrameKind.FAILURE, 2**64 - 1, {"offset": 1000, "total": 2000, "watermark": 2**63}, [b"body"],
            "41475244 05 03 0000 ffffffffffffffff e803000000000000 d007000000000000 04000000 00000000 00000000 0000000000000080",
        ),
        (
            FrameKind.HEARTBEAT, 0, {"watermark": 9}, [],
            "41475244 05 08 0000 0000000000000000 0000000000000000 0000000000000000 00000000 00000000 00000000 0900000000000000",
        ),
    ],
)  # fmt: skip
def test_golden_headers_of_version_5(kind, message_id, fields, body, expected):
    assert pack_header(kind, message_id, body, **fields) == bytes.fromhex(expected)


def test_golden_kinds_of_version_5():
    names = "REQUEST RESPONSE FAILURE RECEIVED PROBE CANCEL UNKNOWN HEARTBEAT GOODBYE ENDED"
    assert {kind.name: int(kind) for kind in FrameKind} == {name: code for code, name in enumerate(names.split(), 1)}


MALFORMED = [
    ("short", b""),
    ("short", build()[: HEADER.size - 1]),
    ("magic", build(magic=b"HTTP")),
    ("version", build(version=0)),
    ("version", build(version=1)),
    ("version", build(version=2)),
    ("version", build(version=6)),
    ("kind", build(kind=0)),
    ("kind", build(kind=11)),
    ("kind", build(kind=255)),
    ("flags", build(flags=0x100)),
    ("flags", build(kind=2, flags=1)),
    ("flags", control(flags=1)),
    ("frame_size", build(bytes(1001), total=1001)),
    ("frame_size", build(length=2**32 - 1)),
    ("length", build(length=3)),
    ("length", build(length=5)),
    ("length", build()[:-1]),
    ("length", control() + b"x"),
    ("total", build(kind=FrameKind.RESPONSE, flags=0, deadline_ms=0, total=10_001)),
    ("total", build(kind=FrameKind.RESPONSE, flags=0, deadline_ms=0, total=2**64 - 1, offset=2**63)),
    ("fragment", build(total=3)),
    ("fragment", build(total=10_000, offset=9_997)),
    ("fragment", build(offset=2**64 - 4)),
    ("fragment", build(b"", total=4)),
    ("fragment", build(b"", total=0, offset=1)),
    ("control", control(body=b"x")),
    ("control", control(FrameKind.GOODBYE, b"x", id=0)),
    ("control", control(FrameKind.HEARTBEAT, b"x", id=0, total=1)),
    ("control", control(FrameKind.ENDED, bytes(15))),
    ("control", control(FrameKind.ENDED)),
    ("control", control(offset=1)),
    ("control", control(total=1)),
    ("control", control(deadline_ms=1)),
    ("id", build(id=0)),
    ("id", control(id=0)),
    ("id", control(FrameKind.HEARTBEAT, id=1)),
    ("id", control(FrameKind.GOODBYE, id=1)),
    ("id", control(FrameKind.ENDED, bytes(16), id=0)),
]


@pytest.mark.parametrize(("code", "frame"), MALFORMED, ids=[f"{code}-{index}" for index, (code, _) in enumerate(MALFORMED)])
def test_each_malformation_has_its_code(code, frame):
    with pytest.raises(ProtocolError) as caught:
        parse(frame, LIMITS)
    assert caught.value.code == code


def test_every_documented_code_is_tested_and_the_other_way_round():
    table = (module.__doc__ or "").split("    ==========")[1]
    assert {code for code, _ in MALFORMED} == set(re.findall(r"^    (\w+) ", table, re.MULTILINE))


def test_a_frame_at_every_limit_is_taken():
    frame = build(bytes(1000), total=10_000, offset=9_000)
    assert parse(frame, LIMITS).body.nbytes == 1000
    assert parse(build(b"", total=0), LIMITS).total == 0
    assert parse(build(flags=0xFF), LIMITS).request_kind == 0xFF


def test_checks_come_in_their_order():
    """A frame with everything wrong is refused for the first thing; set right one after the other, the codes come as documented."""
    fields = {"magic": b"HTTP", "version": 9, "kind": 77, "flags": 0x8000, "length": 2**31, "total": 2**63, "id": 0}
    repairs = {
        "magic": {"magic": b"AGRD"}, "version": {"version": 5}, "kind": {"kind": 2}, "flags": {"flags": 0}, "frame_size": {"length": 5},
        "length": {"length": 4}, "total": {"total": 2}, "fragment": {"total": 4}, "id": {"id": 1},
    }  # fmt: skip
    codes = []
    for _ in repairs:
        with pytest.raises(ProtocolError) as caught:
            parse(build(**fields), LIMITS)
        codes.append(caught.value.code)
        fields |= repairs.get(codes[-1], {})
    assert codes == [*repairs]
    assert parse(build(**fields), LIMITS).id == 1


def test_another_version_names_both_ranges_and_which_side_is_to_be_upgraded():
    with pytest.raises(VersionMismatch, match=r"versions 6 to 6, this side 5 to 5; upgrade aiograd on this side"):
        parse(build(version=6), LIMITS)
    with pytest.raises(VersionMismatch, match=r"versions 4 to 4, this side 5 to 5; upgrade aiograd on the side of the peer"):
        parse(build(version=4), LIMITS)


def test_damaged_frames_are_refused_and_nothing_else():
    rng = random.Random("frames")
    valid = [build(), build(bytes(range(256)), total=9_000, offset=300), build(b"", total=0), control()]
    valid += [control(FrameKind.HEARTBEAT, bytes(size), id=0) for size in (0, 24)]
    valid.append(build(rng.randbytes(900), total=1_000, kind=2, flags=0, deadline_ms=0))
    accepted = 0
    tracemalloc.start()
    try:
        for _ in range(cases(4_000)):
            frame = mutate(rng, rng.choice(valid), rng.choice(valid))
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            try:
                found = parse(frame, LIMITS)
            except ProtocolError as error:
                assert error.code in {code for code, _ in MALFORMED}
            else:
                accepted += 1
                again = pack_header(
                    found.kind, found.id, [found.body], request_kind=found.request_kind, offset=found.offset, total=found.total,
                    deadline_ms=found.deadline_ms, sent_ms=found.sent_ms, watermark=found.watermark,
                )  # fmt: skip
                assert again + found.body == frame
                assert len(found.body) <= LIMITS.frame_bytes and (found.total <= LIMITS.message_bytes or found.kind is FrameKind.REQUEST)
                assert found.offset + len(found.body) <= found.total or found.kind is FrameKind.HEARTBEAT
            assert tracemalloc.get_traced_memory()[1] - before <= 16_384  # a frame is never copied, whatever it says
    finally:
        tracemalloc.stop()
    assert accepted > 100  # or the damage is so great that nothing behind the first checks was reached

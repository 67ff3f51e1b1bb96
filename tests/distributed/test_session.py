"""The promises of a session to callers and handlers, case by case.

Limits are in `test_session_limits`, every state with every frame in `test_session_states`, random schedules in `test_session_schedules`.
"""

from __future__ import annotations

import math
import struct
from dataclasses import replace

import numpy as np
import pytest

from aiograd.distributed.rpc import outbound
from aiograd.distributed.rpc.budget import Budget
from aiograd.distributed.rpc.frames import HEADER, FrameKind, pack_header
from aiograd.distributed.rpc.limits import Limits
from aiograd.distributed.rpc.outbound import ROUND_TRIPS
from aiograd.distributed.rpc.session import Abandon, Answered, Expired, PeerLeft
from aiograd.errors import ArgumentError
from tests.distributed.pairs import asked, attach, delivered, effects, frames, kinds, nothing_left, pair, pass_on, read, talk
from tests.distributed.session_link import SMALL, joined, make

MIB = 1 << 20


# ---- requests and answers


@pytest.mark.parametrize("size", [0, 1, 256, 257, 4000])
def test_a_request_and_its_answer(size):
    near, far = pair()
    message = bytes(index % 251 for index in range(size))
    id = near.request(9, [message], 10.0, 0.0)
    assert near.unsent == size
    assert pass_on(near, far) == max(1, -(-size // 256))
    deliver = delivered(far)
    assert (deliver.kind, bytes(deliver.message)) == (9, message)
    assert far.statistics().bytes_held == size
    far.respond(deliver.id, [message, b"!"], 0.5)
    pass_on(far, near, 0.5)
    assert effects(near) == [Answered(id, bytearray(message + b"!"), False)]
    assert near.statistics().round_trip == 0.5
    assert far.statistics().remembered == 1  # until the requester says that it has the answer
    pass_on(near, far)
    near.tick(1.0)
    pass_on(near, far, 1.0)
    assert nothing_left(near, far)
    here, there = near.statistics(), far.statistics()
    assert (here.frames_in, here.bytes_in) == (there.frames_out, there.bytes_out)
    assert (here.frames_out, here.bytes_out) == (there.frames_in, there.bytes_in)


def test_the_round_trip_is_that_of_the_quickest_answer_of_late():
    near, far = pair()

    def ask(begin: float, work: float) -> None:
        near.request(1, [b"?"], begin + 1000.0, begin)
        pass_on(near, far, begin)
        far.respond(delivered(far).id, [b"!"], begin + work)
        pass_on(far, near, begin + work)
        effects(near)

    assert near.statistics().round_trip is None
    ask(0.0, 2.0)
    assert near.statistics().round_trip == 2.0
    ask(10.0, 0.25)
    for number in range(1, ROUND_TRIPS):
        ask(10.0 * number + 10.0, 4.0)
        assert near.statistics().round_trip == 0.25, "the work of other requests does not count"
    ask(1000.0, 3.0)
    assert near.statistics().round_trip == 3.0, "what is long ago does not count"
    for number in range(ROUND_TRIPS):
        ask(2000.0 + number, 0.001 * (number % 2))
    assert near.statistics().round_trip == pytest.approx(0.0005, abs=1e-6), "a clock that counts milliseconds tells less than one on average"


def test_an_answer_that_is_held_goes_with_the_next_frame_or_when_its_time_is_over():
    near, far = pair()
    ids = [near.request(1, [b"?"], 10.0, 0.0) for _ in range(3)]
    pass_on(near, far)
    first, second, third = effects(far)
    far.respond(first.id, [b"one"], 0.0, hold=0.05)
    assert not far.has_output and frames(far) == [] and far.next_tick() == 0.05
    far.respond(second.id, [b"two"], 0.01)
    assert far.has_output and pass_on(far, near, 0.01) == 2
    assert effects(near) == [Answered(id, bytearray(text), False) for id, text in zip(ids, (b"one", b"two"), strict=False)]
    far.respond(third.id, [b"three"], 0.02, hold=0.05)
    far.tick(0.06)
    assert not far.has_output
    far.tick(0.07)
    assert pass_on(far, near, 0.07) == 1 and effects(near) == [Answered(ids[2], bytearray(b"three"), False)]
    pass_on(near, far, 0.07)
    near.tick(1.0)
    pass_on(near, far, 1.0)
    assert nothing_left(near, far)


def test_an_answer_that_is_held_goes_out_before_a_goodbye_and_is_asked_for_over_the_next_channel():
    near, far, _ = asked()
    far.respond(delivered(far).id, [b"!"], 0.0, hold=0.05)
    for session in (near, far):
        session.detach(0.01)
        session.attach(0.01)
    assert [name for name, _ in kinds(frames(far, 0.01))] == ["RESPONSE"]
    near.request(1, [b"?"], 10.0, 0.01)
    pass_on(near, far, 0.01)
    far.respond(delivered(far).id, [b"!"], 0.01, hold=0.05)
    far.goodbye(0.01)
    assert [name for name, _ in kinds(frames(far, 0.01))][-2:] == ["RESPONSE", "GOODBYE"]


def test_messages_are_writable_and_the_receivers_own():
    near, far = pair()
    for size in (10, 1000):
        near.request(1, [bytes(size)], 10.0, 0.0)
        wire = [bytearray(frame) for frame in frames(near)]
        for frame in wire:
            far.receive(memoryview(frame).toreadonly(), 0.0)
            frame[:] = b"?" * len(frame)
        array = np.frombuffer(delivered(far).message, np.uint8)
        array += 1
        assert (array == 1).all()


@pytest.mark.parametrize("size", [10, 1000])
def test_bodies_that_are_given_away_are_not_copied(size):
    near, far = pair()
    near.request(1, [bytes(size)], 10.0, 0.0)
    memory = []
    for frame in frames(near):
        header, rest = frame[: HEADER.size], frame[HEADER.size :]
        body = far.place(header)
        assert (body is None) is (not memory), "only what goes on with a message has a place in it"
        memory.append(memoryview(bytearray(rest)) if body is None else body)
        memory[-1][:] = rest
        far.receive(header, 0.0, memory[-1])
    message = np.frombuffer(delivered(far).message, np.uint8)
    assert all(np.shares_memory(message, np.frombuffer(body, np.uint8)) for body in memory[-1:])


def test_a_place_is_given_for_any_header_and_changes_nothing():
    near, far = pair()
    near.request(1, [bytes(1000)], 10.0, 0.0)
    wire = frames(near)
    far.receive(wire[0], 0.0)
    before = far.statistics()
    for kind in FrameKind:
        for id in (0, 1, 2, 2**63):
            for offset, body in ((0, 256), (256, 256), (256, 2**32 - 1), (2**63, 5)):
                header = bytearray(pack_header(kind, id, total=1000, offset=offset))
                struct.pack_into("<I", header, HEADER.size - 20, body)
                place = far.place(header)
                assert (place is not None) is (kind is FrameKind.REQUEST and (id, offset, body) == (1, 256, 256))
    assert far.statistics() == before
    for frame in wire[1:]:
        far.receive(frame, 0.0)
    assert bytes(delivered(far).message) == bytes(1000)


def test_ids_of_both_directions_do_not_meet():
    near, far = pair()
    ids = near.request(1, [b"a"], 10.0, 0.0), far.request(2, [b"b"], 10.0, 0.0)
    assert ids == (1, 1)
    wire = frames(near), frames(far)
    for frame in wire[0]:
        far.receive(frame, 0.0)
    for frame in wire[1]:
        near.receive(frame, 0.0)
    for session, name in ((near, b"b"), (far, b"a")):
        deliver = delivered(session)
        assert deliver.message == name
        session.respond(deliver.id, [name.upper()], 0.0)
    pass_on(near, far)
    pass_on(far, near)
    assert (effects(near), effects(far)) == ([Answered(1, bytearray(b"A"), False)], [Answered(1, bytearray(b"B"), False)])


def test_a_late_answer_is_ignored():
    near, far = pair()
    far.respond(5, [b"never asked"], 0.0)
    near.request(1, [b"?"], 1.0, 0.0)
    pass_on(near, far)
    id = delivered(far).id
    far.respond(id, [b"first"], 0.0)
    far.respond(id, [b"second"], 0.0)
    wire = frames(far)
    assert [bytes(frame.body) for frame in read(wire)] == [b"first"]
    near.tick(1.0)
    assert effects(near) == [Expired(1)]
    near.receive(wire[0], 1.0)
    assert effects(near) == []


# ---- what is lost, repeated, or overtaken


def test_nothing_is_resent_over_a_reliable_channel_until_it_is_replaced():
    near, far = pair()
    for size in (1, 3000):
        near.request(1, [bytes(size)], 100.0, 0.0)
    sent = len(frames(near))
    for step in range(1, 100):
        near.tick(step * 0.3)
        assert all(kind == "HEARTBEAT" for kind, _ in kinds(frames(near, step * 0.3)))
    near.detach(30.0)
    assert frames(near, 30.0) == []
    near.attach(31.0)
    wire = frames(near, 31.0)
    assert kinds(wire) == [("PROBE", 2), ("REQUEST", 1)]  # a large one is asked after first
    far.attach(31.0)
    for frame in wire:
        far.receive(frame, 31.0)
    pass_on(far, near, 31.0)
    assert pass_on(near, far, 31.0) == sent - 1
    assert [len(each.message) for each in effects(far)] == [1, 3000]
    assert near.statistics().resent == 2


def test_a_message_cut_by_the_end_of_its_channel_is_completed_over_the_next():
    near, far = pair()
    near.request(1, [bytes(range(200)) * 10], 100.0, 0.0)
    for _ in range(4):
        far.receive(joined(near.next_frame(0.0) or ()), 0.0)
    for session in (near, far):
        session.detach(1.0)
        session.attach(2.0, frame_bytes=100)  # cut differently
    for _ in range(3):
        pass_on(near, far, 2.0)
        pass_on(far, near, 2.0)
    deliver = delivered(far)
    assert bytes(deliver.message) == bytes(range(200)) * 10
    far.respond(deliver.id, [bytes(1000)], 2.0)
    for _ in range(2):
        near.receive(joined(far.next_frame(2.0) or ()), 2.0)
    for session in (near, far):
        session.detach(3.0)
        session.attach(4.0)
    for _ in range(2):
        pass_on(far, near, 4.0)
        pass_on(near, far, 4.0)
    assert effects(near) == [Answered(1, bytearray(1000), False)]


def test_what_is_sent_again_after_channels_that_break_soon_is_bounded():
    """A hundred large requests and two hundred channels without an answer: a few headers each, not their bytes again and again."""
    near, far = pair(replace(SMALL, requests_per_peer=200, bytes_per_peer=10**6, bytes_total=10**6))
    for _ in range(100):
        near.request(1, [bytes(3000)], 1000.0, 0.0)
    pass_on(near, far)
    once = near.statistics().bytes_out
    for number in range(200):
        attach(float(number), near, far)
        pass_on(near, far, float(number))
        pass_on(far, near, float(number))
    statistics = near.statistics()
    assert statistics.resent == 100 * 200
    assert statistics.bytes_out < 5 * once
    assert len(effects(far)) == 100


def test_nothing_of_a_half_message_is_left_with_its_channel():
    near, far = pair()
    near.request(1, [bytes(1000)], 60.0, 0.0)
    far.receive(joined(near.next_frame(0.0) or ()), 0.0)
    assert (far.statistics().bytes_held, far.statistics().running) == (1000, 1)
    far.detach(0.0)
    assert (far.statistics().bytes_held, far.statistics().remembered) == (0, 0)
    attach(1.0, near, far)
    talk(near, far, 1.0)
    far.respond(delivered(far).id, [bytes(1000)], 1.0)
    near.receive(joined(far.next_frame(1.0) or ()), 1.0)
    assert near.statistics().bytes_held == 1000
    near.detach(1.0)
    assert near.statistics().bytes_held == 0
    attach(2.0, near, far)
    talk(near, far, 2.0)
    assert effects(near) == [Answered(1, bytearray(1000), False)]


def test_cancellation_is_told_again_over_the_next_channel():
    near, far, id = asked(seconds=60.0)
    effects(far)
    near.cancel(id, 0.0)
    assert kinds(frames(near)) == [("CANCEL", id)]  # lost with the channel
    assert "CANCEL" not in {kind for kind, _ in kinds(frames(near, 5.0))}
    attach(6.0, near, far)
    pass_on(near, far, 6.0)
    assert effects(far) == [Abandon(id)]
    pass_on(far, near, 6.0)
    assert near.statistics().outstanding == 0


def test_an_answer_cut_by_the_end_of_its_channel_is_sent_again_unasked():
    near, far, _ = asked(seconds=100.0)
    far.respond(delivered(far).id, [bytes(600)], 0.0)
    far.request(1, [bytes(700)], 100.0, 0.0)  # has the same id
    assert kinds([joined(far.next_frame(0.0) or ()) for _ in range(2)]) == [("RESPONSE", 1), ("REQUEST", 1)]
    far.attach(1.0)
    assert sorted(kinds(frames(far, 1.0))) == [("REQUEST", 1)] * 3 + [("RESPONSE", 1)] * 3


def test_frames_are_no_larger_than_the_peer_takes():
    near, _ = pair()
    near.attach(0.0, frame_bytes=100)
    near.request(1, [bytes(1000)], 10.0, 0.0)
    assert [len(frame.body) for frame in read(frames(near))] == [100] * 10
    near.attach(0.0, frame_bytes=10_000)
    near.request(1, [bytes(1000)], 10.0, 0.0)
    assert max(len(frame.body) for frame in read(frames(near))) == SMALL.frame_bytes


# ---- deadlines


def test_a_request_expires_at_its_deadline():
    near, _ = pair()
    id = near.request(1, [b"?"], 2.0, 10.0)
    later = near.request(1, [b"?"], 3.0, 10.0)
    frames(near, 10.0)
    near.tick(11.99)
    assert effects(near) == []
    near.tick(12.0)
    assert effects(near) == [Expired(id)]
    near.tick(13.5)
    assert effects(near) == [Expired(later)]
    assert near.statistics().outstanding == 0


@pytest.mark.parametrize("size", [1, 1000])
def test_what_expired_before_it_was_sent_is_not_sent(size):
    near, _ = pair()
    near.request(1, [bytes(size)], 0.0, 0.0)
    near.request(1, [bytes(size)], 1.0, 0.0)
    if size > 256:
        assert near.next_frame(0.5) is not None
    assert frames(near, 1.0) == []
    assert near.unsent == 0
    near.tick(1.0)
    assert effects(near) == [Expired(1), Expired(2)]


def test_detached_sessions_keep_deadlines():
    near, far, _ = asked(seconds=1.0)
    effects(far)
    for session in (near, far):
        session.detach(0.1)
    assert near.next_tick() == 1.0
    near.tick(1.0)
    far.tick(1.0)
    assert (effects(near), effects(far)) == ([Expired(1)], [Abandon(1)])


@pytest.mark.parametrize(("timeout", "expected"), [(0.2, 0.19), (1.0, 0.95), (10.0, 9.95), (100.0, 59.95)])
def test_the_deadline_shrinks_on_its_way_and_is_bounded(timeout, expected):
    near, far = pair()
    near.request(1, [b"?"], timeout, 0.0)
    wire = frames(near)
    far.receive(wire[0], 5.0)  # clocks differ: only what is left counts
    assert delivered(far).timeout == pytest.approx(expected)
    assert far.next_tick() == pytest.approx(min(0.5, 5 + expected))
    far.tick(5 + expected + 1e-9)
    assert effects(far) == [Abandon(1)]
    assert far.statistics().bytes_held == 0


def test_time_spent_in_the_queue_counts():
    near, far = pair()
    near.request(1, [b"?"], 10.0, 0.0)
    far.receive(frames(near, 4.0)[0], 0.0)
    assert delivered(far).timeout == pytest.approx(5.95)


def test_time_between_fragments_counts():
    near, far = pair()
    near.request(1, [bytes(700)], 10.0, 0.0)
    for now in (0.0, 1.0, 4.0):
        far.receive(joined(near.next_frame(now) or ()), 0.0)
    assert delivered(far).timeout == pytest.approx(5.95)
    near, far = pair()
    near.request(1, [bytes(700)], 10.0, 0.0)
    for now in (0.0, 5.0):
        far.receive(joined(near.next_frame(now) or ()), 0.0)
    far.tick(4.94)
    assert far.statistics().bytes_held == 700
    far.tick(4.95)
    assert far.statistics().bytes_held == 0


def test_a_peer_that_names_no_deadline_gets_the_default():
    _, far = pair()
    far.receive(pack_header(FrameKind.REQUEST, 1), 0.0)
    assert delivered(far).timeout == pytest.approx(SMALL.max_deadline - 0.05)


def test_a_request_that_never_becomes_complete_is_forgotten_at_its_deadline():
    near, far = pair()
    near.request(1, [bytes(1000)], 3.0, 0.0)
    for frame in frames(near)[:-1]:
        far.receive(frame, 0.0)
    assert far.statistics().bytes_held == 1000
    far.tick(2.95)
    assert nothing_left(far)
    assert effects(far) == []


@pytest.mark.parametrize("timeout", [math.nan, math.inf, -math.inf])
def test_timeouts_are_numbers(timeout):
    with pytest.raises(ArgumentError, match="finite"):
        make().request(1, [b""], timeout, 0.0)


@pytest.mark.parametrize("kind", [-1, 256])
def test_kinds_fit_the_header(kind):
    session = make()
    with pytest.raises(ArgumentError, match="0 to 255"):
        session.request(kind, [b""], 1.0, 0.0)
    assert session.statistics().outstanding == 0


# ---- cancellation


def test_what_was_not_sent_yet_is_cancelled_without_a_word():
    near, _ = pair()
    near.cancel(near.request(1, [b"?"], 10.0, 0.0), 0.0)
    assert frames(near) == []
    assert nothing_left(near)


def test_cancellation_reaches_the_handler():
    near, far, id = asked()
    assert delivered(far).id == id
    near.cancel(id, 0.1)
    near.cancel(id, 0.1)
    assert near.statistics().outstanding == 1  # until the peer has heard of it
    assert pass_on(near, far) == 1
    assert effects(far) == [Abandon(id)]
    far.respond(id, [b"too late"], 0.2)
    wire = frames(far)
    assert kinds(wire) == [("FAILURE", id)]
    near.receive(wire[0], 0.2)
    assert effects(near) == []
    near.tick(1.0)
    pass_on(near, far, 1.0)
    assert nothing_left(near, far)


def test_cancellation_stops_what_is_still_being_sent():
    near, far = pair()
    id = near.request(1, [bytes(4000)], 10.0, 0.0)
    far.receive(joined(near.next_frame(0.0) or ()), 0.0)
    near.cancel(id, 0.0)
    assert near.unsent == 0
    wire = frames(near)
    assert kinds(wire) == [("CANCEL", id)]
    far.receive(wire[0], 0.0)
    assert (effects(far), far.statistics().bytes_held) == ([], 0)


def test_an_answer_that_crosses_the_cancellation_is_dropped():
    near, far, id = asked()
    far.respond(delivered(far).id, [bytes(1000)], 0.0)
    answer = frames(far)
    near.receive(answer[0], 0.0)
    near.cancel(id, 0.0)
    assert near.statistics().bytes_held == 0
    for frame in answer[1:]:
        near.receive(frame, 0.0)
    assert effects(near) == []
    assert near.statistics().outstanding == 0


# ---- what is remembered


def test_one_slow_request_does_not_keep_the_answers_of_others():
    near, far, _ = asked(b"slow", 60.0, replace(SMALL, requests_per_peer=4))
    assert delivered(far).id == 1
    copies, most = [], 0
    for step in range(3000):
        near.request(1, [b"quick"], 10.0, 0.0)
        wire = frames(near)
        for frame in wire:
            far.receive(frame, 0.0)
        copies.append(wire[-1])
        far.respond(delivered(far).id, [bytes(100)], 0.0)
        pass_on(far, near)
        if step % 100 == 0:
            near.tick(step * 0.01)
        most = max(most, far.statistics().bytes_stored)
    assert len(effects(near)) == 3000
    assert most <= 2 * outbound.UNACKNOWLEDGED_BYTES
    near.tick(100.0)
    pass_on(near, far, 100.0)
    assert far.statistics().remembered == 0  # the slow one has expired, with the peer told so
    for copy in copies:
        far.receive(copy, 100.0)
    assert [effect for effect in effects(far) if not isinstance(effect, Abandon)] == []


def test_heartbeats_name_what_is_unresolved():
    near, far = pair()
    for _ in range(5):
        near.request(1, [b"?"], 60.0, 0.0)
    pass_on(near, far)
    for id in (2, 4, 5):
        far.respond(id, [b"!"], 0.0)
    pass_on(far, near)
    effects(far)
    near.tick(0.5)
    wire = frames(near, 0.5)
    (heartbeat,) = read(wire)
    assert struct.unpack("<3Q", heartbeat.body) == (6, 1, 3)
    far.receive(wire[0], 0.5)
    assert far.statistics().remembered == 2
    assert effects(far) == []


def test_more_unresolved_requests_than_a_heartbeat_names():
    limits = replace(SMALL, requests_per_peer=100, frame_bytes=80)  # room for nine and the horizon
    near, far = pair(limits)
    for _ in range(40):
        near.request(1, [b"?"], 60.0, 0.0)
    pass_on(near, far)
    for id in (2, 5, 30, 31):
        far.respond(id, [b"!"], 0.0)
    pass_on(far, near)
    effects(far)
    near.tick(0.5)
    pass_on(near, far, 0.5)
    assert far.statistics().remembered == 38  # 2 and 5 are below the horizon, the rest is told later
    assert effects(far) == []


def test_the_answerer_hears_soon_that_a_large_answer_has_arrived():
    limits = Limits()
    near, far, _ = asked(limits=limits)
    far.respond(delivered(far).id, [bytes(MIB)], 0.0)
    pass_on(far, near)
    wire = frames(near)
    assert kinds(wire, limits) == [("HEARTBEAT", 0)]
    far.receive(wire[0], 0.0)
    assert nothing_left(near, far)


def test_a_request_that_expired_is_abandoned_by_a_peer_whose_clock_is_slow():
    near, far, _ = asked(seconds=1.0)
    effects(far)
    near.tick(1.0)
    pass_on(near, far, 0.1)
    assert effects(far) == [Abandon(1)]
    assert nothing_left(far)


# ---- heartbeats, silence, the end


def test_a_side_with_nothing_to_say_sends_heartbeats():
    near, _ = pair()
    assert near.next_tick() == 0.5
    near.tick(0.4)
    assert not near.has_output
    near.tick(0.5)
    assert near.has_output
    near.tick(0.5)
    assert kinds(frames(near, 0.5)) == [("HEARTBEAT", 0)]
    near.tick(0.9)
    assert frames(near, 0.9) == []
    near.tick(1.0)
    assert kinds(frames(near, 1.0)) == [("HEARTBEAT", 0)]


def test_heartbeats_are_sent_more_often_while_there_is_work_and_for_a_while_after_it():
    """Each sixth of the time after which a silent peer is lost, by either side."""
    near, far = pair()
    for side in (near, far):
        side.tick(0.5)
        frames(side, 0.5)
    near.request(1, [b"?"], 100.0, 0.7)
    (frame,) = frames(near, 0.7)
    far.receive(frame, 0.7)
    for now in (0.95, 1.2, 1.45):
        for side in (near, far):
            side.tick(now - 0.01)
            assert frames(side, now - 0.01) == []
            side.tick(now)
            assert kinds(frames(side, now)) == [("HEARTBEAT", 0)]
    far.respond(1, [b"!"], 2.0)
    (answer,) = frames(far, 2.0)
    near.receive(answer, 2.0)
    for side in (near, far):
        side.receive(pack_header(FrameKind.HEARTBEAT, 0, watermark=2), 2.1)
        side.tick(7.0)
        assert kinds(frames(side, 7.0)) == [("HEARTBEAT", 0)]
        side.receive(pack_header(FrameKind.HEARTBEAT, 0, watermark=2), 8.0)
        side.tick(8.0)
        assert kinds(frames(side, 8.0)) == [("HEARTBEAT", 0)]
        side.tick(8.49)
        assert frames(side, 8.49) == []
        side.tick(8.5)
        assert kinds(frames(side, 8.5)) == [("HEARTBEAT", 0)]


def test_a_channel_without_room_does_not_make_ticks_endless():
    near, _ = pair()
    for step in range(1, 10):
        near.receive(pack_header(FrameKind.HEARTBEAT, 0), step * 0.5)
        near.tick(step * 0.5)
        assert near.next_tick() == (step + 1) * 0.5
    assert kinds(frames(near, 5.0)) == [("HEARTBEAT", 0)]


def test_silence():
    near, _ = pair()
    near.receive(pack_header(FrameKind.HEARTBEAT, 0), 1.0)
    assert near.detector.last == 1.0
    assert not near.is_silent(2.49)
    assert near.is_silent(2.5)
    near.tick(2.4)
    frames(near, 2.4)
    assert near.next_tick() == 2.5
    near.tick(2.5)
    assert near.next_tick() == 2.9  # said once
    near.detach(2.6)
    assert not near.is_silent(9.0)
    assert near.next_tick() is None
    near.attach(10.0)
    assert not near.is_silent(11.0)


def test_goodbye_comes_after_short_answers_and_before_the_rest_of_long_ones():
    near, far = pair()
    for size in (1000, 10, 20):
        near.request(1, [bytes(size)], 10.0, 0.0)
    assert near.next_frame(0.0) is not None
    near.goodbye(0.0)
    assert near.has_output
    wire = frames(near)
    assert kinds(wire) == [("REQUEST", 3), ("GOODBYE", 0)]
    assert not near.has_output
    far.receive(wire[-1], 0.0)
    assert effects(far) == [PeerLeft()]


def test_the_end_of_a_session_frees_everything():
    budget = Budget(SMALL.bytes_per_peer, SMALL.bytes_total)
    near, far = make(budget=budget.child()), make()
    attach(0.0, near, far)
    waiting, cancelled, answered = (near.request(1, [b"?"], 10.0, 0.0) for _ in range(3))
    pass_on(near, far)
    near.cancel(cancelled, 0.0)
    far.respond(answered, [bytes(1000)], 0.0)
    far.request(1, [bytes(600)], 10.0, 0.0)
    for _ in range(3):
        near.receive(joined(far.next_frame(0.0) or ()), 0.0)
    near.request(1, [bytes(700)], 10.0, 0.0)
    assert near.next_frame(0.0) is not None
    assert budget.held == 1600
    assert near.fail_all() == [waiting, answered, 4]
    assert budget.held == 0
    assert nothing_left(near)
    assert (near.next_tick(), near.has_output, effects(near)) == (None, False, [])


# ---- large messages


def test_large_messages_move_without_copies_and_let_small_ones_through():
    limits = Limits()
    near, far = pair(limits)
    array = np.arange(100 * MIB // 8, dtype=np.float64)
    near.request(1, [b"head" * 16, array.data], 60.0, 0.0)
    waits, wait, whole = [], 0, 0
    for step in range(1000):
        if step % 5 == 0:
            near.request(2, [b"small"], 10.0, 0.0)
            wait = 0
        frame = near.next_frame(0.0)
        if frame is None:
            break
        wait += 1
        if frame[-1] == b"small":
            waits.append(wait)
        whole += sum(1 for part in frame[1:] if isinstance(part, memoryview) and part.obj is array)
        far.receive(joined(frame), 0.0)
    assert max(waits) <= 2
    assert whole == 101  # each frame's part of the array is a view of it
    (large,) = [effect for effect in effects(far) if effect.kind == 1]
    assert np.array_equal(np.frombuffer(large.message, np.float64, offset=64), array)

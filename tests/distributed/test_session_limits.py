"""A session refuses more than there is room for, and messages that no honest peer sends."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from random import Random

import pytest

from aiograd.distributed.rpc import inbound, outbound
from aiograd.distributed.rpc.budget import Budget
from aiograd.distributed.rpc.frames import FrameKind, pack_header
from aiograd.distributed.rpc.session import Abandon, Answered, Deliver
from aiograd.errors import LimitError, ProtocolError
from tests.distributed.mutation import cases, mutate
from tests.distributed.pairs import asked, attach, delivered, effects, frames, kinds, nothing_left, pair, pass_on
from tests.distributed.session_link import OVERLOADED, SMALL, joined, make

# ---- limits


def test_a_request_for_which_there_is_no_room_is_refused_and_never_run():
    near, far = pair()
    for _ in range(4):
        near.request(1, [bytes(4000)], 10.0, 0.0)
    wire = frames(near)
    for frame in wire:
        far.receive(frame, 0.0)
    assert far.statistics().bytes_held == 12_000 <= SMALL.bytes_per_peer
    running = [effect.id for effect in effects(far)]
    assert len(running) == 3
    pass_on(far, near)
    (refused,) = effects(near)
    assert refused == Answered(({1, 2, 3, 4} - {*running}).pop(), bytearray(OVERLOADED), True)
    for id in running:
        far.respond(id, [b"!"], 0.0)
    for frame in wire:
        far.receive(frame, 0.0)  # there is room now
    assert effects(far) == []
    near.request(1, [bytes(4000)], 10.0, 0.0)
    pass_on(near, far)
    assert len(effects(far)) == 1


def test_peers_share_the_total_budget():
    budget = Budget(SMALL.bytes_per_peer, 6000)
    far = [make(budget=budget.child()) for _ in range(2)]
    near = [make() for _ in range(2)]
    for each in (*far, *near):
        each.attach(0.0)
    for one, other in zip(near, far, strict=True):
        one.request(1, [bytes(4000)], 10.0, 0.0)
        pass_on(one, other)
        pass_on(other, one)
    assert len(effects(far[0])) == 1
    assert effects(near[1]) == [Answered(1, bytearray(OVERLOADED), True)]
    assert budget.held == 4000
    far[0].respond(1, [], 0.0)
    assert budget.held == 0


def test_requests_that_run_are_counted():
    near, far = pair()
    for _ in range(SMALL.requests_per_peer + 2):
        near.request(1, [b""], 10.0, 0.0)
    pass_on(near, far)
    assert len(effects(far)) == far.statistics().running == SMALL.requests_per_peer
    pass_on(far, near)
    assert [(effect.id, effect.failed) for effect in effects(near)] == [(7, True), (8, True)]
    far.respond(1, [], 0.0)
    near.request(1, [b""], 10.0, 0.0)
    pass_on(near, far)
    assert len(effects(far)) == 1


def test_an_answer_that_can_never_fit_fails_at_once():
    near, far, id = asked(limits=replace(SMALL, message_bytes=20_000))
    far.respond(delivered(far).id, [bytes(SMALL.bytes_per_peer + 1)], 0.0)
    pass_on(far, near)
    assert effects(near) == [Answered(id, bytearray(OVERLOADED), True)]
    assert nothing_left(near)


def without_room(seconds: float):
    """A request whose answer of 4000 bytes is made while 2000 of the 5000 bytes of the requester are reserved."""
    budget = Budget(SMALL.bytes_per_peer, 5000)
    other = budget.child()
    near, far = make(budget=budget.child()), make()
    attach(0.0, near, far)
    id = near.request(1, [b"?"], seconds, 0.0)
    pass_on(near, far)
    far.respond(delivered(far).id, [bytes(4000)], 0.0)
    assert other.reserve(2000)
    return near, far, id, budget, other


def test_an_answer_for_which_there_is_no_room_now_is_fetched_later():
    near, far, id, budget, other = without_room(10.0)
    pass_on(far, near)
    assert effects(near) == []
    other.release(2000)
    near.tick(3.0)
    wire = frames(near, 3.0)
    assert ("PROBE", 1) in kinds(wire)
    for frame in wire:
        far.receive(frame, 3.0)
    pass_on(far, near, 3.0)
    assert effects(near) == [Answered(id, bytearray(4000), False)]
    assert budget.held == 0


def test_an_answer_is_asked_for_until_it_comes_also_when_the_refused_one_is_still_on_its_way():
    near, far, id, budget, other = without_room(30.0)
    near.receive(joined(far.next_frame(0.0) or ()), 0.0)
    near.tick(0.2)
    assert pass_on(near, far, 0.2) == 1  # a PROBE that changes nothing: the answer is being sent
    other.release(2000)
    pass_on(far, near, 0.2)  # the rest of it
    assert effects(near) == [] and budget.held == 0
    near.tick(0.7)
    assert pass_on(near, far, 0.7) >= 1
    near.receive(joined(far.next_frame(0.7) or ()), 0.7)
    near.tick(2.0)
    assert "PROBE" not in {kind for kind, _ in kinds(frames(near, 2.0))}, "it is arriving"
    pass_on(far, near, 2.0)
    assert effects(near) == [Answered(id, bytearray(4000), False)]
    assert budget.held == 0


def test_a_peer_that_lets_answers_pile_up_is_refused():
    limits = replace(SMALL, bytes_per_peer=10_000)
    _, far = pair(limits)
    for id in range(1, 5):
        far.receive(pack_header(FrameKind.REQUEST, id, deadline_ms=9999), 0.0)
        far.respond(id, [bytes(4000)], 0.0)
    assert len(effects(far)) == 3
    assert far.statistics().bytes_stored == 12_000 + len(OVERLOADED)
    far.receive(pack_header(FrameKind.REQUEST, 5, deadline_ms=9999, watermark=5), 0.0)
    assert len(effects(far)) == 1


@pytest.mark.parametrize("kind", [FrameKind.REQUEST, FrameKind.CANCEL])
def test_a_peer_that_resolves_nothing_is_stopped(kind):
    _, far = pair()
    most = inbound.UNRESOLVED_ANYWAY + inbound.UNRESOLVED_PER_RUNNING * SMALL.requests_per_peer
    with pytest.raises(ProtocolError) as caught:
        for id in range(1, most + 2):
            far.receive(pack_header(kind, id), 0.0)
            frames(far)
    assert caught.value.code == "unresolved"
    assert id == most + 1
    assert far.statistics().remembered == most


def test_a_peer_that_asks_and_does_not_read_is_stopped():
    _, far = pair()
    with pytest.raises(ProtocolError) as caught:
        for id in range(1, 10_000):
            far.receive(pack_header(FrameKind.PROBE, id), 0.0)
    assert caught.value.code == "flood"
    _, far = pair()
    for _ in range(10_000):
        far.receive(pack_header(FrameKind.PROBE, 1), 0.0)
    assert len(frames(far)) == 1  # the same one asked after again and again takes no room


@contextmanager
def out_of_memory(monkeypatch, module):
    def fail(_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(module, "Assembly", fail)
        patch.setattr(module, "bytearray", fail, raising=False)
        yield


@pytest.mark.parametrize("size", [10, 1000])
def test_out_of_memory_refuses_the_one_request(monkeypatch, size):
    with out_of_memory(monkeypatch, inbound):
        near, far, _ = asked(bytes(size))
    assert effects(far) == []
    assert (far.statistics().bytes_held, far.statistics().running) == (0, 0)
    pass_on(far, near)
    assert effects(near) == [Answered(1, bytearray(OVERLOADED), True)]


@pytest.mark.parametrize("size", [10, 1000])
def test_out_of_memory_for_an_answer_asks_for_it_again(monkeypatch, size):
    near, far, id = asked()
    far.respond(delivered(far).id, [bytes(size)], 0.0)
    with out_of_memory(monkeypatch, outbound):
        pass_on(far, near)
    assert (effects(near), near.statistics().bytes_held) == ([], 0)
    near.tick(3.0)
    pass_on(near, far, 3.0)
    pass_on(far, near, 3.0)
    assert effects(near) == [Answered(id, bytearray(size), False)]


def test_messages_above_the_limit_are_not_sent():
    near, far = pair()
    with pytest.raises(LimitError):
        near.request(1, [bytes(4097)], 10.0, 0.0)
    assert nothing_left(near)
    near.request(1, [b"?"], 10.0, 0.0)
    pass_on(near, far)
    id = delivered(far).id
    with pytest.raises(LimitError):
        far.respond(id, [bytes(4097)], 0.0)
    far.respond(id, [b"too much"], 0.0, failed=True)
    pass_on(far, near)
    assert effects(near) == [Answered(1, bytearray(b"too much"), True)]


# ---- what no honest peer sends


def header(kind, id, **fields):
    body = fields.pop("body", b"")
    return pack_header(kind, id, (body,), **fields) + body


@pytest.mark.parametrize(
    ("code", "wire"),
    [
        ("unasked", [header(FrameKind.RESPONSE, 2)]),
        ("unasked", [header(FrameKind.FAILURE, 2)]),
        ("unasked", [header(FrameKind.RECEIVED, 2)]),
        ("unasked", [header(FrameKind.UNKNOWN, 2)]),
        ("changed", [header(FrameKind.RESPONSE, 1, total=9, body=b"x"), header(FrameKind.RESPONSE, 1, total=8, body=b"x")]),
        ("changed", [header(FrameKind.RESPONSE, 1, total=9, body=b"x"), header(FrameKind.FAILURE, 1, total=9, body=b"x")]),
        ("changed", [header(FrameKind.REQUEST, 3, total=9, body=b"x"), header(FrameKind.REQUEST, 3, total=8, body=b"x")]),
        ("changed", [header(FrameKind.REQUEST, 3, total=9, body=b"x"), header(FrameKind.REQUEST, 3, total=9, body=b"x", request_kind=4)]),
        ("order", [header(FrameKind.RESPONSE, 1, total=9, body=b"x"), header(FrameKind.RESPONSE, 1, total=9, body=b"x", offset=2)]),
        ("order", [header(FrameKind.REQUEST, 3, total=9, body=b"x"), header(FrameKind.REQUEST, 3, total=9, body=b"x")]),
        ("ids", [header(FrameKind.HEARTBEAT, 0, body=b"1234567")]),
        ("short", [b""]),
    ],
)
def test_nonsense_is_refused(code, wire):
    near, _ = pair()
    near.request(1, [b"?"], 10.0, 0.0)
    frames(near)
    for frame in wire[:-1]:
        near.receive(frame, 0.0)
    before = near.statistics()
    with pytest.raises(ProtocolError) as caught:
        near.receive(wire[-1], 0.0)
    assert caught.value.code == code
    after = near.statistics()
    assert replace(after, frames_in=0, bytes_in=0) == replace(before, frames_in=0, bytes_in=0)
    assert effects(near) == []


def test_a_nonsensical_watermark_harms_only_its_sender():
    _, far = pair()
    far.receive(pack_header(FrameKind.REQUEST, 1, watermark=1), 0.0)
    effects(far)
    far.receive(pack_header(FrameKind.HEARTBEAT, 0, watermark=2**64 - 1), 0.0)
    assert effects(far) == [Abandon(1)]
    assert nothing_left(far)
    far.receive(pack_header(FrameKind.REQUEST, 2, watermark=1), 0.0)
    assert effects(far) == []


def test_altered_frames_do_no_harm():
    """Fuzz: whatever a peer sends, a session raises ProtocolError or goes on, keeps to its limits, and gives everything back."""
    rng = Random(7)
    for _ in range(cases(2000) // 20):
        near, far = pair()
        for size in (10, 300, 3000):
            near.request(1, [bytes(size)], 10.0, 0.0)
            far.request(2, [bytes(size)], 10.0, 0.0)
        valid = [*frames(near), header(FrameKind.HEARTBEAT, 0, body=bytes(24))]
        valid += [header(kind, id) for kind in list(FrameKind)[3:7] for id in (1, 2, 9)]
        for kind in (FrameKind.RESPONSE, FrameKind.FAILURE):
            valid += [header(kind, id, total=300, body=bytes(100), offset=offset) for id in (1, 2) for offset in (0, 200)]
        frames(far)
        now = 0.0
        for _ in range(20):
            now += rng.choice((0.0, 0.0, 1.0))
            try:
                far.receive(mutate(rng, rng.choice(valid), rng.choice(valid)), now)
            except ProtocolError as error:
                assert error.code
            far.tick(now)
            for effect in effects(far):
                if isinstance(effect, Deliver) and rng.random() < 0.5:
                    far.respond(effect.id, [bytes(rng.randrange(3000))], now)
            if rng.random() < 0.3:
                frames(far, now)
            statistics = far.statistics()
            assert statistics.bytes_held == far._budget.held <= SMALL.bytes_per_peer
            assert 0 <= statistics.running <= min(SMALL.requests_per_peer, statistics.remembered)
        far.fail_all()
        assert nothing_left(far)
        assert far._budget.held == 0

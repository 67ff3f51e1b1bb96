"""Every state of a request with every frame, as a table; and any sequence of steps, against a ledger of what was asked and answered."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from aiograd.distributed.rpc.frames import FrameKind, pack_header
from aiograd.distributed.rpc.session import RpcSession
from aiograd.errors import ProtocolError
from tests.distributed.pairs import effects, frames, kinds, pair, read
from tests.distributed.session_link import Faults, SessionLink, answer_to, joined

# ---- the answerer: state, event -> state, frames out, effects

ID = 3


def request(offset: int, body: bytes, **fields: int) -> bytes:
    return pack_header(FrameKind.REQUEST, ID, (body,), offset=offset, total=4, deadline_ms=1000, **fields) + body


def about(kind: FrameKind) -> bytes:
    return pack_header(kind, ID, watermark=1)


def heard(*wire: bytes) -> Callable[[RpcSession], None]:
    def hear(session: RpcSession) -> None:
        for frame in wire:
            session.receive(frame, 0.0)

    return hear


def then(*steps: Callable[[RpcSession], None]) -> Callable[[RpcSession], None]:
    def do(session: RpcSession) -> None:
        for step in steps:
            step(session)

    return do


WHOLE = heard(request(0, b"what"))
PAST = pack_header(FrameKind.HEARTBEAT, 0, watermark=ID + 1)
IDS = struct.pack("<2Q", ID + 1, 1)
TOLD = pack_header(FrameKind.HEARTBEAT, 0, (IDS,), watermark=1) + IDS

STATES: dict[str, Callable[[RpcSession], None]] = {
    "none": heard(),
    "ASSEMBLING": heard(request(0, b"wh")),
    "RUNNING": WHOLE,
    "ABANDONED": then(WHOLE, lambda session: session.tick(0.96)),
    "DONE": then(WHOLE, lambda session: session.respond(ID, [b"so"], 0.0)),
    "RESOLVED": then(WHOLE, lambda session: session.respond(ID, [b"so"], 0.0), heard(PAST)),
}
EVENTS: dict[str, Callable[[RpcSession], None]] = {
    "second half": heard(request(2, b"at")),
    "whole": WHOLE,
    "PROBE": heard(about(FrameKind.PROBE)),
    "CANCEL": heard(about(FrameKind.CANCEL)),
    "respond": lambda session: session.respond(ID, [b"so"], 0.0),
    "deadline": lambda session: session.tick(0.97),
    "watermark": heard(PAST),
    "told": heard(TOLD),
    "replaced": lambda session: session.attach(0.0),
}
TABLE = """
               | second half     | whole           | PROBE       | CANCEL                | respond        | deadline          | watermark    | told         | replaced
    none       | .               | RUNNING Deliver | >UNKNOWN    | DONE >FAILURE         | .              | .                 | .            | .            | .
    ASSEMBLING | RUNNING Deliver | order           | >UNKNOWN    | DONE >FAILURE         | .              | none              | none         | none         | none
    RUNNING    | .               | >RECEIVED       | >RECEIVED   | DONE >FAILURE Abandon | DONE >RESPONSE | ABANDONED Abandon | none Abandon | none Abandon | .
    ABANDONED  | .               | >RECEIVED       | >RECEIVED   | DONE >FAILURE         | .              | .                 | none         | none         | .
    DONE       | .               | >RESPONSE       | >RESPONSE   | >FAILURE              | .              | .                 | none         | none         | .
    RESOLVED   | none            | none            | none        | none                  | none           | none              | none         | none         | none
"""  # noqa: E501 - a cell says the state after the event, where it is another one, >frames and effects


def cells(table: str) -> list[tuple[str, str, list[str]]]:
    """State, event and the words of each cell."""
    header, *rows = ([cell.strip() for cell in line.split("|")] for line in table.strip("\n").splitlines() if line.strip())
    return [(row[0], event, cell.split()) for row in rows for event, cell in zip(header[1:], row[1:], strict=True)]


ROWS = cells(TABLE)


def names(found: list[object]) -> str:
    return " ".join(type(each).__name__ for each in found)


def names_of(wire: list[bytes]) -> str:
    """Kinds of frames, apart from heartbeats, which are the clock's."""
    return " ".join(kind for kind, _ in kinds(wire) if kind != "HEARTBEAT")


def sent(session: RpcSession) -> str:
    """Kinds of frames that go out."""
    return names_of(frames(session))


def test_the_table_is_complete():
    assert [row[:2] for row in ROWS] == [(state, event) for state in STATES for event in EVENTS]


def sent_of(words: list[str]) -> str:
    return " ".join(word[1:] for word in words if word[0] == ">")


def done_of(words: list[str]) -> str:
    return " ".join(word for word in words if word[0] not in ">.-" and word not in STATES)


@pytest.mark.parametrize(("state", "event", "words"), ROWS, ids=[f"{state}-{event}" for state, event, _ in ROWS])
def test_answerer(state, event, words):
    after, out, done = next((word for word in words if word in STATES), state), sent_of(words), done_of(words)
    _, session = pair()
    STATES[state](session)
    sent(session)
    effects(session)
    try:
        EVENTS[event](session)
    except ProtocolError as error:
        found = error.code
    else:
        found = names(effects(session))
    row, wire = session._answers.requests.get(ID), frames(session)
    assert (row.state.name if row else "none", names_of(wire), found) == (after, out, done)
    assert {bytes(frame.body) for frame in read(wire) if frame.kind is FrameKind.RESPONSE} <= {b"so"}
    assert row is None or (row.assembly is not None) is (after == "ASSEMBLING")  # its memory goes with it
    held, running = {"RUNNING": (4, 1), "ASSEMBLING": (4, 1)}.get(after, (0, 0))
    statistics = session.statistics()
    assert (statistics.bytes_held, statistics.running) == (held, running)
    assert statistics.bytes_stored == (2 if after == "DONE" and event != "CANCEL" else 0)


# ---- the requester: what it has heard, what it hears -> what it sends, effects, whether it still waits

ASKED = {
    "queued": [],
    "sent": ["pull"],
    "received": ["pull", "RECEIVED"],
    "in part": ["pull", "half"],
    "cancelled": ["pull", "cancel"],
    "answered": ["pull", "RESPONSE"],
}
HEARD = ["RESPONSE", "FAILURE", "half", "RECEIVED", "UNKNOWN", "replaced"]
REQUESTER_ROWS = cells("""
              | RESPONSE   | FAILURE    | half     | RECEIVED | UNKNOWN  | replaced
    queued    | - Answered | - Answered | >REQUEST | .        | >REQUEST | >REQUEST
    sent      | - Answered | - Answered | .        | .        | >REQUEST | >REQUEST
    received  | - Answered | - Answered | .        | .        | >REQUEST | >PROBE
    in part   | order      | changed    | order    | .        | >REQUEST | >REQUEST
    cancelled | -          | -          | -        | >CANCEL  | >CANCEL  | >CANCEL
    answered  | -          | -          | -        | -        | -        | -
""")  # a cell says >frames, effects, and - where the request waits no more


def hear(session: RpcSession, what: str) -> None:
    if what == "pull":
        frames(session)
    elif what == "cancel":
        session.cancel(1, 0.0)
    elif what == "replaced":
        session.detach(0.0)
        session.attach(0.0)
    elif what == "half":
        session.receive(pack_header(FrameKind.RESPONSE, 1, (b"so",), total=4) + b"so", 0.0)
    elif what in ("RESPONSE", "FAILURE"):
        session.receive(pack_header(FrameKind[what], 1, (b"so..",), total=4) + b"so..", 0.0)
    else:
        session.receive(pack_header(FrameKind[what], 1), 0.0)


def test_the_requesters_table_is_complete():
    assert [row[:2] for row in REQUESTER_ROWS] == [(state, event) for state in ASKED for event in HEARD]


@pytest.mark.parametrize(("state", "event", "words"), REQUESTER_ROWS, ids=[f"{state}-{event}" for state, event, _ in REQUESTER_ROWS])
def test_requester(state, event, words):
    out, done, waits = sent_of(words), done_of(words), "-" not in words
    session, _ = pair()
    session.request(1, [b"what"], 10.0, 0.0)
    for step in ASKED[state]:
        hear(session, step)
    effects(session)
    try:
        hear(session, event)
    except Exception as error:
        found = getattr(error, "code", repr(error))
    else:
        found = names(effects(session))
    assert (sent(session), found) == (out, done)
    statistics = session.statistics()
    assert statistics.outstanding == waits
    assert statistics.bytes_held == (4 if waits and "half" in (*ASKED[state], event) and state != "cancelled" and event != "replaced" else 0)


# ---- any sequence of steps


class HandLink(SessionLink):
    """A link that does nothing by itself: the machine carries its frames and answers its requests, until `released`."""

    def __init__(self) -> None:
        super().__init__(0, Faults())
        self.wires: tuple[list[bytes], list[bytes]] = ([], [])
        self.released = False

    def _send(self, to: int, frame: bytes) -> None:
        if self.released:
            super()._send(to, frame)
        else:
            self.wires[to].append(frame)

    def handler_time(self, timeout: float) -> float:
        return 0.0 if self.released else float("inf")


SIDES = st.integers(0, 1)
PICK = st.integers(0, 1000)


class Sessions(RuleBasedStateMachine):
    """Steps of both drivers, of the clock and of a link that breaks, in any order. The ledger is `SessionLink`'s."""

    @initialize()
    def start(self) -> None:
        self.link = HandLink()
        self.open()
        self.asked = 0

    def open(self) -> None:
        self.link.channel += 1
        for index in range(2):
            self.link.wires[index].clear()
            self.link.on_open(index, self.link.channel)

    @rule(index=SIDES, size=st.sampled_from([0, 5, 250, 300, 2000]), timeout=st.sampled_from([0.3, 3.0, 30.0]))
    def ask(self, index: int, size: int, timeout: float) -> None:
        self.asked += 1
        self.link.ask(index, b"%d|" % self.asked + b"." * size, timeout)

    @rule(index=SIDES, pick=PICK)
    def cancel(self, index: int, pick: int) -> None:
        ids = [id for id, asked in self.link.sides[index].asked.items() if not asked.outcome]
        if ids:
            self.link.cancel(index, ids[pick % len(ids)])

    @rule(index=SIDES, pick=PICK)
    def respond(self, index: int, pick: int) -> None:
        running = self.link.sides[index].running
        if running:
            id = [*running][pick % len(running)]
            self.link.on_respond(index, id, running[id])

    @rule(index=SIDES, count=st.integers(1, 6))
    def pull(self, index: int, count: int) -> None:
        while count and self.link.pull(index):
            count -= 1

    @rule(index=SIDES, count=st.integers(1, 6))
    def deliver(self, index: int, count: int) -> None:
        wire = self.link.wires[index]
        for _ in range(min(count, len(wire))):
            self.link.on_frame(index, wire.pop(0), self.link.channel)

    @rule(index=SIDES, arrive=st.integers(0, 6))
    def cut(self, index: int, arrive: int) -> None:
        """One side notices that the channel has closed, after a part of what was on its way to it; the other gets nothing more."""
        self.deliver(index, arrive)
        self.link.on_closed(index, self.link.channel)
        for wire in self.link.wires:
            wire.clear()

    @rule()
    def replace(self) -> None:
        self.open()

    @rule(seconds=st.sampled_from([0.01, 0.3, 2.0]))
    def wait(self, seconds: float) -> None:
        self.link.now += seconds
        self.link.tick()

    @invariant()
    def nothing_is_wrong(self) -> None:
        if hasattr(self, "link"):
            for index in range(2):
                self.link.work_off(index)
            assert self.link.broken == []
            for side in self.link.sides:
                statistics = side.session.statistics()
                assert statistics.bytes_held == side.session._budget.held <= self.link.limits.bytes_per_peer
                assert len(side.running) <= statistics.running <= self.link.limits.requests_per_peer

    def teardown(self) -> None:
        """The link heals and handlers answer: what has time is answered, the rest expires, and nothing is remembered."""
        if not hasattr(self, "link"):
            return
        link = self.link
        link.released = True
        in_time = [asked for side in link.sides for asked in side.asked.values() if not asked.outcome and asked.deadline > link.now + 6]
        for index, side in enumerate(link.sides):
            for id, message in [*side.running.items()]:
                link.on_respond(index, id, message)
        link.settle()
        assert link.faults() == []
        assert all(asked.outcome in ("answered", "refused") or asked.cancelled for asked in in_time)


TestSessions = Sessions.TestCase
TestSessions.settings = settings(max_examples=60, stateful_step_count=60)


def test_the_machine_can_answer():
    """Its parts do what they say: a request goes through by hand."""
    link = HandLink()
    link.channel = 1
    for index in range(2):
        link.on_open(index, 1)
    link.ask(0, b"1|what")
    link.pull(0)
    link.on_frame(1, link.wires[1].pop(), 1)
    link.work_off(1)
    link.on_respond(1, 1, link.sides[1].running[1])
    link.pull(1)
    (frame,) = read([joined([link.wires[0][0]])])
    assert frame.body == answer_to(b"1|what")

"""Two sessions whose frames a test carries by hand, and what tests ask of them."""

from __future__ import annotations

from collections.abc import Iterator

from aiograd.distributed.frame import Frame, parse
from aiograd.distributed.limits import Limits
from aiograd.distributed.safeguards import ALL_ON, Safeguards
from aiograd.distributed.session import Deliver, Session
from tests.distributed.link import SMALL, joined, make


def pair(limits: Limits = SMALL, *, reliable: bool = True, safeguards: Safeguards = ALL_ON) -> tuple[Session, Session]:
    both = make(limits, safeguards), make(limits, safeguards)
    for session in both:
        session.attach(0.0, reliable)
    return both


def frames(session: Session, now: float = 0.0) -> list[bytes]:
    return [joined(frame) for frame in iter(lambda: session.next_frame(now), None)]


def kinds(wire: list[bytes], limits: Limits = SMALL) -> list[tuple[str, int]]:
    return [(frame.kind.name, frame.id) for frame in read(wire, limits)]


def read(wire: list[bytes], limits: Limits = SMALL) -> Iterator[Frame]:
    return (parse(frame, limits) for frame in wire)


def pass_on(sender: Session, receiver: Session, now: float = 0.0) -> int:
    wire = frames(sender, now)
    for frame in wire:
        receiver.receive(frame, now)
    return len(wire)


def effects(session: Session) -> list[object]:
    found = list(session.effects)
    session.effects.clear()
    return found


def delivered(session: Session) -> Deliver:
    (effect,) = effects(session)
    assert isinstance(effect, Deliver)
    return effect


def nothing_left(*sessions: Session) -> bool:
    return all(
        (each.outstanding, each.running, each.remembered, each.bytes_held, each.bytes_stored, each.bytes_unsent) == (0,) * 6
        for each in (session.statistics() for session in sessions)
    )

"""Two sessions whose frames a test carries by hand, and what tests ask of them."""

from __future__ import annotations

from collections.abc import Iterator

from aiograd.distributed.rpc.frames import Frame, parse
from aiograd.distributed.rpc.limits import Limits
from aiograd.distributed.rpc.session import Deliver, RpcSession
from tests.distributed.session_link import SMALL, joined, make


def pair(limits: Limits = SMALL) -> tuple[RpcSession, RpcSession]:
    both = make(limits), make(limits)
    for session in both:
        session.attach(0.0)
    return both


def frames(session: RpcSession, now: float = 0.0) -> list[bytes]:
    return [joined(frame) for frame in iter(lambda: session.next_frame(now), None)]


def kinds(wire: list[bytes], limits: Limits = SMALL) -> list[tuple[str, int]]:
    return [(frame.kind.name, frame.id) for frame in read(wire, limits)]


def read(wire: list[bytes], limits: Limits = SMALL) -> Iterator[Frame]:
    return (parse(frame, limits) for frame in wire)


def pass_on(sender: RpcSession, receiver: RpcSession, now: float = 0.0) -> int:
    wire = frames(sender, now)
    for frame in wire:
        receiver.receive(frame, now)
    return len(wire)


def effects(session: RpcSession) -> list[object]:
    found = list(session.effects)
    session.effects.clear()
    return found


def asked(body: bytes = b"?", seconds: float = 10.0, limits: Limits = SMALL) -> tuple[RpcSession, RpcSession, int]:
    """Two sessions, and the id of a request of the first that has arrived at the second."""
    near, far = pair(limits)
    id = near.request(1, [body], seconds, 0.0)
    pass_on(near, far)
    return near, far, id


def attach(now: float, *sessions: RpcSession) -> None:
    for session in sessions:
        session.attach(now)


def talk(near: RpcSession, far: RpcSession, now: float) -> None:
    """Pass frames both ways until there are none."""
    while near.has_output or far.has_output:
        pass_on(near, far, now)
        pass_on(far, near, now)


def delivered(session: RpcSession) -> Deliver:
    (effect,) = effects(session)
    assert isinstance(effect, Deliver)
    return effect


def nothing_left(*sessions: RpcSession) -> bool:
    return all(
        (each.outstanding, each.running, each.remembered, each.bytes_held, each.bytes_stored, each.bytes_unsent) == (0,) * 6
        for each in (session.statistics() for session in sessions)
    )

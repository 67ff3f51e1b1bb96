"""Asking what waits: the waits of this worker, and the reports of its peers about theirs.

Note [Asking]
    A worker answers out of its tables at once, in a task of its own, so also while its passes and calls are stuck. Many workers are asked by a tree
    of them; one that is not reached so is asked directly. An answer is text that a peer may have made up: its rows count for that peer only, are
    checked and cut by `WaitReport.from_json`, and there are at most `MOST` of them. A worker that is asked for the waits of all that it knows
    checks them so, and its report is taken as it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np

from aiograd.distributed.autograd.context import pass_name
from aiograd.distributed.collectives.agreement import agreement_name
from aiograd.distributed.collectives.running import operation_name
from aiograd.distributed.messages.calls import AskWaits, FunctionCall, Post, Relay
from aiograd.distributed.messages.groups import GroupPiece, Vote
from aiograd.distributed.messages.library import CallMethod
from aiograd.distributed.messages.passes import Abort, Commit, Gradient, Mark, PassOutcome
from aiograd.distributed.messages.requests import REQUESTS
from aiograd.distributed.rpc.codec import WireReference, WireTensor
from aiograd.distributed.rpc.identity import PeerId, PeerIdentity
from aiograd.distributed.rpc.limits import check_number
from aiograd.distributed.rpc.open_requests import RequestMade, RequestServed, open_requests
from aiograd.distributed.wait_tables import MOST, Awaited, LocalWaits, OpenWork, WaitEdge, WaitEntry
from aiograd.distributed.waits import HeldLoop, Wait, WaitReport
from aiograd.distributed.worker_core import WorkerCore
from aiograd.errors import ArgumentTypeError, DistributedError, UnknownPeerError
from aiograd.transaction.tree import are_many

#: by the words of requests of groups
_NAMES = {Vote.form.word: agreement_name, GroupPiece.form.word: operation_name}
#: the share of the time for an answer in which a worker asks the workers that it knows
KNOWN = 0.75
_PASSES = tuple(int(each.form.kind) for each in (Mark, Gradient, Commit, Abort, PassOutcome))


def waits(core: WorkerCore, principal: str | None = None) -> tuple[Wait, ...]:
    """The waits on this worker; no peer is asked, and nothing changes.

    Args:
        core: the worker.
        principal: only works of this principal, and the number of waits of others; None: all.

    Returns:
        A row for each wait.
    """
    return LocalWaits(core.name, core.now(), (*core.wait_tables, lambda: _requests(core))).rows(principal)


def held_loops(core: WorkerCore, principal: str | None = None) -> tuple[HeldLoop, ...]:
    """The event loops of peers that are held up, as the last pulse of each has told.

    Args:
        core: the worker.
        principal: only peers that are connected for this principal; None: all.

    Returns:
        A row for each worker, in the order of their sessions; of several sessions the longest.
    """
    found: dict[str, HeldLoop] = {}
    for session in core.endpoint.sessions():
        detector = session.detector
        held_at = detector.held_at
        if held_at is not None and principal in (None, session.peer.principal):
            seconds = detector.held_seconds + max(0.0, core.now() - held_at)
            held = HeldLoop(session.peer.name, seconds, detector.held_line)
            if held.worker not in found or found[held.worker].seconds < seconds:
                found[held.worker] = held
    return tuple(found.values())


def serve_waits(core: WorkerCore) -> None:
    """Answer `AskWaits`, from any worker of the principal and by way of others."""

    async def tell(caller: PeerIdentity, message: AskWaits, timeout: float) -> WireTensor:
        return _sent(WaitReport(waits(core, caller.principal)))

    async def answer(caller: PeerIdentity, message: AskWaits, timeout: float) -> WireTensor:
        if not message.with_known:
            return await tell(caller, message, timeout)
        return _sent(await _asked(core, None, KNOWN * timeout, caller.principal, but=caller.name))

    core.serve({AskWaits: answer})
    core.multicast.register(AskWaits, tell)


def _sent(report: WaitReport) -> WireTensor:
    """A report as the bytes of its JSON, which may be longer than the head of a message."""
    return WireTensor(np.frombuffer(report.to_json().encode(), np.uint8))


async def why(core: WorkerCore, peer: str | None, timeout: float, *, with_known: bool) -> WaitReport:
    """See `Worker.why`. Cancelling stops the asking."""
    if peer is not None and not isinstance(peer, str):
        raise ArgumentTypeError(f"why({peer!r:.100}): expected the name of a worker, or None for all, found {type(peer).__name__}")
    check_number("why(): timeout", timeout, core.limits.max_deadline, "Limits.max_deadline")
    core.check_open()
    return await _asked(core, peer, timeout, core.acting_principal(), with_known=with_known and peer != core.name)


async def _asked(
    core: WorkerCore, peer: str | None, timeout: float, principal: str, *, but: str | None = None, with_known: bool = False
) -> WaitReport:
    """The report of this worker and of the workers that it knows, but one; or of one worker."""
    endpoint = core.endpoint
    ids = [PeerId(principal, name) for name in endpoint.peers]
    known = [id.name for id in ids if endpoint.url_of(id) is not None or endpoint.is_connected(id)]
    if peer is not None and peer not in (core.name, *known):
        raise UnknownPeerError(f"why({peer!r}): worker {core.name!r} knows no worker of this name; it knows {', '.join(known) or 'none'}")
    began = core.now()
    names = [name for name in ([peer] if peer else known) if name not in (core.name, but)]
    found = [*waits(core, principal)] if peer in (None, core.name) else []
    held = [loop for loop in held_loops(core, principal) if peer in (None, loop.worker)]
    silent: dict[str, str] = {}
    for name, answer in (await _answers(core, names, AskWaits(with_known), timeout, principal)).items():
        try:
            if isinstance(answer, BaseException):
                raise answer
            report = WaitReport.from_json(answer.array.tobytes() if isinstance(answer, WireTensor) else answer)
        except (DistributedError, MemoryError) as error:
            text = str(error).splitlines()
            silent[name] = f"{type(error).__name__}: {text[0] if text else ''}"
        else:
            if with_known:
                return WaitReport(report.waits, report.held, report.silent, core.now() - began)
            found += [wait for wait in report.waits if wait.worker == name][: MOST + 2]
    return WaitReport(tuple(found), tuple(held), silent, core.now() - began)


async def _answers(core: WorkerCore, names: list[str], question: AskWaits, timeout: float, principal: str) -> dict[str, Any]:
    """The answer or the error of each worker."""
    until = core.now() + timeout
    found = await core.multicast.spread(dict.fromkeys(names, question), timeout, principal) if are_many(names) else {}
    left = [name for name in names if name not in found]
    asked = [core.ask(name, question, max(until - core.now(), 1e-3), principal) for name in left]
    return found | dict(zip(left, await asyncio.gather(*asked, return_exceptions=True), strict=True))


# ---------------------------------------------------------------- requests


def _requests(core: WorkerCore) -> Iterator[WaitEntry]:
    """The requests of this worker and of its peers, and the requests that wait to be sent. Questions about waits are left out."""
    for request in open_requests(core.endpoint):
        name = f"{REQUESTS.name_of(request.kind)} {request.id} of {request.caller} ({request.session.hex()[:8] or 'itself'})"
        if isinstance(request, RequestServed):
            if request.kind != AskWaits.form.kind:
                yield OpenWork(name, request.principal, (request.task,), request.began, what=REQUESTS.name_of(request.kind))
            continue
        on_task, message = (name, _described(core, request)) if request.id else ("", f"room for {request.size} bytes of requests")
        edge = WaitEdge(request.peer, on_task, "", "", message, request.began)
        yield Awaited(request.future, None if _is_question(request) else edge, request.principal, _subject(request))


def _is_question(request: RequestMade) -> bool:
    is_relayed = request.kind == Relay.form.kind and request.value[0] == AskWaits.form.kind
    return is_relayed or request.kind == AskWaits.form.kind


def _described(core: WorkerCore, request: RequestMade) -> str:
    """The message that is awaited, and how far the request is."""
    kind = REQUESTS.name_of(request.kind)
    subject = core.endpoint.describe(request.kind, request.value)
    text = f"answer to {kind}" if subject in ("", kind) else f"answer to {kind} of {subject}"
    return text if request.is_sent else f"{text}, which is not sent yet"


def _subject(request: RequestMade) -> str | bytes:
    """The work that a request belongs to, or the key of the object that it is for; "" for others."""
    kind, value = request.kind, request.value
    if kind in _PASSES:
        return pass_name(*value[:3])
    if kind == Vote.form.kind and (name := _NAMES.get(value[0])) is not None:
        return name(*value[1:4])
    if kind == FunctionCall.form.kind and value[0] == CallMethod.form.name and value[1]:
        value = value[1]
    elif kind != Post.form.kind:
        return ""
    return value[0].id if isinstance(value[0], WireReference) else getattr(value[0], "key", b"")

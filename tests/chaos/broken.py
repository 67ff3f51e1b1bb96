"""Broken code: each protection taken out of the code that has it, so that tests can see that it is needed and that its absence is noticed.

`PROTECTIONS` is the table. An entry replaces methods by ones without the protection, in this process and for as long as its block runs.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from aiograd.distributed.autograd.backward import BackwardPasses
from aiograd.distributed.autograd.context import Context
from aiograd.distributed.autograd.context_table import ContextTable
from aiograd.distributed.autograd.leases import ContextLeases
from aiograd.distributed.autograd.participant import PassParticipant
from aiograd.distributed.autograd.pass_request import PassRequest as Pass
from aiograd.distributed.autograd.pass_transaction import PassTransaction
from aiograd.distributed.messages.calls import RelayedAnswer, RelayedMessage
from aiograd.distributed.messages.passes import Commit
from aiograd.distributed.multicast import Multicast
from aiograd.distributed.rpc.endpoint import Endpoint
from aiograd.distributed.rpc.frames import Frame, FrameKind
from aiograd.distributed.rpc.identity import PeerIdentity
from aiograd.distributed.rpc.inbound import InboundRequest, InboundRequests, RequestState
from aiograd.distributed.rpc.outbound import OutboundRequest, OutboundRequests
from aiograd.distributed.rpc.peer import Peer
from aiograd.distributed.scope import SCOPE
from aiograd.distributed.worker_core import WorkerCore
from aiograd.engine.graph_task import GraphTask
from aiograd.transaction import Applied, Outcome, TransactionState

#: replaces methods for as long as the stack is open
Break = Callable[[ExitStack], None]
#: seconds after its answer in which the effect of a commit follows
LATE = 0.05
PASS_ON = Multicast._pass_on


@contextmanager
def without(protection: str | None) -> Iterator[None]:
    """In this block a protection is missing; none where it is None."""
    with ExitStack() as stack:
        if protection is not None:
            PROTECTIONS[protection](stack)
        yield


def _replace(owner: type, name: str, broken: Any) -> Break:
    """Put `broken` in the place of a method."""
    return lambda stack: stack.enter_context(mock.patch.object(owner, name, broken))


def _all(*breaks: Break) -> Break:
    def every(stack: ExitStack) -> None:
        for each in breaks:
            each(stack)

    return every


# -------------------------------------------------------------------- requests


def _forget_requests(*states: RequestState) -> Break:
    """Requests in these states are not known again: a copy of one runs as if it were the first, and who asks after one hears of nothing."""
    request, probe = InboundRequests.request, InboundRequests.probe

    def forgetful_request(self: InboundRequests, frame: Frame, now: float, age: float = 0.0) -> None:
        row = self.requests.get(frame.id)
        if row is not None and row.state in states and not frame.offset:
            self._drop(row)
        request(self, frame, now, age)

    def forgetful_probe(self: InboundRequests, frame: Frame) -> None:
        row = self.requests.get(frame.id)
        if row is not None and row.state in states:
            self._outbox.control[FrameKind.UNKNOWN, frame.id] = None
        else:
            probe(self, frame)

    return _all(_replace(InboundRequests, "request", forgetful_request), _replace(InboundRequests, "probe", forgetful_probe))


def _resend_as_another(stack: ExitStack) -> None:
    """A request that is sent again is sent under a new id as well; its copies are not copied, else their number doubles with every channel."""
    resend = OutboundRequests._resend
    copies: set[OutboundRequest] = set()

    def resend_twice(self: OutboundRequests, row: OutboundRequest) -> None:
        if not row.queued and row not in copies:
            copies.add(self.requests[self.add(row.request_kind, row.buffers, row.deadline, 0.0)])
        resend(self, row)

    _replace(OutboundRequests, "_resend", resend_twice)(stack)


def _lose_bytes(name: str) -> Break:
    """The bytes of a request that comes to this method stay reserved."""
    method: Callable[..., None] = getattr(InboundRequests, name)

    def wasteful(self: InboundRequests, row: InboundRequest, *arguments: Any, **options: Any) -> None:
        row.held = 0
        method(self, row, *arguments, **options)

    return _replace(InboundRequests, name, wasteful)


def _keep_cancels(name: str) -> Break:
    """The answerer does not hear of the cancellation of which this method would tell it."""
    method: Callable[..., None] = getattr(OutboundRequests, name)

    def silent(self: OutboundRequests, *arguments: Any) -> None:
        method(self, *arguments)
        for what in [what for what in self._outbox.control if what[0] is FrameKind.CANCEL]:
            del self._outbox.control[what]

    return _replace(OutboundRequests, name, silent)


def _seconds_left(self: InboundRequests, frame: Frame, age: float) -> float:
    return min(frame.deadline_ms / 1000 or self._limits.default_deadline, self._limits.max_deadline)


def _time_for_all(stack: ExitStack) -> None:
    """A request may take as long as it asks for, whatever is left to the one that it is made for."""
    time_for = WorkerCore.time_for

    def generous(self: WorkerCore, timeout: float | None) -> float:
        token = SCOPE.set(None)
        try:
            return time_for(self, timeout)
        finally:
            SCOPE.reset(token)

    _replace(WorkerCore, "time_for", generous)(stack)


def _may_resume(self: Endpoint, asked: list[bytes], identity: Any, session: bytes) -> bool:
    asked.append(session)
    peer = self._peers.get(identity.peer)
    return peer is not None and peer.find(session) is not None


# -------------------------------------------------------------------- contexts


def _find_by_key(self: ContextTable, key: bytes, principal: str) -> Context | None:
    return next((each for each in self if each.key == key), None)


# -------------------------------------------------------------------- passes


def _wait_for_every_edge(stack: ExitStack) -> None:
    initiate = BackwardPasses._initiate

    async def initiate_fast(self: BackwardPasses, context: Context, request: Pass, deadline: float) -> GraphTask:
        return await initiate(self, context, dataclasses.replace(request, smart=False), deadline)

    _replace(BackwardPasses, "_initiate", initiate_fast)(stack)


def _commit_here(participant: PassParticipant) -> None:
    """Commit a worker's part of a pass, whatever was decided."""
    participant.transaction.state = TransactionState.COMMITTING
    if participant.task is not None:
        participant.task.commit()
    participant.handle(Applied())


async def _sent(self: PassParticipant) -> None:
    """Wait until the gradients of a worker have been sent, or its pass has failed."""
    outgoing = self.gradients.outgoing
    if outgoing:
        self.gradients.release_held()
    while outgoing and self.error is None:
        await self._change()


async def _let_late_results_commit(self: PassParticipant) -> None:
    """Let a pass commit that has failed meanwhile."""
    await _sent(self)
    if self.is_initiator:
        _commit_here(self)
        return
    self.transaction.state = TransactionState.PREPARED
    self.changed()
    while self.transaction.is_prepared:
        await self._change()
    if not self.is_decided and self.error is not None:
        raise self.error


def _commit_alone(stack: ExitStack) -> None:
    before_commit = PassParticipant.before_commit

    async def hasty_before_commit(self: PassParticipant) -> None:
        if self.is_initiator:
            await before_commit(self)
            return
        await _sent(self)
        if self.error is not None:
            raise self.error
        _commit_here(self)

    _replace(PassParticipant, "before_commit", hasty_before_commit)(stack)


def _answer_before_the_commit(stack: ExitStack) -> None:
    on_commit = BackwardPasses.on_commit

    async def hasty_commit(self: BackwardPasses, caller: PeerIdentity, message: Commit, timeout: float) -> bool:
        context, pass_id = self._context(caller, message, ended=True), message.pass_id
        part = context.participants.get(pass_id)
        if part is None:
            return await on_commit(self, caller, message, timeout)
        asyncio.get_running_loop().call_later(LATE, part.commit)
        return True

    _replace(BackwardPasses, "on_commit", hasty_commit)(stack)


def _commit_again(stack: ExitStack) -> None:
    on_commit = BackwardPasses.on_commit

    async def eager_commit(self: BackwardPasses, caller: PeerIdentity, message: Commit, timeout: float) -> bool:
        context, pass_id = self._context(caller, message, ended=True), message.pass_id
        if pass_id not in context.participants and context.history.outcome(pass_id) is Outcome.COMMITTED:
            for slot in context.slots.values():
                slot.grad = None if slot.grad is None else slot.grad + slot.grad
        return await on_commit(self, caller, message, timeout)

    _replace(BackwardPasses, "on_commit", eager_commit)(stack)


def _rely_on_the_tree(stack: ExitStack) -> None:
    spread = PassTransaction.spread

    async def spread_only(self: PassTransaction, peers: Sequence[str], outcome: Outcome) -> Mapping[str, BaseException | None]:
        await spread(self, peers, outcome)
        return dict.fromkeys(peers)

    _replace(PassTransaction, "spread", spread_only)(stack)


async def _answer_for_all(self: Multicast, kind: int, messages: list[RelayedMessage], timeout: float, principal: str) -> list[RelayedAnswer]:
    """Answer for those behind before they have."""
    core: Any = self._core

    async def pass_on() -> None:
        await asyncio.sleep(LATE)
        await PASS_ON(self, kind, messages, timeout, principal)

    if messages:
        core.spawn(pass_on(), "late")
    return [RelayedAnswer(message.name, False, True) for message in messages]


def _nothing(*_: object, **__: object) -> None:
    """In the place of a method that does something."""


def _yes(*_: object) -> bool:
    return True


#: what is protected -> takes the protection out
PROTECTIONS: Mapping[str, Break] = {
    # a request that arrives again joins the running one or gets the stored answer
    "dedupe": _forget_requests(RequestState.RUNNING, RequestState.ABANDONED, RequestState.DONE),
    # a request counts as known from its arrival, not only from its completion
    "dedupe_running": _forget_requests(RequestState.RUNNING, RequestState.ABANDONED),
    # a request that is sent again keeps its id
    "retry_same_id": _resend_as_another,
    # what a session says is between two incarnations, and none that comes after them
    "epoch_fence": _all(
        _replace(Endpoint, "seen", _nothing),
        _replace(Endpoint, "_may_resume", _may_resume),
        _replace(Peer, "_is_resumed", _yes),
    ),
    # bytes of a failed message are given back
    "return_budget": _all(_lose_bytes("_end"), _lose_bytes("_refuse")),
    # cancelling a call cancels what runs for it elsewhere
    "propagate_cancel": _all(_keep_cancels("cancel"), _keep_cancels("_ask")),
    # deadlines shrink on their way from worker to worker
    "shrink_deadline": _all(_replace(InboundRequests, "_seconds_left", _seconds_left), _time_for_all),
    # ids of released contexts stay known for a while, so that late messages find out
    "tombstone": _replace(ContextTable, "_check_tombstone", _nothing),
    # only a call that says so opens a context
    "open_only_by_call": _replace(ContextTable, "_may_open", _yes),
    # another principal's context is not there
    "authorize_first": _replace(ContextTable, "_find", _find_by_key),
    # releasing a context ends the calls that run in it
    "release_ends_calls": _replace(ContextLeases, "_end_calls", _nothing),
    # only send edges that the roots depend on are waited for
    "mark_needed_edges": _wait_for_every_edge,
    # gradients become visible on all workers together or not at all
    "atomic_commit": _commit_alone,
    # a COMMIT is answered after its effect, not before
    "ack_after_apply": _answer_before_the_commit,
    # a worker that passes a message on answers for those that have answered it
    "answer_for_oneself": _replace(Multicast, "_pass_on", _answer_for_all),
    # who has not answered by way of the tree is told directly
    "tell_whom_the_tree_missed": _rely_on_the_tree,
    # a second COMMIT of the same pass changes nothing
    "commit_idempotent": _commit_again,
    # what an executor returns after its pass was aborted is dropped
    "fence_late_results": _all(
        _replace(PassParticipant, "before_commit", _let_late_results_commit), _replace(GraphTask, "fail_externally", _nothing)
    ),
}

"""The end of a pass on its initiator: it is given up, or committed, and the other workers are waited for."""

from __future__ import annotations

import asyncio

from aiograd.coordination.drive import CoordinatorDrive
from aiograd.distributed.autograd.participant import PassParticipant
from aiograd.distributed.rpc.timers import wait_for
from aiograd.errors import CommitUnknown, DistributedError, PassAbortedError
from aiograd.transaction import Coordinator, TransactionState


async def give_up(participant: PassParticipant, error: BaseException) -> None:
    """Called when waiting for the pass was cancelled or timed out: abort it everywhere; if it has been committed, end its hooks and callbacks."""
    participant.reason = type(error).__name__
    participant.stop(error if isinstance(error, Exception) else PassAbortedError(f"a pass was cancelled on {participant.core.name}"))
    if not participant.is_decided:
        aborting = participant.core.spawn(_abort(participant), "abort")
        await wait_for(participant.core.endpoint.context, aborting, _patience(participant))
        return
    error.committed = True  # type: ignore[attr-defined]
    await _spread(participant)


def _patience(participant: PassParticipant) -> float:
    """Seconds to wait for acknowledgements of the end of a pass, little more than for it; after that, workers are told in the background."""
    return participant.left() + participant.core.limits.heartbeat / 2


async def _abort(participant: PassParticipant) -> None:
    try:
        await participant.wait_ended()
    finally:
        participant.introduce()  # workers that have turned up since are told as well
        await participant.wait_told()


async def _spread(participant: PassParticipant) -> None:
    """Called when waiting is cancelled after the commit: let hooks here end, and wait a moment until the other workers are told."""
    try:
        await participant.wait_ended()
        if participant.pending_decision is not None:
            seconds = min(participant.core.limits.silence, _patience(participant))
            await participant.wait_told(seconds=seconds)
    except asyncio.CancelledError as again:
        again.committed = True  # type: ignore[attr-defined]
        raise
    finally:
        _note_doubt(participant)


async def settle(participant: PassParticipant) -> None:
    """Wait for the other workers after the pass has ended on this one, and raise the errors of the pass."""
    error = participant.error
    if participant.state is not TransactionState.COMMITTED:
        error = error or PassAbortedError("the pass was aborted")
        await give_up(participant, error)
        raise error
    if participant.pending_decision is not None:
        try:
            await participant.wait_told(at_least=participant.core.limits.heartbeat / 2, seconds=_patience(participant))
        except asyncio.CancelledError as cancelled:
            cancelled.committed = True  # type: ignore[attr-defined]
            await _spread(participant)
            raise
    unknown = _note_doubt(participant)
    failures = participant.drive.failures if isinstance(participant.drive, CoordinatorDrive) else {}
    if error is not None:
        raise error
    if unknown:
        first = failures.get(unknown[0]) or DistributedError(f"no confirmation of the commit has come to {participant.core.name}")
        lost = CommitUnknown(
            f"the gradients of this pass are committed on {participant.core.name}, and {', '.join(unknown)} could not be told ({first}). Do not "
            "step with the gradients of this context: restore a lost worker from a checkpoint and run the pass again in a new one.",
            workers=unknown,
        )
        lost.committed = True
        raise lost from first
    for name, failure in failures.items():
        if getattr(failure, "committed", False) or not (participant.is_selective or name in participant.idle):
            raise failure


def _unknown(participant: PassParticipant) -> tuple[str, ...]:
    """Workers that have something to commit and have not acknowledged the commit of the pass."""
    if participant.is_selective or not isinstance(participant.transaction, Coordinator):
        return ()
    return tuple(sorted(participant.transaction.unacknowledged - participant.idle))


def _note_doubt(participant: PassParticipant) -> tuple[str, ...]:
    """Mark the pass as in doubt in its context until all workers have acknowledged the commit; returns the workers that have not."""
    unknown = _unknown(participant)
    if unknown:
        participant.context.in_doubt.add(participant.pass_id)
        if participant.pending_decision is not None and not participant.pending_decision.done():  # telling them goes on
            in_doubt = participant.context.in_doubt
            participant.pending_decision.add_done_callback(lambda _: None if _unknown(participant) else in_doubt.discard(participant.pass_id))
    return unknown

"""The end of a pass: telling other workers of the decision, and finding out about it.

Note [In doubt]
    A prepared part may neither commit nor abort by itself. Where the decision does not come, it asks the initiator and then the others: one
    that has committed, or one that never prepared, settles it. An initiator that does not know the pass never decided for it, which means
    aborted. If nobody can tell until the lease of the context ends, the gradients of the context cannot be trusted, and the context says so.

Note [Who may abort]
    Any worker whose part is not prepared yet: the initiator cannot have decided to commit without it. So what such a worker says holds for
    prepared parts as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from aiograd.distributed import failpoints
from aiograd.distributed.context import Context, PassId
from aiograd.distributed.kinds import Kind
from aiograd.errors import CommitUnknown, DistributedError, Overloaded, PassAbortedError, RemoteError, WorkerLostError

if TYPE_CHECKING:
    from aiograd.distributed.driver.part import Part

#: times that a worker that is lost is told of a commit again
AGAIN = 2
#: passes of a context whose outcome is remembered, for those who ask and for messages that are late
REMEMBERED = 4096
#: outcomes of a pass; the last is that of a pass whose decision was not to be learned
COMMITTED, ABORTED, UNKNOWN = "committed", "aborted", "unknown"


def remember(context: Context, pass_id: PassId, outcome: str) -> None:
    """Note what became of a pass on this worker."""
    outcomes = context.outcomes
    outcomes[pass_id] = outcome
    if len(outcomes) > REMEMBERED:
        oldest = next((known for known in outcomes if known not in context.in_doubt), None)  # of one in doubt somebody may still ask
        if oldest is not None:
            del outcomes[oldest]


# -------------------------------------------------------------------- telling


async def tell(part: Part, others: Iterable[str]) -> None:
    """Tell the other workers of the decision; leaves in `Part.untold` those that could not be told, or failed after their commit."""
    if part.task is None or not part.task.committed:  # the commit itself failed
        part.untold.clear()
        await tell_abort(part, others, "its initiator could not commit")
        return
    failpoints.reach("commit.half")
    await asyncio.gather(*(_tell_commit(part, name) for name in others))


async def _tell_commit(part: Part, name: str) -> None:
    request, limits, now = part.office.request, part.office.limits, asyncio.get_running_loop().time
    deadline = now() + max(part.left(), limits.silence)
    tries = 0
    while True:
        try:
            await request(name, Kind.COMMIT, part.address(), max(deadline - now(), 0.001), part.context.principal)
            del part.untold[name]
            return
        except Exception as error:
            part.untold[name] = error
            if isinstance(error, WorkerLostError):
                tries += 1
            elif not _is_shortage(error):
                return
            if tries > AGAIN or now() + limits.heartbeat > deadline:
                return
            await asyncio.sleep(limits.heartbeat)


def _is_shortage(error: Exception) -> bool:
    """Whether a request that failed here or there may well succeed in a moment."""
    if isinstance(error, RemoteError):
        return error.type_name.endswith("MemoryError") and not error.committed
    return isinstance(error, Overloaded | MemoryError)


async def tell_abort(part: Part, others: Iterable[str], reason: str) -> None:
    """Tell other workers that the pass is over, and wait a little for their answers: their counters are then back to zero."""
    office = part.office
    value = (*part.address(), reason)
    requests = [office.request(name, Kind.ABORT, value, office.limits.silence, part.context.principal) for name in sorted({*others} - {office.name})]
    await asyncio.gather(*requests, return_exceptions=True)


# -------------------------------------------------------------------- asking


async def resolve(part: Part) -> None:
    """See Note [In doubt]."""
    office, context, now = part.office, part.context, asyncio.get_running_loop().time
    until = now() + office.limits.lease_seconds
    names = [part.initiator, *sorted({*part.others, *context.known_workers} - {part.initiator, office.name})]
    while part.state == "prepared" and now() < until:
        for name in names:
            try:
                outcome: Any = await office.request(name, Kind.OUTCOME, part.address(), office.limits.silence, context.principal)
            except (DistributedError, MemoryError):
                continue
            if part.state != "prepared":
                return
            if outcome == COMMITTED:
                part.commit()
                return
            if outcome == ABORTED or (outcome == UNKNOWN and name == part.initiator):
                part.fail(PassAbortedError(f"the pass was aborted: {name} says so"))
                return
        await asyncio.sleep(office.limits.heartbeat)
    if part.state == "prepared":
        if not part.is_selective:
            context.in_doubt.add(part.pass_id)
        part.fail(CommitUnknown(f"nobody could tell whether the pass was committed before the lease of context {context.id} ended"))

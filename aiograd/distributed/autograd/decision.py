"""The messages about the end of a pass: telling other workers the decision, and asking them for it.

Note [Aborts by participants]
    Any worker whose part is not prepared may abort, because the initiator cannot have decided to commit without it. So prepared parts may rely on
    the abort of such a worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from aiograd.coordination.asking import ask_outcome
from aiograd.distributed import failpoints
from aiograd.distributed.autograd.pass_record import PassRecord
from aiograd.distributed.messages.passes import Abort, Commit, PassOutcome
from aiograd.distributed.observing import observe
from aiograd.errors import Overloaded, PassAbortedError, RemoteError, WorkerLostError
from aiograd.transaction import Acknowledged, Coordinator, Tell, TellFailed, TransactionEvent, Trouble
from aiograd.transaction.tree import are_many


async def tell_commit(part: PassRecord, others: Sequence[str]) -> None:
    """Tell the other workers that the pass is committed; errors of that, and of their hooks after the commit, go to `PassRecord.tell_errors`."""
    failpoints.reach("commit.half")
    try:
        if are_many(others):
            others = await _spread_commit(part, others)
        if len(others) == 1:
            await _tell_commit(part, others[0])
        elif others:
            await asyncio.gather(*(_tell_commit(part, name) for name in others))
    finally:
        part.context.history.held.discard(part.pass_id)


async def _spread_commit(part: PassRecord, others: Sequence[str]) -> list[str]:
    """Tell many workers by a tree of them; returns those that have not acknowledged the commit."""
    transaction, now = part.transaction, asyncio.get_running_loop().time
    until = transaction.tell_until if isinstance(transaction, Coordinator) else now()
    messages = dict.fromkeys(others, Commit(*part.address()))
    with observe(part.core.meter, "commit", "commit", f"{len(others)} workers", None if part.task is None else part.task.profiler):
        found = await part.core.multicast.spread(messages, max(until - now(), 0.001), part.context.principal)
    for name, answer in found.items():
        if isinstance(answer, BaseException):
            part.tell_errors[name] = answer
            if not getattr(answer, "committed", False):
                continue
        else:
            del part.tell_errors[name]
        transaction.handle(Acknowledged(name), now())
    return [name for name in others if name not in found or (isinstance(found[name], BaseException) and not getattr(found[name], "committed", False))]


async def _tell_commit(part: PassRecord, name: str) -> None:
    transaction, now = part.transaction, asyncio.get_running_loop().time
    until = transaction.tell_until if isinstance(transaction, Coordinator) else now()
    while True:
        event: TransactionEvent = Acknowledged(name)
        try:
            with observe(part.core.meter, "commit", "commit", name, None if part.task is None else part.task.profiler):
                await part.core.ask(name, Commit(*part.address()), max(until - now(), 0.001), part.context.principal)
            del part.tell_errors[name]
        except Exception as error:
            part.tell_errors[name] = error
            if not getattr(error, "committed", False):
                event = TellFailed(name, _trouble(error))
        again = [command.after for command in transaction.handle(event, now()) if isinstance(command, Tell)]
        if not again:
            return
        await asyncio.sleep(again[0])


def _trouble(error: Exception) -> Trouble:
    if isinstance(error, WorkerLostError):
        return Trouble.LOST
    is_short = error.type_name.endswith("MemoryError") if isinstance(error, RemoteError) else isinstance(error, Overloaded | MemoryError)
    return Trouble.BUSY if is_short else Trouble.REFUSED


async def tell_abort(part: PassRecord, others: Iterable[str], reason: str) -> None:
    """Tell other workers that the pass is aborted, and wait a moment for their answers, so that they have released the pass when this returns."""
    core = part.core
    message, principal = Abort(*part.address(), reason), part.context.principal
    names = sorted({*others} - {core.name})
    if are_many(names):
        found = await core.multicast.spread(dict.fromkeys(names, message), 2 * core.limits.silence, principal)
        names = [name for name in names if name not in found]
    await asyncio.gather(*(core.ask(name, message, core.limits.silence, principal) for name in names), return_exceptions=True)


async def ask(part: PassRecord, peer: str) -> None:
    """Ask a worker for the outcome of the pass."""
    core = part.core
    event = await ask_outcome(peer, core.ask(peer, PassOutcome(*part.address()), core.limits.silence, part.context.principal))
    if not part.has_ended:
        part.handle(event, PassAbortedError(f"the pass was aborted: {peer} says so"))

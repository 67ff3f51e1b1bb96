"""PendingDecisions: what was decided about steps, on its way to the hosts on workers, until each of them has acknowledged it.

Note [Until it is acknowledged]
    A host that has prepared a step takes no other before it knows what became of this one. So a decision that a host has not acknowledged is kept,
    and told again before anything else is begun. That a commit is not acknowledged means doubt: whether the host has written its
    gradients is not known. It may have, or do so when it is told or finds out by itself (see Note [In doubt] in `session`); or it has lost them,
    and then it never acknowledges.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterable, Mapping
from typing import Any, Protocol

from aiograd.errors import CommitUnknown, ReferenceLostError, WorkerLostError
from aiograd.transaction import Acknowledged, Coordinator, Outcome, ParticipantsLeft, Settle, Tell, TellFailed, Trouble
from aiograd.transaction.tree import are_many


class Told(Protocol):
    """A host on a worker."""

    #: name of the worker
    owner: str
    #: the host over there; None: there is none
    ref: Any

    @property
    def name(self) -> str:
        """Its own among those that take part."""


class PendingDecisions:
    """The decisions on steps that hosts have not acknowledged.

    Args:
        timeout: seconds for telling one; None: the worker's default.
        settling: the advice to whoever has to wait until a commit is confirmed.
    """

    def __init__(self, timeout: float | None, settling: str) -> None:
        self._timeout = timeout
        self._settling = settling
        #: by step, in order: a host that is in doubt listens to nothing about later steps
        self._steps: dict[int, tuple[Coordinator, Mapping[str, Told]]] = {}

    @property
    def are_acknowledged(self) -> bool:
        """True if there are none."""
        return not self._open()

    def _open(self) -> dict[int, tuple[Coordinator, Mapping[str, Told]]]:
        self._steps = {step: each for step, each in self._steps.items() if each[0].unacknowledged}
        return self._steps

    def unconfirmed(self) -> tuple[str, ...]:
        """Names of the workers that have not acknowledged a commit."""
        owners = (
            hosts[name].owner
            for transaction, hosts in self._open().values()
            if transaction.outcome is Outcome.COMMITTED
            for name in hosts
            if name in transaction.unacknowledged
        )
        return tuple(dict.fromkeys(owners))

    def add(self, step: int, transaction: Coordinator, hosts: Iterable[Told]) -> None:
        """Something was decided about a step that these hosts take part in."""
        self._steps[step] = transaction, {host.name: host for host in hosts}

    def forget(self, host: Told) -> None:
        """A host is gone and has been replaced."""
        now = asyncio.get_running_loop().time()
        for transaction, hosts in self._steps.values():
            if hosts.get(host.name) is host:
                transaction.handle(ParticipantsLeft((host.name,)), now)

    def telling(self, step: int | None = None) -> dict[Told, Coroutine[Any, Any, None]]:
        """Tells hosts what they have not acknowledged, of one step or of all."""
        found: dict[Told, Coroutine[Any, Any, None]] = {}
        for number, (transaction, hosts) in self._open().items():
            if step is None:
                transaction.handle(Settle(), asyncio.get_running_loop().time())
            if step in (None, number):
                for name in hosts:
                    host = hosts[name]
                    if host.ref is not None and host not in found and name in transaction.unacknowledged:
                        found[host] = self._tell(host, step)
        return found

    async def attempt(self, step: int | None) -> dict[Told, BaseException]:
        """The same, all side by side, and many by a tree of them; returns what failed, by host."""
        failed = await self._spread(step)
        telling = self.telling(step)
        outcomes = await asyncio.gather(*telling.values(), return_exceptions=True)
        return failed | {host: outcome for host, outcome in zip(telling, outcomes, strict=True) if isinstance(outcome, BaseException)}

    async def _spread(self, step: int | None) -> dict[Told, BaseException]:
        """Tell hosts by a tree of them, where they are many; returns the errors that came after a commit. Those that it misses are told directly."""
        failed: dict[Told, BaseException] = {}
        for number, (transaction, hosts) in list(self._open().items()):
            told = [host for name, host in hosts.items() if host.ref is not None and name in transaction.unacknowledged]
            if step not in (None, number) or not are_many(told):
                continue
            method = "commit" if transaction.outcome is Outcome.COMMITTED else "abort"
            answers = await told[0].ref.call_all([host.ref for host in told], method, number, timeout=self._timeout)
            for host, answer in zip(told, answers, strict=True):
                if isinstance(answer, BaseException):
                    if not getattr(answer, "committed", False):
                        continue
                    failed[host] = answer
                if answer is not None:
                    transaction.handle(Acknowledged(host.name), asyncio.get_running_loop().time())
        return failed

    async def tell(self, step: int | None, what: str) -> dict[Told, BaseException]:
        """The same, where no commit is left unacknowledged.

        Args:
            what: was committed; for the error.

        Raises:
            CommitUnknown: a commit is not acknowledged.
        """
        failed = await self.attempt(step)
        unknown = self.unconfirmed()
        if unknown:
            first = next((error for host, error in failed.items() if host.owner in unknown), None)
            raise CommitUnknown(
                f"{what} was committed, but not confirmed by {', '.join(unknown)} ({first}): it is in doubt there. {self._settling}",
                workers=unknown,
            ) from first
        return failed

    async def _tell(self, host: Told, step: int | None) -> None:
        for number, (transaction, hosts) in list(self._steps.items()):
            if step in (None, number) and hosts.get(host.name) is host and host.name in transaction.unacknowledged:
                await (self._commit if transaction.outcome is Outcome.COMMITTED else self._abort)(transaction, host, number)

    async def _commit(self, transaction: Coordinator, host: Told, step: int) -> None:
        now = asyncio.get_running_loop().time
        while True:
            try:
                await host.ref.call("commit", step, timeout=self._timeout)
                break
            except Exception as error:
                if getattr(error, "committed", False):
                    transaction.handle(Acknowledged(host.name), now())
                    raise
                is_lost = isinstance(error, WorkerLostError) and not error.is_gone
                again = transaction.handle(TellFailed(host.name, Trouble.LOST if is_lost else Trouble.REFUSED), now())
                if not again:
                    raise
            await asyncio.sleep(max(command.after for command in again if isinstance(command, Tell)))
        transaction.handle(Acknowledged(host.name), now())

    async def _abort(self, transaction: Coordinator, host: Told, step: int) -> None:
        with contextlib.suppress(ReferenceLostError):  # then there is nothing to drop any more
            await host.ref.call("abort", step, timeout=self._timeout)
        transaction.handle(Acknowledged(host.name), asyncio.get_running_loop().time())

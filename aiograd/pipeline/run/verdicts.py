"""Verdicts: what became of steps, on its way to the hosts on workers, until each of them has confirmed it.

Note [Until it is confirmed]
    A host that has prepared a step takes no other before it knows what became of this one. So a verdict that a host has not confirmed is kept,
    and told again before the pipeline begins anything else. That a commit is not confirmed means doubt: whether the host has written its
    gradients is not known. It may have, or do so when it is told or finds out by itself (see Note [In doubt] in `watch`); or it has lost them,
    and then it never confirms.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterable, Mapping
from typing import Any, Protocol

from aiograd.errors import CommitUnknown, ReferenceLostError, WorkerLostError
from aiograd.pipeline.run.outbox import PAUSE

COMMIT, ABORT = "commit", "abort"
#: times that a worker that is lost is told of a commit again before that counts as not confirmed
AGAIN = 2


class Told(Protocol):
    """A host on a worker."""

    #: name of the worker
    owner: str
    #: the host over there; None: there is none
    ref: Any


class Verdicts:
    """The verdicts on steps that hosts have not confirmed.

    Args:
        timeout: seconds for telling one; None: the worker's default.
    """

    def __init__(self, timeout: float | None) -> None:
        self._timeout = timeout
        self._untold: dict[tuple[Told, int], str] = {}

    @property
    def are_told(self) -> bool:
        """Whether everything has been confirmed."""
        return not self._untold

    def unconfirmed(self) -> tuple[str, ...]:
        """Names of the workers that have not confirmed a commit."""
        return tuple(dict.fromkeys(host.owner for (host, _), word in self._untold.items() if word == COMMIT))

    def pass_on(self, word: str, step: int, hosts: Iterable[Told]) -> None:
        """Hosts are to be told the verdict on a step: COMMIT or ABORT."""
        self._untold |= {(host, step): word for host in hosts}

    def forget(self, host: Told) -> None:
        """A host is gone and has been replaced."""
        self._untold = {key: word for key, word in self._untold.items() if key[0] is not host}

    def telling(self, step: int | None = None) -> dict[Told, Coroutine[Any, Any, None]]:
        """Tells hosts what they have not confirmed, of one step or of all."""
        found: dict[Told, Coroutine[Any, Any, None]] = {}
        for host in dict.fromkeys(host for (host, number) in self._untold if host.ref is not None and step in (None, number)):
            found[host] = self._tell(host, step)
        return found

    async def tell(self, step: int | None, what: str) -> dict[Told, BaseException]:
        """The same, all side by side; returns what failed, where no commit is left unconfirmed.

        Args:
            what: was committed; for the error.

        Raises:
            CommitUnknown: a commit is not confirmed.
        """
        telling = self.telling(step)
        outcomes = await asyncio.gather(*telling.values(), return_exceptions=True)
        failed = {host: outcome for host, outcome in zip(telling, outcomes, strict=True) if isinstance(outcome, BaseException)}
        self._check_confirmed(failed, what)
        return failed

    def _check_confirmed(self, failed: Mapping[Told, BaseException], what: str) -> None:
        unknown = self.unconfirmed()
        if not unknown:
            return
        first = next((error for host, error in failed.items() if host.owner in unknown), None)
        raise CommitUnknown(
            f"{what} was committed, but not confirmed by {', '.join(unknown)} ({first}): it is in doubt there. Call the pipeline's settle() once "
            "they can be reached; where it says the same again, restore all workers from one checkpoint and make a new Pipeline",
            workers=unknown,
        ) from first

    async def _tell(self, host: Told, step: int | None) -> None:
        for (each, number), word in list(self._untold.items()):  # in order: a host that is in doubt listens to nothing about later steps
            if each is host and step in (None, number):
                await (self._commit if word == COMMIT else self._abort)(host, number)

    async def _commit(self, host: Told, step: int) -> None:
        for left in range(AGAIN, -1, -1):
            try:
                await host.ref.call("commit", step, timeout=self._timeout)
                break
            except WorkerLostError as error:
                if error.is_gone or not left:
                    raise
            except Exception as error:
                if getattr(error, "committed", False):
                    self._untold.pop((host, step), None)
                raise
            await asyncio.sleep(PAUSE)
        self._untold.pop((host, step), None)

    async def _abort(self, host: Told, step: int) -> None:
        with contextlib.suppress(ReferenceLostError):  # then there is nothing to drop any more
            await host.ref.call("abort", step, timeout=self._timeout)
        self._untold.pop((host, step), None)

"""OptimizerStep: one step of a `DistributedOptimizer`, as a transaction in one phase: workers do not vote, and take it when they are told of it.

See Note [Optimizer steps] in `optimizer_server`.

Note [A step that some have taken]
    A worker that has taken a step answers a second request for it without another one. So the step is asked for again under its number, and ends on
    the workers that lack it, as long as it means the same gradients: those of the same context, which have not changed since. Without a context
    that cannot be known, as workers that have taken the step have cleared their gradients. Any other step is refused: some workers would be a step
    ahead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from aiograd.coordination.client import TransactionClient
from aiograd.coordination.drive import CoordinatorDrive
from aiograd.distributed.autograd.context import Context
from aiograd.distributed.messages.library import StepOptimizer, ask_library
from aiograd.distributed.objects.references import RemoteRef
from aiograd.distributed.worker import Worker
from aiograd.errors import ArgumentTypeError, CommitUnknown, StepError
from aiograd.transaction import Coordinator, Outcome, ParticipantsJoined, Prepared, Trouble


class OptimizerStep(TransactionClient):
    """One step on all workers.

    Args:
        worker: this process's worker.
        optimizers: the optimizers by worker.
        number: of the step.
        attempt: number of the attempt, where gradients are in ``grad``; None: they are in the current context.
        timeout: seconds for the step; None: the worker's default.
    """

    def __init__(self, worker: Worker, optimizers: Mapping[str, RemoteRef], number: int, attempt: int | None, timeout: float | None) -> None:
        self._worker = worker
        self._optimizers = dict(optimizers)
        self._number = number
        self._attempt = attempt
        self._timeout = timeout
        #: the workers that have confirmed the step, once all have been told, and the others
        self.confirmed: tuple[str, ...] | None = None
        self.failed: tuple[str, ...] = ()
        self._drive = CoordinatorDrive(Coordinator("", pause=worker.limits.heartbeat), self)

    async def take(self) -> None:
        """Take the step on all workers. Workers that are short of memory are told again; a worker that is lost is not.

        Raises:
            StepError: some have not taken it, or could not confirm it.
        """
        drive = self._drive
        drive.handle(ParticipantsJoined(self._optimizers, votes=False))
        drive.handle(Prepared())
        limit = self._worker.limits.default_deadline if self._timeout is None else self._timeout
        drive.machine.tell_until = asyncio.get_running_loop().time() + limit
        failures = await drive.tell()
        self.failed = failed = tuple(owner for owner in self._optimizers if owner in drive.machine.unacknowledged)
        self.confirmed = tuple(owner for owner in self._optimizers if owner not in failed)
        if not failed:
            return
        first = failures[failed[0]]
        if not isinstance(first, Exception):
            raise first
        raise StepError(
            f"optimizer step {self._number} was taken on {', '.join(self.confirmed) or 'no worker'} and not confirmed by {', '.join(failed)} "
            f"({first})",
            step=self._number,
            applied=self.confirmed,
            failed=failed,
        ) from first

    async def tell(self, peer: str, outcome: Outcome) -> None:
        """Let a worker take the step."""
        await ask_library(self._worker, peer, StepOptimizer(self._optimizers[peer], self._number, self._attempt), self._timeout)

    def trouble(self, error: BaseException) -> Trouble:
        """As by default, but a worker that is lost has lost its context as well, so it is not told again."""
        trouble = super().trouble(error)
        return Trouble.REFUSED if trouble is Trouble.LOST else trouble


class StepNumbers:
    """The numbers of steps, and the step that some workers have not confirmed; see Note [A step that some have taken].

    Attributes:
        last: number of the last step.
        attempts: how many steps were tried, which tells steps with gradients in ``grad`` apart.
    """

    def __init__(self) -> None:
        self.last = self.attempts = 0
        #: the workers that have taken the last step, and those that have not confirmed it
        self._applied: set[str] = set()
        self._failed: set[str] = set()
        #: the gradients of the last step, if it failed: the context, and the number of its passes; -1: they were scaled since
        self._gradients: tuple[Any, int] | None = None

    @property
    def has_left_gradients(self) -> bool:
        """True if the last step failed, and its gradients are in ``grad`` of some workers."""
        return bool(self._failed) and self._gradients is None

    def begin(self, ctx: Any, workers: Iterable[str]) -> int:
        """The number for a step.

        Args:
            ctx: the context of its gradients; None: they are in ``grad``.
            workers: those that have parameters.

        Returns:
            The number: that of the last step if it is asked for again.

        Raises:
            StepError: some workers lack the last step, which had other gradients.
        """
        self._settle(workers)
        if self._gradients is not None and ctx is self._gradients[0]:
            if self._gradients[1] != ctx.next_pass:
                self._refuse("would have the gradients of the same context after a further pass or clipping")
        elif self._applied:
            self._refuse("would have other gradients")
        self.last += not self._applied
        self.attempts += 1
        return self.last

    def ended(self, ctx: Any, applied: Iterable[str], failed: Iterable[str]) -> None:
        """Take note of the answers to the last step.

        Args:
            ctx: as in `begin`.
            applied, failed: workers that have confirmed it, and the others.
        """
        self._applied, self._failed = self._applied.union(applied), {*failed}
        self._gradients = None if ctx is None else (ctx, ctx.next_pass)
        if not self._failed:
            self.restored(self.last)
        elif not self._applied:
            self.last -= 1  # no worker is known to have taken it: it may be tried again under its number

    def scaled(self, ctx: Any) -> None:
        """Take note that the gradients of a context have been scaled."""
        if self._gradients is not None and ctx is self._gradients[0]:
            self._gradients = (ctx, -1)

    def restored(self, last: int) -> None:
        """Take note that all workers have taken the step number `last`, and no further one."""
        self.last, self._applied, self._failed, self._gradients = last, set(), set(), None

    def check_whole(self, workers: Iterable[str], what: str) -> None:
        """Raise if some workers have taken the last step and others have not.

        Args:
            workers: those that have parameters.
            what: the effect of the request that is refused, in words.

        Raises:
            StepError: it is so.
        """
        self._settle(workers)
        if self._applied:
            self._refuse(what)

    def _settle(self, workers: Iterable[str]) -> None:
        """Forget workers that have no parameters any more."""
        self._failed &= {*workers}
        if not self._failed:
            self.restored(self.last)
        elif self._applied and self._applied.isdisjoint(workers):
            self._applied, self.last = set(), self.last - 1

    def _refuse(self, what: str) -> NoReturn:
        applied, failed, number = tuple(sorted(self._applied)), tuple(sorted(self._failed)), self.last + (not self._applied)
        advice = "Restore all workers from one checkpoint (load_state_dict, or restore), or remove() workers that are lost"
        raise StepError(
            f"optimizer step {number} was taken on {', '.join(applied) or 'no worker'} and not confirmed by {', '.join(failed)}, and this request "
            f"{what}. No worker was asked. {advice if applied else 'Run the passes again in a new context'}",
            step=number,
            applied=applied,
            failed=failed,
        )


def check_certain(ctx: Any) -> None:
    """Raise unless the gradients of a context can be used.

    Args:
        ctx: the context.

    Raises:
        ArgumentTypeError: it is none. ContextReleasedError: it has been released. CommitUnknown: its gradients may not be complete.
    """
    if not isinstance(ctx, Context):
        raise ArgumentTypeError(f"DistributedOptimizer: expected the context with the gradients, of `worker.context()`, found {type(ctx).__name__}")
    ctx.check_open()
    if ctx.in_doubt:
        raise CommitUnknown(
            f"a step with the gradients of context {ctx.id}: a pass of it is not known to be committed on every worker, or clipping not to have "
            "reached every worker, so they may not be complete. Restore from a checkpoint and run it again in a new context."
        )

"""OptimizerStep: one step of a `DistributedOptimizer`, as a transaction in one phase: workers do not vote, and take it when they are told of it.

See Note [Optimizer steps] in `optimizer_server`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from aiograd.coordination.client import TransactionClient
from aiograd.coordination.drive import CoordinatorDrive
from aiograd.distributed.messages.library import StepOptimizer, ask_library
from aiograd.distributed.objects.references import RemoteRef
from aiograd.distributed.worker import Worker
from aiograd.errors import StepError
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
        #: the workers that have confirmed the step, once all have been told
        self.confirmed: tuple[str, ...] | None = None
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
        failed = tuple(owner for owner in self._optimizers if owner in drive.machine.unacknowledged)
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

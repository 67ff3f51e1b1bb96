"""StepSession: one step, as one host sees it, from the first that it hears of it to its end: the driver of its transaction.

Note [In doubt]
    A host on a worker that has prepared a step may neither commit nor drop it by itself. So while it waits, it asks the process that decides
    now and then, and where that does not answer, the other hosts: see `aiograd.transaction.states`. One that never heard of
    the step settles it, since nothing can have been decided without that host, which then refuses the step for good. If nobody can tell until the
    lease ends, what was prepared is dropped and the step stays in doubt on this host: it takes no further steps, and no optimizer steps its
    parameters, until it is told that the step was not committed, or whoever made the host lets go of it.

Note [Lease]
    The lease is that of the worker (`Limits.lease`), and begins anew with each sign of life. A step that was heard of but that nobody has asked
    to run is dropped when it ends. One that runs is bounded by the request that runs it, which ends with its deadline or with contact to the
    process that decides. A prepared step is kept for `kept_for(lease)` at least, which that process is told: it decides while that holds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Protocol

from aiograd.coordination.asking import ask_outcome
from aiograd.coordination.reduced_pass import ReducingGroup
from aiograd.graph.accumulate_grad import AccumulateGrad
from aiograd.transaction import (
    Applied,
    Apply,
    ApplyFailed,
    Ask,
    ClearDoubt,
    Coordinator,
    Drop,
    Failed,
    Heard,
    OwnerClosed,
    Participant,
    Prepared,
    Tick,
    TransactionEvent,
    TransactionState,
)

#: the name of the process that decides among the participants of a step
DRIVER = "this process"
#: seconds until what could not be delivered is tried again
PAUSE = 0.25
#: seconds between two rounds of questions at most, and the part of the lease that they take at most
BETWEEN, PART = 1.0, 8


class HostWorker(Protocol):
    """The worker that a host lives on."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def lease(self) -> float:
        """Seconds for which it keeps something for a peer that it does not hear from."""

    def keep(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run something apart from any request, as long as the worker is open."""

    def join(self, names: Sequence[str], name: str) -> Coroutine[Any, Any, ReducingGroup]:
        """Join a group of workers; the place of a name is its rank."""


class PreparedStep(Protocol):
    """The work that a host has done for a step, which can be committed at once, or dropped."""

    @property
    def leaves(self) -> frozenset[AccumulateGrad]:
        """The leaves whose gradients it will write."""

    def commit(self) -> None:
        """Write everything, in one moment; where that fails, nothing has been written."""

    async def after_commit(self) -> None:
        """Do what follows a commit, such as calling hooks."""


def kept_for(lease: float) -> float:
    """Seconds for which a prepared step is kept without a sign of life, at least."""
    return lease * (PART - 2) / PART


class StepSession:
    """One step, as one host sees it.

    Args:
        step: its number.
        subject: whose step it is, for names of tasks.
        worker: the one of the host; None in the process that decides.
        on_end: told when the step is over here.
    """

    __slots__ = (
        "step", "subject", "execution", "runner", "transaction", "has_begun", "driver", "leaves", "watcher",
        "_worker", "_on_end", "_pause", "_hosts", "_woken",
    )  # fmt: skip

    def __init__(self, step: int, subject: str, worker: HostWorker | None, on_end: Callable[[Any], None]) -> None:
        self.step = step
        self.subject = subject
        self.execution: PreparedStep | None = None
        #: the task that carries it out, and whether there has been one
        self.runner: asyncio.Task[Any] | None = None
        self.has_begun = False
        #: the host of the process that decides, if it can be asked
        self.driver: Any = None
        #: whose gradients are prepared
        self.leaves: frozenset[AccumulateGrad] = frozenset()
        #: sees to it that the step does not stay for ever
        self.watcher: asyncio.Task[None] | None = None
        self._worker = worker
        self._on_end = on_end
        self._pause = PAUSE if worker is None else min(worker.lease / PART, BETWEEN)
        #: whom to ask, by name
        self._hosts: dict[str, Any] = {}
        self._woken = asyncio.Event()
        self.transaction: Coordinator | Participant
        if worker is None:
            self.transaction = Coordinator(DRIVER, pause=PAUSE)
        else:
            kept = kept_for(worker.lease)
            due = asyncio.get_running_loop().time() + kept
            self.transaction = Participant("", lease=kept - self._pause, pause=self._pause, due=due)
            self.watcher = worker.keep(self._watch(), f"step {step} of {subject}")

    @property
    def state(self) -> TransactionState:
        """How far the transaction is here."""
        return self.transaction.state

    def begin(self, driver: Any, *, is_read_only: bool = False) -> None:
        """The step is carried out from now on, by the running task.

        Args:
            driver: the host of the process that decides; None: it cannot be asked.
            is_read_only: there will be nothing to commit.
        """
        self.runner = asyncio.current_task()
        self.has_begun = True
        self.driver = driver
        if isinstance(self.transaction, Participant):
            self.transaction.coordinator = "" if driver is None else DRIVER
            self.transaction.is_read_only = is_read_only
            self.transaction.due = None
            self._woken.set()

    def end(self, execution: PreparedStep) -> None:
        """Everything has been carried out."""
        self.runner = None
        self.execution = execution
        self.leaves = execution.leaves
        if isinstance(self.transaction, Participant):
            self.handle(Prepared(asyncio.get_running_loop().time() + self._pause))

    def fail(self) -> None:
        """The work of the running task is of no use."""
        self.runner = None
        self.handle(Failed())

    def hear(self) -> None:
        """There is a sign of life of whoever drives the step."""
        if isinstance(self.transaction, Participant):
            self.handle(Heard())

    def give_up(self) -> None:
        """Drop the step, whatever was decided; what is committed stays."""
        self.handle(Failed() if isinstance(self.transaction, Coordinator) else OwnerClosed())

    # ---------------------------------------------------------------- what a kind of step adds

    def _others(self) -> Iterable[Any]:
        """The hosts that take part as well, to be asked what became of the step."""
        return ()

    def _let_go(self) -> None:
        """The step is over: release what else was kept for it."""

    # ---------------------------------------------------------------- events and commands

    def handle(self, event: TransactionEvent) -> PreparedStep | None:
        """Give the transaction an event, and do what it wants, except to tell other hosts.

        Returns:
            What was committed by that; `PreparedStep.after_commit` has to be called yet.

        Raises:
            TransactionError: the event cannot happen now. The exception of a failed commit; nothing has changed then.
        """
        committed = None
        for command in self.transaction.handle(event, asyncio.get_running_loop().time()):
            match command:
                case Apply():
                    committed = self._commit()
                case Drop():
                    self._drop()
                case ClearDoubt():
                    self.leaves = frozenset()
                case Ask(peers) if self._worker is not None:
                    for peer in peers:
                        self._worker.keep(self._ask(peer), f"step {self.step} of {self.subject}: outcome")
        self._woken.set()
        return committed

    def _commit(self) -> PreparedStep | None:
        execution = self.execution
        try:
            if execution is not None:
                execution.commit()
        except BaseException:
            self.handle(ApplyFailed())
            raise
        self.handle(Applied())
        self._drop()
        return execution

    def _drop(self) -> None:
        """The step is over: let go of everything."""
        if self.state is not TransactionState.IN_DOUBT:
            self.leaves = frozenset()
        self.execution = None
        self._let_go()
        if self.runner is not None:
            self.runner.cancel()
        self.runner = None
        if self.watcher is not None and self.watcher is not asyncio.current_task():
            self.watcher.cancel()
        self.watcher = None
        self._on_end(self)

    # ---------------------------------------------------------------- time, and questions

    async def _watch(self) -> None:
        """Tell the transaction when it is time. Cancelled when the step is over."""
        now = asyncio.get_running_loop().time
        while self.watcher is not None:
            self._woken.clear()
            try:
                async with asyncio.timeout_at(self.transaction.due):
                    await self._woken.wait()
            except TimeoutError:
                due = self.transaction.due
                if due is not None and due <= now():
                    self._look_around()
                    self.handle(Tick())

    def _look_around(self) -> None:
        """Note who may know what became of the step."""
        others = [host for host in self._others() if host != self.driver]
        self._hosts = {f"host {number}": host for number, host in enumerate(others)}
        if isinstance(self.transaction, Participant):
            self.transaction.others = tuple(self._hosts)

    async def _ask(self, peer: str) -> None:
        host = self.driver if peer == DRIVER else self._hosts[peer]
        execution = self.handle(await ask_outcome(peer, host.call("outcome", self.step, timeout=self._pause)))
        if execution is not None:
            await execution.after_commit()

"""StepSession: one step on one member, from the first message about it to its end; and StepWork, the work of a process for one step.

Note [In doubt]
    A member that has prepared a step may neither commit nor drop it by itself. While it waits it asks the coordinating process now and then, and
    where that does not answer, the other members: see `aiograd.transaction.states`. A member that never heard of the step settles it, since
    nothing can have been decided without that member, which then refuses the step for good. If no answer tells the outcome until the lease ends,
    the prepared work is dropped and the step stays in doubt on this member: it takes no further steps, and no optimizer steps its parameters,
    until it is told that the step was not committed, or its references are deleted.

Note [Lease]
    The lease is the worker's (`Limits.lease`), and begins anew with each sign of life. A step that was heard of and never run is dropped when it
    ends. A step that runs is bounded by the request that runs it, which ends with its deadline or with contact to the coordinating process. A
    prepared step is kept for `kept_for(lease)` at least. The coordinating process is told so, and decides while that time lasts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from aiograd.coordination.client import AfterCommit, TransactionClient
from aiograd.coordination.drive import ParticipantDrive, TransactionDrive
from aiograd.coordination.reduced_pass import ReducingGroup
from aiograd.graph.accumulate_grad import AccumulateGrad
from aiograd.transaction import Coordinator, Failed, Heard, Participant, Prepared, TransactionEvent, TransactionState

#: the name of the coordinating process among the participants of a step
COORDINATOR = "this process"
#: other members at most that an uncertain member asks, beside the coordinating process and the members it exchanges values with
WITNESSES = 8
#: seconds until a message that could not be delivered is sent again
PAUSE = 0.25
#: seconds between two rounds of questions at most, and the part of the lease that they take at most
BETWEEN, PART = 1.0, 8


class MemberWorker(Protocol):
    """The worker of a member."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def lease(self) -> float:
        """Seconds for which it keeps state for a silent peer."""

    def keep(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run a coroutine apart from any request, as long as the worker is open."""

    def call_at(self, when: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        """Call a function at a time of the loop, apart from any request, if the worker is open then."""

    def join(self, names: Sequence[str], name: str) -> Coroutine[Any, Any, ReducingGroup]:
        """Join a group of workers; the place of a name is its rank."""


class PreparedStep(Protocol):
    """The work for a step that is done, and can be committed at once, or dropped."""

    @property
    def leaves(self) -> frozenset[AccumulateGrad]:
        """The leaves that get gradients."""

    def commit(self) -> None:
        """Write everything, in one moment; where that fails, nothing has been written."""

    async def after_commit(self) -> None:
        """Run what follows a commit, such as hooks."""


def kept_for(lease: float) -> float:
    """Seconds for which a prepared step is kept without a sign of life, at least."""
    return lease * (PART - 2) / PART


class OpenStep(NamedTuple):
    """A step that is under way in one process, for a report of what waits."""

    step: int
    #: the owner of the steps, as of `StepWording`
    subject: str
    #: key of the reference to the outcomes; empty: there is none; None: these are the outcomes
    key: bytes | None
    #: the tasks that carry it out here
    tasks: list[asyncio.Task[Any]]
    #: name of the worker whose decision is waited for; "": none is
    decided_by: str
    #: keys of the references to the members that are asked
    members: list[bytes]
    #: futures of messages, with the name of the worker that sends each ("": this one, None: the coordinating process) and the message
    messages: list[tuple[asyncio.Future[Any], str | None, str]]


class StepWork:
    """The work of one process for one step.

    Args:
        step: its number.
    """

    __slots__ = ("step", "execution", "runner", "has_begun", "leaves")

    def __init__(self, step: int) -> None:
        self.step: int = step
        #: the prepared work
        self.execution: PreparedStep | None = None
        #: the task that carries the step out, and whether there has been one
        self.runner: asyncio.Task[Any] | None = None
        self.has_begun: bool = False
        #: the leaves with prepared gradients
        self.leaves: frozenset[AccumulateGrad] = frozenset()

    def messages(self) -> list[tuple[asyncio.Future[Any], str | None, str]]:
        """See `OpenStep`."""
        return []

    def members(self) -> list[Any]:
        """References to the members that get messages of this one."""
        return []

    def begin(self) -> None:
        """The running task carries the step out."""
        self.runner = asyncio.current_task()
        self.has_begun = True

    def end(self, execution: PreparedStep) -> None:
        """The step has been carried out, up to the commit."""
        self.runner = None
        self.execution = execution
        self.leaves = execution.leaves

    def release(self, *, is_committed: bool) -> None:
        """The step is over: release everything."""
        self.execution = None
        runner, self.runner = self.runner, None
        if runner is not None:
            runner.cancel()


W = TypeVar("W", bound=StepWork)
D = TypeVar("D", bound=TransactionDrive[Any])


class StepClient(TransactionClient, Generic[W, D]):
    """The work of one process for one step, as a client of its transaction.

    Args:
        work: the work.
        on_end: called with this object when the step is over here.
    """

    __slots__ = ("work", "drive", "_on_end", "__weakref__")

    drive: D

    def __init__(self, work: W, on_end: Callable[[Any], None]) -> None:
        self.work: W = work
        self._on_end = on_end

    @property
    def step(self) -> int:
        """The number of the step."""
        return self.work.step

    @property
    def transaction(self) -> Coordinator | Participant:
        """The transaction."""
        machine: Coordinator | Participant = self.drive.machine
        return machine

    @property
    def state(self) -> TransactionState:
        """The state of the transaction here."""
        return self.drive.state

    def prepared(self, execution: PreparedStep) -> None:
        """The step has been carried out here, up to the commit."""
        self.work.end(execution)

    def failed(self) -> None:
        """Carrying out the step has failed here."""
        self.work.runner = None
        self.drive.handle(Failed())

    # ---------------------------------------------------------------- as a client

    def apply(self) -> AfterCommit:
        """Commit the prepared work."""
        execution = self.work.execution
        if execution is None:
            return None
        execution.commit()
        return execution.after_commit

    def applied(self) -> None:
        """The step is over here."""
        self._release()

    def drop(self, event: TransactionEvent) -> None:
        """The step is over here."""
        self._release()

    def _release(self) -> None:
        if self.state is not TransactionState.IN_DOUBT:
            self.clear_doubt()
        self.work.release(is_committed=self.state is TransactionState.COMMITTED)
        self._on_end(self)

    def clear_doubt(self) -> None:
        """No gradients are in doubt."""
        self.work.leaves = frozenset()


class StepSession(StepClient[W, ParticipantDrive]):
    """One step on one member.

    Args:
        work, on_end: as for `StepClient`.
        subject: the owner of the step, for names of tasks.
        worker: the worker of the member.
        others: returns references to the other members, which may know the outcome.
    """

    __slots__ = ("coordinator", "_subject", "_worker", "_others", "_pause", "_members")

    def __init__(
        self, work: W, on_end: Callable[[Any], None], subject: str, worker: MemberWorker, others: Callable[[StepSession[W]], Iterable[Any]]
    ) -> None:
        super().__init__(work, on_end)
        #: reference to the outcomes of the coordinating process; None: it cannot be asked
        self.coordinator: Any = None
        self._subject = subject
        self._worker = worker
        self._others = others
        self._pause = min(worker.lease / PART, BETWEEN)
        #: the other members by name
        self._members: dict[str, Any] = {}
        kept = kept_for(worker.lease)
        due = asyncio.get_running_loop().time() + kept
        self.drive = ParticipantDrive(Participant("", lease=kept - self._pause, pause=self._pause, due=due), self)
        self.drive.arm()

    def begin(self, coordinator: Any, *, is_read_only: bool = False) -> None:
        """The running task carries the step out.

        Args:
            coordinator: reference to the outcomes of the coordinating process; None: it cannot be asked.
            is_read_only: there will be nothing to commit.
        """
        self.work.begin()
        self.coordinator = coordinator
        participant = self.drive.machine
        participant.coordinator = "" if coordinator is None else COORDINATOR
        participant.is_read_only = is_read_only
        participant.due = None
        self.drive.arm()

    def prepared(self, execution: PreparedStep) -> None:
        """The step has been carried out here, up to the commit, and waits for the decision."""
        super().prepared(execution)
        self.drive.handle(Prepared(asyncio.get_running_loop().time() + self._pause))

    def hear(self) -> None:
        """There is a sign of life of the coordinating process."""
        self.drive.handle(Heard())

    # ---------------------------------------------------------------- as a client

    async def ask(self, peer: str) -> str:
        """Ask the coordinating process or another member for the outcome."""
        member = self.coordinator if peer == COORDINATOR else self._members[peer]
        return str(await member.call("outcome", self.step, timeout=self._pause))

    def witnesses(self) -> Sequence[str]:
        """The other members."""
        others = [member for member in self._others(self) if member != self.coordinator]
        self._members = {f"member {number}": member for number, member in enumerate(others)}
        return tuple(self._members)

    def spawn(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """See `MemberWorker.keep`."""
        return self._worker.keep(coroutine, f"step {self.step} of {self._subject}: {name}")

    def call_at(self, when: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        """See `MemberWorker.call_at`."""
        return self._worker.call_at(when, callback)

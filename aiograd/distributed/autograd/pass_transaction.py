"""PassTransaction: one worker's transaction of one distributed backward pass: its work is the GraphTask's, its messages are requests.

Note [Aborts by participants]
    Any worker that is not prepared may abort, because the initiator cannot have decided to commit without it. So prepared participants may rely on
    the abort of such a worker.

Note [Telling of a failure]
    The initiator tells all participants that it knows of. It does not know all of them during discovery, nor in fast mode. So a participant that
    fails or is aborted meanwhile tells the workers to which it has sent requests or gradients, and its answer to the initiator waits for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from aiograd.coordination.client import AfterCommit, TransactionClient
from aiograd.coordination.drive import CoordinatorDrive, ParticipantDrive
from aiograd.coordination.silence import Untold
from aiograd.distributed import failpoints
from aiograd.distributed.autograd.context import Context, PassId, pass_name
from aiograd.distributed.autograd.pass_record import PassRecord
from aiograd.distributed.messages.passes import Abort, Commit, PassOutcome
from aiograd.distributed.observing import observe
from aiograd.distributed.rpc.identity import PeerId
from aiograd.distributed.rpc.timers import call_at, wait_for
from aiograd.distributed.worker_core import WorkerCore
from aiograd.errors import CommitUnknown, DeadlineError, PassAbortedError, TransactionError, WorkerLostError
from aiograd.running.modes import ModeScope
from aiograd.transaction import (
    CommitDecided,
    Coordinator,
    Failed,
    Outcome,
    OutcomeReply,
    OwnerClosed,
    Participant,
    ParticipantsJoined,
    PeerLost,
    Tick,
    TransactionEvent,
    TransactionState,
)
from aiograd.transaction.tree import are_many


class PassTransaction(PassRecord, TransactionClient):
    """One worker's transaction of one pass; a subclass carries the pass out.

    Args:
        core, context, pass_id, options: as for `PassRecord`.
    """

    def __init__(self, core: WorkerCore, context: Context, pass_id: PassId, **options: Any) -> None:
        super().__init__(core, context, pass_id, **options)
        #: on the initiator: the task that tells the other workers of a commit
        self.pending_decision: asyncio.Task[None] | None = None
        #: tasks that tell other workers of a failure; see Note [Telling of a failure]
        self.tellings: list[asyncio.Task[None]] = []
        #: on a participant: the workers that these have not told yet
        self._untold = Untold()
        #: the reason for the abort, in a word
        self.reason = ""
        self._has_run = False
        #: the error with which the event that is being handled ends the pass here
        self._cause: BaseException | None = None
        #: time at which this worker aborts, asks for the outcome, or ends its hooks: a little before the deadline of its first request
        self._deadline_here = math.inf
        #: ends hooks and callbacks after the commit
        self._timer: asyncio.TimerHandle | None = None
        limits = core.limits
        self.drive: CoordinatorDrive | ParticipantDrive
        #: the transaction of the pass on this worker
        self.transaction: Coordinator | Participant
        if self.is_initiator:
            self.transaction = coordinator = Coordinator(core.name, pause=limits.heartbeat)
            self.drive = CoordinatorDrive(coordinator, self)
        else:
            self.transaction = participant = Participant(
                self.initiator, lease=limits.lease_seconds, pause=limits.heartbeat, is_read_only=self.is_selective, votes=not self.is_selective
            )
            self.drive = ParticipantDrive(participant, self)

    @property
    def state(self) -> TransactionState:
        """The state of the transaction on this worker."""
        return self.transaction.state

    @property
    def is_decided(self) -> bool:
        """True if the decision is to commit."""
        return self.transaction.is_decided

    @property
    def name(self) -> str:
        """A name for reports, equal on all workers that take part."""
        return pass_name(*self.address())

    # ---------------------------------------------------------------- events

    def handle(self, event: TransactionEvent, error: BaseException | None = None) -> None:
        """Give the transaction an event, and carry out its commands.

        Args:
            event: the event.
            error: the error of the pass here if the event makes it fail.

        Raises:
            TransactionError: the event is not allowed in the present state. The error of a commit that failed.
        """
        self._cause = error
        try:
            self.drive.handle(event)
        finally:
            self._cause = None

    def expire_at(self, when: float) -> None:
        """Set the time of the loop at which to abort or, once prepared, to ask for the outcome."""
        self._deadline_here = when
        if isinstance(self.drive, ParticipantDrive):
            self.drive.machine.due = when
            self.drive.arm()

    def ask_around(self) -> None:
        """Ask other workers for the initiator's decision, because the worker that would have told it is lost."""
        if self.transaction.is_prepared:
            self.handle(PeerLost())

    def commit(self) -> bool:
        """Commit on the initiator's decision. Returns True if this worker was prepared."""
        if not self.is_initiator:
            with contextlib.suppress(TransactionError):
                self.handle(CommitDecided())
        return self.is_decided

    def fail(self, error: BaseException, event: TransactionEvent | None = None) -> bool:
        """Abort the pass here, unless it is prepared or decided. Returns True if this call made it fail.

        Args:
            error: the error of the pass.
            event: the event that caused it; by default a failure.
        """
        if self.is_decided or self.has_ended or self.error is not None:
            return False
        if self.is_initiator:
            self.introduce()
        self.handle(event or Failed(), error)
        return self.error is not None

    def introduce(self) -> None:
        """On the initiator of an aborted pass: tell all workers that are known to have heard of the pass."""
        self.handle(ParticipantsJoined({*self.others, *self.downstream, *self.behind} - {self.core.name}, votes=False))

    def _failed(self, error: BaseException) -> None:
        self.error = error
        node = getattr(error, "_aiograd_node", None)
        if node is not None and not self.is_initiator:
            error._aiograd_function = node  # type: ignore[attr-defined]  # what the other workers are told: see `error_wire`
        if self.task is None or not (self.smart or self.is_decided):
            self.tell_abort(self.downstream | self.behind)

    def tell_abort(self, names: set[str]) -> None:
        """Tell other workers that this participant has failed; each once, and not the initiator, which learns it from the answer."""
        told = sorted(names - {self.initiator, self.core.name})
        if told and not self.tellings and not self.is_initiator:
            self.reason = type(self.error).__name__
            self.tellings.append(self._spawn_telling(self._tell_failure(told), self._untold, told))

    async def _tell_failure(self, names: list[str]) -> None:
        if are_many(names):
            found = await self.spread([name for name in names if self.silence_left(name) > 0], Outcome.ABORTED)
            self._untold.discard(found)
        await asyncio.gather(*map(self._tell_one_of_failure, sorted(self._untold.names)), return_exceptions=True)

    async def _tell_one_of_failure(self, name: str) -> None:
        try:
            await self.tell(name, Outcome.ABORTED)
        finally:
            self._untold.discard((name,))

    async def wait_told(self, *, at_least: float = 0.0, seconds: float = math.inf) -> None:
        """Wait until the workers that this one tells of the outcome have been told, for as long as they may be heard.

        See Note [Silence is counted once] in `coordination.silence`.

        Args:
            at_least, seconds: seconds to wait for workers that are lost, and seconds to wait at most.
        """
        untold = self.drive.untold if isinstance(self.drive, CoordinatorDrive) else self._untold
        wait = functools.partial(wait_for, self.core.endpoint.context)
        await untold.wait(self.silence_left, at_least=at_least, seconds=seconds, wait=wait)

    # ---------------------------------------------------------------- as the client: work

    def apply(self) -> AfterCommit:
        """Commit the gradients; hooks and callbacks follow when the engine's task runs on."""
        task = self.task
        if task is None:
            return None
        try:
            if task.error is not None:
                raise PassAbortedError(f"the pass has ended on {self.core.name} before it was committed") from task.error
            if not (task.create_graph or task.staged.retained):
                task.commit()  # without operations on Tensors
            else:
                with ModeScope(grad=task.create_graph, collect=task.collect if task.create_graph else None):
                    task.commit()
        except BaseException as error:
            self._cause, self.reason = error, "its initiator could not commit"
            raise
        return None

    def apply_failed(self, error: BaseException) -> None:
        """Keep the gradients where memory was short: this worker is told again, or asks. Any other error loses them: the pass is in doubt here."""
        if not self.is_initiator and not isinstance(error, MemoryError):
            self.handle(OwnerClosed(), error)
        raise error

    def applied(self) -> None:
        """The gradients are committed: hooks and callbacks have time until the deadline."""
        if self.task is None:  # no node here leads to a wanted gradient
            self._end()
        elif self._deadline_here != math.inf:
            self._timer = self.call_at(self._deadline_here, self._end_hooks)

    def _end_hooks(self) -> None:
        self.stop(self._late())

    def drop(self, event: TransactionEvent) -> None:
        """End the pass here with an error."""
        if self.error is None:
            self._failed(self._why(event))
        if self.task is None:
            self._end()
        elif not self._has_run and self.error is not None:
            self.task.fail_externally(self.error)

    def _why(self, event: TransactionEvent) -> BaseException:
        """The error of a pass that an event has ended here."""
        if self.state is TransactionState.IN_DOUBT and not isinstance(event, OwnerClosed):
            return CommitUnknown(f"no peer could tell whether the pass was committed before the lease of context {self.context.id} ended")
        if self._cause is not None:
            return self._cause
        if isinstance(event, Tick):
            return self._late()
        if isinstance(event, OutcomeReply):
            return PassAbortedError(f"the pass was aborted: {event.peer} says so")
        return PassAbortedError("the pass was aborted")

    def _late(self) -> DeadlineError:
        return DeadlineError(f"backward in context {self.context.id} did not end in time on {self.core.name}: {self.describe()}")

    def mark_in_doubt(self) -> None:
        """No step may be taken with the gradients of the context."""
        self.context.in_doubt.add(self.pass_id)

    def clear_doubt(self) -> None:
        """The pass was aborted everywhere."""
        self.context.in_doubt.discard(self.pass_id)

    # ---------------------------------------------------------------- as the client: messages

    def ask(self, peer: str) -> Coroutine[Any, Any, str]:
        """Ask a worker for the outcome."""
        core, principal = self.core, self.context.principal
        return core.unless_silent(core.ask(peer, PassOutcome(*self.address()), core.limits.silence, principal), peer, "OUTCOME", principal)

    def witnesses(self) -> Sequence[str]:
        """The workers that may know the outcome, besides the initiator."""
        return sorted({*self.others, *self.context.known_workers} - {self.initiator, self.core.name})

    def spawn(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """See `WorkerCore.spawn`."""
        return self.core.spawn(coroutine, name)

    def call_at(self, when: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        """See `rpc.timers.call_at`."""
        return call_at(self.core.endpoint.context, self._loop, when, callback)

    def decided(self, peers: tuple[str, ...], outcome: Outcome) -> None:
        """Tell the other workers, apart from the pass."""
        if not isinstance(self.drive, CoordinatorDrive):
            return
        if outcome is Outcome.COMMITTED:
            self.context.history.held.add(self.pass_id)
            self.pending_decision = self._spawn_telling(self._tell_commit(self.drive), self.drive.untold, peers)
        else:
            self.reason = self.reason or type(self.error).__name__
            self.tellings.append(self._spawn_telling(self._tell_abort(self.drive, peers), self.drive.untold, peers))

    def _spawn_telling(self, telling: Coroutine[Any, Any, None], untold: Untold, peers: Sequence[str]) -> asyncio.Task[None]:
        """Tell other workers something, apart from the pass."""
        untold.names.update(peers)
        task = self.core.spawn(telling, "commit" if self.is_decided else "abort")
        task.add_done_callback(lambda _: untold.discard(peers))
        return task

    async def _tell_commit(self, drive: CoordinatorDrive) -> None:
        failpoints.reach("commit.half")
        try:
            await drive.tell()
        finally:
            self.context.history.held.discard(self.pass_id)

    @staticmethod
    async def _tell_abort(drive: CoordinatorDrive, peers: tuple[str, ...]) -> None:
        await drive.tell(peers)

    def silence_left(self, peer: str) -> float:
        """See `WorkerCore.silence_left`; a worker that another one has lost, and this one has never heard, counts as lost here as well."""
        core, principal, error = self.core, self.context.principal, self.error
        if isinstance(error, WorkerLostError) and error.worker == peer and not core.endpoint.is_connected(PeerId(principal, peer)):
            return 0.0
        return core.silence_left(peer, principal)

    async def tell(self, peer: str, outcome: Outcome) -> None:
        """Tell a worker that the pass is committed, and wait for its hooks; or that it is aborted, and wait a moment until it has released it."""
        core, principal = self.core, self.context.principal
        if outcome is not Outcome.COMMITTED:
            await core.ask(peer, Abort(*self.address(), self.reason), core.limits.silence, principal)
            return
        with observe(core.meter, "commit", "commit", peer, None if self.task is None else self.task.profiler):
            await core.ask(peer, Commit(*self.address()), self._patience(), principal)

    async def spread(self, peers: Sequence[str], outcome: Outcome) -> Mapping[str, BaseException | None]:
        """The same, for many workers."""
        core, principal = self.core, self.context.principal
        if outcome is not Outcome.COMMITTED:
            messages = dict.fromkeys(peers, Abort(*self.address(), self.reason))
            found = await core.multicast.spread(messages, 2 * core.limits.silence, principal)
        else:
            with observe(core.meter, "commit", "commit", f"{len(peers)} workers", None if self.task is None else self.task.profiler):
                found = await core.multicast.spread(dict.fromkeys(peers, Commit(*self.address())), self._patience(), principal)
        return {peer: answer if isinstance(answer, BaseException) else None for peer, answer in found.items()}

    def _patience(self) -> float:
        """Seconds that telling of a commit may take."""
        until = self.transaction.tell_until if isinstance(self.transaction, Coordinator) else 0.0
        return max(until - self._loop.time(), 0.001)

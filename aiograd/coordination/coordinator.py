"""StepCoordinator: the hosts on workers that take steps together, as the process that decides sees them.

Note [Commit across workers]
    Every host prepares a step, and says for how long it keeps what it has prepared; those that have promised too little are asked once more
    whether they are still there. While all promises hold this process commits its own part, which is the moment of decision, and tells the others.
    A worker that is lost before that moment makes the step fail and nothing has changed anywhere. One that is lost after it leaves it unknown
    whether it has committed. See Note [Until it is acknowledged] in `pending_decisions`, and `aiograd.transaction`, which decides all that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, Generic, TypeVar

from aiograd.coordination.host import StepHost
from aiograd.coordination.outline import difference
from aiograd.coordination.pending_decisions import PendingDecisions, Told
from aiograd.coordination.session import PreparedStep, StepSession
from aiograd.engine.run import current_engine
from aiograd.engine.run.ending import end
from aiograd.engine.run.failures import mark_committed
from aiograd.engine.run.together import together
from aiograd.errors import AiogradError, ArgumentError, ReferenceLostError, WorkerLostError
from aiograd.transaction import Ask, Collect, Coordinator, Failed, ParticipantsJoined, Prepared, TransactionState

S = TypeVar("S", bound=StepSession)
H = TypeVar("H", bound=Told)

#: how it shows that a worker, or what it had in its memory, is gone
GONE = (WorkerLostError, ReferenceLostError)


class StepCoordinator(Generic[S, H]):
    """The hosts that take steps together.

    Args:
        local: this process's host.
        timeout: seconds for a step on a worker; None: the worker's default.
        settling: the advice to whoever has to wait until a commit is confirmed.
    """

    #: hosts are equal to others, so that one which is lost can be done without
    is_replicated = True

    def __init__(self, local: StepHost[S], timeout: float | None, settling: str) -> None:
        self.local = local
        #: the hosts on workers
        self.remotes: list[H] = []
        self.pending = PendingDecisions(timeout, settling)
        self.local.unconfirmed = self.pending.unconfirmed
        self._timeout = timeout
        self._local_ref: Any = None
        #: how often groups of hosts were formed
        self._gatherings = 0
        #: for how many seconds hosts keep what they have prepared, and how long it took to ask them
        self._promised = self._took = 0.0

    @property
    def _replaces(self) -> bool:
        """True if a worker that is lost before the decision is replaced."""
        return False

    def open(self, step: int) -> S:
        """Begin a step."""
        session = self.local._begin(step)
        session.handle(ParticipantsJoined([remote.name for remote in self.remotes if remote.ref is not None]))
        return session

    async def aclose(self) -> None:
        """Let every worker forget its host. Those that cannot be reached are left alone."""
        if not self.pending.are_acknowledged:
            await self._quietly([(None, self.settle())])
        refs = [remote.ref for remote in self.remotes if remote.ref is not None]
        if self._local_ref is not None:
            refs.append(self._local_ref)
        for remote in self.remotes:
            remote.ref = None
        self._local_ref = None
        await self._forget(refs)

    async def _forget(self, refs: Iterable[Any]) -> None:
        """Let workers forget objects, as far as they can be reached."""
        await self._quietly((ref, ref.delete()) for ref in refs)

    async def _quietly(self, requests: Iterable[tuple[Any, Coroutine[Any, Any, Any]]]) -> None:
        """Make requests that may fail with nobody to mind. They take a moment at most, and no longer for the sake of workers that may be lost.

        Args:
            requests: each with the reference that it is about; None: this process.
        """
        loop = asyncio.get_running_loop()
        tasks = {loop.create_task(request, name="aiograd:steps:farewell"): ref is None or ref.is_connected for ref, request in requests}
        if tasks:
            grace = current_engine().cancel_grace
            try:
                await asyncio.wait([task for task, is_connected in tasks.items() if is_connected] or tasks, timeout=grace)
            finally:
                await end(tasks, grace)  # drops their errors

    # ---------------------------------------------------------------- equal hosts

    async def ask(self, remote: H, method: str, *args: Any) -> Any:
        """Ask a host for something.

        Raises:
            WorkerLostError: its worker is lost; where there are others like it, also if it was restarted.
        """
        try:
            return await remote.ref.call(method, *args, timeout=self._timeout)
        except ReferenceLostError as error:
            if not self.is_replicated:
                raise
            raise restarted(remote, error) from error

    async def check_alike(self, remotes: Sequence[H], what: str) -> None:
        """Raise unless the parameters and buffers of all hosts are like those of the first.

        Raises:
            ArgumentError: they are not; says how.
        """
        first, *others = await together([self.ask(each, "outline") for each in remotes])
        for remote, found in zip(remotes[1:], others, strict=True):
            where = difference(first, found)
            if where is not None:
                raise ArgumentError(
                    f"{what} differ: of the parameters and buffers on {remote.owner}, {where} as on {remotes[0].owner}. Every worker has to make the "
                    "same model from the same arguments"
                )

    def gathering(self, remotes: Sequence[H], worker: Any) -> tuple[list[str], str]:
        """The names of the workers for a group of hosts, and one for the group, which no attempt to form one has had before.

        Args:
            remotes: in the order of their ranks.
            worker: of this process.
        """
        self.refer(worker)
        self._gatherings += 1
        return [each.owner for each in remotes], f"steps-{self._local_ref.key.hex()}-{self._gatherings}"

    def refer(self, worker: Any) -> Any:
        """A reference to this process's host, for the others."""
        if self._local_ref is None:
            self._local_ref = worker.refer(self.local)
        return self._local_ref

    def explained(self, error: BaseException) -> BaseException:
        """An error with the advice for one of several equal hosts that is lost."""
        if not isinstance(error, WorkerLostError) or not self.is_replicated or all(remote.owner != error.worker for remote in self.remotes):
            return error
        name = error.worker
        return WorkerLostError(
            f"{self.local.subject} lost a worker, and nothing has changed on any: {error}. {self.local.going_on.format(worker=name)}",
            worker=name,
            stage=error.stage,
            is_gone=error.is_gone,
        )

    # ---------------------------------------------------------------- before the decision

    def _to_ask(self, session: S) -> list[H]:
        """The hosts that are to be asked whether they are prepared, and still there; none: all are."""
        now = asyncio.get_running_loop().time()
        names = {name for command in session.transaction.handle(Collect(), now) if isinstance(command, Ask) for name in command.peers}
        if session.state is TransactionState.ABORTED:  # this process was frozen, or the network is: what they have said may not hold any more
            raise self._lapsed()
        return [remote for remote in self.remotes if remote.name in names]

    async def _collect(self, session: S, asked: Sequence[H]) -> list[H]:
        """Ask hosts whether they are prepared; returns those that are lost and may be replaced."""
        now = asyncio.get_running_loop().time
        began = now()
        kept = await together([self._is_prepared(remote, session.step) for remote in asked])
        self._promised, self._took = min(kept), now() - began
        for remote, seconds in zip(asked, kept, strict=True):
            if seconds:
                session.handle(Prepared(began + seconds, remote.name))
        return [remote for remote, seconds in zip(asked, kept, strict=True) if not seconds]

    def _lapsed(self) -> AiogradError:
        return self.local.failure(
            f"a step of {self.local.subject} was given up: workers keep it for {self._promised:g} s, and asking them whether it is prepared took "
            f"{self._took:g} s. Nothing has changed; give the workers a longer lease (Limits.lease)"
        )

    async def _is_prepared(self, remote: H, step: int) -> float:
        """For how many seconds a host keeps the step that it has prepared; 0: it is lost, and may be replaced."""
        try:
            seconds = await remote.ref.call("check", step, timeout=self._timeout)
            if isinstance(seconds, float) and seconds > 0:
                return seconds
        except GONE:
            if not self._replaces:
                raise
            return 0.0
        raise self.local.failure(f"worker {remote.owner} has dropped a step of {self.local.subject} that it had prepared")

    # ---------------------------------------------------------------- the decision

    async def commit(self, session: S) -> None:
        """Commit a prepared step on every host. Cancelling does not stop it once it has begun.

        Raises:
            CommitUnknown: a worker did not confirm. Exceptions of what follows a commit. Both with ``committed`` True.
        """
        execution = await self._decide(session)
        failure: Exception | None = None
        try:
            if self.remotes:
                try:
                    await self._to_its_end(self._tell(session.step))
                except Exception as error:  # what happened elsewhere is no reason not to call the hooks here
                    failure = error
            await self.local._after_commit(execution)
            if failure is not None:
                raise failure
        except BaseException as error:
            mark_committed(error)
            raise

    async def _decide(self, session: S) -> PreparedStep | None:
        """Commit the part of this process, which decides the step; returns what was committed."""
        try:
            execution = self.local._commit(session)
            if session.state is not TransactionState.COMMITTED:
                raise self._lapsed()
        except BaseException:
            await self.abort(session)
            raise
        self._decided(session)
        return execution

    async def _to_its_end(self, telling: Coroutine[Any, Any, Any]) -> Any:
        """Wait for something that goes on when this is cancelled, and is waited for all the same."""
        task = asyncio.get_running_loop().create_task(telling, name="aiograd:steps:commit")
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await _finish(task)
            raise

    async def _tell(self, step: int) -> None:
        for error in (await self.pending.tell(step, f"a step of {self.local.subject}")).values():
            raise error

    async def settle(self) -> None:
        """Tell hosts what became of earlier steps, as far as they have not confirmed it. Cancelled midway, the next time goes on.

        Raises:
            CommitUnknown: some still do not confirm a commit. WorkerLostError: cannot be told of a step that was given up.
        """
        if self.pending.are_acknowledged:
            return
        for error in (await self.pending.tell(None, f"an earlier step of {self.local.subject}")).values():
            if not self._replaces or not isinstance(error, GONE):  # else the worker is replaced when it does not run the next step
                raise error

    async def abort(self, session: S) -> None:
        """Drop a step on every host."""
        session.handle(Failed())
        self._decided(session)
        await self._quietly((host.ref, telling) for host, telling in self.pending.telling(session.step).items())

    def _decided(self, session: S) -> None:
        """See that hosts are told what was decided."""
        if isinstance(session.transaction, Coordinator):
            self.pending.add(session.step, session.transaction, [remote for remote in self.remotes if remote.ref is not None])


def restarted(remote: Told, error: ReferenceLostError) -> WorkerLostError:
    """The error of a host whose worker has no such object any more."""
    text = f"{remote.name} is gone, since the worker was restarted: {error}"
    return WorkerLostError(text, worker=remote.owner, stage="replica", is_gone=True)


async def _finish(task: asyncio.Task[Any]) -> None:
    """Wait for a task, whatever is cancelled meanwhile."""
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            continue
    if not task.cancelled():
        task.exception()

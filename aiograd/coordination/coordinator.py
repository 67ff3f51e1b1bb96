"""StepCoordinator: the members on workers that take steps together, as the coordinating process sees them.

Note [Commit across workers]
    Every member prepares a step, and says for how long it keeps the prepared work; a member that has promised too little is asked once more
    whether it is still there. While all promises hold this process commits its own work, which is the moment of decision, and tells the members.
    A worker that is lost before that moment makes the step fail, and nothing has changed anywhere. A worker that is lost after it leaves it
    unknown whether it has committed. See Note [Until it is acknowledged] in `decisions`, and `aiograd.transaction`, which decides all that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, Generic

from aiograd.coordination.client import AfterCommit, StepWording
from aiograd.coordination.decisions import R, StepDecision, StepDecisions, StepOutcomes
from aiograd.coordination.member import follow
from aiograd.coordination.message_form import parse
from aiograd.coordination.outline import ModuleOutline, difference
from aiograd.coordination.session import PAUSE, W
from aiograd.coordination.silence import unless_silent
from aiograd.engine.run import current_engine
from aiograd.engine.run.ending import end
from aiograd.engine.run.failures import mark_committed
from aiograd.engine.run.together import together
from aiograd.errors import AiogradError, ArgumentError, ReferenceLostError, WorkerLostError
from aiograd.transaction import Ask, Collect, Failed, Prepared, TransactionState

#: errors which show that a worker, or the content of its memory, is gone
GONE = (WorkerLostError, ReferenceLostError)


class StepCoordinator(Generic[W, R]):
    """The members that take steps together.

    Args:
        wording: the words of errors.
        timeout: seconds for a step on a worker; None: the worker's default.
    """

    #: members are equal to others, so that the steps can go on without a lost one
    is_replicated = True

    def __init__(self, wording: StepWording, timeout: float | None) -> None:
        self.wording = wording
        self.decisions: StepDecisions[W, R] = StepDecisions(wording, timeout)
        #: the object that members ask for outcomes
        self.outcomes: StepOutcomes[W, R] = StepOutcomes(self.decisions)
        #: the members on workers
        self.remotes: list[R] = []
        self._timeout = timeout
        self._outcomes_ref: Any = None
        #: the number of groups of members formed so far
        self._gatherings = 0
        #: seconds for which members keep prepared work, and seconds that asking them took
        self._promised = self._took = 0.0

    @property
    def _replaces(self) -> bool:
        """True if a worker that is lost before the decision is replaced."""
        return False

    async def aclose(self) -> None:
        """Let every worker forget its member. Workers that cannot be reached are left alone."""
        if not self.decisions.are_acknowledged:
            await self._try([(None, self.settle())])
        refs = [remote.ref for remote in self.remotes if remote.ref is not None]
        if self._outcomes_ref is not None:
            refs.append(self._outcomes_ref)
        for remote in self.remotes:
            remote.ref = None
        self._outcomes_ref = None
        await self._forget(refs)

    async def _forget(self, refs: Iterable[Any]) -> None:
        """Let workers forget objects, as far as they can be reached."""
        await self._try((ref, ref.delete()) for ref in refs)

    async def _try(self, requests: Iterable[tuple[Any, Coroutine[Any, Any, Any]]]) -> None:
        """Make requests and drop their errors. They take a moment at most, and requests to workers that may be lost are not waited for.

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

    # ---------------------------------------------------------------- equal members

    async def ask(self, remote: R, method: str, *args: Any) -> Any:
        """Call a method of a member.

        Raises:
            WorkerLostError: its worker is lost; where there are others like it, also if it was restarted.
        """
        try:
            return await remote.ref.call(method, *args, timeout=self._timeout)
        except ReferenceLostError as error:
            if not self.is_replicated:
                raise
            raise restarted(remote, error) from error

    async def check_alike(self, remotes: Sequence[R], what: str) -> None:
        """Raise unless the parameters and buffers of all members equal the first member's.

        Raises:
            ArgumentError: they are not; says how.
        """
        answers = await together([self.ask(each, "outline") for each in remotes])
        first, *others = (parse(ModuleOutline, answer, remote.owner).tensors for remote, answer in zip(remotes, answers, strict=True))
        for remote, found in zip(remotes[1:], others, strict=True):
            where = difference(first, found)
            if where is not None:
                raise ArgumentError(
                    f"{what} differ: of the parameters and buffers on {remote.owner}, {where} as on {remotes[0].owner}. Every worker has to make the "
                    "same model from the same arguments"
                )

    def gathering(self, remotes: Sequence[R], worker: Any) -> tuple[list[str], str]:
        """The names of the workers for a group of members, and a name for the group, which no attempt to form one has had before.

        Args:
            remotes: in the order of their ranks.
            worker: of this process.
        """
        self.refer(worker)
        self._gatherings += 1
        return [each.owner for each in remotes], f"steps-{self._outcomes_ref.key.hex()}-{self._gatherings}"

    def refer(self, worker: Any) -> Any:
        """A reference to the outcomes of steps, for the members."""
        if self._outcomes_ref is None:
            self._outcomes_ref = worker.refer(self.outcomes)
        return self._outcomes_ref

    def explained(self, error: BaseException) -> BaseException:
        """An error with the advice for one of several equal members that is lost."""
        if not isinstance(error, WorkerLostError) or not self.is_replicated or all(remote.owner != error.worker for remote in self.remotes):
            return error
        name = error.worker
        explained = WorkerLostError(
            f"{self.wording.subject} lost a worker, and nothing has changed on any: {error}. {self.wording.without.format(worker=name)}",
            worker=name,
            stage=error.stage,
            is_gone=error.is_gone,
        )
        explained.__cause__ = error
        return explained

    # ---------------------------------------------------------------- before the decision

    def _to_ask(self, decision: StepDecision[W, R]) -> list[R]:
        """The members that are to be asked whether they are prepared, and still there; none: all are."""
        now = asyncio.get_running_loop().time()
        names = {name for command in decision.drive.machine.handle(Collect(), now) if isinstance(command, Ask) for name in command.peers}
        if decision.state is TransactionState.ABORTED:  # this process was frozen, or the network is: their promises may not hold any more
            raise self._lapsed()
        return [remote for remote in self.remotes if remote.name in names]

    async def _collect(self, decision: StepDecision[W, R], asked: Sequence[R]) -> list[R]:
        """Ask members whether they are prepared; returns the lost members that may be replaced."""
        now = asyncio.get_running_loop().time
        began = now()
        kept = await together([self._is_prepared(remote, decision.step) for remote in asked])
        self._promised, self._took = min(kept), now() - began
        for remote, seconds in zip(asked, kept, strict=True):
            if seconds:
                decision.drive.handle(Prepared(began + seconds, remote.name))
        return [remote for remote, seconds in zip(asked, kept, strict=True) if not seconds]

    def _lapsed(self) -> AiogradError:
        return self.wording.failure(
            f"a step of {self.wording.subject} was given up: workers keep it for {self._promised:g} s, and asking them whether it is prepared took "
            f"{self._took:g} s. Nothing has changed; give the workers a longer lease (Limits.lease)"
        )

    async def _is_prepared(self, remote: R, step: int) -> float:
        """The seconds for which a member keeps the step that it has prepared; 0: it is lost, and may be replaced."""
        try:
            check = remote.ref.call("check", step, timeout=self._timeout)
            seconds = await unless_silent(check, remote.owner, lambda: remote.ref.silence_left, "check", PAUSE)
            if isinstance(seconds, float) and seconds > 0:
                return seconds
        except GONE:
            if not self._replaces:
                raise
            return 0.0
        raise self.wording.failure(f"worker {remote.owner} has dropped a step of {self.wording.subject} that it had prepared")

    # ---------------------------------------------------------------- the decision

    async def commit(self, decision: StepDecision[W, R]) -> None:
        """Commit a prepared step on every member. Cancelling does not stop it once it has begun.

        Raises:
            CommitUnknown: a worker did not confirm. Exceptions of what follows a commit. Both with ``committed`` True.
        """
        after_commit = await self._decide(decision)
        failure: Exception | None = None
        try:
            if self.remotes:
                try:
                    await self._to_its_end(self._tell(decision.step))
                except Exception as error:  # what happened elsewhere is no reason not to call the hooks here
                    failure = error
            await follow(after_commit)
            if failure is not None:
                raise failure
        except BaseException as error:
            mark_committed(error)
            raise

    async def _decide(self, decision: StepDecision[W, R]) -> AfterCommit:
        """Commit the work of this process, which decides the step."""
        try:
            after_commit = self.decisions._commit(decision)
            if decision.state is not TransactionState.COMMITTED:
                raise self._lapsed()
        except BaseException:
            await self.abort(decision)
            raise
        self.decisions.keep(decision)
        return after_commit

    async def _to_its_end(self, telling: Coroutine[Any, Any, Any]) -> Any:
        """Wait for a coroutine that runs on when this is cancelled, and is waited for all the same."""
        task = asyncio.get_running_loop().create_task(telling, name="aiograd:steps:commit")
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await _finish(task)
            raise

    async def _tell(self, step: int) -> None:
        for error in (await self.decisions.tell(step, f"a step of {self.wording.subject}")).values():
            raise error

    async def settle(self) -> None:
        """Tell members the outcome of earlier steps, as far as they have not confirmed it. Cancelled midway, the next time goes on.

        Raises:
            CommitUnknown: some still do not confirm a commit. WorkerLostError: cannot be told of a step that was given up.
        """
        if self.decisions.are_acknowledged:
            return
        for error in (await self.decisions.tell(None, f"an earlier step of {self.wording.subject}")).values():
            if not self._replaces or not isinstance(error, GONE):  # else the worker is replaced when it does not run the next step
                raise error

    async def abort(self, decision: StepDecision[W, R]) -> None:
        """Drop a step on every member."""
        decision.drive.handle(Failed())
        self.decisions.keep(decision)
        await self._try((remote.ref, decision.attempt([remote])) for remote in decision.unacknowledged if remote.ref is not None)


def restarted(remote: Any, error: ReferenceLostError) -> WorkerLostError:
    """The error of a member that its worker, restarted, does not know."""
    text = f"{remote.name} is gone, since the worker was restarted: {error}"
    return WorkerLostError(text, worker=remote.owner, stage="replica", is_gone=True)


async def _finish(task: asyncio.Task[Any]) -> None:
    """Wait for a task, also if this is cancelled meanwhile."""
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            continue
    if not task.cancelled():
        task.exception()

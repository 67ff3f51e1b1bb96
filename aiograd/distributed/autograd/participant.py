"""PassParticipant: one worker's part of one distributed backward pass.

Note [Life of a participant]
    While the transaction of the pass is *active* here, discovery from the roots first finds the send nodes of this worker that the roots depend on
    (`discovery`), then a GraphTask over this worker's piece of the graph runs; gradients arrive at the marked send nodes and leave at recv nodes
    (`exchange`). It is *prepared* when everything here is staged, and so is everything behind: the gradients that this worker has sent are answered
    once their receivers are prepared. Then the initiator decides. `pass_transaction` turns messages, timers and steps of the engine into events of
    the transaction, and carries out its commands. See `aiograd.transaction.states`.

    The gradients are committed at once on the decision. Hooks and callbacks follow when the engine runs on; the pass has ended here when the engine
    has.

Note [Nothing to commit]
    A worker without anything to apply at the commit, because no leaf of its own was reached, nothing is retained and no callback waits, says so in
    the answer to the first gradients, and leaves: for it the pass ends with that answer, which carries all gradients that the pass wanted of it. It
    promises nothing and need not know the decision, so a pass in which all other workers have left sends no message about its end. Where others have
    something to commit, workers that have left are told as well, to answer questions about it, and nothing is in doubt if that fails. A worker that
    has sent gradients on does not leave, because an abort has to reach the workers behind it. (The read-only optimization of two-phase commit:
    Mohan and Lindsay, 1983.)

Note [Passes over wanted inputs]
    A selective pass computes the gradients of some inputs of its initiator. It runs as any pass, except that no gradients accumulate on other
    workers, so these have nothing to commit: if one cannot be told the decision, nothing is in doubt. On the initiator the inputs'
    gradients are the result of the pass, or accumulate into the inputs themselves at the commit.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from aiograd.coordination.drive import ParticipantDrive
from aiograd.distributed import failpoints
from aiograd.distributed.autograd.context import Context, PassId
from aiograd.distributed.autograd.discovery import EdgeDiscovery
from aiograd.distributed.autograd.exchange import GradientExchange
from aiograd.distributed.autograd.nodes import RecvNode, SendNode
from aiograd.distributed.autograd.pass_transaction import PassTransaction
from aiograd.distributed.wait_chains import line_of
from aiograd.distributed.wait_tables import Awaited, OpenWork, WaitEdge, WaitEntry
from aiograd.distributed.worker_core import WorkerCore
from aiograd.engine.graph_task import GraphTask
from aiograd.engine.pass_hooks import PassHooks
from aiograd.engine.run import current_engine, new_graph_task
from aiograd.errors import PassAbortedError, ProtocolError
from aiograd.graph.accumulate_grad import AccumulateGrad, GradTarget
from aiograd.graph.node import Node
from aiograd.running.types import Array
from aiograd.transaction import Coordinator, OwnerClosed, Participant, ParticipantsJoined, Prepared, TransactionState


class PassParticipant(PassTransaction):
    """One worker's part of one pass.

    Args:
        core, context, pass_id, options: as for `PassRecord`.
        on_end: called when the pass is over here.
    """

    def __init__(self, core: WorkerCore, context: Context, pass_id: PassId, *, on_end: Callable[[PassParticipant], None], **options: Any) -> None:
        super().__init__(core, context, pass_id, **options)
        self.on_end = on_end
        self.task: GraphTask | None = None
        self.runner: asyncio.Task[None] | None = None
        #: True if this worker has ended without waiting for the decision; see Note [Nothing to commit]
        self.has_left = False
        self._waiters: list[asyncio.Future[None]] = []
        self.discovery = EdgeDiscovery(self)
        self.gradients = GradientExchange(self)
        context.participants[pass_id] = self

    def send(self, node: RecvNode, grads: Sequence[Array | None]) -> None:
        """Send gradients to the worker that the node's values came from."""
        failpoints.reach("bwd.in_compute")
        self.gradients.send(node, grads)

    def grad_target(self, leaf: AccumulateGrad) -> GradTarget:
        """The target of a leaf's gradient: the context; for the wanted inputs of a selective pass, the leaf itself."""
        if self.is_selective:
            return leaf
        failpoints.reach("bwd.in_compute")
        return self.context.slot(leaf)

    def describe(self) -> str:
        """A description of the events that the pass waits for here."""
        if self.is_decided:
            return "its gradients are committed, and hooks or callbacks were still running"
        waits: list[str] = []
        if self.task is not None:
            waits += [f"the rule or a hook of {node.name}" for node in (self.task.busy())]
            waits += [f"gradients of message {node.edge} that was sent to {node.peer}" for node in self.task.waiting if isinstance(node, SendNode)]
        waits += [f"{node.peer} to take the gradients of message {node.edge}" for node in self.gradients.outgoing.values()]
        if not waits:
            return "it was still computing" if self.task is not None else "it was still finding the participants"
        more = f" and {len(waits) - 4} more" if len(waits) > 4 else ""
        advice = "" if self.smart else ". In fast mode every remote result has to be used; mode='smart' needs only those the roots depend on"
        return f"it waited for {', '.join(waits[:4])}{more}{advice}"

    def waits(self) -> Iterator[WaitEntry]:
        """The pass here, and its waiting tasks, for a report of what waits."""
        here, principal = self.core.name, self.context.principal
        edges = []
        if self.task is not None and not self.is_decided:
            for node in self.task.waiting:
                if isinstance(node, SendNode):
                    message = f"gradients of message {node.edge & 0xFFFFFFFF}"
                    edges.append(WaitEdge(node.peer, f"{self.name}: {message}", node.name, line_of(node), message))
        if self.transaction.is_prepared and not self.is_initiator:
            edges.append(WaitEdge(self.initiator, self.name, "commit", message="decision"))
        runner = () if self.runner is None else (self.runner,)
        yield OpenWork(self.name, principal, runner, self.began_at, edges, "backward")
        for waiter in self._waiters:
            yield Awaited(waiter, WaitEdge(here, self.name), principal, needs_row=False)

    # ---------------------------------------------------------------- running

    def start(
        self,
        roots: Sequence[tuple[Node, int]] = (),
        seeds: Sequence[Array] = (),
        context: contextvars.Context | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> GraphTask:
        """Run this worker's piece of the graph, in a task of its own.

        Args:
            options: options of the GraphTask: the wanted inputs of a selective pass.

        Returns:
            The GraphTask that runs.
        """
        more: dict[str, Any] = {}
        hooks = ParticipantHooks(self)
        if self.is_selective:
            more = {"inputs": (), **(options or {})}
            if self.smart:
                self.sends, hooks.outlets = self.discovery.sends, self.discovery.leading
        hooks.sources = sorted(self.sends, key=self.context.place_of)  # not in the order of their discovery
        self.discovery.forget()
        if isinstance(self.transaction, Participant):
            self.transaction.votes = True
        self.task = new_graph_task(
            roots,
            seeds,
            keep_graph=self.retain_graph or self.create_graph,
            create_graph=self.create_graph,
            hooks=hooks,
            **more,
        )
        self.runner = self._loop.create_task(self._run(self.task), name=f"aiograd:pass-{self.initiator}-{self.pass_id[1]}", context=context)
        return self.task

    async def _run(self, task: GraphTask) -> None:
        try:
            await current_engine().run(task)
        except BaseException as error:
            if self.error is None and not self.fail(error):
                self._failed(error)
        finally:
            self._has_run = True
            await self.gradients.stop()
            if self.transaction.is_prepared:  # the engine was stopped, or could not commit
                self.handle(OwnerClosed(), self.error or PassAbortedError("the pass was aborted"))
            self._end()

    async def before_commit(self) -> None:
        """Awaited by the engine when everything here is staged; returns when the decision is to commit."""
        failpoints.reach("bwd.after_accumulate")
        failpoints.reach("commit.before_prepare")
        outgoing = self.gradients.outgoing
        if outgoing:
            self.gradients.release_held()
        while outgoing and self.error is None:
            await self._change()
        if self.error is not None:
            raise self.error
        if self.is_initiator:
            self._decide()
            return
        if isinstance(self.transaction, Participant) and self._has_nothing():
            self.transaction.votes, self.has_left = False, True
            return
        self.handle(Prepared(self._deadline_here))
        failpoints.reach("commit.after_prepare")
        self.changed()
        while self.transaction.is_prepared:
            await self._change()
        if not self.is_decided:
            raise self.error or PassAbortedError("the pass was aborted")

    def _has_nothing(self) -> bool:
        """True if this worker can leave; see Note [Nothing to commit]."""
        task = self.task
        if task is None or self.create_graph or self.downstream:
            return False
        return not (task.staged.gradients or task.staged.retained or task.callbacks or task.guards)

    def _decide(self) -> None:
        """Decide to commit: all workers are prepared. The gradients here are committed at once, and the others are told."""
        here, gone = self.core.name, self.idle
        prepared = sorted(self.behind - gone - {here})
        others = [name for name in self.others if name not in gone]
        if prepared or others:
            self.handle(ParticipantsJoined(prepared))
            self.handle(ParticipantsJoined(others, votes=not self.is_selective))  # in a selective pass those are only told that nothing leads to
            self.handle(ParticipantsJoined(sorted(gone), votes=False))
        for name in prepared:
            self.handle(Prepared(peer=name))
        others = list(self.transaction.others)
        if isinstance(self.transaction, Coordinator):
            self.transaction.tell_until = self._loop.time() + max(self.left(), self.core.limits.silence)
        self.handle(Prepared(peer=here))
        if not self.is_decided:
            raise ProtocolError(f"{', '.join(set(others) - self.behind)} took part in a pass, and no answer says it is prepared", code="gradient")

    # ---------------------------------------------------------------- the end

    def stop(self, error: BaseException) -> None:
        """End the pass here, prepared or not; if the decision was to commit, end its hooks and callbacks instead."""
        if not self.is_decided:
            self.fail(error, None if self.is_initiator else OwnerClosed())
        elif not self.has_ended and self.error is None and self.runner is not None:
            with contextlib.suppress(AttributeError):
                error.committed = True  # type: ignore[attr-defined]
            self.error = error
            self.runner.cancel()

    def _end(self) -> None:
        if self.has_ended:
            return
        self.has_ended = True
        self.context.history.remember(self.pass_id, self.transaction.outcome)
        self.context.participants.pop(self.pass_id, None)
        if self._timer is not None:
            self._timer.cancel()
        if isinstance(self.drive, ParticipantDrive):
            self.drive.machine.due = None
            self.drive.disarm()
        self.discovery.forget()
        if self.state is not TransactionState.COMMITTED:
            self.gradients.take_back()
        self.on_end(self)
        self.changed()

    # ---------------------------------------------------------------- waiting

    def changed(self) -> None:
        """Wake all tasks that wait for a change."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def _change(self) -> None:
        waiter = self._loop.create_future()
        self._waiters.append(waiter)
        await waiter

    async def wait_prepared(self) -> None:
        """Wait until this participant and the workers behind it are prepared.

        Raises:
            The error of the pass here, if it fails.
        """
        while self.state is TransactionState.ACTIVE and not self.has_ended:
            await self._change()
        if self.error is not None and not self.is_decided:
            await self.wait_ended()
            if not self.smart:
                await self.wait_told()
            raise self.error

    async def wait_ended(self) -> None:
        """Wait until the pass has ended here, with success or not; hooks and callbacks have run then."""
        while not self.has_ended:
            await self._change()


class ParticipantHooks(PassHooks):
    """The hooks of a participant in its GraphTask."""

    is_local = False

    def __init__(self, participant: PassParticipant) -> None:
        self.participant = participant

    def grad_target(self, leaf: AccumulateGrad) -> GradTarget:
        """See `PassParticipant.grad_target`."""
        return self.participant.grad_target(leaf)

    def place_of(self, node: Node) -> tuple[float, ...]:
        """The place in the order in which all workers together have recorded the graph."""
        return self.participant.context.place_of(node)

    def on_wait(self) -> None:
        """Send the gradients that were held back."""
        self.participant.gradients.release_held()

    async def before_commit(self) -> None:
        """See `PassParticipant.before_commit`."""
        await self.participant.before_commit()

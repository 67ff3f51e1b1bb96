"""Part: what one worker does in one distributed backward pass.

Note [Life of a part]
    *marked*: the walk from the roots has found which send nodes of this worker the roots depend on (`walk`). *running*: a GraphTask over
    this worker's piece of the graph runs; gradients arrive at the marked send nodes and leave at recv nodes (`gradients`). *prepared*:
    everything here is staged, and so is everything behind: the gradients that this worker has sent are answered once their receivers are
    prepared. Then the initiator decides (`decision`): *committed* or *aborted*. Whatever fails before makes the part *aborted* at once, and
    everything it staged is dropped. Between *prepared* and the end there is a moment of *committing* or *aborting*, in which the engine
    has not heard of the decision yet; a part that is *committing* or *committed* is decided, and runs its hooks and callbacks.

Note [Passes over wanted inputs]
    A selective pass gives the gradients of some inputs of its initiator. Everything is as in any pass, except that leaves of other workers are not
    reached, so these have nothing to commit: where one cannot be told of the decision, nothing is in doubt. On the initiator the inputs'
    gradients are its result, or accumulate into the inputs themselves, at the commit.

Note [Who is told of a failure]
    The initiator tells everybody that it knows of. Who takes part is not known to it while the walk goes on, nor in fast mode. So a part that
    fails or is given up by then tells those that it has asked or sent something to, and an answer to the initiator waits for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Protocol

from aiograd.distributed import failpoints
from aiograd.distributed.context import Context, ContextSlot, PassId
from aiograd.distributed.driver.crossing import Crossing
from aiograd.distributed.driver.decision import ABORTED, COMMITTED, UNKNOWN, remember, resolve, tell, tell_abort
from aiograd.distributed.driver.gradients import Gradients
from aiograd.distributed.driver.timers import call_at
from aiograd.distributed.driver.walk import Walk
from aiograd.distributed.limits import Limits
from aiograd.distributed.nodes import RecvNode, SendNode
from aiograd.distributed.safeguards import Safeguards
from aiograd.engine.graph_task import GraphTask
from aiograd.engine.run import current_engine, new_graph_task
from aiograd.errors import DeadlineError, DistributedError, PassAbortedError
from aiograd.graph.accumulate_grad import AccumulateGrad
from aiograd.graph.node import Node
from aiograd.types import Array


class Office(Protocol):
    """What a part needs of its worker."""

    name: str
    limits: Limits
    safeguards: Safeguards
    gradient_encoding: Any
    endpoint: Any

    def request(self, peer: str, kind: int, value: Any, timeout: float, principal: str | None = None) -> Coroutine[Any, Any, Any]:
        """Ask another worker."""

    def keep(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run something that outlives its caller, at most as long as the worker."""

    def part_ended(self, part: Part) -> None:
        """The part is over."""


class Part:
    """One worker's part of one pass.

    Args:
        office: the worker.
        context, pass_id: which pass.
        retain_graph: keep the graph for another pass.
        smart: whether gradients come on marked send nodes only.
        deadline: time of the loop.
        create_graph: record the pass itself.
        place: of such a pass in the order of recording; see Note [Places] in `context`, without its infinities.
        is_selective: see Note [Passes over wanted inputs].
        crossing: which recv nodes of other contexts matter to such a pass, on its initiator.
    """

    def __init__(
        self,
        office: Office,
        context: Context,
        pass_id: PassId,
        *,
        retain_graph: bool,
        smart: bool,
        deadline: float,
        create_graph: bool = False,
        place: tuple[float, ...] = (),
        is_selective: bool = False,
        crossing: Crossing | None = None,
    ) -> None:
        self.office = office
        self.context = context
        self.pass_id = pass_id
        self.initiator = pass_id[0]
        self.retain_graph = retain_graph
        self.create_graph = create_graph
        self.place = place
        self.smart = smart
        self.is_selective = is_selective
        self.crossing = crossing
        self.deadline = deadline
        self.state = "marked"
        #: workers that take part, as far as they are known
        self.others: list[str] = []
        #: whose first gradients made this worker begin
        self.parent = ""
        #: workers behind this one that have answered, and those that were asked or sent anything
        self.behind: set[str] = set()
        self.downstream: set[str] = set()
        #: whose gradients come from elsewhere
        self.sends: dict[SendNode, None] = {}
        self.task: GraphTask | None = None
        self.error: BaseException | None = None
        self.runner: asyncio.Task[None] | None = None
        #: tells the other workers of a commit, on the initiator; and those that could not be told yet
        self.verdict: asyncio.Task[None] | None = None
        self.untold: dict[str, BaseException] = {}
        #: tells the other workers of a failure: see Note [Who is told of a failure]
        self.telling: asyncio.Task[None] | None = None
        self.has_ended = False
        self._loop = asyncio.get_running_loop()
        self._waiters: list[asyncio.Future[None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._asking: asyncio.Task[None] | None = None
        self.walk = Walk(self)
        self.gradients = Gradients(self)
        context.parts[pass_id] = self

    @property
    def is_initiator(self) -> bool:
        """Whether the pass was started here."""
        return self.initiator == self.office.name

    @property
    def is_undecided(self) -> bool:
        """Whether the part may still be given up without asking anybody."""
        return self.state in ("marked", "running")

    @property
    def is_decided(self) -> bool:
        """Whether it is to commit, or has."""
        return self.state in ("committing", COMMITTED)

    @property
    def outcome(self) -> str:
        """What those may be told who ask what became of the pass; other words than those of `decision` mean that it is too early to say."""
        if self.is_decided:
            # an initiator has decided by committing; if that fails it tells of an abort
            return COMMITTED if not self.is_initiator or (self.task is not None and self.task.committed) else self.state
        return ABORTED if self.error is not None and self.is_undecided else self.state

    @property
    def has_walked(self) -> bool:
        """True if the edges that take part were found out before gradients flow."""
        return self.smart and self.office.safeguards.mark_needed_edges

    def left(self) -> float:
        """Seconds to the deadline."""
        return max(self.deadline - self._loop.time(), 0.001)

    def address(self) -> tuple[bytes, str, int]:
        """What a message about the pass begins with."""
        return (self.context.key, *self.pass_id)

    def send(self, node: RecvNode, grads: Sequence[Array | None]) -> None:
        """Send gradients to the worker that the node's values came from."""
        failpoints.reach("bwd.in_compute")
        self.gradients.send(node, grads)

    def _slot(self, node: AccumulateGrad) -> ContextSlot:
        failpoints.reach("bwd.in_compute")
        return self.context.slot(node)

    # ---------------------------------------------------------------- time

    def expire_at(self, when: float) -> None:
        """Give up, or ask around, at a time of the loop."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = call_at(self.office.endpoint.context, self._loop, when, self._expired)

    def _expired(self) -> None:
        self._timer = None
        if self.state == "prepared":
            self.ask_around()
        else:
            self.stop(DeadlineError(f"backward in context {self.context.id} did not end in time on {self.office.name}: {self.describe()}"))

    def describe(self) -> str:
        """What the part waits for."""
        if self.is_decided:
            return "its gradients are committed, and hooks or callbacks were still running"
        waits: list[str] = []
        if self.task is not None:
            waits += [f"the rule or a hook of {node.name}" for node in (self.task.busy() if self.task.busy is not None else ())]
            waits += [f"gradients of message {node.edge} that was sent to {node.peer}" for node in self.task.waiting if isinstance(node, SendNode)]
        waits += [f"{node.peer} to take the gradients of message {node.edge}" for node in self.gradients.outgoing.values()]
        if not waits:
            return "it was still computing" if self.task is not None else "it was still finding out who takes part"
        more = f" and {len(waits) - 4} more" if len(waits) > 4 else ""
        advice = "" if self.smart else ". In fast mode every remote result has to be used; mode='smart' needs only those the roots depend on"
        return f"it waited for {', '.join(waits[:4])}{more}{advice}"

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
            options: of the GraphTask: what a selective pass wants here.

        Returns:
            The GraphTask that runs.
        """
        more: dict[str, Any] = {"slots": self._slot}
        if self.is_selective:
            more = {"slots": _itself, "inputs": (), **(options or {})}
            if self.has_walked:
                self.sends, more["outlets"] = self.walk.sends, self.walk.leading
        self.walk.forget()
        self.state = "running"
        self.task = new_graph_task(
            roots,
            seeds,
            keep_graph=self.retain_graph or self.create_graph,
            create_graph=self.create_graph,
            sources=sorted(self.sends, key=self.context.place_of),  # not in the order in which the walk came by
            gate=self._gate,
            order=self.context.place_of,
            **more,
        )
        self.task.part = self
        self.task.on_wait = self.gradients.release_held
        self.runner = self._loop.create_task(self._run(self.task), name=f"aiograd:pass-{self.initiator}-{self.pass_id[1]}", context=context)
        return self.task

    async def _run(self, task: GraphTask) -> None:
        try:
            await current_engine().run(task)
        except BaseException as error:
            if self.error is None:
                self._failed(error)
        finally:
            await self.gradients.stop()
            self._end(COMMITTED if task.committed else ABORTED)

    async def _gate(self) -> None:
        """Awaited by the engine when everything here is staged; returns when it is to be committed."""
        failpoints.reach("bwd.after_accumulate")
        failpoints.reach("commit.before_prepare")
        outgoing = self.gradients.outgoing
        if outgoing:
            self.gradients.release_held()
        while outgoing and self.error is None:
            await self._change()
        if self.error is not None and self.office.safeguards.fence_late_results:
            raise self.error
        if self.is_initiator:
            self._decide()
            return
        if not self.office.safeguards.atomic_commit:
            self.state = "committing"
            self.changed()
            return
        self.state = "prepared"
        failpoints.reach("commit.after_prepare")
        self.changed()
        try:
            while self.state == "prepared":
                await self._change()
        except asyncio.CancelledError:
            if self.state != "committing" or self.runner is None:
                raise
            self.runner.cancel()  # its hooks are cancelled; the commit that comes first is not
        if self.state != "committing":
            raise self.error or PassAbortedError("the pass was aborted")

    def _decide(self) -> None:
        """Everybody is prepared. The commit here follows in the same step of the loop, and the others are told."""
        self.state = "committing"
        others = sorted({*self.others, *self.behind} - {self.office.name})
        if others:
            silent = DistributedError(f"no confirmation of the commit has come to {self.office.name}")
            self.untold = dict.fromkeys(others, silent)
            self.verdict = self.office.keep(tell(self, others), "commit")

    def commit(self) -> bool:
        """The initiator says that everybody is prepared. Returns whether this part was."""
        if self.state == "prepared":
            self.state = "committing"
            self.changed()
        elif self.state == "marked" and self.is_selective:
            self._end(COMMITTED)  # nothing here leads to what is wanted
        return self.is_decided

    # ---------------------------------------------------------------- failing

    def fail(self, error: BaseException) -> bool:
        """Give the part up, unless it has been decided that it commits. Returns whether it was this that made it fail."""
        if self.is_decided or self.has_ended or self.error is not None:
            return False
        self._failed(error)
        if self.task is None:
            self._end(ABORTED)
            return True
        if self.state == "prepared":
            self.state = "aborting"
        if self.office.safeguards.fence_late_results:
            self.task.intrude(error)
        self.changed()
        return True

    def _failed(self, error: BaseException) -> None:
        self.error = error
        node = getattr(error, "_aiograd_node", None)
        if node is not None and not self.is_initiator:
            error._aiograd_function = node  # type: ignore[attr-defined]  # what the other workers are told: see `faults`
        if self.state == "marked" or not (self.smart or self.is_decided):
            self.tell_abort(self.downstream | self.behind)

    def tell_abort(self, names: set[str]) -> None:
        """Tell other workers that this part has failed; once, and not the initiator, who finds out."""
        names = names - {self.initiator, self.office.name}
        if names and self.telling is None and not self.is_initiator:
            self.telling = self.office.keep(tell_abort(self, names, type(self.error).__name__), "abort")

    def stop(self, error: BaseException) -> None:
        """Give the part up; where it is decided, end its hooks and callbacks instead."""
        if not self.is_decided:
            self.fail(error)
        elif not self.has_ended and self.error is None and self.runner is not None:
            with contextlib.suppress(AttributeError):
                error.committed = True  # type: ignore[attr-defined]
            self.error = error
            self.runner.cancel()

    def _end(self, state: str) -> None:
        if self.has_ended:
            return
        self.has_ended = True
        self.state = state
        remember(self.context, self.pass_id, UNKNOWN if self.pass_id in self.context.in_doubt else state)
        self.context.parts.pop(self.pass_id, None)
        if self._timer is not None:
            self._timer.cancel()
        self.walk.forget()
        if state != COMMITTED:
            self.gradients.take_back()
        self.office.part_ended(self)
        self.changed()

    def ask_around(self) -> None:
        """Find out what the initiator has decided; see Note [In doubt] in `decision`."""
        if self.state == "prepared" and (self._asking is None or self._asking.done()):
            self._asking = self.office.keep(resolve(self), "outcome")

    # ---------------------------------------------------------------- waiting

    def changed(self) -> None:
        """Wake those who wait for something to happen to the part."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def _change(self) -> None:
        waiter = self._loop.create_future()
        self._waiters.append(waiter)
        await waiter

    async def wait_prepared(self) -> None:
        """Wait until everything here and behind is prepared.

        Raises:
            What the part failed with.
        """
        while self.is_undecided and not self.has_ended:
            await self._change()
        if self.error is not None and not self.is_decided:
            await self.wait_ended()
            if self.telling is not None and not self.smart:
                await asyncio.wait([self.telling])
            raise self.error

    async def wait_ended(self) -> None:
        """Wait until the part is over, however it ended; hooks and callbacks have run."""
        while not self.has_ended:
            await self._change()


def _itself(leaf: AccumulateGrad) -> AccumulateGrad:
    """Where a leaf that a selective pass wants accumulates."""
    return leaf

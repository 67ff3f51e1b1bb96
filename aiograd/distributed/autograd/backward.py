"""BackwardPasses: backward passes across workers, on the initiator and on the workers that take part.

See `participant` for the life of one.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from aiograd.distributed import failpoints
from aiograd.distributed.autograd.context import Context, PassId
from aiograd.distributed.autograd.context_table import ContextTable
from aiograd.distributed.autograd.crossing import Crossing, crossings
from aiograd.distributed.autograd.discovery import check_predicted, send_node
from aiograd.distributed.autograd.participant import PassParticipant
from aiograd.distributed.autograd.pass_end import give_up, settle
from aiograd.distributed.autograd.pass_request import PassRequest
from aiograd.distributed.messages.fields import NO_TRACE
from aiograd.distributed.messages.passes import UP, Abort, Commit, Gradient, GradientsTaken, Mark, Marked, PassMessage, PassOutcome
from aiograd.distributed.observing import observe
from aiograd.distributed.rpc.identity import PeerIdentity
from aiograd.distributed.rpc.limits import check_number
from aiograd.distributed.rpc.timers import expire_at
from aiograd.distributed.scope import SCOPE, Scope
from aiograd.distributed.wait_tables import Awaited, WaitEdge, WaitEntry
from aiograd.distributed.worker_core import WorkerCore
from aiograd.engine.graph_task import GraphTask
from aiograd.engine.run.failures import clear_frames
from aiograd.engine.selection import Selection
from aiograd.errors import (
    ArgumentError,
    ArgumentTypeError,
    ContextError,
    DeadlineError,
    NoGraphError,
    PassAbortedError,
    ProtocolError,
    WorkerLostError,
)
from aiograd.graph.node import _next_sequence
from aiograd.running import tracing
from aiograd.running.caller import type_found
from aiograd.running.modes import ModeScope
from aiograd.tensors.core import TensorCore, make
from aiograd.tensors.passes import start_grad
from aiograd.transaction import AbortDecided, Outcome, PeerLost, TransactionState

MODES = ("smart", "fast")


class BackwardPasses:
    """The contexts of a worker, and the passes in which it takes part.

    Args:
        core: the worker.
    """

    def __init__(self, core: WorkerCore) -> None:
        self.core = core
        self.contexts = ContextTable(core.name, core.endpoint.incarnation, core.limits, core.entropy, self)
        #: passes that this worker took part in, by their ends
        self.committed = self.aborted = 0
        self._first = int.from_bytes(core.entropy(4), "little") << 16
        core.serve(
            {
                Mark: self.on_mark,
                Gradient: self.on_gradient,
                Commit: self.on_commit,
                Abort: self.on_abort,
                PassOutcome: self.on_outcome,
            }
        )
        core.multicast.register(Commit, self.on_relayed_commit)
        core.multicast.register(Abort, self.on_abort)
        core.on_lost.append(self.on_lost)
        core.wait_tables.append(self.waits)

    # ---------------------------------------------------------------- on the initiator

    def backward(self, context: Context, roots: tuple[Any, ...], retain_graph: bool, create_graph: bool, mode: str, timeout: float | None) -> Any:
        """Check the arguments at once and return the coroutine of `Context.backward`."""
        smart = self._is_smart("ctx.backward", mode, timeout)
        context.check_open()
        if not roots:
            raise ArgumentError("ctx.backward(): No tensors provided for gradient computation.")
        for i, root in enumerate(roots):
            if not isinstance(root, TensorCore):
                raise ArgumentTypeError(f"ctx.backward(): root {i} is a {type_found(root)}; expected a Tensor of this worker")
            if not root.requires_grad:
                raise NoGraphError(f"ctx.backward(): requires_grad not set on root {i}: it does not depend on anything that requires grad")
            if root.size != 1:
                raise ArgumentError(f"ctx.backward(): root {i} of shape {list(root.shape)} is not a scalar, all roots need to be scalar")
            if root.dtype.kind == "c":
                raise ArgumentTypeError(
                    f"ctx.backward(): root {i} has dtype {root.dtype}; expected a real scalar. Differentiate a real number of it, such as root.abs()"
                )
            if root.grad_fn is None:
                raise NoGraphError(f"ctx.backward(): root {i} does not have a valid gradient function: it is a leaf")
        seeds: list[Any] = [np.ones_like(root._data) for root in roots]
        if create_graph:
            seeds = [make(seed) for seed in seeds]
        return self._backward(context, PassRequest([(root._node, root._nr) for root in roots], seeds, retain_graph, create_graph, smart), timeout)

    async def _backward(self, context: Context, request: PassRequest, timeout: float | None) -> None:
        await self.run(context, request, timeout)

    def grad(
        self, context: Context, outputs: Any, inputs: Any, grad_outputs: Any, mode: str, timeout: float | None, options: Mapping[str, Any]
    ) -> Any:
        """Check the arguments at once and return the coroutine of `Context.grad`."""
        smart = self._is_smart("ctx.grad", mode, timeout)
        context.check_open()
        return start_grad("ctx.grad()", outputs, inputs, grad_outputs, run=functools.partial(self._selected, context, smart, timeout), **options)

    def _is_smart(self, what: str, mode: Any, timeout: float | None) -> bool:
        """True if the mode of a pass is ``"smart"``; raises if the mode or the timeout is invalid."""
        if not isinstance(mode, str) or mode.lower() not in MODES:
            raise ArgumentError(f"{what}(mode={mode!r}): expected 'smart' or 'fast'")
        if timeout is not None:
            check_number(f"{what}(): timeout", timeout, self.core.limits.max_deadline, "Limits.max_deadline")
        return mode.lower() == "smart"

    async def _selected(self, context: Context, smart: bool, timeout: float | None, task: GraphTask) -> list[Any]:
        return (await self.run(context, PassRequest.of(task, smart), timeout)).result

    async def carry(self, task: GraphTask) -> bool:
        """See `RecvNode.carry`."""
        found = await crossings(task)
        if not found:
            return False
        context = found[0].context
        if context is None or context.is_released:
            raise ContextError(f"a pass reaches values that came from {found[0].peer}, whose context is being released")
        request = PassRequest.of(task, True)
        task.hand_over()
        task.adopt(await context.runner.run(context, request))
        return True

    async def run(self, context: Context, request: PassRequest, timeout: float | None = None) -> GraphTask:
        """Run a pass that starts here; returns this worker's GraphTask."""
        context.check_open()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.core.time_for(timeout)
        scope = SCOPE.get()
        if scope is not None and scope.context is context and scope.is_in_pass:
            return await self._initiate(context, request, deadline)  # nested: the outer pass waits for this one
        if context.turn is None:
            context.turn = asyncio.Lock()
        if not context.turn.locked():
            await context.turn.acquire()  # at once
        else:
            try:
                async with asyncio.timeout(None) as clock:
                    expire_at(self.core.endpoint.context, clock, deadline)
                    await context.turn.acquire()
            except TimeoutError:
                raise DeadlineError(f"{request.what}: another pass in context {context.id} did not end before this one's deadline") from None
        try:
            return await self._initiate(context, request, deadline)
        finally:
            context.turn.release()

    async def _initiate(self, context: Context, request: PassRequest, deadline: float) -> GraphTask:
        with observe(self.core.meter, "pass", "distributed backward", self.core.name, None, "INTERNAL", **{"aiograd.context": context.id}):
            try:
                return await self._conduct(context, request, deadline)
            except BaseException as error:
                clear_frames(error, "aiograd.distributed.")
                raise

    async def _conduct(self, context: Context, request: PassRequest, deadline: float) -> GraphTask:
        core, wanted = self.core, request.wanted
        context.check_open()
        context.next_pass += 1
        pass_id = (core.name, self._first + context.next_pass)
        scope = SCOPE.get()
        place = (*(scope.place if scope is not None and scope.worker is core.worker else ()), -_next_sequence())
        participant = PassParticipant(
            core, context, pass_id, retain_graph=request.retain_graph, smart=request.smart, deadline=deadline, on_end=self._ended,
            create_graph=request.create_graph, place=place, is_selective=wanted is not None, crossing=None if wanted is None else Crossing(wanted),
        )  # fmt: skip
        try:
            try:
                async with asyncio.timeout(None) as clock:
                    expire_at(core.endpoint.context, clock, deadline)
                    if participant.smart:
                        starts = [node for node, _ in request.roots]
                        names = await participant.discovery.predict(starts) if wanted is None else None
                        if names is None:
                            names, _ = await participant.discovery.mark(starts)
                        participant.others = sorted(names)
                        if wanted is not None and isinstance(wanted.plan, Selection):
                            await participant.discovery.rise([node for node, _ in wanted.plan.inputs])
                    else:
                        participant.sends.update(dict.fromkeys(context.send_nodes.values()))
                    if participant.error is not None:
                        raise participant.error
                    task = participant.start(request.roots, request.seeds, self._surroundings(context, participant), request.options)
                    await participant.wait_ended()
            except TimeoutError:
                if not clock.expired():
                    raise
                raise DeadlineError(
                    f"{request.what} in context {context.id} did not end before its deadline: {participant.describe()}"
                ) from None
        except BaseException as error:
            await give_up(participant, error)
            raise
        await settle(participant)
        return task

    # ---------------------------------------------------------------- on workers that take part

    async def on_mark(self, caller: PeerIdentity, message: Mark, timeout: float) -> Marked:
        """Serve a `Mark`."""
        context = self._context(caller, message)
        participant = context.participants.get(message.pass_id)
        if participant is not None and participant.task is not None:
            raise PassAbortedError("edge discovery of a pass goes on although the pass is running already")
        if message.direction == UP:
            if participant is None:
                raise PassAbortedError("edge discovery of a pass goes on although the pass was aborted here")
            return Marked([], await participant.discovery.rise(participant.discovery.take_recvs(message.edges, caller.name), caller.name))
        for edge in message.edges:
            send_node(context, edge, caller.name)  # before anything is made
        if participant is None:
            participant = self._join(context, message.pass_id, timeout, is_selective=message.direction is not None)
        names, back = await participant.discovery.mark(participant.discovery.take_sends(message.edges, caller.name), caller.name)
        return Marked(sorted({*names, self.core.name}), back)

    async def on_gradient(self, caller: PeerIdentity, message: Gradient, timeout: float) -> GradientsTaken:
        """Serve a `Gradient`."""
        failpoints.reach("bwd.before_receive")
        context = self._context(caller, message)
        trace = message.trace or NO_TRACE
        if message.create_graph != (message.place is not None):
            raise ProtocolError("gradients of a pass that records a graph without a place in it", code="gradient")
        edge = message.bundle.edge
        send_node(context, edge, caller.name)
        participant = context.participants.get(message.pass_id)
        if participant is None:
            options = {"retain_graph": message.retain_graph, "smart": message.smart, "is_selective": message.is_selective}
            if message.edges:  # see Note [Predicted edges] in `discovery`
                for each in message.edges:
                    check_predicted(send_node(context, each, caller.name), context)
                participant = self._join(context, message.pass_id, timeout, **options)
                participant.discovery.take_sends(message.edges, caller.name)
            elif message.smart:
                raise PassAbortedError(f"gradients of message {edge} for a pass that has not asked for them: it was given up here")
            else:
                participant = self._join(context, message.pass_id, timeout, **options)
                participant.sends.update(dict.fromkeys(context.send_nodes.values()))
        if participant.error is not None:  # it is being wound up, and waits for nothing
            raise participant.error
        participant.retain_graph, participant.create_graph = message.retain_graph, message.create_graph
        participant.is_selective = message.is_selective
        send, arrays = await participant.gradients.accept(message.bundle, caller.name)
        failpoints.reach("bwd.after_receive")
        if participant.error is not None:
            raise participant.error
        is_first = participant.task is None
        if is_first:
            participant.others = sorted({*participant.others, *message.others})
            participant.parent = participant.gradients.asker = caller.name
            participant.place = message.place or ()
            failpoints.reach("bwd.before_compute")
            profiler = self.core.recorder(caller, trace)
            collect = context.recorder(participant.place) if participant.create_graph else None
            with ModeScope(profiler=profiler, anomaly=message.anomaly, collect=collect):
                participant.start(context=self._surroundings(context, participant, trace.parent))
        if participant.task is not None:
            participant.task.deliver(send, arrays)
        if not is_first:
            return GradientsTaken([self.core.name], [], False)
        try:
            with observe(self.core.meter, "receive", "gradients", caller.name, None if participant.task is None else participant.task.profiler):
                await participant.wait_prepared()
        except asyncio.CancelledError:
            participant.fail(PassAbortedError(f"{caller.name} wants no answer to its gradients any more"))
            raise
        failpoints.reach("bwd.before_ack")
        return GradientsTaken(sorted({*participant.behind, self.core.name}), await participant.gradients.answer(), participant.has_left)

    async def on_commit(self, caller: PeerIdentity, message: Commit, timeout: float) -> bool:
        """Serve a `Commit`."""
        context, pass_id = self._context(caller, message, ended=True), message.pass_id
        participant = context.participants.get(pass_id)
        if participant is None:
            history = context.history
            if pass_id in history and history.outcome(pass_id) is Outcome.UNKNOWN and pass_id not in history.in_doubt:
                history.remember(pass_id, Outcome.COMMITTED)  # it had nothing to commit: see Note [Nothing to commit] in `participant`
            if history.outcome(pass_id) is not Outcome.COMMITTED:
                raise PassAbortedError(f"told to commit a pass that {self.core.name} has not prepared")
            return True
        if caller.name != participant.initiator:
            raise PassAbortedError(f"told to commit a pass that {self.core.name} has not prepared")
        return await self._commit(caller, participant)

    async def on_relayed_commit(self, caller: PeerIdentity, message: Commit, timeout: float) -> bool:
        """As `on_commit`, by way of another worker of the same principal, which is believed as when it is asked what became of the pass."""
        participant = self._context(caller, message, ended=True).participants.get(message.pass_id)
        return await (self.on_commit(caller, message, timeout) if participant is None else self._commit(caller, participant))

    async def _commit(self, caller: PeerIdentity, participant: PassParticipant) -> bool:
        if not participant.commit():
            raise PassAbortedError(f"told to commit a pass that {self.core.name} has not prepared")
        failpoints.reach("commit.half")
        try:
            await participant.wait_ended()
        except asyncio.CancelledError:
            participant.stop(DeadlineError(f"{caller.name} waits no longer for hooks and callbacks of a pass"))
            raise
        if participant.error is not None:
            raise participant.error
        failpoints.reach("commit.before_reply")
        return True

    async def on_abort(self, caller: PeerIdentity, message: Abort, timeout: float) -> bool:
        """Serve an `Abort`."""
        context, pass_id = self._context(caller, message, ended=True), message.pass_id
        participant = context.participants.get(pass_id)
        if participant is None:
            if context.history.outcome(pass_id) is Outcome.UNKNOWN:  # never heard of, or in doubt
                context.in_doubt.discard(pass_id)
                context.history.remember(pass_id, Outcome.ABORTED)
            return True
        if participant.is_decided:
            return True
        error = PassAbortedError(f"the pass was given up by {caller.name}: {message.reason[:200]}")
        is_news = participant.fail(error, None if participant.is_initiator else AbortDecided())
        await participant.wait_ended()
        if is_news or caller.name == participant.initiator:
            await participant.wait_told()
        return True

    async def on_outcome(self, caller: PeerIdentity, message: PassOutcome, timeout: float) -> str:
        """Serve a `PassOutcome`."""
        context, pass_id = self._context(caller, message, ended=True), message.pass_id
        participant = context.participants.get(pass_id)
        return (participant.transaction.outcome if participant is not None else context.history.outcome(pass_id)).value

    def _context(self, caller: PeerIdentity, message: PassMessage, ended: bool = False) -> Context:
        """The context of a message about a pass, which may be over only with `ended`."""
        context, pass_id = self.contexts.find(message.key, caller, self.core.now()), message.pass_id
        if pass_id in context.history and not ended:
            outcome = context.history.outcome(pass_id)
            raise PassAbortedError(f"the pass is over on {self.core.name} already ({outcome}): too late for more of it")
        return context

    def _join(
        self, context: Context, pass_id: PassId, timeout: float, *, retain_graph: bool = False, smart: bool = True, is_selective: bool = False
    ) -> PassParticipant:
        if pass_id[0] == self.core.name:
            raise PassAbortedError(f"{self.core.name} has started no such pass")
        loop = asyncio.get_running_loop()
        participant = PassParticipant(
            self.core, context, pass_id, retain_graph=retain_graph, smart=smart, deadline=loop.time() + timeout, on_end=self._ended,
            is_selective=is_selective,
        )  # fmt: skip
        participant.expire_at(participant.deadline - min(0.02, timeout * 0.1))  # before the request itself expires, so that the reason travels
        return participant

    def _ended(self, participant: PassParticipant) -> None:
        if participant.state is TransactionState.COMMITTED or (participant.has_left and participant.error is None):
            self.committed += 1
        else:
            self.aborted += 1

    def _surroundings(self, context: Context, participant: PassParticipant, parent: str | None = None) -> contextvars.Context:
        """The contextvars.Context in which this worker's part runs: the distributed context is current in hooks, and so is the span `parent`."""
        surroundings = contextvars.copy_context()
        place = participant.place[:-1] if participant.is_initiator else participant.place
        surroundings.run(SCOPE.set, Scope(self.core.worker, context, context.principal, participant.deadline, place, is_in_pass=True))
        if parent is not None:
            surroundings.run(tracing.follow, parent)
        return surroundings

    def waits(self) -> Iterator[WaitEntry]:
        """The passes of this worker, and the passes that wait for their turn in a context."""
        for context in self.contexts:
            own = None
            for participant in context.participants.values():
                own = participant.name if own is None and participant.is_initiator else own
                yield from participant.waits()
            if own is not None and context.turn is not None:
                edge = WaitEdge(self.core.name, own, "backward", message="the turn in the context")
                for waiter in context.turn._waiters or ():
                    yield Awaited(waiter, edge, context.principal)

    # ---------------------------------------------------------------- lost workers and released contexts

    def on_lost(self, identity: PeerIdentity, error: WorkerLostError) -> None:
        """Called when a worker is lost: abort passes that need it, and ask the other workers for the outcome of passes that it was to decide."""
        name = identity.name
        for context in self.contexts:
            if context.principal != identity.principal:
                continue
            for participant in list(context.participants.values()):
                if participant.began_at >= error.spared_since:
                    continue
                if participant.is_initiator:
                    if name in {*participant.others, *participant.downstream, *participant.behind}:
                        participant.fail(error, PeerLost())
                elif participant.transaction.is_prepared:
                    if name in (participant.initiator, participant.parent):  # the lost worker may have been the only one that knew the decision
                        participant.ask_around()
                elif name == participant.initiator and participant.state is TransactionState.ACTIVE:
                    participant.fail(error, PeerLost())
                    participant.tell_abort({*participant.others, *participant.downstream})

    def on_released(self, context: Context) -> Sequence[PassParticipant]:
        """Abort the passes of a context that is being released."""
        participants = list(context.participants.values())
        for participant in participants:
            if self.core.is_closing and not participant.is_initiator:
                participant.stop(self.core.closed_error("GRADIENT"))
            else:
                participant.stop(ContextError(f"context {context.id} was released while a backward pass was running in it"))
        return participants

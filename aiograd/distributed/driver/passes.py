"""Passes: backward passes across workers, on the worker that starts one and on those that take part. See `part` for the life of one."""

from __future__ import annotations

import asyncio
import contextvars
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from aiograd.distributed import failpoints
from aiograd.distributed.context import Context, PassId
from aiograd.distributed.contexts import Caller, is_place
from aiograd.distributed.driver.crossing import Crossing, crossings
from aiograd.distributed.driver.decision import ABORTED, COMMITTED, UNKNOWN, remember, tell_abort
from aiograd.distributed.driver.gradients import ANOMALY, CREATE, NAN, RETAIN, SELECTIVE, SMART
from aiograd.distributed.driver.part import Part
from aiograd.distributed.driver.timers import expire_at, wait_for
from aiograd.distributed.driver.walk import DOWN, UP, send_node
from aiograd.distributed.limits import check_number
from aiograd.distributed.scope import SCOPE, Scope
from aiograd.engine.graph_task import GraphTask
from aiograd.errors import (
    ArgumentError,
    ArgumentTypeError,
    CommitUnknown,
    ContextError,
    DeadlineError,
    NoGraphError,
    PassAbortedError,
    ProtocolError,
    WorkerLostError,
)
from aiograd.graph.node import Node, _next_sequence
from aiograd.modes import ModeScope
from aiograd.tensors.core import TensorCore, make
from aiograd.tensors.passes import start_grad
from aiograd.types import Array

if TYPE_CHECKING:
    from aiograd.distributed.driver.office import Office

MODES = ("smart", "fast")


@dataclass(slots=True)
class Request:
    """The roots, seeds and options of a pass."""

    roots: Sequence[tuple[Node, int]]
    seeds: Sequence[Array]
    retain_graph: bool
    create_graph: bool
    smart: bool
    what: str = "ctx.backward()"
    #: of a selective pass: the local one that it stands for
    wanted: GraphTask | None = None

    @classmethod
    def of(cls, task: GraphTask, smart: bool) -> Request:
        """The pass over several workers that stands for a local one that has not begun."""
        return cls(task.roots, task.seeds, task.keep_graph, task.create_graph, smart, "grad()", task)

    @property
    def options(self) -> dict[str, Any]:
        """Those of the initiator's GraphTask."""
        task = self.wanted
        if task is None:
            return {}
        return {"inputs": task.inputs, "accumulate": task.accumulate, "keepers": task.keepers, "require_inputs": task.require_inputs}


class Passes:
    """The passes that a worker has a part in.

    Args:
        office: the worker.
    """

    def __init__(self, office: Office) -> None:
        self.office = office
        self._first = int.from_bytes(office.entropy(4), "little") << 16

    # ---------------------------------------------------------------- on the worker that starts it

    def backward(self, context: Context, roots: tuple[Any, ...], retain_graph: bool, create_graph: bool, mode: str, timeout: float | None) -> Any:
        """Check the arguments at once; see `Context.backward`."""
        smart = self._is_smart("ctx.backward", mode, timeout)
        context.check_open()
        if not roots:
            raise ArgumentError("ctx.backward(): No tensors provided for gradient computation.")
        for i, root in enumerate(roots):
            if not isinstance(root, TensorCore):
                raise ArgumentTypeError(f"ctx.backward(): root {i} is a {type(root).__name__}; expected a Tensor of this worker")
            if not root.requires_grad:
                raise NoGraphError(f"ctx.backward(): requires_grad not set on root {i}: it does not depend on anything that requires grad")
            if root.size != 1:
                raise ArgumentError(f"ctx.backward(): root {i} of shape {list(root.shape)} is not a scalar, all roots need to be scalar")
            if root.grad_fn is None:
                raise NoGraphError(f"ctx.backward(): root {i} does not have a valid gradient function: it is a leaf")
        seeds: list[Any] = [np.ones_like(root._data) for root in roots]
        if create_graph:
            seeds = [make(seed) for seed in seeds]
        return self._backward(context, Request([(root._node, root._nr) for root in roots], seeds, retain_graph, create_graph, smart), timeout)

    async def _backward(self, context: Context, request: Request, timeout: float | None) -> None:
        await self.run(context, request, timeout)

    def grad(
        self, context: Context, outputs: Any, inputs: Any, grad_outputs: Any, mode: str, timeout: float | None, options: Mapping[str, Any]
    ) -> Any:
        """Check the arguments at once; see `Context.grad`."""
        smart = self._is_smart("ctx.grad", mode, timeout)
        context.check_open()
        return start_grad("ctx.grad()", outputs, inputs, grad_outputs, run=functools.partial(self._selected, context, smart, timeout), **options)

    def _is_smart(self, what: str, mode: Any, timeout: float | None) -> bool:
        """True if the mode of a pass is the smart one; checks it, and the timeout."""
        if not isinstance(mode, str) or mode.lower() not in MODES:
            raise ArgumentError(f"{what}(mode={mode!r}): expected 'smart' or 'fast'")
        if timeout is not None:
            check_number(f"{what}(): timeout", timeout, self.office.limits.max_deadline, "Limits.max_deadline")
        return mode.lower() == "smart"

    async def _selected(self, context: Context, smart: bool, timeout: float | None, task: GraphTask) -> list[Any]:
        return (await self.run(context, Request.of(task, smart), timeout)).result

    async def carry(self, task: GraphTask) -> bool:
        """See `RecvNode.carry`."""
        found = await crossings(task)
        if not found:
            return False
        context = found[0].context
        if context is None or context.is_released:
            raise ContextError(f"a pass reaches values that came from {found[0].peer}, whose context is being released")
        request = Request.of(task, True)
        task.keep_graph = True  # what the pass uses up is not for this one to release
        carried = await context.runner.run(context, request)
        task.captured, task.committed = carried.captured, carried.committed
        return True

    async def run(self, context: Context, request: Request, timeout: float | None = None) -> GraphTask:
        """Run a pass that starts here; returns this worker's piece of it."""
        context.check_open()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.office.time_for(timeout)
        scope = SCOPE.get()
        if scope is not None and scope.context is context and scope.is_in_pass:
            return await self._initiate(context, request, deadline)  # nested: the outer pass waits for this one
        if context.turn is None:
            context.turn = asyncio.Lock()
        try:
            async with asyncio.timeout(None) as clock:
                expire_at(self.office.endpoint.context, clock, deadline)
                await context.turn.acquire()
        except TimeoutError:
            raise DeadlineError(f"{request.what}: another pass in context {context.id} did not end before this one's deadline") from None
        try:
            return await self._initiate(context, request, deadline)
        finally:
            context.turn.release()

    async def _initiate(self, context: Context, request: Request, deadline: float) -> GraphTask:
        office, wanted = self.office, request.wanted
        context.check_open()
        context.next_pass += 1
        pass_id = (office.name, self._first + context.next_pass)
        scope = SCOPE.get()
        place = (*(scope.place if scope is not None and scope.worker is office.worker else ()), -_next_sequence())
        part = Part(
            office, context, pass_id, retain_graph=request.retain_graph, smart=request.smart, deadline=deadline, create_graph=request.create_graph,
            place=place, is_selective=wanted is not None, crossing=None if wanted is None else Crossing(wanted),
        )  # fmt: skip
        try:
            try:
                async with asyncio.timeout(None) as clock:
                    expire_at(office.endpoint.context, clock, deadline)
                    if part.has_walked:
                        names, _ = await part.walk.mark([node for node, _ in request.roots])
                        part.others = sorted(names)
                        if wanted is not None and wanted.inputs is not None:
                            await part.walk.rise([node for node, _ in wanted.inputs])
                    else:
                        part.sends.update(dict.fromkeys(context.send_nodes.values()))
                    if part.error is not None:
                        raise part.error
                    task = part.start(request.roots, request.seeds, self._surroundings(context, part), request.options)
                    await part.wait_ended()
            except TimeoutError:
                if not clock.expired():
                    raise
                raise DeadlineError(
                    f"{request.what} in context {context.id} did not end before its deadline: {part.describe()}"
                ) from None
        except BaseException as error:
            await self._given_up(part, error)
            raise
        await self._settled(part)
        return task

    async def _given_up(self, part: Part, error: BaseException) -> None:
        """Waiting for the pass has ended early: give it up everywhere; where it has been committed, end its hooks and callbacks."""
        part.stop(error if isinstance(error, Exception) else PassAbortedError(f"a pass was cancelled on {self.office.name}"))
        if not part.is_decided:
            aborting = self.office.keep(self._abort(part, type(error).__name__), "abort")
            await wait_for(self.office.endpoint.context, aborting, self._patience(part))
            return
        error.committed = True  # type: ignore[attr-defined]
        await self._spread(part)

    def _patience(self, part: Part) -> float:
        """Seconds to wait for what other workers say of the end of a pass: not much longer than for the pass; telling them goes on after that."""
        return part.left() + self.office.limits.heartbeat / 2

    async def _abort(self, part: Part, reason: str) -> None:
        telling = asyncio.ensure_future(tell_abort(part, {*part.others, *part.downstream, *part.behind}, reason))
        try:
            await part.wait_ended()
        finally:
            await telling

    async def _spread(self, part: Part) -> None:
        """Who waited for a pass goes away after its commit: let hooks here end, and give the other workers a moment to hear of it."""
        try:
            await part.wait_ended()
            if part.verdict is not None:
                await wait_for(self.office.endpoint.context, part.verdict, min(self.office.limits.silence, self._patience(part)))
        except asyncio.CancelledError as again:
            again.committed = True  # type: ignore[attr-defined]
            raise
        finally:
            _note_doubt(part)

    async def _settled(self, part: Part) -> None:
        """The pass is over on this worker: wait for the others and raise what there is to raise."""
        error = part.error
        if part.state != COMMITTED:
            error = error or PassAbortedError("the pass was aborted")
            await self._given_up(part, error)
            raise error
        if part.verdict is not None:
            try:
                await wait_for(self.office.endpoint.context, part.verdict, self._patience(part))
            except asyncio.CancelledError as cancelled:
                cancelled.committed = True  # type: ignore[attr-defined]
                await self._spread(part)
                raise
        unknown = _note_doubt(part)
        if error is not None:
            raise error
        if unknown:
            first = part.untold[unknown[0]]
            lost = CommitUnknown(
                f"the gradients of this pass are committed on {self.office.name}, and {', '.join(unknown)} could not be told ({first}). Do not "
                "step with the gradients of this context: restore a lost worker from a checkpoint and run the pass again in a new one.",
                workers=unknown,
            )
            lost.committed = True
            raise lost from first
        for failure in part.untold.values():
            if not part.is_selective or getattr(failure, "committed", False):
                raise failure

    # ---------------------------------------------------------------- on workers that take part

    async def on_mark(self, caller: Caller, value: Any, timeout: float) -> tuple[list[str], list[int]]:
        """See `Kind.MARK`."""
        context, pass_id, (edges, *way) = self._parse(caller, value, 1, 2)
        if not isinstance(edges, list) or way not in ([], [DOWN], [UP]):
            raise ProtocolError("a malformed question about who takes part", code="mark")
        part = context.parts.get(pass_id)
        if part is not None and part.task is not None:
            raise PassAbortedError("a pass goes on finding out who takes part although it is running already")
        if way == [UP]:
            if part is None:
                raise PassAbortedError("a pass goes on finding out who takes part although it was given up here")
            return [], await part.walk.rise(part.walk.take_recvs(edges, caller.name), caller.name)
        for edge in edges:
            send_node(context, edge, caller.name)  # before anything is made
        if part is None:
            part = self._join(context, pass_id, SMART | (SELECTIVE if way else 0), timeout)
        names, back = await part.walk.mark(part.walk.take_sends(edges, caller.name), caller.name)
        return sorted({*names, self.office.name}), back

    async def on_gradient(self, caller: Caller, value: Any, timeout: float) -> tuple[list[str], list[Any]]:
        """See `Kind.GRADIENT`."""
        failpoints.reach("bwd.before_receive")
        context, pass_id, (bundle, flags, others, *rest) = self._parse(caller, value, 3, 4)
        if not (flags.__class__ is int and isinstance(others, list) and isinstance(bundle, tuple) and bundle):
            raise ProtocolError("malformed gradients", code="gradient")
        if bool(flags & CREATE) != bool(rest) or (rest and not is_place(rest[0])):
            raise ProtocolError("gradients of a pass that records a graph without a place in it", code="gradient")
        send_node(context, bundle[0], caller.name)
        part = context.parts.get(pass_id)
        if part is None:
            if flags & SMART and self.office.safeguards.mark_needed_edges:
                raise PassAbortedError(f"gradients of message {bundle[0]} for a pass that has not asked for them: it was given up here")
            part = self._join(context, pass_id, flags, timeout)
            part.sends.update(dict.fromkeys(context.send_nodes.values()))
        if part.error is not None:  # it is being wound up, and waits for nothing
            raise part.error
        part.retain_graph = bool(flags & RETAIN)
        part.create_graph = bool(flags & CREATE)
        part.is_selective = bool(flags & SELECTIVE)
        send, arrays = await part.gradients.parse(bundle, caller.name)
        failpoints.reach("bwd.after_receive")
        if part.error is not None:
            raise part.error
        is_first = part.task is None
        if is_first:
            part.others = sorted({*part.others, *(name for name in others if name.__class__ is str)})
            part.parent = part.gradients.asker = caller.name
            part.place = tuple(rest[0]) if rest else ()
            failpoints.reach("bwd.before_compute")
            anomaly = bool(flags & NAN) if flags & ANOMALY else None
            with ModeScope(profiler=self.office.profiler, anomaly=anomaly, collect=context.recorder(part.place) if rest else None):
                part.start(context=self._surroundings(context, part))
        if part.task is not None:
            part.task.deliver(send, arrays)
        if not is_first:
            return [self.office.name], []
        try:
            await part.wait_prepared()
        except asyncio.CancelledError:
            if part.state != "prepared":
                part.fail(PassAbortedError(f"{caller.name} wants no answer to its gradients any more"))
            raise
        failpoints.reach("bwd.before_ack")
        return sorted({*part.behind, self.office.name}), await part.gradients.answer()

    async def on_commit(self, caller: Caller, value: Any, timeout: float) -> bool:
        """See `Kind.COMMIT`."""
        context, pass_id, _ = self._parse(caller, value, 0, ended=True)
        part = context.parts.get(pass_id)
        if part is None:
            if context.outcomes.get(pass_id) != COMMITTED:
                raise PassAbortedError(f"told to commit a pass that {self.office.name} has not prepared")
            if not self.office.safeguards.commit_idempotent:
                for slot in context.slots.values():
                    slot.grad = None if slot.grad is None else slot.grad + slot.grad
            return True
        if not self.office.safeguards.ack_after_apply:
            asyncio.get_running_loop().call_later(0.05, part.commit)
            return True
        if caller.name != part.initiator or not part.commit():
            raise PassAbortedError(f"told to commit a pass that {self.office.name} has not prepared")
        failpoints.reach("commit.half")
        try:
            await part.wait_ended()
        except asyncio.CancelledError:
            part.stop(DeadlineError(f"{caller.name} waits no longer for hooks and callbacks of a pass"))
            raise
        if part.error is not None:
            raise part.error
        failpoints.reach("commit.before_reply")
        return True

    async def on_abort(self, caller: Caller, value: Any, timeout: float) -> bool:
        """See `Kind.ABORT`."""
        context, pass_id, (reason,) = self._parse(caller, value, 1, ended=True)
        part = context.parts.get(pass_id)
        if part is None:
            if pass_id not in context.outcomes:
                remember(context, pass_id, ABORTED)
            return True
        if part.is_decided:
            return True
        is_news = part.fail(PassAbortedError(f"the pass was given up by {caller.name}: {str(reason)[:200]}"))
        await part.wait_ended()
        if part.telling is not None and (is_news or caller.name == part.initiator):
            await asyncio.wait([part.telling])
        return True

    async def on_outcome(self, caller: Caller, value: Any, timeout: float) -> str:
        """See `Kind.OUTCOME`."""
        context, pass_id, _ = self._parse(caller, value, 0, ended=True)
        part = context.parts.get(pass_id)
        return part.outcome if part is not None else context.outcomes.get(pass_id, UNKNOWN)

    def _parse(self, caller: Caller, value: Any, *more: int, ended: bool = False) -> tuple[Context, PassId, tuple[Any, ...]]:
        """What a message about a pass begins with: the context, the pass, and as many values as `more` allows."""
        if not (isinstance(value, tuple) and len(value) - 3 in more and value[1].__class__ is str and value[2].__class__ is int):
            raise ProtocolError("a malformed message about a backward pass", code="pass")
        context = self.office.contexts.find(value[0], caller, self.office.now())
        pass_id = (value[1], value[2])
        outcome = context.outcomes.get(pass_id)
        if outcome is not None and not ended:
            raise PassAbortedError(f"the pass is over on {self.office.name} already ({outcome}): too late for more of it")
        return context, pass_id, value[3:]

    def _join(self, context: Context, pass_id: PassId, flags: int, timeout: float) -> Part:
        if pass_id[0] == self.office.name:
            raise PassAbortedError(f"{self.office.name} has started no such pass")
        loop = asyncio.get_running_loop()
        part = Part(
            self.office, context, pass_id, retain_graph=bool(flags & RETAIN), smart=bool(flags & SMART), deadline=loop.time() + timeout,
            is_selective=bool(flags & SELECTIVE),
        )  # fmt: skip
        part.expire_at(part.deadline - min(0.02, timeout * 0.1))  # before the request itself expires, so that the reason travels
        self.office.passes_begun += 1
        return part

    def _surroundings(self, context: Context, part: Part) -> contextvars.Context:
        """Where this worker's part runs: the context is current in hooks."""
        surroundings = contextvars.copy_context()
        place = part.place[:-1] if part.is_initiator else part.place
        surroundings.run(SCOPE.set, Scope(self.office.worker, context, context.principal, part.deadline, place, is_in_pass=True))
        return surroundings

    # ---------------------------------------------------------------- what happens elsewhere

    def on_lost(self, name: str, principal: str, error: WorkerLostError) -> None:
        """Contact with a worker is lost: give up what cannot succeed without it, and ask around where it was to decide."""
        for context in self.office.contexts:
            if context.principal != principal:
                continue
            for part in list(context.parts.values()):
                if part.is_initiator:
                    if part.is_undecided and name in {*part.others, *part.downstream, *part.behind}:
                        part.fail(error)
                elif part.state == "prepared":
                    if name in (part.initiator, part.parent):  # who is lost may have been the only one who could tell of the decision
                        part.ask_around()
                elif name == part.initiator and part.is_undecided:
                    part.fail(error)
                    part.tell_abort({*part.others, *part.downstream})

    def on_released(self, context: Context) -> Sequence[Part]:
        """A context is being released: give up its passes."""
        parts = list(context.parts.values())
        for part in parts:
            if self.office.is_closing and not part.is_initiator:
                part.stop(self.office.leaving("GRADIENT"))
            else:
                part.stop(ContextError(f"context {context.id} was released while a backward pass was running in it"))
        return parts


def _unknown(part: Part) -> tuple[str, ...]:
    """Workers that are not known to have committed a pass that was, and had something to commit."""
    if part.is_selective:
        return ()
    return tuple(name for name, failure in part.untold.items() if not getattr(failure, "committed", False))


def _note_doubt(part: Part) -> tuple[str, ...]:
    """Let the context say that a pass may not be committed everywhere, unless and until it is known to be; returns where it is not."""
    unknown = _unknown(part)
    if unknown:
        part.context.in_doubt.add(part.pass_id)
        if part.verdict is not None and not part.verdict.done():  # telling them goes on
            part.verdict.add_done_callback(lambda _: None if _unknown(part) else part.context.in_doubt.discard(part.pass_id))
    return unknown

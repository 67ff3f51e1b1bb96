"""Part: what one worker does in one distributed backward pass.

Note [Life of a part]
    *marked*: the walk from the roots has found which send nodes of this worker the roots depend on. *running*: a GraphTask over this
    worker's piece of the graph runs; gradients arrive at the marked send nodes and leave at recv nodes. *prepared*: everything here is
    staged, and so is everything behind: the gradients that this worker has sent are answered once their receivers are prepared. Then the
    initiator decides: *committed* or *aborted*. Whatever fails before makes the part *aborted* at once, and everything it staged is
    dropped.

Note [Who waits for whom]
    The answer to the first gradients that reach a worker is held back until its part is prepared; later ones are answered at once. So the
    workers form a tree with the initiator as its root, whatever cycles the graph has among them, and an answered tree is a prepared one.
    (Dijkstra and Scholten, Termination detection for diffusing computations, 1980.)

Note [Fewer messages]
    Most edges lead back to where a worker was called from. So the walk hands edges of the worker that asked back in its answer instead of
    asking it in turn; and gradients for the worker whose first gradients are being answered go with that answer, where nothing else is
    being waited for: they are held back only until the engine pauses or waits, so nobody waits for them any longer than for the answer.

Note [Passes that record a graph]
    With ``create_graph`` gradients are Tensors, and a message of gradients is one more edge of the graph: a SendNode on the worker it leaves,
    a RecvNode where it arrives. So second derivatives need nothing else.

Note [In doubt]
    A prepared part may neither commit nor abort by itself. Where the decision does not come, it asks the initiator and then the others: one
    that has committed, or one that never prepared, settles it. An initiator that does not know the pass never decided for it, which means
    aborted. If nobody can tell until the lease of the context ends, the gradients of the context cannot be trusted, and the context says so.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from aiograd import devices
from aiograd.distributed import failpoints
from aiograd.distributed.codec import WireTensor
from aiograd.distributed.context import Context, ContextSlot, PassId
from aiograd.distributed.driver.timers import call_at
from aiograd.distributed.encodings import Encoding
from aiograd.distributed.kinds import Kind
from aiograd.distributed.limits import Limits
from aiograd.distributed.nodes import RecvNode, SendNode
from aiograd.distributed.safeguards import Safeguards
from aiograd.engine.graph_task import GraphTask
from aiograd.engine.run import current_engine, new_graph_task
from aiograd.errors import CommitUnknown, ContextError, DeadlineError, DistributedError, PassAbortedError, ProtocolError, WorkerLostError
from aiograd.graph.accumulate_grad import AccumulateGrad
from aiograd.graph.boundary import to_array
from aiograd.graph.node import Node
from aiograd.tensors.core import make
from aiograd.types import Array

#: flags of a message of gradients
RETAIN, SMART, CREATE = 1, 2, 4
#: nodes that a walk visits between two looks at the clock
STRIDE = 512
#: seconds that a walk may hold the loop
BUDGET = 0.0015


class Office(Protocol):
    """What a part needs of its worker."""

    name: str
    limits: Limits
    safeguards: Safeguards
    gradient_encoding: Encoding
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
    """

    def __init__(
        self, office: Office, context: Context, pass_id: PassId, *, retain_graph: bool, smart: bool, deadline: float, create_graph: bool = False
    ) -> None:
        self.office = office
        self.context = context
        self.pass_id = pass_id
        self.initiator = pass_id[0]
        self.retain_graph = retain_graph
        self.create_graph = create_graph
        self.smart = smart
        self.deadline = deadline
        self.state = "marked"
        #: workers that take part, as far as they are known
        self.others: list[str] = []
        #: workers behind this one that have answered, and those that were sent anything
        self.behind: set[str] = set()
        self.downstream: set[str] = set()
        self.sends: dict[SendNode, None] = {}
        self.task: GraphTask | None = None
        self.error: BaseException | None = None
        self.runner: asyncio.Task[None] | None = None
        #: tells the other workers of a commit; on the initiator
        self.verdict: asyncio.Task[list[tuple[str, BaseException]]] | None = None
        self.has_ended = False
        #: the worker whose first gradients wait for their answer, and what goes back with it
        self.asker: str | None = None
        self._held_back: list[tuple[RecvNode, list[Array | None]]] = []
        self._visited: set[Node] = set()
        self._outgoing: dict[asyncio.Task[Any], RecvNode] = {}
        self._waiters: list[asyncio.Future[None]] = []
        self._began = 0.0
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        context.parts[pass_id] = self

    @property
    def is_initiator(self) -> bool:
        """Whether the pass was started here."""
        return self.initiator == self.office.name

    @property
    def is_undecided(self) -> bool:
        """Whether the part may still be given up without asking anybody."""
        return self.state in ("marked", "running")

    def left(self) -> float:
        """Seconds to the deadline."""
        return max(self.deadline - self._loop.time(), 0.001)

    def address(self) -> tuple[bytes, str, int]:
        """What a message about the pass begins with."""
        return (self.context.key, *self.pass_id)

    def expire_at(self, when: float) -> None:
        """Give up, or ask around, at a time of the loop."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = call_at(self.office.endpoint.context, self._loop, when, self._expired)

    def _expired(self) -> None:
        self._timer = None
        if self.is_undecided:
            self.fail(DeadlineError(f"backward in context {self.context.id} did not end in time on {self.office.name}: {self.describe()}"))
        elif self.state == "prepared":
            self.ask_around()

    def describe(self) -> str:
        """What the part waits for."""
        waits: list[str] = []
        if self.task is not None:
            waits += [f"gradients of message {node.edge} that was sent to {node.peer}" for node in self.task.waiting if isinstance(node, SendNode)]
        waits += [f"{node.peer} to take the gradients of message {node.edge}" for node in self._outgoing.values()]
        if not waits:
            return "it was still computing" if self.task is not None else "it was still finding out who takes part"
        more = f" and {len(waits) - 4} more" if len(waits) > 4 else ""
        advice = "" if self.smart else ". In fast mode every remote result has to be used; mode='smart' needs only those the roots depend on"
        return f"it waited for {', '.join(waits[:4])}{more}{advice}"

    # ---------------------------------------------------------------- who takes part

    async def mark(self, starts: Iterable[Node], asker: str | None = None) -> tuple[set[str], list[int]]:
        """Walk from these nodes and let the workers behind every recv node that is reached do the same.

        Args:
            starts: where the roots are, or send nodes that have been marked.
            asker: the worker that asked for this; edges of its own are left to it.

        Returns:
            Names of the workers that take part, this one not included; and edges of the asker that were reached.
        """
        names: set[str] = set()
        back: list[int] = []
        request, address, principal = self.office.request, self.address(), self.context.principal
        while starts:
            by_peer = await self._reach(starts)
            back += by_peer.pop(asker or "", ())
            own = by_peer.pop(self.office.name, ())
            starts = self.take_sends(own, self.office.name)
            self.downstream.update(by_peer)
            left = self.left()
            answers = await together([request(peer, Kind.MARK, (*address, edges), left, principal) for peer, edges in by_peer.items()])
            for peer, answer in zip(by_peer, answers, strict=True):
                if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[0], list) and isinstance(answer[1], list)):
                    raise ProtocolError(f"worker {peer} gave a malformed answer when asked who takes part in a pass", code="mark")
                names.update(answer[0])
                starts += self.take_sends(answer[1], peer)
        return names - {self.office.name}, back

    def take_sends(self, edges: Iterable[Any], peer: str) -> list[Node]:
        """Let send nodes take part; returns those that did not already.

        Raises:
            ProtocolError: there is no such edge to `peer`.
        """
        new: list[Node] = []
        for edge in edges:
            send = send_node(self.context, edge, peer)
            if send not in self.sends:
                self.sends[send] = None
                new.append(send)
        return new

    async def _reach(self, starts: Iterable[Node]) -> dict[str, list[int]]:
        """The edges behind recv nodes that a walk from `starts` reaches for the first time, by worker."""
        by_peer: dict[str, list[int]] = {}
        for steps, node in enumerate(self._walk(starts)):
            if isinstance(node, RecvNode):
                if node.context is not self.context:
                    raise ContextError(
                        f"backward in context {self.context.id} reaches values that came from {node.peer} in another context: each context "
                        "differentiates what was received in it; detach() the values, or make the calls in this context"
                    )
                by_peer.setdefault(node.peer, []).append(node.edge)
            if not (steps + 1) % STRIDE and self._loop.time() - self._began > BUDGET:
                await asyncio.sleep(0)
                self._began = self._loop.time()
        return by_peer

    def _walk(self, starts: Iterable[Node]) -> Iterator[Node]:
        self._began = self._loop.time()
        visited = self._visited
        stack = [node for node in starts if node not in visited]
        visited.update(stack)
        while stack:
            node = stack.pop()
            yield node
            for child in node.next_nodes:
                if child is not None and not child.is_leaf and child not in visited:
                    visited.add(child)
                    stack.append(child)

    # ---------------------------------------------------------------- running

    def start(self, roots: Sequence[tuple[Node, int]] = (), seeds: Sequence[Array] = (), context: contextvars.Context | None = None) -> None:
        """Run this worker's piece of the graph, in a task of its own."""
        self._visited = set()
        self.state = "running"
        self.task = new_graph_task(
            roots,
            seeds,
            keep_graph=self.retain_graph or self.create_graph,
            create_graph=self.create_graph,
            sources=tuple(self.sends),
            slots=self._slot,
            gate=self._gate,
            order=self.context.place_of,
        )
        self.task.part = self
        self.task.on_wait = self.release_held
        self.runner = self._loop.create_task(self._run(self.task), name=f"aiograd:pass-{self.initiator}-{self.pass_id[1]}", context=context)

    async def _run(self, task: GraphTask) -> None:
        try:
            await current_engine().run(task)
        except BaseException as error:
            if self.error is None:
                self.error = error
        finally:
            for sending in self._outgoing:
                sending.cancel()
            if self._outgoing:
                await asyncio.wait(list(self._outgoing))
            self._end("committed" if task.committed else "aborted")

    def _end(self, state: str) -> None:
        if self.has_ended:
            return
        self.has_ended = True
        self.state = state
        self.context.outcomes[self.pass_id] = state
        self.context.parts.pop(self.pass_id, None)
        if self._timer is not None:
            self._timer.cancel()
        self._visited = set()
        self.office.part_ended(self)
        self._changed()

    def _slot(self, node: AccumulateGrad) -> ContextSlot:
        failpoints.reach("bwd.in_compute")
        return self.context.slot(node)

    def send(self, node: RecvNode, grads: Sequence[Array | None]) -> None:
        """Send gradients to the worker that the node's values came from."""
        failpoints.reach("bwd.in_compute")
        if node.peer == self.asker:
            self._held_back.append((node, list(grads)))
        else:
            self._start_sending(node, list(grads))

    def release_held(self) -> None:
        """See Note [Fewer messages]."""
        held, self._held_back = self._held_back, []
        for node, grads in held:
            self._start_sending(node, grads)

    async def answer(self) -> list[Any]:
        """What goes back with the answer to the first gradients, once prepared."""
        self.asker = None
        held, self._held_back = self._held_back, []
        return [await self._bundle(node, grads) for node, grads in held]

    def _start_sending(self, node: RecvNode, grads: list[Array | None]) -> None:
        self.downstream.add(node.peer)
        sending = self._loop.create_task(self._send(node, grads), name=f"aiograd:gradient-{node.edge}")
        self._outgoing[sending] = node
        sending.add_done_callback(self._sent)

    async def _send(self, node: RecvNode, grads: list[Array | None]) -> Any:
        flags = self.retain_graph * RETAIN | self.smart * SMART | self.create_graph * CREATE
        value = (*self.address(), await self._bundle(node, grads), flags, self.others)
        answer = await self.office.request(node.peer, Kind.GRADIENT, value, self.left(), self.context.principal)
        if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[0], list) and isinstance(answer[1], list)):
            raise ProtocolError(f"worker {node.peer} gave a malformed answer to gradients", code="gradient")
        for bundle in answer[1]:
            await self.take(bundle, node.peer)
        return answer[0]

    async def _bundle(self, node: RecvNode, grads: list[Array | None]) -> tuple[int, list[WireTensor | None], int]:
        """Gradients of one edge as they travel: the edge, the gradients, and the edge that they make themselves (0: none)."""
        encoding = self.office.gradient_encoding
        wire: list[WireTensor | None] = []
        recorded: list[Any] = []
        for grad in grads:
            if grad is None:
                wire.append(None)
                continue
            is_recorded = self.create_graph and grad.requires_grad
            if is_recorded:
                recorded.append(grad)
            array = to_array(grad, False)
            if array.__class__ is not np.ndarray:
                array = await on_host(array)
            plain = array.dtype.kind != "f" or array.dtype.itemsize < 4
            wire.append(WireTensor(array, is_recorded, Encoding.PLAIN if plain else encoding))
        return node.edge, wire, self.context.add_send(recorded, node.peer).edge if recorded else 0

    async def take(self, bundle: Any, peer: str) -> None:
        """Gradients have come from `peer`.

        Raises:
            ProtocolError: they are not those of an edge whose gradients this part waits for.
        """
        send, arrays = await self.parse(bundle, peer)
        if self.task is not None and self.error is None:
            self.task.deliver(send, arrays)

    async def parse(self, bundle: Any, peer: str) -> tuple[SendNode, list[Any]]:
        """The send node that gradients are for, and the gradients, each as the node recorded it in forward.

        Raises:
            ProtocolError: they are not what this part waits for.
        """
        if not (isinstance(bundle, tuple) and len(bundle) == 3 and isinstance(bundle[1], list) and bundle[2].__class__ is int):
            raise ProtocolError("malformed gradients", code="gradient")
        edge, grads, recorded_edge = bundle
        send = send_node(self.context, edge, peer)
        if send not in self.sends or (self.task is not None and send not in self.task.waiting):
            raise ProtocolError(f"gradients of message {edge}, which the pass does not wait for", code="edge")
        expected = send.input_metadata
        if len(grads) != len(expected):
            raise ProtocolError(f"{len(grads)} gradients of message {edge}; expected {len(expected)} of them", code="gradient")
        arrived: list[Any] = []
        recorded: list[Any] = []
        for i, (grad, metadata) in enumerate(zip(grads, expected, strict=True)):
            if grad is None or metadata is None:
                arrived.append(None)
                continue
            if not isinstance(grad, WireTensor) or grad.array.shape != metadata.shape or grad.array.dtype != metadata.dtype:
                found = f"{grad.array.dtype} {list(grad.array.shape)}" if isinstance(grad, WireTensor) else type(grad).__name__
                sent = f"{metadata.dtype} {list(metadata.shape)}"
                raise ProtocolError(f"gradient {i} of message {edge} is {found}; what was sent in forward was {sent}", code="gradient")
            value: Any = grad.array if metadata.device == "cpu" else await on_device(grad.array, metadata.device)
            if self.create_graph:
                value = make(value)
                if grad.requires_grad:
                    recorded.append(value)
            arrived.append(value)
        if recorded:
            if recorded_edge <= 0 or recorded_edge in self.context.recv_nodes:
                raise ProtocolError(f"gradients of message {edge} claim gradients of their own without an edge", code="edge")
            self.context.add_recv(recorded, recorded_edge, peer)
        return send, arrived

    def _sent(self, sending: asyncio.Task[Any]) -> None:
        del self._outgoing[sending]
        if sending.cancelled():
            error: BaseException | None = PassAbortedError("sending gradients was cancelled")
        else:
            error = sending.exception()
            if error is None:
                self.behind.update(sending.result())
        if error is not None:
            self.fail(error)
        self._changed()

    async def _gate(self) -> None:
        """Awaited by the engine when everything here is staged; returns when it is to be committed."""
        failpoints.reach("bwd.after_accumulate")
        failpoints.reach("commit.before_prepare")
        if self._outgoing:
            self.release_held()
        while self._outgoing and self.error is None:
            await self._change()
        if self.error is not None and self.office.safeguards.fence_late_results:
            raise self.error
        if not self.office.safeguards.atomic_commit and not self.is_initiator:
            self.state = "committing"
            self._changed()
            return
        if self.is_initiator:
            self.state = "committing"
            self.context.outcomes[self.pass_id] = "committed"
            others = sorted({*self.others, *self.behind} - {self.office.name})
            if others:
                self.verdict = self._loop.create_task(self._tell(others), name=f"aiograd:commit-{self.pass_id[1]}")
                self.office.keep(_outlive(self.verdict), "commit")
            return
        self.state = "prepared"
        failpoints.reach("commit.after_prepare")
        self._changed()
        while self.state == "prepared":
            await self._change()
        if self.state != "committing":
            raise self.error or PassAbortedError("the pass was aborted")

    def commit(self) -> bool:
        """The initiator says that everybody is prepared. Returns whether this part was."""
        if self.state == "prepared":
            self.state = "committing"
            self._changed()
        return self.state in ("committing", "committed")

    def fail(self, error: BaseException) -> None:
        """Give the part up, unless it has been decided that it commits."""
        if self.state in ("committing", "committed", "aborted") or self.error is not None:
            return
        self.error = error
        if self.task is None:
            self._end("aborted")
            return
        if self.state == "prepared":
            self.state = "aborting"
        if self.office.safeguards.fence_late_results:
            self.task.intrude(error)
        self._changed()

    # ---------------------------------------------------------------- waiting

    def _changed(self) -> None:
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
        if self.error is not None and self.state != "committed":
            await self.wait_ended()
            raise self.error

    async def wait_ended(self) -> None:
        """Wait until the part is over, however it ended; hooks and callbacks have run."""
        while not self.has_ended:
            await self._change()

    # ---------------------------------------------------------------- the decision

    async def _tell(self, others: Sequence[str]) -> list[tuple[str, BaseException]]:
        """Tell the other workers of the decision; returns those that could not be told, or failed after their commit."""
        if self.task is None or not self.task.committed:  # the commit itself failed
            await self.tell_abort(others, "its initiator could not commit")
            return []
        failpoints.reach("commit.half")
        outcomes = await asyncio.gather(*(self._tell_commit(name) for name in others))
        return [(name, error) for name, error in zip(others, outcomes, strict=True) if error is not None]

    async def _tell_commit(self, name: str) -> BaseException | None:
        heartbeat = self.office.limits.heartbeat
        deadline = self._loop.time() + max(self.left(), 3 * heartbeat)
        tries = 0
        while True:
            try:
                left = max(deadline - self._loop.time(), 0.001)
                await self.office.request(name, Kind.COMMIT, self.address(), left, self.context.principal)
                return None
            except WorkerLostError as error:
                tries += 1
                if error.is_gone or tries > 2 or self._loop.time() + heartbeat > deadline:
                    return error
                await asyncio.sleep(heartbeat)
            except Exception as error:
                return error

    async def tell_abort(self, others: Iterable[str], reason: str) -> None:
        """Tell other workers that the pass is over, and wait a little for their answers: their counters are then back to zero."""
        names = sorted({*others} - {self.office.name})
        if not names:
            return
        patience = self.office.limits.silence
        value = (*self.address(), reason)
        await asyncio.gather(
            *(self.office.request(name, Kind.ABORT, value, patience, self.context.principal) for name in names), return_exceptions=True
        )

    def ask_around(self) -> None:
        """See Note [In doubt]."""
        if self.state == "prepared":
            self.office.keep(self._resolve(), "outcome")

    async def _resolve(self) -> None:
        limits = self.office.limits
        until = self._loop.time() + limits.lease_seconds
        while self.state == "prepared" and self._loop.time() < until:
            for name in (self.initiator, *sorted({*self.others, *self.context.known_workers} - {self.initiator, self.office.name})):
                try:
                    outcome = await self.office.request(name, Kind.OUTCOME, self.address(), limits.silence, self.context.principal)
                except DistributedError:
                    continue
                if self.state != "prepared":
                    return
                if outcome == "committed":
                    self.commit()
                    return
                if outcome == "aborted" or (outcome == "unknown" and name == self.initiator):
                    self.fail(PassAbortedError(f"the pass was aborted: {name} says so"))
                    return
            await asyncio.sleep(limits.heartbeat)
        if self.state == "prepared":
            self.context.in_doubt.add(self.pass_id)
            self.fail(CommitUnknown(f"nobody could tell whether the pass was committed before the lease of context {self.context.id} ended"))


def send_node(context: Context, edge: Any, peer: str) -> SendNode:
    """The send node of an edge to `peer`.

    Raises:
        ProtocolError: there is none.
    """
    send = context.send_nodes.get(edge) if edge.__class__ is int else None
    if send is None or send.peer != peer:
        raise ProtocolError(f"Could not find send function for autograd message id: {str(edge)[:20]}", code="edge")
    return send


async def _outlive(task: asyncio.Task[Any]) -> None:
    """Keep a task alive and known to the worker."""
    await asyncio.wait([task])


async def on_host(array: Array) -> np.ndarray[Any, Any]:
    """The values of a device array, copied on its device's thread."""
    if isinstance(array, (np.ndarray, np.generic)):  # the gradient of a 0-d value may be a scalar of numpy
        return np.asarray(array)
    await array.__aiograd_wait__()
    device = devices.device(devices.device_name_of(array))
    if device is None:
        return np.asarray(array)
    copied: np.ndarray[Any, Any] = await asyncio.wrap_future(device.submit(functools.partial(device.to_host, array)))
    return copied


async def on_device(array: np.ndarray[Any, Any], name: str) -> Array:
    """A copy of a host array on a device."""
    device = devices.device(name)
    if device is None:
        return array
    return await asyncio.wrap_future(device.submit(functools.partial(device.from_host, array)))


async def together(coroutines: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Results of coroutines that run at the same time; the first error cancels the others, waits for them and is raised."""
    if not coroutines:
        return []
    if len(coroutines) == 1:
        return [await coroutines[0]]
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task in done:
                task.result()  # raises the first error there is
        return [task.result() for task in tasks]
    finally:
        pending = [task for task in tasks if not task.done()]
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending)
        for task in tasks:
            if not task.cancelled():
                task.exception()

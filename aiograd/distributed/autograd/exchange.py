"""GradientExchange: the gradients that one participant of a pass sends to other workers and receives from them.

Note [Termination]
    The answer to the first gradients that reach a worker is held back until it is prepared; later ones are answered at once. So the
    workers form a tree with the initiator as its root, for any cycles of the graph among them, and an answered tree is a prepared one.
    (Dijkstra and Scholten, Termination detection for diffusing computations, 1980.)

Note [Fewer messages]
    Gradients for the worker whose first gradients wait for an answer are sent with that answer if this participant waits for nothing else. They are
    held back only until the engine pauses or waits, so they arrive no later than the answer.

Note [Reports of an abort]
    When a rule fails on a worker, its error is passed up the tree. A worker that sends later gradients to a participant that has been aborted by then
    only learns that, not the reason. So this participant does not fail with such an answer as long as other answers are outstanding, one
    of which brings the reason; but it waits no longer than it takes to notice a lost worker.

Note [Passes that record a graph]
    With ``create_graph`` gradients are Tensors, and a message of gradients is one more edge of the graph: a SendNode on the sending worker,
    a RecvNode on the receiving one. So second derivatives need nothing else. A pass has a place in the order of recording, like a call (see
    Note [Places] in `context`), which is sent with its gradients; nodes that other workers record for it are placed there. A pass that fails
    removes its edges again.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from aiograd.coordination.device_copies import on_device, on_host
from aiograd.distributed.autograd.discovery import send_node
from aiograd.distributed.autograd.nodes import RecvNode, SendNode
from aiograd.distributed.autograd.pass_record import ParticipantHelper, PassRecord
from aiograd.distributed.messages.passes import ANOMALY, CREATE, NAN, RETAIN, SELECTIVE, SMART, Bundle, Gradient, GradientsTaken
from aiograd.distributed.observing import observe, trace_context
from aiograd.distributed.rpc.codec import WireTensor
from aiograd.distributed.rpc.encodings import Encoding
from aiograd.distributed.rpc.timers import call_at
from aiograd.errors import PassAbortedError, ProtocolError
from aiograd.graph.boundary import to_array
from aiograd.running.types import Array
from aiograd.tensors.core import make
from aiograd.transaction.tree import witnesses

#: gradients to be sent: the recv node at which they leave, the gradients, and the edge that the message itself makes (0: none)
Outgoing: TypeAlias = tuple[RecvNode, list[Array | None], int]


class GradientExchange(ParticipantHelper):
    """The gradients that one participant sends and receives.

    Args:
        participant: the worker's record of the pass.
    """

    __slots__ = ("asker", "outgoing", "_loop", "_held_back", "_report", "_patience", "_sent_edges", "_received_edges")

    def __init__(self, participant: PassRecord) -> None:
        super().__init__(participant)
        #: the worker that waits for the answer to its first gradients
        self.asker: str | None = None
        #: gradients that have not been answered, by the task that sends them
        self.outgoing: dict[asyncio.Task[Any], RecvNode] = {}
        self._loop = asyncio.get_running_loop()
        #: gradients to be sent with that answer
        self._held_back: list[Outgoing] = []
        #: edges of gradients that this pass has recorded
        self._sent_edges: list[int] = []
        self._received_edges: list[int] = []
        #: an answer that tells only of an abort, without its reason; see Note [Reports of an abort]
        self._report: PassAbortedError | None = None
        self._patience: asyncio.TimerHandle | None = None

    # ---------------------------------------------------------------- sending

    def send(self, node: RecvNode, grads: Sequence[Array | None]) -> None:
        """Send gradients to the worker that the node's values came from."""
        outgoing = node, list(grads), self._record(node, grads) if self._participant.create_graph else 0
        if node.peer == self.asker:
            self._held_back.append(outgoing)
        else:
            self._start(outgoing)

    def release_held(self) -> None:
        """Send the gradients that were held back; see Note [Fewer messages]."""
        held, self._held_back = self._held_back, []
        for outgoing in held:
            self._start(outgoing)

    async def answer(self) -> list[Bundle]:
        """The gradients to be sent with the answer to the first gradients, once the participant is prepared or has left."""
        self.asker = None
        held, self._held_back = self._held_back, []
        return [await self._bundle(*outgoing) for outgoing in held]

    async def stop(self) -> None:
        """Cancel all requests that wait for an answer; cancelling a request tells its receiver."""
        if self._patience is not None:
            self._patience.cancel()
        for sending in self.outgoing:
            sending.cancel()
        if self.outgoing:
            await asyncio.wait(list(self.outgoing))

    def take_back(self) -> None:
        """Remove the edges that the failed pass has recorded."""
        context = self._participant.context
        for edge in self._sent_edges:
            context.send_nodes.pop(edge, None)
        for edge in self._received_edges:
            context.recv_nodes.pop(edge, None)

    def _record(self, node: RecvNode, grads: Sequence[Any]) -> int:
        """Make the SendNode of a message of gradients, see Note [Passes that record a graph]; returns its edge, 0 if no gradient requires grad."""
        participant = self._participant
        recorded = [grad for grad in grads if grad is not None and grad.requires_grad]
        if not recorded or participant.task is None:
            return 0
        send = participant.context.add_send(recorded, node.peer)
        self._sent_edges.append(send.edge)
        participant.task.collect(send)
        return send.edge

    def _start(self, outgoing: Outgoing) -> None:
        participant, node = self._participant, outgoing[0]
        participant.downstream.add(node.peer)
        sending = self._loop.create_task(self._send(outgoing), name=f"aiograd:gradient-{node.edge}")
        self.outgoing[sending] = node
        sending.add_done_callback(functools.partial(self._sent, participant))  # the participant is there until then

    async def _send(self, outgoing: Outgoing) -> list[str]:
        participant, node = self._participant, outgoing[0]
        flags = participant.retain_graph * RETAIN | participant.smart * SMART | participant.create_graph * CREATE
        flags |= participant.is_selective * SELECTIVE
        if participant.task is not None and participant.task.anomaly is not None:
            flags |= ANOMALY | participant.task.anomaly * NAN
        profiler = None if participant.task is None else participant.task.profiler
        with observe(participant.core.meter, "send", "gradients", node.peer, profiler) as seen:
            seen.nbytes = sum(grad.nbytes for grad in outgoing[1] if isinstance(grad, np.ndarray))
            gradient = Gradient(
                *participant.address(), await self._bundle(*outgoing), flags, witnesses(participant.others, node.peer),
                participant.predicted.get(node.peer),
                participant.place if participant.create_graph else None, trace_context(profiler),
            )  # fmt: skip
            answer: GradientsTaken = await participant.core.ask(node.peer, gradient, participant.left(), participant.context.principal)
        if answer.has_left:
            participant.idle.add(node.peer)
        for bundle in answer.bundles:
            if participant.error is not None:
                break  # it is being wound up, and waits for nothing
            send, arrays = await self.accept(bundle, node.peer)
            if participant.task is not None:
                participant.task.deliver(send, arrays)
        return answer.names

    def _sent(self, participant: PassRecord, sending: asyncio.Task[Any]) -> None:
        del self.outgoing[sending]
        error = PassAbortedError("sending gradients was cancelled") if sending.cancelled() else sending.exception()
        if error is None:
            participant.behind.update(sending.result())
        elif isinstance(error, PassAbortedError):
            self._report = self._report or error
        else:
            participant.fail(error)
        if self._report is not None:
            self._consider(self._report)
        participant.changed()

    def _consider(self, report: PassAbortedError) -> None:
        if not self.outgoing:
            self._participant.fail(report)
        elif self._patience is None and self._participant.error is None:
            core = self._participant.core
            self._patience = call_at(core.endpoint.context, self._loop, self._loop.time() + core.limits.silence, self._participant.fail, report)

    async def _bundle(self, node: RecvNode, grads: list[Array | None], recorded_edge: int) -> Bundle:
        """The wire form of the gradients of one edge."""
        encoding = self._participant.core.gradient_encoding
        wire: list[WireTensor | None] = []
        for grad in grads:
            if grad is None:
                wire.append(None)
                continue
            is_recorded = recorded_edge > 0 and grad.requires_grad
            array = to_array(grad, False)
            if array.__class__ is not np.ndarray:
                array = await on_host(array)
            plain = array.dtype.kind != "f" or array.dtype.itemsize < 4
            wire.append(WireTensor(array, is_recorded, Encoding.PLAIN if plain else encoding))
        return Bundle(node.edge, wire, recorded_edge)

    # ---------------------------------------------------------------- receiving

    async def accept(self, bundle: Bundle, peer: str) -> tuple[SendNode, list[Any]]:
        """The send node that gradients are for, and the gradients, each as the node recorded it in forward.

        Raises:
            ProtocolError: this participant does not wait for such gradients.
        """
        participant = self._participant
        edge, grads, recorded_edge = bundle.edge, bundle.gradients, bundle.recorded_edge
        send = send_node(participant.context, edge, peer)
        if send not in participant.sends or (participant.task is not None and send not in participant.task.waiting):
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
            if grad.array.shape != metadata.shape or grad.array.dtype != metadata.dtype:
                found = f"{grad.array.dtype} {list(grad.array.shape)}"
                sent = f"{metadata.dtype} {list(metadata.shape)}"
                raise ProtocolError(f"gradient {i} of message {edge} is {found}; what was sent in forward was {sent}", code="gradient")
            value: Any = grad.array if metadata.device == "cpu" else await on_device(grad.array, metadata.device)
            if participant.create_graph:
                value = make(value)
                if grad.requires_grad:
                    recorded.append(value)
            arrived.append(value)
        if recorded:
            if recorded_edge <= 0 or recorded_edge in participant.context.recv_nodes:
                raise ProtocolError(f"gradients of message {edge} claim gradients of their own without an edge", code="edge")
            participant.context.add_recv(recorded, recorded_edge, peer)
            self._received_edges.append(recorded_edge)
        return send, arrived

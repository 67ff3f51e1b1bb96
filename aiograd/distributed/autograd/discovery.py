"""EdgeDiscovery: finds the edges that the roots of a pass depend on, before gradients flow.

The initiator walks its graph from the roots. Where it reaches a recv node, the worker behind it goes on from the send node of the same
edge, and so on; a worker answers once everything behind it has been walked. So no worker waits for the gradient of a remote result that
the roots do not depend on.

Note [Edges of the asker]
    Most edges lead back to the worker's caller. So edges of the worker that asked are returned in the answer instead of
    asking it in turn.

Note [Predicted edges]
    A worker that answers a call knows the nodes that its result depends on. If these are few (`PREDICTED_NODES` nodes) and lead to other workers only
    through values that came from the caller, the answer names these edges. A pass whose roots depend on nothing but such results needs no
    questions: the initiator walks its own graph alone, and the gradients tell each worker its edges that take part. A worker with a graph that has
    changed since its answer refuses.

Note [Discovery that fails]
    Discovery itself does not tell the workers that it has asked already: each worker tells them when the pass is aborted there
    (see `PassParticipant.fail`), and asks no others any more.

Note [Discovery from the wanted inputs]
    A pass that wants some inputs of its initiator walks once more, the other way: from those inputs up to the marked send nodes that lead to
    them, on from the recv nodes of these edges, and so on. Only edges found in both directions carry gradients. A worker without such
    edges does nothing, and the pass ends there with the commit.

Source: PyTorch RFC 23110 ("SMART mode"), which sends the whole lineage with every call instead; discovery costs no bytes in forward.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any

from aiograd.distributed.autograd.context import Context
from aiograd.distributed.autograd.nodes import RecvNode, SendNode
from aiograd.distributed.autograd.pass_record import ParticipantHelper, PassRecord
from aiograd.distributed.messages.passes import DOWN, UP, Mark, Marked
from aiograd.engine.run.together import together
from aiograd.errors import ContextError, GraphError, ProtocolError, WorkerLostError
from aiograd.graph.edge_edits import EDGE_EDITS
from aiograd.graph.node import Node

#: the number of nodes that discovery visits between two readings of the clock
STRIDE = 512
#: seconds that discovery may block the loop
BUDGET = 0.0015
#: nodes that a worker looks at before it answers a call, and edges of one worker that gradients name, at most; see Note [Predicted edges]
PREDICTED_NODES = 128
PREDICTED_EDGES = 32


class EdgeDiscovery(ParticipantHelper):
    """Edge discovery on one worker, in one pass.

    Args:
        participant: the worker's record of the pass.
    """

    __slots__ = ("leading", "sends", "_visited", "_parents", "_began", "_time")

    def __init__(self, participant: PassRecord) -> None:
        super().__init__(participant)
        #: recv and send nodes that lead to the wanted inputs; see Note [Discovery from the wanted inputs]
        self.leading: dict[RecvNode, None] = {}
        self.sends: dict[SendNode, None] = {}
        #: visited nodes, in the order of discovery, so that a simulated run can be repeated
        self._visited: dict[Node, None] = {}
        #: node -> its parents among the visited nodes, for the way upwards; entries are removed once they have been used
        self._parents: dict[Node, list[Node]] | None = None
        self._began = 0.0
        self._time = asyncio.get_running_loop().time

    def forget(self) -> None:
        """Drop the references to the graph after discovery."""
        self._visited = {}
        self._parents = None
        self.leading, self.sends = {}, {}

    async def predict(self, starts: Iterable[Node]) -> set[str] | None:
        """Do the work of `mark` without questions to other workers, on the initiator; see Note [Predicted edges].

        Cancelling stops it.

        Returns:
            Names of the workers that take part, this one not included; None if others have to be asked, and nothing is marked then.

        Raises:
            ContextError: as for `mark`.
        """
        participant = self._participant
        context, here, predicted = participant.context, participant.core.name, participant.predicted
        while starts and not context.is_blind:
            by_peer = await self._reach(starts)
            starts = self.take_sends(by_peer.pop(here, ()), here)
            for peer, edges in by_peer.items():
                known = predicted.setdefault(peer, [])
                known += edges
                for edge in edges:
                    starts += self.take_sends(context.recv_nodes[edge].behind or (), peer)
                context.is_blind = context.is_blind or len(known) > PREDICTED_EDGES
        if not context.is_blind:
            return set(predicted)
        predicted.clear()
        participant.sends.clear()
        self._visited = {}
        return None

    async def mark(self, starts: Iterable[Node], asker: str | None = None) -> tuple[set[str], list[int]]:
        """Walk from these nodes and let the workers behind every recv node that is reached do the same.

        Cancelling it stops the questions that are under way.

        Args:
            starts: the nodes of the roots, or send nodes that have been marked.
            asker: the worker that asked for this; edges of its own are left to it.

        Returns:
            Names of the workers that take part, this one not included; and edges of the asker that were reached.

        Raises:
            The error with which the pass has failed here meanwhile; ContextError: the roots depend on another context; errors of other workers.
        """
        return await self._spread(starts, asker, DOWN if self._participant.is_selective else None, self._reach, self.take_sends)

    async def rise(self, starts: Iterable[Node], asker: str | None = None) -> list[int]:
        """Walk up from these nodes, and let the workers behind every send node that leads to them do the same.

        Cancelling it stops the questions that are under way.

        Args:
            starts: the wanted inputs, or recv nodes that lead to them.
            asker: as for `mark`.

        Returns:
            Edges of the asker that lead to them.

        Raises:
            The errors of `mark`.
        """
        return (await self._spread(starts, asker, UP, self._above, self.take_recvs))[1]

    async def _spread(
        self,
        starts: Iterable[Node],
        asker: str | None,
        direction: int | None,
        find: Callable[[Iterable[Node]], Coroutine[Any, Any, dict[str, list[int]]]],
        take: Callable[[Iterable[Any], str], list[Node]],
    ) -> tuple[set[str], list[int]]:
        participant = self._participant
        names: set[str] = set()
        back: list[int] = []
        here, ask, address, principal = participant.core.name, participant.core.ask, participant.address(), participant.context.principal
        while starts:
            by_peer = await find(starts)
            if participant.error is not None:
                raise participant.error
            back += by_peer.pop(asker or "", ())
            own = by_peer.pop(here, ())
            starts = take(own, here)
            participant.downstream.update(by_peer)
            left = participant.left()
            asked = [ask(peer, Mark(*address, edges, direction), left, principal) for peer, edges in by_peer.items()]
            answers: list[Marked] = await together(asked)
            if participant.error is not None:  # the context may have been released meanwhile, and its edges with it
                raise participant.error
            for peer, answer in zip(by_peer, answers, strict=True):
                names.update(answer.names)
                starts += take(answer.edges, peer)
        return names - {here}, back

    def take_sends(self, edges: Iterable[int], peer: str) -> list[Node]:
        """Add send nodes to the pass; returns the ones that were not in it.

        Raises:
            ProtocolError: there is no such edge to `peer`.
        """
        sends = self._participant.sends
        new: list[Node] = []
        for edge in edges:
            send = send_node(self._participant.context, edge, peer)
            if send not in sends:
                sends[send] = None
                new.append(send)
        return new

    def take_recvs(self, edges: Iterable[int], peer: str) -> list[Node]:
        """Let recv nodes that were reached send gradients; returns the ones that did not already.

        Raises:
            ProtocolError: there is no such edge from `peer`.
        """
        new: list[Node] = []
        for edge in edges:
            recv = self._participant.context.recv_nodes.get(edge)
            if recv is None or recv.peer != peer or recv not in self._visited:
                raise ProtocolError(f"the pass does not depend on message {edge}", code="edge")
            if recv not in self.leading:
                self.leading[recv] = None
                new.append(recv)
        return new

    async def _above(self, starts: Iterable[Node]) -> dict[str, list[int]]:
        """The edges of marked send nodes that lead to `starts` and have not been found before, by worker."""
        self._began = self._time()
        if self._parents is None:
            parents: dict[Node, list[Node]] = {}
            for steps, node in enumerate(list(self._visited), 1):
                for child in node.next_nodes:
                    if child is not None:
                        parents.setdefault(child, []).append(node)
                if not steps % STRIDE:
                    await self._rest()
            self._parents = parents
        by_peer: dict[str, list[int]] = {}
        stack = list(starts)
        steps = 0
        while stack and self._parents is not None:  # None once the pass has been given up
            node = stack.pop()
            if isinstance(node, SendNode) and node in self._participant.sends and node not in self.sends:
                self.sends[node] = None
                by_peer.setdefault(node.peer, []).append(node.edge)
            stack += self._parents.pop(node, ())
            steps += 1
            if not steps % STRIDE:
                await self._rest()
        return by_peer

    async def _rest(self) -> None:
        if self._time() - self._began > BUDGET:
            await asyncio.sleep(0)
            self._began = self._time()

    async def _reach(self, starts: Iterable[Node]) -> dict[str, list[int]]:
        """The edges behind recv nodes that are reached from `starts` for the first time, by worker."""
        context, crossing = self._participant.context, self._participant.crossing
        by_peer: dict[str, list[int]] = {}
        for steps, node in enumerate(self._nodes(starts), 1):
            if isinstance(node, RecvNode):
                if node.context is not context:
                    if crossing is not None and not await crossing.may_lead(node):
                        continue
                    raise ContextError(
                        f"backward in context {context.id} reaches values that came from {node.peer} in another context: each context "
                        "differentiates what was received in it; detach() the values, or make the calls in this context"
                    )
                by_peer.setdefault(node.peer, []).append(node.edge)
            if not steps % STRIDE:
                await self._rest()
        return by_peer

    def _nodes(self, starts: Iterable[Node]) -> Iterator[Node]:
        self._began = self._time()
        visited = self._visited
        stack = [node for node in starts if node not in visited]
        visited.update(dict.fromkeys(stack))
        while stack:
            node = stack.pop()
            yield node
            for child in node.next_nodes:
                if child is not None and not child.is_leaf and child not in visited:
                    visited[child] = None
                    stack.append(child)


def predict_edges(send: SendNode, context: Context) -> list[int] | None:
    """The edges of its receiver that are all that is behind a send node; None if that is more, or not known at once. See Note [Predicted edges]."""
    stack: list[Node] = [send]
    visited: set[Node] = set()
    edges: list[int] = []
    while stack:
        for child in stack.pop().next_nodes:
            if child is None or child.is_leaf or child in visited:
                continue
            if isinstance(child, RecvNode):
                if child.peer != send.peer or child.context is not context:
                    return None
                edges.append(child.edge)
            visited.add(child)
            if len(visited) > PREDICTED_NODES:
                return None
            stack.append(child)
    return edges


def check_predicted(send: SendNode, context: Context) -> None:
    """Check that the graph behind a send node is the one that its receiver was told of.

    Raises:
        ProtocolError: it was told nothing. GraphError: the graph has been changed since.
    """
    if send.behind is None:
        raise ProtocolError(f"gradients of message {send.edge} without edge discovery, for which nothing was said of it", code="edge")
    if send.edits != EDGE_EDITS.count and predict_edges(send, context) != send.behind:
        raise GraphError(
            f"the graph behind message {send.edge} leads elsewhere than when it was sent to {send.peer}: make changes of edges (set_next_edge) on "
            f"{context.here} before values are returned"
        )


def send_node(context: Context, edge: int, peer: str) -> SendNode:
    """The send node of an edge to `peer`.

    Raises:
        WorkerLostError: it was made before this worker was restarted. ProtocolError: there is no such edge.
    """
    if not context.has_made(edge):
        raise WorkerLostError(
            f"worker {context.here!r} was lost (edge discovery): it has not sent message {edge} of context {context.id} since it was started, so its "
            "part of the graph is gone; run forward again, in another context",
            worker=context.here, stage="edge discovery",
        )  # fmt: skip
    send = context.send_nodes.get(edge)
    if send is None or send.peer != peer:
        raise ProtocolError(f"Could not find send function for autograd message id: {edge}", code="edge")
    return send

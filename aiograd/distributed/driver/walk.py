"""Walk: finds out which edges the roots of a pass depend on, before any gradient flows.

The initiator walks its graph from the roots. Where that reaches a recv node, the worker behind it goes on from the send node of the same
edge, and so on; the answers come back once everything behind them is known. So a remote result that is not used, or not for these roots,
is nothing that anybody waits for.

Note [Edges of the asker]
    Most edges lead back to where a worker was called from. So edges of the worker that asked are handed back in the answer instead of
    asking it in turn.

Note [A walk that fails]
    Who has been asked already does not hear of it from the walk: each worker tells those that it has asked when its own part is given up
    (see `Part.fail`), and asks nobody any more.

Source: PyTorch RFC 23110 ("SMART mode"), which sends the whole lineage with every call instead; the walk costs no bytes in forward.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from aiograd.distributed.context import Context
from aiograd.distributed.kinds import Kind
from aiograd.distributed.nodes import RecvNode, SendNode
from aiograd.errors import ContextError, ProtocolError
from aiograd.graph.node import Node

if TYPE_CHECKING:
    from aiograd.distributed.driver.part import Part

#: nodes that a walk visits between two looks at the clock
STRIDE = 512
#: seconds that a walk may hold the loop
BUDGET = 0.0015


class Walk:
    """One worker's piece of the walk of one pass.

    Args:
        part: of that worker.
    """

    __slots__ = ("_part", "_visited", "_began", "_time")

    def __init__(self, part: Part) -> None:
        self._part = part
        self._visited: set[Node] = set()
        self._began = 0.0
        self._time = asyncio.get_running_loop().time

    def forget(self) -> None:
        """The walk is over: let go of the graph."""
        self._visited = set()

    async def mark(self, starts: Iterable[Node], asker: str | None = None) -> tuple[set[str], list[int]]:
        """Walk from these nodes and let the workers behind every recv node that is reached do the same.

        Cancelling it stops the questions that are under way.

        Args:
            starts: where the roots are, or send nodes that have been marked.
            asker: the worker that asked for this; edges of its own are left to it.

        Returns:
            Names of the workers that take part, this one not included; and edges of the asker that were reached.

        Raises:
            What the part has been given up with meanwhile; ContextError: the roots depend on another context; what other workers raise.
        """
        part = self._part
        names: set[str] = set()
        back: list[int] = []
        here, request, address, principal = part.office.name, part.office.request, part.address(), part.context.principal
        while starts:
            by_peer = await self._reach(starts)
            if part.error is not None:
                raise part.error
            back += by_peer.pop(asker or "", ())
            own = by_peer.pop(here, ())
            starts = self.take_sends(own, here)
            part.downstream.update(by_peer)
            left = part.left()
            answers = await together([request(peer, Kind.MARK, (*address, edges), left, principal) for peer, edges in by_peer.items()])
            for peer, answer in zip(by_peer, answers, strict=True):
                if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[0], list) and isinstance(answer[1], list)):
                    raise ProtocolError(f"worker {peer} gave a malformed answer when asked who takes part in a pass", code="mark")
                names.update(answer[0])
                starts += self.take_sends(answer[1], peer)
        return names - {here}, back

    def take_sends(self, edges: Iterable[Any], peer: str) -> list[Node]:
        """Let send nodes take part; returns those that did not already.

        Raises:
            ProtocolError: there is no such edge to `peer`.
        """
        sends = self._part.sends
        new: list[Node] = []
        for edge in edges:
            send = send_node(self._part.context, edge, peer)
            if send not in sends:
                sends[send] = None
                new.append(send)
        return new

    async def _reach(self, starts: Iterable[Node]) -> dict[str, list[int]]:
        """The edges behind recv nodes that a walk from `starts` reaches for the first time, by worker."""
        context = self._part.context
        by_peer: dict[str, list[int]] = {}
        for steps, node in enumerate(self._nodes(starts)):
            if isinstance(node, RecvNode):
                if node.context is not context:
                    raise ContextError(
                        f"backward in context {context.id} reaches values that came from {node.peer} in another context: each context "
                        "differentiates what was received in it; detach() the values, or make the calls in this context"
                    )
                by_peer.setdefault(node.peer, []).append(node.edge)
            if not (steps + 1) % STRIDE and self._time() - self._began > BUDGET:
                await asyncio.sleep(0)
                self._began = self._time()
        return by_peer

    def _nodes(self, starts: Iterable[Node]) -> Iterator[Node]:
        self._began = self._time()
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


def send_node(context: Context, edge: Any, peer: str) -> SendNode:
    """The send node of an edge to `peer`.

    Raises:
        ProtocolError: there is none.
    """
    send = context.send_nodes.get(edge) if edge.__class__ is int else None
    if send is None or send.peer != peer:
        raise ProtocolError(f"Could not find send function for autograd message id: {str(edge)[:20]}", code="edge")
    return send


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

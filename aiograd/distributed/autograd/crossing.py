"""Crossing: finds out if a pass that wants only some inputs has to go through other workers.

At a recv node the graph of this worker ends and another worker's goes on, which may come back to this worker at a send node.
So recv nodes of a context matter to a pass if one of the send nodes of the context leads to a wanted input; the distributed
pass itself finds out which of them do (see `discovery`). If none matters, the pass stays local, and no message is sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable

from aiograd.distributed.autograd.context import Context
from aiograd.distributed.autograd.nodes import RecvNode
from aiograd.engine.graph_task import GraphTask
from aiograd.engine.selection import Selection
from aiograd.errors import ContextError, ContextReleasedError
from aiograd.graph.node import Node

#: nodes that a walk visits between two turns for the loop
STRIDE = 2048


class Crossing:
    """Decides which recv nodes may lead to the wanted inputs of a pass.

    Args:
        task: the pass.
    """

    def __init__(self, task: GraphTask) -> None:
        self._roots = [node for node, _ in task.roots]
        self._wanted = {node for node, _ in task.plan.inputs} if isinstance(task.plan, Selection) else set()
        #: context -> True if one of its send nodes leads to a wanted input
        self._leads: dict[Context, bool] = {}
        self._around: set[Node] | None = None

    async def may_lead(self, node: RecvNode) -> bool:
        """True if the worker that a recv node's values came from may lead back to a wanted input.

        Raises:
            ContextReleasedError: this cannot be known any more.
        """
        context: Context | None = node.context
        if context is not None and not context.is_released:
            if context not in self._leads:
                self._leads[context] = not self._wanted.isdisjoint(await _reached(context.send_nodes.values()))
            return self._leads[context]
        if context is not None and not context.had_sends:
            return False
        if len(self._wanted) == 1 and not await self._is_around(node):
            return False  # it comes after the only input, so it cannot lead to it
        raise ContextReleasedError(
            f"differentiating values that came from {node.peer}: what of the wanted inputs they depend on is not known, since their autograd context "
            "has been released. Do it inside the `async with worker.context()` block in which the call was made, or detach() the values."
        )

    async def _is_around(self, node: RecvNode) -> bool:
        """True if the roots lead to a node without going through an input."""
        if self._around is None:
            self._around = await _reached(self._roots, self._wanted)
        return node in self._around and node not in self._wanted

    async def check_none(self, nodes: Iterable[Node]) -> None:
        """Raise if the roots lead to one of these recv nodes without going through an input."""
        for node in nodes:
            if isinstance(node, RecvNode) and await self._is_around(node):
                raise ContextError(
                    f"backward in halves reaches values that came from {node.peer}: gradients reach other workers by `await ctx.backward(loss)` of "
                    "their context only, and a pipeline has no context. Let the other worker's module be a stage of the pipeline itself."
                )


async def crossings(task: GraphTask) -> list[RecvNode]:
    """The recv nodes that a local pass has met and has to go through.

    Raises:
        ContextReleasedError: this cannot be known any more. ContextError: passes of this kind cannot go through other workers, or the recv nodes
            belong to several contexts.
    """
    crossing = Crossing(task)
    if not task.plan.may_cross:
        await crossing.check_none(task.plan.crossings)
        return []
    found = [node for node in task.plan.crossings if isinstance(node, RecvNode) and await crossing.may_lead(node)]
    for node in found:
        if node.context is not found[0].context:
            raise ContextError(
                f"a pass reaches values that came from {found[0].peer} and from {node.peer} in two contexts: each context differentiates what was "
                "received in it; detach() the values of one, or make the calls in one context"
            )
    return found


async def _reached(starts: Iterable[Node], stop: Collection[Node] = ()) -> set[Node]:
    """The nodes that a walk from `starts` reaches; it does not go on from nodes of `stop`."""
    stack = list(starts)
    reached = set(stack)
    steps = 0
    while stack:
        node = stack.pop()
        if node not in stop:
            for child in node.next_nodes:
                if child is not None and child not in reached:
                    reached.add(child)
                    stack.append(child)
        steps += 1
        if not steps % STRIDE:
            await asyncio.sleep(0)
    return reached

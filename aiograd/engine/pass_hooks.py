"""PassHooks: callbacks of a larger pass, called at certain points of a GraphTask that is part of it.

A backward pass over several workers is one GraphTask on each of them; a stage of a pipeline runs one for every microbatch. Both put the gradients
somewhere else than into the leaves, and a distributed pass also decides when its GraphTasks commit. A GraphTask without hooks is a pass of its own.

Note [Local and distributed passes]
    Hooks are *local* where everything the pass needs is in this process: only `grad_target` matters then, and the pass may be walked. A pass
    that is not local receives gradients from other workers (`sources`, `GraphTask.deliver`) and sends some (`outlets`). It is complete only when
    no node is outstanding; then everything is staged, `before_commit` is awaited, and the commit follows without another suspension.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, ClassVar, Protocol

from aiograd.graph.accumulate_grad import AccumulateGrad, GradTarget
from aiograd.graph.node import Node


class PassHooks:
    """The hooks of a larger pass. A subclass overrides some of them; the defaults change nothing."""

    #: True if no gradients are exchanged with other workers; see Note [Local and distributed passes]
    is_local: ClassVar[bool] = True
    #: True if the post-accumulate hooks of leaves run after the commit; else the code that moves the gradients into the leaves runs them
    runs_post_accumulate_hooks: ClassVar[bool] = True
    #: nodes that get gradients from other workers while the pass runs; they count as outstanding from the start
    sources: Collection[Node] = ()
    #: in a pass with inputs: nodes that send gradients to other workers, which run beside the nodes that lead to the inputs; None: all such nodes
    outlets: Collection[Node] | None = None

    def grad_target(self, leaf: AccumulateGrad) -> GradTarget:
        """The holder of the `grad` into which the gradient of a leaf accumulates."""
        return leaf

    def place_of(self, node: Node) -> Any:
        """Sort key of a node in sums, in ascending order; called where the sequence numbers of this process do not give the order of recording."""
        return -node._seq

    def on_wait(self) -> None:
        """Called when the runner has nothing more to do until gradients come from other workers."""

    async def before_commit(self) -> None:
        """Awaited when everything is staged. If it raises or is cancelled, the pass fails."""


class GraphTaskRunner(Protocol):
    """The part of a runner that a GraphTask uses when gradients come from other workers."""

    def wake(self) -> None:
        """Wake the runner: a node has become ready."""

    def busy(self) -> list[Node]:
        """The nodes with a rule or hook that has begun and not ended."""

"""GradientReducer: combines the gradients of replicas of the same parameters, over a group of workers, while backward runs.

Note [A reduced pass]
    The complete gradient of a leaf goes into its bucket instead of being staged (see `aiograd.graph.reducing`). Buckets are reduced in one
    order, each as soon as it and all before it are complete, so every rank begins the same collectives in the same order, for any order in which
    gradients become ready. Parameters that the pass does not reach on this rank count as zeros. When the pass has nothing else to do it waits for the
    buckets, stages what came out, and commits. So a failure before that leaves no trace.

Note [Gradients that were not reduced]
    Passes while `GradientReducer.is_enabled` is False accumulate as usual. The next pass that is reduced then combines the sum of a leaf's gradient
    and the pass's, and puts the result in the place of the leaf's gradient. Otherwise only the gradients of the pass are combined, and are added to
    the leaf's, which is the same on all ranks.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from aiograd.coordination.buckets import BUCKET_BYTES, GradientBuckets, ParameterSpec
from aiograd.coordination.compressed_pass import CompressedPass, check_compressible
from aiograd.coordination.compression import Compressor
from aiograd.coordination.reduced_pass import ReducedPass, ReducingGroup, watched
from aiograd.engine.graph_task import GraphTask
from aiograd.engine.input_buffer import FOLD_INLINE_BYTES
from aiograd.engine.run import current_engine
from aiograd.errors import ArgumentError, ArgumentTypeError, CollectiveError, GraphError
from aiograd.graph.accumulate_grad import AccumulateGrad, GradTarget, Staged
from aiograd.graph.boundary import BOUNDARY
from aiograd.graph.reducing import LEAF_REDUCERS
from aiograd.running.devices import device
from aiograd.running.types import Array
from aiograd.tensors import inplace
from aiograd.tensors.core import TensorCore
from aiograd.tensors.creation import asarray


class Replacing(Staged):
    """A gradient that contains the one that the target had when it was taken. See Note [Gradients that were not reduced]."""

    __slots__ = ("seen",)

    def __init__(self, target: GradTarget, grad: Array, seen: Any) -> None:
        #: the target's gradient when the one of the pass was taken
        self.seen = seen
        super().__init__(target, grad)

    def add_up(self) -> None:
        """Compute `total`: the combined gradient, and anything that another pass has added to the target's meanwhile."""
        super().add_up()
        self.total = self.grad if self.base is self.seen or self.base is None else self.total - self.seen


class LabelledGroup:
    """A group in the use of one reducer: its operations meet only those of the same reducer on other members.

    Args:
        group: a `Group`.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._label = group.operations.new_label()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def all_reduce(self, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, Any]:
        """See `Group.all_reduce`."""
        with self._group.operations.labelled(self._label):
            return self._group.all_reduce(*args, **kwargs)  # type: ignore[no-any-return]

    def all_gather(self, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, Any]:
        """See `Group.all_gather`."""
        with self._group.operations.labelled(self._label):
            return self._group.all_gather(*args, **kwargs)  # type: ignore[no-any-return]

    def broadcast(self, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, Any]:
        """See `Group.broadcast`."""
        with self._group.operations.labelled(self._label):
            return self._group.broadcast(*args, **kwargs)  # type: ignore[no-any-return]


class GradientReducer:
    """Combines the gradients of a module's parameters with the gradients of the same parameters on other workers, in every backward pass.

    Attach it; from then on ``await loss.backward()`` on all members of the group leaves the same gradients on all of them, to the bit. Every member
    runs the same passes in the same order, one at a time.

    Args:
        group: the workers.
        parameters: leaves that require grad, in the same order on every member.
        bucket_bytes: see `GradientBuckets`.
        op: "mean" or "sum", which are associated in the order of the ranks.
        timeout: seconds that a bucket may take; None: the worker's default.
        buffers: gives the Tensors that get the values of rank 0 with every pass that is committed.
        compress: gradients travel as its payloads, see `compressed_pass`; None: as they are.
        commit: awaited when everything is staged, with the function that writes the gradients, which it calls if all members do so; None: they
            are written once this member has all of them.

    Attributes:
        is_enabled: False: gradients are not combined. See Note [Gradients that were not reduced].
        residuals: by parameter the values that `compress` has left out in committed passes; None: there are none.

    Raises:
        ArgumentError: a parameter twice, one that does not require grad, or none at all. ArgumentTypeError: something else than a Tensor, or a
            parameter that cannot be compressed.
    """

    def __init__(
        self,
        group: ReducingGroup,
        parameters: Iterable[Any],
        *,
        bucket_bytes: int = BUCKET_BYTES,
        op: str = "mean",
        timeout: float | None = None,
        buffers: Callable[[], Sequence[Any]] = tuple,
        compress: Compressor | None = None,
        commit: Callable[[Callable[[], None]], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        self.group: Any = group
        self.op = op
        self.timeout = timeout
        self.buffers = buffers
        self.commit = commit
        self.is_enabled = True
        self.leaves = [_leaf_of(parameter) for parameter in parameters]
        self.index_of = {leaf: index for index, leaf in enumerate(self.leaves)}
        if len(self.index_of) < len(self.leaves):
            raise ArgumentError("a parameter stands twice among those whose gradients are to be reduced")
        specs = [ParameterSpec(leaf.shape, leaf.dtype) for leaf in self.leaves]
        check_compressible("GradientReducer", compress, ((f"parameter {index}", spec) for index, spec in enumerate(specs)))
        self.buckets = GradientBuckets(specs, bucket_bytes)
        self.compress = compress
        self.residuals: list[Array | None] = [None] * len(self.leaves)
        #: True if leaves may have gradients that were not reduced
        self.has_unreduced = False
        self._pass: _PassEnd | None = None
        self.group = LabelledGroup(group)

    def attach(self) -> None:
        """Reduce the gradients of all passes from now on. Takes the place of another reducer that the parameters may have."""
        for leaf in self.leaves:
            leaf.extra.reducer = self
        LEAF_REDUCERS.add(self)

    def detach(self) -> None:
        """Leave passes alone from now on. Idempotent."""
        for leaf in self.leaves:
            if leaf.extra.reducer is self:
                leaf.extra.reducer = None
        LEAF_REDUCERS.discard(self)

    @property
    def is_attached(self) -> bool:
        """True if passes reduce gradients now."""
        return any(leaf.extra.reducer is self for leaf in self.leaves)

    # ---------------------------------------------------------------- called by passes

    def take(self, task: GraphTask, leaf: AccumulateGrad, grad: Any) -> bool:
        """See `LeafReducer.take`."""
        if not self.is_enabled:
            self.has_unreduced = True
            return False
        if self._pass is None or self._pass.task is not task:
            self._pass = self._begin(task)
        self._pass.take(leaf, grad)
        return True

    def _begin(self, task: GraphTask) -> _PassEnd:
        if self._pass is not None:
            raise GraphError(f"two passes over parameters that group {self.group.name!r} shares run at once: await one before the next is begun")
        if task.create_graph:
            raise GraphError(
                "create_graph=True: gradients that are combined over several workers cannot be differentiated; take this worker's own with "
                "ag.grad(loss, parameters, create_graph=True), or turn the combining off"
            )
        if task.hooks is not None and not task.hooks.is_local:
            raise GraphError("a pass of a distributed context reaches parameters whose gradients are combined over a group; turn the combining off")
        if task.guards:
            raise GraphError("one pass reaches the parameters of two modules whose gradients are combined; put both into one module")
        if self.group.operations.reducing is not None:
            raise GraphError(
                f"passes of two models run at once in group {self.group.name!r}, which commits one at a time: await one before the next is begun, or "
                "give each model a group of its own"
            )
        begun = _PassEnd(self, task)
        task.join(begun)
        self.group.operations.reducing = self
        return begun

    def reduced_pass(self, marks: Sequence[bool]) -> ReducedPass:
        """The gradients of a pass that begins.

        Args:
            marks: see `ReducedPass`.
        """
        if self.compress is None:
            return ReducedPass(self.group, self.buckets, self.op, self.timeout, marks)
        return CompressedPass(self.group, self.buckets, self.compress, self.residuals, self.op, self.timeout, marks)

    def pass_failed(self, task: GraphTask, error: BaseException) -> None:
        """See `LeafReducer.pass_failed`."""
        is_mine = self._pass is not None and self._pass.task is task
        if self._pass is not None and is_mine:
            self._pass.cancel()
            self._pass = self.group.operations.reducing = None
        if is_mine or (self.is_enabled and task.plan.accumulate and any(leaf.extra.reducer is self and task.will_run(leaf) for leaf in self.leaves)):
            self.group.abandon("the backward pass", error)

    def pass_ended(self) -> None:
        """The pass is committed."""
        self._pass = self.group.operations.reducing = None
        self.has_unreduced = False


class _PassEnd:
    """Takes part in the end of a pass with reduced gradients."""

    def __init__(self, reducer: GradientReducer, task: GraphTask) -> None:
        self.reducer = reducer
        self.task = task
        #: True if the combined gradients include the earlier gradients of leaves
        self.replaces = reducer.has_unreduced
        self.reduced = reducer.reduced_pass((self.replaces,))
        self._seen: dict[int, Any] = {}
        self._buffers: list[tuple[Any, Array]] = []
        #: the values of the buffers, on their way
        self.receiving: asyncio.Task[Any] | None = None
        for index, leaf in enumerate(reducer.leaves):
            if not task.will_run(leaf):
                self._put(index, leaf, None)

    def take(self, leaf: AccumulateGrad, grad: Any) -> None:
        self._put(self.reducer.index_of[leaf], leaf, grad)

    def _put(self, index: int, leaf: AccumulateGrad, grad: Any) -> None:
        if self.replaces:
            self._seen[index] = seen = self.task.grad_target(leaf).grad
            if seen is not None:
                seen = BOUNDARY.unwrap(seen) if BOUNDARY.is_tensor(seen) else seen
                grad = seen if grad is None else seen + grad
        self.reduced.take(index, grad)

    def cancel(self) -> None:
        """Give up."""
        self.reduced.cancel()
        if self.receiving is not None:
            self.receiving.cancel()

    async def finish(self) -> None:
        """See `CommitGuard.finish`."""
        reducer = self.reducer
        self.reduced.take_rest()
        grads = await self.reduced.results() if reducer.compress is not None else None  # its exchanges begin later than they are taken
        buffers = reducer.buffers() if reducer.group.size > 1 else ()
        if buffers:
            running = reducer.group.broadcast([buffer.detach() for buffer in buffers], timeout=reducer.timeout)
            self.receiving = watched(running, "buffers")
        if grads is None:
            grads = await self.reduced.results()
        if self.receiving is not None:
            self._buffers = list(zip(buffers, await self.receiving, strict=True)) if reducer.group.rank else []
        (mark,) = self.reduced.marks
        if mark not in (0, reducer.group.size if reducer.op == "sum" else 1):
            raise CollectiveError(f"group {reducer.group.name!r}: some members have gradients of passes that were not reduced, and others have none")
        for index, (leaf, grad) in enumerate(zip(reducer.leaves, grads, strict=True)):
            if grad is None:
                continue
            there, target = device(leaf.device), self.task.grad_target(leaf)
            if there is not None:
                grad = there.from_host(grad)
            if self.replaces:
                staged: Staged = Replacing(target, grad, self._seen[index])
            elif target.grad is not None and grad.nbytes > FOLD_INLINE_BYTES:
                staged = await current_engine().offload(functools.partial(Staged, target, grad))
            else:
                staged = Staged(target, grad)
            self.task.stage_reduced(leaf, staged)

    def _write(self) -> None:
        """Write gradients and buffers; a buffer that has its values already is not written, as a graph may have saved it."""
        self.task.commit()
        if isinstance(self.reduced, CompressedPass):
            self.reducer.residuals = self.reduced.residuals
        for buffer, values in self._buffers:
            if buffer.detach().cpu().numpy().tobytes() != values.tobytes():
                inplace.write(buffer, asarray(values).to(buffer.device)._data)

    async def commit(self) -> None:
        """See `CommitGuard.commit`."""
        reducer = self.reducer
        try:
            if reducer.commit is None:
                self._write()
            else:
                await reducer.commit(self._write)
        finally:
            if self.task.committed:
                reducer.pass_ended()


def _leaf_of(parameter: Any) -> AccumulateGrad:
    if not isinstance(parameter, TensorCore):
        raise ArgumentTypeError(f"expected the parameters whose gradients are to be reduced, found {type(parameter).__name__}")
    if not isinstance(parameter._node, AccumulateGrad):
        raise ArgumentError(f"a parameter of shape {list(parameter.shape)} does not require grad, so it has no gradient to reduce")
    return parameter._node

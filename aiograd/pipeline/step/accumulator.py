"""GradientAccumulator: the gradients of one step on their way into the leaves, added up in an order that no schedule changes.

Note [Order of a step's sums]
    In a serial run of the microbatches, the gradient of a leaf is the one it had, plus the first microbatch's, plus the second's, and so on; where a
    leaf belongs to several stages, their gradients are added up within the microbatch, the later stage first, since a backward pass reaches it first.
    (A stage gives one sum, so where an earlier stage uses such a leaf several times, the sum of a serial run is associated otherwise.) Schedules
    differ in when each of these contributions is made (weight gradients may be computed late, and out of order), so they wait until all that come
    before them in that order are there, and are then added: the prefix is folded as it arrives. With schedules that keep to the order nothing ever
    waits.

    The accumulator knows if earlier terms are still to come from the progress of each stage and the stages a leaf belongs to: stages that list it
    among their parameters, and stages without a list. A leaf that is in no list may belong to any stage. If a stage uses a parameter of another stage
    that its own list lacks, the sum is complete, and its order depends on the schedule.

Note [Two sums]
    The gradient that a leaf has already takes part in the sum from the start, as in a serial run. In case another pass changes it before the
    step commits, the sum without it is made as well; where there is no gradient yet, the two are the same.

Note [Sums over replicas]
    Where the stages are one of several replicas, the sum of a leaf over this replica's microbatches is handed to the `Reduction` as soon as it is
    complete, while other stages still compute. The gradient of the step is the sum of these over the replicas, in their order, and only that
    is added to the one that the leaf has.
"""

from __future__ import annotations

import functools
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from aiograd.engine.evaluate import suspends
from aiograd.engine.input_buffer import FOLD_INLINE_BYTES
from aiograd.engine.run import current_engine
from aiograd.errors import GraphError, HookError
from aiograd.graph.accumulate_grad import AccumulateGrad, Staged, commit
from aiograd.graph.hooks import hook_name
from aiograd.running.devices import device
from aiograd.running.types import Array
from aiograd.tensors.norms import scaled, size_of


class Reduction(Protocol):
    """Adds up gradients over the replicas of a pipeline. See Note [Sums over replicas]."""

    @property
    def leaves(self) -> Sequence[AccumulateGrad]:
        """The leaves with gradients in the reduction."""

    def take(self, leaf: AccumulateGrad, grad: Array | None) -> None:
        """Take the complete gradient of this replica, which does not change any more; None: it has none."""

    def results(self) -> Coroutine[Any, Any, dict[AccumulateGrad, Array]]:
        """The sums, once all have been taken, on the host."""


class GradientSum(Staged):
    """The gradient of one leaf over one step. See Note [Two sums].

    Args:
        leaf: the leaf.
        stages: the stages that may contribute.
        is_part: it is one term of a sum over replicas.
    """

    __slots__ = ("waiting", "stages", "is_folding", "place", "is_part")

    def __init__(self, leaf: AccumulateGrad, stages: set[int], is_part: bool = False) -> None:
        self.target = leaf
        #: the sum without the leaf's earlier gradient: None, or an array made here
        self.grad = None
        self.base = self.total = None
        self.version = 0
        #: contributions that wait for earlier ones, by (microbatch, -stage)
        self.waiting: dict[tuple[int, int], Array] = {}
        #: which stages may contribute
        self.stages = stages
        self.is_part = is_part
        self.is_folding = False
        #: its place among all leaves; the least key that it got
        self.place: tuple[int, int, int] | None = None

    def copied(self, leaf: AccumulateGrad) -> GradientSum:
        """The same sum, where it is one term of a sum over replicas; this one is added to no more."""
        made = GradientSum(leaf, set(self.stages), self.is_part)
        made.grad, made.waiting, made.place = self.grad, dict(self.waiting), self.place
        return made

    def add(self, grads: Iterable[Array]) -> None:
        """Add contributions in this order; the caller owns them. May take long; runs on any thread, one call at a time."""
        for grad in grads:
            if self.is_part:
                self.grad = grad if self.grad is None else _add_to(self.grad, grad)
            elif self.grad is None:
                self.grad = grad
                self.add_up()
            elif self.base is None:
                self.grad = self.total = _add_to(self.grad, grad)
            else:
                self.total = _add_to(self.total, grad)
                self.grad = _add_to(self.grad, grad)


class GradientAccumulator:
    """The gradients of one step in one process.

    Args:
        stages: by stage that runs here, its known leaves, or None.
        microbatches: the number of microbatches.
        reduction: adds up gradients over replicas; None: these stages are the only ones.
    """

    def __init__(
        self, stages: Mapping[int, Mapping[AccumulateGrad, None] | None], microbatches: int, reduction: Reduction | None = None
    ) -> None:
        self._leaves = dict(stages)
        self._reduction = reduction
        #: leaves with a gradient that the reduction has not taken yet
        self._unreduced = {} if reduction is None else {leaf: self._stages_of(leaf) for leaf in reduction.leaves}
        self._microbatches = microbatches
        #: by stage: the number of first microbatches that are done, and the numbers of later ones that are done
        self._frontier = dict.fromkeys(stages, 0)
        self._ahead: dict[int, set[int]] = {stage: set() for stage in stages}
        self._sums: dict[AccumulateGrad, GradientSum] = {}
        self._blocked: dict[AccumulateGrad, None] = {}

    def has(self, stage: int, microbatch: int) -> bool:
        """True if a stage has delivered the gradients of a microbatch."""
        return microbatch < self._frontier[stage] or microbatch in self._ahead[stage]

    def copied(self, reduction: Reduction | None = None) -> GradientAccumulator | None:
        """An accumulator that goes on from here; this one takes nothing more. To be called before `prepare`, which adds up over replicas.

        Args:
            reduction: as of the constructor.

        Returns:
            The accumulator; None: it was cancelled while it added up gradients, so its sums are incomplete.
        """
        if any(entry.is_folding for entry in self._sums.values()):
            return None
        made = GradientAccumulator(self._leaves, self._microbatches, reduction)
        made._frontier, made._ahead = dict(self._frontier), {stage: set(ahead) for stage, ahead in self._ahead.items()}
        made._sums = {leaf: entry.copied(leaf) for leaf, entry in self._sums.items()}
        made._blocked = dict(self._blocked)
        return made

    def deliver(self, stage: int, microbatch: int, grads: Mapping[AccumulateGrad, Array]) -> None:
        """Take the gradients of a stage that is done with a microbatch.

        Args:
            grads: the gradients of its leaves, which are ours from now on.

        Raises:
            GraphError: it has been done with it before.
        """
        if self.has(stage, microbatch):
            raise GraphError(f"the gradients of stage {stage}, microbatch {microbatch}, are delivered twice")
        key = (microbatch, -stage)
        for index, (leaf, grad) in enumerate(grads.items()):
            entry = self._sums.get(leaf)
            if entry is None:
                entry = self._sums[leaf] = GradientSum(leaf, self._stages_of(leaf), self._reduction is not None)
            entry.stages.add(stage)
            entry.waiting[key] = grad
            entry.place = (*key, index) if entry.place is None else min(entry.place, (*key, index))
            self._blocked[leaf] = None
        self._ahead[stage].add(microbatch)
        while self._frontier[stage] in self._ahead[stage]:
            self._ahead[stage].remove(self._frontier[stage])
            self._frontier[stage] += 1

    def clear(self) -> None:
        """Drop all gradients: the step is given up."""
        self._sums.clear()
        self._blocked.clear()

    async def fold(self) -> None:
        """Add up all terms that are in order by now. Cancelled midway, the step cannot continue."""
        for leaf in list(self._blocked):
            entry = self._sums[leaf]
            while not entry.is_folding and (ready := self._take_ready(entry)):
                if entry.grad is not None and getattr(ready[0], "nbytes", 0) > FOLD_INLINE_BYTES and isinstance(ready[0], np.ndarray):
                    entry.is_folding = True
                    await current_engine().offload(functools.partial(entry.add, ready))
                    entry.is_folding = False
                else:
                    entry.add(ready)
            if not entry.waiting:
                self._blocked.pop(leaf, None)
        if self._reduction is not None:
            self._reduce(self._reduction)

    def _reduce(self, reduction: Reduction) -> None:
        """Hand over the gradients that are complete. See Note [Sums over replicas]."""
        done = {stage for stage, count in self._frontier.items() if count == self._microbatches}
        for leaf in [leaf for leaf, stages in self._unreduced.items() if stages <= done]:
            entry = self._sums.get(leaf)
            if entry is None or not (entry.waiting or entry.is_folding):
                del self._unreduced[leaf]
                reduction.take(leaf, None if entry is None else entry.grad)

    def _take_ready(self, entry: GradientSum) -> list[Array]:
        """The sums of the first microbatches that every stage of the leaf is done with."""
        ready: list[Array] = []
        last = -1
        for key in sorted(entry.waiting):
            microbatch = key[0]
            if not all(self._frontier[other] > microbatch for other in entry.stages):
                break
            grad = entry.waiting.pop(key)
            if microbatch == last:
                ready[-1] = _add_to(ready[-1], grad)
            else:
                ready.append(grad)
            last = microbatch
        return ready

    def _stages_of(self, leaf: AccumulateGrad) -> set[int]:
        known = {stage for stage, leaves in self._leaves.items() if leaves is not None and leaf in leaves}
        return known | {stage for stage, leaves in self._leaves.items() if leaves is None} if known else set(self._leaves)

    @property
    def is_complete(self) -> bool:
        """True if every stage is done with every microbatch."""
        return all(count == self._microbatches for count in self._frontier.values())

    async def prepare(self) -> None:
        """Wait until every sum is there, so that the commit cannot fail: data that devices still compute, and large sums that are out of date.

        Raises:
            GraphError: some stage is not done. The error of a device that failed.
        """
        await self.fold()
        if not self.is_complete or any(entry.waiting or entry.is_folding for entry in self._sums.values()):
            raise GraphError("a pipeline step ended before every stage had seen every microbatch")
        if self._reduction is not None:
            await self._take_over(self._reduction)
        for entry in self._sums.values():
            wait = getattr(entry.total, "__aiograd_wait__", None)
            if wait is not None:
                await wait()
        for entry in self._sums.values():
            if entry.is_stale and getattr(entry.total, "nbytes", 0) > FOLD_INLINE_BYTES:
                await current_engine().offload(entry.add_up)

    async def _take_over(self, reduction: Reduction) -> None:
        """Put the sums over the replicas in the place of this replica's."""
        unknown = self._sums.keys() - set(reduction.leaves)
        if unknown:
            shapes = ", ".join(sorted(str(list(leaf.shape)) for leaf in unknown))
            raise GraphError(
                f"a replica of a pipeline has gradients for leaves of shapes {shapes} that are no parameters of its stages' modules, so they cannot "
                "be added up over the replicas; make them parameters, or detach() them"
            )
        for leaf, grad in (await reduction.results()).items():
            there = device(leaf.device)
            entry = self._sums.setdefault(leaf, GradientSum(leaf, set()))
            entry.grad = grad if there is None else there.from_host(grad)
            if leaf.grad is not None and grad.nbytes > FOLD_INLINE_BYTES:
                await current_engine().offload(entry.add_up)
            else:
                entry.add_up()

    async def sizes(self) -> dict[int, list[Any]]:
        """The sizes of the gradients that the commit will write, for their norm, by stage; see `size_of`.

        Each stands once, with the first stage that has it among its parameters, in their order; leaves that no stage lists come last.
        """
        left = dict(sorted(self._sums.items(), key=lambda item: item[1].place or ()))
        totals: dict[int, list[Any]] = {}
        for stage in sorted(self._leaves):
            totals[stage] = [left.pop(leaf).total for leaf in self._leaves[stage] or () if leaf in left]
        if left:
            totals[max(totals)] += [entry.total for entry in left.values()]

        def measure() -> dict[int, list[Any]]:
            return {stage: [size_of(each, 2.0) for each in arrays] for stage, arrays in totals.items()}

        sizes: dict[int, list[Any]] = await current_engine().offload(measure)
        return sizes

    async def scale(self, factor: Any) -> None:
        """Multiply the gradients that the commit will write. Gradients of other passes before the commit are added unscaled."""
        entries = list(self._sums.values())
        apart = [entry for entry in entries if entry.grad is not entry.total]
        arrays = [entry.total for entry in entries] + [entry.grad for entry in apart]
        changed = await current_engine().offload(functools.partial(scaled, arrays, factor))
        for entry, array in zip(entries, changed, strict=False):
            entry.grad = entry.total = array
        for entry, array in zip(apart, changed[len(entries) :], strict=True):
            entry.grad = array

    def commit(self) -> None:
        """Write every gradient, in one step; where that fails, none has been written."""
        commit(self._sums.values())

    async def after_commit(self) -> None:
        """Call the post-accumulate hooks of the leaves, in order. See `TensorCore.register_post_accumulate_grad_hook`."""
        for entry in sorted(self._sums.values(), key=lambda entry: entry.place or ()):
            leaf: Any = entry.target
            tensor = leaf.leaf()
            if tensor is None or not leaf.post_accumulate_hooks:
                continue
            for hook in leaf.post_accumulate_hooks.calls():
                result = hook(tensor)
                if suspends(result):
                    result = await result
                if result is not None:
                    raise HookError(f"hook '{hook_name(hook)}' returned {type(result).__name__}: post accumulate grad hooks should return None.")

    @property
    def leaves(self) -> frozenset[AccumulateGrad]:
        """The leaves that have got gradients."""
        return frozenset(self._sums)

    @property
    def waiting(self) -> int:
        """The number of contributions that wait for earlier ones."""
        return sum(len(entry.waiting) for entry in self._sums.values())


def _add_to(have: Array, grad: Array) -> Array:
    """The sum, in the memory of `have` where it is on the host."""
    if have.__class__ is np.ndarray and grad.__class__ is np.ndarray:
        return np.add(have, grad, out=have)
    return have + grad

"""ReplicatedStages: the stages of one member of a pipeline in replicas, which stay equal to the same stages of other members."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from aiograd.coordination.buckets import BUCKET_BYTES, GradientBuckets, ParameterSpec
from aiograd.coordination.outline import tensors_of
from aiograd.coordination.reduced_pass import ReducedPass, ReducingGroup, watched
from aiograd.graph.accumulate_grad import AccumulateGrad
from aiograd.pipeline.step.stage import Stage
from aiograd.running.types import Array
from aiograd.tensors import inplace
from aiograd.tensors.creation import asarray


class ReplicatedStages:
    """The stages of one member, and the group of this member and the members of other replicas with the same stages.

    Args:
        stages: by number.
        group: the members, in the order of the replicas.
    """

    def __init__(self, stages: Mapping[int, Stage], group: ReducingGroup) -> None:
        self.group = group
        self._modules = modules_of(stages)

    async def copy_from(self, source: int) -> None:
        """Take parameters, buffers and gradients of one member, by its rank, or give them. Cancelled or failed, nothing has changed here."""
        tensors = list({id(each): each for module in self._modules for each in tensors_of(module).values()}.values())
        leaves = [each for each in tensors if each.is_leaf and each.requires_grad]
        gives = self.group.rank == source
        (present,) = await self.group.broadcast([np.array([each.grad is not None for each in leaves], np.uint8)], source)
        given = [each for each, flag in zip(leaves, present.tolist(), strict=True) if flag]
        values = await self.group.broadcast([each.detach() for each in tensors] + [each.grad for each in given] if gives else None, source)
        if gives:
            return
        for tensor, value in zip(tensors, values, strict=False):
            inplace.write(tensor, asarray(value).to(tensor.device)._data)
        for leaf in leaves:
            leaf.grad = None
        for leaf, value in zip(given, values[len(tensors) :], strict=True):
            leaf.grad = asarray(value).to(leaf.device)

    def begin(self, addends: Sequence[int] = ()) -> ReplicaReduction:
        """A step begins.

        Args:
            addends: of a step after a loss, see `ReplicaReduction`.
        """
        return ReplicaReduction(self._modules, self.group, addends)


class ReplicaReduction:
    """The gradients of one step on their way to the sum over the replicas, in buckets, each as soon as it is complete.

    Args:
        modules: of the stages, in their order.
        group: the members that have them.
        addends: where replicas have lost the stages: the replicas whose gradients this member adds to the sum, ascending; the members of the group
            add theirs in turn. None: each has those of its own replica.
    """

    def __init__(self, modules: list[Any], group: ReducingGroup, addends: Sequence[int] = ()) -> None:
        found = [parameter for module in modules for parameter in module.parameters() if parameter.requires_grad]
        self._index: dict[AccumulateGrad, int] = {}
        for parameter in found:
            self._index.setdefault(parameter._node, len(self._index))
        self._group = group
        self._buffers = list({id(buffer): buffer for module in modules for buffer in module.buffers()}.values())
        #: the values that the buffers are to have
        self._values: list[Array] = []
        self._sums: ReducedPass | None = None
        if self._index:
            specs = [ParameterSpec(leaf.shape, leaf.dtype) for leaf in self._index]
            # rank 0 begins the sum, so what it adds to it is added up here
            in_turn = None if not addends else len(addends) if group.rank else 1
            self._sums = ReducedPass(group, GradientBuckets(specs, BUCKET_BYTES), "sum", addends=in_turn)
        self._addends = list(addends)
        self._parts: dict[AccumulateGrad, dict[int, Array | None]] = {leaf: {} for leaf in self._index} if addends else {}

    @property
    def leaves(self) -> list[AccumulateGrad]:
        """See `Reduction.leaves`."""
        return list(self._index)

    def take(self, leaf: AccumulateGrad, grad: Array | None) -> None:
        """See `Reduction.take`."""
        if self._sums is not None:
            self._sums.take(self._index[leaf], grad)

    def of(self, replica: int) -> AddendReduction:
        """Takes the gradients of one of `addends`."""
        return AddendReduction(self, replica)

    def take_addend(self, replica: int, leaf: AccumulateGrad, grad: Array | None) -> None:
        """Take the gradient of one of `addends`; once all are there, they are on their way."""
        parts = self._parts[leaf]
        parts[replica] = grad
        if self._sums is not None and len(parts) == len(self._addends):
            grads = [parts[each] for each in self._addends]
            parts.clear()
            self._sums.take(self._index[leaf], *(grads if self._group.rank else [_sum(grads)]))

    async def results(self) -> dict[AccumulateGrad, Array]:
        """See `Reduction.results`. Gets the buffers of the first replica, too. Cancelled, the group fails."""
        receiving = None
        if self._buffers and self._group.size > 1:
            given = [buffer.detach() for buffer in self._buffers]
            receiving = watched(self._group.broadcast(given if self._group.rank == 0 else None), "buffers")
        try:
            found = [] if self._sums is None else await self._sums.results()
            if receiving is not None:
                self._values = await receiving
        except BaseException:
            if receiving is not None:
                receiving.cancel()
            raise
        return {leaf: grad for leaf, grad in zip(self._index, found, strict=True) if grad is not None}

    def write_buffers(self) -> None:
        """Write the buffers of the first replica."""
        if self._group.rank:
            for buffer, values in zip(self._buffers, self._values, strict=False):
                inplace.write(buffer, asarray(values).to(buffer.device)._data)

    def cancel(self) -> None:
        """Give up. Where a bucket is under way, the group fails."""
        if self._sums is not None:
            self._sums.cancel()


class AddendReduction:
    """The gradients of one replica on their way into a `ReplicaReduction` to which the member adds those of several.

    Args:
        reduction: of the member.
        replica: one of its `addends`.
    """

    def __init__(self, reduction: ReplicaReduction, replica: int) -> None:
        self._reduction = reduction
        self._replica = replica

    @property
    def leaves(self) -> list[AccumulateGrad]:
        """See `Reduction.leaves`."""
        return self._reduction.leaves

    def take(self, leaf: AccumulateGrad, grad: Array | None) -> None:
        """See `Reduction.take`."""
        self._reduction.take_addend(self._replica, leaf, grad)

    async def results(self) -> dict[AccumulateGrad, Array]:
        """See `Reduction.results`. Cancelled, the group fails."""
        return await self._reduction.results()


def _sum(grads: Sequence[Array | None]) -> Array | None:
    """The sum in this order of the gradients that are there."""
    total = None
    for grad in grads:
        total = grad if total is None else total if grad is None else total + grad
    return total


def modules_of(stages: Mapping[int, Stage]) -> list[Any]:
    """The modules with parameters and buffers, in the order of the stages."""
    modules = [stages[index].module for index in sorted(stages)]
    return [module for module in modules if callable(getattr(module, "named_parameters", None)) and callable(getattr(module, "named_buffers", None))]

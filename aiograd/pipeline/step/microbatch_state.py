"""SavedMicrobatch and StageOutput: the state of a microbatch in a stage, its results, and gradients that have to fit these."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from aiograd.engine.run import current_engine
from aiograd.errors import ArgumentTypeError, ShapeError
from aiograd.graph.accumulate_grad import AccumulateGrad
from aiograd.pipeline.step.message import EdgeOf, StageMessage
from aiograd.running import devices
from aiograd.running.types import Array
from aiograd.tensors.core import make


class SavedMicrobatch:
    """The state of one microbatch that a stage keeps between forward and backward."""

    __slots__ = ("edges", "seeds", "leaves", "given", "taken")

    def __init__(
        self, edges: list[EdgeOf], seeds: list[Array] | None, leaves: list[AccumulateGrad], taken: Mapping[int, Any], given: Mapping[int, Any]
    ) -> None:
        #: the gradient edges of its outputs
        self.edges = edges
        #: those gradients, where the stage ends in the loss
        self.seeds = seeds
        #: where gradients of its inputs arrive
        self.leaves = leaves
        #: the same for values from other stages, and for values to other stages
        self.taken: Mapping[int, list[AccumulateGrad]] = taken
        self.given: Mapping[int, list[EdgeOf]] = given

    @property
    def all_leaves(self) -> list[AccumulateGrad]:
        """Where gradients of inputs arrive, of values from other stages last."""
        if not self.taken:
            return self.leaves
        return self.leaves + [leaf for leaves in self.taken.values() for leaf in leaves]

    def parted(self, grads: Sequence[Any]) -> tuple[list[Any], dict[int, list[Any]]]:
        """The gradients of inputs, and of values from other stages; they are in the order of `all_leaves`."""
        if not self.taken:
            return list(grads), {}
        end = len(self.leaves)
        inputs, taken = list(grads[:end]), {}
        for source, leaves in self.taken.items():
            taken[source] = list(grads[end : end + len(leaves)])
            end += len(leaves)
        return inputs, taken


class StageOutput(NamedTuple):
    """The results of a stage for a microbatch."""

    #: for the next stage; None after the last
    message: StageMessage | None
    #: for other stages, by number
    given: Mapping[int, StageMessage]


async def fitted(grad: Any, edge: EdgeOf, index: int) -> Array:
    """The array of a gradient from the next stage, checked against the output.

    Raises:
        ShapeError, ArgumentTypeError: the gradient does not fit the output.
    """
    metadata = edge[0].metadata_of(edge[1])
    if metadata is None:
        return grad._data
    if grad.shape != metadata.shape:
        raise ShapeError(f"shape mismatch: the gradient of output {index} has shape {list(grad.shape)}, the output has {list(metadata.shape)}")
    if grad.dtype != metadata.dtype:
        raise ArgumentTypeError(f"dtype mismatch: the gradient of output {index} has dtype {grad.dtype}, the output has {metadata.dtype}")
    return (await to_device(grad, metadata.device))._data


async def to_device(tensor: Any, device: str) -> Any:
    """The values of a Tensor on a device, outside of any graph; waits until they are computed."""
    if tensor.device == device:
        return tensor
    await tensor
    return await current_engine().offload(functools.partial(_copy, tensor, device))


def _copy(tensor: Any, device: str) -> Any:
    source, target = devices.device(tensor.device), devices.device(device)
    array = tensor._data if source is None else source.to_host(tensor._data)
    return make(array if target is None else target.from_host(array))

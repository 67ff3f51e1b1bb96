"""Tensors of both libraries over one memory, through DLPack and numpy's and torch's own short cuts for it.

Note [One version counter]
    Each library counts writes into a tensor's memory, so that backward notices a saved value that has changed since. Where both use one memory,
    torch's counter is the only one: a `TorchCounter` stands in the Tensor's place for it, reads it, and counts writes of aiograd there. So each
    library notices the other's writes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from aiograd.errors import ArgumentTypeError, DeviceError, GraphError
from aiograd.interop.extras import from_extra
from aiograd.interop.levels import refuse_level
from aiograd.tensors import exchange
from aiograd.tensors.core import TensorCore, counter_of, make
from aiograd.tensors.levels import LevelArray
from aiograd.tensors.tensor import Tensor

if TYPE_CHECKING:
    import torch
else:
    torch = from_extra("torch", "torch")


class TorchCounter:
    """The version counter of a torch tensor in the place of a Tensor's own (``counter[0]``). See Note [One version counter].

    Args:
        tensor: the torch tensor; it must not be part of a graph, which this would keep alive.
        before: the counter that the Tensor had, which views of it go on counting with.
    """

    __slots__ = ("tensor", "before")

    def __init__(self, tensor: Any, before: Any = None) -> None:
        self.tensor = tensor
        self.before = before

    def __getitem__(self, index: int) -> int:
        count: int = self.tensor._version
        return count if self.before is None else count + int(self.before[0])

    def __setitem__(self, index: int, count: int) -> None:
        for _ in range(count - self[0]):
            torch.autograd.graph.increment_version(self.tensor)


def to_torch(tensor: Tensor) -> Any:
    """The torch tensor over the memory of a Tensor; of a parameter of a wrapped module, that module's own parameter.

    Memory that numpy calls read-only, and arrays with negative strides, which torch does not have, are copied.

    Args:
        tensor: a Tensor that requires no gradient, on the host or on a CUDA device; any shape.

    Returns:
        A ``torch.Tensor`` of the same shape, dtype and device. Writes through either are seen, and counted, by both.

    Raises:
        MissingExtraError: torch is not installed. ArgumentTypeError: no Tensor, or a dtype that torch does not have. GraphError: the Tensor requires
            grad, and its graph would be lost.
    """
    if not isinstance(tensor, TensorCore):
        raise ArgumentTypeError(f"to_torch: expected a Tensor, found {type(tensor).__name__}. Make one with ag.tensor() or ag.asarray().")
    source = getattr(tensor, "torch_parameter", None)
    if source is not None:
        return source
    if tensor.requires_grad:
        raise GraphError(
            "to_torch: the Tensor requires grad, and gradients would stop here. Pass it to a module of interop.torch.wrap(), which records a node, "
            "or convert tensor.detach()."
        )
    found = shared_with_torch(tensor)
    if found is not None:
        return found.detach()
    array = tensor._data
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        array = array.copy()
    result = over_array(array)
    if not isinstance(array, np.ndarray) or result.data_ptr() == array.__array_interface__["data"][0]:
        tensor._vc = TorchCounter(result, tensor._vc)  # type: ignore[assignment]
    return result


def from_torch(tensor: Any) -> Tensor:
    """The Tensor over the memory of a torch tensor.

    Args:
        tensor: a ``torch.Tensor`` that requires no gradient, on the host or on a CUDA device; any shape. A sparse one becomes dense.

    Returns:
        A leaf of the same shape, dtype and device that requires no gradient. Writes through either are seen, and counted, by both.

    Raises:
        MissingExtraError: torch is not installed. ArgumentTypeError: no torch tensor, or a dtype that numpy does not have (bfloat16). GraphError: it
            requires grad, and its gradients would stop. DeviceError: it is on a device that aiograd does not have.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentTypeError(f"from_torch: expected a torch.Tensor, found {type(tensor).__name__}")
    if tensor.requires_grad:
        refuse_graph("from_torch: the torch tensor")
    return tensor_over(tensor)


def refuse_graph(what: str) -> None:
    """Raise because a torch tensor requires grad where its graph cannot be followed.

    Raises:
        GraphError: always.
    """
    raise GraphError(
        f"{what} requires grad, and its gradients would stop here: aiograd does not see torch's graph. Pass its detach(), wrap the module that made "
        "it with interop.torch.wrap(), or call aiograd from torch with interop.torch.function()."
    )


# -------------------------------------------------------------------- without checks, for the bridge itself


def shared_with_torch(tensor: TensorCore) -> Any:
    """The torch tensor that a Tensor shares its memory and its version counter with, whole; None if there is none."""
    counter: Any = tensor._vc
    if counter.__class__ is not TorchCounter or counter.before is not None:
        return None
    data = tensor._data
    return counter.tensor if isinstance(data, np.ndarray) and data.base is counter.tensor else None


def over_array(array: Any) -> Any:
    """The torch tensor over an array's memory, be it writeable or not; over a copy where torch cannot have such strides or byte order.

    Raises:
        ArgumentTypeError: torch has no such dtype. LevelArrayError: it is a batch of `vmap`, or has a tangent.
    """
    if isinstance(array, np.generic):
        array = np.asarray(array)  # a number, as numpy's functions give it in the place of an array without axes
    if isinstance(array, LevelArray):
        refuse_level(array, "torch")
    if not isinstance(array, np.ndarray):
        return torch.from_dlpack(array)
    try:
        if array.flags.writeable:
            return torch.from_numpy(array)
        if all(stride >= 0 for stride in array.strides) and array.dtype.isnative:
            return torch.from_dlpack(array)  # from_numpy warns of it
    except (ValueError, BufferError):
        pass  # negative strides, or strides that are no multiple of an element
    except TypeError as error:
        raise ArgumentTypeError(f"torch has no dtype for {array.dtype}: cast the Tensor first, such as with .astype('float64')") from error
    return torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("="), order="C"))


def array_over(tensor: Any) -> Any:
    """The array over the memory of a torch tensor outside of any graph; of a sparse or conjugated one, of a copy.

    Raises:
        ArgumentTypeError: numpy has no such dtype. DeviceError: aiograd has no such device.
    """
    try:
        return tensor.numpy()
    except (TypeError, RuntimeError):
        pass  # elsewhere, sparse, conjugated, or of a dtype that numpy does not have
    try:
        if tensor.device.type == "cpu":
            if tensor.layout is not torch.strided:
                tensor = tensor.to_dense()
            return tensor.resolve_conj().resolve_neg().numpy()
    except TypeError as error:
        raise ArgumentTypeError(
            f"a torch tensor of dtype {tensor.dtype} and shape {list(tensor.shape)}: numpy, and so aiograd, has no such dtype. Cast it, or the "
            "module that has it, to torch.float32 or torch.float16."
        ) from error
    if tensor.device.type != "cuda":
        raise DeviceError(
            f"a torch tensor of shape {list(tensor.shape)} is on device {tensor.device}; expected the host or a CUDA device. Move it, or the module "
            "that made it, with .to('cpu')."
        )
    return exchange.from_dlpack(tensor)._data


def tensor_over(tensor: Any) -> Tensor:
    """The Tensor over the memory of a torch tensor outside of any graph."""
    made: Tensor = make(array_over(tensor))
    if not tensor.is_inference():
        made._vc = TorchCounter(tensor)  # type: ignore[assignment]
    return made


def name_of_device(device: Any) -> str:
    """aiograd's name of a torch device."""
    return "cpu" if device.type == "cpu" else f"{device.type}:{device.index or 0}"


def same_memory(tensor: TensorCore) -> tuple[Any, Any, int]:
    """A torch tensor over a Tensor's memory to use as an input: the tensor, and the counter and version by which writes of aiograd are noticed.

    The counter is None where the two share one.
    """
    found = shared_with_torch(tensor)
    if found is not None:
        return found.detach(), None, 0
    counter = counter_of(tensor)
    return over_array(writeable(tensor._data)), counter, counter[0]


def writeable(array: Any) -> Any:
    """An array that a torch module may write into: a copy of one that numpy calls read-only, which torch does not heed.

    A broadcast array stays as it is: torch refuses to write where elements share memory.
    """
    if isinstance(array, np.ndarray) and not array.flags.writeable and 0 not in array.strides:
        return array.copy()
    return array

"""PyTorch's place for the clipping of gradients and for parameters as one vector: ``nn.utils.clip_grad_norm_``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from aiograd.array_functions.manipulation import concat
from aiograd.errors import ShapeError
from aiograd.running.lazy import on_first_use
from aiograd.running.modes import no_grad
from aiograd.tensors.clipping import clip_grad_norm_, clip_grad_value_
from aiograd.tensors.tensor import Tensor

if not TYPE_CHECKING:  # an unknown name is told with the nearest one
    __getattr__, __dir__ = on_first_use(__name__)

__all__ = ["clip_grad_norm_", "clip_grad_value_", "parameters_to_vector", "vector_to_parameters"]


def parameters_to_vector(parameters: Iterable[Tensor]) -> Tensor:
    """All elements of parameters behind each other.

    Args:
        parameters: of one dtype.

    Returns:
        A vector, in the graph of the parameters.
    """
    return concat([parameter.reshape(-1) for parameter in parameters])


def vector_to_parameters(vec: Tensor, parameters: Iterable[Tensor]) -> None:
    """Write the elements of a vector into parameters, in place; the opposite of `parameters_to_vector`.

    Args:
        vec: as many elements as the parameters have together.
        parameters: to write.

    Raises:
        ShapeError: another number of elements; nothing has been written.
    """
    targets = list(parameters)
    count = sum(target.size for target in targets)
    if vec.shape != (count,):
        raise ShapeError(f"vector_to_parameters: found a vector of shape {list(vec.shape)}, expected [{count}], the elements of all parameters")
    place = 0
    with no_grad():
        for target in targets:
            target.copy_(vec.detach()[place : place + target.size].reshape(target.shape))
            place += target.size

"""The arguments of a step, before they leave for the stages."""

from __future__ import annotations

from typing import Any

from aiograd.errors import ArgumentError
from aiograd.pipeline.microbatch import Call
from aiograd.running.trees import leaves_of
from aiograd.tensors.core import TensorCore


def check_arguments(tree: Any, leaves_process: bool) -> None:
    """Raise if an argument requires grad and cannot get its gradient.

    Args:
        tree: arguments of the first stage.
        leaves_process: they are sent to another worker.

    Raises:
        ArgumentError: an argument requires grad.
    """
    for tensor in leaves_of(tree, TensorCore):
        if tensor.requires_grad and (leaves_process or not tensor.is_leaf):
            why = (
                "its stage is on another worker"
                if leaves_process
                else "it was made by an operation, whose graph each microbatch would run through"
            )
            raise ArgumentError(
                f"an argument of shape {list(tensor.shape)} requires grad, and {why}: detach() it, or make it part of the first stage"
            )


def rows_of(call: Call) -> int:
    """The rows of a microbatch, i.e. of its first Tensor."""
    first = next((tensor for tensor in leaves_of(call, TensorCore) if tensor.ndim), None)
    return 0 if first is None else int(first.shape[0])


def as_it_is(*values: Any) -> Any:
    """The output of a pipeline, to be compared with the target."""
    return values[0] if len(values) == 1 else values

"""Checks on gradients: the outputs of a rule must fit the inputs that they go to.

`fit` is called for every gradient with another shape or dtype than its target. For the rows of the op tables it undoes
broadcasting and casts mixed precision; for user code it finds mistakes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from aiograd.errors import DeviceMismatchError, GradientError
from aiograd.graph.boundary import BOUNDARY
from aiograd.graph.node import Node
from aiograd.ops.broadcasting import expandable, unbroadcast
from aiograd.ops.slice_gradient import dense
from aiograd.running.devices import adopts, device_name_of
from aiograd.running.types import Array, Shape


def fit(grad: Array, shape: Shape, dtype: np.dtype[Any], node: Node, index: int) -> Array:
    """`grad` summed down to `shape` and cast to `dtype`.

    Raises:
        GradientError: `grad` cannot be summed or cast to them.
    """
    grad = dense(grad)
    if grad.shape != shape:
        if not expandable(grad.shape, shape):
            raise GradientError(
                f"Function {node.name} returned an invalid gradient at index {index} - got {list(grad.shape)} but expected shape compatible with "
                f"{list(shape)}. Return a gradient of the argument's shape, or of one it broadcasts to."
            )
        grad = unbroadcast(grad, shape)
    if grad.dtype is not dtype and grad.dtype != dtype:
        kind = grad.dtype.kind
        if kind == "c" and dtype.kind != "c":
            grad = np.real(grad)
            kind = "f"
        if kind not in "fc" or dtype.kind not in "fc":
            raise GradientError(
                f"Function {node.name} returned an invalid gradient at index {index} - got dtype {grad.dtype}, expected {dtype}: gradients are "
                "floating point"
            )
        if grad.dtype != dtype:
            grad = np.astype(grad, dtype)
    return grad


def fit_outputs(node: Node, outputs: Sequence[Array | None]) -> list[Array | None]:
    """The outputs of a row's node, each fitted to the input it goes to."""
    fitted: list[Array | None] = []
    for i, (child, nr, grad) in enumerate(zip(node.next_nodes, node.next_nrs, outputs, strict=True)):
        if child is None or grad is None:
            fitted.append(None)
            continue
        if child.is_single:
            shape, dtype = child.shape, child.dtype  # type: ignore[attr-defined]
        else:
            metadata = child.metadata_of(nr)
            if metadata is None:
                fitted.append(grad)
                continue
            shape, dtype = metadata.shape, metadata.dtype
        if grad.shape != shape or grad.dtype is not dtype:
            grad = fit(grad, shape, dtype, node, i)
        fitted.append(grad)
    return fitted


def check_outputs(node: Node, outputs: Any, create_graph: bool) -> list[Array | None]:
    """The gradients that user code returned for the node's edges, checked (number, type, device, real or complex) and fitted.

    Raises:
        GradientError, DeviceMismatchError: it does not fit.
    """
    if outputs is None and node.num_outputs == 0:
        return []
    if not isinstance(outputs, (tuple, list)):
        outputs = (outputs,)
    expected = node.num_outputs
    if len(outputs) > expected and all(extra is None for extra in outputs[expected:]):
        outputs = outputs[:expected]
    if len(outputs) != expected:
        raise GradientError(
            f"function {node.name} returned an incorrect number of gradients (expected {expected}, got {len(outputs)}): return one per argument "
            "of forward, None where there is none"
        )
    arrays: list[Array | None] = []
    for i, (child, nr, output) in enumerate(zip(node.next_nodes, node.next_nrs, outputs, strict=True)):
        if output is None or child is None:
            arrays.append(None)
            continue
        if not BOUNDARY.is_tensor(output):
            if not (hasattr(output, "shape") and hasattr(output, "dtype")):
                raise GradientError(
                    f"function {node.name} returned {type(output).__name__} at index {i}; expected a Tensor or None. Return one gradient per "
                    "argument."
                )
            output = BOUNDARY.wrap(output)
        array = output if create_graph else BOUNDARY.unwrap(output)
        metadata = child.metadata_of(nr)
        if metadata is not None:
            device = device_of(array)
            if device != metadata.device and not adopts(device):
                raise DeviceMismatchError(
                    f"Function {node.name} returned a gradient at index {i} on device {device}; expected {metadata.device}. Move it with .to()."
                )
            refuse_complex(node.name, i, array, metadata.dtype)
            if array.shape != metadata.shape or array.dtype != metadata.dtype:
                array = fit(array, metadata.shape, metadata.dtype, node, i)
        arrays.append(array)
    return arrays


def refuse_complex(name: str, index: int, grad: Array, expected: np.dtype[Any]) -> None:
    """Raise for a complex gradient that user code, the function of this name, returned for a real argument.

    Raises:
        GradientError: it did.
    """
    if grad.dtype.kind == "c" and expected.kind != "c":
        raise GradientError(
            f"Function {name} returned an invalid gradient at index {index} - got dtype {grad.dtype}, expected {expected}: the argument is real. "
            "Return the real part, np.real(gradient)."
        )


def device_of(array: Array) -> str:
    """Name of the device an array or Tensor lives on."""
    return device_name_of(BOUNDARY.unwrap(array) if BOUNDARY.is_tensor(array) else array)

"""Arguments and results of functions of functions: stand-ins for inputs, vectors, and outputs, checked."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from aiograd.errors import ArgumentError, ArgumentTypeError, ShapeError
from aiograd.running.caller import type_found
from aiograd.running.modes import enable_grad
from aiograd.running.offloading import ready
from aiograd.tensors.core import TensorCore, make, outside

Fn = Callable[..., Any]

# -------------------------------------------------------------------- calling the function


async def call(fn: Fn, args: Sequence[Any], what: str, *, beside: bool = False) -> tuple[tuple[Any, ...], bool]:
    """Call `fn`, wait for its result, and check that it consists of Tensors.

    Args:
        fn: ``def`` or ``async def``.
        args: its arguments.

        what: name of the calling function, for messages.
        beside: True if integer and boolean outputs are allowed beside floating ones.

    Returns:
        The outputs, and True if `fn` returned one Tensor rather than a sequence.

    Raises:
        ArgumentTypeError: `fn` returned something else.
    """
    return outputs_of(what, await returned_by(what, fn, args), beside)


async def returned_by(what: str, fn: Fn, args: Sequence[Any]) -> Any:
    """The result of `fn`, awaited, with all its data there."""
    if not callable(fn):
        raise ArgumentTypeError(f"{what}: expected a function of the inputs, found {type_found(fn)}; pass the function, not its result")
    returned = fn(*args)
    if inspect.isawaitable(returned):
        returned = await returned
    return await ready(returned)


def outputs_of(what: str, returned: Any, beside: bool = False) -> tuple[tuple[Any, ...], bool]:
    """The outputs of a function, checked; see `call`."""
    one = not isinstance(returned, (tuple, list))
    outputs = (returned,) if one else tuple(returned)
    beside = beside and any(isinstance(output, TensorCore) and output.dtype.kind in "fc" for output in outputs)
    for i, output in enumerate(outputs):
        if not isinstance(output, TensorCore):
            raise ArgumentTypeError(f"{what}: output {i} of fn is a {type(output).__name__}; expected fn to return a Tensor or a tuple of Tensors")
        if output.dtype.kind not in "fc" and not beside:
            raise ArgumentTypeError(f"{what}: output {i} of fn has dtype {output.dtype}; expected floating point or complex")
    if not outputs:
        raise ArgumentError(f"{what}: fn returned no outputs; expected a Tensor or a tuple of Tensors")
    return outputs, one


def scalar_of(what: str, outputs: tuple[Any, ...]) -> Any:
    """The only output of a function, a real number."""
    if len(outputs) != 1 or outputs[0].size != 1:
        found = ", ".join(str(list(output.shape)) for output in outputs)
        raise ShapeError(f"{what}: fn returned {len(outputs)} output(s) of shape {found}; expected a single element. Use jacobian().")
    if outputs[0].dtype.kind != "f":
        raise ArgumentTypeError(f"{what}: fn returned dtype {outputs[0].dtype}; expected a real number")
    return outputs[0]


# -------------------------------------------------------------------- arguments and results


def stand_ins_for(what: str, inputs: Any, create_graph: bool, *, leaves: bool = True) -> tuple[tuple[Any, ...], bool]:
    """The stand-ins for the inputs (see Note [The differentiated function]), and True if there was one input rather than a sequence.

    Args:
        what, inputs, create_graph: as of the caller.
        leaves: they require grad.
    """
    one = not isinstance(inputs, (tuple, list))
    listed = (inputs,) if one else tuple(inputs)
    if not listed:
        raise ArgumentError(f"{what}: expected at least one input")
    made: list[Any] = []
    for i, tensor in enumerate(listed):
        if not isinstance(tensor, TensorCore):
            raise ArgumentTypeError(f"{what}: input {i} is a {type(tensor).__name__}; expected a Tensor. Make one with aiograd.tensor().")
        if tensor.dtype.kind not in "fc":
            raise ArgumentTypeError(f"{what}: input {i} has dtype {tensor.dtype}; expected floating point or complex: others have no derivative")
        if create_graph and tensor.requires_grad:
            with enable_grad():
                made.append(tensor.reshape(tensor.shape))  # type: ignore[attr-defined]
        else:
            made.append(outside(tensor).requires_grad_(leaves))
    return tuple(made), one


def vectors_for(what: str, v: Any, targets: Sequence[Any], kind: str) -> tuple[Any, ...]:
    """The vectors to multiply with, one per target."""
    if v is None:
        if len(targets) != 1 or targets[0].size != 1:
            raise ShapeError(f"{what}: v may be left out for a single {kind} of one element only; give one Tensor per {kind}, of its shape")
        return (make(np.ones_like(targets[0]._data)),)
    listed = tuple(v) if isinstance(v, (tuple, list)) else (v,)
    if len(listed) != len(targets):
        raise ArgumentError(f"{what}: got {len(listed)} vectors for {len(targets)} {kind}s; expected one each")
    for i, (vector, target) in enumerate(zip(listed, targets, strict=True)):
        if not isinstance(vector, TensorCore):
            raise ArgumentTypeError(f"{what}: vector {i} is a {type(vector).__name__}; expected a Tensor")
        if vector.shape != target.shape or vector.dtype != target.dtype:
            raise ShapeError(
                f"{what}: vector {i} is {vector.dtype}{list(vector.shape)}; expected {target.dtype}{list(target.shape)}, as {kind} {i}. "
                "Reshape it, or cast it with .astype()."
            )
    return listed


def refuse_complex(what: str, tensors: Sequence[Any]) -> None:
    """Raise where a Tensor is complex."""
    if any(tensor.dtype.kind == "c" for tensor in tensors):
        raise ArgumentTypeError(f"{what}: expected real inputs and outputs, found complex ones. Split them with np.real and np.imag.")


def detached(tensors: Sequence[Any], create_graph: bool) -> tuple[Any, ...]:
    """Results outside of the graph, but for `create_graph`."""
    return tuple(tensors) if create_graph else tuple(outside(tensor) for tensor in tensors)


def packed(results: Any, one: bool) -> Any:
    """The only result by itself where there was one argument, not a sequence."""
    return results[0] if one else results


def zeros(like: Any) -> Any:
    """A Tensor of zeros."""
    return make(np.zeros_like(like._data))

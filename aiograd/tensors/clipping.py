"""Limiting gradients before a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, ValuesView
from typing import Any

import numpy as np

from aiograd.errors import ArgumentError, ArgumentTypeError, GradientError
from aiograd.running.caller import type_found
from aiograd.running.devices import ScalesGradients, device, device_name_of
from aiograd.running.modes import current_mode
from aiograd.tensors.core import TensorCore, make
from aiograd.tensors.norms import check_limits, factor_for, norm_of, scaled, size_of, sum_of
from aiograd.tensors.tensor import Tensor

_EXPECTED = "expected Tensors, or a mapping of Tensors to their gradients"


def _check_tensors(what: str, given: Iterable[Any]) -> None:
    for each in given:
        if not isinstance(each, TensorCore):
            raise ArgumentTypeError(f"{what}: {_EXPECTED}, found a {type_found(each)} among them")


def _gradients(what: str, parameters: Any) -> tuple[list[Any], Callable[[list[Any]], None]]:
    """The gradients as arrays, and what puts others in their place."""
    if isinstance(parameters, ValuesView) and not isinstance(parameters, type({}.values())):
        raise ArgumentTypeError(f"{what}: got the values of a mapping; expected the mapping itself, whose gradients can be replaced")
    if isinstance(parameters, Mapping):
        found: Any = parameters
        owners = list(found)
        _check_tensors(what, found.values())

        def replace(arrays: list[Any]) -> None:
            for p, array in zip(owners, arrays, strict=True):
                found[p] = make(array)

        return [found[p].detach()._data for p in owners], replace
    if not isinstance(parameters, Iterable) or isinstance(parameters, (str, bytes)):
        advice = ": write parameters()" if hasattr(parameters, "parameters") else ""
        raise ArgumentTypeError(f"{what}: {_EXPECTED}, found {type_found(parameters)}{advice}")
    given = [parameters] if isinstance(parameters, TensorCore) else list(parameters)
    _check_tensors(what, given)
    given = [p for p in given if p.grad is not None]

    def assign(arrays: list[Any]) -> None:
        for p, array in zip(given, arrays, strict=True):
            p.grad = make(array)

    return [p.grad.detach()._data for p in given], assign


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor] | Mapping[Tensor, Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale gradients so that their norm, taken together, is at most `max_norm`.

    Args:
        parameters: the ``grad`` of each is scaled; those without one are left out. Or a mapping of parameters to gradients, such as ``ctx.grads``,
            which are replaced in it.
        max_norm: the limit.
        norm_type: p of the norm; ``inf`` is the largest magnitude.
        error_if_nonfinite: True if an infinite or NaN norm is an error; else it makes gradients NaN, or zero.

    Returns:
        The norm before scaling, 0-d.

    Raises:
        GradientError: the norm is not finite; nothing has changed.
        ArgumentError, ArgumentTypeError: no such norm or limit, or neither Tensors nor a mapping of them; nothing has changed.
    """
    trace = current_mode().trace
    if trace is not None:
        norm: Tensor = trace.acts("clip_grad_norm_", clip_grad_norm_, parameters, max_norm, norm_type, error_if_nonfinite)
        return norm
    check_limits("clip_grad_norm_", max_norm, norm_type)
    arrays, replace = _gradients("clip_grad_norm_", parameters)
    if not arrays:
        return make(np.zeros((), np.float32))  # type: ignore[no-any-return]
    there = device(device_name_of(arrays[0]))
    total: Any = there.sum_of_squares(arrays) if norm_type == 2 and isinstance(there, ScalesGradients) else None
    if total is None:
        total = sum_of((size_of(array, norm_type) for array in arrays), norm_type)
    total = norm_of(total, norm_type)
    norm = make(total)
    if error_if_nonfinite and not math.isfinite(norm.item()):
        raise GradientError(
            f"clip_grad_norm_: the norm of order {norm_type} of the gradients is {norm.item()}; pass error_if_nonfinite=False to go on"
        )
    scale = factor_for(total, max_norm)
    if norm.device == "cpu" and scale == 1.0:
        return norm
    clipped = there.scaled(arrays, scale) if isinstance(there, ScalesGradients) else None
    replace(scaled(arrays, scale) if clipped is None else clipped)
    return norm


def clip_grad_value_(parameters: Tensor | Iterable[Tensor] | Mapping[Tensor, Tensor], clip_value: float) -> None:
    """Limit every element of the gradients to [-clip_value, clip_value].

    Args:
        parameters: as of `clip_grad_norm_`.
        clip_value: the limit.

    Raises:
        ArgumentError, ArgumentTypeError: the limit is below 0 or no number, or neither Tensors nor a mapping of them; nothing has changed.
    """
    trace = current_mode().trace
    if trace is not None:
        trace.acts("clip_grad_value_", clip_grad_value_, parameters, clip_value)
        return
    if not hasattr(clip_value, "__float__"):
        raise ArgumentTypeError(f"clip_grad_value_(clip_value={clip_value!r:.100}): expected a number, found {type_found(clip_value)}")
    if not clip_value >= 0:
        raise ArgumentError(f"clip_grad_value_(clip_value={clip_value}): expected a limit of at least 0")
    arrays, replace = _gradients("clip_grad_value_", parameters)
    replace([np.clip(array, -clip_value, clip_value) for array in arrays])

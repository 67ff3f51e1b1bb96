"""Limiting gradients before a step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from aiograd.devices import ScalesGradients, device, device_name_of
from aiograd.errors import ArgumentError, GradientError
from aiograd.ops.creation import astype
from aiograd.tensors.core import TensorCore, make
from aiograd.tensors.tensor import Tensor


def _with_gradients(parameters: Any) -> list[Any]:
    given = [parameters] if isinstance(parameters, TensorCore) else list(parameters)
    return [p for p in given if p.grad is not None]


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale gradients so that their norm, taken together, is at most `max_norm`.

    Args:
        parameters: whose ``grad`` to scale; those without one are left out.
        max_norm: the limit.
        norm_type: p of the norm; ``inf`` is the largest magnitude.
        error_if_nonfinite: whether an infinite or NaN norm is an error; else it makes gradients NaN, or zero.

    Returns:
        The norm before scaling, 0-d.

    Raises:
        GradientError: the norm is not finite; nothing has changed.
    """
    if not max_norm >= 0 or not norm_type > 0:
        raise ArgumentError(f"clip_grad_norm_(max_norm={max_norm}, norm_type={norm_type}): expected a limit of at least 0 and a norm above 0")
    owners = _with_gradients(parameters)
    if not owners:
        return make(np.zeros((), np.float32))  # type: ignore[no-any-return]
    arrays = [p.grad.detach()._data for p in owners]
    there = device(device_name_of(arrays[0]))
    total: Any = there.sum_of_squares(arrays) if norm_type == 2 and isinstance(there, ScalesGradients) else None
    if total is None:
        for array in arrays:
            size = _power_sum(array, norm_type)
            total = size if total is None else np.maximum(total, size) if math.isinf(norm_type) else total + size
    if not math.isinf(norm_type):
        total = np.sqrt(total) if norm_type == 2 else total ** (1.0 / norm_type)
    norm: Tensor = make(total)
    if error_if_nonfinite and not math.isfinite(norm.item()):
        raise GradientError(
            f"clip_grad_norm_: the norm of order {norm_type} of the gradients is {norm.item()}; pass error_if_nonfinite=False to go on"
        )
    scale = np.minimum(max_norm / (total + 1e-6), 1.0)
    if norm.device == "cpu" and scale == 1.0:
        return norm
    scaled = there.scaled(arrays, scale) if isinstance(there, ScalesGradients) else None
    if scaled is None:
        scaled = [astype(array * scale, dtype=array.dtype, copy=False) for array in arrays]
    for p, array in zip(owners, scaled, strict=True):
        p.grad = make(array)
    return norm


def _power_sum(array: Any, norm_type: float) -> Any:
    """What the norm is made of: the sum of powers of magnitudes, or the largest of them."""
    if type(array) is np.ndarray and norm_type == 2:
        flat = np.ascontiguousarray(array, np.float32 if array.dtype == np.float16 else None).reshape(-1)
        return np.real(np.vdot(flat, flat))
    size = np.abs(array)
    if math.isinf(norm_type):
        return np.max(size) if array.size else np.sum(size)
    return np.sum(size**norm_type)


def clip_grad_value_(parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
    """Limit every element of the gradients to [-clip_value, clip_value].

    Args:
        parameters: whose ``grad`` to limit; those without one are left out.
        clip_value: the limit.
    """
    if not clip_value >= 0:
        raise ArgumentError(f"clip_grad_value_(clip_value={clip_value}): expected a limit of at least 0")
    for p in _with_gradients(parameters):
        p.grad = make(np.clip(p.grad.detach()._data, -clip_value, clip_value))

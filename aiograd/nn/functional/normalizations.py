"""Normalisation as functions: over trailing axes, groups of channels, the batch, or vectors along an axis."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Sequence
from typing import Any

from aiograd.array_functions.conversion import ArrayLike, as_tensor, row
from aiograd.array_functions.elementwise import maximum, sqrt
from aiograd.array_functions.linalg import vector_norm
from aiograd.array_functions.manipulation import broadcast_arrays
from aiograd.errors import ArgumentError, ArgumentTypeError, ShapeError
from aiograd.nn.functional.activations import axis_of
from aiograd.nn.functional.documentation import document
from aiograd.tensors import inplace
from aiograd.tensors.core import TensorCore
from aiograd.tensors.record import call
from aiograd.tensors.tensor import Tensor

_layer_norm, _rms_norm, _group_norm, _batch_norm = (row(name) for name in ("layer_norm", "rms_norm", "group_norm", "batch_norm"))


def _normalized(name: str, x: Tensor, normalized_shape: int | Sequence[int]) -> int:
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    if not shape or x.shape[-len(shape) :] != shape:
        raise ShapeError(f"{name}: found an input of shape {list(x.shape)}, expected (..., {', '.join(map(str, shape))})")
    return len(shape)


def layer_norm(
    input: ArrayLike, normalized_shape: int | Sequence[int], weight: ArrayLike | None = None, bias: ArrayLike | None = None, eps: float = 1e-5
) -> Tensor:
    """Mean 0 and variance 1 over the last axes, then scaled and shifted."""
    x = as_tensor(input)
    options = {"ndims": _normalized("layer_norm", x, normalized_shape), "eps": eps}
    return call(_layer_norm, (x, weight, bias), options)  # type: ignore[no-any-return]


def rms_norm(input: ArrayLike, normalized_shape: int | Sequence[int], weight: ArrayLike | None = None, eps: float | None = None) -> Tensor:
    """Root mean square 1 over the last axes, then scaled."""
    x = as_tensor(input)
    return call(_rms_norm, (x, weight), {"ndims": _normalized("rms_norm", x, normalized_shape), "eps": eps})  # type: ignore[no-any-return]


def group_norm(input: ArrayLike, num_groups: int, weight: ArrayLike | None = None, bias: ArrayLike | None = None, eps: float = 1e-5) -> Tensor:
    """Mean 0 and variance 1 over groups of channels of each sample, then scaled and shifted per channel."""
    return call(_group_norm, (input, weight, bias), {"num_groups": num_groups, "eps": eps})  # type: ignore[no-any-return]


def batch_norm(
    input: ArrayLike,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Mean 0 and variance 1 per channel over the batch, or by running statistics; then scaled and shifted per channel.

    Raises:
        ArgumentError: evaluation without running statistics.
        ShapeError: a training batch of one value per channel, or fewer than two axes.
    """
    x = as_tensor(input)
    if training:
        _check_running("batch_norm", x, running_mean, running_var)
        count = x.size // x.shape[1] if x.ndim >= 2 and x.shape[1] else 0
        if count < 2:
            raise ShapeError(f"batch_norm in training: found an input of shape {list(x.shape)}, expected more than one value per channel")
        out, mean, var = call(_batch_norm, (x, weight, bias), {"eps": eps})
        if running_mean is not None:
            inplace.perform("track", functools.partial(_track, running_mean, momentum, 1.0), mean)
        if running_var is not None:
            inplace.perform("track", functools.partial(_track, running_var, momentum, count / (count - 1)), var)
        return out  # type: ignore[no-any-return]
    if running_mean is None or running_var is None:
        raise ArgumentError("batch_norm in evaluation: expected running_mean and running_var, found None; pass training=True to measure")
    along = (-1,) + (1,) * (x.ndim - 2)
    mean, var = as_tensor(running_mean).detach(), as_tensor(running_var).detach()
    scale = 1.0 / sqrt(var + eps)
    if weight is not None:
        scale = scale * as_tensor(weight)
    shift = -mean * scale
    if bias is not None:
        shift = shift + as_tensor(bias)
    return x * scale.reshape(along) + shift.reshape(along)


def instance_norm(
    input: ArrayLike,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Mean 0 and variance 1 per channel of each sample, or by running statistics; then scaled and shifted per channel.

    Raises:
        ShapeError: one value per channel, or too few axes.
    """
    x = as_tensor(input)
    if not use_input_stats:
        return batch_norm(x, running_mean, running_var, weight, bias, False, momentum, eps)
    count = math.prod(x.shape[2:])
    if x.ndim < 3 or count < 2:
        raise ShapeError(f"instance_norm: found an input of shape {list(x.shape)}, expected (N, C, ...) with more than one value per channel")
    _check_running("instance_norm", x, running_mean, running_var)
    plain = x.detach()
    axes = tuple(range(2, x.ndim))
    if running_mean is not None:
        inplace.perform("track", functools.partial(_track, running_mean, momentum, 1.0), plain.mean(axes).mean(0))
    if running_var is not None:
        inplace.perform("track", functools.partial(_track, running_var, momentum, count / (count - 1)), plain.var(axes).mean(0))
    return group_norm(x, x.shape[1], weight, bias, eps)


def _check_running(name: str, x: Tensor, *running: Any) -> None:
    """Refuse running statistics that cannot be written."""
    for each in running:
        if each is not None and not isinstance(each, TensorCore):
            raise ArgumentTypeError(f"{name}: a running statistic is a {type(each).__name__}; expected a Tensor, since it is updated in place")
        if each is not None and x.ndim >= 2 and each.shape != x.shape[1:2]:
            raise ShapeError(f"{name}: a running statistic has shape {list(each.shape)}, expected [{x.shape[1]}], one value per channel of the input")


def _track(running: Tensor, momentum: float, factor: float, measured: Any) -> None:
    """Move a running statistic towards the statistic of a batch, times `factor`."""
    if factor != 1.0:
        measured = measured * factor
    step = measured - running._data
    step *= momentum
    step += running._data
    inplace.write(running, step)


def normalize(input: ArrayLike, p: float = 2.0, dim: int | None = None, eps: float = 1e-12, *, axis: int | None = None) -> Tensor:
    """Divide by the norm along an axis (the second by default), or by `eps` if the norm is smaller.

    Args:
        input: any shape.
        p: the order of the norm.
        dim: the axis; 1 by default.
        eps: the least norm that is divided by.
        axis: another name of `dim`.

    Returns:
        A Tensor of the shape of `input`.
    """
    x = as_tensor(input)
    along = axis_of("normalize", dim, axis, 1)
    return x / maximum(vector_norm(x, axis=along, keepdims=True, ord=p), eps)


def cosine_similarity(x1: ArrayLike, x2: ArrayLike, dim: int | None = None, eps: float = 1e-8, *, axis: int | None = None) -> Tensor:
    """Cosines of the angles between vectors along an axis (the second by default).

    Args:
        x1: vectors along an axis.
        x2: the same, of a shape that broadcasts.
        dim: the axis; 1 by default.
        eps: the least norm that is divided by.
        axis: another name of `dim`.

    Returns:
        A Tensor without the axis.
    """
    first, second = broadcast_arrays(x1, x2)  # before the norms: a vector that is repeated is longer
    along = axis_of("cosine_similarity", dim, axis, 1)
    norms = [maximum(vector_norm(x, axis=along, keepdims=True), eps) for x in (first, second)]
    return ((first / norms[0]) * (second / norms[1])).sum(along)


document(sys.modules[__name__])

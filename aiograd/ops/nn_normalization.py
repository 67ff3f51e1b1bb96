"""Layer, RMS, group and batch normalisation.

Note [One standardisation]
    Three of the four subtract a mean and divide by a deviation over some axes; they differ in the axes and in where the weights apply.
    `standardize` and `standardize_vjp` are that common part. The plain rules recompute the standardised input from `x`, since saving
    it would double the memory of the row; the compiled kernels keep the two statistics per row.

Rejected: composing the norms from mean, sub, mul, ...: eight nodes and as many saved arrays where two statistics do.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from aiograd.errors import ArgumentError, ShapeError
from aiograd.kernels import normalization as kernels
from aiograd.kernels.arrays import as_rows
from aiograd.ops.op import Fused, define
from aiograd.running.types import Array, Shape


def standardize(x: Array, axes: tuple[int, ...], eps: float) -> tuple[Array, Array]:
    """``(x - mean) / sqrt(var + eps)`` over `axes`, and the reciprocal deviation (axes kept)."""
    if not x.size:
        return x, x
    centred = x - np.mean(x, axis=axes, keepdims=True)
    rstd = 1.0 / np.sqrt(np.mean(np.square(centred), axis=axes, keepdims=True) + eps)
    return centred * rstd, rstd


def standardize_vjp(g: Array, x: Array, axes: tuple[int, ...], eps: float) -> Array:
    """Gradient of the first result of `standardize` with respect to `x`."""
    if not x.size:
        return g
    unit, rstd = standardize(x, axes, eps)
    return rstd * (g - np.mean(g, axis=axes, keepdims=True) - unit * np.mean(g * unit, axis=axes, keepdims=True))


def _trailing(x: Array, ndims: int) -> tuple[int, ...]:
    return tuple(range(x.ndim - ndims, x.ndim))


def _check_trailing(name: str, x: Array, ndims: int, weight: Array, bias: Array) -> None:
    if not 1 <= ndims <= x.ndim:
        raise ArgumentError(f"{name}: ndims={ndims} on an input of shape {x.shape}: expected 1 to {x.ndim} trailing axes")
    for label, value in (("weight", weight), ("bias", bias)):
        if value is not None and value.shape != x.shape[x.ndim - ndims :]:
            raise ShapeError(f"{name}: {label} has shape {value.shape}, expected that of the normalised axes, {x.shape[x.ndim - ndims:]}")


def _affine(unit: Array, weight: Array, bias: Array) -> Array:
    if weight is not None:
        unit = unit * weight
    return unit if bias is None else unit + bias


def _layer_norm(x: Array, weight: Array = None, bias: Array = None, /, ndims: int = 1, eps: float = 1e-5) -> Array:
    """Standardise over the last `ndims` axes, then scale and shift.

    Args:
        x: (..., *normalised).
        weight: (*normalised,) or absent.
        bias: (*normalised,) or absent.
        ndims: how many trailing axes are normalised together.
        eps: added to the variance.
    """
    _check_trailing("layer_norm", x, ndims, weight, bias)
    return _affine(standardize(x, _trailing(x, ndims), eps)[0], weight, bias)


def _length(x: Array, ndims: int) -> int:
    return math.prod(x.shape[x.ndim - ndims :])


def _flat(weight: Array) -> Array:
    return None if weight is None else weight.reshape(-1)


def _fused_layer_norm(x: Array, weight: Array, bias: Array, ndims: int, eps: float) -> tuple[Array, ...]:
    _check_trailing("layer_norm", x, ndims, weight, bias)
    if x.size == 0 or x.dtype.kind != "f":
        return _layer_norm(x, weight, bias, ndims, eps), None, None
    out, mean, rstd = kernels.layer_norm(as_rows(x, _length(x, ndims)), _flat(weight), _flat(bias), eps)
    return out.reshape(x.shape), mean, rstd


def _fused_layer_norm_vjp(
    g: Array, needs: tuple[bool, bool, bool], x: Array, weight: Array, mean: Array, rstd: Array, ndims: int
) -> tuple[Array, ...]:
    if mean is None:
        empty = np.zeros(x.shape[x.ndim - ndims :], g.dtype)
        return np.zeros(x.shape, g.dtype), empty, empty
    n = _length(x, ndims)
    dx, dweight, dbias = kernels.layer_norm_grad(as_rows(g, n), as_rows(x, n), _flat(weight), mean, rstd, needs)
    shape = x.shape[x.ndim - ndims :]
    return tuple(None if d is None else d.reshape(s) for d, s in ((dx, x.shape), (dweight, shape), (dbias, shape)))


layer_norm = define(
    "layer_norm",
    _layer_norm,
    x=lambda g, x, weight, ndims, eps: standardize_vjp(g if weight is None else g * weight, x, _trailing(x, ndims), eps),
    weight=lambda g, x, ndims, eps: g * standardize(x, _trailing(x, ndims), eps)[0],
    bias=lambda g: g,
    jvp={
        "x": lambda t, x, weight, ndims, eps: _affine(standardize_vjp(t, x, _trailing(x, ndims), eps), weight, None),
        "weight": lambda t, x, ndims, eps: t * standardize(x, _trailing(x, ndims), eps)[0],
        "bias": lambda t: t,
    },
    cost=4.0,
    fused=Fused(_fused_layer_norm, ("mean", "rstd"), joint={("x", "weight", "bias"): _fused_layer_norm_vjp}, cost=0.7),
)


def _root_mean_square(x: Array, ndims: int, eps: float | None) -> Array:
    if not x.size:
        return 1.0
    small = float(np.finfo(x.dtype).eps) if eps is None else eps
    return 1.0 / np.sqrt(np.mean(np.square(x), axis=_trailing(x, ndims), keepdims=True) + small)


def _rms_norm(x: Array, weight: Array = None, /, ndims: int = 1, eps: float | None = None) -> Array:
    """Divide by the root mean square over the last `ndims` axes, then scale.

    Args:
        x: (..., *normalised), floating point.
        weight: (*normalised,) or absent.
        ndims: how many trailing axes are normalised together.
        eps: added to the mean square; None: the machine epsilon of the dtype.
    """
    _check_trailing("rms_norm", x, ndims, weight, None)
    return _affine(x * _root_mean_square(x, ndims, eps), weight, None)


def _rms_norm_x(g: Array, x: Array, weight: Array, ndims: int, eps: float | None) -> Array:
    if not x.size:
        return g
    r = _root_mean_square(x, ndims, eps)
    unit = x * r
    g = g if weight is None else g * weight
    return r * (g - unit * np.mean(g * unit, axis=_trailing(x, ndims), keepdims=True))


def _fused_rms_norm(x: Array, weight: Array, ndims: int, eps: float | None) -> tuple[Array, ...]:
    _check_trailing("rms_norm", x, ndims, weight, None)
    if x.size == 0:
        return _rms_norm(x, weight, ndims, eps), None
    small = float(np.finfo(x.dtype).eps) if eps is None else eps
    out, scale = kernels.rms_norm(as_rows(x, _length(x, ndims)), _flat(weight), small)
    return out.reshape(x.shape), scale


def _fused_rms_norm_vjp(g: Array, needs: tuple[bool, bool], x: Array, weight: Array, scale: Array, ndims: int) -> tuple[Array, ...]:
    if scale is None:
        return np.zeros(x.shape, g.dtype), np.zeros(x.shape[x.ndim - ndims :], g.dtype)
    n = _length(x, ndims)
    dx, dweight = kernels.rms_norm_grad(as_rows(g, n), as_rows(x, n), _flat(weight), scale, needs)
    return (None if dx is None else dx.reshape(x.shape)), (None if dweight is None else dweight.reshape(x.shape[x.ndim - ndims :]))


rms_norm = define(
    "rms_norm",
    _rms_norm,
    x=_rms_norm_x,
    weight=lambda g, x, ndims, eps: g * (x * _root_mean_square(x, ndims, eps)),
    jvp={
        "x": lambda t, x, weight, ndims, eps: _affine(_rms_norm_x(t, x, None, ndims, eps), weight, None),
        "weight": lambda t, x, ndims, eps: t * (x * _root_mean_square(x, ndims, eps)),
    },
    cost=5.0,
    fused=Fused(_fused_rms_norm, ("scale",), joint={("x", "weight"): _fused_rms_norm_vjp}, cost=0.7),
)


def _per_channel(value: Array, ndim: int) -> Array:
    return np.reshape(value, (1, value.shape[0]) + (1,) * (ndim - 2))


def _all_but_channel(ndim: int) -> tuple[int, ...]:
    return (0, *range(2, ndim))


def _check_channels(name: str, x: Array, weight: Array, bias: Array) -> None:
    if x.ndim < 2:
        raise ShapeError(f"{name}: x has shape {x.shape}, expected (N, C, ...)")
    for label, value in (("weight", weight), ("bias", bias)):
        if value is not None and value.shape != (x.shape[1],):
            raise ShapeError(f"{name}: {label} has shape {value.shape}, expected ({x.shape[1]},), one value per channel of x {x.shape}")


def _channel_affine(unit: Array, weight: Array, bias: Array) -> Array:
    return _affine(unit, None if weight is None else _per_channel(weight, unit.ndim), None if bias is None else _per_channel(bias, unit.ndim))


def _grouped(x_shape: Shape, groups: int) -> Shape:
    return (x_shape[0], groups, math.prod(x_shape[1:]) // groups)


def _group_unit(x: Array, groups: int, eps: float) -> Array:
    return np.reshape(standardize(np.reshape(x, _grouped(x.shape, groups)), (2,), eps)[0], x.shape)


def _group_norm(x: Array, weight: Array = None, bias: Array = None, /, num_groups: int = 1, eps: float = 1e-5) -> Array:
    """Standardise each group of channels of each sample, then scale and shift each channel.

    Args:
        x: (N, C, ...).
        weight: (C,) or absent.
        bias: (C,) or absent.
        num_groups: divides C.
        eps: added to the variance.
    """
    _check_channels("group_norm", x, weight, bias)
    if num_groups < 1 or x.shape[1] % num_groups:
        raise ArgumentError(f"group_norm: num_groups={num_groups} does not divide the {x.shape[1]} channels of x {x.shape}")
    return _channel_affine(_group_unit(x, num_groups, eps), weight, bias)


def _group_norm_x(g: Array, x: Array, weight: Array, num_groups: int, eps: float) -> Array:
    g = g if weight is None else g * _per_channel(weight, x.ndim)
    grouped = _grouped(x.shape, num_groups)
    return np.reshape(standardize_vjp(np.reshape(g, grouped), np.reshape(x, grouped), (2,), eps), x.shape)


group_norm = define(
    "group_norm",
    _group_norm,
    x=_group_norm_x,
    weight=lambda g, x, num_groups, eps: np.sum(g * _group_unit(x, num_groups, eps), axis=_all_but_channel(x.ndim)),
    bias=lambda g: np.sum(g, axis=_all_but_channel(g.ndim)),
    jvp={
        "x": lambda t, x, weight, num_groups, eps: _channel_affine(_group_norm_x(t, x, None, num_groups, eps), weight, None),
        "weight": lambda t, x, num_groups, eps: _channel_affine(_group_unit(x, num_groups, eps), t, None),
        "bias": lambda t, x_shape: _per_channel(t, len(x_shape)),
    },
    cost=6.0,
)


def _batch_norm(x: Array, weight: Array = None, bias: Array = None, /, eps: float = 1e-5) -> tuple[Array, Array, Array]:
    """Standardise each channel over the batch (what training does), then scale and shift it.

    Args:
        x: (N, C, ...).
        weight: (C,) or absent.
        bias: (C,) or absent.
        eps: added to the variance.

    Returns:
        The normalised array, and the mean and the biased variance of each channel, (C,), which carry no gradient.
    """
    _check_channels("batch_norm", x, weight, bias)
    axes = _all_but_channel(x.ndim)
    mean = np.mean(x, axis=axes, keepdims=True)
    centred = x - mean
    var = np.mean(np.square(centred), axis=axes, keepdims=True)
    return _channel_affine(centred / np.sqrt(var + eps), weight, bias), np.reshape(mean, (x.shape[1],)), np.reshape(var, (x.shape[1],))


def _batch_norm_x(g: tuple[Array, ...], x: Array, weight: Array, eps: float) -> Array:
    scaled = g[0] if weight is None else g[0] * _per_channel(weight, x.ndim)
    return standardize_vjp(scaled, x, _all_but_channel(x.ndim), eps)


def _batch_norm_weight(g: tuple[Array, ...], x: Array, eps: float) -> Array:
    return np.sum(g[0] * standardize(x, _all_but_channel(x.ndim), eps)[0], axis=_all_but_channel(x.ndim))


def _batch_norm_jvp(t: tuple[Array | None, ...], x: Array, weight: Array, eps: float) -> tuple[Array, None, None]:
    axes = _all_but_channel(x.ndim)
    parts = [] if t[0] is None else [_channel_affine(standardize_vjp(t[0], x, axes, eps), weight, None)]
    if t[1] is not None:
        parts.append(_channel_affine(standardize(x, axes, eps)[0], t[1], None))
    if t[2] is not None:
        parts.append(_per_channel(t[2], x.ndim))
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total, None, None


def _planes(x: Array) -> Array:
    return x.reshape(x.shape[0], x.shape[1], math.prod(x.shape[2:]))


def _fused_batch_norm(x: Array, weight: Array, bias: Array, eps: float) -> tuple[Any, ...]:
    _check_channels("batch_norm", x, weight, bias)
    if x.size == 0 or x.dtype.char not in "fd" or any(v is not None and v.dtype != x.dtype for v in (weight, bias)):
        return _batch_norm(x, weight, bias, eps), None, None
    out, mean, var, rstd = kernels.batch_norm(_planes(x), weight, bias, eps)
    return (out.reshape(x.shape), mean.copy(), var), mean, rstd


def _fused_batch_norm_vjp(
    g: tuple[Array, ...], needs: tuple[bool, bool, bool], x: Array, weight: Array, mean: Array, rstd: Array, eps: float
) -> tuple[Array, ...]:
    if mean is None or g[0].dtype != x.dtype:
        return (
            _batch_norm_x(g, x, weight, eps) if needs[0] else None,
            _batch_norm_weight(g, x, eps) if needs[1] else None,
            np.sum(g[0], axis=_all_but_channel(x.ndim)) if needs[2] else None,
        )
    dx, dweight, dbias = kernels.batch_norm_grad(_planes(g[0]), _planes(x), weight, mean, rstd, needs[0])
    return (None if dx is None else dx.reshape(x.shape)), dweight if needs[1] else None, dbias if needs[2] else None


batch_norm = define(
    "batch_norm",
    _batch_norm,
    outputs=3,
    differentiable_outputs=(0,),
    x=_batch_norm_x,
    weight=_batch_norm_weight,
    bias=lambda g: np.sum(g[0], axis=_all_but_channel(g[0].ndim)),
    jvp=_batch_norm_jvp,
    cost=4.0,
    fused=Fused(_fused_batch_norm, ("mean", "rstd"), joint={("x", "weight", "bias"): _fused_batch_norm_vjp}, cost=0.7),
)

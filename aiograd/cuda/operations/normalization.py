"""Layer, RMS, group and batch normalisation.

Note [Launches]
    A layer, RMS or group norm is one launch forward, which keeps two numbers per line, and one for the gradient of its input. The gradients of
    weight and bias are sums over columns, in parts where there are many lines, so that their order follows from the shape. Statistics of a batch go
    across lines, so a batch norm is made of reductions, which compute their summands on the way, and one pass over the elements: a block per channel
    would leave most of a device idle.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from aiograd.cuda import tables
from aiograd.cuda.array import CudaArray, as_cuda, empty
from aiograd.cuda.kernels import normalization as kernels
from aiograd.cuda.kernels.scalar import precision_of
from aiograd.cuda.launching import launch
from aiograd.cuda.layout import contiguous_strides
from aiograd.cuda.tiles import tile
from aiograd.ops.op import ROWS, Fused
from aiograd.running.types import Shape

_PRECISIONS = {"f4": np.float32, "f8": np.float64}


class _Lines:
    """How an input is seen as lines, and which weight belongs to which element.

    Args:
        x: the input.
        n: elements in a line.
        groups, channels, spatial: lines per sample, channels per line and elements per channel, where weights belong to channels.
    """

    __slots__ = ("m", "n", "groups", "channels", "spatial", "channelled", "precision", "dtype", "stored", "tile")

    def __init__(self, x: CudaArray, n: int, groups: int = 1, channels: int = 0, spatial: int = 1) -> None:
        self.m, self.n = x.size // n, n
        self.groups, self.channels, self.spatial = groups, channels, spatial
        self.channelled = channels > 0
        self.precision = precision_of(x.dtype)
        self.dtype = _PRECISIONS[self.precision]
        self.stored = f"f{x.itemsize}"
        self.tile = tile(x.device.properties, self.m, n, along=True, cut=False)


def _forward(
    x: CudaArray, weight: CudaArray | None, bias: CudaArray | None, eps: float, lines: _Lines, *, centred: bool
) -> tuple[CudaArray, CudaArray | None, CudaArray]:
    device, here, dtype = x.device, lines.tile, lines.dtype
    x = x.contiguous()
    out, rstd = empty(device, x.shape, x.dtype), empty(device, (lines.m,), dtype)
    mean = empty(device, (lines.m,), dtype) if centred else None
    kernel = kernels.forward(
        lines.precision, lines.stored, here.columns, here.lanes, centred, weight is not None, bias is not None, lines.channelled
    )
    launch(
        kernel, here.blocks, here.block, out, rstd if mean is None else mean, rstd, x, _or(weight, x), _or(bias, x), lines.m, lines.n,
        dtype(lines.n), dtype(eps), lines.groups, lines.channels, lines.spatial, writes=(out, rstd) if mean is None else (out, mean, rstd),
    )  # fmt: skip
    return out, mean, rstd


def _backward(g: CudaArray, x: CudaArray, weight: CudaArray | None, mean: CudaArray | None, rstd: CudaArray, lines: _Lines) -> CudaArray:
    device, here = x.device, lines.tile
    g, x = g.contiguous(), x.contiguous()
    dx = empty(device, x.shape, g.dtype)
    kernel = kernels.backward(
        lines.precision, f"f{g.itemsize}", here.columns, here.lanes, mean is not None, weight is not None, lines.channelled
    )
    launch(
        kernel, here.blocks, here.block, dx, g, x, _or(weight, x), _or(mean, rstd), rstd, lines.m, lines.n, lines.dtype(lines.n), lines.groups,
        lines.channels, lines.spatial, writes=(dx,),
    )  # fmt: skip
    return dx


def _or(given: CudaArray | None, other: CudaArray) -> CudaArray:
    """The contiguous argument of a kernel; `other` takes the place of an absent one, which the kernel does not read."""
    return other if given is None else given.contiguous()


def _own(fresh: CudaArray, shape: Shape) -> CudaArray:
    """A new array in the shape of a parameter, which may keep it as its gradient: a view it would have to copy."""
    return fresh if fresh.shape == shape else CudaArray(fresh.buffer, 0, shape, contiguous_strides(shape, fresh.itemsize), fresh.dtype, None)


def _is_native(x: CudaArray, *others: CudaArray | None) -> bool:
    return x.size > 0 and x.dtype.kind == "f" and x.itemsize <= 8 and all(other is None or other.dtype == x.dtype for other in others)


def _plain(row: str, *args: Any) -> tuple[Any, ...]:
    return ROWS[row].forward(*args), None, None


def _by_rules(row: str, g: Any, needs: tuple[bool, ...], **known: Any) -> tuple[Any, ...]:
    """Gradients by the row's plain rules."""
    plan = ROWS[row].rule_plan(ROWS[row].rules, {})
    return tuple(rule(g, *[known[name] for name in names]) if need else None for (_, rule, names), need in zip(plan, needs, strict=True))


# ---------------------------------------------------------------- layer and RMS normalisation


def _length(x: CudaArray, ndims: int) -> int:
    return math.prod(x.shape[x.ndim - ndims :])


def layer_norm(x: CudaArray, weight: CudaArray | None, bias: CudaArray | None, ndims: int, eps: float) -> tuple[Any, ...]:
    """The row of that name, and the mean and reciprocal deviation of each line."""
    if not _is_native(x, weight, bias) or not _fits(x, ndims, weight, bias):
        return _plain("layer_norm", x, weight, bias, ndims, eps)
    return _forward(x, weight, bias, eps, _Lines(x, _length(x, ndims)), centred=True)


def _fits(x: CudaArray, ndims: int, *others: CudaArray | None) -> bool:
    return 1 <= ndims <= x.ndim and all(other is None or other.shape == x.shape[x.ndim - ndims :] for other in others)


def layer_norm_gradients(
    g: Any, needs: tuple[bool, ...], x: CudaArray, weight: CudaArray | None, mean: CudaArray | None, rstd: CudaArray | None, ndims: int, eps: float
) -> tuple[Any, ...]:
    """Of input, weight and bias."""
    g = as_cuda(x.device, g)
    if rstd is None:
        return _by_rules("layer_norm", g, needs, x=x, weight=weight, ndims=ndims, eps=eps)
    n = _length(x, ndims)
    dx = _backward(g, x, weight, mean, rstd, _Lines(x, n)) if needs[0] else None
    shape = x.shape[x.ndim - ndims :]
    dweight = dbias = None
    if needs[1] and needs[2]:
        dweight, dbias = (_own(each, shape) for each in _weight_gradients(g, x, n, mean, rstd))
    elif needs[1]:
        unit = _unit(x.reshape(-1, n), None if mean is None else mean.reshape(-1, 1), rstd.reshape(-1, 1))
        dweight = _own(np.sum(g.reshape(-1, n) * unit, axis=0), shape)
    elif needs[2]:
        dbias = _own(np.sum(g.reshape(-1, n), axis=0), shape)
    return dx, dweight, dbias


def _weight_gradients(g: CudaArray, x: CudaArray, n: int, mean: CudaArray | None, rstd: CudaArray) -> tuple[Any, Any]:
    """Gradients of weight and bias, (n,) each, reading `g` and `x` once."""
    device, precision, m = x.device, precision_of(x.dtype), x.size // n
    here = tile(device.properties, n, m, along=False)
    dtype = _PRECISIONS[precision]
    sums = [empty(device, (here.parts, n) if here.parts > 1 else (n,), dtype) for _ in range(2)]
    kernel = kernels.weight_gradients(precision, here.columns, here.lanes, mean is not None)
    launch(kernel, here.grid, here.block, *sums, g.contiguous(), x.contiguous(), _or(mean, rstd), rstd, m, n, here.chunk, writes=sums)
    if here.parts == 1:
        return sums[0], sums[1]
    return np.sum(sums[0], axis=0), np.sum(sums[1], axis=0)


def _unit(x: CudaArray, mean: CudaArray | None, rstd: CudaArray) -> Any:
    return x * rstd if mean is None else (x - mean) * rstd


def rms_norm(x: CudaArray, weight: CudaArray | None, ndims: int, eps: float | None) -> tuple[Any, ...]:
    """The row of that name, and what each line was multiplied by."""
    if not _is_native(x, weight) or not _fits(x, ndims, weight):
        return ROWS["rms_norm"].forward(x, weight, ndims, eps), None
    small = float(np.finfo(x.dtype).eps) if eps is None else eps
    out, _, scale = _forward(x, weight, None, small, _Lines(x, _length(x, ndims)), centred=False)
    return out, scale


def rms_norm_gradients(
    g: Any, needs: tuple[bool, ...], x: CudaArray, weight: CudaArray | None, scale: CudaArray | None, ndims: int, eps: float | None
) -> tuple[Any, ...]:
    """Of input and weight."""
    g = as_cuda(x.device, g)
    if scale is None:
        return _by_rules("rms_norm", g, needs, x=x, weight=weight, ndims=ndims, eps=eps)
    return layer_norm_gradients(g, (*needs, False), x, weight, None, scale, ndims, 0.0)[:2]


# ---------------------------------------------------------------- group normalisation


def group_norm(x: CudaArray, weight: CudaArray | None, bias: CudaArray | None, num_groups: int, eps: float) -> tuple[Any, ...]:
    """The row of that name, and the mean and reciprocal deviation of each group of each sample."""
    fits = x.ndim >= 2 and num_groups > 0 and x.shape[1] % num_groups == 0 and x.size < 2**32
    if not fits or not _is_native(x, weight, bias) or any(each is not None and each.shape != (x.shape[1],) for each in (weight, bias)):
        return _plain("group_norm", x, weight, bias, num_groups, eps)
    return _forward(x, weight, bias, eps, _groups(x, num_groups), centred=True)


def _groups(x: CudaArray, num_groups: int) -> _Lines:
    channels, spatial = x.shape[1] // num_groups, math.prod(x.shape[2:])
    return _Lines(x, channels * spatial, num_groups, channels, spatial)


def group_norm_gradients(
    g: Any, needs: tuple[bool, ...], x: CudaArray, weight: CudaArray | None, mean: CudaArray | None, rstd: CudaArray | None, num_groups: int,
    eps: float,
) -> tuple[Any, ...]:
    """Of input, weight and bias."""
    g = as_cuda(x.device, g)
    if mean is None or rstd is None:
        return _by_rules("group_norm", g, needs, x=x, weight=weight, num_groups=num_groups, eps=eps)
    lines = _groups(x, num_groups)
    split = (x.shape[0], num_groups, lines.channels, lines.spatial)
    apart = (x.shape[0], num_groups, 1, 1)
    grouped = g.reshape(split)
    dweight = dbias = None
    if needs[1]:
        unit = _unit(x.reshape(split), mean.reshape(apart), rstd.reshape(apart))
        dweight = _own(np.sum(grouped * unit, axis=(0, 3)), x.shape[1:2])
    if needs[2]:
        dbias = _own(np.sum(grouped, axis=(0, 3)), x.shape[1:2])
    return _backward(g, x, weight, mean, rstd, lines) if needs[0] else None, dweight, dbias


# ---------------------------------------------------------------- batch normalisation


def batch_norm(x: CudaArray, weight: CudaArray | None, bias: CudaArray | None, eps: float) -> tuple[Any, ...]:
    """The row of that name, and the mean and reciprocal deviation of each channel, with all axes."""
    if not _is_native(x, weight, bias) or x.ndim < 2 or any(each is not None and each.shape != (x.shape[1],) for each in (weight, bias)):
        return _plain("batch_norm", x, weight, bias, eps)
    axes = (0, *range(2, x.ndim))
    channels = (x.shape[1],) + (1,) * (x.ndim - 2)
    dtype = _PRECISIONS[precision_of(x.dtype)]
    mean = np.mean(x, axis=axes, dtype=dtype, keepdims=True)
    var = np.mean(np.square(x - mean), axis=axes, keepdims=True)
    rstd = 1.0 / np.sqrt(var + eps)
    out = _unit(x, mean, rstd)
    if weight is not None:
        out = out * weight.reshape(channels)
    if bias is not None:
        out = out + bias.reshape(channels)
    flat = tuple(each.reshape(x.shape[1]).astype(x.dtype, copy=False) for each in (mean, var))
    return (out.astype(x.dtype, copy=False), *flat), mean, rstd


def batch_norm_gradients(
    g: tuple[Any, ...], needs: tuple[bool, ...], x: CudaArray, weight: CudaArray | None, mean: CudaArray | None, rstd: CudaArray | None, eps: float
) -> tuple[Any, ...]:
    """Of input, weight and bias."""
    if mean is None or rstd is None:
        return _by_rules("batch_norm", g, needs, x=x, weight=weight, eps=eps)
    grad = as_cuda(x.device, g[0])
    axes = (0, *range(2, x.ndim))
    channels = (1, x.shape[1]) + (1,) * (x.ndim - 2)
    unit = _unit(x, mean, rstd)
    slope = np.sum(grad * unit, axis=axes, dtype=mean.dtype, keepdims=True) if needs[0] or needs[1] else None
    level = np.sum(grad, axis=axes, dtype=mean.dtype, keepdims=True) if needs[0] or needs[2] else None
    dx = None
    if needs[0] and slope is not None and level is not None:
        scale = rstd if weight is None else rstd * weight.reshape(channels)
        count = x.size // x.shape[1]
        mean_slope, mean_level = slope / count, level / count
        dx = (grad - mean_level - unit * mean_slope) * scale
    flat = tuple(_own(each, x.shape[1:2]) if need and each is not None else None for each, need in ((slope, needs[1]), (level, needs[2])))
    return dx, *flat


_JOINT = ("x", "weight", "bias")
tables.fused("layer_norm", Fused(layer_norm, ("mean", "rstd"), joint={_JOINT: layer_norm_gradients}))
tables.fused("rms_norm", Fused(rms_norm, ("scale",), joint={("x", "weight"): rms_norm_gradients}))
tables.fused("group_norm", Fused(group_norm, ("mean", "rstd"), joint={_JOINT: group_norm_gradients}))
tables.fused("batch_norm", Fused(batch_norm, ("mean", "rstd"), joint={_JOINT: batch_norm_gradients}))


@tables.row("layer_norm")
def layer_norm_row(x: CudaArray, weight: Any = None, bias: Any = None, /, ndims: int = 1, eps: float = 1e-5) -> Any:
    """The result alone, without the values kept for the gradient."""
    return NotImplemented if not _is_native(x, weight, bias) or not _fits(x, ndims, weight, bias) else layer_norm(x, weight, bias, ndims, eps)[0]


@tables.row("rms_norm")
def rms_norm_row(x: CudaArray, weight: Any = None, /, ndims: int = 1, eps: float | None = None) -> Any:
    """The result alone, without the values kept for the gradient."""
    return NotImplemented if not _is_native(x, weight) or not _fits(x, ndims, weight) else rms_norm(x, weight, ndims, eps)[0]

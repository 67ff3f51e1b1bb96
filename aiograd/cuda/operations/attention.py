"""Scaled dot-product attention: by tiles where they fit into shared memory, else put together from products and a softmax."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from aiograd.cuda import tables
from aiograd.cuda.array import CudaArray, as_cuda, check_same, device_of, empty, zeros
from aiograd.cuda.core import DeviceCore
from aiograd.cuda.kernels import attention as kernels
from aiograd.cuda.kernels.scalar import function, precision_of
from aiograd.cuda.launching import launch
from aiograd.cuda.operations.multiplying import broadcast, forwards, steps_of, types_of
from aiograd.cuda.operations.products import vecdot
from aiograd.ops import nn_attention as rows
from aiograd.ops.op import ROWS, Fused
from aiograd.running.types import Shape

#: rows of the own side and of the other in a tile, threads down and across
Tile = tuple[int, int, int, int]

_ROW = ROWS["scaled_dot_product_attention"]
_INPUTS = ("q", "k", "v", "mask")

_FORWARD = ((64, 32), (32, 32), (16, 16), (8, 8))
_BACKWARD = ((32, 32), (16, 16), (8, 8))
_ACROSS = 8


def _padded(features: int, least: int) -> int:
    return max(least, 1 << (features - 1).bit_length())


def forward_tile(device: DeviceCore, size: int, depth: int, width: int) -> Tile | None:
    """Tiles for the kernel forward; `size` is the bytes of a number. None: shared memory is too small for so many features."""
    if device.properties.is_simulated:
        return (4, 4, 2, 2) if max(depth, width) <= 16 else None
    for own, other in _FORWARD:
        numbers = depth * (own + 4) + max(depth * (other + 4), other * (width + 4)) + other * (own + 4) + 3 * own
        if numbers * size <= device.properties.shared_memory:
            return own, other, min(16, own), _ACROSS
    return None


def backward_tile(device: DeviceCore, size: int, depth: int, width: int) -> Tile | None:
    """Likewise for the kernel backward."""
    if device.properties.is_simulated:
        return (4, 4, 2, 2) if max(depth, width) <= 16 else None
    most = max(depth, width)
    for own, other in _BACKWARD:
        numbers = (depth + width) * (own + 4) + max(most * (other + 4), other * (most + 4)) + 2 * other * (own + 4)
        if numbers * size <= device.properties.shared_memory:
            return own, other, min(16, own), _ACROSS
    return None


class Heads:
    """The arguments of attention as kernels take them: (batch, heads, rows, features) each."""

    def __init__(self, q: CudaArray, k: CudaArray, v: CudaArray, mask: CudaArray | None, dtype: np.dtype[Any], scale: float | None) -> None:
        arrays = [q, k, v] if mask is None else [q, k, v, mask]
        self.leading: Shape = np.broadcast_shapes(*[array.shape[:-2] for array in arrays])
        self.device = q.device
        self.dtype = dtype
        self.inner = self.leading[-1] if self.leading else 1
        self.outer = math.prod(self.leading[:-1])
        self.queries, self.features = q.shape[-2:]
        self.keys, self.values = v.shape[-2:]
        self.q, self.k, self.v = (self.bring(array.astype(dtype, copy=False)) for array in (q, k, v))
        self.masked = "" if mask is None else "allowed" if mask.dtype == np.bool_ else "added"
        self.mask = self.q if mask is None else self.bring(broadcast(mask, (*mask.shape[:-2], self.queries, self.keys)))
        self.precision = precision_of(dtype)
        self.scale = np.dtype(self.precision).type(rows.attention_scale(q, scale))
        least = 2 if self.device.properties.is_simulated else _ACROSS
        self.depth, self.width = _padded(self.features, least), _padded(self.values, least)

    @property
    def count(self) -> int:
        """Heads of all batches."""
        return self.outer * self.inner

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Batch, heads, queries, features."""
        return self.outer, self.inner, self.queries, self.features

    def bring(self, array: CudaArray) -> CudaArray:
        """An array as (batch, heads, rows, features), without a copy where its axes merge."""
        return forwards(broadcast(array, (*self.leading, *array.shape[-2:])).reshape(self.outer, self.inner, *array.shape[-2:]))

    def like(self, array: CudaArray, features: int) -> CudaArray:
        """A new array with its axes in memory in the order of `array`'s, so that joining the heads again needs no copy."""
        outer, inner, count, _ = array.shape
        if 0 < array.strides[1] < array.strides[2]:
            found: CudaArray = empty(self.device, (outer, count, inner, features), self.dtype).swapaxes(1, 2)
            return found
        return empty(self.device, (outer, inner, count, features), self.dtype)

    def back(self, array: CudaArray) -> CudaArray:
        """(batch, heads, ...) as (..., ...)."""
        return array.reshape(*self.leading, *array.shape[2:])  # type: ignore[no-any-return]


def _heads(q: Any, k: Any, v: Any, mask: Any, scale: float | None) -> Heads | None:
    """The arguments as `Heads`; None if no kernel takes their dtype."""
    rows.check_attention(q, k, v, mask)
    device = device_of(q, k, v, mask)
    arrays = [None if array is None else as_cuda(device, array) for array in (q, k, v, mask)]
    check_same(device, "attention", arrays)
    dtype = np.result_type(*[array.dtype for array in arrays if array is not None and array.dtype.kind != "b"])
    if dtype.kind != "f" or dtype.itemsize > 8:
        return None
    q, k, v, mask = arrays
    return Heads(q, k, v, mask, dtype, scale)


def attention(q: Any, k: Any, v: Any, mask: Any, is_causal: bool, scale: float | None) -> tuple[Any, Any]:
    """The row's result, and the logarithm of each query's sum of exponentials (infinite for a query that sees nothing); None without kernel."""
    heads = _heads(q, k, v, mask, scale)
    tile = None if heads is None else forward_tile(heads.device, np.dtype(heads.precision).itemsize, heads.depth, heads.width)
    if heads is None or tile is None:
        return _ROW.forward(q, k, v, mask, is_causal=is_causal, scale=scale), None
    out = heads.like(heads.q, heads.values)
    shape = (heads.outer, heads.inner, heads.queries)
    if not out.size or not heads.keys:
        return heads.back(zeros(heads.device, out.shape, heads.dtype)), heads.back(zeros(heads.device, shape, heads.precision))
    sums = empty(heads.device, shape, heads.precision)
    own, _, down, across = tile
    exp, log = (function(name, heads.precision) for name in ("exp", "log"))
    kernel = kernels.attended(*types_of(heads.dtype), exp, log, *tile, heads.depth, heads.width, heads.masked)
    tiles = math.ceil(heads.queries / own)
    launch(
        kernel, tiles * heads.count, down * across, out, sums, heads.q, heads.k, heads.v, heads.mask, heads.scale,
        heads.queries, heads.keys, heads.features, heads.values, heads.inner, tiles, bool(is_causal),
        *steps_of(heads.q), *steps_of(heads.k), *steps_of(heads.v), *steps_of(heads.mask), *steps_of(out),
        writes=(out, sums),
    )  # fmt: skip
    return heads.back(out), heads.back(sums)


def attention_grad(
    g: Any, needs: tuple[bool, ...], q: Any, k: Any, v: Any, mask: Any, out: Any, shift: Any, is_causal: bool, scale: float | None
) -> tuple[Any, ...]:
    """Gradients of q, k, v and the mask that was added to the scores."""
    heads = _heads(q, k, v, mask, scale)
    tile = None if heads is None else backward_tile(heads.device, np.dtype(heads.precision).itemsize, heads.depth, heads.width)
    if heads is None or tile is None or shift is None:
        return _ROW.joint[_INPUTS](g, needs, q, k, v, mask, is_causal, scale)  # type: ignore[no-any-return]
    shape = (heads.outer, heads.inner, heads.queries)
    g, out = (as_cuda(heads.device, array).astype(heads.dtype, copy=False) for array in (g, out))
    if not (out.size and q.size and k.size):
        shapes = (*[array.shape[-2:] for array in (q, k, v)], (heads.queries, heads.keys))
        return tuple(zeros(heads.device, (*heads.leading, *last), heads.dtype) if need else None for last, need in zip(shapes, needs, strict=True))
    deltas = vecdot(g.astype(heads.precision, copy=False), out.astype(heads.precision, copy=False)).reshape(shape)
    g, sums = heads.bring(g), shift.reshape(shape).contiguous()
    dq = dk = dv = slopes = None
    if needs[0] or needs[3]:
        dq = heads.like(heads.q, heads.features)
        if needs[3]:
            slopes = zeros(heads.device, (*shape, heads.keys), heads.dtype)
        _derive(heads, tile, (heads.q, g), (heads.k, heads.v), (dq, None, slopes), sums, deltas, is_causal)
    if needs[1] or needs[2]:
        dk, dv = heads.like(heads.k, heads.features), heads.like(heads.v, heads.values)
        _derive(heads, tile, (heads.k, heads.v), (heads.q, g), (dk, dv, None), sums, deltas, is_causal)
    return tuple(None if array is None else heads.back(array) for array in (dq, dk, dv, slopes))


def _derive(
    heads: Heads, tile: Tile, own: tuple[CudaArray, CudaArray], other: tuple[CudaArray, CudaArray],
    outs: tuple[CudaArray, CudaArray | None, CudaArray | None], sums: CudaArray, deltas: CudaArray, causal: bool,
) -> None:  # fmt: skip
    """Launch the kernel backward."""
    first, second, slopes = outs
    by_key = second is not None
    kernel = kernels.derived(
        *types_of(heads.dtype), function("exp", heads.precision), *tile, heads.depth, heads.width, heads.masked, by_key, slopes is not None
    )
    count, length = own[0].shape[2], other[0].shape[2]
    tiles = math.ceil(count / tile[0])
    m_b, m_h, m_q, m_k = steps_of(heads.mask)
    written = tuple(array for array in outs if array is not None)
    second, slopes = second if second is not None else first, slopes if slopes is not None else first
    launch(
        kernel, tiles * heads.count, tile[2] * tile[3], first, second, slopes, *own, *other, heads.mask, sums, deltas, heads.scale,
        count, length, heads.features, heads.values, heads.inner, tiles, bool(causal),
        *steps_of(own[0]), *steps_of(own[1]), *steps_of(other[0]), *steps_of(other[1]), m_b, m_h, *((m_k, m_q) if by_key else (m_q, m_k)),
        *steps_of(first), *steps_of(second),
        writes=written,
    )  # fmt: skip


@tables.row("scaled_dot_product_attention")
def scaled_dot_product_attention(q: Any, k: Any, v: Any, mask: Any = None, is_causal: bool = False, scale: float | None = None) -> Any:
    """The row."""
    return attention(q, k, v, mask, is_causal, scale)[0]


tables.fused("scaled_dot_product_attention", Fused(attention, ("shift",), joint={_INPUTS: attention_grad}))

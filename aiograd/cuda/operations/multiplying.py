"""How a batch of products of matrices is computed: which kernel, in which tiles, in how many parts.

Note [Where products go]
    ===============================================  ================================================================
    floats, a vector on one side                     `aiograd.cuda.kernels.gemm.dots`
    floats else                                      cuBLAS where the driver has it (``gemm``) and the dtype is its own,
                                                     else `aiograd.cuda.kernels.gemm.tiled`
    integers and booleans                            `aiograd.cuda.kernels.gemm.whole`
    ===============================================  ================================================================

Note [Batches]
    Axes before the last two are merged where operands and result pass through them alike, and into the rows of the product where the
    right operand does not change along them; so most batches are one matrix or have one axis. Kernels take two axes; operands that still
    have more are copied. cuBLAS takes one; the shorter of two is gone through call by call.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from aiograd.cuda.array import CudaArray, empty
from aiograd.cuda.command import enqueue
from aiograd.cuda.core import DeviceCore
from aiograd.cuda.driver.cublas import supports
from aiograd.cuda.driver.protocol import DeviceDriver, Pointer
from aiograd.cuda.kernels import gemm as kernels
from aiograd.cuda.kernels.scalar import TYPES, precision_of
from aiograd.cuda.launching import launch, spread
from aiograd.cuda.layout import merged
from aiograd.running.types import Shape

#: calls of cuBLAS for one product; with more, the kernel is used
_CALLS = 64
#: parts into which sums are cut at most
_PARTS = 128

#: problems and calls that are remembered
_REMEMBERED = 4096

#: shape, and strides in bytes
_Layout = tuple[Shape, Shape]
#: tile_m, tile_n, tile_k, run_m, run_n
Tile = tuple[int, int, int, int, int]


@dataclass(frozen=True, slots=True)
class Problem:
    """A batch of products; strides in elements, each along the batch's outer and inner axis, then rows and columns."""

    m: int
    n: int
    k: int
    outer: int
    inner: int
    a: tuple[int, int, int, int]
    b: tuple[int, int, int, int]
    out: tuple[int, int, int, int]
    #: strides of the bias along rows and along columns
    bias: tuple[int, int] = (0, 1)

    @property
    def batch(self) -> int:
        """Matrices."""
        return self.outer * self.inner

    def turned(self) -> Problem:
        """``outᵀ = bᵀ aᵀ``."""

        def turn(strides: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
            return (*strides[:2], strides[3], strides[2])

        return replace(self, m=self.n, n=self.m, a=turn(self.b), b=turn(self.a), out=turn(self.out), bias=self.bias[::-1])


def describe(out: CudaArray, a: CudaArray, b: CudaArray) -> Problem | None:
    """``out = a @ b`` as a `Problem`; None where the batch has more than two axes that do not merge."""
    return _problem(out.itemsize, (out.shape, out.strides), (a.shape, a.strides), (b.shape, b.strides))


@functools.lru_cache(_REMEMBERED)
def _problem(size: int, out: _Layout, a: _Layout, b: _Layout) -> Problem | None:
    leading = out[0][:-2]
    extents, strides = merged(leading, [_leading(layout, leading, size) for layout in (a, b, out)])
    axes = [list(axis) for axis in zip(extents, *strides, strict=True) if axis[0] != 1]
    m, n, k = *out[0][-2:], a[0][-1]
    rows, columns, result = ([stride // size for stride in layout[1][-2:]] for layout in (a, b, out))
    while axes and axes[-1][2] == 0 and (m == 1 or (axes[-1][1] == m * rows[0] and axes[-1][3] == m * result[0])):
        length, step, _, there = axes.pop()
        if m == 1:
            rows[0], result[0] = step, there
        m *= length
    if len(axes) > 2:
        return None
    (outer, *first), (inner, *second) = [[1, 0, 0, 0]] * (2 - len(axes)) + axes
    return Problem(
        m, n, k, outer, inner,
        (first[0], second[0], rows[0], rows[1]), (first[1], second[1], columns[0], columns[1]), (first[2], second[2], result[0], result[1]),
    )  # fmt: skip


def _leading(layout: _Layout, leading: tuple[int, ...], size: int) -> list[int]:
    """Strides, in elements, of the axes before the last two when they are broadcast."""
    own = [0 if length == 1 else stride // size for length, stride in zip(layout[0][:-2], layout[1][:-2], strict=True)]
    return [0] * (len(leading) - len(own)) + own


def multiply(out: CudaArray, a: CudaArray, b: CudaArray, bias: CudaArray | None = None) -> bool:
    """``out[...] = a @ b + bias``; returns whether the bias was added, which otherwise is the caller's to do.

    Args:
        out: (..., M, N), C-contiguous, not empty.
        a, b: (..., M, K) and (..., K, N), K > 0; leading axes broadcast to the ones of `out`.
        bias: (N,), with floats only. All of one dtype.
    """
    a, b = forwards(a), forwards(b)
    problem = describe(out, a, b)
    if problem is None:
        a, b = (broadcast(x, (*out.shape[:-2], *x.shape[-2:])).copy() for x in (a, b))
        problem = describe(out, a, b)
    if problem is None:  # cannot be: axes of contiguous arrays merge
        return False
    if out.dtype.kind != "f":
        _whole(out, a, b, problem)
        return True
    if problem.n == 1:
        _dots(out, a, b, bias, problem)
    elif problem.m == 1:
        _dots(out, b, a, bias, problem.turned())
    elif _by_library(out, a, b, problem):
        return bias is None
    else:
        _tiled(out, a, b, bias, problem)
    return True


def forwards(array: CudaArray) -> CudaArray:
    """Itself, or a copy where it runs backwards: pointers of kernels begin at an array's first element."""
    found: CudaArray = array.copy() if min(array.strides, default=0) < 0 else array
    return found


def broadcast(array: CudaArray, shape: Shape) -> CudaArray:
    """A view of another shape, as numpy has it."""
    found: Any = np.broadcast_to(array, shape)
    return found  # type: ignore[no-any-return]


def steps_of(array: CudaArray) -> tuple[int, ...]:
    """Elements, not bytes, between neighbours along each axis."""
    return tuple(stride // array.itemsize for stride in array.strides)


def _whole(out: CudaArray, a: CudaArray, b: CudaArray, problem: Problem) -> None:
    logical = out.dtype == np.bool_
    kernel = kernels.whole(TYPES["u1" if logical else f"{out.dtype.kind}{out.dtype.itemsize}"], logical)
    sizes = (out.size, problem.m, problem.n, problem.k, problem.inner)
    launch(kernel, *spread(out.device, out.size), out, a, b, *sizes, *problem.a, *problem.b, writes=(out,))


def types_of(dtype: np.dtype[Any]) -> tuple[Any, Any]:
    """numba types to compute in and to write."""
    return TYPES[precision_of(dtype)], TYPES[f"f{dtype.itemsize}"]


def parts_of(device: DeviceCore, blocks: int, k: int, least: int, step: int) -> tuple[int, int]:
    """Into how many parts to cut sums of `k` products, none of fewer than `least`, and the length of a part, a multiple of `step`."""
    multiprocessors = device.properties.multiprocessors
    wanted = 1 if blocks >= multiprocessors else min(math.ceil(2 * multiprocessors / blocks), k // least, _PARTS)
    chunk = math.ceil(k / max(1, wanted) / step) * step
    return math.ceil(k / chunk), chunk


def _dots(out: CudaArray, a: CudaArray, b: CudaArray, bias: CudaArray | None, problem: Problem) -> None:
    device, threads = out.device, out.device.properties.threads
    count = problem.batch * problem.m
    by_k = problem.a[3] == 1 or problem.a[2] != 1
    lanes = threads // min(32, threads // 2) if not by_k else threads if problem.k >= 16 * threads else min(32, threads // 2)
    rows = threads // lanes
    blocks = math.ceil(count / rows)
    parts, chunk = parts_of(device, blocks, problem.k, 16 * lanes, lanes)
    number, made = types_of(out.dtype)
    target, added = (out, bias) if parts == 1 else (empty(device, (parts, count), np.dtype(precision_of(out.dtype))), None)
    kernel = kernels.dots(number, made if parts == 1 else number, rows, lanes, by_k, added is not None)
    launch(
        kernel, blocks * parts, threads, target, a, b, b if added is None else added,
        problem.m, problem.k, chunk, count, problem.inner, blocks, *problem.a, *problem.b[:3], count, problem.bias[0],
        writes=(target,),
    )  # fmt: skip
    if parts > 1:
        join(out, target, bias, 1, out.shape[-1])


def join(out: CudaArray, parts: CudaArray, bias: CudaArray | None, inner: int = 1, n: int = 1) -> None:
    """Sum parts, which lie as the result does, and add a bias of `n` that goes on every `inner` elements."""
    kernel = kernels.joined(*types_of(out.dtype), bias is not None)
    launch(kernel, *spread(out.device, out.size), out, parts, parts if bias is None else bias, out.size, parts.shape[0], inner, n, writes=(out,))


def tile_of(device: DeviceCore, dtype: np.dtype[Any], m: int, n: int, batch: int) -> Tile:
    """Tiles for a product; see the kernels' Note [Tiles]."""
    if device.properties.is_simulated:
        return 16, 8, 8, 8, 2
    if min(m, n) <= 16:
        return (128, 16, 16, 4, 2) if n <= m else (16, 128, 16, 2, 4)
    if dtype != np.float64 and math.ceil(m / 128) * math.ceil(n / 128) * batch >= device.properties.multiprocessors:
        return 128, 128, 8, 8, 8
    return 64, 64, 16, 4, 4


def _tiled(out: CudaArray, a: CudaArray, b: CudaArray, bias: CudaArray | None, problem: Problem) -> None:
    device = out.device
    tile = tile_of(device, out.dtype, problem.m, problem.n, problem.batch)
    tiles_m, tiles_n = math.ceil(problem.m / tile[0]), math.ceil(problem.n / tile[1])
    tiles = tiles_m * tiles_n
    parts, chunk = parts_of(device, tiles * problem.batch, problem.k, 8 * tile[2], tile[2])
    number, made = types_of(out.dtype)
    target, added = (out, bias) if parts == 1 else (empty(device, (parts, out.size), np.dtype(precision_of(out.dtype))), None)
    by_k_a, by_k_b = problem.a[3] == 1 or problem.a[2] != 1, problem.b[2] == 1 and problem.b[3] != 1
    kernel = kernels.tiled(number, made if parts == 1 else number, *tile, by_k_a, by_k_b, added is not None)
    threads = (tile[0] // tile[3]) * (tile[1] // tile[4])
    launch(
        kernel, tiles * problem.batch * parts, threads, target, a, b, b if added is None else added,
        problem.m, problem.n, problem.k, chunk, problem.batch, problem.inner, tiles, tiles_n,
        *problem.a, *problem.b, out.size, *problem.out, *problem.bias,
        writes=(target,),
    )  # fmt: skip
    if parts > 1:
        join(out, target, bias, 1, out.shape[-1])


def _matrix(rows: int, columns: int, row: int, column: int) -> tuple[int, bool] | None:
    """``(elements from a row to the next of what lies there, whether that is transposed)`` as cuBLAS wants it; None: not so."""
    if (column == 1 or columns == 1) and (row >= columns or rows == 1):
        return max(row, columns, 1), False
    if (row == 1 or rows == 1) and (column >= rows or columns == 1):
        return max(column, rows, 1), True
    return None


@dataclass(frozen=True, slots=True)
class _LibraryCalls:
    """The calls of cuBLAS for a problem: how many, elements from one to the next of the result and the operands, and arguments that all have."""

    count: int
    steps: tuple[int, int, int]
    arguments: tuple[Any, ...]


@functools.lru_cache(_REMEMBERED)
def _library_calls(problem: Problem) -> _LibraryCalls | None:
    """The calls for a problem; None if cuBLAS takes no such layouts, or too many calls."""
    if min(problem.outer, problem.inner) > _CALLS:
        return None
    m, n, k, a, b, out = problem.m, problem.n, problem.k, problem.a, problem.b, problem.out
    layout_a, layout_b, layout_out = _matrix(m, k, *a[2:]), _matrix(k, n, *b[2:]), _matrix(m, n, *out[2:])
    if layout_a is None or layout_b is None or layout_out is None or layout_out[1]:
        return None
    calls, many = (0, 1) if problem.outer <= problem.inner else (1, 0)
    count, batch = (problem.outer, problem.inner) if calls == 0 else (problem.inner, problem.outer)
    arguments = (m, n, k, batch, (*layout_a, a[many]), (*layout_b, b[many]), (layout_out[0], out[many]))
    return _LibraryCalls(count, (out[calls], a[calls], b[calls]), arguments)


def _by_library(out: CudaArray, a: CudaArray, b: CudaArray, problem: Problem) -> bool:
    """Compute the product with cuBLAS, if it can."""
    device = out.device
    gemm = getattr(device.driver, "gemm", None)
    if gemm is None or not supports(out.dtype) or min(problem.outer, problem.inner) > _CALLS:
        return False
    if _matrix(problem.m, problem.k, *problem.a[2:]) is None:
        a = a.copy()
    if _matrix(problem.k, problem.n, *problem.b[2:]) is None:
        b = b.copy()
    found = describe(out, a, b)
    calls = None if found is None else _library_calls(found)
    if calls is None:
        return False
    dtype = out.dtype
    places = [
        (array.buffer, array.offset, step * dtype.itemsize) for array, step in zip((out, a, b), calls.steps, strict=True)
    ]

    def run(driver: DeviceDriver, stream: Any) -> None:
        for i in range(calls.count):
            starts = [(buffer, offset + i * step) for buffer, offset, step in places]
            pointers = [Pointer(buffer.memory, start, dtype, (buffer.nbytes - start) // dtype.itemsize) for buffer, start in starts]
            gemm(*pointers, *calls.arguments, 1.0, 0.0, stream)

    with device.lock:
        a.flush()
        b.flush()
        out.buffer.flush_readers()
        enqueue(device, "gemm", run, tuple({id(x.buffer): x.buffer for x in (a, b)}.values()), (out.buffer,))
    return True

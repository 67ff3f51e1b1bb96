"""Products of two matrices: by the compiled kernels where those outrun BLAS, otherwise by BLAS.

Note [Few rows times a transpose]
    The forward of a linear layer multiplies a few rows by a weight that lies transposed. OpenBLAS is slower at this than at the transposed product by
    a quarter for 64 rows and a half for 8, although both are the same sums, to the bit; transposing the result costs less than that (float32; with
    float64, or more rows, nothing is gained).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from aiograd.kernels.arrays import contiguous, flat, nothing
from aiograd.kernels.pool import run_pieces, shared_by
from aiograd.kernels.selection import compiled

NDArray = npt.NDArray[Any]

#: Products with more multiplications are compiled. For those OpenBLAS wakes its threads, which then spin for 20 ms on the cores that
#: compiled kernels need (bench large_tensors: the CNN's last layer alone made every kernel after it run on one core); up to this many it takes half
#: the time of the compiled loops (bench layers).
MULTIPLICATIONS = 1 << 18
#: multiplications that make a piece worth a thread's attention
PIECE = 1 << 22
#: see Note [Few rows times a transpose]
FEW_ROWS = 64
#: below this product of their sizes two matrices of at least 16 rows and columns never are large; saves small ones a closer look
LARGE = MULTIPLICATIONS * 16


def product(a: NDArray, b: NDArray, bias: NDArray | None = None) -> NDArray:
    """``a @ b + bias`` of two matrices.

    Args:
        a: (M, K).
        b: (K, N).
        bias: (N,) or None.

    Returns:
        (M, N).
    """
    rows, depth = a.shape
    work = rows * depth * b.shape[-1]
    # selection's limit counts elements a loop goes through
    kernels = compiled(work, a, b, bias) if work > MULTIPLICATIONS and depth == b.shape[0] else None
    if kernels is None or not kernels.gemm.OUTRUNS_BLAS:
        out = by_blas(a, b)
        return out if bias is None else shifted(out, bias)
    columns = b.shape[1]
    result = np.empty((rows, columns), a.dtype)
    left, left_steps = _line(a)
    right, right_steps = _line(b)
    grid = _grid(rows, columns, min(2 * shared_by(), max(1, work // PIECE)))
    run_pieces(
        kernels.gemm.gemm, grid[0] * grid[1], left, left_steps, right, right_steps, nothing(a.dtype) if bias is None else flat(bias),
        result.reshape(-1), (rows, depth, columns), kernels.gemm_microkernel.width(a.dtype), grid,
    )  # fmt: skip
    return result


def by_blas(a: NDArray, b: NDArray) -> NDArray:
    """``a @ b``. See Note [Few rows times a transpose]."""
    rows, columns = a.shape[0], b.shape[-1]
    if 1 < rows <= FEW_ROWS and 2 * rows <= columns and a.dtype == b.dtype == np.float32 and a.flags.c_contiguous and b.flags.f_contiguous:
        return np.ascontiguousarray(b.T.dot(a.T).T)
    out: NDArray = a.dot(b)
    return out


def shifted(out: NDArray, bias: NDArray) -> NDArray:
    """``out + bias``, in `out` where the dtype allows it."""
    same = bias.dtype is out.dtype or np.result_type(out, bias) == out.dtype
    return np.add(out, bias, out=out) if same else out + bias


def _line(x: NDArray) -> tuple[NDArray, tuple[int, int]]:
    """A matrix as one contiguous axis, and its steps from row to row and from column to column."""
    if not x.flags.c_contiguous and x.flags.f_contiguous and x.flags.aligned:
        return x.T.reshape(-1), (1, x.shape[0])
    return contiguous(x).reshape(-1), (x.shape[1], 1)


@lru_cache(maxsize=1024)
def _grid(rows: int, columns: int, pieces: int) -> tuple[int, int]:
    """Into how many pieces to cut rows and columns: every piece copies its part of both operands, so those parts should be small together."""
    cuts = [(down, pieces // down) for down in range(1, pieces + 1) if pieces % down == 0]
    return min(cuts, key=lambda cut: (cut[1] * rows + cut[0] * columns, cut))

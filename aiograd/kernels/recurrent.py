"""LSTM steps and sequences that keep their gates for backward.

Gates lie in the order input, forget, cell, output. In numpy one tanh serves all four: ``sigmoid(x)`` is ``(1 + tanh(x / 2)) / 2``.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from aiograd.kernels.arrays import as_rows, contiguous
from aiograd.kernels.pool import GRAIN, run
from aiograd.kernels.selection import THRESHOLD, compiled

NDArray = npt.NDArray[Any]


@lru_cache(maxsize=64)
def _half(hidden: int, dtype: np.dtype[Any]) -> tuple[NDArray, NDArray]:
    """The factor of the gates before and after tanh, and the shift added after it, so that tanh computes sigmoids too: (4H,) each."""
    scale = np.full(4 * hidden, 0.5, dtype)
    scale[2 * hidden : 3 * hidden] = 1.0
    shift = 1.0 - scale
    scale.flags.writeable = shift.flags.writeable = False
    return scale, shift


def _activate(gates: NDArray, before: NDArray, after: NDArray, out: NDArray) -> None:
    """One step: `gates` in place, cell states into `after`, hidden states into `out`."""
    h = before.shape[-1]
    scale, shift = _half(h, gates.dtype)
    gates *= scale
    np.tanh(gates, out=gates)
    gates *= scale
    gates += shift
    np.multiply(gates[..., h : 2 * h], before, out=after)
    after += gates[..., :h] * gates[..., 2 * h : 3 * h]
    np.tanh(after, out=out)
    out *= gates[..., 3 * h :]


def _deactivate(gates: NDArray, before: NDArray, after: NDArray, dh: NDArray, dc: NDArray) -> tuple[NDArray, NDArray]:
    """Gradients of the gates before their nonlinearities and of the cell state before the step; `dh` and `dc` are not modified."""
    h = before.shape[-1]
    i, f, z, o = (gates[..., k * h : (k + 1) * h] for k in range(4))
    t = np.tanh(after)
    d = np.empty_like(gates)
    di, df, dz, do = (d[..., k * h : (k + 1) * h] for k in range(4))
    np.multiply(dh, o, out=do)
    cell = do - do * t * t
    cell += dc
    np.multiply(cell, z, out=di)
    np.multiply(cell, before, out=df)
    np.multiply(cell, i, out=dz)
    do *= t  # dh * o * t * (1 - o)
    di *= i
    df *= f
    do -= do * o
    di -= di * i
    df -= df * f
    dz -= dz * z * z
    return d, cell * f


def lstm_cell(gates: NDArray, c: NDArray) -> tuple[NDArray, NDArray, NDArray]:
    """One step.

    Args:
        gates: (..., 4H), before the nonlinearities.
        c: (..., H).

    Returns:
        The new hidden and cell states (..., H), and the gates after the nonlinearities.
    """
    h = c.shape[-1]
    kernels = compiled(gates.size, gates, c)
    dtype = np.result_type(gates, c)
    active, after, out = np.array(gates, dtype, order="C"), np.empty(c.shape, dtype), np.empty(c.shape, dtype)
    if kernels is None:
        _activate(active, c, after, out)
    else:
        rows = c.size // h
        run(
            kernels.recurrent.lstm_cell, rows, 4 * gates.size, active.reshape(rows, 4 * h), as_rows(c, h), after.reshape(rows, h),
            out.reshape(rows, h),
        )
    return out, after, active


def lstm_cell_grad(dh: NDArray | None, dc: NDArray | None, active: NDArray, c: NDArray, after: NDArray) -> tuple[NDArray, NDArray]:
    """Gradients of `lstm_cell`; a gradient that is None is zero.

    Args:
        dh: (..., H), of the hidden state.
        dc: (..., H), of the cell state.
        active: (..., 4H), gates as the forward gave them.
        c: (..., H), cell state before the step.
        after: (..., H), cell state after it.

    Returns:
        Of the gates and of the cell state before the step.
    """
    h = c.shape[-1]
    dh, dc = (np.zeros(after.shape, after.dtype) if d is None else d for d in (dh, dc))
    kernels = compiled(active.size, active, c, after, dh, dc)
    if kernels is None:
        return _deactivate(active, c, after, dh, dc)
    rows = c.size // h
    dgates, before = np.array(active, order="C"), np.array(dc, order="C")
    run(
        kernels.recurrent.lstm_cell_grad, rows, 4 * active.size, dgates.reshape(rows, 4 * h), as_rows(c, h), as_rows(after, h),
        as_rows(dh, h), before.reshape(rows, h),
    )
    return dgates, before


def is_compiled(work: int) -> bool:
    """True if compiled loops go through a sequence of so many elements of work, gates times hidden units."""
    return work >= THRESHOLD


def _panels(matrix: NDArray, width: int) -> NDArray:
    """(depth, columns) as (blocks, depth, width), zeros beyond the last column."""
    depth, columns = matrix.shape
    blocks = -(-columns // width)
    padded = np.zeros((depth, blocks * width), matrix.dtype)
    padded[:, :columns] = matrix
    return np.ascontiguousarray(padded.reshape(depth, blocks, width).swapaxes(0, 1))


def lstm(gates: NDArray, h0: NDArray, c0: NDArray, weight: NDArray) -> tuple[NDArray, NDArray, NDArray]:
    """A sequence.

    Args:
        gates: (T, N, 4H), the input's part of the gates; overwritten.
        h0: (N, H).
        c0: (N, H).
        weight: (4H, H), recurrent.

    Returns:
        Hidden states and cell states, (T + 1, N, H) with the first ones given, and the gates after their nonlinearities.
    """
    length, batch, size = gates.shape[0], *h0.shape
    hidden, cells = np.empty((length + 1, batch, size), gates.dtype), np.empty((length + 1, batch, size), gates.dtype)
    hidden[0], cells[0] = h0, c0
    kernels = compiled(gates.size * size, gates, h0, c0, weight)
    if kernels is not None:
        panels = _panels(weight.T, kernels.gemm_microkernel.width(gates.dtype))
        run(kernels.recurrent.lstm, batch, _work(length, batch, size), gates, hidden, cells, panels)
        return hidden, cells, gates
    transposed = np.ascontiguousarray(weight.T)
    for t in range(length):
        gates[t] += np.matmul(hidden[t], transposed)
        _activate(gates[t], cells[t], cells[t + 1], hidden[t + 1])
    return hidden, cells, gates


def _work(length: int, batch: int, size: int) -> int:
    """At most one block per 16 rows, which go through the sequence together."""
    return min(length * batch * size * size, GRAIN * (batch // 16))


def lstm_grad(
    g: NDArray, dh: NDArray | None, dc: NDArray | None, gates: NDArray, cells: NDArray, weight: NDArray
) -> tuple[NDArray, NDArray, NDArray]:
    """Gradients of `lstm`.

    Args:
        g: (T, N, H), of the hidden states.
        dh: (N, H), of the last hidden state beyond that, or None.
        dc: (N, H), of the last cell state, or None.
        gates: (T, N, 4H), as the forward left them.
        cells: (T + 1, N, H), as the forward gave them.
        weight: (4H, H), recurrent.

    Returns:
        Of the gates before their nonlinearities, (T, N, 4H), and of the first hidden and cell states.
    """
    length, batch, size = g.shape
    dh, dc = (np.zeros((batch, size), gates.dtype) if d is None else np.array(d, gates.dtype, order="C") for d in (dh, dc))
    kernels = compiled(gates.size * size, gates, g, cells, weight)
    if kernels is not None:
        dgates = gates.copy()
        panels = _panels(weight, kernels.gemm_microkernel.width(gates.dtype))
        run(kernels.recurrent.lstm_grad, batch, _work(length, batch, size), contiguous(g), dgates, cells, dh, dc, panels)
        return dgates, dh, dc
    dgates = np.empty_like(gates)
    for t in range(length - 1, -1, -1):
        dh += g[t]
        dgates[t], dc = _deactivate(gates[t], cells[t], cells[t + 1], dh, dc)
        dh = np.matmul(dgates[t], weight)
    return dgates, dh, dc

"""An LSTM over a whole sequence, rows of the batch side by side: rows never meet until the weights' gradients, which BLAS forms."""

from __future__ import annotations

from typing import Any

import numpy as np

from aiograd.kernels.compiled.jit import inline, kernel, reads, writes
from aiograd.kernels.compiled.matrix import product, round_up, steps
from aiograd.kernels.compiled.scalar import sigmoid, tanh

#: rows of the batch that go through the sequence together
TOGETHER = 16


@inline
def _activate(gates: Any, before: Any, after: Any, out: Any) -> None:
    """One row of one step: gates in place, cell and hidden state."""
    n = before.size
    i, f, z, o = gates[:n], gates[n : 2 * n], gates[2 * n : 3 * n], gates[3 * n :]
    for j in range(n):
        i[j] = sigmoid(i[j])
    for j in range(n):
        f[j] = sigmoid(f[j])
    for j in range(n):
        z[j] = tanh(z[j])
    for j in range(n):
        o[j] = sigmoid(o[j])
    for j in range(n):
        c = f[j] * before[j] + i[j] * z[j]
        after[j] = c
        out[j] = o[j] * tanh(c)


@inline
def _deactivate(gates: Any, before: Any, after: Any, dh: Any, dc: Any) -> None:
    """The adjoint of `_activate`: gates become their gradients, `dc` the gradient of the cell state before."""
    n = before.size
    one = gates.dtype.type(1)
    i, f, z, o = gates[:n], gates[n : 2 * n], gates[2 * n : 3 * n], gates[3 * n :]
    for j in range(n):
        t = tanh(after[j])
        cell = dc[j] + dh[j] * o[j] * (one - t * t)
        o[j] = dh[j] * t * o[j] * (one - o[j])
        dc[j] = cell * f[j]
        f[j] = cell * before[j] * f[j] * (one - f[j])
        new = cell * i[j] * (one - z[j] * z[j])
        i[j] = cell * z[j] * i[j] * (one - i[j])
        z[j] = new


@kernel(writes(2), reads(2), writes(2), writes(2))
def lstm_cell(gates: Any, before: Any, after: Any, out: Any, block: int, low: int, high: int) -> None:
    """One step: gates (N, 4H) in place, cell states before and after it and hidden states, (N, H)."""
    for n in range(low, high):
        _activate(gates[n], before[n], after[n], out[n])


@kernel(writes(2), reads(2), reads(2), reads(2), writes(2))
def lstm_cell_grad(gates: Any, before: Any, after: Any, dh: Any, dc: Any, block: int, low: int, high: int) -> None:
    """The adjoint of `lstm_cell`: gates become their gradients, `dc` the gradient of the cell state before."""
    for n in range(low, high):
        _deactivate(gates[n], before[n], after[n], dh[n], dc[n])


@kernel(writes(3), writes(3), writes(3), reads(3))
def lstm(gates: Any, hidden: Any, cells: Any, panels: Any, block: int, low: int, high: int) -> None:
    """Run the rows in [low, high) of the batch.

    Args:
        gates: (T, N, 4H), the input's part; becomes the gates after their nonlinearities.
        hidden: (T + 1, N, H), the first given.
        cells: (T + 1, N, H), the first given.
        panels: the transposed recurrent weight, (blocks, H, width).
    """
    length, size = gates.shape[0], hidden.shape[2]
    table = steps(size, 1, size)
    part = np.empty((round_up(TOGETHER), panels.shape[0] * panels.shape[2]), gates.dtype)
    for first in range(low, high, TOGETHER):
        count = min(TOGETHER, high - first)
        rows = steps(count, size, part.shape[0])
        for t in range(length):
            product(hidden, (t * hidden.shape[1] + first) * size, rows, count, table, size, panels, 4 * size, part)
            for r in range(count):
                n = first + r
                line, more = gates[t, n], part[r]
                for j in range(line.size):
                    line[j] += more[j]
                _activate(line, cells[t, n], cells[t + 1, n], hidden[t + 1, n])


@kernel(reads(3), writes(3), reads(3), writes(2), writes(2), reads(3))
def lstm_grad(g: Any, gates: Any, cells: Any, dh: Any, dc: Any, panels: Any, block: int, low: int, high: int) -> None:
    """Run the rows in [low, high) of the batch backwards.

    Args:
        g: (T, N, H), gradient of the hidden states.
        gates: (T, N, 4H), as the forward left them; becomes their gradients.
        cells: (T + 1, N, H).
        dh: (N, H), gradient of the last hidden state; becomes the gradient of the first.
        dc: (N, H), likewise of the cell state.
        panels: the recurrent weight, (blocks, 4H, width).
    """
    length, batch, size = g.shape
    table = steps(4 * size, 1, 4 * size)
    part = np.empty((round_up(TOGETHER), panels.shape[0] * panels.shape[2]), gates.dtype)
    for first in range(low, high, TOGETHER):
        count = min(TOGETHER, high - first)
        rows = steps(count, 4 * size, part.shape[0])
        for t in range(length - 1, -1, -1):
            for r in range(count):
                n = first + r
                line, more = dh[n], g[t, n]
                for j in range(size):
                    line[j] += more[j]
                _deactivate(gates[t, n], cells[t, n], cells[t + 1, n], line, dc[n])
            product(gates, (t * batch + first) * 4 * size, rows, count, table, 4 * size, panels, size, part)
            for r in range(count):
                line, more = dh[first + r], part[r]
                for j in range(size):
                    line[j] = more[j]

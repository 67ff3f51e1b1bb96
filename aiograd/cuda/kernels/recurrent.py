"""Kernels of one step of an LSTM: all that is element-wise in it, in one pass.

Gates are (rows, 4 * hidden) in the order input, forget, cell, output; states are (rows, hidden); all in C order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from numba import cuda

from aiograd.cuda.kernels.scalar import TYPES, function


@functools.lru_cache(maxsize=64)
def step(precision: str, stored: str, added: bool) -> Callable[..., None]:
    """``(out, after, active, gates, more, before, size, hidden)``: hidden state, cell state and gates after their nonlinearities.

    Args:
        precision, stored: the precision to compute in, and the precision of elements.
        added: True if `more` is added to the gates first.
    """
    T: Any = TYPES[precision]
    S: Any = TYPES[stored]
    exp, tanh = function("exp", precision), function("tanh", precision)
    one = T(1)

    def lstm_step(out: Any, after: Any, active: Any, gates: Any, more: Any, before: Any, size: int, hidden: int) -> None:
        for e in range(cuda.grid(1), size, cuda.gridsize(1)):
            row = e // hidden
            g = row * 4 * hidden + e - row * hidden
            i, f, z, o = T(gates[g]), T(gates[g + hidden]), T(gates[g + 2 * hidden]), T(gates[g + 3 * hidden])
            if added:
                i += T(more[g])
                f += T(more[g + hidden])
                z += T(more[g + 2 * hidden])
                o += T(more[g + 3 * hidden])
            i = one / (one + exp(-i))
            f = one / (one + exp(-f))
            z = tanh(z)
            o = one / (one + exp(-o))
            c = f * T(before[e]) + i * z
            active[g] = S(i)
            active[g + hidden] = S(f)
            active[g + 2 * hidden] = S(z)
            active[g + 3 * hidden] = S(o)
            after[e] = S(c)
            out[e] = S(o * tanh(c))

    return lstm_step


@functools.lru_cache(maxsize=64)
def step_backward(precision: str, stored: str, from_out: bool, from_next: bool, from_cell: bool) -> Callable[..., None]:
    """``(dgates, dbefore, active, before, after, g, dh, dc, size, hidden)``: the gradients of the gates and of the cell state before the step.

    Args:
        from_out, from_next: True if there is a gradient `g`, and `dh`, of the hidden state; they are added.
        from_cell: True if there is a gradient `dc` of the cell state.
    """
    T: Any = TYPES[precision]
    S: Any = TYPES[stored]
    tanh = function("tanh", precision)
    zero, one = T(0), T(1)

    def lstm_step_backward(dgates: Any, dbefore: Any, active: Any, before: Any, after: Any, g: Any, dh: Any, dc: Any, size: int, hidden: int) -> None:
        for e in range(cuda.grid(1), size, cuda.gridsize(1)):
            row = e // hidden
            at = row * 4 * hidden + e - row * hidden
            i, f, z, o = T(active[at]), T(active[at + hidden]), T(active[at + 2 * hidden]), T(active[at + 3 * hidden])
            top = tanh(T(after[e]))
            outer = zero
            if from_out:
                outer += T(g[e])
            if from_next:
                outer += T(dh[e])
            cell = outer * o * (one - top * top)
            if from_cell:
                cell += T(dc[e])
            dgates[at] = S(cell * z * i * (one - i))
            dgates[at + hidden] = S(cell * T(before[e]) * f * (one - f))
            dgates[at + 2 * hidden] = S(cell * i * (one - z * z))
            dgates[at + 3 * hidden] = S(outer * top * o * (one - o))
            dbefore[e] = S(cell * f)

    return lstm_step_backward

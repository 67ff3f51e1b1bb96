"""LSTM: one step, and a whole sequence with back-propagation through time written by hand.

Gates come in the order input, forget, cell, output, as in PyTorch's weights.

Note [A row for the whole sequence]
    Unrolled from elementary rows, a step costs about a dozen nodes. As one row, the input's part of all gates is one GEMM, the loop
    holds one small GEMM and one pass over the gates per step, and in backward both weight gradients are one GEMM each. The plain rule
    repeats the forward (it saves arguments only) in functions that differentiate again; the compiled one keeps gates and cell states.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from aiograd.errors import ShapeError
from aiograd.kernels import recurrent as kernels
from aiograd.kernels.reduction import column_sum
from aiograd.ops.linalg import GEMM_RATE, product
from aiograd.ops.nn_linear import as_rows
from aiograd.ops.op import Fused, define
from aiograd.running.types import Array, Shape


def _sigmoid(x: Array) -> Array:
    return 0.5 * (1.0 + np.tanh(0.5 * x))


def _split(gates: Array) -> tuple[Array, Array, Array, Array]:
    """Input, forget, cell and output gates after their nonlinearities."""
    h = gates.shape[-1] // 4
    return _sigmoid(gates[..., :h]), _sigmoid(gates[..., h : 2 * h]), np.tanh(gates[..., 2 * h : 3 * h]), _sigmoid(gates[..., 3 * h :])


def _step(gates: Array, c: Array) -> tuple[Array, Array]:
    i, f, z, o = _split(gates)
    c = f * c + i * z
    return o * np.tanh(c), c


def _step_vjp(dh: Array, dc: Array, gates: Array, c: Array) -> tuple[Array, Array]:
    """Gradients of the gates and of the cell state before the step, from the gradients of the step's results (None: zero)."""
    i, f, z, o = _split(gates)
    top = np.tanh(f * c + i * z)
    dcell = dc
    do = 0.0 * o
    if dh is not None:
        through = dh * o * (1.0 - np.square(top))
        dcell = through if dc is None else dc + through
        do = dh * top * o * (1.0 - o)
    dgates = np.concatenate([dcell * z * i * (1.0 - i), dcell * c * f * (1.0 - f), dcell * i * (1.0 - np.square(z)), do], axis=-1)
    return dgates, dcell * f


def _lstm_cell(gates: Array, c: Array, /) -> tuple[Array, Array]:
    """One step from the sum of the gates' inputs.

    Args:
        gates: (..., 4 * hidden), before the nonlinearities; input, forget, cell, output.
        c: (..., hidden), the cell state.

    Returns:
        The new hidden and cell states, (..., hidden).

    Raises:
        ShapeError: the shapes do not fit.
    """
    _check_cell(gates, c)
    return _step(gates, c)


def _check_cell(gates: Array, c: Array) -> None:
    if c.ndim == 0 or gates.shape != (*c.shape[:-1], 4 * c.shape[-1]):
        raise ShapeError(f"lstm_cell: found gates {gates.shape}, c {c.shape}; expected gates (..., 4 * hidden), c (..., hidden)")


def _fused_lstm_cell(gates: Array, c: Array) -> tuple[tuple[Array, Array], Array]:
    _check_cell(gates, c)
    hidden, cell, active = kernels.lstm_cell(gates, c)
    return (hidden, cell), active


def _fused_lstm_cell_vjp(g: tuple[Any, ...], c: Array, out: tuple[Array, Array], active: Array) -> tuple[Array, Array]:
    return kernels.lstm_cell_grad(g[0], g[1], active, c, out[1])


lstm_cell = define(
    "lstm_cell",
    _lstm_cell,
    outputs=2,
    joint={("gates", "c"): lambda g, gates, c: _step_vjp(g[0], g[1], gates, c)},
    cost=8.0,
    fused=Fused(_fused_lstm_cell, ("active",), joint={("gates", "c"): _fused_lstm_cell_vjp}),
)


def check_lstm(x: Array, h0: Array, c0: Array, w_ih: Array, w_hh: Array, b_ih: Array, b_hh: Array) -> None:
    """Refuse shapes that do not fit.

    Raises:
        ShapeError: some shape does not fit.
    """
    hidden = w_hh.shape[-1] if w_hh.ndim == 2 else 0
    fits = (
        x.ndim == 3
        and x.shape[0] > 0
        and w_ih.shape == (4 * hidden, x.shape[2])
        and w_hh.shape == (4 * hidden, hidden)
        and h0.shape == c0.shape == (x.shape[1], hidden)
        and all(b is None or b.shape == (4 * hidden,) for b in (b_ih, b_hh))
    )
    if not fits:
        biases = "".join(f", {name} {b.shape}" for name, b in (("b_ih", b_ih), ("b_hh", b_hh)) if b is not None)
        raise ShapeError(
            f"lstm: found x {x.shape}, h0 {h0.shape}, c0 {c0.shape}, w_ih {w_ih.shape}, w_hh {w_hh.shape}{biases}; expected x (T > 0, N, I), "
            "h0 and c0 (N, H), w_ih (4H, I), w_hh (4H, H), biases (4H,)"
        )


def _input_gates(x: Array, w_ih: Array, b_ih: Array, b_hh: Array) -> Array:
    gates = np.matmul(as_rows(x), w_ih.T)
    for bias in (b_ih, b_hh):
        if bias is not None:
            gates = gates + bias
    return np.reshape(gates, (x.shape[0], x.shape[1], w_ih.shape[0]))


def _unroll(x: Array, h: Array, c: Array, w_ih: Array, w_hh: Array, b_ih: Array, b_hh: Array) -> tuple[list[Array], list[Array], list[Array]]:
    """Gates of each step, and hidden and cell states from before the first step on."""
    from_input = _input_gates(x, w_ih, b_ih, b_hh)
    gates: list[Array] = []
    hidden, cells = [h], [c]
    for t in range(x.shape[0]):
        gates.append(from_input[t] + np.matmul(hidden[-1], w_hh.T))
        h, c = _step(gates[-1], cells[-1])
        hidden.append(h)
        cells.append(c)
    return gates, hidden, cells


def _lstm(x: Array, h0: Array, c0: Array, w_ih: Array, w_hh: Array, b_ih: Array = None, b_hh: Array = None, /) -> tuple[Array, Array, Array]:
    """One layer in one direction over a whole sequence.

    Args:
        x: (T, N, I).
        h0: (N, H), the first hidden state.
        c0: (N, H), the first cell state.
        w_ih: (4H, I).
        w_hh: (4H, H).
        b_ih: (4H,) or absent.
        b_hh: (4H,) or absent.

    Returns:
        The hidden states (T, N, H), the last of them and the last cell state, (N, H).
    """
    check_lstm(x, h0, c0, w_ih, w_hh, b_ih, b_hh)
    _, hidden, cells = _unroll(x, h0, c0, w_ih, w_hh, b_ih, b_hh)
    return np.stack(hidden[1:]), hidden[-1].copy(), cells[-1]


def _lstm_vjp(
    g: tuple[Any, ...], needs: tuple[bool, ...], x: Array, h0: Array, c0: Array, w_ih: Array, w_hh: Array, b_ih: Array, b_hh: Array
) -> tuple[Any, ...]:
    g_out, g_h, dc = g
    gates, hidden, cells = _unroll(x, h0, c0, w_ih, w_hh, b_ih, b_hh)
    dh = g_h
    dgates: list[Array] = []
    for t in range(x.shape[0] - 1, -1, -1):
        if g_out is not None:
            dh = g_out[t] if dh is None else dh + g_out[t]
        step, dc = _step_vjp(dh, dc, gates[t], cells[t])
        dgates.append(step)
        dh = np.matmul(step, w_hh)
    d = np.stack(dgates[::-1])
    rows = as_rows(d)
    dx = np.reshape(np.matmul(rows, w_ih), x.shape) if needs[0] else None
    dw_ih = np.matmul(rows.T, as_rows(x)) if needs[3] else None
    dw_hh = np.matmul(rows.T, as_rows(np.stack(hidden[:-1]))) if needs[4] else None
    db = np.sum(rows, axis=0) if needs[5] or needs[6] else None
    return dx, dh, dc, dw_ih, dw_hh, db if needs[5] else None, db if needs[6] else None


def _cost(output: Shape, inputs: tuple[Shape, ...]) -> float:
    steps, batch = inputs[0][:2]
    gates = inputs[3][0]
    return steps * (30_000.0 + 4.0 * batch * gates * (inputs[3][1] + inputs[4][1]) / GEMM_RATE)


def _fused_cost(output: Shape, inputs: tuple[Shape, ...]) -> float:
    """As `_cost`; where compiled loops go through all steps in one call and nothing is repeated, two products per weight."""
    steps, batch = inputs[0][:2]
    gates = inputs[3][0]
    cells = steps * batch * gates
    if not kernels.is_compiled(cells * inputs[4][1]):
        return steps * (30_000.0 + 2.0 * batch * gates * (inputs[3][1] + inputs[4][1]) / GEMM_RATE)
    return 20_000.0 + cells * (1.5 + 2.0 * (inputs[3][1] + inputs[4][1]) / GEMM_RATE)


def _fused_lstm(
    x: Array, h0: Array, c0: Array, w_ih: Array, w_hh: Array, b_ih: Array, b_hh: Array
) -> tuple[tuple[Array, Array, Array], Array, Array]:
    check_lstm(x, h0, c0, w_ih, w_hh, b_ih, b_hh)
    bias = b_ih if b_hh is None else b_hh if b_ih is None else b_ih + b_hh
    gates = product(as_rows(x), w_ih.T, bias)
    hidden, cells, gates = kernels.lstm(gates.reshape(*x.shape[:2], w_ih.shape[0]), h0, c0, w_hh)
    return (hidden[1:], hidden[-1].copy(), cells[-1].copy()), cells, gates


def _fused_lstm_vjp(
    g: tuple[Any, ...], needs: tuple[bool, ...], x: Array, h0: Array, w_ih: Array, w_hh: Array, out: tuple[Array, ...], cells: Array, gates: Array
) -> tuple[Any, ...]:
    g_out = np.zeros(out[0].shape, out[0].dtype) if g[0] is None else g[0]
    d, dh, dc = kernels.lstm_grad(g_out, g[1], g[2], gates, cells, w_hh)
    rows = as_rows(d)
    dx = product(rows, w_ih).reshape(x.shape) if needs[0] else None
    dw_ih = product(rows.T, as_rows(x)) if needs[3] else None
    dw_hh = None
    if needs[4]:
        dw_hh = product(d[0].T, h0)
        if len(d) > 1:
            dw_hh += product(as_rows(d[1:]).T, as_rows(out[0][:-1]))
    db = column_sum(rows) if needs[5] or needs[6] else None
    return dx, dh, dc, dw_ih, dw_hh, db if needs[5] else None, db if needs[6] else None


_LSTM = ("x", "h0", "c0", "w_ih", "w_hh", "b_ih", "b_hh")

lstm = define(
    "lstm",
    _lstm,
    outputs=3,
    joint={_LSTM: _lstm_vjp},
    cost=_cost,
    fused=Fused(_fused_lstm, ("cells", "gates"), joint={_LSTM: _fused_lstm_vjp}, cost=_fused_cost),
)

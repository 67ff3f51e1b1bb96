"""GRU and the simple recurrent network: one step of a GRU, and whole sequences of both with back-propagation through time written by hand.

Gates of a GRU come in the order reset, update, new, as in PyTorch's weights. As in `aiograd.ops.nn_recurrent`, a sequence is one row: the
input's part of the gates is one GEMM, the loop holds one small GEMM per step, and both weight gradients are one GEMM each.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from aiograd.errors import ArgumentError, ShapeError
from aiograd.ops.linalg import GEMM_RATE
from aiograd.ops.masking import mask
from aiograd.ops.nn_linear import as_rows
from aiograd.ops.op import Fused, define
from aiograd.running.types import Array, Shape

Parts = tuple[Array, Array, Array]
_SEQUENCE = ("x", "h0", "w_ih", "w_hh", "b_ih", "b_hh")


def _sigmoid(x: Array) -> Array:
    return 0.5 * (1.0 + np.tanh(0.5 * x))


def _gates(gi: Array, gh: Array) -> Parts:
    """Reset, update and new gates after their nonlinearities."""
    h = gi.shape[-1] // 3
    reset, update = _sigmoid(gi[..., :h] + gh[..., :h]), _sigmoid(gi[..., h : 2 * h] + gh[..., h : 2 * h])
    return reset, update, np.tanh(gi[..., 2 * h :] + reset * gh[..., 2 * h :])


def _step(gates: Parts, h: Array) -> Array:
    _, update, new = gates
    return new + update * (h - new)


def _step_vjp(dh: Array, gates: Parts, gh: Array, h: Array) -> tuple[Array, Array, Array]:
    """Gradients of the input's part of the gates, of the state's part, and of the state as `_step` uses it."""
    reset, update, new = gates
    dnew = dh * (1.0 - update) * (1.0 - np.square(new))
    dupdate = dh * (h - new) * update * (1.0 - update)
    dreset = dnew * gh[..., 2 * h.shape[-1] :] * reset * (1.0 - reset)
    return np.concatenate([dreset, dupdate, dnew], axis=-1), np.concatenate([dreset, dupdate, dnew * reset], axis=-1), dh * update


def _gru_cell(gi: Array, gh: Array, h: Array, /) -> Array:
    """One step from the two parts of the gates' inputs.

    Args:
        gi: (..., 3 * hidden), the part that comes of the input; reset, update, new.
        gh: (..., 3 * hidden), the part that comes of the state.
        h: (..., hidden), the state.

    Returns:
        The new state, (..., hidden).

    Raises:
        ShapeError: the shapes do not fit.
    """
    if h.ndim == 0 or not gi.shape == gh.shape == (*h.shape[:-1], 3 * h.shape[-1]):
        raise ShapeError(f"gru_cell: found gi {gi.shape}, gh {gh.shape}, h {h.shape}; expected gates (..., 3 * hidden), h (..., hidden)")
    return _step(_gates(gi, gh), h)


gru_cell = define("gru_cell", _gru_cell, joint={("gi", "gh", "h"): lambda g, gi, gh, h: _step_vjp(g, _gates(gi, gh), gh, h)}, cost=8.0)


# Sequences.


def _check(name: str, gates: int, x: Array, h0: Array, w_ih: Array, w_hh: Array, b_ih: Array, b_hh: Array) -> None:
    hidden = w_hh.shape[-1] if w_hh.ndim == 2 else 0
    fits = (
        x.ndim == 3
        and x.shape[0] > 0
        and w_ih.shape == (gates * hidden, x.shape[2])
        and w_hh.shape == (gates * hidden, hidden)
        and h0.shape == (x.shape[1], hidden)
        and all(b is None or b.shape == (gates * hidden,) for b in (b_ih, b_hh))
    )
    if not fits:
        biases = "".join(f", {label} {b.shape}" for label, b in (("b_ih", b_ih), ("b_hh", b_hh)) if b is not None)
        raise ShapeError(
            f"{name}: found x {x.shape}, h0 {h0.shape}, w_ih {w_ih.shape}, w_hh {w_hh.shape}{biases}; expected x (T > 0, N, I), h0 (N, H), "
            f"w_ih ({gates}H, I), w_hh ({gates}H, H), biases ({gates}H,)"
        )


def _from_input(x: Array, w_ih: Array, *biases: Array) -> Array:
    gates = np.matmul(as_rows(x), w_ih.T)
    for bias in biases:
        if bias is not None:
            gates = gates + bias
    return np.reshape(gates, (x.shape[0], x.shape[1], w_ih.shape[0]))


def _weights_vjp(di: Array, dh: Array, x: Array, before: Array, w_ih: Array, needs: tuple[bool, ...]) -> tuple[Any, ...]:
    """Gradients of x, w_ih, w_hh, b_ih, b_hh from the gradients of the two parts of the gates (T, N, ...) and the states before each step."""
    rows_i, rows_h = as_rows(di), as_rows(dh)
    return (
        np.reshape(np.matmul(rows_i, w_ih), x.shape) if needs[0] else None,
        np.matmul(rows_i.T, as_rows(x)) if needs[2] else None,
        np.matmul(rows_h.T, as_rows(before)) if needs[3] else None,
        np.sum(rows_i, axis=0) if needs[4] else None,
        np.sum(rows_h, axis=0) if needs[5] else None,
    )


def _gru_unroll(x: Array, h: Array, w_ih: Array, w_hh: Array, b_ih: Array, b_hh: Array) -> tuple[list[Parts], list[Array], list[Array]]:
    """Gates and the state's part of them for each step, and states from before the first step on."""
    from_input = _from_input(x, w_ih, b_ih)
    gates: list[Parts] = []
    parts: list[Array] = []
    hidden = [h]
    for t in range(x.shape[0]):
        gh = np.matmul(hidden[-1], w_hh.T)
        parts.append(gh if b_hh is None else gh + b_hh)
        gates.append(_gates(from_input[t], parts[-1]))
        hidden.append(_step(gates[-1], hidden[-1]))
    return gates, parts, hidden


def _gru(x: Array, h0: Array, w_ih: Array, w_hh: Array, b_ih: Array = None, b_hh: Array = None, /) -> tuple[Array, Array]:
    """One layer of a GRU in one direction over a whole sequence.

    Args:
        x: (T, N, I).
        h0: (N, H), the first state.
        w_ih: (3H, I).
        w_hh: (3H, H).
        b_ih: (3H,) or absent.
        b_hh: (3H,) or absent.

    Returns:
        The states (T, N, H), and the last of them, (N, H).
    """
    _check("gru", 3, x, h0, w_ih, w_hh, b_ih, b_hh)
    hidden = _gru_unroll(x, h0, w_ih, w_hh, b_ih, b_hh)[2]
    return np.stack(hidden[1:]), hidden[-1].copy()


def _fused_gru(
    x: Array, h0: Array, w_ih: Array, w_hh: Array, b_ih: Array, b_hh: Array
) -> tuple[tuple[Array, Array], list[Parts], list[Array], list[Array]]:
    _check("gru", 3, x, h0, w_ih, w_hh, b_ih, b_hh)
    gates, parts, hidden = _gru_unroll(x, h0, w_ih, w_hh, b_ih, b_hh)
    return (np.stack(hidden[1:]), hidden[-1].copy()), gates, parts, hidden


def _gru_back(
    g: tuple[Any, ...], needs: tuple[bool, ...], x: Array, w_ih: Array, w_hh: Array, gates: list[Parts], parts: list[Array], hidden: list[Array]
) -> tuple[Any, ...]:
    g_out, dh = g
    di: list[Array] = []
    ds: list[Array] = []
    for t in range(x.shape[0] - 1, -1, -1):
        if g_out is not None:
            dh = g_out[t] if dh is None else dh + g_out[t]
        step_i, step_h, through = _step_vjp(dh, gates[t], parts[t], hidden[t])
        di.append(step_i)
        ds.append(step_h)
        dh = through + np.matmul(step_h, w_hh)
    dx, *rest = _weights_vjp(np.stack(di[::-1]), np.stack(ds[::-1]), x, np.stack(hidden[:-1]), w_ih, needs)
    return dx, dh, *rest


def _gru_vjp(g: tuple[Any, ...], needs: tuple[bool, ...], x: Array, h0: Array, w_ih: Array, w_hh: Array, b_ih: Array, b_hh: Array) -> tuple[Any, ...]:
    return _gru_back(g, needs, x, w_ih, w_hh, *_gru_unroll(x, h0, w_ih, w_hh, b_ih, b_hh))


def _cost(output: Shape, inputs: tuple[Shape, ...]) -> float:
    steps, batch = inputs[0][:2]
    return steps * (30_000.0 + 4.0 * batch * inputs[2][0] * (inputs[2][1] + inputs[3][1]) / GEMM_RATE)


gru = define(
    "gru",
    _gru,
    outputs=2,
    joint={_SEQUENCE: _gru_vjp},
    cost=_cost,
    fused=Fused(_fused_gru, ("gates", "parts", "hidden"), joint={_SEQUENCE: _gru_back}),
)


def _rnn(x: Array, h0: Array, w_ih: Array, w_hh: Array, b_ih: Array = None, b_hh: Array = None, /, nonlinearity: str = "tanh") -> tuple[Array, Array]:
    """One layer of a simple recurrent network in one direction: ``h = f(x @ w_ih.T + b_ih + h @ w_hh.T + b_hh)``.

    Args:
        x: (T, N, I).
        h0: (N, H), the first state.
        w_ih: (H, I).
        w_hh: (H, H).
        b_ih: (H,) or absent.
        b_hh: (H,) or absent.
        nonlinearity: f, "tanh" or "relu".

    Returns:
        The states (T, N, H), and the last of them, (N, H).
    """
    if nonlinearity not in ("tanh", "relu"):
        raise ArgumentError(f"rnn: nonlinearity {nonlinearity!r}, expected 'tanh' or 'relu'")
    _check("rnn", 1, x, h0, w_ih, w_hh, b_ih, b_hh)
    from_input = _from_input(x, w_ih, b_ih, b_hh)
    h, hidden = h0, []
    for t in range(x.shape[0]):
        h = from_input[t] + np.matmul(h, w_hh.T)
        h = np.tanh(h) if nonlinearity == "tanh" else np.maximum(h, 0)
        hidden.append(h)
    return np.stack(hidden), h.copy()


def _rnn_vjp(
    g: tuple[Any, ...], needs: tuple[bool, ...], x: Array, h0: Array, w_ih: Array, w_hh: Array, out: tuple[Array, Array], nonlinearity: str
) -> tuple[Any, ...]:
    g_out, dh = g
    hidden = out[0]
    steps: list[Array] = []
    for t in range(x.shape[0] - 1, -1, -1):
        if g_out is not None:
            dh = g_out[t] if dh is None else dh + g_out[t]
        steps.append(dh * (1.0 - np.square(hidden[t])) if nonlinearity == "tanh" else mask(dh, hidden[t] > 0))
        dh = np.matmul(steps[-1], w_hh)
    d = np.stack(steps[::-1])
    before = np.concatenate([np.reshape(h0, (1, *h0.shape)), hidden[:-1]], axis=0)
    dx, *rest = _weights_vjp(d, d, x, before, w_ih, needs)
    return dx, dh, *rest


rnn = define("rnn", _rnn, outputs=2, joint={_SEQUENCE: _rnn_vjp}, cost=_cost)

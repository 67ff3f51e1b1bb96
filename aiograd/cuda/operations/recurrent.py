"""LSTM: a step, and a whole sequence; each step is a product and one launch.

The input's part of all gates is one product before the steps, and so are the gradients of both weights after them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from aiograd.cuda import tables
from aiograd.cuda.array import CudaArray, as_cuda, empty
from aiograd.cuda.kernels import recurrent as kernels
from aiograd.cuda.kernels.scalar import precision_of
from aiograd.cuda.launching import launch, spread
from aiograd.ops.nn_recurrent import check_lstm
from aiograd.ops.op import ROWS, Fused


def _is_native(*arrays: CudaArray | None) -> bool:
    dtypes = {array.dtype for array in arrays if array is not None}
    return len(dtypes) == 1 and all(dtype.kind == "f" and dtype.itemsize <= 8 for dtype in dtypes)


def _step(out: CudaArray, after: CudaArray, active: CudaArray, gates: CudaArray, more: CudaArray | None, before: CudaArray) -> None:
    if not out.size:
        return
    kernel = kernels.step(precision_of(out.dtype), f"f{out.itemsize}", more is not None)
    launch(
        kernel, *spread(out.device, out.size), out, after, active, gates.contiguous(), gates if more is None else more.contiguous(),
        before.contiguous(), out.size, out.shape[-1], writes=(out, after, active),
    )  # fmt: skip


def _step_backward(
    dgates: CudaArray, active: CudaArray, before: CudaArray, after: CudaArray, g: CudaArray | None, dh: CudaArray | None, dc: CudaArray | None
) -> CudaArray:
    """Write the gradient of the gates; returns the gradient of the cell state before the step."""
    dbefore = empty(after.device, after.shape, after.dtype)
    if after.size:
        kernel = kernels.step_backward(precision_of(after.dtype), f"f{after.itemsize}", g is not None, dh is not None, dc is not None)
        given = [after if each is None else each.astype(after.dtype, copy=False).contiguous() for each in (g, dh, dc)]
        launch(
            kernel, *spread(after.device, after.size), dgates, dbefore, active, before.contiguous(), after, *given, after.size, after.shape[-1],
            writes=(dgates, dbefore),
        )  # fmt: skip
    return dbefore


def _given(like: CudaArray, gradient: Any) -> CudaArray | None:
    return None if gradient is None else as_cuda(like.device, gradient)


# ---------------------------------------------------------------- one step


def lstm_cell(gates: CudaArray, c: CudaArray) -> tuple[Any, Any]:
    """The row of that name, and the gates after their nonlinearities."""
    if not _is_native(gates, c) or c.ndim == 0 or gates.shape != (*c.shape[:-1], 4 * c.shape[-1]):
        return ROWS["lstm_cell"].forward(gates, c), None
    out, after, active = (empty(c.device, shape, c.dtype) for shape in (c.shape, c.shape, gates.shape))
    _step(out, after, active, gates, None, c)
    return (out, after), active


def lstm_cell_gradients(g: tuple[Any, ...], gates: CudaArray, c: CudaArray, out: tuple[CudaArray, CudaArray], active: Any) -> tuple[Any, Any]:
    """Of the gates and of the cell state before the step."""
    if active is None:
        (rule,) = ROWS["lstm_cell"].joint.values()
        return rule(g, gates, c)  # type: ignore[no-any-return]
    dgates = empty(c.device, active.shape, active.dtype)
    return dgates, _step_backward(dgates, active, c, out[1], _given(c, g[0]), None, _given(c, g[1]))


# ---------------------------------------------------------------- a sequence


def lstm(
    x: CudaArray, h0: CudaArray, c0: CudaArray, w_ih: CudaArray, w_hh: CudaArray, b_ih: CudaArray | None, b_hh: CudaArray | None
) -> tuple[Any, ...]:
    """The row of that name, and cell states and gates of each step."""
    check_lstm(x, h0, c0, w_ih, w_hh, b_ih, b_hh)
    if not _is_native(x, h0, c0, w_ih, w_hh, b_ih, b_hh):
        return ROWS["lstm"].forward(x, h0, c0, w_ih, w_hh, b_ih, b_hh), None, None
    steps, batch, hidden = x.shape[0], *h0.shape
    gates: Any = np.matmul(x.reshape(steps * batch, -1), w_ih.T)
    for bias in (b_ih, b_hh):
        if bias is not None:
            gates = gates + bias
    gates = gates.reshape(steps, batch, 4 * hidden)
    out, cells = empty(x.device, (steps, batch, hidden), x.dtype), empty(x.device, (steps, batch, hidden), x.dtype)
    active = empty(x.device, gates.shape, x.dtype)
    recurrent = w_hh.T.contiguous()
    h, c = h0, c0
    for t in range(steps):
        _step(out[t], cells[t], active[t], gates[t], np.matmul(h, recurrent), c)
        h, c = out[t], cells[t]
    return (out, h.copy(), c.copy()), cells, active


def lstm_gradients(
    g: tuple[Any, ...], needs: tuple[bool, ...], x: CudaArray, h0: CudaArray, c0: CudaArray, w_ih: CudaArray, w_hh: CudaArray, b_ih: Any, b_hh: Any,
    out: tuple[CudaArray, ...], cells: Any, active: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Of all arguments."""
    if active is None:
        (rule,) = ROWS["lstm"].joint.values()
        return rule(g, needs, x, h0, c0, w_ih, w_hh, b_ih, b_hh)  # type: ignore[no-any-return]
    g_out, dh, dc = (_given(x, each) for each in g)
    dgates = empty(x.device, active.shape, active.dtype)
    for t in range(len(active) - 1, -1, -1):
        dc = _step_backward(dgates[t], active[t], cells[t - 1] if t else c0, cells[t], None if g_out is None else g_out[t], dh, dc)
        dh = np.matmul(dgates[t], w_hh)
    rows = dgates.reshape(-1, dgates.shape[-1])
    dx = np.matmul(rows, w_ih).reshape(x.shape) if needs[0] else None
    dw_ih = np.matmul(rows.T, x.reshape(len(rows), -1)) if needs[3] else None
    dw_hh: Any = None
    if needs[4]:
        dw_hh = np.matmul(dgates[0].T, h0)
        if len(active) > 1:
            later = dgates[1:]
            dw_hh = dw_hh + np.matmul(later.reshape(-1, later.shape[-1]).T, out[0][:-1].reshape(-1, h0.shape[-1]))
    db: Any = np.sum(rows, axis=0) if needs[5] or needs[6] else None
    return dx, dh, dc, dw_ih, dw_hh, db if needs[5] else None, db if needs[6] else None


tables.fused("lstm_cell", Fused(lstm_cell, ("active",), joint={("gates", "c"): lstm_cell_gradients}))
tables.fused("lstm", Fused(lstm, ("cells", "active"), joint={("x", "h0", "c0", "w_ih", "w_hh", "b_ih", "b_hh"): lstm_gradients}))


@tables.row("lstm_cell")
def lstm_cell_row(gates: Any, c: Any, /) -> Any:
    """The result alone, without the values kept for the gradient."""
    if not isinstance(gates, CudaArray) or not isinstance(c, CudaArray):
        return NotImplemented
    return lstm_cell(gates, c)[0]

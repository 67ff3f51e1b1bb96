"""Losses with integer targets. Losses of two arrays, such as the mean square, need no kernels: they are reductions of element-wise expressions.

Note [Targets]
    Targets on the host are checked there, as are class weights, and copied to the device without waiting; the divisor of a mean is then a number, and
    the mean one launch. Of targets on the device only shape and dtype are checked: looking at their values would mean waiting
    (`aiograd.cuda.kernels.loss` says what becomes of wrong ones). A mean then divides by a sum that the device makes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from aiograd.cuda import tables
from aiograd.cuda.array import CudaArray, as_cuda, check_same, empty
from aiograd.cuda.kernels import loss as kernels
from aiograd.cuda.kernels.scalar import precision_of
from aiograd.cuda.launching import launch, spread
from aiograd.cuda.operations.reducing import reduce
from aiograd.cuda.operations.softmax import lines_along
from aiograd.ops.nn_loss import check_reduction, check_smoothing, check_targets, check_weight, class_axis
from aiograd.ops.op import ROWS, Fused

_PRECISIONS = {"f4": np.float32, "f8": np.float64}

_Weights = np.ndarray[Any, Any] | None


def _is_native(x: CudaArray) -> bool:
    return x.size > 0 and x.dtype.kind == "f" and x.itemsize <= 8


def _checked(name: str, x: CudaArray, target: Any, weight: Any, ignore_index: int, reduction: Any) -> tuple[Any, _Weights]:
    """Targets as an integer array of the host or of the device, and weights on the host, in the precision that kernels compute in.

    Raises:
        ShapeError, ArgumentTypeError, ArgumentError: an argument does not fit `x`. DeviceMismatchError: the targets are on another device.
    """
    check_reduction(name, reduction)
    check_weight(name, x.shape, weight)
    if isinstance(target, CudaArray):
        check_same(x.device, name, (target,))
        # zero is a class for any number of classes, so that only shape and dtype are checked
        check_targets(name, x.shape, np.broadcast_to(np.zeros((), target.dtype), target.shape), ignore_index)
    else:
        target = check_targets(name, x.shape, target, ignore_index)
    return target, _on_host(x, weight)


def _on_host(x: CudaArray, weight: Any) -> _Weights:
    return None if weight is None else np.asarray(weight, _PRECISIONS[precision_of(x.dtype)])


def _on_device(x: CudaArray, target: Any, weight: _Weights) -> tuple[CudaArray, CudaArray | None]:
    classes = target if isinstance(target, CudaArray) else CudaArray.from_host(x.device, target)
    return classes.astype(np.int64, copy=False).reshape(-1).contiguous(), None if weight is None else CudaArray.from_host(x.device, weight)


def _denominator(target: Any, weight: _Weights, ignore_index: int, reduction: str) -> float:
    """The divisor of the mean of losses, i.e. the total weight of all samples; 1 if there is no mean, or the device computes the divisor."""
    if reduction != "mean" or isinstance(target, CudaArray):
        return 1.0
    target = np.asarray(target)
    kept = target != ignore_index
    return float(np.count_nonzero(kept) if weight is None else weight[target[kept]].sum(dtype=np.float64))


def _reduced(
    loss: CudaArray, count: CudaArray, x: CudaArray, target: Any, weight: _Weights, ignore_index: int, reduction: str
) -> tuple[Any, CudaArray | None]:
    """The losses as asked for; and what their mean was divided by, where the device had to find out."""
    if reduction == "none":
        return loss.reshape(target.shape).astype(x.dtype, copy=False), None
    if reduction == "mean" and isinstance(target, CudaArray):
        counted = reduce(count, "sum", (0,), False, count.dtype, count.dtype)
        total: Any = reduce(loss, "sum", (0,), False, loss.dtype, loss.dtype)
        return (total / counted).astype(x.dtype, copy=False), counted
    by = _denominator(target, weight, ignore_index, reduction)
    return reduce(loss, "sum", (0,), False, loss.dtype, x.dtype, "divide" if reduction == "mean" else "", by), None


# ---------------------------------------------------------------- cross entropy


def cross_entropy(logits: CudaArray, target: Any, weight: Any, ignore_index: int, label_smoothing: float, reduction: Any) -> tuple[Any, ...]:
    """The row's result, the log-sum-exp of each sample, targets and weights on the device, and the divisor of a mean if it is on the device."""
    if not _is_native(logits):
        return ROWS["cross_entropy"].forward(logits, target, weight, ignore_index, label_smoothing, reduction), None, None, None, None
    target, weight = _checked("cross_entropy", logits, target, weight, ignore_index, reduction)
    check_smoothing(label_smoothing)
    device, precision = logits.device, precision_of(logits.dtype)
    dtype = _PRECISIONS[precision]
    classes, weights = _on_device(logits, target, weight)
    m, n, inner, here = lines_along(logits, class_axis(logits.ndim))
    loss, count, shift = (empty(device, (m,), dtype) for _ in range(3))
    kernel = kernels.cross_entropy(precision, here.columns, here.lanes, here.along, weight is not None, label_smoothing != 0)
    launch(
        kernel, here.blocks, here.block, loss, count, shift, logits.contiguous(), classes, classes if weights is None else weights, m, n, inner,
        ignore_index, dtype(1 - label_smoothing), dtype(label_smoothing / n), writes=(loss, count, shift),
    )  # fmt: skip
    result, counted = _reduced(loss, count, logits, target, weight, ignore_index, reduction)
    return result, shift, classes, weights, counted


def cross_entropy_logits(
    g: Any, logits: CudaArray, target: Any, weight: Any, ignore_index: int, label_smoothing: float, reduction: Any, shift: Any, classes: Any,
    weights: Any, counted: Any,
) -> Any:  # fmt: skip
    """The gradient of the logits, in one launch."""
    g = as_cuda(logits.device, g)
    if shift is None:
        return ROWS["cross_entropy"].rules["logits"](g, logits, target, weight, ignore_index, label_smoothing, reduction)
    g = g if counted is None else g / counted
    precision = precision_of(logits.dtype)
    dtype = _PRECISIONS[precision]
    m, n, inner, here = lines_along(logits, class_axis(logits.ndim))
    weight = _on_host(logits, weight)
    total, by = n if weight is None else weight.sum(dtype=np.float64), _denominator(target, weight, ignore_index, reduction)
    dx = empty(logits.device, logits.shape, logits.dtype)
    kernel = kernels.cross_entropy_backward(
        precision, f"f{logits.itemsize}", here.columns, here.lanes, here.along, weight is not None, reduction == "none"
    )
    launch(
        kernel, here.blocks, here.block, dx, g.contiguous(), logits.contiguous(), shift, classes, classes if weights is None else weights, m, n,
        inner, ignore_index, dtype(1 - label_smoothing), dtype(label_smoothing / n), dtype(total), dtype(by), writes=(dx,),
    )  # fmt: skip
    return dx


# ---------------------------------------------------------------- negative log-likelihood


def nll_loss(logp: CudaArray, target: Any, weight: Any, ignore_index: int, reduction: Any) -> tuple[Any, ...]:
    """The row's result, targets and weights on the device, and the divisor of a mean if it is on the device."""
    if not _is_native(logp):
        return ROWS["nll_loss"].forward(logp, target, weight, ignore_index, reduction), None, None, None
    target, weight = _checked("nll_loss", logp, target, weight, ignore_index, reduction)
    precision = precision_of(logp.dtype)
    classes, weights = _on_device(logp, target, weight)
    m, n, inner, _ = lines_along(logp, class_axis(logp.ndim))
    loss, count = (empty(logp.device, (m,), _PRECISIONS[precision]) for _ in range(2))
    launch(
        kernels.nll(precision, weight is not None), *spread(logp.device, m), loss, count, logp.contiguous(), classes,
        classes if weights is None else weights, m, n, inner, ignore_index, writes=(loss, count),
    )  # fmt: skip
    result, counted = _reduced(loss, count, logp, target, weight, ignore_index, reduction)
    return result, classes, weights, counted


def nll_loss_logp(
    g: Any, logp_shape: tuple[int, ...], logp_dtype: Any, target: Any, weight: Any, ignore_index: int, reduction: Any, out: CudaArray, classes: Any,
    weights: Any, counted: Any,
) -> Any:  # fmt: skip
    """The gradient of the log-probabilities, in one launch."""
    device = out.device
    g = as_cuda(device, g)
    if classes is None:
        return ROWS["nll_loss"].rules["logp"](g, logp_shape, logp_dtype, target, weight, ignore_index, reduction)
    g = g if counted is None else g / counted
    dx = empty(device, logp_shape, logp_dtype)
    precision = precision_of(dx.dtype)
    by = _denominator(target, _on_host(dx, weight), ignore_index, reduction)
    m, n, inner, here = lines_along(dx, class_axis(dx.ndim))
    kernel = kernels.nll_backward(precision, f"f{dx.itemsize}", here.columns, here.lanes, here.along, weight is not None, reduction == "none")
    launch(
        kernel, here.blocks, here.block, dx, g.contiguous(), classes, classes if weights is None else weights, m, n, inner, ignore_index,
        _PRECISIONS[precision](by), writes=(dx,),
    )  # fmt: skip
    return dx


tables.fused("cross_entropy", Fused(cross_entropy, ("shift", "classes", "weights", "counted"), {"logits": cross_entropy_logits}))
tables.fused("nll_loss", Fused(nll_loss, ("classes", "weights", "counted"), {"logp": nll_loss_logp}))


@tables.row("cross_entropy")
def cross_entropy_row(
    logits: CudaArray, /, target: Any, weight: Any = None, ignore_index: int = -100, label_smoothing: float = 0.0, reduction: Any = "mean"
) -> Any:
    """The result alone, without the values kept for the gradient."""
    return cross_entropy(logits, target, weight, ignore_index, label_smoothing, reduction)[0] if _is_native(logits) else NotImplemented


@tables.row("nll_loss")
def nll_loss_row(logp: CudaArray, /, target: Any, weight: Any = None, ignore_index: int = -100, reduction: Any = "mean") -> Any:
    """The result alone, without the values kept for the gradient."""
    return nll_loss(logp, target, weight, ignore_index, reduction)[0] if _is_native(logp) else NotImplemented

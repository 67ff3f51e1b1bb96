"""Losses, each a row: from predictions and targets to a number per sample, their sum or their mean.

Note [Class weights as an array]
    Cross entropy and negative log-likelihood are ``-sum(T * log_probability)`` for an array T of the shape of the logits that says how
    much each class of each sample counts (one at the target; less with label smoothing; zero where ignored; scaled by class weights and
    by the mean's denominator). T does not depend on the argument of the derivative, so the plain rules need only T: the gradient of the logits is
    ``softmax * sum(T) - T``. The compiled kernel never builds T.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import numpy as np

from aiograd.errors import ArgumentError, ArgumentTypeError, ShapeError
from aiograd.kernels import softmax as kernels
from aiograd.kernels.arrays import as_rows, quietly
from aiograd.ops.masking import where
from aiograd.ops.nn_softmax import log_softmax, softmax
from aiograd.ops.op import Fused, define
from aiograd.ops.reduction import add_reduce, maximum_reduce, mean
from aiograd.ops.special import sigmoid
from aiograd.running.types import Array, Shape

Reduction = Literal["mean", "sum", "none"]


def check_reduction(name: str, reduction: str) -> None:
    """Refuse an unknown reduction.

    Raises:
        ArgumentError: it is none of the three.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ArgumentError(f"{name}: reduction={reduction!r}, expected 'mean', 'sum' or 'none'")


def reduced(name: str, loss: Array, reduction: Reduction) -> Array:
    """`loss` summed, averaged (NaN where there is none) or as it is.

    Raises:
        ArgumentError: an unknown reduction.
    """
    check_reduction(name, reduction)
    if reduction == "none":
        return loss
    return np.sum(loss) if reduction == "sum" else mean(loss)


def spread(g: Array, shape: Shape, reduction: Reduction) -> Array:
    """The gradient of each element from the gradient of the reduced loss; it still broadcasts."""
    return g / max(1, int(np.prod(shape, dtype=np.int64))) if reduction == "mean" else g


def class_axis(logits_ndim: int) -> int:
    """The axis of classes: the second, or the only one."""
    return 1 if logits_ndim > 1 else 0


def check_targets(name: str, shape: Shape, target: Any, ignore_index: int) -> Array:
    """`target` as an integer ndarray that fits logits of `shape`.

    Raises:
        ShapeError, ArgumentTypeError, ArgumentError: shape, dtype or values.
    """
    target = np.asarray(target)
    if not shape:
        raise ShapeError(f"{name}: the input is 0-d, expected (C,) or (N, C, ...)")
    axis = class_axis(len(shape))
    expected = shape[:axis] + shape[axis + 1 :]
    if target.dtype.kind not in "iu":
        raise ArgumentTypeError(f"{name}: targets have dtype {target.dtype}, expected integer class indices")
    if target.shape != expected:
        raise ShapeError(f"{name}: targets have shape {target.shape}, expected {expected} for an input of shape {shape}")
    outside = ((target < 0) | (target >= shape[axis])) & (target != ignore_index)
    if outside.any():
        wrong = target[outside].flat[0]
        raise ArgumentError(f"{name}: target {wrong} is not a class, expected 0 to {shape[axis] - 1} or ignore_index={ignore_index}")
    return target


def _as_array(target: Any) -> Array:
    """Targets of a device as they are, others as an ndarray."""
    return target if hasattr(target, "__aiograd_device__") else np.asarray(target)


def target_weights(
    shape: Shape, dtype: Any, target: Array, weight: Array, ignore_index: int, label_smoothing: float, reduction: Reduction, of_slope: bool = False
) -> Array:
    """The array T of Note [Class weights as an array], of the shape of the logits.

    Where every target is ignored, the mean is NaN, and so is T; the mean depends on no logit then, so T is zeros with `of_slope`.
    """
    axis = class_axis(len(shape))
    classes = shape[axis]
    along = (-1,) + (1,) * (len(shape) - axis - 1)
    target = np.expand_dims(target, axis)
    kept = target != ignore_index
    one_hot = (target == np.arange(classes).reshape(along)) & kept
    each = 1.0 * one_hot if label_smoothing == 0 else (1.0 - label_smoothing) * one_hot + (label_smoothing / max(classes, 1)) * kept
    if weight is not None:
        weight = np.asarray(weight).reshape(along)
        each = each * weight
    if reduction == "mean":
        with np.errstate(divide="ignore", invalid="ignore"):
            total = np.sum(one_hot if weight is None else one_hot * weight)
            each = each / (total + (np.sum(kept) == 0) if of_slope else total)
    return each.astype(dtype)


def check_weight(name: str, shape: Shape, weight: Any) -> None:
    """Refuse class weights that do not fit logits of `shape`.

    Raises:
        ShapeError: there is not one value per class.
    """
    if weight is not None and np.asarray(weight).shape != (shape[class_axis(len(shape))],):
        raise ShapeError(f"{name}: weight has shape {np.asarray(weight).shape}, expected ({shape[class_axis(len(shape))]},), one value per class")


def _weighted_sum(name: str, logp: Array, each: Array, reduction: Reduction) -> Array:
    # a class that does not count adds nothing, even where its log-probability is -inf
    loss = -np.sum(np.where(each == 0, np.zeros((), logp.dtype), each * logp), axis=class_axis(logp.ndim))
    return reduced(name, loss, "sum" if reduction == "mean" and loss.size else reduction)


def _nll_loss(logp: Array, /, target: Any, weight: Any = None, ignore_index: int = -100, reduction: Reduction = "mean") -> Array:
    """Negative log-likelihood of integer targets.

    Args:
        logp: log-probabilities, (C,) or (N, C, ...).
        target: integers, the shape of `logp` without its class axis.
        weight: (C,) how much each class counts, or None.
        ignore_index: a target that counts for nothing.
        reduction: "mean" (weighted by the weight of each target), "sum" or "none".
    """
    target = check_targets("nll_loss", logp.shape, target, ignore_index)
    check_weight("nll_loss", logp.shape, weight)
    with np.errstate(invalid="ignore"):
        return _weighted_sum("nll_loss", logp, target_weights(logp.shape, logp.dtype, target, weight, ignore_index, 0.0, reduction), reduction)


def _per_sample(g: Array, ndim: int, reduction: Reduction) -> Array:
    return np.expand_dims(g, class_axis(ndim)) if reduction == "none" else g


def _nll_loss_logp(g: Array, logp_shape: Shape, logp_dtype: Any, target: Any, weight: Any, ignore_index: int, reduction: Reduction) -> Array:
    each = target_weights(logp_shape, logp_dtype, _as_array(target), weight, ignore_index, 0.0, reduction, True)
    return -_per_sample(g, len(logp_shape), reduction) * each


def _nll_loss_jvp(t: Array, logp_shape: Shape, logp_dtype: Any, target: Any, weight: Any, ignore_index: int, reduction: Reduction) -> Array:
    each = target_weights(logp_shape, logp_dtype, _as_array(target), weight, ignore_index, 0.0, reduction, True)
    return _weighted_sum("nll_loss", t, each, reduction)


nll_loss = define("nll_loss", _nll_loss, logp=_nll_loss_logp, jvp=_nll_loss_jvp, cost=4.0)


def _cross_entropy(
    logits: Array, /, target: Any, weight: Any = None, ignore_index: int = -100, label_smoothing: float = 0.0, reduction: Reduction = "mean"
) -> Array:
    """Negative log-likelihood of integer targets under the softmax of `logits`.

    Args:
        logits: (C,) or (N, C, ...).
        target: integers, the shape of `logits` without its class axis.
        weight: (C,) how much each class counts, or None.
        ignore_index: a target that counts for nothing.
        label_smoothing: in [0, 1], the part of each target spread evenly over the classes.
        reduction: "mean" (weighted by the weight of each target), "sum" or "none".
    """
    target = _check_cross_entropy(logits.shape, target, weight, ignore_index, label_smoothing, reduction)
    each = target_weights(logits.shape, logits.dtype, target, weight, ignore_index, label_smoothing, reduction)
    with np.errstate(invalid="ignore"):
        return _weighted_sum("cross_entropy", log_softmax(logits, axis=class_axis(logits.ndim)), each, reduction)


def _check_cross_entropy(shape: Shape, target: Any, weight: Any, ignore_index: int, label_smoothing: float, reduction: Reduction) -> Array:
    check_reduction("cross_entropy", reduction)
    target = check_targets("cross_entropy", shape, target, ignore_index)
    check_weight("cross_entropy", shape, weight)
    check_smoothing(label_smoothing)
    return target


def check_smoothing(label_smoothing: float) -> None:
    """Refuse a part of the target that is none.

    Raises:
        ArgumentError: it is not from 0 to 1.
    """
    if not 0.0 <= label_smoothing <= 1.0:
        raise ArgumentError(f"cross_entropy: label_smoothing={label_smoothing}, expected a number from 0 to 1")


def _cross_entropy_logits(
    g: Array, logits: Array, target: Any, weight: Any, ignore_index: int, label_smoothing: float, reduction: Reduction
) -> Array:
    axis = class_axis(logits.ndim)
    each = target_weights(logits.shape, logits.dtype, _as_array(target), weight, ignore_index, label_smoothing, reduction, True)
    probability = softmax(logits, axis=axis)
    return _per_sample(g, logits.ndim, reduction) * (probability * np.sum(each, axis=axis, keepdims=True) - each)


def _cross_entropy_jvp(
    t: Array, logits: Array, target: Any, weight: Any, ignore_index: int, label_smoothing: float, reduction: Reduction
) -> Array:
    whole: Reduction = "sum" if reduction == "none" else reduction
    slope = _cross_entropy_logits(1.0, logits, target, weight, ignore_index, label_smoothing, whole)
    return np.sum(t * slope, axis=class_axis(logits.ndim) if reduction == "none" else None)


def _class_rows(x: Array) -> Array:
    """Logits with one row of classes per sample."""
    return as_rows(x if x.ndim < 3 else np.moveaxis(x, 1, -1), x.shape[class_axis(x.ndim)])


#: up to so many logits the derivative is made together with the loss: at this size calls cost more than arithmetic
SMALL = 4096


@functools.lru_cache(maxsize=256)
def _row_starts(rows: int, n: int) -> Array:
    return np.arange(0, rows * n, n)


def _small_cross_entropy(logits: Array, target: Any, ignore_index: int) -> tuple[Array, Array] | None:
    """The mean loss and its derivative; None where a target is out of range (ignored, or wrong) or of another shape."""
    rows, n = logits.shape
    target = np.asarray(target)
    if 0 <= ignore_index < n or target.dtype != np.int64 or target.shape != (rows,) or maximum_reduce(target.view(np.uint64)) >= n:
        return None
    return quietly(_loss_and_slope, logits, _row_starts(rows, n) + target, logits.dtype.type(rows))  # type: ignore[no-any-return]


def _loss_and_slope(logits: Array, chosen: Array, rows: Any) -> tuple[Array, Array]:
    # positional arguments, and each array flattened once: calls are the cost here (bench small_graphs)
    shifted = logits - maximum_reduce(logits, 1, None, None, True)
    slope = np.exp(shifted)
    total = add_reduce(slope, 1, None, None, True)
    loss = (add_reduce(np.log(total), None) - add_reduce(shifted.reshape(-1)[chosen])) / rows
    slope /= total
    flat = slope.reshape(-1)
    flat[chosen] -= rows.dtype.type(1)
    slope /= rows
    return loss, slope


def _fused_cross_entropy(
    logits: Array, target: Any, weight: Any, ignore_index: int, label_smoothing: float, reduction: Reduction
) -> tuple[Array, ...]:
    if logits.size == 0 or logits.dtype.kind != "f":
        return _cross_entropy(logits, target, weight, ignore_index, label_smoothing, reduction), None, None, None
    if logits.size <= SMALL and logits.ndim == 2 and logits.dtype.itemsize >= 4 and weight is None and label_smoothing == 0.0 and reduction == "mean":
        small = _small_cross_entropy(logits, target, ignore_index)
        if small is not None:
            return small[0], None, None, small[1]
    target = _check_cross_entropy(logits.shape, target, weight, ignore_index, label_smoothing, reduction)
    weight = None if weight is None else np.asarray(weight, logits.dtype)
    with np.errstate(invalid="ignore"):
        loss, counts, shift = kernels.cross_entropy(_class_rows(logits), target.reshape(-1), weight, ignore_index, label_smoothing)
        if reduction == "none":
            return loss.reshape(target.shape), shift, None, None
        if reduction == "sum":
            return np.add.reduce(loss), shift, None, None
        total = np.add.reduce(counts)
        return np.add.reduce(loss) / total, shift, total, None


def _fused_cross_entropy_logits(
    g: Array, logits: Array, target: Any, weight: Any, ignore_index: int, label_smoothing: float, reduction: Reduction, shift: Array, total: Any,
    slope: Array,
) -> Array:
    if slope is not None:
        return g * slope
    if shift is None:
        return _cross_entropy_logits(g, logits, target, weight, ignore_index, label_smoothing, reduction)
    rows = _class_rows(logits)
    if reduction == "none":
        scale = np.asarray(g).reshape(-1)
    else:
        with np.errstate(divide="ignore", invalid="ignore"):
            scale = np.full(len(rows), g if total is None else g / total, logits.dtype)
    weight = None if weight is None else np.asarray(weight, logits.dtype)
    dx = kernels.cross_entropy_grad(scale, rows, np.asarray(target).reshape(-1), weight, ignore_index, label_smoothing, shift)
    if logits.ndim < 3:
        return dx.reshape(logits.shape)
    return np.moveaxis(dx.reshape(logits.shape[0], *logits.shape[2:], logits.shape[1]), -1, 1)


cross_entropy = define(
    "cross_entropy",
    _cross_entropy,
    logits=_cross_entropy_logits,
    jvp=_cross_entropy_jvp, cost=8.0,
    fused=Fused(_fused_cross_entropy, ("shift", "total", "slope"), {"logits": _fused_cross_entropy_logits}),
)


def _check_same(name: str, x: Array, target: Array) -> None:
    if x.shape != target.shape:
        raise ShapeError(f"{name}: x has shape {x.shape} and target {target.shape}; expected the same shape (broadcast them first if that is meant)")
    if x.dtype.kind not in "fc" and target.dtype.kind not in "fc":
        raise ArgumentTypeError(f"{name}: x has dtype {x.dtype} and target {target.dtype}; expected floating point")


def _mse_loss(x: Array, target: Array, /, reduction: Reduction = "mean") -> Array:
    """``(x - target) ** 2``, averaged, summed or as it is. `x` and `target` have one shape."""
    _check_same("mse_loss", x, target)
    return reduced("mse_loss", np.square(x - target), reduction)


mse_loss = define(
    "mse_loss",
    _mse_loss,
    x=lambda g, x, target, reduction: spread(g, x.shape, reduction) * (2.0 * (x - target)),
    target=lambda g, x, target, reduction: spread(g, x.shape, reduction) * (2.0 * (target - x)),
    jvp={
        "x": lambda t, x, target, reduction: reduced("mse_loss", t * (2.0 * (x - target)), reduction),
        "target": lambda t, x, target, reduction: reduced("mse_loss", t * (2.0 * (target - x)), reduction),
    },
    cost=3.0,
)


def _huber(error: Array, delta: float) -> Array:
    size = np.abs(error)
    inner = np.minimum(size, delta)
    return inner * (size - 0.5 * inner)


def _huber_loss(x: Array, target: Array, /, delta: float = 1.0, reduction: Reduction = "mean") -> Array:
    """``e ** 2 / 2`` where the error `e` is below `delta`, ``delta * (|e| - delta / 2)`` beyond."""
    _check_same("huber_loss", x, target)
    if delta <= 0:
        raise ArgumentError(f"huber_loss: delta={delta}, expected a positive number")
    return reduced("huber_loss", _huber(x - target, delta), reduction)


huber_loss = define(
    "huber_loss",
    _huber_loss,
    x=lambda g, x, target, delta, reduction: spread(g, x.shape, reduction) * np.clip(x - target, -delta, delta),
    target=lambda g, x, target, delta, reduction: spread(g, x.shape, reduction) * np.clip(target - x, -delta, delta),
    jvp={
        "x": lambda t, x, target, delta, reduction: reduced("huber_loss", t * np.clip(x - target, -delta, delta), reduction),
        "target": lambda t, x, target, delta, reduction: reduced("huber_loss", t * np.clip(target - x, -delta, delta), reduction),
    },
    cost=4.0,
)


def _smooth_l1_loss(x: Array, target: Array, /, beta: float = 1.0, reduction: Reduction = "mean") -> Array:
    """``e ** 2 / (2 * beta)`` where the error `e` is below `beta`, ``|e| - beta / 2`` beyond; with beta 0, ``|e|``."""
    _check_same("smooth_l1_loss", x, target)
    if beta < 0:
        raise ArgumentError(f"smooth_l1_loss: beta={beta}, expected a number not below 0")
    error = x - target
    return reduced("smooth_l1_loss", np.abs(error) if beta == 0 else _huber(error, beta) / beta, reduction)


def _smooth_l1_slope(error: Array, beta: float) -> Array:
    return np.sign(error) if beta == 0 else np.clip(error / beta, -1.0, 1.0)


smooth_l1_loss = define(
    "smooth_l1_loss",
    _smooth_l1_loss,
    x=lambda g, x, target, beta, reduction: spread(g, x.shape, reduction) * _smooth_l1_slope(x - target, beta),
    target=lambda g, x, target, beta, reduction: spread(g, x.shape, reduction) * _smooth_l1_slope(target - x, beta),
    jvp={
        "x": lambda t, x, target, beta, reduction: reduced("smooth_l1_loss", t * _smooth_l1_slope(x - target, beta), reduction),
        "target": lambda t, x, target, beta, reduction: reduced("smooth_l1_loss", t * _smooth_l1_slope(target - x, beta), reduction),
    },
    cost=4.0,
)


def _softplus(logits: Array) -> tuple[Array, Array]:
    """``-log(1 - sigmoid)`` and ``-log(sigmoid)`` of the logits, without overflow or cancellation."""
    tail = np.log1p(np.exp(-np.abs(logits)))
    return np.maximum(logits, 0) + tail, np.maximum(-logits, 0) + tail


def _counted(weight: Array, loss: Array) -> Array:
    """`weight` times `loss`; what counts for nothing adds nothing, even where the loss is infinite."""
    return weight * where(weight == 0, 0, loss)


def _binary_cross_entropy_with_logits(
    logits: Array, target: Array, weight: Array = None, pos_weight: Array = None, /, reduction: Reduction = "mean"
) -> Array:
    """Cross entropy between probabilities `target` and the sigmoid of `logits`, computed without overflow.

    Args:
        logits: any shape.
        target: the same shape, in [0, 1].
        weight: broadcasts to it: how much each element counts, or absent. Takes no gradient.
        pos_weight: broadcasts to it: how much the positive part counts, or absent. Takes no gradient.
        reduction: "mean", "sum" or "none".
    """
    _check_same("binary_cross_entropy_with_logits", logits, target)
    off, on = _softplus(logits)
    loss = _counted(1.0 - target, off) + _counted(target if pos_weight is None else target * pos_weight, on)
    return reduced("binary_cross_entropy_with_logits", loss if weight is None else loss * weight, reduction)


def _bce_logits(g: Array, logits: Array, target: Array, weight: Array, pos_weight: Array, reduction: Reduction) -> Array:
    slope = (1.0 - target) * sigmoid(logits) - (target if pos_weight is None else target * pos_weight) * sigmoid(-logits)
    return spread(g, logits.shape, reduction) * (slope if weight is None else slope * weight)


def _bce_target(g: Array, logits: Array, weight: Array, pos_weight: Array, reduction: Reduction) -> Array:
    if pos_weight is None:
        slope = -logits
    else:
        off, on = _softplus(logits)
        slope = pos_weight * on - off
    return spread(g, logits.shape, reduction) * (slope if weight is None else slope * weight)


binary_cross_entropy_with_logits = define(
    "binary_cross_entropy_with_logits", _binary_cross_entropy_with_logits, logits=_bce_logits, target=_bce_target,
    jvp={
        "logits": lambda t, logits, target, weight, pos_weight, reduction: reduced(
            "binary_cross_entropy_with_logits", _bce_logits(t, logits, target, weight, pos_weight, "none"), reduction
        ),
        "target": lambda t, logits, weight, pos_weight, reduction: reduced(
            "binary_cross_entropy_with_logits", _bce_target(t, logits, weight, pos_weight, "none"), reduction
        ),
    },
    cost=8.0,
)

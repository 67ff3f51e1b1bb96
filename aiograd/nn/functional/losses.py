"""Losses as functions, with PyTorch's names and signatures: a number per sample, their sum or their mean, as `reduction` says."""

from __future__ import annotations

import math
import sys
from typing import Any

from aiograd.array_functions.activation import log_softmax
from aiograd.array_functions.comparison import equal, logical_and
from aiograd.array_functions.conversion import ArrayLike, as_tensor, as_tensors, row
from aiograd.array_functions.elementwise import clip, exp, minimum, xlogy
from aiograd.array_functions.linalg import vector_norm
from aiograd.array_functions.searching import where
from aiograd.errors import ArgumentError, ShapeError
from aiograd.nn.functional.documentation import document
from aiograd.running import devices
from aiograd.tensors.constants import refuse_graph
from aiograd.tensors.record import call
from aiograd.tensors.tensor import Tensor

_cross_entropy, _nll_loss, _mse_loss = row("cross_entropy"), row("nll_loss"), row("mse_loss")
_probabilities = row("binary_cross_entropy")
_huber_loss, _smooth_l1_loss, _binary = row("huber_loss"), row("smooth_l1_loss"), row("binary_cross_entropy_with_logits")


def _reduced(name: str, loss: Tensor, reduction: str) -> Tensor:
    if reduction == "mean":
        return loss.mean()
    if reduction == "sum":
        return loss.sum()
    if reduction != "none":
        raise ArgumentError(f"{name}: reduction={reduction!r}, expected 'mean', 'sum' or 'none'")
    return loss


def _same_shape(name: str, input: ArrayLike, target: ArrayLike) -> tuple[Tensor, Tensor]:
    x, y = as_tensors(input, target)
    if x.shape != y.shape:
        raise ShapeError(f"{name}: the input has shape {list(x.shape)} and the target {list(y.shape)}; expected the same")
    return x, y


def _classes(name: str, input: ArrayLike, target: Tensor) -> Any:
    """The target for the row: the device array if the input's device has it and a kernel for the row; else the Tensor, to check its values."""
    place = input.device if isinstance(input, Tensor) else "cpu"
    if place == "cpu" or target.device != place:
        return target
    device: Any = devices.device(place)
    return target._data if devices.adopts(place) or device.fused(name) is not None else target


def _plain(weight: ArrayLike | None) -> Any:
    if weight is None:
        return None
    given = as_tensor(weight)
    refuse_graph(given, "a weight of a loss")
    return given.detach()


def cross_entropy(
    input: ArrayLike,
    target: ArrayLike,
    weight: ArrayLike | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Cross entropy between logits and classes, or between logits and probabilities.

    Args:
        input: logits, (C,) or (N, C, ...).
        target: integer classes, the shape of `input` without its class axis; or probabilities of the shape of `input`. Classes on the host
            are checked; those on a device are taken as they are, and one that is none makes the loss NaN.
        weight: (C,) how much each class counts, or None.
        ignore_index: a class that counts for nothing.
        reduction: "mean" (weighted by the weight of each class), "sum" or "none".
        label_smoothing: in [0, 1], the part of each target spread evenly over the classes.

    Returns:
        A scalar, or one loss per sample where `reduction` is "none".
    """
    wanted = as_tensor(target)
    if wanted.dtype.kind == "f":
        return _soft_cross_entropy(as_tensor(input), wanted, _plain(weight), reduction, label_smoothing)
    options: dict[str, Any] = {"weight": _plain(weight), "ignore_index": ignore_index, "label_smoothing": label_smoothing, "reduction": reduction}
    options["target"] = _classes("cross_entropy", input, wanted)
    return call(_cross_entropy, (input,), options)  # type: ignore[no-any-return]


def _soft_cross_entropy(x: Tensor, target: Tensor, weight: Tensor | None, reduction: str, label_smoothing: float) -> Tensor:
    if x.shape != target.shape or not x.ndim:
        raise ShapeError(f"cross_entropy: probabilities have shape {list(target.shape)}; expected that of the input, {list(x.shape)}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ArgumentError(f"cross_entropy: label_smoothing={label_smoothing}, expected a number from 0 to 1")
    axis = 1 if x.ndim > 1 else 0
    if label_smoothing:
        target = target * (1.0 - label_smoothing) + label_smoothing / max(x.shape[axis], 1)
    if weight is not None:
        target = target * weight.reshape((-1,) + (1,) * (x.ndim - axis - 1))
    return _reduced("cross_entropy", -_counted(target, log_softmax(x, axis=axis)).sum(axis), reduction)


def _counted(weight: Tensor, logarithm: Tensor) -> Tensor:
    """`weight` times `logarithm`; what counts for nothing adds nothing, even where the logarithm is -inf."""
    product: Tensor = weight * where(logical_and(equal(weight, 0), equal(logarithm, -math.inf)), 0, logarithm)
    return product


def nll_loss(input: ArrayLike, target: ArrayLike, weight: ArrayLike | None = None, ignore_index: int = -100, reduction: str = "mean") -> Tensor:
    """Negative log-likelihood of integer classes under log-probabilities."""
    classes = _classes("nll_loss", input, as_tensor(target))
    options = {"target": classes, "weight": _plain(weight), "ignore_index": ignore_index, "reduction": reduction}
    return call(_nll_loss, (input,), options)  # type: ignore[no-any-return]


def mse_loss(input: ArrayLike, target: ArrayLike, reduction: str = "mean") -> Tensor:
    """Squared differences of arrays of one shape."""
    return call(_mse_loss, (input, target), {"reduction": reduction})  # type: ignore[no-any-return]


def l1_loss(input: ArrayLike, target: ArrayLike, reduction: str = "mean") -> Tensor:
    """Magnitudes of differences of arrays of one shape."""
    x, y = _same_shape("l1_loss", input, target)
    return _reduced("l1_loss", (x - y).abs(), reduction)


def huber_loss(input: ArrayLike, target: ArrayLike, reduction: str = "mean", delta: float = 1.0) -> Tensor:
    """Half the square of differences below `delta`, ``delta * (|d| - delta / 2)`` beyond."""
    return call(_huber_loss, (input, target), {"delta": delta, "reduction": reduction})  # type: ignore[no-any-return]


def smooth_l1_loss(input: ArrayLike, target: ArrayLike, reduction: str = "mean", beta: float = 1.0) -> Tensor:
    """Half the square over `beta` of differences below `beta`, ``|d| - beta / 2`` beyond."""
    return call(_smooth_l1_loss, (input, target), {"beta": beta, "reduction": reduction})  # type: ignore[no-any-return]


def binary_cross_entropy_with_logits(
    input: ArrayLike, target: ArrayLike, weight: ArrayLike | None = None, reduction: str = "mean", pos_weight: ArrayLike | None = None
) -> Tensor:
    """Cross entropy between probabilities `target` and the sigmoid of `input`, of one shape, without overflow."""
    return call(_binary, (input, target, _plain(weight), _plain(pos_weight)), {"reduction": reduction})  # type: ignore[no-any-return]


def binary_cross_entropy(input: ArrayLike, target: ArrayLike, weight: ArrayLike | None = None, reduction: str = "mean") -> Tensor:
    """Cross entropy between probabilities `target` and probabilities `input`, of one shape; of logits `binary_cross_entropy_with_logits`."""
    loss: Tensor = call(_probabilities, _same_shape("binary_cross_entropy", input, target), {})
    return _reduced("binary_cross_entropy", loss if weight is None else loss * _plain(weight), reduction)


def kl_div(input: ArrayLike, target: ArrayLike, reduction: str = "mean", log_target: bool = False) -> Tensor:
    """Kullback-Leibler divergence of probabilities `target` from log-probabilities `input`.

    Args:
        input: log-probabilities.
        target: probabilities, or their logarithms with `log_target`.
        reduction: "batchmean" (over the first axis, the divergence proper), "mean" (over elements), "sum" or "none".
        log_target: see `target`.

    Returns:
        A scalar, or elements of the shape of `input` where `reduction` is "none".
    """
    x, y = _same_shape("kl_div", input, target)
    if log_target:
        never = equal(y, -math.inf)
        loss: Tensor = exp(y) * (where(never, 0, y) - where(never, 0, x))
    else:
        loss = xlogy(y, y) - _counted(y, x)
    if reduction == "batchmean" and x.size:
        return loss.sum() / (x.shape[0] if x.ndim else 1)
    return _reduced("kl_div", loss, "mean" if reduction == "batchmean" else reduction)


def pairwise_distance(x1: ArrayLike, x2: ArrayLike, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False) -> Tensor:
    """The norm of ``x1 - x2 + eps`` over the last axis.

    Args:
        x1, x2: (..., D); they broadcast.
        p: the order of the norm.
        eps: added to each difference.
        keepdim: True to keep the axis.

    Returns:
        (...), or (..., 1) with `keepdim`.
    """
    return vector_norm(as_tensor(x1) - as_tensor(x2) + eps, axis=-1, keepdims=keepdim, ord=p)


def triplet_margin_loss(
    anchor: ArrayLike,
    positive: ArrayLike,
    negative: ArrayLike,
    margin: float = 1.0,
    p: float = 2.0,
    eps: float = 1e-6,
    swap: bool = False,
    reduction: str = "mean",
) -> Tensor:
    """The distance to a positive example less that to a negative one, plus `margin`, where that is above 0: ``max(d(a, p) - d(a, n) + margin, 0)``.

    Args:
        anchor, positive, negative: (..., D) of one shape.
        margin: above 0.
        p, eps: of the distances, see `pairwise_distance`.
        swap: True to take the distance from positive to negative where it is the smaller one.
        reduction: "mean", "sum" or "none".

    Returns:
        A scalar, or elements of shape (...) where `reduction` is "none".

    Raises:
        ArgumentError: `margin` is not above 0.
    """
    if not margin > 0:
        raise ArgumentError(f"triplet_margin_loss(margin={margin}): expected a number above 0")
    far = pairwise_distance(anchor, negative, p, eps)
    if swap:
        far = minimum(far, pairwise_distance(positive, negative, p, eps))
    return _reduced("triplet_margin_loss", clip(pairwise_distance(anchor, positive, p, eps) - far + margin, 0), reduction)


document(sys.modules[__name__])

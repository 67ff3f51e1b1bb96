"""Losses as modules: each a call of the function of the same name with its options fixed."""

from __future__ import annotations

from typing import Any

from aiograd.nn import functional
from aiograd.nn.module import Module
from aiograd.tensors.tensor import Tensor


class _Loss(Module):
    def __init__(self, reduction: str = "mean") -> None:
        self.reduction = reduction

    def extra_repr(self) -> str:
        return f"reduction={self.reduction!r}"


class CrossEntropyLoss(_Loss):
    """Cross entropy between logits and classes or probabilities.

    Args:
        weight: (C,) how much each class counts, or None.
        ignore_index: a class that counts for nothing.
        reduction: "mean", "sum" or "none".
        label_smoothing: in [0, 1], the part of each target spread evenly over the classes.
    """

    weight: Tensor | None

    def __init__(self, weight: Tensor | None = None, ignore_index: int = -100, reduction: str = "mean", label_smoothing: float = 0.0) -> None:
        super().__init__(reduction)
        self.register_buffer("weight", weight)
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing

    def forward(self, input: Any, target: Any) -> Tensor:
        """The loss of logits (N, C, ...).

        Args:
            input: logits (N, C, ...).
            target: classes (N, ...), or probabilities of the shape of `input`.

        Returns:
            A scalar, or the losses one by one where `reduction` is "none".
        """
        return functional.cross_entropy(input, target, self.weight, self.ignore_index, self.reduction, self.label_smoothing)


class NLLLoss(_Loss):
    """Negative log-likelihood of classes under log-probabilities.

    Args:
        weight: (C,) how much each class counts, or None.
        ignore_index: a class that counts for nothing.
        reduction: "mean", "sum" or "none".
    """

    weight: Tensor | None

    def __init__(self, weight: Tensor | None = None, ignore_index: int = -100, reduction: str = "mean") -> None:
        super().__init__(reduction)
        self.register_buffer("weight", weight)
        self.ignore_index = ignore_index

    def forward(self, input: Any, target: Any) -> Tensor:
        """The loss of log-probabilities (N, C, ...).

        Args:
            input: log-probabilities (N, C, ...).
            target: classes (N, ...).

        Returns:
            A scalar, or the losses one by one where `reduction` is "none".
        """
        return functional.nll_loss(input, target, self.weight, self.ignore_index, self.reduction)


class MSELoss(_Loss):
    """Squared differences.

    Args:
        reduction: "mean", "sum" or "none".
    """

    def forward(self, input: Any, target: Any) -> Tensor:
        """The loss of arrays of one shape.

        Args:
            input: predictions.
            target: of the same shape.

        Returns:
            A scalar, or the losses one by one where `reduction` is "none".
        """
        return functional.mse_loss(input, target, self.reduction)


class L1Loss(_Loss):
    """Magnitudes of differences.

    Args:
        reduction: "mean", "sum" or "none".
    """

    def forward(self, input: Any, target: Any) -> Tensor:
        """The loss of arrays of one shape.

        Args:
            input: predictions.
            target: of the same shape.

        Returns:
            A scalar, or the losses one by one where `reduction` is "none".
        """
        return functional.l1_loss(input, target, self.reduction)


class HuberLoss(_Loss):
    """Half the square of differences below `delta`, ``delta * (|d| - delta / 2)`` beyond.

    Args:
        reduction: "mean", "sum" or "none".
        delta: where the square ends.
    """

    def __init__(self, reduction: str = "mean", delta: float = 1.0) -> None:
        super().__init__(reduction)
        self.delta = delta

    def forward(self, input: Any, target: Any) -> Tensor:
        """The loss of arrays of one shape.

        Args:
            input: predictions.
            target: of the same shape.

        Returns:
            A scalar, or the losses one by one where `reduction` is "none".
        """
        return functional.huber_loss(input, target, self.reduction, self.delta)


class SmoothL1Loss(_Loss):
    """Half the square over `beta` of differences below `beta`, ``|d| - beta / 2`` beyond.

    Args:
        reduction: "mean", "sum" or "none".
        beta: where the square ends.
    """

    def __init__(self, reduction: str = "mean", beta: float = 1.0) -> None:
        super().__init__(reduction)
        self.beta = beta

    def forward(self, input: Any, target: Any) -> Tensor:
        """The loss of arrays of one shape.

        Args:
            input: predictions.
            target: of the same shape.

        Returns:
            A scalar, or the losses one by one where `reduction` is "none".
        """
        return functional.smooth_l1_loss(input, target, self.reduction, self.beta)


class BCELoss(_Loss):
    """Cross entropy between probabilities.

    Args:
        weight: broadcasts: how much each element counts, or None.
        reduction: "mean", "sum" or "none".
    """

    weight: Tensor | None

    def __init__(self, weight: Tensor | None = None, reduction: str = "mean") -> None:
        super().__init__(reduction)
        self.register_buffer("weight", weight)

    def forward(self, input: Any, target: Any) -> Tensor:
        """The loss of probabilities of one shape.

        Args:
            input: probabilities.
            target: probabilities of the same shape.

        Returns:
            A scalar, or the losses one by one where `reduction` is "none".
        """
        return functional.binary_cross_entropy(input, target, self.weight, self.reduction)


class KLDivLoss(_Loss):
    """Kullback-Leibler divergence of probabilities from log-probabilities.

    Args:
        reduction: "batchmean" (over the first axis, the divergence proper), "mean" (over elements), "sum" or "none".
        log_target: True if targets are logarithms too.
    """

    def __init__(self, reduction: str = "mean", log_target: bool = False) -> None:
        super().__init__(reduction)
        self.log_target = log_target

    def forward(self, input: Any, target: Any) -> Tensor:
        """The loss of log-probabilities and probabilities of one shape.

        Args:
            input: log-probabilities.
            target: probabilities of the same shape, or their logarithms with `log_target`.

        Returns:
            A scalar, or the losses one by one where `reduction` is "none".
        """
        return functional.kl_div(input, target, self.reduction, self.log_target)


class BCEWithLogitsLoss(_Loss):
    """Cross entropy between probabilities and the sigmoid of logits.

    Args:
        weight: broadcasts: how much each element counts, or None.
        reduction: "mean", "sum" or "none".
        pos_weight: broadcasts: how much the positive part counts, or None.
    """

    weight: Tensor | None
    pos_weight: Tensor | None

    def __init__(self, weight: Tensor | None = None, reduction: str = "mean", pos_weight: Tensor | None = None) -> None:
        super().__init__(reduction)
        self.register_buffer("weight", weight)
        self.register_buffer("pos_weight", pos_weight)

    def forward(self, input: Any, target: Any) -> Tensor:
        """The loss of logits and probabilities of one shape.

        Args:
            input: logits.
            target: probabilities of the same shape.

        Returns:
            A scalar, or the losses one by one where `reduction` is "none".
        """
        return functional.binary_cross_entropy_with_logits(input, target, self.weight, self.reduction, self.pos_weight)


class TripletMarginLoss(_Loss):
    """The distance to a positive example less that to a negative one, plus `margin`, where that is above 0.

    Args:
        margin: above 0.
        p: the order of the norm that distances are.
        eps: added to each difference.
        swap: True to take the distance from positive to negative where it is the smaller one.
        reduction: "mean", "sum" or "none".
    """

    def __init__(self, margin: float = 1.0, p: float = 2.0, eps: float = 1e-6, swap: bool = False, reduction: str = "mean") -> None:
        super().__init__(reduction)
        self.margin = margin
        self.p = p
        self.eps = eps
        self.swap = swap

    def forward(self, anchor: Any, positive: Any, negative: Any) -> Tensor:
        """The loss of triplets of vectors.

        Args:
            anchor: (..., D).
            positive: of the same shape, what should be near.
            negative: of the same shape, what should be far.

        Returns:
            A scalar, or the losses one by one where `reduction` is "none".
        """
        return functional.triplet_margin_loss(anchor, positive, negative, self.margin, self.p, self.eps, self.swap, self.reduction)

"""Losses as modules: each a call of the function of the same name with its options fixed."""

from __future__ import annotations

from typing import Any

from aiograd.nn import functional
from aiograd.nn.function_module import FunctionModule
from aiograd.tensors.tensor import Tensor


class _Loss(FunctionModule):
    def __post_init__(self) -> None:
        for name in ("weight", "pos_weight"):
            if name in self._settings:
                self.register_buffer(name, getattr(self, name))

    def forward(self, input: Any, target: Any) -> Tensor:  # type: ignore[override]
        """The loss of predictions.

        Args:
            input: predictions, as the function takes them.
            target: targets, as the function takes them.

        Returns:
            A scalar, or the losses one by one where `reduction` is "none".
        """
        return self._call(input, target)  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        return f"reduction={vars(self)['reduction']!r}"


class CrossEntropyLoss(_Loss, function=functional.cross_entropy):
    """`cross_entropy` as a module.

    >>> ag.nn.CrossEntropyLoss()(ag.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0]]), ag.tensor([0, 1]))
    tensor(0.39549476)
    """

    weight: Tensor | None = None
    ignore_index: int = -100
    reduction: str = "mean"
    label_smoothing: float = 0.0


class NLLLoss(_Loss, function=functional.nll_loss):
    """`nll_loss` as a module.

    >>> ag.nn.NLLLoss()(ag.tensor([[-0.5, -1.0], [-2.0, -0.1]]), ag.tensor([0, 1]))
    tensor(0.3)
    """

    weight: Tensor | None = None
    ignore_index: int = -100
    reduction: str = "mean"


class MSELoss(_Loss, function=functional.mse_loss):
    """`mse_loss` as a module.

    >>> ag.nn.MSELoss()(ag.tensor([1.0, 2.0]), ag.tensor([1.0, 4.0]))
    tensor(2.)
    """

    reduction: str = "mean"


class L1Loss(_Loss, function=functional.l1_loss):
    """`l1_loss` as a module.

    >>> ag.nn.L1Loss(reduction="none")(ag.tensor([1.0, 2.0]), ag.tensor([1.0, 4.0]))
    tensor([0., 2.])
    """

    reduction: str = "mean"


class HuberLoss(_Loss, function=functional.huber_loss):
    """`huber_loss` as a module.

    >>> ag.nn.HuberLoss()(ag.tensor([1.0, 2.0]), ag.tensor([1.0, 4.0]))
    tensor(0.75)
    """

    reduction: str = "mean"
    delta: float = 1.0


class SmoothL1Loss(_Loss, function=functional.smooth_l1_loss):
    """`smooth_l1_loss` as a module.

    >>> ag.nn.SmoothL1Loss(beta=0.5)(ag.tensor([1.0, 2.0]), ag.tensor([1.0, 4.0]))
    tensor(0.875)
    """

    reduction: str = "mean"
    beta: float = 1.0


class BCELoss(_Loss, function=functional.binary_cross_entropy):
    """`binary_cross_entropy` as a module.

    >>> ag.nn.BCELoss()(ag.tensor([0.5, 0.9]), ag.tensor([0.0, 1.0]))
    tensor(0.39925388)
    """

    weight: Tensor | None = None
    reduction: str = "mean"


class BCEWithLogitsLoss(_Loss, function=functional.binary_cross_entropy_with_logits):
    """`binary_cross_entropy_with_logits` as a module.

    >>> ag.nn.BCEWithLogitsLoss()(ag.tensor([0.0, 3.0]), ag.tensor([0.0, 1.0]))
    tensor(0.37086725)
    """

    weight: Tensor | None = None
    reduction: str = "mean"
    pos_weight: Tensor | None = None


class KLDivLoss(_Loss, function=functional.kl_div):
    """`kl_div` as a module.

    >>> ag.nn.KLDivLoss("batchmean")(ag.log(ag.tensor([[0.5, 0.5]])), ag.tensor([[0.9, 0.1]]))
    tensor(0.36806417)
    """

    reduction: str = "mean"
    log_target: bool = False


class TripletMarginLoss(_Loss, function=functional.triplet_margin_loss):
    """`triplet_margin_loss` as a module.

    >>> ag.nn.TripletMarginLoss()(ag.tensor([[0.0, 0.0]]), ag.tensor([[0.0, 1.0]]), ag.tensor([[0.0, 1.5]]))
    tensor(0.49999994)
    """

    margin: float = 1.0
    p: float = 2.0
    eps: float = 1e-6
    swap: bool = False
    reduction: str = "mean"

    def forward(self, anchor: Any, positive: Any, negative: Any) -> Tensor:  # type: ignore[override]
        """The loss of triplets of vectors.

        Args:
            anchor: (..., D).
            positive: vectors of the same shape that should be near.
            negative: vectors of the same shape that should be far.

        Returns:
            A scalar, or the losses one by one where `reduction` is "none".
        """
        return self._call(anchor, positive, negative)  # type: ignore[no-any-return]

"""Adam and AdamW.

Source: Kingma and Ba, Adam (2015); Reddi et al., On the convergence of Adam (2018) for ``amsgrad``; Loshchilov and Hutter, Decoupled weight
decay regularization (2019) for AdamW. Formulas as in ``torch.optim``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from aiograd.kernels.optimizer import adam
from aiograd.kernels.pool import KernelBatch
from aiograd.optim.optimizer import Group, Optimizer


class Adam(Optimizer):
    """Steps of about `lr` per element, independent of the size of the gradient: ``p -= lr * mean / (sqrt(mean of squares) + eps)``.

    Args:
        params: Tensors to update, or groups.
        lr: learning rate.
        betas: decay of the running means of the gradient and of its square, which are corrected for starting at zero.
        eps: added to the root.
        weight_decay: times the parameter is added to the gradient.
        amsgrad: divide by the largest mean of squares so far.
        maximize: go up instead of down.

    Raises:
        ArgumentError: an option that makes no sense.

    >>> p = ag.tensor([1.0, 2.0], requires_grad=True)
    >>> optimizer = ag.optim.Adam([p], lr=0.1)
    >>> await (p * p).sum().backward()
    >>> optimizer.step()
    >>> p.detach()
    tensor([0.9, 1.9])
    """

    is_elementwise = True
    #: True if weight decay shrinks the parameter (AdamW), False if it is added to the gradient
    decoupled = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad, "maximize": maximize})

    def _check(self, group: Group) -> None:
        self._check_numbers(group, "lr", "eps", "weight_decay")
        self._check_betas(group)

    def _state_names(self, group: Group) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if group["amsgrad"] else ("exp_avg", "exp_avg_sq")

    def _rule(self, group: Group, key: Any) -> tuple[str, dict[str, Any]]:
        names = ("lr", "eps", "weight_decay", "maximize")
        betas = {"beta1": group["betas"][0], "beta2": group["betas"][1]}
        return "adam", {**{name: group[name] for name in names}, **betas, "step": key, "decoupled": self.decoupled}

    def _kernel(self, group: Group, key: Any, parameter: Any, gradient: Any, state: list[Any], batch: KernelBatch | None = None) -> None:
        adam(parameter, gradient, *state, **self._rule(group, key)[1], batch=batch)

    def _formula(self, group: Group, key: Any, parameter: Any, gradient: Any, state: list[Any]) -> tuple[Any, ...]:
        lr, decay, (beta1, beta2) = group["lr"], group["weight_decay"], group["betas"]
        d = -gradient if group["maximize"] else gradient
        if decay and self.decoupled:
            parameter = parameter * (1.0 - lr * decay)
        elif decay:
            d = d + decay * parameter
        mean = beta1 * state[0] + (1.0 - beta1) * d
        square = beta2 * state[1] + (1.0 - beta2) * (d * d)
        largest = np.maximum(state[2], square) if group["amsgrad"] else square
        root = np.sqrt(largest) / math.sqrt(1.0 - beta2**key) + group["eps"]
        new = parameter - (lr / (1.0 - beta1**key)) * (mean / root)
        return (new, mean, square, largest) if group["amsgrad"] else (new, mean, square)


class AdamW(Adam):
    """Adam with a weight decay that shrinks the parameter by ``lr * weight_decay`` instead of being part of the gradient.

    Args:
        params: Tensors to update, or groups.
        lr: learning rate.
        betas: decay of the running means of the gradient and of its square, which are corrected for starting at zero.
        eps: added to the root.
        weight_decay: see above.
        amsgrad: divide by the largest mean of squares so far.
        maximize: go up instead of down.

    Raises:
        ArgumentError: an option that makes no sense.

    >>> p = ag.tensor([1.0, 2.0], requires_grad=True)
    >>> optimizer = ag.optim.AdamW([p], lr=0.1)
    >>> await (p * p).sum().backward()
    >>> optimizer.step()
    >>> p.detach()
    tensor([0.899, 1.898])
    """

    decoupled = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize)

"""SGD: stochastic gradient descent, with momentum.

Source: Sutskever et al., On the importance of initialization and momentum in deep learning (2013); formulas as in ``torch.optim.SGD``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from aiograd.errors import ArgumentError
from aiograd.kernels.optimizer import sgd
from aiograd.kernels.pool import KernelBatch
from aiograd.optim.gradients import Pair
from aiograd.optim.optimizer import Group, Optimizer
from aiograd.tensors.tensor import Tensor

#: up to how many elements the plain rule is two calls of numpy
SMALL = 16_384


class SGD(Optimizer):
    """``p -= lr * v``, where ``v = momentum * v + (1 - dampening) * (grad + weight_decay * p)``.

    Args:
        params: Tensors to update, or groups.
        lr: learning rate.
        momentum: how much of `v` is kept; without it ``v`` is the gradient.
        dampening: how much of the gradient is kept out of `v`, except at the first step.
        weight_decay: see above.
        nesterov: look ahead: ``p -= lr * (grad + momentum * v)``.
        maximize: go up instead of down.

    Raises:
        ArgumentError: an option that makes no sense.

    >>> p = ag.tensor([1.0, 2.0], requires_grad=True)
    >>> optimizer = ag.optim.SGD([p], lr=0.1)
    >>> await (p * p).sum().backward()
    >>> optimizer.step()
    >>> p.detach()
    tensor([0.8, 1.6])
    """

    is_elementwise = True
    _numbers: Mapping[str, Callable[[Any], Any]] = MappingProxyType({})

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        options = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay, "nesterov": nesterov, "maximize": maximize}
        super().__init__(params, options)

    def _check(self, group: Group) -> None:
        self._check_numbers(group, "lr", "momentum", "weight_decay")
        self._check_option(group, "dampening", lambda value: value == value + 0.0, "a number")
        if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
            found = f"momentum={group['momentum']}, dampening={group['dampening']}"
            raise ArgumentError(f"SGD(nesterov=True, {found}): expected momentum and no dampening")

    def _update(self, index: int, group: Group, pairs: list[Pair]) -> None:
        if group["momentum"] or group["weight_decay"] or group["maximize"]:
            super()._update(index, group, pairs)
            return
        lr, rate, ndarray = group["lr"], np.array(group["lr"], np.float64), np.ndarray
        multiply, subtract = np.multiply, np.subtract
        larger: list[Pair] = []
        for pair in pairs:
            p, grad = pair
            data = p._data
            if data.__class__ is not ndarray or data.size > SMALL:
                larger.append(pair)
                continue
            if rate.dtype is not data.dtype:
                rate = np.array(lr, data.dtype)  # a 0-d array is cheaper in a ufunc than a Python number
            subtract(data, multiply(grad, rate), data)
            counter = p._vc
            if counter is None:
                p._vc = [1]
            else:
                counter[0] += 1
        if larger:
            super()._update(index, group, larger)

    def _state_names(self, group: Group) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] else ()

    def _begin(self, p: Tensor, state: dict[str, Any], group: Group) -> Hashable:
        return "momentum_buffer" not in state

    def _rule(self, group: Group, key: Any) -> tuple[str, dict[str, Any]]:
        names = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize")
        return "sgd", {**{name: group[name] for name in names}, "first": bool(key)}

    def _kernel(self, group: Group, key: Any, parameter: Any, gradient: Any, state: list[Any], batch: KernelBatch | None = None) -> None:
        sgd(parameter, gradient, state[0] if state else None, **self._rule(group, key)[1], batch=batch)

    def _formula(self, group: Group, key: Any, parameter: Any, gradient: Any, state: list[Any]) -> tuple[Any, ...]:
        d = -gradient if group["maximize"] else gradient
        if group["weight_decay"]:
            d = d + group["weight_decay"] * parameter
        if not state:
            return (parameter - group["lr"] * d,)
        v = d if key else group["momentum"] * state[0] + (1.0 - group["dampening"]) * d
        d = d + group["momentum"] * v if group["nesterov"] else v
        return parameter - group["lr"] * d, v

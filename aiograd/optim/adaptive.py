"""RMSprop, Adagrad, Adadelta, NAdam and RAdam: step sizes that adapt to each element.

Note [One formula]
    Each optimizer says its update once, with operators that every kind of array has. On the host it is evaluated block by block, so that
    intermediate results stay in cache; a device evaluates it as it stands.

Source: Tieleman and Hinton, RMSprop (2012) and Graves (2013) for the centred one; Duchi et al., Adaptive subgradient methods (2011); Zeiler,
ADADELTA (2012); Dozat, Incorporating Nesterov momentum into Adam (2016); Liu et al., On the variance of the adaptive learning rate (2020). Details
as in ``torch.optim``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from aiograd.kernels.pool import KernelBatch
from aiograd.ops.creation import zeros_like
from aiograd.optim.loading import count, share
from aiograd.optim.optimizer import Group, Optimizer
from aiograd.tensors.tensor import Tensor

#: elements that are updated together on the host
_BLOCK = 16_384


class _Adaptive(Optimizer):
    """See Note [One formula]."""

    is_elementwise = True

    def _kernel(self, group: Group, key: Any, parameter: Any, gradient: Any, state: list[Any], batch: KernelBatch | None = None) -> None:
        arrays = [parameter.reshape(-1), gradient.reshape(-1), *(array.reshape(-1) for array in state)]
        for low in range(0, parameter.size, _BLOCK):
            value, slope, *rest = (array[low : low + _BLOCK] for array in arrays)
            for target, new in zip((value, *rest), self._formula(group, key, value, slope, rest), strict=True):
                target[...] = new


def _slope(group: Group, parameter: Any, gradient: Any) -> tuple[Any, Any]:
    """The parameter and the gradient after weight decay, which is part of the gradient unless it is decoupled."""
    d = -gradient if group["maximize"] else gradient
    decay = group["weight_decay"]
    if decay and group.get("decoupled_weight_decay"):
        return parameter * (1.0 - group["lr"] * decay), d
    return parameter, d + decay * parameter if decay else d


def _moments(betas: tuple[float, float], d: Any, state: list[Any]) -> tuple[Any, Any]:
    beta1, beta2 = betas
    return beta1 * state[0] + (1.0 - beta1) * d, beta2 * state[1] + (1.0 - beta2) * (d * d)


class RMSprop(_Adaptive):
    """The gradient over the root of a running mean of its square.

    Args:
        params: Tensors to update, or groups.
        lr: learning rate.
        alpha: decay of the running mean.
        eps: added to the root.
        weight_decay: times the parameter is added to the gradient.
        momentum: how much of the last step is kept.
        centered: True to take the square of the running mean of the gradient off: the variance instead of the square.
        maximize: go up instead of down.

    Raises:
        ArgumentError: an option that makes no sense.

    >>> p = ag.tensor([1.0, 2.0], requires_grad=True)
    >>> optimizer = ag.optim.RMSprop([p], lr=0.01)
    >>> await (p * p).sum().backward()
    >>> optimizer.step()
    >>> p.detach()
    tensor([0.90000004, 1.9       ])
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        centered: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        options = {"lr": lr, "alpha": alpha, "eps": eps, "weight_decay": weight_decay, "momentum": momentum, "centered": centered}
        super().__init__(params, {**options, "maximize": maximize})

    def _check(self, group: Group) -> None:
        self._check_numbers(group, "lr", "alpha", "eps", "weight_decay", "momentum")

    def _state_names(self, group: Group) -> tuple[str, ...]:
        return ("square_avg", *["momentum_buffer"] * bool(group["momentum"]), *["grad_avg"] * bool(group["centered"]))

    def _formula(self, group: Group, key: Any, parameter: Any, gradient: Any, state: list[Any]) -> tuple[Any, ...]:
        parameter, d = _slope(group, parameter, gradient)
        alpha = group["alpha"]
        square = alpha * state[0] + (1.0 - alpha) * (d * d)
        new = [square]
        variance = square
        if group["centered"]:
            mean = alpha * state[-1] + (1.0 - alpha) * d
            variance = square - mean * mean
        step = d / (np.sqrt(variance) + group["eps"])
        if group["momentum"]:
            step = group["momentum"] * state[1] + step
            new.append(step)
        if group["centered"]:
            new.append(mean)
        return (parameter - group["lr"] * step, *new)


class Adagrad(_Adaptive):
    """The gradient over the root of the sum of all its squares.

    Args:
        params: Tensors to update, or groups.
        lr: learning rate.
        lr_decay: after t steps the rate is ``lr / (1 + t * lr_decay)``.
        weight_decay: times the parameter is added to the gradient.
        initial_accumulator_value: the sum before the first step.
        eps: added to the root.
        maximize: go up instead of down.

    Raises:
        ArgumentError: an option that makes no sense.

    >>> p = ag.tensor([1.0, 2.0], requires_grad=True)
    >>> optimizer = ag.optim.Adagrad([p], lr=0.1)
    >>> await (p * p).sum().backward()
    >>> optimizer.step()
    >>> p.detach()
    tensor([0.9, 1.9])
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
    ) -> None:
        options = {"lr": lr, "lr_decay": lr_decay, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**options, "initial_accumulator_value": initial_accumulator_value, "maximize": maximize})

    def _check(self, group: Group) -> None:
        self._check_numbers(group, "lr", "lr_decay", "eps", "weight_decay", "initial_accumulator_value")

    def _state_names(self, group: Group) -> tuple[str, ...]:
        return ("sum",)

    def _initial(self, name: str, parameter: Any, group: Group) -> Any:
        first = group["initial_accumulator_value"]
        return zeros_like(parameter) + (complex(first, first) if parameter.dtype.kind == "c" else first)

    def _formula(self, group: Group, key: Any, parameter: Any, gradient: Any, state: list[Any]) -> tuple[Any, ...]:
        parameter, d = _slope(group, parameter, gradient)
        total = state[0] + d * d
        return parameter - (group["lr"] / (1.0 + (key - 1) * group["lr_decay"])) * (d / (np.sqrt(total) + group["eps"])), total


class Adadelta(_Adaptive):
    """The gradient times the root of a ratio, of running means of squared steps and squared gradients: steps in units of the parameter.

    Args:
        params: Tensors to update, or groups.
        lr: factor of the step.
        rho: decay of the running means.
        eps: added below the roots.
        weight_decay: times the parameter is added to the gradient.
        maximize: go up instead of down.

    Raises:
        ArgumentError: an option that makes no sense.

    >>> p = ag.tensor([1.0, 2.0], requires_grad=True)
    >>> optimizer = ag.optim.Adadelta([p], lr=0.1)
    >>> await (p * p).sum().backward()
    >>> optimizer.step()
    >>> p.detach()
    tensor([0.9996838, 1.9996837])
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 1.0, rho: float = 0.9, eps: float = 1e-6, weight_decay: float = 0.0, *, maximize: bool = False
    ) -> None:
        super().__init__(params, {"lr": lr, "rho": rho, "eps": eps, "weight_decay": weight_decay, "maximize": maximize})

    def _check(self, group: Group) -> None:
        self._check_numbers(group, "lr", "eps", "weight_decay")
        self._check_option(group, "rho", lambda rho: 0 <= rho <= 1, "a number from 0 to 1")

    def _state_names(self, group: Group) -> tuple[str, ...]:
        return ("square_avg", "acc_delta")

    def _formula(self, group: Group, key: Any, parameter: Any, gradient: Any, state: list[Any]) -> tuple[Any, ...]:
        parameter, d = _slope(group, parameter, gradient)
        rho, eps = group["rho"], group["eps"]
        square = rho * state[0] + (1.0 - rho) * (d * d)
        step = np.sqrt(state[1] + eps) / np.sqrt(square + eps) * d
        return parameter - group["lr"] * step, square, rho * state[1] + (1.0 - rho) * (step * step)


class NAdam(_Adaptive):
    """Adam that looks ahead, as Nesterov's momentum does.

    Args:
        params: Tensors to update, or groups.
        lr: learning rate.
        betas: decay of the running means of the gradient and of its square.
        eps: added to the root.
        weight_decay: times the parameter is added to the gradient.
        momentum_decay: how fast the momentum approaches its final value.
        decoupled_weight_decay: True to shrink the parameter instead, as AdamW does.
        maximize: go up instead of down.

    Raises:
        ArgumentError: an option that makes no sense.

    >>> p = ag.tensor([1.0, 2.0], requires_grad=True)
    >>> optimizer = ag.optim.NAdam([p], lr=0.1)
    >>> await (p * p).sum().backward()
    >>> optimizer.step()
    >>> p.detach()
    tensor([0.8943548, 1.8943548])
    """

    _numbers: Mapping[str, Callable[[Any], Any]] = MappingProxyType({"step": count, "mu_product": share})

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 2e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum_decay: float = 4e-3,
        decoupled_weight_decay: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "momentum_decay": momentum_decay}
        super().__init__(params, {**options, "decoupled_weight_decay": decoupled_weight_decay, "maximize": maximize})

    def _check(self, group: Group) -> None:
        self._check_numbers(group, "lr", "eps", "weight_decay", "momentum_decay")
        self._check_betas(group)

    def _state_names(self, group: Group) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    @staticmethod
    def _momentum(group: Group, step: int) -> float:
        return float(group["betas"][0] * (1.0 - 0.5 * 0.96 ** (step * group["momentum_decay"])))

    def _begin(self, p: Tensor, state: dict[str, Any], group: Group) -> Hashable:
        state["step"] = step = int(state.get("step", 0)) + 1
        # a float32 number, as PyTorch keeps it: states go both ways
        state["mu_product"] = product = float(np.float32(state.get("mu_product", 1.0)) * np.float32(self._momentum(group, step)))
        return step, product

    def _formula(self, group: Group, key: Any, parameter: Any, gradient: Any, state: list[Any]) -> tuple[Any, ...]:
        step, product = key
        parameter, d = _slope(group, parameter, gradient)
        mean, square = _moments(group["betas"], d, state)
        root = np.sqrt(square / (1.0 - group["betas"][1] ** step)) + group["eps"]
        now, following = self._momentum(group, step), self._momentum(group, step + 1)
        ahead = group["lr"] * following / (1.0 - product * following)
        return parameter - (group["lr"] * (1.0 - now) / (1.0 - product)) * (d / root) - ahead * (mean / root), mean, square


class RAdam(_Adaptive):
    """Adam with an adaptive rate that is held back until the variance of the running mean of squares is known well enough.

    Args:
        params: Tensors to update, or groups.
        lr: learning rate.
        betas: decay of the running means of the gradient and of its square.
        eps: added to the root.
        weight_decay: times the parameter is added to the gradient.
        decoupled_weight_decay: True to shrink the parameter instead, as AdamW does.
        maximize: go up instead of down.

    Raises:
        ArgumentError: an option that makes no sense.

    >>> p = ag.tensor([1.0, 2.0], requires_grad=True)
    >>> optimizer = ag.optim.RAdam([p], lr=0.1)
    >>> await (p * p).sum().backward()
    >>> optimizer.step()
    >>> p.detach()
    tensor([0.8, 1.6])
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "decoupled_weight_decay": decoupled_weight_decay}
        super().__init__(params, {**options, "maximize": maximize})

    def _check(self, group: Group) -> None:
        self._check_numbers(group, "lr", "eps", "weight_decay")
        self._check_betas(group)

    def _state_names(self, group: Group) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    def _formula(self, group: Group, key: Any, parameter: Any, gradient: Any, state: list[Any]) -> tuple[Any, ...]:
        beta1, beta2 = group["betas"]
        parameter, d = _slope(group, parameter, gradient)
        mean, square = _moments(group["betas"], d, state)
        corrected = 1.0 - beta2**key
        longest = 2.0 / (1.0 - beta2) - 1.0
        length = longest - 2.0 * key * beta2**key / corrected  # of the average that is approximated
        rate = group["lr"] / (1.0 - beta1**key)
        if length <= 5.0:
            return parameter - rate * mean, mean, square
        sure = math.sqrt((length - 4.0) * (length - 2.0) * longest / ((longest - 4.0) * (longest - 2.0) * length))
        return parameter - (rate * sure * math.sqrt(corrected)) * (mean / (np.sqrt(square) + group["eps"])), mean, square

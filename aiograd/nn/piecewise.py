"""Activations that are constant or linear in pieces, as modules; PReLU, which learns its slope, among them."""

from __future__ import annotations

from typing import Any

from aiograd.nn import functional, init
from aiograd.nn.activation import Activation, InplaceActivation
from aiograd.nn.linear import new_parameter
from aiograd.nn.module import Module, refuse_inplace
from aiograd.nn.parameter import Parameter
from aiograd.tensors.tensor import Tensor


class ReLU6(InplaceActivation):
    """``min(max(x, 0), 6)``.

    Args:
        inplace: False; True is refused, since gradients need the values.
    """

    function = staticmethod(functional.relu6)


class Hardtanh(Activation):
    """`x` between the limits, the nearer limit elsewhere.

    Args:
        min_val, max_val: the limits.
        inplace: False; True is refused, since gradients need the values.
    """

    function = staticmethod(functional.hardtanh)
    settings = ("min_val", "max_val")

    def __init__(self, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> None:
        refuse_inplace(type(self).__name__, inplace)
        self.min_val = min_val
        self.max_val = max_val


class Hardsigmoid(InplaceActivation):
    """``min(max(x / 6 + 1 / 2, 0), 1)``.

    Args:
        inplace: False; True is refused, since gradients need the values.
    """

    function = staticmethod(functional.hardsigmoid)


class Hardswish(InplaceActivation):
    """``x * hardsigmoid(x)``.

    Args:
        inplace: False; True is refused, since gradients need the values.
    """

    function = staticmethod(functional.hardswish)


class _Shrink(Activation):
    settings = ("lambd",)

    def __init__(self, lambd: float = 0.5) -> None:
        self.lambd = lambd


class Hardshrink(_Shrink):
    """`x` where its magnitude is above `lambd`, 0 elsewhere.

    Args:
        lambd: the threshold.
    """

    function = staticmethod(functional.hardshrink)


class Softshrink(_Shrink):
    """`x` moved towards 0 by `lambd`, 0 where that would cross it.

    Args:
        lambd: how far.
    """

    function = staticmethod(functional.softshrink)


class Threshold(Activation):
    """`x` where it is above a threshold, another value elsewhere.

    Args:
        threshold: the threshold.
        value: takes the place of all that is not above it.
        inplace: False; True is refused, since gradients need the values.
    """

    function = staticmethod(functional.threshold)
    settings = ("threshold", "value")

    def __init__(self, threshold: float, value: float, inplace: bool = False) -> None:
        refuse_inplace(type(self).__name__, inplace)
        self.threshold = threshold
        self.value = value


class PReLU(Module):
    """`x` where positive, a learnt slope times `x` elsewhere.

    Args:
        num_parameters: 1, or the number of channels: one slope for each.
        init: the first slope.
        dtype, device: of the slopes.

    Source: He et al., Delving deep into rectifiers (2015).
    """

    weight: Parameter

    def __init__(self, num_parameters: int = 1, init: float = 0.25, device: str | None = None, dtype: Any = None) -> None:
        self.num_parameters = num_parameters
        self.init = init
        self.weight = new_parameter((num_parameters,), dtype, device)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the first slopes again."""
        init.constant_(self.weight, self.init)

    def forward(self, input: Any) -> Tensor:
        """Of (N, C, ...), or any shape with one slope.

        Args:
            input: (N, C, ...), or any shape with one slope.

        Returns:
            A Tensor of the same shape.
        """
        return functional.prelu(input, self.weight)

    def extra_repr(self) -> str:
        return f"num_parameters={self.num_parameters}"

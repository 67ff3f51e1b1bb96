"""Activation functions as modules. Where PyTorch's take ``inplace``, these refuse True: see `aiograd.nn.functional`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from aiograd.nn import functional
from aiograd.nn.module import Module, refuse_inplace
from aiograd.tensors.tensor import Tensor


class Activation(Module):
    """A function of `aiograd.nn.functional` as a module; its settings are attributes.

    Attributes:
        function: the function, of the input and the settings.
        settings: names of the attributes that it takes, in its order.
    """

    function: ClassVar[Callable[..., Tensor]]
    settings: ClassVar[tuple[str, ...]] = ()

    def forward(self, input: Any) -> Tensor:
        """Apply the function to each element, or along its axis.

        Args:
            input: any shape, which has the axis if there is one.

        Returns:
            A Tensor of the same shape; of `GLU`, of half the length along the axis.
        """
        return self.function(input, *[getattr(self, name) for name in self.settings])

    def extra_repr(self) -> str:
        values = ((name, getattr(self, name)) for name in self.settings)
        return ", ".join(f"{name}={value!r}" for name, value in values if value is not None)


class InplaceActivation(Activation):
    """An activation whose PyTorch form has ``inplace`` as its only argument.

    Args:
        inplace: False; True is refused, since gradients need the values.
    """

    def __init__(self, inplace: bool = False) -> None:
        refuse_inplace(type(self).__name__, inplace)


class AxisActivation(Activation):
    """A function along an axis.

    Args:
        dim: the axis, the last by default.
    """

    settings = ("dim",)

    def __init__(self, dim: int = -1) -> None:
        self.dim = dim


class ReLU(InplaceActivation):
    """``max(x, 0)``.

    Args:
        inplace: False; True is refused, since gradients need the values.
    """

    function = staticmethod(functional.relu)


class GELU(Activation):
    """``x`` times the probability of a standard normal below it.

    Args:
        approximate: "none" or "tanh".
    """

    function = staticmethod(functional.gelu)
    settings = ("approximate",)

    def __init__(self, approximate: str = "none") -> None:
        self.approximate = approximate


class SiLU(InplaceActivation):
    """``x * sigmoid(x)``.

    Args:
        inplace: False; True is refused, since gradients need the values.
    """

    function = staticmethod(functional.silu)


class ELU(Activation):
    """`x` where positive, ``alpha * (exp(x) - 1)`` elsewhere.

    Args:
        alpha: the limit on the negative side.
        inplace: False; True is refused, since gradients need the values.
    """

    function = staticmethod(functional.elu)
    settings = ("alpha",)

    def __init__(self, alpha: float = 1.0, inplace: bool = False) -> None:
        refuse_inplace(type(self).__name__, inplace)
        self.alpha = alpha


class LeakyReLU(Activation):
    """`x` where positive, ``negative_slope * x`` elsewhere.

    Args:
        negative_slope: the slope on the negative side.
        inplace: False; True is refused, since gradients need the values.
    """

    function = staticmethod(functional.leaky_relu)
    settings = ("negative_slope",)

    def __init__(self, negative_slope: float = 0.01, inplace: bool = False) -> None:
        refuse_inplace(type(self).__name__, inplace)
        self.negative_slope = negative_slope


class Softplus(Activation):
    """``log(1 + exp(beta * x)) / beta``.

    Args:
        beta: sharpness.
        threshold: see `aiograd.nn.functional.softplus`.
    """

    function = staticmethod(functional.softplus)
    settings = ("beta", "threshold")

    def __init__(self, beta: float = 1.0, threshold: float | None = None) -> None:
        self.beta = beta
        self.threshold = threshold


class Tanh(Activation):
    """Hyperbolic tangent."""

    function = staticmethod(functional.tanh)


class Sigmoid(Activation):
    """``1 / (1 + exp(-x))``."""

    function = staticmethod(functional.sigmoid)


class Softmax(AxisActivation):
    """``exp(x) / sum(exp(x))`` along an axis.

    Args:
        dim: the axis, the last by default.
    """

    function = staticmethod(functional.softmax)


class LogSoftmax(AxisActivation):
    """``log(softmax(x))`` along an axis.

    Args:
        dim: the axis, the last by default.
    """

    function = staticmethod(functional.log_softmax)


class Softmin(AxisActivation):
    """``softmax(-x)`` along an axis.

    Args:
        dim: the axis, the last by default.
    """

    function = staticmethod(functional.softmin)


class GLU(AxisActivation):
    """The first half along an axis times the sigmoid of the second half.

    Args:
        dim: the axis, the last by default.
    """

    function = staticmethod(functional.glu)


class SELU(InplaceActivation):
    """``scale * elu(x, alpha)`` with the two numbers that keep mean 0 and variance 1 from layer to layer.

    Args:
        inplace: False; True is refused, since gradients need the values.
    """

    function = staticmethod(functional.selu)


class CELU(Activation):
    """`x` where positive, ``alpha * (exp(x / alpha) - 1)`` elsewhere.

    Args:
        alpha: the limit on the negative side.
        inplace: False; True is refused, since gradients need the values.
    """

    function = staticmethod(functional.celu)
    settings = ("alpha",)

    def __init__(self, alpha: float = 1.0, inplace: bool = False) -> None:
        refuse_inplace(type(self).__name__, inplace)
        self.alpha = alpha


class Mish(InplaceActivation):
    """``x * tanh(softplus(x))``.

    Args:
        inplace: False; True is refused, since gradients need the values.
    """

    function = staticmethod(functional.mish)


class Tanhshrink(Activation):
    """``x - tanh(x)``."""

    function = staticmethod(functional.tanhshrink)


class Softsign(Activation):
    """``x / (1 + |x|)``."""

    function = staticmethod(functional.softsign)


class LogSigmoid(Activation):
    """``log(sigmoid(x))``, accurate for large negative `x`."""

    function = staticmethod(functional.logsigmoid)

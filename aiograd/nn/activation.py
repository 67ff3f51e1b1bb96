"""Activation functions as modules. Where PyTorch's take ``inplace``, these refuse True: see `aiograd.nn.functional`."""

from __future__ import annotations

from typing import Any

from aiograd.nn import functional
from aiograd.nn.module import Module, refuse_inplace
from aiograd.tensors.tensor import Tensor


class ReLU(Module):
    """``max(x, 0)``.

    Args:
        inplace: False; True is refused, since gradients need the values.
    """

    def __init__(self, inplace: bool = False) -> None:
        refuse_inplace("ReLU", inplace)

    def forward(self, input: Any) -> Tensor:
        """Apply the function to each element.

        Args:
            input: any shape.

        Returns:
            A Tensor of the same shape.
        """
        return functional.relu(input)


class GELU(Module):
    """``x`` times the probability of a standard normal below it.

    Args:
        approximate: "none" or "tanh".
    """

    def __init__(self, approximate: str = "none") -> None:
        self.approximate = approximate

    def forward(self, input: Any) -> Tensor:
        """Apply the function to each element.

        Args:
            input: any shape.

        Returns:
            A Tensor of the same shape.
        """
        return functional.gelu(input, self.approximate)

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}"


class SiLU(Module):
    """``x * sigmoid(x)``.

    Args:
        inplace: False; True is refused, since gradients need the values.
    """

    def __init__(self, inplace: bool = False) -> None:
        refuse_inplace("SiLU", inplace)

    def forward(self, input: Any) -> Tensor:
        """Apply the function to each element.

        Args:
            input: any shape.

        Returns:
            A Tensor of the same shape.
        """
        return functional.silu(input)


class ELU(Module):
    """`x` where positive, ``alpha * (exp(x) - 1)`` elsewhere.

    Args:
        alpha: the limit on the negative side.
        inplace: False; True is refused, since gradients need the values.
    """

    def __init__(self, alpha: float = 1.0, inplace: bool = False) -> None:
        refuse_inplace("ELU", inplace)
        self.alpha = alpha

    def forward(self, input: Any) -> Tensor:
        """Apply the function to each element.

        Args:
            input: any shape.

        Returns:
            A Tensor of the same shape.
        """
        return functional.elu(input, self.alpha)

    def extra_repr(self) -> str:
        return f"alpha={self.alpha}"


class LeakyReLU(Module):
    """`x` where positive, ``negative_slope * x`` elsewhere.

    Args:
        negative_slope: the slope on the negative side.
        inplace: False; True is refused, since gradients need the values.
    """

    def __init__(self, negative_slope: float = 0.01, inplace: bool = False) -> None:
        refuse_inplace("LeakyReLU", inplace)
        self.negative_slope = negative_slope

    def forward(self, input: Any) -> Tensor:
        """Apply the function to each element.

        Args:
            input: any shape.

        Returns:
            A Tensor of the same shape.
        """
        return functional.leaky_relu(input, self.negative_slope)

    def extra_repr(self) -> str:
        return f"negative_slope={self.negative_slope}"


class Softplus(Module):
    """``log(1 + exp(beta * x)) / beta``.

    Args:
        beta: sharpness.
        threshold: see `aiograd.nn.functional.softplus`.
        inplace: False; True is refused, since gradients need the values.
    """

    def __init__(self, beta: float = 1.0, threshold: float | None = None) -> None:
        self.beta = beta
        self.threshold = threshold

    def forward(self, input: Any) -> Tensor:
        """Apply the function to each element.

        Args:
            input: any shape.

        Returns:
            A Tensor of the same shape.
        """
        return functional.softplus(input, self.beta, self.threshold)

    def extra_repr(self) -> str:
        return f"beta={self.beta}" + ("" if self.threshold is None else f", threshold={self.threshold}")


class Tanh(Module):
    """Hyperbolic tangent."""

    def forward(self, input: Any) -> Tensor:
        """Apply the function to each element.

        Args:
            input: any shape.

        Returns:
            A Tensor of the same shape.
        """
        return functional.tanh(input)


class Sigmoid(Module):
    """``1 / (1 + exp(-x))``."""

    def forward(self, input: Any) -> Tensor:
        """Apply the function to each element.

        Args:
            input: any shape.

        Returns:
            A Tensor of the same shape.
        """
        return functional.sigmoid(input)


class Softmax(Module):
    """``exp(x) / sum(exp(x))`` along an axis.

    Args:
        dim: the axis, the last by default.
    """

    def __init__(self, dim: int = -1) -> None:
        self.dim = dim

    def forward(self, input: Any) -> Tensor:
        """Apply the function along the axis.

        Args:
            input: any shape with that axis.

        Returns:
            A Tensor of the same shape.
        """
        return functional.softmax(input, self.dim)

    def extra_repr(self) -> str:
        return f"dim={self.dim}"


class LogSoftmax(Module):
    """``log(softmax(x))`` along an axis.

    Args:
        dim: the axis, the last by default.
    """

    def __init__(self, dim: int = -1) -> None:
        self.dim = dim

    def forward(self, input: Any) -> Tensor:
        """Apply the function along the axis.

        Args:
            input: any shape with that axis.

        Returns:
            A Tensor of the same shape.
        """
        return functional.log_softmax(input, self.dim)

    def extra_repr(self) -> str:
        return f"dim={self.dim}"


class Softmin(Module):
    """``softmax(-x)`` along an axis.

    Args:
        dim: the axis, the last by default.
    """

    def __init__(self, dim: int = -1) -> None:
        self.dim = dim

    def forward(self, input: Any) -> Tensor:
        """Apply the function along the axis.

        Args:
            input: any shape with that axis.

        Returns:
            A Tensor, of the same shape unless the class says otherwise.
        """
        return functional.softmin(input, self.dim)

    def extra_repr(self) -> str:
        return f"dim={self.dim}"


class GLU(Module):
    """The first half along an axis times the sigmoid of the second half.

    Args:
        dim: the axis, the last by default.
    """

    def __init__(self, dim: int = -1) -> None:
        self.dim = dim

    def forward(self, input: Any) -> Tensor:
        """Apply the function along the axis.

        Args:
            input: any shape with that axis.

        Returns:
            A Tensor, of the same shape unless the class says otherwise.
        """
        return functional.glu(input, self.dim)

    def extra_repr(self) -> str:
        return f"dim={self.dim}"


class SELU(Module):
    """``scale * elu(x, alpha)`` with the two numbers that keep mean 0 and variance 1 from layer to layer.

    Args:
        inplace: False; True is refused, since gradients need the values.
    """

    def __init__(self, inplace: bool = False) -> None:
        refuse_inplace("SELU", inplace)

    def forward(self, input: Any) -> Tensor:
        """Apply the function to each element.

        Args:
            input: any shape.

        Returns:
            A Tensor of the same shape.
        """
        return functional.selu(input)


class CELU(Module):
    """`x` where positive, ``alpha * (exp(x / alpha) - 1)`` elsewhere.

    Args:
        alpha: the limit on the negative side.
        inplace: False; True is refused, since gradients need the values.
    """

    def __init__(self, alpha: float = 1.0, inplace: bool = False) -> None:
        refuse_inplace("CELU", inplace)
        self.alpha = alpha

    def forward(self, input: Any) -> Tensor:
        """Apply the function to each element.

        Args:
            input: any shape.

        Returns:
            A Tensor of the same shape.
        """
        return functional.celu(input, self.alpha)

    def extra_repr(self) -> str:
        return f"alpha={self.alpha}"


class Mish(Module):
    """``x * tanh(softplus(x))``.

    Args:
        inplace: False; True is refused, since gradients need the values.
    """

    def __init__(self, inplace: bool = False) -> None:
        refuse_inplace("Mish", inplace)

    def forward(self, input: Any) -> Tensor:
        """Apply the function to each element.

        Args:
            input: any shape.

        Returns:
            A Tensor of the same shape.
        """
        return functional.mish(input)


class Tanhshrink(Module):
    """``x - tanh(x)``."""

    def forward(self, input: Any) -> Tensor:
        """Apply the function to each element.

        Args:
            input: any shape.

        Returns:
            A Tensor of the same shape.
        """
        return functional.tanhshrink(input)


class Softsign(Module):
    """``x / (1 + |x|)``."""

    def forward(self, input: Any) -> Tensor:
        """Apply the function to each element.

        Args:
            input: any shape.

        Returns:
            A Tensor of the same shape.
        """
        return functional.softsign(input)


class LogSigmoid(Module):
    """``log(sigmoid(x))``, accurate for large negative `x`."""

    def forward(self, input: Any) -> Tensor:
        """Apply the function to each element.

        Args:
            input: any shape.

        Returns:
            A Tensor of the same shape.
        """
        return functional.logsigmoid(input)

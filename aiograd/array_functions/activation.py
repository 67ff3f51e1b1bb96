"""Activation functions and softmax, under PyTorch's names; ``axis`` is the standard's word for ``dim``."""

from __future__ import annotations

from aiograd.array_functions.conversion import ArrayLike, Unary, as_tensor, calling, one, row
from aiograd.tensors.record import call
from aiograd.tensors.tensor import Tensor

__all__ = ["relu", "gelu", "silu", "elu", "leaky_relu", "softplus", "softsign", "sigmoid", "log_sigmoid", "softmax", "log_softmax"]

relu: Unary = one("relu", "``max(x, 0)``.")


def gelu(x: ArrayLike, /, *, approximate: str = "none") -> Tensor:
    """``x`` times the probability of a standard normal below it; with "tanh" the usual approximation."""
    return call(row("gelu"), (as_tensor(x),), {"approximate": approximate})  # type: ignore[no-any-return]


silu: Unary = one("silu", "``x * sigmoid(x)``.", calling("silu"))


def elu(x: ArrayLike, /, *, alpha: float = 1.0) -> Tensor:
    """`x` where positive, ``alpha * (exp(x) - 1)`` elsewhere."""
    return call(row("elu"), (as_tensor(x),), {"alpha": alpha})  # type: ignore[no-any-return]


def leaky_relu(x: ArrayLike, /, *, negative_slope: float = 0.01) -> Tensor:
    """`x` where positive, ``negative_slope * x`` elsewhere."""
    return call(row("leaky_relu"), (as_tensor(x),), {"negative_slope": negative_slope})  # type: ignore[no-any-return]


def softplus(x: ArrayLike, /, *, beta: float = 1.0) -> Tensor:
    """``log(1 + exp(beta * x)) / beta``, without overflow."""
    return call(row("softplus"), (as_tensor(x),), {"beta": beta})  # type: ignore[no-any-return]


softsign: Unary = one("softsign", "``x / (1 + |x|)``.")
sigmoid: Unary = one("sigmoid", "``1 / (1 + exp(-x))``.")
log_sigmoid: Unary = one("log_sigmoid", "``log(sigmoid(x))``, accurate for large negative `x`.")


def softmax(x: ArrayLike, /, axis: int = -1) -> Tensor:
    """``exp(x) / sum(exp(x))`` along an axis."""
    return call(row("softmax"), (as_tensor(x),), {"axis": axis})  # type: ignore[no-any-return]


def log_softmax(x: ArrayLike, /, axis: int = -1) -> Tensor:
    """``log(softmax(x))`` along an axis, accurate for small probabilities."""
    return call(row("log_softmax"), (as_tensor(x),), {"axis": axis})  # type: ignore[no-any-return]

"""Linear, and the layers that only rearrange: Identity, Flatten, Unflatten."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from aiograd.nn import functional, init
from aiograd.nn.module import Module
from aiograd.nn.parameter import Parameter
from aiograd.running.modes import get_default_dtype
from aiograd.running.random import Generator
from aiograd.tensors.core import make
from aiograd.tensors.tensor import Tensor


def new_parameter(shape: tuple[int, ...], dtype: Any, device: str | None) -> Parameter:
    """A Parameter of the default dtype, unless one is given; its values are zeros."""
    tensor: Tensor = make(np.zeros(shape, get_default_dtype() if dtype is None else dtype))
    return Parameter(tensor if device is None else tensor.to(device))


class Linear(Module):
    """``x @ weight.T + bias``.

    Args:
        in_features, out_features: extents of the last axis before and after.
        bias: True if there is one.
        dtype, device: of the parameters.
        generator: draws their first values, uniform in ``±1 / sqrt(in_features)``.

    Shape: (..., in_features) to (..., out_features).

    >>> layer = ag.nn.Linear(3, 2)
    >>> layer
    Linear(in_features=3, out_features=2, bias=True)
    >>> layer(ag.ones(4, 3)).shape
    (4, 2)
    """

    weight: Parameter
    bias: Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: str | None = None,
        dtype: Any = None,
        *,
        generator: Generator | None = None,
    ) -> None:
        self.in_features = in_features
        self.out_features = out_features
        self.weight = new_parameter((out_features, in_features), dtype, device)
        self.bias = new_parameter((out_features,), dtype, device) if bias else None
        self.reset_parameters(generator)

    def reset_parameters(self, generator: Generator | None = None) -> None:
        """Draw new values.

        Args:
            generator: where the numbers come from; None: the default generator.
        """
        init.kaiming_uniform_(self.weight, math.sqrt(5.0), generator=generator)
        if self.bias is not None:
            bound = 1.0 / math.sqrt(max(self.in_features, 1))
            init.uniform_(self.bias, -bound, bound, generator)

    def forward(self, input: Any) -> Tensor:
        return functional.linear(input, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class Identity(Module):
    """The input, unchanged.

    >>> ag.nn.Identity()(ag.tensor([1.0, 2.0]))
    tensor([1., 2.])
    """

    def forward(self, input: Any) -> Any:
        return input


class Flatten(Module):
    """Axes `start_dim` to `end_dim` joined into one; by default all but the first.

    Args:
        start_dim, end_dim: first and last of the axes.

    >>> ag.nn.Flatten()(ag.ones(2, 3, 4)).shape
    (2, 12)
    """

    def __init__(self, start_dim: int = 1, end_dim: int = -1) -> None:
        self.start_dim = start_dim
        self.end_dim = end_dim

    def forward(self, input: Tensor) -> Tensor:
        return input.flatten(self.start_dim, self.end_dim)

    def extra_repr(self) -> str:
        return f"start_dim={self.start_dim}, end_dim={self.end_dim}"


class Unflatten(Module):
    """One axis taken apart into several.

    Args:
        dim: the axis.
        unflattened_size: extents that take its place; one may be -1.

    >>> ag.nn.Unflatten(1, (3, -1))(ag.ones(2, 12)).shape
    (2, 3, 4)
    """

    def __init__(self, dim: int, unflattened_size: Sequence[int]) -> None:
        self.dim = dim
        self.unflattened_size: tuple[int, ...] = tuple(unflattened_size)

    def forward(self, input: Tensor) -> Tensor:
        return input.unflatten(self.dim, self.unflattened_size)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, unflattened_size={self.unflattened_size}"

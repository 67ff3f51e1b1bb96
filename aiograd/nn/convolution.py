"""Conv2d and the pooling layers."""

from __future__ import annotations

import math
from typing import Any

from aiograd.errors import ArgumentError
from aiograd.nn import functional, init
from aiograd.nn.functional.maps import Pair
from aiograd.nn.linear import new_parameter
from aiograd.nn.module import Module
from aiograd.nn.parameter import Parameter
from aiograd.random import Generator
from aiograd.tensors.tensor import Tensor


def _pair(value: Pair) -> tuple[int, int]:
    return value if isinstance(value, tuple) else (value, value)


class Conv2d(Module):
    """Two-dimensional cross-correlation.

    Args:
        in_channels, out_channels: channels before and after.
        kernel_size: of the window, an int or (height, width).
        stride, dilation: the same.
        padding: zeros on both sides, an int or (height, width); "valid" is none, "same" keeps the size (stride 1).
        groups: channels fall into so many groups that do not mix.
        bias: True if there is one.
        dtype, device: of the parameters.
        generator: draws their first values, uniform in ``±1 / sqrt(fan in)``.

    Shape: (N, in_channels, H, W) to (N, out_channels, H', W'); without N too.
    """

    weight: Parameter
    bias: Parameter | None

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Pair,
        stride: Pair = 1,
        padding: Pair | str = 0,
        dilation: Pair = 1,
        groups: int = 1,
        bias: bool = True,
        *,
        dtype: Any = None,
        device: str | None = None,
        generator: Generator | None = None,
    ) -> None:
        if groups < 1 or in_channels % groups or out_channels % groups:
            raise ArgumentError(f"Conv2d({in_channels}, {out_channels}, groups={groups}): expected channels divisible by the number of groups")
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.kernel_size = _pair(kernel_size)
        self.stride = _pair(stride)
        self.padding = padding if isinstance(padding, str) else _pair(padding)
        self.dilation = _pair(dilation)
        self.groups = groups
        self.weight = new_parameter((out_channels, in_channels // groups, *self.kernel_size), dtype, device)
        self.bias = new_parameter((out_channels,), dtype, device) if bias else None
        self.reset_parameters(generator)

    def reset_parameters(self, generator: Generator | None = None) -> None:
        """Draw new values."""
        init.kaiming_uniform_(self.weight, math.sqrt(5.0), generator=generator)
        if self.bias is not None:
            bound = 1.0 / math.sqrt(max(math.prod(self.weight.shape[1:]), 1))
            init.uniform_(self.bias, -bound, bound, generator)

    def forward(self, input: Any) -> Tensor:
        """The correlation of images with the kernels."""
        return functional.conv2d(input, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)

    def extra_repr(self) -> str:
        """The arguments that differ from the defaults."""
        given = {"stride": (self.stride, (1, 1)), "padding": (self.padding, (0, 0)), "dilation": (self.dilation, (1, 1)), "groups": (self.groups, 1)}
        options = "".join(f", {name}={value}" for name, (value, default) in given.items() if value != default)
        return f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}{options}{'' if self.bias is not None else ', bias=False'}"


class MaxPool2d(Module):
    """The maximum of each window of (N, C, H, W) or (C, H, W).

    Args:
        kernel_size: of the window, an int or (height, width), as are the others.
        stride: between windows; None: they lie side by side.
        padding: on both sides, below every value.
        dilation: between the taps of a window.
    """

    def __init__(self, kernel_size: Pair, stride: Pair | None = None, padding: Pair = 0, dilation: Pair = 1) -> None:
        self.kernel_size = kernel_size
        self.stride = stride
        self.padding = padding
        self.dilation = dilation

    def forward(self, input: Any) -> Tensor:
        """The maxima."""
        return functional.max_pool2d(input, self.kernel_size, self.stride, self.padding, self.dilation)

    def extra_repr(self) -> str:
        """The window."""
        return f"kernel_size={self.kernel_size}, stride={self.stride}, padding={self.padding}, dilation={self.dilation}"


class AvgPool2d(Module):
    """The mean of each window of (N, C, H, W) or (C, H, W).

    Args:
        kernel_size: of the window, an int or (height, width), as are the next two.
        stride: between windows; None: they lie side by side.
        padding: zeros on both sides.
        count_include_pad: True if padding counts as values.
    """

    def __init__(self, kernel_size: Pair, stride: Pair | None = None, padding: Pair = 0, *, count_include_pad: bool = True) -> None:
        self.kernel_size = kernel_size
        self.stride = stride
        self.padding = padding
        self.count_include_pad = count_include_pad

    def forward(self, input: Any) -> Tensor:
        """The means."""
        return functional.avg_pool2d(input, self.kernel_size, self.stride, self.padding, count_include_pad=self.count_include_pad)

    def extra_repr(self) -> str:
        """The window."""
        return f"kernel_size={self.kernel_size}, stride={self.stride}, padding={self.padding}"

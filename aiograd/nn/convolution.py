"""Convolutions over lines and images, and transposed ones. Weights and their names are PyTorch's."""

from __future__ import annotations

import math
from typing import Any

from aiograd.errors import ArgumentError
from aiograd.kernels.window import pair
from aiograd.nn import functional, init
from aiograd.nn.functional.convolutions import Single, single
from aiograd.nn.functional.maps import Pair
from aiograd.nn.functional.volumes import triple
from aiograd.nn.linear import new_parameter
from aiograd.nn.module import Module
from aiograd.nn.parameter import Parameter
from aiograd.running.random import Generator
from aiograd.tensors.tensor import Tensor

_PADDING_MODES = ("zeros", "reflect", "replicate", "circular")


class _Convolution(Module):
    weight: Parameter
    bias: Parameter | None
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...] | str
    dilation: tuple[int, ...]

    #: axes that the window moves along
    _axes: int = 2
    _transposed: bool = False

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any,
        stride: Any,
        padding: Any,
        dilation: Any,
        groups: int,
        bias: bool,
        padding_mode: str,
        dtype: Any,
        device: str | None,
        generator: Generator | None,
    ) -> None:
        name = type(self).__name__
        if groups < 1 or in_channels % groups or out_channels % groups:
            raise ArgumentError(f"{name}({in_channels}, {out_channels}, groups={groups}): expected channels divisible by the number of groups")
        if padding_mode not in (_PADDING_MODES[:1] if self._transposed else _PADDING_MODES):
            expected = "'zeros'" if self._transposed else ", ".join(map(repr, _PADDING_MODES))
            raise ArgumentError(f"{name}(padding_mode={padding_mode!r}): expected {expected}")
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.kernel_size = self._each(kernel_size, "kernel_size")
        self.stride = self._each(stride, "stride")
        self.padding = padding if isinstance(padding, str) else self._each(padding, "padding")
        self.dilation = self._each(dilation, "dilation")
        self.groups = groups
        self.padding_mode = padding_mode
        if isinstance(padding, str) and (padding not in ("valid", "same") or (padding == "same" and max(self.stride) > 1)):
            raise ArgumentError(f"{name}(padding={padding!r}, stride={self.stride}): expected numbers, 'valid', or 'same' with stride 1")
        first, second = (in_channels, out_channels) if self._transposed else (out_channels, in_channels)
        self.weight = new_parameter((first, second // groups, *self.kernel_size), dtype, device)
        self.bias = new_parameter((out_channels,), dtype, device) if bias else None
        self.reset_parameters(generator)

    def _each(self, value: Any, name: str) -> tuple[int, ...]:
        return (single(value, name),) if self._axes == 1 else pair(value, name) if self._axes == 2 else triple(value, name)

    def reset_parameters(self, generator: Generator | None = None) -> None:
        """Draw new values, uniform in ``±1 / sqrt(fan in)``."""
        init.kaiming_uniform_(self.weight, math.sqrt(5.0), generator=generator)
        if self.bias is not None:
            bound = 1.0 / math.sqrt(max(math.prod(self.weight.shape[1:]), 1))
            init.uniform_(self.bias, -bound, bound, generator)

    def _padded(self, input: Any) -> tuple[Any, Any]:
        """The input with its border where that is not of zeros, and the padding that is left to the convolution."""
        if self.padding_mode == "zeros" or self.padding == "valid":
            return input, self.padding
        if self.padding == "same":
            total = [d * (k - 1) for d, k in zip(self.dilation, self.kernel_size, strict=True)]
            sides = [(n // 2, n - n // 2) for n in total]
        else:
            sides = [(int(n), int(n)) for n in self.padding]
        flat = [n for side in reversed(sides) for n in side]
        return functional.pad(input, flat, mode=self.padding_mode), (0,) * self._axes

    def extra_repr(self) -> str:
        ones, zeros = (1,) * self._axes, (0,) * self._axes
        given = {"stride": (self.stride, ones), "padding": (self.padding, zeros), "dilation": (self.dilation, ones), "groups": (self.groups, 1)}
        given["padding_mode"] = (self.padding_mode, "zeros")
        options = "".join(f", {name}={value}" for name, (value, default) in given.items() if value != default)
        return f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}{options}{'' if self.bias is not None else ', bias=False'}"


class Conv1d(_Convolution):
    """One-dimensional cross-correlation.

    Args:
        in_channels, out_channels: channels before and after.
        kernel_size: of the window.
        stride, dilation: ints.
        padding: so much on both sides; "valid" is none, "same" keeps the length (stride 1).
        groups: channels fall into so many groups that do not mix.
        bias: True if there is one.
        padding_mode: of which values the padding is: "zeros", "reflect", "replicate" or "circular".
        dtype, device: of the parameters.
        generator: draws their first values, uniform in ``±1 / sqrt(fan in)``.

    Shape: (N, in_channels, L) to (N, out_channels, L'); without N too.
    """

    _axes = 1

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Single,
        stride: Single = 1,
        padding: Single | str = 0,
        dilation: Single = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        device: str | None = None,
        dtype: Any = None,
        *,
        generator: Generator | None = None,
    ) -> None:
        super().__init__(in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, dtype, device, generator)

    def forward(self, input: Any) -> Tensor:
        """The correlation of lines with the kernels.

        Args:
            input: (N, in_channels, L) or (in_channels, L).

        Returns:
            (N, out_channels, L') or (out_channels, L').
        """
        x, padding = self._padded(input)
        return functional.conv1d(x, self.weight, self.bias, self.stride[0], padding, self.dilation[0], self.groups)


class Conv2d(_Convolution):
    """Two-dimensional cross-correlation.

    Args:
        in_channels, out_channels: channels before and after.
        kernel_size: of the window, an int or (height, width).
        stride, dilation: the same.
        padding: so much on both sides, an int or (height, width); "valid" is none, "same" keeps the size (stride 1).
        groups: channels fall into so many groups that do not mix.
        bias: True if there is one.
        padding_mode: of which values the padding is: "zeros", "reflect", "replicate" or "circular".
        dtype, device: of the parameters.
        generator: draws their first values, uniform in ``±1 / sqrt(fan in)``.

    Raises:
        ArgumentError: channels that do not divide into `groups`, or another `padding`.

    Shape: (N, in_channels, H, W) to (N, out_channels, H', W'); without N too.
    """

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
        padding_mode: str = "zeros",
        device: str | None = None,
        dtype: Any = None,
        *,
        generator: Generator | None = None,
    ) -> None:
        super().__init__(in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, dtype, device, generator)

    def forward(self, input: Any) -> Tensor:
        """The correlation of images with the kernels.

        Args:
            input: (N, in_channels, H, W) or (in_channels, H, W).

        Returns:
            (N, out_channels, H', W') or (out_channels, H', W').
        """
        x, padding = self._padded(input)
        return functional.conv2d(x, self.weight, self.bias, self.stride, padding, self.dilation, self.groups)  # type: ignore[arg-type]


class _Transposed(_Convolution):
    _transposed = True

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: Any = 1,
        padding_mode: str = "zeros",
        device: str | None = None,
        dtype: Any = None,
        *,
        generator: Generator | None = None,
    ) -> None:
        if isinstance(padding, str):
            raise ArgumentError(f"{type(self).__name__}(padding={padding!r}): expected numbers")
        self.output_padding = self._each(output_padding, "output_padding")
        super().__init__(in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, dtype, device, generator)

    def extra_repr(self) -> str:
        return super().extra_repr() + (f", output_padding={self.output_padding}" if any(self.output_padding) else "")


class ConvTranspose1d(_Transposed):
    """Transposed convolution over lines: the gradient of a convolution by its input, as a layer.

    Args:
        in_channels, out_channels: channels before and after.
        kernel_size: of the window.
        stride, dilation: of that convolution.
        padding: of that convolution: so much is cut off on both sides.
        output_padding: how much longer the output is than the smallest possible; below stride or dilation.
        groups: channels fall into so many groups that do not mix.
        bias: True if there is one.
        padding_mode: "zeros".
        dtype, device: of the parameters.
        generator: draws their first values.

    Shape: (N, in_channels, L) to (N, out_channels, L'); without N too.
    """

    _axes = 1

    def forward(self, input: Any) -> Tensor:
        """The transposed convolution of lines.

        Args:
            input: (N, in_channels, L) or (in_channels, L).

        Returns:
            (N, out_channels, L') or (out_channels, L').
        """
        space: Any = self.padding
        return functional.conv_transpose1d(
            input, self.weight, self.bias, self.stride[0], space, self.output_padding[0], self.groups, self.dilation[0]
        )


class ConvTranspose2d(_Transposed):
    """Transposed convolution over images: the gradient of a convolution by its input, as a layer.

    Args:
        in_channels, out_channels: channels before and after.
        kernel_size: of the window, an int or (height, width), as are the next four.
        stride, dilation: of that convolution.
        padding: of that convolution: so much is cut off on both sides.
        output_padding: how much larger the output is than the smallest possible; below stride or dilation.
        groups: channels fall into so many groups that do not mix.
        bias: True if there is one.
        padding_mode: "zeros".
        dtype, device: of the parameters.
        generator: draws their first values.

    Shape: (N, in_channels, H, W) to (N, out_channels, H', W'); without N too.
    """

    def forward(self, input: Any) -> Tensor:
        """The transposed convolution of images.

        Args:
            input: (N, in_channels, H, W) or (in_channels, H, W).

        Returns:
            (N, out_channels, H', W') or (out_channels, H', W').
        """
        settings: Any = (self.stride, self.padding, self.output_padding, self.groups, self.dilation)
        return functional.conv_transpose2d(input, self.weight, self.bias, *settings)

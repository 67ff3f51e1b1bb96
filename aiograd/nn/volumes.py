"""Layers for volumes, (N, C, D, H, W): convolutions and pooling. Weights and their names are PyTorch's."""

from __future__ import annotations

from typing import Any

from aiograd.errors import ArgumentError
from aiograd.nn import functional
from aiograd.nn.convolution import _Convolution, _Transposed
from aiograd.nn.functional.volumes import Triple
from aiograd.nn.pooling import _AvgPool, _MaxPool
from aiograd.running.random import Generator
from aiograd.tensors.tensor import Tensor


class Conv3d(_Convolution):
    """Three-dimensional cross-correlation.

    Args:
        in_channels, out_channels: channels before and after.
        kernel_size: of the window, an int or (depth, height, width).
        stride, dilation: the same.
        padding: so much on both sides, an int or (depth, height, width); "valid" is none, "same" keeps the size (stride 1).
        groups: channels fall into so many groups that do not mix.
        bias: True if there is one.
        padding_mode: of which values the padding is: "zeros", "reflect", "replicate" or "circular".
        dtype, device: of the parameters.
        generator: draws their first values, uniform in ``±1 / sqrt(fan in)``.

    Raises:
        ArgumentError: channels that do not divide into `groups`, or another `padding`.

    Shape: (N, in_channels, D, H, W) to (N, out_channels, D', H', W'); without N too.
    """

    _axes = 3

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Triple,
        stride: Triple = 1,
        padding: Triple | str = 0,
        dilation: Triple = 1,
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
        """The correlation of volumes with the kernels.

        Args:
            input: (N, in_channels, D, H, W) or (in_channels, D, H, W).

        Returns:
            (N, out_channels, D', H', W') or (out_channels, D', H', W').
        """
        x, padding = self._padded(input)
        return functional.conv3d(x, self.weight, self.bias, self.stride, padding, self.dilation, self.groups)  # type: ignore[arg-type]


class ConvTranspose3d(_Transposed):
    """Transposed convolution over volumes: the gradient of a convolution by its input, as a layer.

    Args:
        in_channels, out_channels: channels before and after.
        kernel_size: of the window, an int or (depth, height, width), as are the next four.
        stride, dilation: of that convolution.
        padding: of that convolution: so much is cut off on both sides.
        output_padding: how much larger the output is than the smallest possible; below stride or dilation.
        groups: channels fall into so many groups that do not mix.
        bias: True if there is one.
        padding_mode: "zeros".
        dtype, device: of the parameters.
        generator: draws their first values.

    Shape: (N, in_channels, D, H, W) to (N, out_channels, D', H', W'); without N too.
    """

    _axes = 3

    def forward(self, input: Any) -> Tensor:
        """The transposed convolution of volumes.

        Args:
            input: (N, in_channels, D, H, W) or (in_channels, D, H, W).

        Returns:
            (N, out_channels, D', H', W') or (out_channels, D', H', W').
        """
        settings: Any = (self.stride, self.padding, self.output_padding, self.groups, self.dilation)
        return functional.conv_transpose3d(input, self.weight, self.bias, *settings)


class MaxPool3d(_MaxPool):
    """The maximum of each window of (N, C, D, H, W) or (C, D, H, W).

    Args:
        kernel_size: of the window, an int or (depth, height, width), as are the next three.
        stride: between windows; None: they lie side by side.
        padding: on both sides, below every value.
        dilation: between the taps of a window.
        return_indices: False; True is refused, since it is there for lines and images only.
        ceil_mode: True if a last window may reach over the edge.

    Raises:
        ArgumentError: `return_indices`.
    """

    def __init__(
        self,
        kernel_size: Triple,
        stride: Triple | None = None,
        padding: Triple = 0,
        dilation: Triple = 1,
        return_indices: bool = False,
        ceil_mode: bool = False,
    ) -> None:
        if return_indices:
            raise ArgumentError("MaxPool3d(return_indices=True): indices are there for lines and images only")
        super().__init__(kernel_size, stride, padding, dilation, False, ceil_mode)

    def forward(self, input: Any) -> Tensor:
        """The maxima.

        Args:
            input: as in the class.

        Returns:
            A Tensor with the axes of `input`.
        """
        return functional.max_pool3d(input, self.kernel_size, self.stride, self.padding, self.dilation, self.ceil_mode)


class AvgPool3d(_AvgPool):
    """The mean of each window of (N, C, D, H, W) or (C, D, H, W).

    Args:
        kernel_size: of the window, an int or (depth, height, width), as are the next two.
        stride: between windows; None: they lie side by side.
        padding: zeros on both sides.
        ceil_mode: True if a last window may reach over the edge.
        count_include_pad: True if padding counts as values.
        divisor_override: the divisor of the sums, instead.
    """

    def __init__(
        self,
        kernel_size: Triple,
        stride: Triple | None = None,
        padding: Triple = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> None:
        super().__init__(kernel_size, stride, padding, ceil_mode, count_include_pad)
        self.divisor_override = divisor_override

    def forward(self, input: Any) -> Tensor:
        """The means.

        Args:
            input: as in the class.

        Returns:
            A Tensor with the axes of `input`.
        """
        settings = (self.kernel_size, self.stride, self.padding, self.ceil_mode, self.count_include_pad, self.divisor_override)
        return functional.avg_pool3d(input, *settings)

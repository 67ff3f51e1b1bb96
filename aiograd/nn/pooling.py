"""Pooling and resampling layers: windows of lines and images, and their size. None has parameters."""

from __future__ import annotations

from typing import Any

from aiograd.nn import functional
from aiograd.nn.functional.convolutions import Single
from aiograd.nn.functional.maps import Pair
from aiograd.nn.module import Module
from aiograd.tensors.tensor import Tensor


class _MaxPool(Module):
    def __init__(
        self, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, return_indices: bool = False, ceil_mode: bool = False
    ) -> None:
        self.kernel_size = kernel_size
        self.stride = stride
        self.padding = padding
        self.dilation = dilation
        self.return_indices = return_indices
        self.ceil_mode = ceil_mode

    def extra_repr(self) -> str:
        more = ", ceil_mode=True" if self.ceil_mode else ""
        return f"kernel_size={self.kernel_size}, stride={self.stride}, padding={self.padding}, dilation={self.dilation}{more}"


class MaxPool1d(_MaxPool):
    """The maximum of each window of (N, C, L) or (C, L).

    Args:
        kernel_size: of the window.
        stride: between windows; None: they lie side by side.
        padding: on both sides, below every value.
        dilation: between the taps of a window.
        return_indices: True to return a pair: the maxima, and where they are.
        ceil_mode: True if a last window may reach over the edge.
    """

    def forward(self, input: Any) -> Any:
        """The maxima.

        Args:
            input: as in the class.

        Returns:
            A Tensor with the axes of `input`; a pair with `return_indices`.
        """
        return functional.max_pool1d(input, self.kernel_size, self.stride, self.padding, self.dilation, self.ceil_mode, self.return_indices)


class MaxPool2d(_MaxPool):
    """The maximum of each window of (N, C, H, W) or (C, H, W).

    Args:
        kernel_size: of the window, an int or (height, width), as are the next three.
        stride: between windows; None: they lie side by side.
        padding: on both sides, below every value.
        dilation: between the taps of a window.
        return_indices: True to return a pair: the maxima, and where they are.
        ceil_mode: True if a last window may reach over the edge.
    """

    def forward(self, input: Any) -> Any:
        """The maxima.

        Args:
            input: as in the class.

        Returns:
            A Tensor with the axes of `input`; a pair with `return_indices`.
        """
        return functional.max_pool2d(input, self.kernel_size, self.stride, self.padding, self.dilation, self.ceil_mode, self.return_indices)


class MaxUnpool2d(Module):
    """Values at the places that ``MaxPool2d(return_indices=True)`` returned, zeros elsewhere.

    Args:
        kernel_size: of that pooling, an int or (height, width), as are the next two.
        stride: of that pooling; None: windows lay side by side.
        padding: of that pooling.
    """

    def __init__(self, kernel_size: Pair, stride: Pair | None = None, padding: Pair = 0) -> None:
        self.kernel_size = kernel_size
        self.stride = stride
        self.padding = padding

    def forward(self, input: Any, indices: Any, output_size: Any = None) -> Tensor:
        """The values at their places.

        Args:
            input: (N, C, H', W') or (C, H', W').
            indices: the places, of the same shape.
            output_size: extents of the result; None: the smallest that the pooling can have had.

        Returns:
            (N, C, H, W) or (C, H, W).
        """
        return functional.max_unpool2d(input, indices, self.kernel_size, self.stride, self.padding, output_size)

    def extra_repr(self) -> str:
        return f"kernel_size={self.kernel_size}, stride={self.stride}, padding={self.padding}"


class _AvgPool(Module):
    def __init__(self, kernel_size: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False, count_include_pad: bool = True) -> None:
        self.kernel_size = kernel_size
        self.stride = stride
        self.padding = padding
        self.ceil_mode = ceil_mode
        self.count_include_pad = count_include_pad

    def extra_repr(self) -> str:
        return f"kernel_size={self.kernel_size}, stride={self.stride}, padding={self.padding}{', ceil_mode=True' if self.ceil_mode else ''}"


class AvgPool1d(_AvgPool):
    """The mean of each window of (N, C, L) or (C, L).

    Args:
        kernel_size: of the window.
        stride: between windows; None: they lie side by side.
        padding: zeros on both sides.
        ceil_mode: True if a last window may reach over the edge.
        count_include_pad: True if padding counts as values.
    """

    def forward(self, input: Any) -> Tensor:
        """The means.

        Args:
            input: as in the class.

        Returns:
            A Tensor with the axes of `input`.
        """
        return functional.avg_pool1d(input, self.kernel_size, self.stride, self.padding, self.ceil_mode, self.count_include_pad)


class AvgPool2d(_AvgPool):
    """The mean of each window of (N, C, H, W) or (C, H, W).

    Args:
        kernel_size: of the window, an int or (height, width), as are the next two.
        stride: between windows; None: they lie side by side.
        padding: zeros on both sides.
        ceil_mode: True if a last window may reach over the edge.
        count_include_pad: True if padding counts as values.
        divisor_override: the divisor of the sums, instead.
    """

    def __init__(
        self,
        kernel_size: Pair,
        stride: Pair | None = None,
        padding: Pair = 0,
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
        return functional.avg_pool2d(
            input, self.kernel_size, self.stride, self.padding, self.ceil_mode, self.count_include_pad, self.divisor_override
        )


class AdaptiveAvgPool1d(Module):
    """Means of so many windows, which share a line (N, C, L) or (C, L) out as evenly as they can.

    Args:
        output_size: how many.
    """

    def __init__(self, output_size: Single) -> None:
        self.output_size = output_size

    def forward(self, input: Any) -> Tensor:
        """The means.

        Args:
            input: as in the class.

        Returns:
            A Tensor with the axes of `input`.
        """
        return functional.adaptive_avg_pool1d(input, self.output_size)

    def extra_repr(self) -> str:
        return f"output_size={self.output_size}"


class AdaptiveAvgPool2d(Module):
    """Means of so many windows, which share an image (N, C, H, W) or (C, H, W) out as evenly as they can.

    Args:
        output_size: (height, width), or one number for both; None keeps what the image has.
    """

    def __init__(self, output_size: int | tuple[int | None, int | None] | None) -> None:
        self.output_size = output_size

    def forward(self, input: Any) -> Tensor:
        """The means.

        Args:
            input: as in the class.

        Returns:
            A Tensor with the axes of `input`.
        """
        return functional.adaptive_avg_pool2d(input, self.output_size)

    def extra_repr(self) -> str:
        return f"output_size={self.output_size}"


class Upsample(Module):
    """Lines or images in another size; see `aiograd.nn.functional.interpolate`.

    Args:
        size: the new extents, or one number for all.
        scale_factor: instead of `size`, times the old extents.
        mode: "nearest", "linear" for lines, "bilinear" for images.
        align_corners: for the last two: True if the first and last pixels keep their places.
    """

    def __init__(self, size: Any = None, scale_factor: Any = None, mode: str = "nearest", align_corners: bool | None = None) -> None:
        self.size = size
        self.scale_factor = scale_factor
        self.mode = mode
        self.align_corners = align_corners

    def forward(self, input: Any) -> Tensor:
        """In the new size.

        Args:
            input: as in the class.

        Returns:
            A Tensor with the axes of `input`.
        """
        return functional.interpolate(input, self.size, self.scale_factor, self.mode, self.align_corners)

    def extra_repr(self) -> str:
        return f"{f'size={self.size}' if self.scale_factor is None else f'scale_factor={self.scale_factor}'}, mode={self.mode!r}"

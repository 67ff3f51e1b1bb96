"""Pooling and resampling layers: windows of lines, images and volumes, and their size. None has parameters."""

from __future__ import annotations

from typing import Any

from aiograd.errors import ArgumentError
from aiograd.nn import functional
from aiograd.nn.function_module import FunctionModule
from aiograd.nn.functional.convolutions import Single
from aiograd.nn.functional.maps import Pair
from aiograd.nn.functional.volumes import Triple
from aiograd.tensors.tensor import Tensor


class _Windows(FunctionModule):
    def extra_repr(self) -> str:
        shown = ("kernel_size", "stride", "padding", "dilation")
        more = ", ceil_mode=True" if vars(self).get("ceil_mode") else ""
        return ", ".join(f"{name}={getattr(self, name)}" for name in shown if name in self._settings) + more


class MaxPool1d(_Windows, function=functional.max_pool1d):
    """`max_pool1d` as a module.

    >>> ag.nn.MaxPool1d(2)(ag.tensor([[1.0, 3.0, 2.0, 4.0]]))
    tensor([[3., 4.]])
    """

    kernel_size: Single
    stride: Single | None = None
    padding: Single = 0
    dilation: Single = 1
    return_indices: bool = False
    ceil_mode: bool = False


class MaxPool2d(_Windows, function=functional.max_pool2d):
    """`max_pool2d` as a module.

    >>> values, places = ag.nn.MaxPool2d(2, return_indices=True)(ag.tensor([[[1.0, 3.0], [2.0, 4.0]]]))
    >>> values, places
    (tensor([[[4.]]]), tensor([[[3]]]))
    """

    kernel_size: Pair
    stride: Pair | None = None
    padding: Pair = 0
    dilation: Pair = 1
    return_indices: bool = False
    ceil_mode: bool = False


class MaxPool3d(_Windows, function=functional.max_pool3d):
    """`max_pool3d` as a module.

    Raises:
        ArgumentError: `return_indices`.

    >>> ag.nn.MaxPool3d(2)(ag.ones(1, 3, 4, 4, 4)).shape
    (1, 3, 2, 2, 2)
    """

    kernel_size: Triple
    stride: Triple | None = None
    padding: Triple = 0
    dilation: Triple = 1
    return_indices: bool = False
    ceil_mode: bool = False

    def __post_init__(self) -> None:
        if self.return_indices:
            raise ArgumentError("MaxPool3d(return_indices=True): indices are there for lines and images only")


class MaxUnpool2d(_Windows, function=functional.max_unpool2d):
    """`max_unpool2d` as a module.

    >>> ag.nn.MaxUnpool2d(2)(ag.tensor([[[4.0]]]), ag.tensor([[[3]]]))
    tensor([[[0., 0.],
             [0., 4.]]])
    """

    kernel_size: Pair
    stride: Pair | None = None
    padding: Pair = 0

    def forward(self, input: Any, indices: Any, output_size: Any = None) -> Tensor:  # type: ignore[override]
        """The values at their places.

        Args:
            input: (N, C, H', W') or (C, H', W').
            indices: the places, of the same shape.
            output_size: extents of the result; None: the smallest that the pooling can have had.

        Returns:
            (N, C, H, W) or (C, H, W).
        """
        return self._call(input, indices, output_size=output_size)  # type: ignore[no-any-return]


class AvgPool1d(_Windows, function=functional.avg_pool1d):
    """`avg_pool1d` as a module.

    >>> ag.nn.AvgPool1d(2)(ag.tensor([[1.0, 3.0, 2.0, 4.0]]))
    tensor([[2., 3.]])
    """

    kernel_size: Single
    stride: Single | None = None
    padding: Single = 0
    ceil_mode: bool = False
    count_include_pad: bool = True


class AvgPool2d(_Windows, function=functional.avg_pool2d):
    """`avg_pool2d` as a module.

    >>> ag.nn.AvgPool2d(2)(ag.tensor([[[1.0, 3.0], [2.0, 4.0]]]))
    tensor([[[2.5]]])
    """

    kernel_size: Pair
    stride: Pair | None = None
    padding: Pair = 0
    ceil_mode: bool = False
    count_include_pad: bool = True
    divisor_override: int | None = None


class AvgPool3d(_Windows, function=functional.avg_pool3d):
    """`avg_pool3d` as a module.

    >>> ag.nn.AvgPool3d(2)(ag.ones(1, 3, 4, 4, 4)).shape
    (1, 3, 2, 2, 2)
    """

    kernel_size: Triple
    stride: Triple | None = None
    padding: Triple = 0
    ceil_mode: bool = False
    count_include_pad: bool = True
    divisor_override: int | None = None


class AdaptiveAvgPool1d(FunctionModule, function=functional.adaptive_avg_pool1d):
    """`adaptive_avg_pool1d` as a module.

    >>> ag.nn.AdaptiveAvgPool1d(2)(ag.tensor([[1.0, 3.0, 2.0, 4.0]]))
    tensor([[2., 3.]])
    """

    output_size: Single


class AdaptiveAvgPool2d(FunctionModule, function=functional.adaptive_avg_pool2d):
    """`adaptive_avg_pool2d` as a module.

    >>> ag.nn.AdaptiveAvgPool2d((1, 2))(ag.ones(1, 3, 5, 5)).shape
    (1, 3, 1, 2)
    """

    output_size: int | tuple[int | None, int | None] | None


class Upsample(FunctionModule, function=functional.interpolate):
    """`interpolate` as a module.

    >>> ag.nn.Upsample(scale_factor=2)(ag.tensor([[[1.0, 2.0]]]))
    tensor([[[1., 1., 2., 2.]]])
    """

    size: Any = None
    scale_factor: Any = None
    mode: str = "nearest"
    align_corners: bool | None = None

    def extra_repr(self) -> str:
        return f"{f'size={self.size}' if self.scale_factor is None else f'scale_factor={self.scale_factor}'}, mode={self.mode!r}"

"""Convolutions over lines, images and volumes, and transposed ones. Weights and their names are PyTorch's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, TypeAlias

from aiograd.errors import ArgumentError
from aiograd.kernels.window import pair
from aiograd.nn import functional, init
from aiograd.nn.functional.convolutions import single
from aiograd.nn.functional.documentation import put_behind_first_line
from aiograd.nn.functional.volumes import triple
from aiograd.nn.linear import new_parameter
from aiograd.nn.module import Module
from aiograd.nn.parameter import Parameter
from aiograd.running.random import Generator
from aiograd.tensors.tensor import Tensor

#: an int, or one for each axis
Size: TypeAlias = int | tuple[int, ...]

_PADDING_MODES = ("zeros", "reflect", "replicate", "circular")
_EXTENTS = ("L", "H, W", "D, H, W")

_CONVOLUTION = """Args:
    in_channels, out_channels: channels before and after.
    kernel_size: extents of the window, an int or one for each axis.
    stride: distance of windows, an int or one for each axis.
    padding: border on both sides, an int or one for each axis; "valid" is none, "same" keeps the extents (stride 1).
    dilation: distance of the elements of a window, an int or one for each axis.
    groups: channels fall into so many groups that do not mix.
    bias: True if there is one.
    padding_mode: the values of the border: "zeros", "reflect", "replicate" or "circular".
    dtype, device: dtype and device of the parameters.
    generator: draws their first values, uniform in ``±1 / sqrt(fan in)``.

Raises:
    ArgumentError: channels that do not divide into `groups`, or another `padding`."""

_TRANSPOSED = """Args:
    in_channels, out_channels: channels before and after.
    kernel_size: extents of the window, an int or one for each axis, as are the next four.
    stride, dilation: stride and dilation of the convolution that this one is the gradient of.
    padding: padding of that convolution: so much is cut off on both sides.
    output_padding: the number by which the output is longer than the shortest possible; below stride or dilation.
    groups: channels fall into so many groups that do not mix.
    bias: True if there is one.
    padding_mode: "zeros".
    dtype, device: dtype and device of the parameters.
    generator: draws their first values, uniform in ``±1 / sqrt(fan in)``.

Raises:
    ArgumentError: channels that do not divide into `groups`, or `padding` or `padding_mode` of another kind."""


class _Convolution(Module):
    weight: Parameter
    bias: Parameter | None
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...] | str
    dilation: tuple[int, ...]

    #: axes that the window moves along
    _axes: ClassVar[int]
    _transposed: ClassVar[bool] = False
    _arguments: ClassVar[str] = _CONVOLUTION
    _function: ClassVar[Callable[..., Tensor]]

    def __init_subclass__(cls, *, axes: int = 0, function: Callable[..., Tensor] | None = None) -> None:
        if function is not None:
            cls._axes, cls._function = axes, staticmethod(function)
            extents = _EXTENTS[axes - 1]
            after = extents.replace(",", "',") + "'"
            shape = f"Shape: (N, in_channels, {extents}) to (N, out_channels, {after}); without N too."
            put_behind_first_line(cls, f"{cls._arguments}\n\n{shape}")

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: Size | str = 0,
        dilation: Size = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        device: str | None = None,
        dtype: Any = None,
        *,
        generator: Generator | None = None,
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
        """Draw new values, uniform in ``±1 / sqrt(fan in)``.

        Args:
            generator: where the numbers come from; None: the default generator.
        """
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

    def forward(self, input: Any) -> Tensor:
        x, padding = self._padded(input)
        return self._function(x, self.weight, self.bias, self.stride, padding, self.dilation, self.groups)

    def extra_repr(self) -> str:
        ones, zeros = (1,) * self._axes, (0,) * self._axes
        given = {"stride": (self.stride, ones), "padding": (self.padding, zeros), "dilation": (self.dilation, ones), "groups": (self.groups, 1)}
        given["padding_mode"] = (self.padding_mode, "zeros")
        options = "".join(f", {name}={value}" for name, (value, default) in given.items() if value != default)
        return f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}{options}{'' if self.bias is not None else ', bias=False'}"


class Conv1d(_Convolution, axes=1, function=functional.conv1d):
    """One-dimensional cross-correlation.

    >>> ag.nn.Conv1d(2, 4, kernel_size=3)(ag.ones(1, 2, 5)).shape
    (1, 4, 3)
    """


class Conv2d(_Convolution, axes=2, function=functional.conv2d):
    """Two-dimensional cross-correlation.

    >>> ag.nn.Conv2d(2, 4, kernel_size=3)(ag.ones(1, 2, 5, 5)).shape
    (1, 4, 3, 3)
    """


class Conv3d(_Convolution, axes=3, function=functional.conv3d):
    """Three-dimensional cross-correlation.

    >>> ag.nn.Conv3d(2, 4, kernel_size=3)(ag.ones(1, 2, 5, 5, 5)).shape
    (1, 4, 3, 3, 3)
    """


class _Transposed(_Convolution):
    _transposed = True
    _arguments = _TRANSPOSED

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: Size = 0,
        output_padding: Size = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: Size = 1,
        padding_mode: str = "zeros",
        device: str | None = None,
        dtype: Any = None,
        *,
        generator: Generator | None = None,
    ) -> None:
        if isinstance(padding, str):
            raise ArgumentError(f"{type(self).__name__}(padding={padding!r}): expected numbers")
        self.output_padding: tuple[int, ...] = self._each(output_padding, "output_padding")
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, device, dtype, generator=generator
        )

    def forward(self, input: Any) -> Tensor:
        settings = (self.stride, self.padding, self.output_padding, self.groups, self.dilation)
        return self._function(input, self.weight, self.bias, *settings)

    def extra_repr(self) -> str:
        return super().extra_repr() + (f", output_padding={self.output_padding}" if any(self.output_padding) else "")


class ConvTranspose1d(_Transposed, axes=1, function=functional.conv_transpose1d):
    """Transposed convolution over lines: the gradient of a convolution by its input, as a layer.

    >>> ag.nn.ConvTranspose1d(2, 4, kernel_size=3, stride=2)(ag.ones(1, 2, 5)).shape
    (1, 4, 11)
    """


class ConvTranspose2d(_Transposed, axes=2, function=functional.conv_transpose2d):
    """Transposed convolution over images: the gradient of a convolution by its input, as a layer.

    >>> ag.nn.ConvTranspose2d(2, 4, kernel_size=3, stride=2)(ag.ones(1, 2, 5, 5)).shape
    (1, 4, 11, 11)
    """


class ConvTranspose3d(_Transposed, axes=3, function=functional.conv_transpose3d):
    """Transposed convolution over volumes: the gradient of a convolution by its input, as a layer.

    >>> ag.nn.ConvTranspose3d(2, 4, kernel_size=3, stride=2)(ag.ones(1, 2, 5, 5, 5)).shape
    (1, 4, 11, 11, 11)
    """

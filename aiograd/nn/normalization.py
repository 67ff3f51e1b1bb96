"""Layers that give their input mean 0 and variance 1 over some axes, then scale and shift it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from aiograd.array_functions.conversion import as_tensor
from aiograd.array_functions.creation import ones, zeros
from aiograd.errors import ArgumentError, ShapeError
from aiograd.nn import functional, init
from aiograd.nn.functional.documentation import put_behind_first_line
from aiograd.nn.linear import new_parameter
from aiograd.nn.module import Module
from aiograd.nn.parameter import Parameter
from aiograd.tensors import inplace
from aiograd.tensors.tensor import Tensor


def _shape(normalized_shape: int | Sequence[int]) -> tuple[int, ...]:
    return (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)


class LayerNorm(Module):
    """Mean 0 and variance 1 over the last axes of an input of any shape.

    Args:
        normalized_shape: extents of those axes.
        eps: added to the variance.
        elementwise_affine: True to scale and shift by parameters, ones and zeros at first.
        bias: True to shift.
        dtype, device: of the parameters.

    >>> ag.nn.LayerNorm(3)(ag.tensor([[0.0, 2.0, 4.0]])).detach()
    tensor([[-1.2247427,  0.       ,  1.2247427]])
    """

    weight: Parameter | None
    bias: Parameter | None

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: str | None = None,
        dtype: Any = None,
    ) -> None:
        self.normalized_shape: tuple[int, ...] = _shape(normalized_shape)
        self.eps = eps
        self.weight = new_parameter(self.normalized_shape, dtype, device) if elementwise_affine else None
        self.bias = new_parameter(self.normalized_shape, dtype, device) if elementwise_affine and bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Scale by 1, shift by 0."""
        if self.weight is not None:
            init.ones_(self.weight)
        if self.bias is not None:
            init.zeros_(self.bias)

    def forward(self, input: Any) -> Tensor:
        return functional.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.weight is not None}"


class RMSNorm(Module):
    """Root mean square 1 over the last axes of an input of any shape.

    Args:
        normalized_shape: extents of those axes.
        eps: added to the mean square; None: the machine epsilon of the dtype.
        elementwise_affine: True to scale by a parameter, ones at first.
        dtype, device: of the parameter.

    >>> ag.nn.RMSNorm(2)(ag.tensor([[3.0, 4.0]])).detach()
    tensor([[0.84852815, 1.1313709 ]])
    """

    weight: Parameter | None

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: str | None = None,
        dtype: Any = None,
    ) -> None:
        self.normalized_shape: tuple[int, ...] = _shape(normalized_shape)
        self.eps = eps
        self.weight = new_parameter(self.normalized_shape, dtype, device) if elementwise_affine else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Scale by 1."""
        if self.weight is not None:
            init.ones_(self.weight)

    def forward(self, input: Any) -> Tensor:
        return functional.rms_norm(input, self.normalized_shape, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.weight is not None}"


class GroupNorm(Module):
    """Mean 0 and variance 1 over groups of channels of each sample.

    Args:
        num_groups: how many groups; divides `num_channels`.
        num_channels: extent of the second axis.
        eps: added to the variance.
        affine: True to scale and shift each channel by parameters, ones and zeros at first.
        dtype, device: of the parameters.

    Raises:
        ArgumentError: channels that do not divide into groups.

    Shape: (N, C, ...).

    >>> ag.nn.GroupNorm(2, 4)(ag.ones(1, 4, 8)).shape
    (1, 4, 8)
    """

    weight: Parameter | None
    bias: Parameter | None

    def __init__(
        self, num_groups: int, num_channels: int, eps: float = 1e-5, affine: bool = True, device: str | None = None, dtype: Any = None
    ) -> None:
        if num_groups < 1 or num_channels % num_groups:
            raise ArgumentError(f"GroupNorm({num_groups}, {num_channels}): expected channels divisible by the number of groups")
        self.num_groups = num_groups
        self.num_channels = num_channels
        self.eps = eps
        self.weight = init.ones_(new_parameter((num_channels,), dtype, device)) if affine else None
        self.bias = new_parameter((num_channels,), dtype, device) if affine else None

    def forward(self, input: Any) -> Tensor:
        return functional.group_norm(input, self.num_groups, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.num_groups}, {self.num_channels}, eps={self.eps}, affine={self.weight is not None}"


def _count(batches: Tensor) -> None:
    """One more batch."""
    inplace.write(batches, batches._data + 1)


_ARGUMENTS = """Args:
    num_features: extent of the channels' axis.
    eps: added to the variance.
    momentum: the part of the running statistics that a batch replaces{ends}.
    affine: True to scale and shift each channel by parameters, ones and zeros at first.
    track_running_stats: {evaluation}.
    dtype, device: dtype and device of parameters and buffers."""


class _BatchNorm(Module):
    weight: Parameter | None
    bias: Parameter | None
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None

    #: numbers of axes of an input
    _ndims: tuple[int, ...] = ()
    _arguments: ClassVar[str] = _ARGUMENTS.format(
        ends="; None: their plain average", evaluation="True to keep running statistics; without them evaluation measures too"
    )

    def __init_subclass__(cls, *, ndims: tuple[int, ...] | None = None) -> None:
        if ndims is not None:
            cls._ndims = ndims
            put_behind_first_line(cls, cls._arguments)

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: str | None = None,
        dtype: Any = None,
    ) -> None:
        self.num_features = num_features
        self.eps = eps
        self.momentum = momentum
        self.weight = init.ones_(new_parameter((num_features,), dtype, device)) if affine else None
        self.bias = new_parameter((num_features,), dtype, device) if affine else None
        self.register_buffer("running_mean", zeros(num_features, dtype=dtype, device=device) if track_running_stats else None)
        self.register_buffer("running_var", ones(num_features, dtype=dtype, device=device) if track_running_stats else None)
        self.register_buffer("num_batches_tracked", zeros((), dtype=np.int64) if track_running_stats else None)

    def forward(self, input: Tensor) -> Tensor:
        """The normalised input; in training the running statistics move."""
        if input.ndim not in self._ndims or input.shape[1] != self.num_features:
            raise ShapeError(
                f"{type(self).__name__}({self.num_features}): found an input of shape {list(input.shape)}, "
                f"expected {self.num_features} channels in the second of {' or '.join(map(str, self._ndims))} axes"
            )
        measures = self.training or self.running_mean is None
        momentum = self._next_momentum() if self.training and self.num_batches_tracked is not None else 0.0
        mean, var = (self.running_mean, self.running_var) if not measures or momentum else (None, None)
        return self._normalize(input, mean, var, self.weight, self.bias, measures, momentum, self.eps)

    def _next_momentum(self) -> float:
        """Count one more batch; how much of the running statistics it replaces."""
        batches: Any = self.num_batches_tracked
        inplace.perform("count", functools.partial(_count, batches))
        return 1.0 / batches.item() if self.momentum is None else self.momentum

    def _normalize(self, *given: Any) -> Tensor:
        return functional.batch_norm(*given)

    def extra_repr(self) -> str:
        tracks = self.running_mean is not None
        return f"{self.num_features}, eps={self.eps}, momentum={self.momentum}, affine={self.weight is not None}, track_running_stats={tracks}"


class BatchNorm1d(_BatchNorm, ndims=(2, 3)):
    """Mean 0 and variance 1 per channel over the batch; in evaluation by running statistics.

    Shape: (N, C) or (N, C, L).

    >>> norm = ag.nn.BatchNorm1d(1)
    >>> norm(ag.tensor([[1.0], [3.0]])).detach()
    tensor([[-0.999995],
            [ 0.999995]])
    >>> norm.running_mean
    tensor([0.2])
    """


class BatchNorm2d(_BatchNorm, ndims=(4,)):
    """Mean 0 and variance 1 per channel over the batch; in evaluation by running statistics.

    Shape: (N, C, H, W).

    >>> ag.nn.BatchNorm2d(3)(ag.ones(2, 3, 4, 4)).shape
    (2, 3, 4, 4)
    """


class BatchNorm3d(_BatchNorm, ndims=(5,)):
    """Mean 0 and variance 1 per channel over the batch; in evaluation by running statistics.

    Shape: (N, C, D, H, W).

    >>> ag.nn.BatchNorm3d(3)(ag.ones(2, 3, 4, 4, 4)).shape
    (2, 3, 4, 4, 4)
    """


class _InstanceNorm(_BatchNorm):
    _arguments = _ARGUMENTS.format(ends="", evaluation="True to keep running statistics and use them in evaluation")

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = False,
        track_running_stats: bool = False,
        device: str | None = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, dtype=dtype, device=device)

    def forward(self, input: Any) -> Tensor:
        """The normalised input; with running statistics, these move in training and are used in evaluation."""
        x = as_tensor(input)
        return super().forward(x.unsqueeze(0)).squeeze(0) if x.ndim == self._ndims[0] - 1 else super().forward(x)

    def _next_momentum(self) -> float:
        return self.momentum or 0.0  # as in PyTorch, batches are not counted

    def _normalize(self, *given: Any) -> Tensor:
        return functional.instance_norm(*given)


class InstanceNorm1d(_InstanceNorm, ndims=(3,)):
    """Mean 0 and variance 1 per channel of each sample.

    Shape: (N, C, L) or (C, L).

    >>> ag.nn.InstanceNorm1d(2)(ag.tensor([[[1.0, 3.0], [0.0, 8.0]]]))
    tensor([[[-0.999995  ,  0.999995  ],
             [-0.99999976,  0.99999976]]])
    """


class InstanceNorm2d(_InstanceNorm, ndims=(4,)):
    """Mean 0 and variance 1 per channel of each sample.

    Shape: (N, C, H, W) or (C, H, W).

    >>> ag.nn.InstanceNorm2d(3)(ag.ones(2, 3, 4, 4)).shape
    (2, 3, 4, 4)
    """


class InstanceNorm3d(_InstanceNorm, ndims=(5,)):
    """Mean 0 and variance 1 per channel of each sample.

    Shape: (N, C, D, H, W) or (C, D, H, W).

    >>> ag.nn.InstanceNorm3d(3)(ag.ones(2, 3, 4, 4, 4)).shape
    (2, 3, 4, 4, 4)
    """

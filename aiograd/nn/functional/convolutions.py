"""Convolution along one axis, and transposed convolution, as functions.

A line is an image of height 1. A transposed convolution is the row that is the gradient of a convolution by its input.
"""

from __future__ import annotations

import sys
from typing import Any, TypeAlias

from aiograd.array_functions.conversion import ArrayLike, as_tensor, row
from aiograd.array_functions.manipulation import pad
from aiograd.errors import ArgumentError, ShapeError
from aiograd.kernels.window import pair
from aiograd.nn.functional.documentation import document
from aiograd.nn.functional.maps import Pair, batched, conv2d
from aiograd.tensors.record import call
from aiograd.tensors.tensor import Tensor

#: an int, or a tuple of one
Single: TypeAlias = int | tuple[int]

_transposed = row("conv2d_input_grad")


def single(value: Any, name: str) -> int:
    """``(3,)`` means 3.

    Raises:
        ArgumentError: neither an int nor one int.
    """
    if isinstance(value, (tuple, list)):
        if len(value) != 1:
            raise ArgumentError(f"{name}={value!r}: expected an int")
        return int(value[0])
    return int(value)


def flat(value: Any, name: str, other: int) -> tuple[int, int]:
    """A setting of a line as a setting of an image: `other` for the height."""
    return other, single(value, name)


def as_plane(name: str, input: ArrayLike) -> Tensor:
    """Lines (N, C, L) or (C, L) as images of height 1.

    Raises:
        ShapeError: they are no lines.
    """
    x = as_tensor(input)
    if x.ndim not in (2, 3):
        raise ShapeError(f"{name}: found shape {list(x.shape)}, expected (N, C, L) or (C, L)")
    return x.unsqueeze(-2)


def _kernel(name: str, weight: ArrayLike) -> Tensor:
    kernel = as_tensor(weight)
    if kernel.ndim != 3:
        raise ShapeError(f"{name}: weight has shape {list(kernel.shape)}, expected three axes")
    return kernel.unsqueeze(-2)


def conv1d(
    input: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None = None,
    stride: Single = 1,
    padding: Single | str = 0,
    dilation: Single = 1,
    groups: int = 1,
) -> Tensor:
    """One-dimensional cross-correlation."""
    space: Any = padding if isinstance(padding, str) else flat(padding, "padding", 0)
    image, kernel = as_plane("conv1d", input), _kernel("conv1d", weight)
    return conv2d(image, kernel, bias, flat(stride, "stride", 1), space, flat(dilation, "dilation", 1), groups).squeeze(-2)


def conv_transpose2d(
    input: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None = None,
    stride: Pair = 1,
    padding: Pair = 0,
    output_padding: Pair = 0,
    groups: int = 1,
    dilation: Pair = 1,
) -> Tensor:
    """Transposed convolution: the gradient of `conv2d` with the same weight by its input, taken of `input`.

    An extent of the result is ``(extent - 1) * stride - 2 * padding + dilation * (kernel - 1) + output_padding + 1``.

    Raises:
        ArgumentError: numbers that make no sense.
        ShapeError: shapes that do not fit.
    """
    x, alone = batched("conv_transpose2d", input)
    kernel = as_tensor(weight)
    if kernel.ndim != 4:
        raise ShapeError(f"conv_transpose2d: weight has shape {list(kernel.shape)}, expected (in, out / groups, kh, kw)")
    steps, space, apart = pair(stride, "stride"), pair(padding, "padding"), pair(dilation, "dilation")
    extra = pair(output_padding, "output_padding")
    if any(not 0 <= e < max(s, d) for e, s, d in zip(extra, steps, apart, strict=True)):
        raise ArgumentError(f"conv_transpose2d: output_padding {extra}, expected numbers from 0 to below the stride {steps} or the dilation {apart}")
    size = tuple(
        (n - 1) * s - 2 * p + d * (k - 1) + e + 1 for n, s, p, d, k, e in zip(x.shape[2:], steps, space, apart, kernel.shape[2:], extra, strict=True)
    )
    if min(size) < 1:
        raise ShapeError(f"conv_transpose2d: an input of {list(x.shape)} gives an output of size {size}: use less padding")
    # a convolution of an output that is longer than the input by a stride or more would have more windows than the input has elements, so there
    # the row makes what all windows cover, and the ends are cut off and added here
    covers = [e >= s for e, s in zip(extra, steps, strict=True)]
    whole = tuple((n - 1) * s + d * (k - 1) + 1 for n, s, d, k in zip(x.shape[2:], steps, apart, kernel.shape[2:], strict=True))
    made = tuple(w if c else n for c, w, n in zip(covers, whole, size, strict=True))
    cut = tuple(0 if c else p for c, p in zip(covers, space, strict=True))
    out: Tensor = call(_transposed, (x, kernel), {"input_size": made, "stride": steps, "padding": cut, "dilation": apart, "groups": groups})
    if any(covers):
        ends = tuple(p + n if c else n for c, p, n in zip(covers, space, size, strict=True))
        behind = tuple(min(max(e - m, 0), n) for e, m, n in zip(ends, made, size, strict=True))
        out = out[(..., *(slice(e - n, e) for e, n in zip(ends, size, strict=True)))]
        out = pad(out, ((0, 0), (0, 0), *((0, b) for b in behind)))
    if bias is not None:
        out = out + as_tensor(bias).reshape((-1, 1, 1))
    return out.squeeze(0) if alone else out


def conv_transpose1d(
    input: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None = None,
    stride: Single = 1,
    padding: Single = 0,
    output_padding: Single = 0,
    groups: int = 1,
    dilation: Single = 1,
) -> Tensor:
    """Transposed convolution along one axis, as `conv_transpose2d`."""
    return conv_transpose2d(
        as_plane("conv_transpose1d", input), _kernel("conv_transpose1d", weight), bias, flat(stride, "stride", 1), flat(padding, "padding", 0),
        flat(output_padding, "output_padding", 0), groups, flat(dilation, "dilation", 1),
    ).squeeze(-2)


document(sys.modules[__name__])

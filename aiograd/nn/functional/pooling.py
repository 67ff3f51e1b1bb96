"""Maxima and means of windows as functions. Images are (N, C, H, W) or (C, H, W), lines (N, C, L) or (C, L).

Note [Windows over the edge]
    With ``ceil_mode`` a last window may reach beyond the padding, if it begins in the input or the padding before it. The rows do not:
    the input grows to the end of the window, below every value for a maximum, zeros for a mean, and a mean is multiplied by the
    taps of a whole window over the taps that count.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any, Literal, overload

import numpy as np

from aiograd.array_functions.conversion import ArrayLike, as_tensor, row
from aiograd.array_functions.creation import zeros
from aiograd.array_functions.manipulation import pad as pad_axes
from aiograd.array_functions.scattering import scatter
from aiograd.array_functions.searching import where
from aiograd.errors import ArgumentError, ShapeError
from aiograd.kernels.pooling import max_pool
from aiograd.kernels.window import Window, pair
from aiograd.nn.functional.convolutions import Single, as_plane, flat
from aiograd.nn.functional.documentation import document
from aiograd.nn.functional.maps import Pair, batched
from aiograd.ops.nn_pooling import pool_window
from aiograd.tensors.core import make
from aiograd.tensors.record import call
from aiograd.tensors.tensor import Tensor

_max_pool2d, _avg_pool2d = row("max_pool2d"), row("avg_pool2d")


def _beyond(length: int, size: int, stride: int, padding: int, dilation: int) -> int:
    """How far the last window of ``ceil_mode`` reaches beyond the padding; see Note [Windows over the edge]."""
    reach = dilation * (size - 1) + 1
    windows = -((reach - length - 2 * padding) // stride) + 1
    if (windows - 1) * stride >= length + padding:
        windows -= 1
    return max((windows - 1) * stride + reach - length - 2 * padding, 0)


def _grown(x: Tensor, size: Pair, stride: Pair | None, padding: Pair, dilation: Pair, value: float) -> Tensor:
    sizes = pair(size, "kernel_size")
    settings = (sizes, pair(size if stride is None else stride, "stride"), pair(padding, "padding"), pair(dilation, "dilation"))
    more = [_beyond(*each) for each in zip(x.shape[2:], *settings, strict=True)]
    return pad_axes(x, [(0, 0), (0, 0), *((0, n) for n in more)], value=value) if any(more) else x


@overload
def max_pool2d(
    input: ArrayLike,
    kernel_size: Pair,
    stride: Pair | None = None,
    padding: Pair = 0,
    dilation: Pair = 1,
    ceil_mode: bool = False,
    return_indices: Literal[False] = False,
) -> Tensor: ...
@overload
def max_pool2d(
    input: ArrayLike,
    kernel_size: Pair,
    stride: Pair | None = None,
    padding: Pair = 0,
    dilation: Pair = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any: ...
def max_pool2d(
    input: ArrayLike,
    kernel_size: Pair,
    stride: Pair | None = None,
    padding: Pair = 0,
    dilation: Pair = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """The maximum of each window; windows lie side by side unless a stride is given."""
    x, alone = batched("max_pool2d", input)
    width = x.shape[3]
    if ceil_mode:
        x = _grown(x, kernel_size, stride, padding, dilation, -math.inf)
    out: Tensor = call(_max_pool2d, (x,), {"kernel_size": kernel_size, "stride": stride, "padding": padding, "dilation": dilation})
    values = out.squeeze(0) if alone else out
    if not return_indices:
        return values
    places = make(_places(x.detach().cpu().numpy(), pool_window(kernel_size, stride, padding, dilation), width)).to(x.device)
    return values, places.squeeze(0) if alone else places


def _places(x: Any, window: Window, width: int) -> Any:
    """The place of the maximum of each window in its plane, with rows of `width`."""
    taps = max_pool(x, window)[1].astype(np.int64)
    rows, columns = (
        np.arange(count)[place] * s - p + tap * d
        for count, place, s, p, tap, d in zip(
            taps.shape[2:], ((slice(None), None), (None, slice(None))), window.stride, window.padding, divmod(taps, window.size[1]), window.dilation,
            strict=True,
        )
    )  # fmt: skip
    return rows * width + columns


def max_unpool2d(
    input: ArrayLike, indices: ArrayLike, kernel_size: Pair, stride: Pair | None = None, padding: Pair = 0, output_size: Sequence[int] | None = None
) -> Tensor:
    """Values at the places that `max_pool2d` returned, zeros elsewhere.

    Args:
        input: (N, C, H', W') or (C, H', W').
        indices: of the same shape, as ``max_pool2d(return_indices=True)`` returns them; no place twice.
        kernel_size, stride, padding: of that pooling.
        output_size: extents of the result, of which the last two count; None: the smallest that the pooling can have had.

    Returns:
        (N, C, H, W) or (C, H, W).

    Raises:
        ShapeError: shapes that do not fit. IndexRangeError: a place outside of the plane.
    """
    x, alone = batched("max_unpool2d", input)
    places = as_tensor(indices)
    if places.shape != (x.shape[1:] if alone else x.shape):
        raise ShapeError(f"max_unpool2d: found an input of shape {list(np.shape(input))} and indices of {list(places.shape)}; expected one shape")
    window = pool_window(kernel_size, stride, padding)
    smallest = [(n - 1) * s - 2 * p + k for n, s, p, k in zip(x.shape[2:], window.stride, window.padding, window.size, strict=True)]
    wanted = smallest if output_size is None else [int(n) for n in output_size[-2:]]
    if len(wanted) != 2 or any(not n - s < m < n + s for n, m, s in zip(smallest, wanted, window.stride, strict=True)):
        raise ShapeError(f"max_unpool2d: output_size {output_size!r}, expected extents within a stride {window.stride} of {smallest}")
    flat = zeros((*x.shape[:2], wanted[0] * wanted[1]), dtype=x.dtype, device=x.device)
    out = scatter(flat, 2, places.reshape(*x.shape[:2], -1), x.reshape(*x.shape[:2], -1)).reshape(*x.shape[:2], *wanted)
    return out.squeeze(0) if alone else out


def avg_pool2d(
    input: ArrayLike,
    kernel_size: Pair,
    stride: Pair | None = None,
    padding: Pair = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    """The mean of each window; windows lie side by side unless a stride is given.

    Raises:
        ArgumentError: the divisor is 0.
    """
    x, alone = batched("avg_pool2d", input)
    options: dict[str, Any] = {"kernel_size": kernel_size, "stride": stride, "padding": padding}
    if divisor_override is not None and divisor_override < 1:
        raise ArgumentError(f"avg_pool2d(divisor_override={divisor_override}): expected a number above 0")
    if not ceil_mode and divisor_override is None:
        out: Tensor = call(_avg_pool2d, (x,), {**options, "count_include_pad": count_include_pad})
        return out.squeeze(0) if alone else out
    grown = _grown(x, kernel_size, stride, padding, 1, 0.0) if ceil_mode else x
    out = call(_avg_pool2d, (grown,), {**options, "count_include_pad": True})
    sizes, steps = pair(kernel_size, "kernel_size"), pair(kernel_size if stride is None else stride, "stride")
    counts = [
        _counts(*each, count_include_pad) for each in zip(x.shape[2:], out.shape[2:], sizes, steps, pair(padding, "padding"), strict=True)
    ]
    divisor: Any = np.multiply.outer(*counts) if divisor_override is None else divisor_override
    factor = as_tensor(np.asarray(math.prod(sizes) / divisor, x.dtype)).to(x.device)
    out = out * factor
    return out.squeeze(0) if alone else out


def _counts(length: int, windows: int, size: int, stride: int, padding: int, with_padding: bool) -> Any:
    """How many taps of each window along one axis count."""
    starts = np.arange(windows) * stride - padding
    low, high = (-padding, length + padding) if with_padding else (0, length)
    return np.minimum(starts + size, high) - np.maximum(starts, low)


def max_pool1d(
    input: ArrayLike,
    kernel_size: Single,
    stride: Single | None = None,
    padding: Single = 0,
    dilation: Single = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """The maximum of each window of lines; as `max_pool2d`."""
    steps = None if stride is None else flat(stride, "stride", 1)
    size, space, apart = flat(kernel_size, "kernel_size", 1), flat(padding, "padding", 0), flat(dilation, "dilation", 1)
    found = max_pool2d(as_plane("max_pool1d", input), size, steps, space, apart, ceil_mode, return_indices)
    return tuple(each.squeeze(-2) for each in found) if return_indices else found.squeeze(-2)


def avg_pool1d(
    input: ArrayLike, kernel_size: Single, stride: Single | None = None, padding: Single = 0, ceil_mode: bool = False, count_include_pad: bool = True
) -> Tensor:
    """The mean of each window of lines; as `avg_pool2d`."""
    steps = None if stride is None else flat(stride, "stride", 1)
    image = as_plane("avg_pool1d", input)
    return avg_pool2d(image, flat(kernel_size, "kernel_size", 1), steps, flat(padding, "padding", 0), ceil_mode, count_include_pad).squeeze(-2)


def adaptive_avg_pool2d(input: ArrayLike, output_size: int | tuple[int | None, int | None] | None) -> Tensor:
    """Means of windows that share an image out as evenly as they can.

    Args:
        input: images.
        output_size: (height, width), or one number for both; None keeps the extent of the image. Window i of n covers i / n to (i + 1) / n of the
            extent, rounded outwards.

    Returns:
        (N, C, H', W') or (C, H', W').

    Raises:
        ShapeError: extents that are not above 0.
    """
    x, alone = batched("adaptive_avg_pool2d", input)
    wanted = output_size if isinstance(output_size, (tuple, list)) else (output_size, output_size)
    if len(wanted) != 2 or any(n is not None and n < 1 for n in wanted) or 0 in x.shape[2:]:
        raise ShapeError(f"adaptive_avg_pool2d: found an input of {list(x.shape)} and output size {output_size!r}; expected extents above 0")
    sizes = [n if m is None else int(m) for n, m in zip(x.shape[2:], wanted, strict=True)]
    if all(n % m == 0 for n, m in zip(x.shape[2:], sizes, strict=True)):
        windows = tuple(n // m for n, m in zip(x.shape[2:], sizes, strict=True))
        out: Tensor = call(_avg_pool2d, (x,), {"kernel_size": windows})
    else:
        out = _means(_means(x, sizes[0], 2), sizes[1], 3)
    return out.squeeze(0) if alone else out


def _means(x: Tensor, windows: int, axis: int) -> Tensor:
    """Means of windows along an axis, with the taps of each side by side."""
    length = x.shape[axis]
    number = np.arange(windows)
    starts, ends = number * length // windows, -(-(number + 1) * length // windows)
    taps = starts[:, None] + np.arange((ends - starts).max())
    inside = (taps < ends[:, None]).reshape(taps.shape + (1,) * (x.ndim - 1 - axis))
    counts = (ends - starts).astype(x.dtype).reshape((-1,) + (1,) * (x.ndim - 1 - axis))
    chosen = call(row("take"), (x, np.minimum(taps, length - 1)), {"axis": axis})
    total: Tensor = where(as_tensor(inside).to(x.device), chosen, 0.0).sum(axis + 1)
    return total / as_tensor(counts).to(x.device)


def adaptive_avg_pool1d(input: ArrayLike, output_size: Single) -> Tensor:
    """Means of windows that share a line out; see `adaptive_avg_pool2d`.

    Args:
        input: (N, C, L) or (C, L).
        output_size: how many windows.

    Returns:
        (N, C, L') or (C, L').
    """
    return adaptive_avg_pool2d(as_plane("adaptive_avg_pool1d", input), flat(output_size, "output_size", 1)).squeeze(-2)


document(sys.modules[__name__])

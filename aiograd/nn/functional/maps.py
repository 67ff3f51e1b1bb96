"""Linear maps, embeddings, two-dimensional convolution and padding as functions. Images are (N, C, H, W) or (C, H, W)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from aiograd.array_functions.conversion import ArrayLike, as_tensor, row
from aiograd.array_functions.manipulation import pad as pad_axes
from aiograd.errors import ArgumentError, ArgumentTypeError, ShapeError
from aiograd.nn.functional.documentation import document
from aiograd.tensors.core import make
from aiograd.tensors.record import call, taken_over
from aiograd.tensors.tensor import Tensor

Pair: TypeAlias = int | tuple[int, int]

_linear, _conv2d, _embedding = row("linear"), row("conv2d"), row("embedding")


def linear(input: ArrayLike, weight: ArrayLike, bias: ArrayLike | None = None) -> Tensor:
    """``input @ weight.T + bias``.

    Args:
        input: (..., in).
        weight: (out, in).
        bias: (out,) or None.

    Returns:
        (..., out).
    """
    return call(_linear, (input, weight, bias), {})  # type: ignore[no-any-return]


def embedding(input: ArrayLike, weight: ArrayLike, padding_idx: int | None = None) -> Tensor:
    """Rows of a matrix.

    Args:
        input: integers of any shape.
        weight: (rows, features).
        padding_idx: a row that takes no gradient; negative ones count from the end.

    Returns:
        (..., features), with the axes of `input` in front.

    Raises:
        ArgumentError: `padding_idx` is the number of no row.
    """
    table = as_tensor(weight)
    if padding_idx is not None:
        if table.ndim == 2 and not -table.shape[0] <= padding_idx < table.shape[0]:
            raise ArgumentError(f"embedding(padding_idx={padding_idx}): expected the number of one of {table.shape[0]} rows")
        padding_idx %= table.shape[0]
    indices = as_tensor(input)
    table = taken_over(table, indices)
    # a device looks up with the indices that it has; indices of another device are read and checked
    there = indices._data if indices.device == table.device != "cpu" else indices
    return call(_embedding, (table,), {"indices": there, "padding_idx": padding_idx})  # type: ignore[no-any-return]


def one_hot(input: ArrayLike, num_classes: int = -1) -> Tensor:
    """Vectors with a one where the integers of `input` say.

    Args:
        input: integers of any shape, at least 0.
        num_classes: length of the vectors; -1: one more than the largest integer.

    Returns:
        int64, of the shape of `input` with an axis of `num_classes` at the end.

    Raises:
        ArgumentError: an integer that `num_classes` has no place for.
        ArgumentTypeError: no integers.
    """
    indices = as_tensor(input).detach().numpy()
    if indices.dtype.kind not in "iu":
        raise ArgumentTypeError(f"one_hot(): found dtype {indices.dtype}, expected integers")
    classes = int(indices.max(initial=-1)) + 1 if num_classes == -1 else num_classes
    if indices.size and (indices.min() < 0 or indices.max() >= classes):
        raise ArgumentError(f"one_hot(num_classes={classes}): integers run from {indices.min()} to {indices.max()}, expected 0 to {classes - 1}")
    return make((indices[..., None] == np.arange(classes)).astype(np.int64))  # type: ignore[no-any-return]


def batched(name: str, input: Any) -> tuple[Tensor, bool]:
    """The images with an axis for the batch, and True if they had none.

    Raises:
        ShapeError: they are no images.
    """
    x = as_tensor(input)
    if x.ndim not in (3, 4):
        raise ShapeError(f"{name}: found shape {list(x.shape)}, expected (N, C, H, W) or (C, H, W)")
    return (x.unsqueeze(0), True) if x.ndim == 3 else (x, False)


def conv2d(
    input: ArrayLike, weight: ArrayLike, bias: ArrayLike | None = None, stride: Pair = 1, padding: Pair | str = 0, dilation: Pair = 1, groups: int = 1
) -> Tensor:
    """Two-dimensional cross-correlation."""
    x, alone = batched("conv2d", input)
    kernel = as_tensor(weight)
    if isinstance(padding, str):
        x, padding = _named_padding(x, kernel, padding, stride, dilation)
    out: Tensor = call(_conv2d, (x, kernel, bias), {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups})
    return out.squeeze(0) if alone else out


def _named_padding(x: Tensor, kernel: Tensor, padding: str, stride: Pair, dilation: Pair) -> tuple[Tensor, tuple[int, int]]:
    if padding == "valid":
        return x, (0, 0)
    if padding != "same" or stride not in (1, (1, 1)) or kernel.ndim != 4:
        raise ArgumentError(f"conv2d: padding {padding!r} with stride {stride}: expected numbers, 'valid', or 'same' with stride 1")
    steps = dilation if isinstance(dilation, tuple) else (dilation, dilation)
    total = [d * (k - 1) for d, k in zip(steps, kernel.shape[2:], strict=True)]
    if any(n % 2 for n in total):  # the odd one goes behind
        x = pad_axes(x, [(0, 0), (0, 0), *((0, n % 2) for n in total)])
    return x, (total[0] // 2, total[1] // 2)


def pad(input: ArrayLike, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Tensor:
    """A border, given as (before, after) of the last axis, then of the last but one, and so on.

    Args:
        input: any shape.
        pad: at most two ints per axis; negative ones take so many elements away.
        mode: "constant", "reflect", "replicate" or "circular".
        value: of the constant border.

    Returns:
        A Tensor with the same number of axes.

    Raises:
        ArgumentError: more numbers than axes have sides, or another mode.
    """
    x = as_tensor(input)
    if len(pad) % 2 or len(pad) > 2 * x.ndim:
        raise ArgumentError(f"pad: {tuple(pad)} for an input of shape {list(x.shape)}: expected pairs (before, after), at most one per axis")
    widths = [(0, 0)] * x.ndim
    for i in range(len(pad) // 2):
        widths[x.ndim - 1 - i] = (pad[2 * i], pad[2 * i + 1])
    names = {"constant": "constant", "reflect": "reflect", "replicate": "edge", "circular": "wrap"}
    if mode not in names:
        raise ArgumentError(f"pad: mode {mode!r}, expected one of {', '.join(map(repr, names))}")
    if any(n + before + after < 0 for n, (before, after) in zip(x.shape, widths, strict=True)):
        raise ArgumentError(f"pad: {tuple(pad)} takes more elements away than an input of shape {list(x.shape)} has")
    grown = [(max(before, 0), max(after, 0)) for before, after in widths]
    fill = 0.0 if value is None else value
    if grown == widths:
        return pad_axes(x, grown, mode=names[mode], value=fill)
    if mode == "circular":  # the border repeats the cropped array, as in PyTorch; in other modes the array before it is cropped
        return pad_axes(_cropped(x, widths), grown, mode="wrap")
    return _cropped(pad_axes(x, grown, mode=names[mode], value=fill), widths)


def _cropped(x: Tensor, widths: Sequence[tuple[int, int]]) -> Tensor:
    """Without as many elements at the ends of each axis as its widths are below 0."""
    return x[tuple(slice(max(-before, 0), n - max(-after, 0)) for n, (before, after) in zip(x.shape, widths, strict=True))]


document(sys.modules[__name__])

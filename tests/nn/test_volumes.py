"""Convolution and pooling of volumes against loops over every window."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import nn
from aiograd.errors import ArgumentError, ShapeError
from aiograd.nn import functional as F
from tests.support import assert_raises

Array = np.ndarray[Any, Any]
rng = np.random.default_rng(0)
X = rng.normal(size=(2, 4, 4, 5, 5))


def triple(value: Any) -> tuple[int, int, int]:
    return (value,) * 3 if isinstance(value, int) else value


def windows(x: Array, size: Any, stride: Any, padding: Any, dilation: Any, fill: float) -> Any:
    """(place of a window, its taps (N, C, kd, kh, kw)) for each window."""
    size, stride, padding, dilation = map(triple, (size, stride, padding, dilation))
    padded = np.pad(x, [(0, 0), (0, 0), *((p, p) for p in padding)], constant_values=fill)
    counts = [(n - d * (k - 1) - 1) // s + 1 for n, k, s, d in zip(padded.shape[2:], size, stride, dilation, strict=True)]
    for place in itertools.product(*map(range, counts)):
        part = tuple(slice(i * s, i * s + d * (k - 1) + 1, d) for i, k, s, d in zip(place, size, stride, dilation, strict=True))
        yield counts, place, padded[(slice(None), slice(None), *part)]


def convolved(x: Array, weight: Array, bias: Array, stride: Any, padding: Any, dilation: Any, groups: int) -> Array:
    out: Any = None
    inside, outside = x.shape[1] // groups, len(weight) // groups
    for counts, place, taps in windows(x, weight.shape[2:], stride, padding, dilation, 0.0):
        out = np.zeros((len(x), len(weight), *counts)) if out is None else out
        for g in range(groups):
            part = slice(g * outside, (g + 1) * outside)
            out[(slice(None), part, *place)] = np.einsum("ncdhw,ocdhw->no", taps[:, g * inside : (g + 1) * inside], weight[part])
    return out + bias[:, None, None, None]  # type: ignore[no-any-return]


def pooled(x: Array, reduce: Callable[..., Any], size: Any, stride: Any, padding: Any, dilation: Any, fill: float) -> Array:
    out: Any = None
    for counts, place, taps in windows(x, size, stride, padding, dilation, fill):
        out = np.zeros((*x.shape[:2], *counts)) if out is None else out
        out[(slice(None), slice(None), *place)] = reduce(taps, axis=(2, 3, 4))
    return out  # type: ignore[no-any-return]


SETTINGS: list[tuple[Any, Any, Any, int]] = [(1, 0, 1, 1), (2, 1, 1, 2), ((1, 2, 3), (2, 1, 0), (2, 1, 2), 1), ((2, 1, 1), 0, 1, 4)]


@pytest.mark.parametrize(("stride", "padding", "dilation", "groups"), SETTINGS)
async def test_convolution(stride: Any, padding: Any, dilation: Any, groups: int) -> None:
    weight, bias = rng.normal(size=(8, 4 // groups, 3, 2, 2)), rng.normal(size=8)
    inputs = [ag.tensor(each, requires_grad=True) for each in (X, weight, bias)]
    out = F.conv3d(*inputs, stride, padding, dilation, groups)
    np.testing.assert_allclose(out.detach().numpy(), convolved(X, weight, bias, stride, padding, dilation, groups), atol=1e-12)
    np.testing.assert_allclose(F.conv3d(X[1], weight, bias, stride, padding, dilation, groups).numpy(), out.detach().numpy()[1], atol=1e-12)
    await check_linear(out, inputs[0], lambda x: convolved(x, weight, 0 * bias, stride, padding, dilation, groups))
    out = F.conv3d(*inputs, stride, padding, dilation, groups)
    await check_linear(out, inputs[1], lambda w: convolved(X, w, 0 * bias, stride, padding, dilation, groups))


async def check_linear(out: Any, x: Any, function: Callable[[Array], Array]) -> None:
    """The gradient of a linear function: ``<g, f(v)> = <grad, v>`` for some v."""
    g, v = rng.normal(size=out.shape), rng.normal(size=x.shape)
    (grad,) = await ag.grad((out * ag.tensor(g)).sum(), [x])
    np.testing.assert_allclose((grad.numpy() * v).sum(), (function(v) * g).sum(), rtol=1e-9)


@pytest.mark.parametrize("dilation", [1, (2, 1, 1)])
def test_named_paddings(dilation: Any) -> None:
    weight = rng.normal(size=(2, 4, 3, 2, 3))
    assert F.conv3d(X, weight, padding="same", dilation=dilation).shape == (2, 2, 4, 5, 5)
    np.testing.assert_array_equal(F.conv3d(X, weight, padding="valid").numpy(), F.conv3d(X, weight).numpy())
    assert_raises(ArgumentError, "padding 'same' with stride", F.conv3d, X, weight, padding="same", stride=(2, 1, 1))


@pytest.mark.parametrize(
    ("stride", "padding", "extra", "groups", "dilation"),
    [(1, 0, 0, 1, 1), (2, 1, 1, 2, 1), ((1, 2, 3), (1, 0, 2), (0, 1, 2), 1, (2, 1, 1)), (2, 3, 0, 1, 2)],
)
async def test_a_transposed_convolution_is_the_adjoint(stride: Any, padding: Any, extra: Any, groups: int, dilation: Any) -> None:
    """``<convT(y), x> = <y, conv(x)>``."""
    weight = rng.normal(size=(8, 4 // groups, 3, 2, 3))
    y = rng.normal(size=(2, 8, 3, 4, 4))
    tensor = ag.tensor(y, requires_grad=True)
    out = F.conv_transpose3d(tensor, weight, None, stride, padding, extra, groups, dilation)
    x = rng.normal(size=out.shape)
    forth = convolved(x, weight, np.zeros(8), stride, padding, dilation, groups)
    assert forth.shape == y.shape
    np.testing.assert_allclose((out.detach().numpy() * x).sum(), (forth * y).sum(), rtol=1e-9)
    (grad,) = await ag.grad((out * ag.tensor(x)).sum(), [tensor])
    np.testing.assert_allclose(grad.numpy(), forth, atol=1e-10)


POOLS: list[tuple[Any, Any, Any, Any]] = [(2, None, 0, 1), (3, 2, 1, 1), ((2, 3, 2), (1, 2, 2), (1, 0, 1), (2, 1, 1))]


@pytest.mark.parametrize(("size", "stride", "padding", "dilation"), POOLS)
async def test_pooling(size: Any, stride: Any, padding: Any, dilation: Any) -> None:
    step = size if stride is None else stride
    x = ag.tensor(X, requires_grad=True)
    found = F.max_pool3d(x, size, stride, padding, dilation)
    np.testing.assert_array_equal(found.detach().numpy(), pooled(X, np.max, size, step, padding, dilation, -np.inf))
    await found.sum().backward()
    assert x.grad.sum().item() == found.size and set(np.unique(x.grad.numpy())) <= set(range(28))
    whole = F.avg_pool3d(X, size, stride, padding)
    np.testing.assert_allclose(whole.numpy(), pooled(X, np.mean, size, step, padding, 1, 0.0), atol=1e-12)
    inside = F.avg_pool3d(X, size, stride, padding, count_include_pad=False)
    np.testing.assert_allclose(inside.numpy(), pooled(X, np.nanmean, size, step, padding, 1, np.nan), atol=1e-12)
    summed = F.avg_pool3d(X[0], size, stride, padding, divisor_override=2)
    np.testing.assert_allclose(summed.numpy(), pooled(X[:1], np.sum, size, step, padding, 1, 0.0)[0] / 2, atol=1e-12)


async def test_of_equal_elements_the_first_takes_the_gradient() -> None:
    x = ag.zeros(1, 1, 2, 2, 2, requires_grad=True)
    await F.max_pool3d(x, 2).sum().backward()
    assert x.grad.reshape(-1).tolist() == [1.0] + [0.0] * 7


def test_layers_are_the_functions() -> None:
    conv = nn.Conv3d(4, 6, (3, 2, 2), (2, 1, 1), (1, 0, 1), groups=2, dtype=np.float64)
    assert conv.weight.shape == (6, 2, 3, 2, 2) and conv.bias is not None
    expected = convolved(X, conv.weight.detach().numpy(), conv.bias.detach().numpy(), (2, 1, 1), (1, 0, 1), 1, 2)
    np.testing.assert_allclose(conv(ag.tensor(X)).detach().numpy(), expected, atol=1e-12)
    around = nn.Conv3d(4, 4, 3, padding=1, padding_mode="circular", dtype=np.float64)
    wrapped = np.pad(X, [(0, 0), (0, 0), (1, 1), (1, 1), (1, 1)], "wrap")
    np.testing.assert_allclose(
        around(ag.tensor(X)).detach().numpy(), F.conv3d(wrapped, around.weight, around.bias).detach().numpy(), atol=1e-12
    )
    back = nn.ConvTranspose3d(4, 6, 3, 2, 1, 1, dtype=np.float64)
    assert back.weight.shape == (4, 6, 3, 3, 3) and back(ag.tensor(X)).shape == (2, 6, 8, 10, 10)
    assert nn.MaxPool3d(2, ceil_mode=True)(ag.tensor(X)).shape == nn.AvgPool3d(2, ceil_mode=True)(ag.tensor(X)).shape == (2, 4, 2, 3, 3)
    assert repr(conv) == "Conv3d(4, 6, kernel_size=(3, 2, 2), stride=(2, 1, 1), padding=(1, 0, 1), groups=2)"
    for norm in (nn.BatchNorm3d(4, dtype=np.float64), nn.InstanceNorm3d(4, dtype=np.float64)):
        axes = (0, 2, 3, 4) if isinstance(norm, nn.BatchNorm3d) else (2, 3, 4)
        out = norm(ag.tensor(X)).detach().numpy()
        np.testing.assert_allclose(out, (X - X.mean(axes, keepdims=True)) / np.sqrt(X.var(axes, keepdims=True) + 1e-5), atol=1e-12)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: F.conv3d(X[0, 0], np.ones((1, 4, 1, 1, 1))), ShapeError, r"found shape \[4, 5, 5\], expected \(N, C, D, H, W\)"),
        (lambda: F.conv3d(X, np.ones((1, 4, 1, 1))), ShapeError, "weight has shape"),
        (lambda: F.conv3d(X, np.ones((1, 4, 9, 1, 1))), ShapeError, "does not fit a depth of 4"),
        (lambda: F.conv3d(X, np.ones((1, 3, 1, 1, 1))), ShapeError, "conv2d"),
        (lambda: F.conv3d(X, np.ones((1, 4, 1, 1, 1)), stride=(1, 2)), ArgumentError, "expected an int or three ints"),
        (lambda: F.conv3d(X, np.ones((1, 4, 1, 1, 1)), padding="full"), ArgumentError, "padding"),
        (lambda: F.conv_transpose3d(X, np.ones((4, 1, 2, 2, 2)), output_padding=1), ArgumentError, "output_padding"),
        (lambda: F.conv_transpose3d(X, np.ones((4, 1, 1, 1, 1)), padding=(2, 0, 0)), ShapeError, "leaves nothing"),
        (lambda: F.max_pool3d(X, 2, padding=2), ShapeError, "over half the window"),
        (lambda: nn.MaxPool3d(2, return_indices=True), ArgumentError, "for lines and images only"),
    ],
)
def test_what_does_not_fit(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    assert_raises(error, text, call)


EMPTY: dict[str, Callable[[Any], Any]] = {
    "conv3d": lambda x: F.conv3d(x, ag.ones(6, 4, 2, 2, 2), ag.ones(6), stride=(2, 1, 1), padding=1),
    "conv_transpose3d": lambda x: F.conv_transpose3d(x, ag.ones(4, 6, 2, 2, 2), ag.ones(6), stride=2),
    "max_pool3d": lambda x: F.max_pool3d(x, 2, ceil_mode=True),
    "avg_pool3d": lambda x: F.avg_pool3d(x, (2, 3, 3), 1),
}


@pytest.mark.parametrize("name", EMPTY)
async def test_a_batch_without_rows_has_results_without_rows(name: str) -> None:
    full, empty = ag.ones(2, 4, 4, 5, 5), ag.ones(0, 4, 4, 5, 5, requires_grad=True)
    out = EMPTY[name](empty)
    assert out.shape == (0, *EMPTY[name](full).shape[1:])
    await out.sum().backward()
    assert empty.grad.shape == empty.shape

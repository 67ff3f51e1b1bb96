"""Pooling on a simulated CUDA device, against the host's rows: values, adjoints, the fused pair and gradients of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.cuda.array import CudaArray
from aiograd.cuda.device import CudaDevice
from aiograd.errors import ShapeError
from aiograd.ops.op import ROWS
from tests.tolerance import tolerance

#: size, stride, padding, dilation
WINDOWS: list[tuple[Any, ...]] = [(2, None, 0, 1), (3, 2, 1, 1), ((3, 2), (1, 2), (1, 0), (2, 3)), (2, 3, 0, 1), ((2, 3), 1, 1, 1)]


def draw(shape: tuple[int, ...], dtype: str = "f4", seed: int = 0) -> np.ndarray:
    """Numbers with many equals."""
    return (np.random.default_rng((seed, *shape)).integers(-4, 5, shape) / 2).astype(dtype)


def check(device: CudaDevice, name: str, *arrays: np.ndarray, view: Callable[[Any], Any] = lambda x: x, **statics: Any) -> np.ndarray:
    """A row on the device, natively, against itself on the host."""
    wanted = ROWS[name](*[view(x) for x in arrays], **statics)
    found = ROWS[name](*[view(device.from_host(x)) for x in arrays], **statics)
    assert isinstance(found, CudaArray)
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    ours = device.to_host(found)
    np.testing.assert_array_equal(np.isnan(ours), np.isnan(wanted))
    gap = np.nan_to_num(ours.astype(np.float64)) - np.nan_to_num(wanted.astype(np.float64))
    assert np.linalg.norm(gap) <= (tolerance(ours.dtype) if ours.dtype.kind == "f" else 0) * np.linalg.norm(np.nan_to_num(wanted).astype(np.float64))
    assert device.statistics().fallbacks == {}
    return ours


def statics_of(geometry: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip(("kernel_size", "stride", "padding", "dilation"), geometry, strict=True))


@pytest.mark.parametrize("geometry", WINDOWS)
@pytest.mark.parametrize("dtype", ["f4", "f8", "f2"])
def test_maxima_and_their_adjoints(device: CudaDevice, dtype: str, geometry: tuple[Any, ...]) -> None:
    statics = statics_of(geometry)
    x = draw((2, 3, 6, 7), dtype)
    y = check(device, "max_pool2d", x, **statics)
    check(device, "max_pool2d_input_grad", draw(y.shape, dtype, 1), x, **statics)
    check(device, "max_pool2d_gather", draw(x.shape, dtype, 2), x, **statics)
    check(device, "max_pool2d", x, view=lambda x: x.transpose(0, 1, 3, 2)[:, :, ::-1], **statics)


def test_the_first_of_equals_and_nan_before_all(device: CudaDevice) -> None:
    x = np.full((1, 2, 4, 4), -np.inf, np.float32)
    x[0, 1, 1, :2] = np.nan
    x[0, 1, 0, 0] = np.inf
    y = np.arange(8, dtype=np.float32).reshape(1, 2, 2, 2)
    check(device, "max_pool2d", x, kernel_size=2)
    check(device, "max_pool2d_input_grad", y, x, kernel_size=2)
    check(device, "max_pool2d_input_grad", y[:, :, :1, :1], x, kernel_size=3, stride=2, padding=1, dilation=2)


@pytest.mark.parametrize("dtype", ["i4", "u1", "i8"])
def test_integers(device: CudaDevice, dtype: str) -> None:
    x = np.random.default_rng(0).integers(0, 9, (1, 2, 5, 5)).astype(dtype)
    check(device, "max_pool2d", x, kernel_size=2, padding=1)
    check(device, "max_pool2d_gather", x[:, :, ::-1].copy(), x, kernel_size=2, padding=1)


def test_windows_of_more_taps_than_a_byte_can_name(device: CudaDevice) -> None:
    x = np.random.default_rng(0).standard_normal((1, 1, 20, 20)).astype(np.float32)
    y = check(device, "max_pool2d", x, kernel_size=(16, 17), stride=2)
    check(device, "max_pool2d_input_grad", draw(y.shape), x, kernel_size=(16, 17), stride=2)


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("geometry", [each for each in WINDOWS if each[3] == 1])
@pytest.mark.parametrize("dtype", ["f4", "f8", "f2"])
def test_means_and_their_adjoints(device: CudaDevice, dtype: str, geometry: tuple[Any, ...], counted: bool) -> None:
    statics = {**statics_of(geometry), "count_include_pad": counted}
    del statics["dilation"]
    x = draw((2, 3, 6, 7), dtype)
    y = check(device, "avg_pool2d", x, **statics)
    check(device, "avg_pool2d_input_grad", draw(y.shape, dtype, 1), input_size=(6, 7), **statics)


def test_no_images(device: CudaDevice) -> None:
    x, y = draw((0, 3, 4, 4)), draw((0, 3, 2, 2))
    check(device, "max_pool2d", x, kernel_size=2)
    check(device, "max_pool2d_input_grad", y, x, kernel_size=2)
    check(device, "max_pool2d_gather", x, x, kernel_size=2)
    check(device, "avg_pool2d", x, kernel_size=2)
    check(device, "avg_pool2d_input_grad", y, input_size=(4, 4), kernel_size=2)


def test_arguments_that_do_not_fit_say_so_as_on_the_host(device: CudaDevice) -> None:
    x = device.from_host(draw((1, 2, 4, 4)))
    for name in ("max_pool2d", "avg_pool2d"):
        with pytest.raises(ShapeError, match="expected"):
            ROWS[name](x[0], kernel_size=2)
        with pytest.raises(ShapeError, match="over half"):
            ROWS[name](x, kernel_size=2, padding=2)


async def gradients(name: str, x: np.ndarray, place: str | None, order: int, **statics: Any) -> list[np.ndarray]:
    tensor = ag.tensor(x, device=place, requires_grad=True)
    out = ROWS[name](tensor, **statics)
    weight = np.cos(np.arange(out.size)).reshape(out.shape).astype(x.dtype)
    loss = (out * out * ag.tensor(weight, device=place)).sum()
    if order == 1:
        await loss.backward()
        return [(await found).to("cpu").numpy() for found in (out.detach(), tensor.grad)]
    (first,) = await ag.grad(loss, [tensor], create_graph=True)
    await (first * first).sum().backward()
    return [(await found).to("cpu").numpy() for found in (out.detach(), first.detach(), tensor.grad)]


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("name,statics", [("max_pool2d", {"padding": 1, "dilation": 2}), ("avg_pool2d", {"padding": 1, "count_include_pad": False})])
async def test_tensors_have_the_gradients_of_the_host(device: CudaDevice, name: str, statics: dict[str, Any], order: int) -> None:
    x = draw((2, 2, 6, 5))
    ours = await gradients(name, x, "cuda:0", order, kernel_size=3, stride=2, **statics)
    theirs = await gradients(name, x.astype(np.float64), None, order, kernel_size=3, stride=2, **statics)
    for found, wanted in zip(ours, theirs, strict=True):
        assert np.linalg.norm(found - wanted) <= 1e-6 * np.linalg.norm(wanted)
    assert device.statistics().fallbacks == {}
    if name == "max_pool2d" and order == 1:
        assert device.driver.history.count("max_pool") == 1  # type: ignore[attr-defined]  # what the gradient needs was kept

"""Convolutions on a simulated CUDA device, against the host's rows in double precision: forward, adjoints and every gradient."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.cuda.array import CudaArray
from aiograd.cuda.device import CudaDevice
from aiograd.cuda.operations import convolution, unfolding
from aiograd.errors import ShapeError
from aiograd.kernels.window import window
from aiograd.ops.op import ROWS
from tests.cuda.library import Library
from tests.support import assert_raises
from tests.tolerance import tolerance

#: images, groups, channels in and out of a group, size, then the window: size, stride, padding, dilation
CASES: dict[str, tuple[Any, ...]] = {
    "plain": (2, 1, 3, 5, (5, 6), (3, 2), 1, 0, 1),
    "padded": (1, 1, 2, 4, (4, 4), 3, 1, 1, 1),
    "stride": (2, 1, 2, 3, (7, 6), 3, 2, 1, 1),
    "strides": (1, 1, 2, 3, (7, 9), (2, 3), (3, 2), (1, 0), 1),
    "sparse": (1, 1, 2, 3, (7, 7), 2, 3, 0, 1),
    "dilation": (1, 1, 2, 3, (7, 6), 2, 1, (1, 2), (3, 2)),
    "stride_and_dilation": (1, 1, 2, 3, (9, 10), 3, (2, 3), 2, (2, 2)),
    "even_stride_and_dilation": (1, 1, 2, 3, (9, 10), 3, (4, 2), 2, (2, 4)),
    "groups": (2, 2, 3, 3, (4, 5), 2, 1, 1, 1),
    "each_channel": (2, 3, 1, 1, (4, 5), 3, 1, 1, 1),
    "few_out": (1, 1, 3, 1, (4, 5), 3, 2, 1, 1),
    "point": (2, 1, 3, 4, (3, 4), 1, 1, 0, 1),
    "point_in_groups": (2, 2, 3, 4, (3, 3), 1, 1, 0, 1),
    "point_with_stride": (2, 1, 3, 4, (5, 6), 1, 2, 0, 1),
    "whole_image": (2, 1, 3, 9, (3, 3), 3, 1, 0, 1),
    "much_padding": (1, 1, 1, 3, (2, 2), 2, 2, 3, 1),
}


def draw(shape: tuple[int, ...], dtype: str = "f4", seed: int = 0) -> np.ndarray:
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(dtype)


def arrays_of(case: tuple[Any, ...], dtype: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
    """Input, weight, bias, a gradient of the output, and static arguments."""
    images, groups, depth, channels, size, kernel, stride, padding, dilation = case
    win = window(kernel, stride, padding, dilation)
    x = draw((images, groups * depth, *size), dtype)
    weight, bias = draw((groups * channels, depth, *win.size), dtype, 1), draw((groups * channels,), dtype, 2)
    y = draw((images, groups * channels, *win.outputs(*size)), dtype, 3)
    return x, weight, bias, y, {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}


def check(device: CudaDevice, name: str, *arrays: np.ndarray | None, view: Callable[[Any], Any] = lambda x: x, **statics: Any) -> None:
    """A row on the device, natively, against itself on the host in double precision."""
    dtype = arrays[0].dtype  # type: ignore[union-attr]
    wanted = ROWS[name](*[None if x is None else view(x.astype(np.float64)) for x in arrays], **statics)
    found = ROWS[name](*[None if x is None else view(device.from_host(x)) for x in arrays], **statics)
    assert isinstance(found, CudaArray)
    assert (found.shape, found.dtype) == (wanted.shape, dtype)
    ours = device.to_host(found).astype(np.float64)
    assert np.linalg.norm(ours - wanted) <= tolerance(dtype) * np.linalg.norm(wanted)
    assert device.statistics().fallbacks == {}


@pytest.mark.parametrize("case,dtype", [*((case, "f4") for case in CASES), *itertools.product(("strides", "few_out", "point"), ("f8", "f2"))])
def test_forward_and_adjoints(device: CudaDevice, case: str, dtype: str) -> None:
    x, weight, bias, y, statics = arrays_of(CASES[case], dtype)
    check(device, "conv2d", x, weight, bias, **statics)
    check(device, "conv2d", x, weight, **statics)
    check(device, "conv2d_input_grad", y, weight, input_size=x.shape[2:], **statics)
    check(device, "conv2d_weight_grad", x, y, kernel_size=weight.shape[2:], **statics)


def test_views_are_read_where_they_lie(device: CudaDevice) -> None:
    x, weight, _, y, statics = arrays_of(CASES["stride"], "f4")

    def view(array: Any) -> Any:
        return array.transpose(0, 1, 3, 2)[:, :, ::-1]

    turned = {**statics, "padding": 1}
    check(device, "conv2d", x, weight, view=view, **turned)
    check(device, "conv2d_input_grad", y, weight, view=view, input_size=x.shape[:1:-1], **turned)
    check(device, "conv2d_weight_grad", x, y, view=view, kernel_size=weight.shape[2:], **turned)
    check(device, "conv2d", draw((1, 4, 4, 3)), draw((4, 2, 2, 3)), view=lambda x: x.transpose(0, 3, 1, 2))


def test_long_sums_of_a_weight_are_cut_into_parts_and_have_the_same_bits_every_time(device: CudaDevice) -> None:
    x, y = draw((3, 1, 8, 8)), draw((3, 3, 8, 8), seed=1)
    results = [device.to_host(ROWS["conv2d_weight_grad"](device.from_host(x), device.from_host(y), kernel_size=1)) for _ in range(2)]
    assert "join_parts" in device.driver.history  # type: ignore[attr-defined]
    assert results[0].tobytes() == results[1].tobytes()
    check(device, "conv2d_weight_grad", x, y, kernel_size=1)


def test_long_sums_of_small_images_are_cut_into_parts(device: CudaDevice) -> None:
    x, weight, bias = draw((1, 40, 3, 3)), draw((4, 40, 2, 2), seed=1), draw((4,), seed=2)
    check(device, "conv2d", x, weight, bias)
    check(device, "conv2d", x, weight)
    check(device, "conv2d_input_grad", draw((1, 40, 1, 1)), draw((40, 4, 2, 2), seed=1), input_size=(2, 2))
    device.synchronize()
    assert device.driver.history.count("join_parts") == 3  # type: ignore[attr-defined]
    check(device, "conv2d_input_grad", draw((1, 80, 1, 1)), draw((80, 3, 3, 3), seed=1), input_size=(3, 3), stride=2)


@pytest.mark.parametrize("tile", [(128, 128, 8, 8, 8), (64, 64, 16, 4, 4), (16, 128, 16, 2, 4), (128, 16, 16, 4, 2)])
def test_tiles_of_real_devices(device: CudaDevice, tile: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution, "tile_of", lambda *args: tile)
    x, weight, y = draw((2, 2, 6, 5)), draw((9, 2, 3, 2), seed=1), draw((2, 9, 3, 3), seed=2)
    statics = {"stride": 2, "padding": 1}
    check(device, "conv2d", x, weight, **statics)
    check(device, "conv2d_input_grad", y, weight, input_size=(6, 5), **statics)
    check(device, "conv2d_weight_grad", x, y, kernel_size=(3, 2), **statics)


def test_no_images_give_nothing_and_zeros(device: CudaDevice) -> None:
    x, weight, bias, y = draw((0, 2, 4, 4)), draw((3, 2, 3, 3)), draw((3,)), draw((0, 3, 2, 2))
    check(device, "conv2d", x, weight, bias)
    check(device, "conv2d", x, weight)
    check(device, "conv2d_input_grad", y, weight, input_size=(4, 4))
    check(device, "conv2d_weight_grad", x, y, kernel_size=3)


def test_arguments_that_do_not_fit_say_so_as_on_the_host(device: CudaDevice) -> None:
    x, weight = device.from_host(draw((1, 2, 4, 4))), device.from_host(draw((3, 2, 3, 3)))
    assert_raises(ShapeError, "expected weight", lambda: ROWS["conv2d"](x, weight[:, :1]))
    assert_raises(ShapeError, "bias has shape", lambda: ROWS["conv2d"](x, weight, weight[:2, 0, 0, 0]))
    assert_raises(ShapeError, "does not fit", lambda: ROWS["conv2d"](x[:, :, :2], weight))
    assert_raises(ShapeError, "y has shape", lambda: ROWS["conv2d_input_grad"](device.from_host(draw((1, 3, 2, 2))), weight, input_size=(9, 9)))
    assert_raises(ShapeError, "conv2d_weight_grad", lambda: ROWS["conv2d_weight_grad"](x, x, kernel_size=3))
    assert_raises(ShapeError, "expected", lambda: ROWS["im2col"](x[0], kernel_size=2))


@pytest.mark.parametrize("dtype", ["f4", "f8", "f2"])
@pytest.mark.parametrize("geometry", [(2, 1, 0, 1), ((3, 2), (2, 1), (1, 0), 1), (2, (3, 1), 2, (1, 3)), (2, 3, 0, 1)])
def test_columns(device: CudaDevice, dtype: str, geometry: tuple[Any, ...]) -> None:
    statics = dict(zip(("kernel_size", "stride", "padding", "dilation"), geometry, strict=True))
    x = draw((2, 3, 6, 5), dtype)
    check(device, "im2col", x, **statics)
    columns = ROWS["im2col"](x, **statics)
    check(device, "col2im", draw(columns.shape, dtype, 1), output_size=(6, 5), **statics)


@pytest.mark.parametrize("elements", [1, 1 << 20])
@pytest.mark.parametrize("dtype", ["f4", "f2"])
@pytest.mark.parametrize("case", ["strides", "groups", "stride_and_dilation", "point", "each_channel"])
def test_convolutions_by_a_library(case: str, dtype: str, elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    device = CudaDevice(Library())
    monkeypatch.setattr(unfolding, "_CHANNELS", dict.fromkeys(unfolding._CHANNELS, 1))
    monkeypatch.setattr(unfolding, "_PLACES", 1)
    monkeypatch.setattr(unfolding, "_ELEMENTS", elements)
    x, weight, bias, y, statics = arrays_of(CASES[case], dtype)
    check(device, "conv2d", x, weight, bias, **statics)
    check(device, "conv2d_input_grad", y, weight, input_size=x.shape[2:], **statics)
    check(device, "conv2d_weight_grad", x, y, kernel_size=weight.shape[2:], **statics)
    device.synchronize()
    history = device.driver.history  # type: ignore[attr-defined]
    assert not any(name.startswith("convolve") for name in history)
    assert ("weight_grad" in history) == (dtype == "f2")
    device.close()


def test_when_a_library_convolves(device: CudaDevice) -> None:
    equipped = CudaDevice(Library())
    half, single = np.dtype(np.float16), np.dtype(np.float32)
    assert unfolding.pays(equipped, half, 16) and unfolding.pays(equipped, single, 128)
    assert not unfolding.pays(equipped, half, 15) and not unfolding.pays(equipped, single, 127)
    assert not unfolding.pays(device, half, 512)
    assert unfolding.sums_well(single, 49) and not unfolding.sums_well(single, 9) and not unfolding.sums_well(half, 49)
    equipped.close()


def test_integers_are_left_to_the_host(device: CudaDevice) -> None:
    x, weight = np.arange(32).reshape(1, 2, 4, 4), np.arange(24).reshape(3, 2, 2, 2)
    found = ROWS["conv2d"](device.from_host(x), device.from_host(weight))
    np.testing.assert_array_equal(device.to_host(found), ROWS["conv2d"](x, weight))
    np.testing.assert_array_equal(device.to_host(ROWS["im2col"](device.from_host(x), kernel_size=2)), ROWS["im2col"](x, kernel_size=2))
    assert device.statistics().fallbacks == {"conv2d": 1}


async def gradients(function: Callable[..., Any], arrays: tuple[np.ndarray, ...], place: str | None) -> list[np.ndarray]:
    tensors = [ag.tensor(array, device=place, requires_grad=True) for array in arrays]
    out = function(*tensors)
    weight = np.cos(np.arange(out.size)).reshape(out.shape).astype(arrays[0].dtype)
    first = ag.grad((out * ag.tensor(weight, device=place)).sum(), tensors, create_graph=True)
    firsts = await first
    await sum(((found * found).sum() for found in firsts[1:]), (firsts[0] * firsts[0]).sum()).backward()
    results = (out.detach(), *[found.detach() for found in firsts], *[tensor.grad for tensor in tensors[:2]])
    return [(await found).to("cpu").numpy() for found in results]


@pytest.mark.parametrize("case", ["stride", "groups", "point", "each_channel"])
async def test_tensors_have_the_gradients_of_the_host_to_second_order(device: CudaDevice, case: str) -> None:
    x, weight, bias, _, statics = arrays_of(CASES[case], "f4")

    def function(*tensors: Any) -> Any:
        return ROWS["conv2d"](*tensors, **statics)

    ours = await gradients(function, (x, weight, bias), "cuda:0")
    theirs = await gradients(function, tuple(array.astype(np.float64) for array in (x, weight, bias)), None)
    for found, wanted in itertools.zip_longest(ours, theirs):
        assert np.linalg.norm(found - wanted) <= 1e-6 * np.linalg.norm(wanted)
    assert device.statistics().fallbacks == {}

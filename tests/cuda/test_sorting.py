"""Sorting and searching on a simulated CUDA device, against numpy: stable, NaN last, rows longer than a tile."""

from __future__ import annotations

import numpy as np
import pytest

from aiograd.cuda.device import CudaDevice
from aiograd.errors import ArgumentError
from aiograd.ops.op import ROWS
from tests.cuda.on_both import DOMAINS, row_agrees
from tests.support import assert_raises

SHAPES = [((1,), 0), ((2,), 0), ((8,), 0), ((9,), -1), ((3, 33), 1), ((20, 3), 0), ((2, 5, 4), 1), ((0, 3), 0), ((3, 0), 1)]


def values(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    x = (rng.standard_normal(shape) * 4).astype(dtype)
    if x.dtype.kind == "f" and x.size:
        x = np.round(x)
        x.flat[::5], x.flat[1::7], x.flat[2::7], x.flat[3::11] = np.nan, -0.0, np.inf, -np.inf
        x.flat[-1] = -np.nan
    return x


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int8", "int32", "int64", "uint8", "uint32", "uint64", "bool"])
def test_sorting_is_stable_in_both_directions(dtype: str, device: CudaDevice, rng: np.random.Generator) -> None:
    for shape, axis in SHAPES:
        x = values(rng, dtype, shape)
        for descending in (False, True):
            order = device.to_host(ROWS["argsort"](device.from_host(x), axis=axis, descending=descending))
            np.testing.assert_array_equal(order, ROWS["argsort"](x, axis=axis, descending=descending))
            found = device.to_host(ROWS["sort"](device.from_host(x), axis=axis, descending=descending))
            assert found.dtype == x.dtype
            np.testing.assert_array_equal(found, ROWS["sort"](x, axis=axis, descending=descending))
    assert device.statistics().fallbacks == {}


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("name", ["sort", "topk"])
def test_rows(name: str, dtype: str, device: CudaDevice) -> None:
    for variety in range(DOMAINS[name].varieties):
        row_agrees(device, name, variety, dtype)
    assert device.statistics().fallbacks == {}


def test_functions_of_numpy(device: CudaDevice, rng: np.random.Generator) -> None:
    x = rng.standard_normal((4, 9))
    a = device.from_host(x)
    for axis in (0, 1, None):
        np.testing.assert_array_equal(device.to_host(np.sort(a, axis)), np.sort(x, axis))
        np.testing.assert_array_equal(device.to_host(np.argsort(a, axis)), np.argsort(x, axis))
    np.testing.assert_array_equal(device.to_host(np.sort(a.T, 0)), np.sort(x.T, 0))
    assert_raises(np.exceptions.AxisError, None, np.sort, a, 2)


def test_the_largest(device: CudaDevice) -> None:
    x = np.array([[3.0, 1.0, 3.0, 2.0], [np.nan, 5.0, -1.0, 5.0]])
    for k, largest, axis in ((2, True, 1), (3, False, 1), (0, True, 1), (1, True, 0)):
        found, indices = ROWS["topk"](device.from_host(x), k=k, axis=axis, largest=largest)
        np.testing.assert_array_equal(device.to_host(found), ROWS["topk"](x, k=k, axis=axis, largest=largest)[0])
        np.testing.assert_array_equal(np.take_along_axis(x, device.to_host(indices), axis), device.to_host(found))
    assert_raises(ArgumentError, "k is 5, expected 0 to 4", lambda: ROWS["topk"](device.from_host(x), k=5))


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int32", "uint64"])
def test_searching(dtype: str, device: CudaDevice, rng: np.random.Generator) -> None:
    line, wanted = np.sort(values(rng, dtype, (13,))), values(rng, dtype, (3, 5))
    for side in ("left", "right"):
        for one, other in ((device.from_host(line), device.from_host(wanted)), (line, device.from_host(wanted)), (device.from_host(line), wanted)):
            np.testing.assert_array_equal(device.to_host(np.searchsorted(one, other, side)), np.searchsorted(line, wanted, side))
    np.testing.assert_array_equal(device.to_host(ROWS["isin"](device.from_host(wanted), device.from_host(line[:4]))), np.isin(wanted, line[:4]))
    np.testing.assert_array_equal(device.to_host(ROWS["isin"](device.from_host(wanted), line[:0], invert=True)), np.ones((3, 5), bool))

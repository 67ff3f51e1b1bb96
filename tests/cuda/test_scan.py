"""Cumulative sums and products and linear recurrences on a simulated device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.cuda.device import CudaDevice
from aiograd.ops.op import ROWS
from tests.cuda.on_both import DOMAINS, row_agrees
from tests.support import assert_raises
from tests.tolerance import tolerance

#: the last two take one level of chunks, and two
SHAPES = [(7,), (3, 5), (2, 3, 4), (2, 300), (9000,)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", ["f4", "f8", "f2", "i4", "u1", "?"])
def test_cumulative_sums(device: CudaDevice, dtype: str, shape: tuple[int, ...], rng: np.random.Generator) -> None:
    x = (rng.standard_normal(shape) if dtype[0] == "f" else rng.integers(0, 3, shape)).astype(dtype)
    here = device.from_host(x)
    for axis in {None, 0, -1}:
        with np.errstate(all="ignore"):
            dtype_of_result = np.cumsum(x, axis=axis).dtype
        wanted = np.cumsum(x.astype(np.float64) if x.dtype.kind == "f" else x, axis=axis)
        found = device.to_host(np.cumsum(here, axis=axis))
        assert found.dtype == dtype_of_result
        most = tolerance(dtype_of_result) if dtype_of_result.kind == "f" else 0
        np.testing.assert_allclose(found, wanted, rtol=0, atol=most * (1 + np.abs(wanted).max()))
    assert device.statistics().fallbacks == {}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("reverse", [False, True])
def test_rows_both_ways(device: CudaDevice, shape: tuple[int, ...], reverse: bool, rng: np.random.Generator) -> None:
    x, factor = 1 + 0.05 * rng.standard_normal(shape), 0.9 * rng.standard_normal(shape)
    for axis in {0, len(shape) - 1}:
        for row, args in (("cumsum", (x,)), ("cumprod", (x,)), ("linear_scan", (x, factor))):
            wanted = ROWS[row].forward(*args, axis=axis, reverse=reverse)
            found = ROWS[row](*map(device.from_host, args), axis=axis, reverse=reverse)
            np.testing.assert_allclose(device.to_host(found), wanted, rtol=1e-10, atol=1e-10)
    assert device.statistics().fallbacks == {}


def test_functions_and_methods(device: CudaDevice, rng: np.random.Generator) -> None:
    x = rng.standard_normal((4, 5))
    here = device.from_host(x)
    calls: list[Any] = [
        lambda a: np.add.accumulate(a), lambda a: np.multiply.accumulate(a, axis=1), lambda a: np.cumulative_sum(a, axis=1),
        lambda a: np.cumulative_prod(a[0]), lambda a: np.cumsum(a.T[::-1], axis=0), lambda a: np.cumsum(a, axis=1, dtype=np.float32),
    ]  # fmt: skip
    for call in calls:
        np.testing.assert_allclose(device.to_host(call(here)), call(x), rtol=tolerance(np.float32))
    assert device.statistics().fallbacks == {}
    assert_raises(np.exceptions.AxisError, None, np.cumsum, here, axis=2)
    assert np.cumsum(device.from_host(np.zeros((3, 0))), axis=1).shape == (3, 0)


def test_a_state_of_zero_stays_so_whatever_the_factors_multiply_to(device: CudaDevice) -> None:
    x, factor = np.zeros(400), np.full(400, 1e5)
    x[-1] = 3.0
    found = ROWS["linear_scan"](device.from_host(x), device.from_host(factor))
    np.testing.assert_array_equal(device.to_host(found), x)


def test_the_factor_that_meets_the_start_does_not_matter(device: CudaDevice) -> None:
    x, factor = np.array([1.0, 2.0, 3.0]), np.array([np.nan, 2.0, 2.0])
    np.testing.assert_array_equal(device.to_host(ROWS["linear_scan"](device.from_host(x), device.from_host(factor))), [1, 4, 11])


@pytest.mark.parametrize("name", ["cumsum", "cumprod", "linear_scan", "prod", "prod_others"])
def test_rows(device: CudaDevice, name: str) -> None:
    for variety in range(DOMAINS[name].varieties if name in DOMAINS else 0):
        row_agrees(device, name, variety, "float32")
    assert device.statistics().fallbacks == {}


async def test_gradient_of_a_product_with_zeros(device: CudaDevice) -> None:
    x = np.array([[1, 0, 3], [0, 2, 0], [4, 5, 6]], np.float32)

    async def gradient(place: str) -> np.ndarray:
        t = ag.tensor(x, device=place, requires_grad=True)
        await (ag.prod(t, axis=1) * ag.tensor(np.arange(3, dtype=np.float32), device=place)).sum().backward()
        return (await t.grad).to("cpu").numpy()

    np.testing.assert_allclose(await gradient("cuda:0"), await gradient("cpu"), rtol=tolerance(np.float32))

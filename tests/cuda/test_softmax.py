"""Softmax, its logarithm and the masked variant on a simulated device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.cuda.device import CudaDevice
from aiograd.ops.op import ROWS
from tests.cuda.fused_on_both import fused_agrees
from tests.tolerance import tolerance

NAMES = ("softmax", "log_softmax", "safe_softmax")


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("shape", "axis"), [((3, 5), -1), ((2, 30), 1), ((5, 3), 0), ((2, 9, 2), 1), ((7,), 0), ((2, 1), 1), ((4, 3, 2), 0)])
def test_agrees_with_the_host(device: CudaDevice, name: str, shape: tuple[int, ...], axis: int, dtype: str) -> None:
    x = np.random.default_rng(0).standard_normal(shape) * 3
    fused_agrees(device, name, (x,), {"axis": axis}, dtype)


@pytest.mark.parametrize("name", NAMES)
def test_extreme_values(device: CudaDevice, name: str) -> None:
    inf, nan = np.inf, np.nan
    x = np.array(
        [[1e30, 0, -1e30, 1e30], [-inf, 1, 2, -inf], [-inf, -inf, -inf, -inf], [nan, 1, 2, 3], [0, nan, -inf, 5], [-inf, -inf, -inf, nan],
         [inf, 1, 2, 3], [1, 2, inf, inf]],
        np.float32,
    )  # fmt: skip
    with np.errstate(all="ignore"):
        wanted = ROWS[name].forward(x, -1)
    np.testing.assert_allclose(device.to_host(ROWS[name](device.from_host(x), axis=-1)), wanted, rtol=tolerance(np.float32))
    columns = device.from_host(np.repeat(x.T, 3, axis=1))
    np.testing.assert_allclose(device.to_host(ROWS[name](columns, axis=0)), np.repeat(wanted.T, 3, axis=1), rtol=tolerance(np.float32))


def test_forward_and_backward_are_one_launch_each(device: CudaDevice) -> None:
    fused = device.fused("softmax")
    assert fused is not None
    x, g = device.from_host(np.ones((4, 6), np.float32)), device.from_host(np.ones((4, 6), np.float32))
    (out,) = fused.forward(x, axis=-1)
    fused.rules["x"](g, out, -1)
    device.synchronize()
    assert device.driver.history == ["softmax", "softmax_backward"]


@pytest.mark.parametrize("name", NAMES)
def test_empty_and_strided(device: CudaDevice, name: str) -> None:
    assert ROWS[name](device.from_host(np.zeros((0, 3), np.float32)), axis=-1).shape == (0, 3)
    x = np.random.default_rng(1).standard_normal((5, 4)).astype(np.float32)
    found = ROWS[name](device.from_host(x).T[::2], axis=-1)
    np.testing.assert_allclose(device.to_host(found), ROWS[name].forward(x.T[::2], -1), rtol=1e-5)


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
async def test_higher_derivatives(device: CudaDevice, name: str) -> None:
    x = np.random.default_rng(2).standard_normal((2, 3)).astype(np.float32)

    async def second(place: str) -> np.ndarray:
        t = ag.tensor(x, device=place, requires_grad=True)
        out = getattr(ag.nn.functional, name)(t, -1)
        (first,) = await ag.grad((out * out).sum(), (t,), create_graph=True)
        (result,) = await ag.grad((first * first).sum(), (t,))
        return (await result).to("cpu").numpy()

    np.testing.assert_allclose(await second("cuda:0"), await second("cpu"), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize(
    ("shape", "axis"), [((3, 5), 1), ((5, 3), 0), ((2, 3, 4), (1, 2)), ((2, 3, 4), (0, 2)), ((7,), None), ((300,), 0), ((), None)]
)
def test_logsumexp(device: CudaDevice, shape: tuple[int, ...], axis: Any, dtype: str) -> None:
    x = (np.random.default_rng(3).standard_normal(shape) * 3 + 50).astype(dtype)
    row = ROWS["logsumexp"]
    for keepdims in (False, True):
        wanted = np.asarray(row.forward(x.astype(np.float64), axis, keepdims=keepdims))
        found = device.to_host(row(device.from_host(x), axis=axis, keepdims=keepdims))
        assert (found.shape, found.dtype) == (wanted.shape, np.dtype(dtype))
        np.testing.assert_allclose(found, wanted, rtol=tolerance(dtype))


def test_logsumexp_of_extreme_values(device: CudaDevice) -> None:
    inf, nan = np.inf, np.nan
    x = np.array([[-inf, -inf, -inf], [inf, 1, 2], [inf, inf, -inf], [nan, inf, 1], [-inf, 2, -inf], [1e30, 1e30, 0], [-inf, nan, -inf]], np.float32)
    with np.errstate(all="ignore"):
        wanted = ROWS["logsumexp"].forward(x, 1)
    np.testing.assert_allclose(device.to_host(ROWS["logsumexp"](device.from_host(x), axis=1)), wanted, rtol=tolerance(np.float32))
    repeated = device.to_host(ROWS["logsumexp"](device.from_host(np.repeat(x, 9, axis=1)), axis=1))
    np.testing.assert_allclose(repeated, wanted + np.log(np.float32(9)), rtol=tolerance(np.float32))

"""Arrays in the image of device arrays: constants that cost nothing until somebody needs them, and copies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.cuda.array import CudaArray
from aiograd.cuda.device import CudaDevice
from aiograd.errors import DeviceMemoryError
from aiograd.ops.op import ROWS
from tests.support import assert_awaiting_raises

X = np.arange(6.0, dtype=np.float32).reshape(2, 3)


@pytest.mark.parametrize(
    "function",
    [
        np.zeros_like, np.ones_like, np.copy, lambda x: np.full_like(x, 2.5), lambda x: np.full_like(x, x[0]),
        lambda x: np.full_like(x, 3, dtype=np.int64, shape=(4,)), lambda x: np.zeros_like(x, dtype=bool, shape=()),
        lambda x: np.ones_like(x, shape=(0, 3)), lambda x: np.ones_like(x, dtype=np.complex64), lambda x: np.astype(x, np.int32),
    ],
)  # fmt: skip
def test_functions_of_numpy(function: Any, device: CudaDevice) -> None:
    wanted, found = function(X), function(device.from_host(X))
    assert isinstance(found, CudaArray)
    assert found.dtype == wanted.dtype
    np.testing.assert_array_equal(device.to_host(found), wanted)
    assert device.statistics().fallbacks == {}


def test_empty_has_shape_and_dtype(device: CudaDevice) -> None:
    found = np.empty_like(device.from_host(X), shape=(5,), dtype=np.int8)
    assert (found.shape, found.dtype, device.to_host(found).shape) == ((5,), np.int8, (5,))


def test_rows_make_them_on_the_device(device: CudaDevice) -> None:
    a = device.from_host(X)
    for name, wanted in (("zeros_like", 0), ("ones_like", 1)):
        np.testing.assert_array_equal(device.to_host(ROWS[name](a)), np.full_like(X, wanted))
    np.testing.assert_array_equal(device.to_host(ROWS["full_like"](a, 4, shape=(2,))), [4, 4])
    copy = ROWS["clone"](a)
    a[...] = 9
    np.testing.assert_array_equal(device.to_host(copy), X)


@pytest.mark.parametrize(
    ("make", "wanted"),
    [
        (lambda where: ag.zeros((2, 3), device=where), np.zeros((2, 3), np.float32)),
        (lambda where: ag.ones(4, ag.int64, device=where), np.ones(4, np.int64)),
        (lambda where: ag.full((2,), -0.0, device=where), np.full(2, -0.0, np.float32)),
        (lambda where: ag.full((), True, device=where), np.array(True)),
        (lambda where: ag.full((2,), 1 + 2j, device=where), np.full(2, 1 + 2j)),
        (lambda where: ag.full((2,), 0j, device=where), np.zeros(2, complex)),
        (lambda where: ag.full((0, 3), 7, device=where), np.zeros((0, 3), np.int64)),
    ],
)  # fmt: skip
async def test_tensors_of_one_number_are_made_on_the_device(make: Any, wanted: Any, device: CudaDevice) -> None:
    found, there = make(None), make("cuda:0")
    assert there.device == "cuda:0" and (there.dtype, there.shape) == (found.dtype, found.shape)
    assert device.uploads == (wanted.dtype.kind == "c" and wanted.any()), "complex numbers have no kernel"
    assert (await there).numpy().tobytes() == found.numpy().tobytes() == wanted.astype(found.dtype).tobytes()
    leaf = ag.ones(3, device="cuda:0", requires_grad=True)
    await (leaf * 2).sum().backward()
    assert leaf.requires_grad and (await leaf.grad).numpy().tolist() == [2, 2, 2]


async def test_more_than_the_device_has_is_its_error_and_takes_no_memory_of_the_host(device: CudaDevice) -> None:
    """So much would end this process if the host held it even for a moment."""
    for make in (ag.zeros, ag.ones, ag.empty):
        await assert_awaiting_raises(DeviceMemoryError, "bytes", make((1 << 45,), device="cuda:0"))
    assert device.uploads == 0


def test_a_constant_is_part_of_what_uses_it(device: CudaDevice) -> None:
    a = device.from_host(X)
    np.testing.assert_array_equal(device.to_host(a + np.ones_like(a) * 2), X + 2)
    assert len(device.driver.history) == 1

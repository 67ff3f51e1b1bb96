"""Arrays of the simulated device for other libraries, to which they are arrays of the host, and theirs for it."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from aiograd.cuda.device import CudaDevice
from aiograd.cuda.importing import from_cuda_array, from_dlpack
from aiograd.errors import ArgumentError, DeviceError
from tests.support import assert_raises


@pytest.mark.parametrize("dtype", ["f4", "f8", "i4", "?", "f2"])
def test_numpy_reads_an_array_and_its_views_in_their_memory(device: CudaDevice, dtype: str) -> None:
    host = np.arange(12).reshape(3, 4).astype(dtype)
    x = device.from_host(host)
    assert np.array_equal(np.from_dlpack(x), host)
    assert np.array_equal(np.from_dlpack(x[::-1, 1::2].T), host[::-1, 1::2].T)
    np.from_dlpack(x)[0, 0] = 1
    assert device.to_host(x)[0, 0] == 1, "the same memory"


def test_what_is_pending_is_launched_first(device: CudaDevice) -> None:
    x = device.from_host(np.arange(4, dtype=np.float32))
    assert np.from_dlpack(x * 2 + 1).tolist() == [1, 3, 5, 7]


def test_the_memory_stays_while_it_is_read(device: CudaDevice) -> None:
    read = np.from_dlpack(device.from_host(np.arange(4.0)) + 1)
    gc.collect()
    device.submit(lambda: None).result()
    assert read.tolist() == [1, 2, 3, 4], "freed memory would be poisoned"
    del read
    gc.collect()
    device.submit(lambda: None).result()
    assert device.memory_stats()["allocated"] == 0


def test_a_copy_is_somebody_elses(device: CudaDevice) -> None:
    x = device.from_host(np.arange(3.0))
    copied = np.from_dlpack(x, copy=True)
    copied[0] = 7
    assert device.to_host(x)[0] == 0


def test_arrays_without_elements_and_without_axes(device: CudaDevice) -> None:
    assert np.from_dlpack(device.from_host(np.zeros((0, 3)))).shape == (0, 3)
    assert np.from_dlpack(device.from_host(np.array(2.5))) == 2.5


def test_failed_values_are_not_handed_out(device: CudaDevice) -> None:
    device.driver.faults["add"] = DeviceError("on purpose")  # type: ignore[attr-defined]
    assert_raises(DeviceError, "on purpose", lambda: np.from_dlpack(device.from_host(np.arange(3.0)) + 1))


def test_a_simulated_array_is_none_of_cudas(device: CudaDevice) -> None:
    assert not hasattr(device.from_host(np.zeros(2)), "__cuda_array_interface__")


def test_arrays_of_the_host_are_copied(device: CudaDevice) -> None:
    host = np.arange(6.0).reshape(2, 3)
    x = from_dlpack(device, host[:, ::-1])
    host[:] = 0
    assert np.array_equal(device.to_host(x), [[2, 1, 0], [5, 4, 3]])
    assert_raises(ArgumentError, "no __cuda_array_interface__", from_cuda_array, device, host)

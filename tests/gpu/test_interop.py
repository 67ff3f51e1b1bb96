"""Arrays of torch, cupy and jax as ours and the other way round, in the same memory, with work outstanding on both sides."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aiograd.cuda import discovery

if discovery.is_available():
    from aiograd.cuda.importing import from_cuda_array, from_dlpack

N = 1 << 22


@pytest.fixture
def torch(device: Any) -> Any:
    """PyTorch with this device."""
    module: Any = pytest.importorskip("torch")
    if not module.cuda.is_available():
        pytest.skip("torch was built without CUDA")
    return module


def test_torch_reads_ours_behind_what_fills_it(device: Any, torch: Any) -> None:
    x = device.from_host(np.zeros(N, np.float32))
    for _ in range(50):
        x = x + 1
    theirs = torch.from_dlpack(x)
    assert theirs.data_ptr() == x.__cuda_array_interface__["data"][0]
    assert float(theirs.min()) == float(theirs.max()) == 50
    theirs += 1
    torch.cuda.synchronize()
    assert device.to_host(x)[0] == 51, "the same memory"


def test_torch_reads_ours_by_the_other_protocol(device: Any, torch: Any) -> None:
    x = device.from_host(np.arange(12, dtype=np.float32).reshape(3, 4))[:, ::2] * 2
    device.synchronize()  # torch does not look at the stream that this protocol names
    assert torch.as_tensor(x, device="cuda").tolist() == [[0, 4], [8, 12], [16, 20]]


@pytest.mark.parametrize("how", ["dlpack", "cuda_array"])
def test_we_read_torchs_behind_what_fills_it(device: Any, torch: Any, how: str) -> None:
    x = torch.zeros(N, device="cuda")
    for _ in range(50):
        x = x + 1
    ours = from_dlpack(device, x) if how == "dlpack" else from_cuda_array(device, x)
    if how == "cuda_array":
        torch.cuda.synchronize()  # torch names no stream there
    found = device.to_host(ours + 1)
    assert found.min() == found.max() == 51
    view = from_dlpack(device, torch.arange(12.0, device="cuda").reshape(3, 4).T)
    assert np.array_equal(device.to_host(view + 0), np.arange(12.0).reshape(3, 4).T)


def test_memory_is_not_used_again_while_torch_reads_it(device: Any, torch: Any) -> None:
    for round in range(20):
        x = device.from_host(np.full(N, round, np.float32)) + 0
        theirs = torch.from_dlpack(x)
        sums = [theirs.sum(dtype=torch.float64) for _ in range(5)]
        del x, theirs
        device.from_host(np.full(N, -1, np.float32)) + 0
        assert all(float(s) == round * N for s in sums)


def test_cupy_both_ways(device: Any) -> None:
    cupy: Any = pytest.importorskip("cupy")
    x = device.from_host(np.arange(10, dtype=np.float64)) * 3
    assert cupy.from_dlpack(x).tolist() == cupy.asarray(x).tolist() == [3.0 * i for i in range(10)]
    theirs = cupy.arange(10, dtype=cupy.int64) * 2
    assert device.to_host(from_dlpack(device, theirs)).tolist() == device.to_host(from_cuda_array(device, theirs)).tolist() == list(range(0, 20, 2))


def test_jax_both_ways(device: Any) -> None:
    jax: Any = pytest.importorskip("jax")
    if not any(found.platform == "gpu" for found in jax.devices()):
        pytest.skip("jax was built without CUDA")
    x = device.from_host(np.arange(10, dtype=np.float32)) * 3
    assert np.asarray(jax.dlpack.from_dlpack(x)).tolist() == [3.0 * i for i in range(10)]
    assert device.to_host(from_dlpack(device, jax.numpy.arange(10.0) * 2)).tolist() == [2.0 * i for i in range(10)]

"""Every row of the op tables on the device: forward and rules against float64 on the host, and the same bits twice."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.cuda import discovery
from tests.cuda.samples import ROW_CASES, VARIETIES, domain_of

if discovery.is_available():
    from tests.cuda.on_both import row_agrees
    from tests.gpu.conftest import poison


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("name", "dtype"), ROW_CASES)
def test_rows_agree_with_the_host(device: Any, name: str, dtype: str) -> None:
    for variety in range(min(VARIETIES, domain_of(name).varieties)):
        row_agrees(device, name, variety, dtype)


def _network(x: Any, w: Any) -> Any:
    hidden = ag.nn.functional.gelu(ag.nn.functional.layer_norm(x @ w, (w.shape[1],)))
    return (ag.nn.functional.softmax(hidden, axis=-1) * hidden).sum()


@pytest.mark.parametrize("size", [31, 256, 1000])
async def test_the_same_shapes_give_the_same_bits(device: Any, size: int) -> None:
    rng = np.random.default_rng(size)
    x, w = (rng.standard_normal((size, size)).astype(np.float32) for _ in range(2))
    found = []
    for _ in range(3):
        poison(device)
        leaves = [ag.tensor(value, device="cuda:0", requires_grad=True) for value in (x, w)]
        await _network(*leaves).backward()
        found.append([(await leaf.grad).numpy() for leaf in leaves])
    for other in found[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-13), ("float32", 2e-6), ("float16", 2e-3)])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (33, 65, 17), (512, 512, 512), (1, 4096, 300), (1000, 7, 2049)])
@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
def test_matrix_products(device: Any, dtype: str, tolerance: float, m: int, n: int, k: int, layout: str) -> None:
    rng = np.random.default_rng(m + n + k)
    a = rng.standard_normal((m, k) if layout[0] == "n" else (k, m)).astype(dtype)
    b = rng.standard_normal((k, n) if layout[1] == "n" else (n, k)).astype(dtype)
    left, right = device.from_host(a), device.from_host(b)
    found = device.to_host((left if layout[0] == "n" else left.T) @ (right if layout[1] == "n" else right.T)).astype(np.float64)
    wanted = (a if layout[0] == "n" else a.T).astype(np.float64) @ (b if layout[1] == "n" else b.T).astype(np.float64)
    assert np.linalg.norm(found - wanted) <= tolerance * np.linalg.norm(wanted)


def test_single_precision_is_single_precision(device: Any) -> None:
    """With 11 bits, as TF32 has them, 1 + 2⁻²⁰ would be 1."""
    a = np.full((256, 256), np.float32(1 + 2**-20))
    found = device.to_host(device.from_host(a) @ device.from_host(np.eye(256, dtype=np.float32)))
    assert np.array_equal(found, a)

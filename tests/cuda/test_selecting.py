"""Choosing, limiting and comparing on a simulated CUDA device, against numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aiograd.cuda.device import CudaDevice

X = np.array([[1.26, -3.5, np.nan], [np.inf, -np.inf, 0.5]])


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: np.where(x > 0, x, -1), lambda x: np.where(np.isnan(x), 0.0, x), lambda x: np.where(x, 1, 2), lambda x: np.clip(x, -1, 1),
        lambda x: np.clip(x, None, x * 0 + 1), lambda x: np.clip(x, min=0), np.nan_to_num, lambda x: np.nan_to_num(x, nan=7, posinf=8, neginf=-9),
        np.round, lambda x: np.round(x, 1), lambda x: np.around(x * 100, -1), lambda x: np.isclose(x, x + 1e-9),
        lambda x: np.isclose(x, 1.26, equal_nan=True), lambda x: np.isclose(x, x, equal_nan=True),
    ],
)  # fmt: skip
def test_functions_of_numpy(function: Any, dtype: type, device: CudaDevice) -> None:
    x = X.astype(dtype)
    with np.errstate(all="ignore"):
        wanted = function(x)
    found = function(device.from_host(x))
    assert found.dtype == wanted.dtype
    np.testing.assert_array_equal(device.to_host(found), wanted)
    assert device.statistics().fallbacks == {}


@pytest.mark.parametrize(
    "function", [np.nan_to_num, np.round, lambda x: np.clip(x, 2, 4), lambda x: np.where(x > 2, x, 0), lambda x: np.isclose(x, 3)]
)
def test_functions_of_integers(function: Any, device: CudaDevice) -> None:
    x = np.arange(6)
    wanted, found = function(x), function(device.from_host(x))
    assert found.dtype == wanted.dtype
    np.testing.assert_array_equal(device.to_host(found), wanted)
    assert device.statistics().fallbacks == {}


def test_results_go_where_they_are_asked_to(device: CudaDevice) -> None:
    a = device.from_host(X)
    out = np.zeros_like(a)
    assert np.clip(a, 0, 1, out) is out
    np.testing.assert_array_equal(device.to_host(out), np.clip(X, 0, 1))
    assert np.round(a, 0, out) is out
    np.testing.assert_array_equal(device.to_host(out), np.round(X))

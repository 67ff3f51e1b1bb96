"""Joining, repeating and padding on a simulated CUDA device, against numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aiograd.cuda.device import CudaDevice
from aiograd.errors import ShapeError
from tests.cuda.on_both import DOMAINS, row_agrees
from tests.support import assert_raises

ROWS = "cat stack split unbind tile repeat_interleave constant_pad roll shift flip diagonal diagonal_adjoint tril triu".split()


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("name", ROWS)
def test_rows(name: str, dtype: str, device: CudaDevice) -> None:
    for variety in range(DOMAINS[name].varieties):
        row_agrees(device, name, variety, dtype)
    assert device.statistics().fallbacks == {}


@pytest.mark.parametrize(
    "function",
    [
        lambda x: np.concatenate([x, x[::-1], x[:0]]), lambda x: np.concatenate([x.T, x.T], axis=1), lambda x: np.concatenate([x, x], axis=None),
        lambda x: np.concatenate([x, np.ones((1, 4))], dtype=np.float32), lambda x: np.stack([x, x + 1], axis=-1), lambda x: np.vstack([x[0], x]),
        lambda x: np.hstack([x, x]), lambda x: np.hstack([x[0], x[1]]), lambda x: np.append(x, x, axis=0), lambda x: np.tile(x, (2, 1, 3)),
        lambda x: np.tile(x[0], 0), lambda x: np.repeat(x, 3, axis=1), lambda x: np.repeat(x, 2), lambda x: np.repeat(x, [2, 0, 1], axis=0),
        lambda x: np.pad(x, ((1, 0), (2, 3)), constant_values=7), lambda x: np.pad(x, 2, mode="reflect"), lambda x: np.pad(x, 2, mode="wrap"),
        lambda x: np.roll(x, 5), lambda x: np.roll(x, (1, -2), (0, 1)), lambda x: np.roll(x, (1, 2), 0), lambda x: np.tril(x, -1),
        lambda x: np.triu(x, 1),
    ],
)  # fmt: skip
def test_functions_of_numpy(function: Any, device: CudaDevice, rng: np.random.Generator) -> None:
    x = rng.standard_normal((3, 4))
    wanted, found = function(x), function(device.from_host(x))
    assert found.dtype == wanted.dtype
    np.testing.assert_array_equal(device.to_host(found), wanted)
    assert device.statistics().fallbacks == {}


def test_complex_numbers_and_booleans_are_copied_too(device: CudaDevice, rng: np.random.Generator) -> None:
    for x in (rng.standard_normal((2, 3)) * (1 + 2j), (rng.standard_normal((2, 3)) * 1j).astype(np.complex64), rng.standard_normal((2, 3)) > 0):
        a = device.from_host(x)
        np.testing.assert_array_equal(device.to_host(np.concatenate([a, a[:, ::-1].copy()])), np.concatenate([x, x[:, ::-1]]))
    assert device.statistics().fallbacks == {}


def test_what_does_not_fit_is_refused(device: CudaDevice) -> None:
    a, b = device.from_host(np.ones((2, 3))), device.from_host(np.ones((2, 4)))
    assert_raises(ShapeError, r"\[2, 3\], \[2, 4\] do not fit along axis 0", np.concatenate, [a, b])
    assert_raises(ShapeError, "expected one shape", np.stack, [a, b])
    assert_raises(np.exceptions.AxisError, None, np.concatenate, [a, a], axis=2)
    assert_raises(ValueError, "-1 repetitions", np.repeat, a, -1)

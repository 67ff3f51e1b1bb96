"""Support: the tensors and comparisons that tests of every room start from."""

from __future__ import annotations

from typing import Any

import numpy as np

import aiograd as ag


def leaf(values: Any, dtype: Any = np.float64) -> ag.Tensor:
    """A leaf that requires grad, float64 unless asked otherwise."""
    return ag.tensor(values, dtype=dtype, requires_grad=True)


def constant(values: Any) -> ag.Tensor:
    """A float64 tensor that does not require grad."""
    return ag.tensor(values, dtype=np.float64)


def same(tensor: Any, values: Any) -> None:
    """Assert that a tensor holds these values, to the bit."""
    np.testing.assert_array_equal(tensor.numpy(), values)


def draw(*shape: int, at: int = 0) -> Any:
    """Standard normal numbers of a shape; `at` is the seed."""
    return np.random.default_rng(at).standard_normal(shape)

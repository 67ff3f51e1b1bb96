"""Placement by estimates: small work stays on the loop, and an estimate follows what a rule really goes through."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import nn
from aiograd.engine.placement import INLINE_NS
from aiograd.kernels import selection


@pytest.fixture
def _compiled_kernels() -> Iterator[None]:
    if not selection.available():
        pytest.skip("numba is not installed")
    before = selection.selected()
    selection.use("numba")
    yield
    selection._chosen = before


def _estimate(module: nn.Module, *shape: int) -> float:
    out: Any = module(ag.tensor(np.ones(shape, np.float32), requires_grad=True))
    return (out[0] if isinstance(out, tuple) else out).grad_fn.estimate()  # type: ignore[no-any-return]


@pytest.mark.timeout(900)  # compiles the kernels where the user's cache does not hold them yet
@pytest.mark.usefixtures("_compiled_kernels")
def test_a_short_sequence_in_compiled_loops_stays_on_the_loop() -> None:
    assert _estimate(nn.LSTM(16, 16), 50, 4, 16) < INLINE_NS
    assert _estimate(nn.LSTM(64, 128), 50, 16, 64) > INLINE_NS


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("_compiled_kernels")
def test_a_sequence_too_small_for_compiled_loops_is_estimated_by_its_steps() -> None:
    assert _estimate(nn.LSTM(4, 4), 100, 1, 4) > _estimate(nn.LSTM(16, 16), 100, 4, 16)


@pytest.mark.parametrize("build", [lambda groups: nn.Conv2d(8, 8, 3, groups=groups), lambda groups: nn.Conv2d(8, 8, 3, stride=2, groups=groups)])
def test_groups_and_strides_divide_the_work_of_a_convolution(build: Callable[[int], nn.Module]) -> None:
    whole, grouped = _estimate(build(1), 2, 8, 16, 16), _estimate(build(8), 2, 8, 16, 16)
    assert grouped < whole
    assert _estimate(nn.Conv2d(8, 8, 3, stride=2), 2, 8, 16, 16) < _estimate(nn.Conv2d(8, 8, 3), 2, 8, 16, 16)

"""Powers with Python numbers take their short cuts in programs too, with the bits of eager."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.compiler.native.tiers import native_problem
from tests.sweeps import swept

SHORT = (2, 3, 0.5, -1, 1)
TIERS = [pytest.param(tier, marks=pytest.mark.skipif(tier == "native" and native_problem() is not None, reason="no native programs here"))
         for tier in ("numpy", "native")]  # fmt: skip


async def bits(function: Any, x: Any) -> list[bytes]:
    """Of the value, the gradient, and the gradient of the gradient's sum."""
    value = function(x)
    (first,) = await ag.grad(value.sum(), [x], create_graph=True)
    second = None
    if first.requires_grad:
        (second,) = await ag.grad(first.sum(), [x], allow_unused=True)
    return [b"" if each is None else each.numpy().tobytes() for each in (value, first, second)]


@pytest.mark.one_loop
@pytest.mark.parametrize("dtype", swept([np.float32, np.float64]))
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("exponent", [*SHORT, 4, 0, 1.5, 2.5, -2, 0.1])
async def test_a_power_has_the_bits_of_eager(exponent: float, tier: str, dtype: Any) -> None:
    def function(x: Any) -> Any:
        return x**exponent

    compiled = ag.compile(function, tier=tier)
    numbers = np.random.default_rng(0).uniform(0.2, 3.0, (3, 40)).astype(dtype)
    for _ in range(3):
        x = ag.tensor(numbers, requires_grad=True)
        assert await bits(compiled, x) == await bits(function, x)
    (program,) = compiled.programs
    assert ("pow(" in program.source.partition("def backward")[0]) is (exponent not in SHORT)
    if tier == "native" and exponent in SHORT:
        assert not program.native.fallbacks


@pytest.mark.one_loop
async def test_an_exponent_that_is_a_tensor_is_read_at_every_run() -> None:
    exponent, x = ag.tensor(2.0), ag.tensor([1.5, 3.0], requires_grad=True)
    power = ag.compile(lambda x: (x**exponent).sum())
    assert power(x).item() == 1.5**2 + 9
    exponent.copy_(3.0)
    loss = power(x)
    await loss.backward()
    assert loss.item() == 1.5**3 + 27 and x.grad.tolist() == [3 * 1.5**2, 27]

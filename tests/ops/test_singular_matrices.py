"""Determinants and their derivatives at matrices without an inverse, and the error where a result or a derivative does not exist."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.errors import AiogradError, LinearAlgebraError

SINGULAR: dict[str, Any] = {
    "rank 2 of 3": np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [5.0, 7.0, 9.0]]),
    "rank 2 of 4": np.outer([1.0, 2.0, -1.0, 0.5], [0.5, 1.0, 3.0, 1.0]) + np.outer([1.0, 0.0, 1.0, 2.0], [1.0, -1.0, 0.0, 1.0]),
    "rank 1 of 3": np.ones((3, 3)),
    "rank 1 of 2": np.array([[1.0, 2.0], [2.0, 4.0]]),
    "zeros": np.zeros((3, 3)),
    "one zero": np.zeros((1, 1)),
    "beside an invertible one": np.stack([np.eye(3), np.ones((3, 3))]),
    "complex": np.outer([1.0, 2.0j, 1.0], [1.0 + 1.0j, 0.5, -1.0]),
    "empty": np.zeros((0, 0)),
}


@pytest.mark.parametrize("name", SINGULAR)
async def test_determinants_have_two_derivatives_at_every_matrix(name: str) -> None:
    x = ag.tensor(SINGULAR[name], requires_grad=True)
    assert await ag.gradcheck(ag.linalg.det, (x,))
    assert await ag.gradgradcheck(ag.linalg.det, (x,))


async def test_the_second_derivative_is_exact_where_the_inverse_is_useless() -> None:
    x = ag.tensor([[1.0, 2.0], [2.0, 4.0]], dtype=np.float64, requires_grad=True)
    (first,) = await ag.grad(ag.linalg.det(x), [x], create_graph=True)
    (second,) = await ag.grad(first[0, 0] + 3.0 * first[0, 1], [x])
    np.testing.assert_allclose(second.numpy(), [[0.0, 0.0], [-3.0, 1.0]], atol=1e-14)


async def test_the_third_derivative_of_a_determinant_is_that_of_the_expansion() -> None:
    x = ag.tensor(np.random.default_rng(3).normal(size=(3, 3)), requires_grad=True)
    (first,) = await ag.grad(ag.linalg.det(x), [x], create_graph=True)
    (second,) = await ag.grad(first[0, 0], [x], create_graph=True)
    (third,) = await ag.grad(second[1, 1], [x])
    np.testing.assert_allclose(third.numpy(), np.diag([0.0, 0.0, 1.0]), atol=1e-12)


async def _third(x: Any) -> Any:
    (first,) = await ag.grad(ag.linalg.det(x), [x], create_graph=True)
    (second,) = await ag.grad(first.sum(), [x], create_graph=True)
    return await ag.grad(second.sum(), [x])


ONES = np.ones((3, 3))
#: what has no result, or no derivative, at a matrix of ones
WITHOUT: dict[str, Callable[[Any], Any]] = {
    "inv": ag.linalg.inv, "np.linalg.inv": np.linalg.inv, "solve": lambda x: ag.linalg.solve(x, np.ones(3)),
    "negative power": lambda x: ag.linalg.matrix_power(x, -1), "cholesky": lambda x: ag.linalg.cholesky(-x),
    "slogdet": lambda x: ag.grad(ag.linalg.slogdet(x).logabsdet, [x]), "logdet": lambda x: ag.grad(ag.linalg.logdet(x), [x]),
    "third derivative of det": _third,
}  # fmt: skip


@pytest.mark.parametrize("name", WITHOUT)
async def test_what_does_not_exist_is_a_typed_error(name: str) -> None:
    x = ag.tensor(ONES, requires_grad=True)
    with pytest.raises(LinearAlgebraError, match=r"float64 \[3, 3\]") as refused:
        await WITHOUT[name](x)
    assert isinstance(refused.value, AiogradError) and isinstance(refused.value, np.linalg.LinAlgError)
    assert x.grad is None

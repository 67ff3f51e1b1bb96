"""The methods for linear systems: numpy's solutions from products alone, and refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aiograd.errors import ConvergenceError
from aiograd.implicit import solvers
from aiograd.implicit.solvers import IMPLICIT_COUNTS, METHODS, LinearSystem
from tests.support import assert_awaiting_raises

pytestmark = pytest.mark.one_loop
rng = np.random.default_rng(0)
EPS = float(np.finfo(np.float64).eps)
N = 80
ORTHOGONAL = np.linalg.qr(rng.normal(size=(N, N)))[0]
SYMMETRIC = ORTHOGONAL @ np.diag(np.geomspace(1.0, 1e3, N)) @ ORTHOGONAL.T
GENERAL = 4 * np.eye(N) + 0.2 * rng.normal(size=(N, N))
B = rng.normal(size=N)


def system(matrix: Any, tol: float = 1e-10, maxiter: int | None = None, eps: float = EPS) -> LinearSystem:
    async def multiply(v: Any) -> Any:
        return (matrix.astype(np.float32) @ v.astype(np.float32)).astype(np.float64) if eps > EPS else matrix @ v

    return LinearSystem("a system", multiply, eps, tol, maxiter)


@pytest.mark.parametrize(
    ("method", "matrix"), [("cg", SYMMETRIC), ("cg", -SYMMETRIC), ("gmres", GENERAL), ("gmres", SYMMETRIC), ("bicgstab", GENERAL), ("cg", np.eye(N))]
)
async def test_solutions_are_those_of_numpy(method: str, matrix: Any) -> None:
    """Also of a right side so small or large that its square is none."""
    expected, before, products = np.linalg.solve(matrix, B), IMPLICIT_COUNTS.iterations, 0
    for scale in (1.0, 1e-200, 1e200):
        one = system(matrix, maxiter=20_000)
        found = await one.solve(method, B * scale)
        assert np.linalg.norm(matrix @ (found / scale) - B) <= 1.01e-10 * np.linalg.norm(B)
        np.testing.assert_allclose(found / scale, expected, rtol=1e-4, atol=1e-8)
        products += one.products
    assert IMPLICIT_COUNTS.iterations - before == products


async def test_gmres_restarts_and_takes_no_more_products_than_unknowns(monkeypatch: pytest.MonkeyPatch) -> None:
    one = system(SYMMETRIC)
    await one.solve("gmres", B)
    assert one.products <= N + 1
    monkeypatch.setattr(solvers, "MOST", 25)
    one = system(SYMMETRIC, maxiter=20_000)
    found = await one.solve("gmres", B)
    assert one.products > 2 * N and np.linalg.norm(SYMMETRIC @ found - B) <= 1.01e-10 * np.linalg.norm(B)
    few = system(np.diag([1.0, 2.0, 3.0]))
    await few.solve("gmres", np.ones(3))
    assert few.products == 4, "three, and one that checks"
    two = system(np.diag([1.0, 2.0, 3.0, 2.0, 1.0, 1.0]))
    await two.solve("gmres", np.ones(6))
    assert two.products == 4, "there are three eigenvalues"


@pytest.mark.parametrize("method", METHODS)
async def test_products_in_float32_are_solved_as_far_as_they_go(method: str) -> None:
    matrix = GENERAL @ GENERAL.T
    one = system(matrix, eps=float(np.finfo(np.float32).eps))
    found = await one.solve(method, B)
    np.testing.assert_allclose(found, np.linalg.solve(matrix, B), rtol=1e-3, atol=1e-4)
    assert one.products < 4 * N


@pytest.mark.parametrize("method", METHODS)
async def test_a_right_side_of_zeros_takes_no_product(method: str) -> None:
    one = system(GENERAL)
    np.testing.assert_array_equal(await one.solve(method, np.zeros(N)), np.zeros(N))
    assert one.products == 0


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("matrix", [np.zeros((2, 2)), np.diag([1.0, 0.0]), np.array([[0.0, 1.0], [0.0, 0.0]]), np.diag([1e-17, 0.0])])
async def test_singular_systems_are_refused(matrix: Any, method: str) -> None:
    error = await assert_awaiting_raises(ConvergenceError, "a system: ", system(matrix).solve(method, np.array([1.0, 2.0])))
    assert not error.norm <= error.limit


@pytest.mark.parametrize("method", METHODS)
async def test_a_singular_system_with_a_solution_is_solved(method: str) -> None:
    """The gradient does not depend on which of the solutions it is."""
    np.testing.assert_allclose(await system(np.ones((2, 2))).solve(method, np.ones(2)), [0.5, 0.5])


async def test_slight_asymmetry_is_found_or_does_no_harm() -> None:
    for size in (1e-12, 1e-9, 1e-6, 1e-3):
        matrix = SYMMETRIC + size * np.triu(rng.normal(size=(N, N)) * 100)
        try:
            found = await system(matrix).solve("cg", B)
        except ConvergenceError:
            assert size > 1e-9
        else:
            assert np.linalg.norm(matrix @ found - B) <= 1.01e-10 * np.linalg.norm(B)
            assert size < 1e-3

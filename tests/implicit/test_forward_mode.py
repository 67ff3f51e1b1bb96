"""Implicit functions in forward mode: the tangents of closed forms, of batches of tangents, and refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import implicit
from aiograd.errors import ArgumentError, ConvergenceError, OnceDifferentiableError
from tests.support import assert_awaiting_raises

rng = np.random.default_rng(0)
M = np.eye(5) + 0.2 * rng.normal(size=(5, 5))
A, V = np.array([4.0, 9.0]), np.array([1.0, -2.0])


def start(n: int = 2) -> Any:
    return ag.ones(n, dtype=np.float64)


def close(found: Any, wanted: Any) -> None:
    np.testing.assert_allclose(found.detach().numpy(), wanted, rtol=1e-9, atol=1e-12)


square_root = implicit.root(lambda x, a: x * x - a)(lambda x, a: np.sqrt(a))


async def test_the_tangent_of_a_square_root_and_of_what_follows() -> None:
    async def fn(a: Any) -> Any:
        return (await square_root(start(), a * a)) ** 3

    outputs, products = await ag.jvp(fn, ag.asarray(A), ag.asarray(V))
    close(outputs, A**3)
    close(products, 3 * A**2 * V)


@pytest.mark.parametrize("solve", ["gmres", "bicgstab"])
async def test_forward_mode_agrees_with_backward_for_a_jacobian_that_is_not_symmetric(solve: str) -> None:
    seen = []

    @implicit.root(lambda x, m, b: m @ x + 0.1 * x**3 - b, solve=solve)
    async def newton(x: Any, m: Any, b: Any) -> Any:
        seen.append((type(x._data), type(m._data)))
        for _ in range(30):
            x = x - ag.asarray(np.linalg.solve(m.numpy() + np.diag(0.3 * x.numpy() ** 2), (m @ x + 0.1 * x**3 - b).numpy()))
        return x

    async def fn(m: Any, b: Any) -> Any:
        return await newton(start(5), m, b)

    inputs = ag.asarray(M), ag.asarray(rng.normal(size=5))
    vectors, cotangent = (ag.asarray(rng.normal(size=(5, 5))), ag.asarray(rng.normal(size=5))), rng.normal(size=5)
    _, product = await ag.jvp(fn, inputs, vectors)
    _, pulled = await ag.vjp(fn, inputs, ag.asarray(cotangent))
    assert sum(float((p * v).sum()) for p, v in zip(pulled, vectors, strict=True)) == pytest.approx(float(product.numpy() @ cotangent), rel=1e-8)
    assert set(seen) == {(np.ndarray, np.ndarray)}, "the solver gets plain values"


async def test_the_tangent_of_a_minimum_of_a_captured_value_and_of_a_fixed_point() -> None:
    async def fn(a: Any) -> Any:
        @implicit.argmin(lambda x: ((x - a) ** 2).sum() + (a * x * x).sum())
        async def minimum(x: Any) -> Any:
            return a / (1 + a)

        @implicit.fixed_point(lambda x, b: 0.5 * x + a * b)
        async def fixed(x: Any, b: Any) -> Any:
            return 2 * A * b.numpy()

        return await minimum(start()), await fixed(start(), ag.asarray(V))

    (minimum, fixed), (of_minimum, of_fixed) = await ag.jvp(fn, ag.asarray(A), ag.asarray(V))
    close(minimum, A / (1 + A))
    close(of_minimum, V / (1 + A) ** 2)
    close(of_fixed, 2 * V * V)


async def test_jacobians_solve_a_system_for_each_row_or_column() -> None:
    async def fn(a: Any) -> Any:
        return await square_root(start(), a)

    close(await ag.jacobian(fn, ag.asarray(A)), np.diag(0.5 / np.sqrt(A)))
    _, products = await ag.vmap(lambda v: ag.jvp(fn, ag.asarray(A), v))(ag.asarray(np.eye(2)))
    close(products, np.diag(0.5 / np.sqrt(A)))
    for jacobian_of in (ag.jacrev, ag.jacfwd):
        close(await jacobian_of(fn, ag.asarray(A)), np.diag(0.5 / np.sqrt(A)))


async def test_tangents_that_are_pushed_later() -> None:
    async def fn(a: Any) -> Any:
        return await square_root(start(), a * a)

    outputs, push = await ag.linearize(fn, ag.asarray(A))
    close(outputs, A)
    for _ in range(2):
        close(await push(ag.asarray(V)), V)


async def test_a_keyword_with_a_tangent_is_refused() -> None:
    @implicit.root(lambda x: x - 1)
    def solve(x: Any, *, a: Any) -> Any:
        return x

    product = ag.jvp(lambda a: solve(start(), a=a), ag.asarray(A), ag.asarray(V))
    await assert_awaiting_raises(ArgumentError, "the residual does not get keywords", product)


async def test_a_constant_has_no_tangent_and_a_failure_is_typed() -> None:
    async def constant(a: Any) -> Any:
        return await square_root(a, ag.asarray(A)) + 0 * a

    _, products = await ag.jvp(constant, ag.asarray(A), ag.asarray(V))
    close(products, 0 * V)

    await assert_awaiting_raises(ConvergenceError, "has no solution near", ag.jvp(zero_slope, ag.asarray(A), ag.asarray(V)))


async def zero_slope(a: Any) -> Any:
    return await implicit.root(lambda x, a: (x - a.detach()) ** 2 + a - a.detach())(lambda x, a: a)(start(), a)


async def test_second_derivatives_are_refused_whichever_way() -> None:
    async def fn(a: Any) -> Any:
        return (await square_root(start(), a)).sum()

    async def slope(a: Any) -> Any:
        return (await ag.jvp(fn, a, ag.asarray(V)))[1]

    a = ag.asarray(A)
    await assert_awaiting_raises(OnceDifferentiableError, None, ag.hessian(fn, a))
    await assert_awaiting_raises(OnceDifferentiableError, "square|lambda", ag.jvp(slope, a, ag.asarray(V)))
    leaf = ag.tensor(A, requires_grad=True)
    await assert_awaiting_raises(OnceDifferentiableError, None, ag.jvp(fn, leaf, ag.asarray(V), create_graph=True))

    async def gradient(a: Any) -> Any:
        return (await ag.value_and_grad(fn, a, create_graph=True))[1]

    await assert_awaiting_raises(OnceDifferentiableError, None, ag.jvp(gradient, a, ag.asarray(V)))

    async def weighted(v: Any) -> Any:
        async def product(a: Any) -> Any:
            return ((await square_root(start(), a)) * v).sum()

        return (await ag.value_and_grad(product, a))[1]

    await assert_awaiting_raises(OnceDifferentiableError, None, ag.jvp(weighted, ag.asarray(V), ag.asarray(V)))

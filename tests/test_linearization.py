"""`linearize`: one run, many tangents. `hvp`: forward over reverse."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.errors import ArgumentError, ShapeError
from tests.support import assert_awaiting_raises

rng = np.random.default_rng(0)
W = rng.normal(size=(3, 3))


def two(x: Any, y: Any) -> Any:
    return ag.tanh(ag.tensor(W) @ x) * y.sum(), (x * x).sum()


async def test_a_function_runs_once_for_any_number_of_tangents() -> None:
    runs: list[int] = []

    async def counted(x: Any, y: Any) -> Any:
        runs.append(1)
        await asyncio.sleep(0)
        return two(x, y)

    x, y = ag.tensor(rng.normal(size=3)), ag.tensor(rng.normal(size=2))
    outputs, push = await ag.linearize(counted, (x, y))
    for output, expected in zip(outputs, two(x, y), strict=True):
        np.testing.assert_array_equal(output.numpy(), expected.numpy())

    async def one(t: Any, u: Any) -> None:
        found, (_, expected) = await push(t, u), await ag.jvp(two, (x, y), (t, u))
        for mine, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(mine.numpy(), theirs.numpy(), rtol=1e-12)

    await asyncio.gather(*[one(ag.tensor(rng.normal(size=3)), ag.tensor(rng.normal(size=2))) for _ in range(4)])
    block = ag.tensor(np.eye(3)), ag.tensor(np.zeros((3, 2)))
    rows = await ag.vmap(push)(*block)
    np.testing.assert_allclose(rows[0].numpy().T, (await ag.jacrev(two, (x, y)))[0][0].numpy(), rtol=1e-12)
    assert runs == [1]


def overwritten(x: Any) -> Any:
    y = x * 2.0
    part = y[1:]
    z, squares = part.exp(), y * y
    z *= 0.5
    part *= x[1:]
    y[0] = 3.0
    return z * 1.0, y, squares


async def test_values_that_are_written_later_are_saved_as_they_were() -> None:
    x, t = ag.tensor(rng.normal(size=3)), ag.tensor(rng.normal(size=3))
    _, expected = await ag.jvp(overwritten, x, t)
    _, push = await ag.linearize(overwritten, x)
    for mine, theirs in zip(await push(t), expected, strict=True):
        np.testing.assert_allclose(mine.numpy(), theirs.numpy(), rtol=1e-12)

    async def pushed(row: Any) -> Any:
        return await (await ag.linearize(overwritten, row))[1](t)

    for mine, theirs in zip(await ag.vmap(pushed)(ag.stack([x, x])), expected, strict=True):
        np.testing.assert_allclose(mine.numpy()[1], theirs.numpy(), rtol=1e-12)


async def test_the_caller_may_write_into_inputs_and_outputs() -> None:
    x, t = ag.tensor(rng.normal(size=3)), ag.tensor(rng.normal(size=3))
    expected = (t * x.exp()).numpy(), (t * 2.0 * x).numpy()
    (first, second), push = await ag.linearize(lambda x: (x.exp(), x * x), x)
    for tensor in (x, first, second):
        tensor.zero_()
    for mine, theirs in zip(await push(t), expected, strict=True):
        np.testing.assert_allclose(mine.numpy(), theirs, rtol=1e-12)


async def test_structures_and_wrong_tangents() -> None:
    x = ag.tensor([1.0, 2.0])
    output, push = await ag.linearize(lambda x: x * 3.0, x)
    assert (await push(x)).tolist() == [3.0, 6.0] and output.tolist() == [3.0, 6.0]
    (output,), push = await ag.linearize(lambda x: [ag.ones(2)], x)
    assert (await push(x))[0].tolist() == [0.0, 0.0]
    await assert_awaiting_raises(ArgumentError, "2 vectors for 1 input", push(x, x))
    await assert_awaiting_raises(ShapeError, "vector 0 is", push(ag.ones(3)))
    await assert_awaiting_raises(ArgumentError, "dtype int64", ag.linearize(lambda x: x, ag.tensor([1, 2])))


async def test_products_with_a_hessian() -> None:
    x, y = ag.tensor(rng.normal(size=3)), ag.tensor(rng.normal(size=2))
    v, w = ag.tensor(rng.normal(size=3)), ag.tensor(rng.normal(size=2))

    async def loss(x: Any, y: Any) -> Any:
        a, b = two(x, y)
        return (a * a).sum() * ag.exp(b) + (y**3).sum()

    value, products = await ag.hvp(loss, (x, y), (v, w))
    np.testing.assert_allclose(value.numpy(), (await loss(x, y)).numpy())
    h = await ag.hessian(loss, (x, y), strict=True)
    for i, product in enumerate(products):
        np.testing.assert_allclose(product.numpy(), h[i][0].numpy() @ v.numpy() + h[i][1].numpy() @ w.numpy(), rtol=1e-10)
    assert not value.requires_grad and not products[0].requires_grad
    _, product = await ag.hvp(lambda s: s**3, ag.tensor(2.0))
    assert float(product) == 12.0
    await assert_awaiting_raises(ShapeError, "single element", ag.hvp(lambda x: x, x, v))
    await assert_awaiting_raises(ShapeError, "one element only", ag.hvp(lambda x: x.sum(), x))


async def test_a_product_can_be_differentiated() -> None:
    x = ag.tensor(rng.normal(size=3), requires_grad=True)
    v = ag.tensor(rng.normal(size=3))
    _, product = await ag.hvp(lambda x: (x**4).sum(), x, v, create_graph=True)
    (third,) = await ag.grad(product.sum(), [x])
    np.testing.assert_allclose(third.numpy(), 24 * x.detach().numpy() * v.numpy())


@pytest.mark.parametrize("function", [ag.hvp, ag.jvp])
async def test_a_backward_pass_is_not_recorded(function: Any) -> None:
    x = ag.tensor(rng.normal(size=3), requires_grad=True)
    _, product = await function(lambda x: (x**4).sum(), x, ag.ones(3, dtype=np.float64))
    assert product.grad_fn is None and x.grad is None

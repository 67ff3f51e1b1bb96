"""gather, scatter and their relatives in PyTorch's order, against loops; cumulative extrema and logsumexp."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.errors import ArgumentError, ArgumentTypeError, ShapeError
from tests.support import assert_raises, draw

FUNCTIONS: dict[str, Any] = {"sum": np.sum, "prod": np.prod, "mean": np.mean, "amax": np.max, "amin": np.min}
#: shapes of x, index, source, and the axis
SHAPES: list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]] = [
    ((4,), (6,), (7,), 0), ((3, 4), (5, 4), (5, 4), 0), ((3, 4), (2, 6), (3, 6), 1), ((2, 3, 2), (2, 5, 1), (2, 5, 2), -2), ((), (), (), 0),
]  # fmt: skip


def drawn(number: int) -> tuple[Any, Any, Any, int]:
    shape, index, source, axis = SHAPES[number]
    places = np.random.default_rng(number).integers(0, shape[axis] if shape else 1, index)
    return draw(*shape), places, draw(*source, at=1), axis


def contributions(x: Any, index: Any, source: Any, axis: int) -> dict[tuple[int, ...], list[float]]:
    found: dict[tuple[int, ...], list[float]] = {}
    for place in itertools.product(*map(range, index.shape)):
        target = list(place)
        if target:
            target[axis] = index[place]
        found.setdefault(tuple(target), []).append(source[place])
    return found


@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("reduce", FUNCTIONS)
@pytest.mark.parametrize("number", range(len(SHAPES)))
async def test_scatter_reduce(number: int, reduce: str, include_self: bool) -> None:
    x, index, source, axis = drawn(number)
    wanted = x.copy()
    for place, values in contributions(x, index, source, axis).items():
        wanted[place] = FUNCTIONS[reduce](values + [x[place]] * include_self)
    a, b = ag.tensor(x, requires_grad=True), ag.tensor(source, requires_grad=True)
    found = ag.scatter_reduce(a, axis, index, b, reduce, include_self=include_self)
    np.testing.assert_allclose(found.detach().numpy(), wanted, rtol=1e-12)

    def function(a: Any, b: Any) -> Any:
        return ag.scatter_reduce(a, axis, index, b, reduce, include_self=include_self)

    assert await ag.gradcheck(function, (a, b))
    assert await ag.gradgradcheck(function, (a, b), atol=1e-4, rtol=1e-3)


async def test_a_product_with_zeros_has_exact_derivatives() -> None:
    x, source = ag.tensor([2.0, 3.0], dtype=np.float64, requires_grad=True), ag.tensor([0.0, 5.0, 0.0], dtype=np.float64, requires_grad=True)
    out = ag.scatter_reduce(x, 0, [0, 0, 1], source, "prod")
    np.testing.assert_array_equal(out.detach().numpy(), [0, 0])
    await out.sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), [0, 0])
    np.testing.assert_array_equal(source.grad.numpy(), [10, 0, 3])


async def test_equal_extrema_share_the_gradient() -> None:
    x, source = ag.tensor([3.0, 1.0], dtype=np.float64, requires_grad=True), ag.tensor([3.0, 3.0, 0.0], dtype=np.float64, requires_grad=True)
    await (ag.scatter_reduce(x, 0, [0, 0, 1], source, "amax") * ag.tensor([6.0, 1.0], dtype=np.float64)).sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), [2, 1])
    np.testing.assert_array_equal(source.grad.numpy(), [2, 2, 0])


@pytest.mark.parametrize("number", range(len(SHAPES)))
async def test_gather_scatter_and_scatter_add(number: int) -> None:
    x, index, source, axis = drawn(number)
    a, b = ag.tensor(x, requires_grad=True), ag.tensor(source, requires_grad=True)
    picked = np.empty(index.shape)
    added, put = x.copy(), x.copy()
    for place in itertools.product(*map(range, index.shape)):
        target = list(place)
        if target:
            target[axis] = index[place]
        picked[place] = x[tuple(target)]
        added[tuple(target)] += source[place]
        put[tuple(target)] = source[place]
    np.testing.assert_array_equal(ag.gather(a, axis, index).detach().numpy(), picked)
    np.testing.assert_allclose(a.scatter_add(axis, index, b).detach().numpy(), added, rtol=1e-12)
    np.testing.assert_allclose(ag.scatter_add(a, index=index, src=b, axis=axis).detach().numpy(), added, rtol=1e-12)
    np.testing.assert_array_equal(ag.scatter(a, axis, index, b).detach().numpy(), put)
    np.testing.assert_array_equal(ag.scatter(a, index, b, axis=axis).detach().numpy(), put)
    assert await ag.gradcheck(lambda a: ag.gather(a, axis, index), (a,))
    assert await ag.gradcheck(lambda a, b: ag.scatter_add(a, axis, index, b), (a, b))


def test_numbers_integers_and_nothing() -> None:
    x = ag.tensor(np.arange(6).reshape(2, 3))
    assert x.scatter(1, ag.tensor([[0], [2]]), 9).tolist() == [[9, 1, 2], [3, 4, 9]]
    assert ag.scatter_reduce(x, 1, [[0, 0]], [[7, 8]], "amin", include_self=False).tolist() == [[7, 1, 2], [3, 4, 5]]
    assert ag.scatter_reduce(x, 1, [[1, 1]], [[7, 8]], "mean").tolist() == [[0, 5, 2], [3, 4, 5]]
    assert ag.scatter_add(x, 1, np.zeros((2, 0), int), np.zeros((2, 0), int)).tolist() == x.tolist()


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda x: ag.gather(x, 2, [[0]]), ArgumentError),
        (lambda x: ag.gather(x, 0, [0]), ShapeError),
        (lambda x: ag.gather(x, 0, [[0, 0, 0, 0]]), ShapeError),
        (lambda x: ag.gather(x, 0, [[0.5]]), ArgumentTypeError),
        (lambda x: ag.gather(x, 0, [[7]]), IndexError),
        (lambda x: ag.scatter(x, 0, [[0]]), ArgumentTypeError),
        (lambda x: ag.scatter(x, 0, [[0]], 1.0, 2.0), ArgumentTypeError),
        (lambda x: ag.scatter(x, 0, [[0, 0], [1, 1]], np.ones((1, 3))), ShapeError),
        (lambda x: ag.scatter_reduce(x, 0, [[0]], [[1.0]], "max"), ArgumentError),
        (lambda x: ag.scatter_reduce(x, 0, [[5]], [[1.0]], "amax"), IndexError),
        (lambda x: ag.scatter_reduce(x, 0, [[5]], [[1.0]], "prod"), IndexError),
    ],
)
def test_what_does_not_fit_is_refused(call: Any, error: type[Exception]) -> None:
    assert_raises(error, None, lambda: call(ag.tensor(np.ones((2, 3)))))


def test_cumulative_extrema_take_the_last_of_equal_ones_and_keep_nan() -> None:
    x = ag.tensor([[1.0, 3.0, 3.0, 2.0], [2.0, np.nan, 5.0, 1.0]])
    values, places = x.cummax(1)
    np.testing.assert_array_equal(values.numpy(), np.array([[1, 3, 3, 3], [2, np.nan, np.nan, np.nan]], np.float32))
    assert places.tolist() == [[0, 1, 2, 2], [0, 1, 1, 1]]
    values, places = ag.cummin(ag.tensor([3, 1, 2, 1]))
    assert (values.tolist(), places.tolist(), places.dtype) == ([3, 1, 1, 1], [0, 1, 1, 3], np.int64)


async def test_logcumsumexp_of_large_and_infinite_numbers() -> None:
    x = ag.tensor([-np.inf, -np.inf, 1000.0, 1001.0, -2000.0], dtype=np.float64, requires_grad=True)
    out = ag.logcumsumexp(x)
    top = 1001 + np.log1p(np.exp(-1))
    np.testing.assert_allclose(out.detach().numpy(), [-np.inf, -np.inf, 1000, top, top])
    await out[2:].sum().backward()
    share = 1 / (1 + np.exp(-1))
    np.testing.assert_allclose(x.grad.numpy(), [0, 0, 1 + 2 * (1 - share), 2 * share, 0], atol=1e-12)

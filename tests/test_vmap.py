"""`vmap`: every row gives for a batch what it gives for each example, with gradients inside and outside of the function."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.batching.rules import RULES
from aiograd.errors import ArgumentError, ArgumentTypeError, NoGraphError, ShapeError
from aiograd.ops import ROWS
from tests.ops.test_rows_gradcheck import DIFFERENTIABLE, DOMAINS, drawn, floating

rng = np.random.default_rng(0)
X, W = rng.normal(size=(5, 3)), rng.normal(size=(3, 2))


def leaf(array: Any) -> Any:
    return ag.tensor(array, requires_grad=True)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_a_row_of_a_batch_is_the_row_of_each_example(name: str) -> None:
    domain, row = DOMAINS[name], ROWS[name]
    for args, kwargs in drawn(domain, 6, 60, False):
        keys = [i for i, a in enumerate(args) if floating(a)]
        batches = [np.stack([args[i] * (1 + 1e-3 * k) for k in range(3)]) for i in keys]

        def function(*tensors: Any, args: Any = args, kwargs: Any = kwargs, keys: Any = keys) -> Any:
            full = list(args)
            for i, tensor in zip(keys, tensors, strict=True):
                full[i] = tensor
            out = domain.call(row, full, kwargs)
            return out if isinstance(out, tuple) else (out,)

        for dims in ([0] * len(keys), [0] + [None] * (len(keys) - 1)) if keys else ():
            given = [b if dim == 0 else b[0] for b, dim in zip(batches, dims, strict=True)]
            found = ag.vmap(function, tuple(dims))(*map(ag.tensor, given))
            each = [function(*(ag.tensor(g[k] if dim == 0 else g) for g, dim in zip(given, dims, strict=True))) for k in range(3)]
            for mine, theirs in zip(found, zip(*each, strict=True), strict=True):
                expected = np.stack([t.numpy() for t in theirs])
                assert mine.shape == expected.shape and mine.dtype == expected.dtype
                np.testing.assert_allclose(mine.numpy(), expected, rtol=1e-9, atol=1e-9)


def test_rows_with_a_rule_run_once_for_the_whole_batch() -> None:
    batch = ag.tensor(rng.normal(size=(50, 3)))
    one = ag.vmap(lambda x: (ag.softmax(ag.tanh(x @ ag.tensor(W)), dim=0) * 2).sum().reshape(1, 1).squeeze())(batch)
    assert one.shape == (50,) and set(RULES) <= set(ROWS)
    loss = ag.vmap(lambda x: (x @ x).exp())(leaf(X)).sum()
    nodes, front = 0, [loss.grad_fn]
    while front:
        node = front.pop()
        nodes += 1
        front += [edge.node for edge in node.next_edges if edge is not None and edge.node is not None]
    assert nodes < 15, "a loop over five examples would record more"


async def test_gradients_outside_inside_and_both() -> None:
    x, w = leaf(X), leaf(W)
    y = ag.vmap(lambda row: ag.tanh(row @ w).sum())(x)
    np.testing.assert_allclose(y.detach().numpy(), np.tanh(X @ W).sum(1))
    gx, gw = await ag.grad(y.sum(), (x, w))
    ex, ew = await ag.grad(ag.tanh(x @ w).sum(), (x, w))
    np.testing.assert_allclose(gx.numpy(), ex.numpy())
    np.testing.assert_allclose(gw.numpy(), ew.numpy())

    async def gradient(row: Any, weight: Any) -> Any:
        value, grads = await ag.value_and_grad(lambda v: ag.tanh(row @ v).prod(), weight)
        return value, grads

    values, per_example = await ag.vmap(gradient, in_dims=(0, None))(x, w)
    for k in range(5):
        value, expected = await ag.value_and_grad(lambda v, k=k: ag.tanh(x.detach()[k] @ v).prod(), w.detach())
        np.testing.assert_allclose(per_example[k].detach().numpy(), expected.numpy(), rtol=1e-12)
        np.testing.assert_allclose(values[k].detach().numpy(), value.numpy(), rtol=1e-12)

    async def norms(x: Any) -> Any:
        async def one(row: Any) -> Any:
            _, g = await ag.value_and_grad(lambda v: (v**3).sum() * v[0], row, create_graph=True)
            return (g * g).sum()

        return await ag.vmap(one)(x)

    assert await ag.gradcheck(norms, (leaf(X),))
    assert await ag.gradgradcheck(lambda a, b: ag.vmap(lambda r: (r @ b).sin().sum())(a), (leaf(X), leaf(W)), atol=1e-4, rtol=1e-3)


def test_axes_nesting_and_constants() -> None:
    x = ag.tensor(rng.normal(size=(2, 5, 3)))
    found = ag.vmap(lambda m: m.sum(0), in_dims=1, out_dims=1)(x)
    np.testing.assert_allclose(found.numpy(), x.numpy().sum(0).T)
    nested = ag.vmap(ag.vmap(lambda a, b: (a * b).sum(), in_dims=(0, None)), in_dims=(None, 0))(ag.tensor(X), ag.tensor(X))
    np.testing.assert_allclose(nested.numpy(), X @ X.T)
    first, second = ag.vmap(lambda r: (r + np.arange(3.0), ag.ones(2)))(ag.tensor(X))
    np.testing.assert_allclose(first.numpy(), X + np.arange(3))
    assert second.shape == (5, 2)
    chosen = ag.vmap(lambda r, i: r[i])(ag.tensor(X), ag.tensor([0, 2, 1, 0, 2]))
    np.testing.assert_allclose(chosen.numpy(), X[np.arange(5), [0, 2, 1, 0, 2]])
    assert ag.vmap(lambda r: ag.where(r > 0, r, 0.0).max())(ag.tensor(X)).tolist() == np.where(X > 0, X, 0).max(1).tolist()
    solved = ag.vmap(ag.linalg.solve)(ag.tensor(X[:, :, None] * 0 + np.eye(3) * 2), ag.tensor(X))
    np.testing.assert_allclose(solved.numpy(), X / 2)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: ag.vmap(lambda a, b: a + b)(ag.ones(3), ag.ones(2)), ShapeError),
        (lambda: ag.vmap(lambda a: a, in_dims=None)(ag.ones(3)), ShapeError),
        (lambda: ag.vmap(lambda a: a)(ag.ones((0, 2))), ShapeError),
        (lambda: ag.vmap(lambda a: a, in_dims=(0, 0))(ag.ones(3)), ArgumentError),
        (lambda: ag.vmap(lambda a: a if a > 0 else -a)(ag.ones(3)), ArgumentError),
        (lambda: ag.vmap(lambda a: ag.tensor(a.item()))(ag.ones(3)), ArgumentError),
        (lambda: ag.vmap(lambda a: 3)(ag.ones(3)), ArgumentTypeError),
    ],
)
def test_wrong_use_ends_in_a_typed_error(call: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        call()


async def test_a_failed_function_leaves_nothing_behind() -> None:
    known = ag.__array_namespace_info__().devices()

    async def fails(row: Any) -> Any:
        return await ag.grad(row.sum(), row)

    with pytest.raises(NoGraphError):
        await ag.vmap(fails)(ag.ones((2, 3)))
    with pytest.raises(ShapeError):
        ag.vmap(lambda r: r.reshape(7))(ag.ones((2, 3)))
    assert ag.__array_namespace_info__().devices() == known

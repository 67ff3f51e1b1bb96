"""`vjp`, `jvp`, `jacobian`, `hessian`, `value_and_grad` against closed forms and finite differences."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.functional.derivatives import hessian, jacobian, jvp, value_and_grad, vjp
from tests.support import assert_awaiting_raises

rng = np.random.default_rng(0)
A = rng.normal(size=(3, 4))
B = rng.normal(size=(4,))
U = rng.normal(size=(3,))


def tensor(values: Any, *, requires_grad: bool = False) -> Any:
    return ag.tensor(np.asarray(values, dtype=np.float64), requires_grad=requires_grad)


def close(found: Any, expected: Any) -> None:
    assert isinstance(found, ag.Tensor)
    np.testing.assert_allclose(found.detach().numpy(), expected, rtol=1e-10, atol=1e-12)


def two(x: Any, y: Any) -> Any:
    """Two outputs of two inputs: shapes (4,), (3,) -> (3,), ()."""
    return np.tanh(tensor(A) @ x) * y, (x * x).sum() * y.sum()


async def two_async(x: Any, y: Any) -> Any:
    await asyncio.sleep(0)
    return list(two(x, y))


def jacobians_of_two() -> list[list[Any]]:
    x, y = B, U
    h = np.tanh(A @ x)
    return [
        [(y * (1 - h * h))[:, None] * A, np.diag(h)],
        [2 * x * y.sum(), np.full(3, (x * x).sum())],
    ]


@pytest.mark.parametrize("fn", [two, two_async])
async def test_vjp(fn: Any) -> None:
    v = (rng.normal(size=(3,)), 1.7)
    outputs, products = await vjp(fn, (tensor(B), tensor(U)), (tensor(v[0]), tensor(v[1])))
    close(outputs[0], np.tanh(A @ B) * U)
    close(outputs[1], (B * B).sum() * U.sum())
    (a, b), (c, d) = jacobians_of_two()
    close(products[0], v[0] @ a + v[1] * c)
    close(products[1], v[0] @ b + v[1] * d)
    assert not any(t.requires_grad for t in (*outputs, *products))


@pytest.mark.parametrize("fn", [two, two_async])
async def test_jvp(fn: Any) -> None:
    u = (rng.normal(size=(4,)), rng.normal(size=(3,)))
    outputs, products = await jvp(fn, (tensor(B), tensor(U)), (tensor(u[0]), tensor(u[1])))
    (a, b), (c, d) = jacobians_of_two()
    close(outputs[1], (B * B).sum() * U.sum())
    close(products[0], a @ u[0] + b @ u[1])
    close(products[1], c @ u[0] + d @ u[1])
    assert not any(t.requires_grad for t in (*outputs, *products))


@pytest.mark.parametrize("fn", [two, two_async])
async def test_jacobian(fn: Any) -> None:
    found = await jacobian(fn, (tensor(B), tensor(U)))
    assert isinstance(found, tuple)
    for blocks, expected in zip(found, jacobians_of_two(), strict=True):
        assert isinstance(blocks, tuple)
        for block, e in zip(blocks, expected, strict=True):
            close(block, e)
            assert not block.requires_grad


async def test_structures_follow_inputs_and_outputs() -> None:
    x = tensor([1.0, 2.0])
    close(await jacobian(lambda x: x * x, x), np.diag([2.0, 4.0]))
    (block,) = await jacobian(lambda x: (x * x,), x)
    close(block, np.diag([2.0, 4.0]))
    (block,) = await jacobian(lambda x: x * x, (x,))
    close(block, np.diag([2.0, 4.0]))
    ((block,),) = await jacobian(lambda x: [x * x], [x])
    close(block, np.diag([2.0, 4.0]))
    output, product = await vjp(lambda x: x.sum(), x)
    close(output, 3.0)
    close(product, [1.0, 1.0])
    output, (product,) = await vjp(lambda x: x.sum(), (x,))
    close(product, [1.0, 1.0])
    output, product = await jvp(lambda s: s * x, tensor(3.0))
    close(product, [1.0, 2.0])
    ((block,),) = await hessian(lambda x: (x * x).sum(), (x,))
    close(block, 2 * np.eye(2))


async def test_shapes_of_matrices_and_scalars() -> None:
    x = rng.normal(size=(2, 3))
    found = await jacobian(lambda x: np.exp(x).sum(axis=1), tensor(x))
    assert found.shape == (2, 2, 3)
    close(found, np.einsum("ij,ik->ijk", np.eye(2), np.exp(x)))
    close(await jacobian(lambda s: s * s, tensor(3.0)), 6.0)
    assert (await jacobian(lambda x: x * 2.0, tensor(np.zeros((0, 2))))).shape == (0, 2, 0, 2)
    assert (await jacobian(lambda x: x.sum(), tensor(np.zeros((0,))))).shape == (0,)


async def test_hessian_of_a_function_of_two_inputs() -> None:
    x, y = rng.normal(size=(3,)), rng.normal(size=(2, 2))

    def f(x: Any, y: Any) -> Any:
        return np.sin(x).sum() * (y * y).sum() + np.exp((x * x).sum()) + (x * 3.0).sum()

    found = await hessian(f, (tensor(x), tensor(y)))
    e = np.exp(x @ x)
    close(found[0][0], np.diag(-np.sin(x)) * (y * y).sum() + e * (2 * np.eye(3) + 4 * np.outer(x, x)))
    close(found[0][1], np.einsum("i,jk->ijk", np.cos(x), 2 * y))
    close(found[1][0], np.einsum("i,jk->jki", np.cos(x), 2 * y))
    close(found[1][1], 2 * np.sin(x).sum() * np.eye(4).reshape(2, 2, 2, 2))


@pytest.mark.parametrize(
    "f",
    [
        lambda x: (x * 3.0).sum(),  # its gradient is a constant
        lambda x: tensor(2.0) * 1.0,  # it depends on nothing
        lambda x: x[0] * 2.0,
    ],
)
async def test_second_derivatives_that_are_zero(f: Any) -> None:
    close(await hessian(f, tensor([1.0, 2.0])), np.zeros((2, 2)))


async def test_hessian_agrees_with_differences_of_the_gradient() -> None:
    w = rng.normal(size=(4, 3))

    def f(x: Any) -> Any:
        h = np.tanh(x @ tensor(w))
        return np.log(np.exp(h).sum()) * np.sqrt((x * x).sum())

    async def gradient(x: Any) -> Any:
        return (await value_and_grad(f, tensor(x)))[1].numpy()

    x = rng.normal(size=(4,))
    eps = 1e-6
    columns = [(await gradient(x + eps * e) - await gradient(x - eps * e)) / (2 * eps) for e in np.eye(4)]
    found = (await hessian(f, tensor(x))).numpy()
    np.testing.assert_allclose(found, np.stack(columns, axis=1), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(found, found.T, rtol=1e-12, atol=1e-12)


async def test_jvp_agrees_with_vjp_and_jacobian() -> None:
    x, u = rng.normal(size=(2, 3)), rng.normal(size=(2, 3))

    def f(x: Any) -> Any:
        return np.linalg.inv(x @ x.T) @ np.exp(x)

    j = (await jacobian(f, tensor(x))).numpy()
    _, forward = await jvp(f, tensor(x), tensor(u))
    np.testing.assert_allclose(forward.numpy(), np.tensordot(j, u, 2), rtol=1e-10)
    _, backward = await vjp(f, tensor(x), tensor(u))
    np.testing.assert_allclose(backward.numpy(), np.tensordot(u, j, 2), rtol=1e-10)


async def test_value_and_grad() -> None:
    x = tensor([1.0, 2.0], requires_grad=True)
    value, gradient = await value_and_grad(lambda x: (x**3).sum(), x)
    close(value, 9.0)
    close(gradient, [3.0, 12.0])
    assert x.grad is None
    value, gradients = await value_and_grad(two_scalar, (tensor(B), tensor(U)))
    assert isinstance(gradients, tuple)
    (value, aux), gradient = await value_and_grad(lambda x: (x.sum(), {"any": "thing"}), x, has_aux=True)
    close(value, 3.0)
    assert aux == {"any": "thing"}

    async def with_aux(x: Any) -> Any:
        return x.sum(), x

    (value, aux), gradient = await value_and_grad(with_aux, x, has_aux=True)
    close(gradient, [1.0, 1.0])


async def two_scalar(x: Any, y: Any) -> Any:
    return x.sum() * y.sum()


async def test_results_can_be_differentiated_with_create_graph() -> None:
    x = tensor([1.0, 2.0], requires_grad=True)
    cube = lambda x: x**3  # noqa: E731
    _, product = await vjp(cube, x, tensor([1.0, 1.0]), create_graph=True)
    close((await ag.grad(product.sum(), x))[0], [6.0, 12.0])
    _, product = await jvp(cube, x, tensor([1.0, 1.0]), create_graph=True)
    close((await ag.grad(product.sum(), x))[0], [6.0, 12.0])
    j = await jacobian(cube, x, create_graph=True)
    close((await ag.grad(j.sum(), x))[0], [6.0, 12.0])
    h = await hessian(lambda x: (x**3).sum(), x, create_graph=True)
    close((await ag.grad(h.sum(), x))[0], [6.0, 6.0])
    value, gradient = await value_and_grad(lambda x: (x**3).sum(), x, create_graph=True)
    close((await ag.grad(gradient.sum() + value, x))[0], [9.0, 24.0])
    assert x.grad is None


async def test_the_graph_of_the_caller_goes_on_with_create_graph_only() -> None:
    w = tensor([1.0, 2.0], requires_grad=True)
    x = w * 2.0
    j = await jacobian(lambda x: x**3, x, create_graph=True)
    close((await ag.grad(j.sum(), w, retain_graph=True))[0], [24.0, 48.0])
    value, gradient = await value_and_grad(lambda x: (x**2).sum(), x)
    assert not value.requires_grad
    assert not gradient.requires_grad
    # the derivative is by the argument, not by other uses of the same tensor
    value, gradient = await value_and_grad(lambda y: (y * x.detach()).sum(), x, create_graph=True)
    close(gradient, [2.0, 4.0])
    value, gradient = await value_and_grad(lambda y: (y * x).sum(), x, create_graph=True)
    close(gradient, [2.0, 4.0])


async def test_no_grad_of_the_caller_does_not_matter() -> None:
    x = tensor([1.0, 2.0], requires_grad=True)
    with ag.no_grad():
        close(await jacobian(lambda x: x * x, x), np.diag([2.0, 4.0]))
        j = await jacobian(lambda x: x * x, x, create_graph=True)
        assert not ag.is_grad_enabled()
    close((await ag.grad(j.sum(), x))[0], [2.0, 2.0])


async def test_unused_inputs_get_zeros_or_an_error() -> None:
    x, y = tensor([1.0, 2.0]), tensor([3.0])

    def f(x: Any, y: Any) -> Any:
        return (x * x).sum()

    _, (_, product) = await vjp(f, (x, y))
    close(product, [0.0])
    _, product = await jvp(f, (x, y), (x, y))
    close(product, 10.0)
    close((await jacobian(f, (x, y)))[1], [0.0])
    assert (await hessian(f, (x, y)))[0][1].shape == (2, 1)
    close((await value_and_grad(f, (x, y)))[1][1], [0.0])
    for function, extra in ((vjp, ()), (jvp, ((x, y),)), (jacobian, ()), (hessian, ()), (value_and_grad, ())):
        with pytest.raises(ag.errors.UnusedInputError, match=r"(does|do) not depend"):
            await function(f, (x, y), *extra, strict=True)  # type: ignore[operator]
    close((await jvp(lambda x: tensor([5.0]), x, x))[1], [0.0])


async def test_complex_products_follow_the_conjugate_convention() -> None:
    z = ag.tensor(np.array([1 + 2j, 3 - 1j]))
    v = ag.tensor(np.array([1j, 2.0 + 0j]))
    _, product = await vjp(lambda z: z * z, z, v)
    close(product, v.numpy() * np.conj(2 * z.numpy()))
    _, gradient = await value_and_grad(lambda z: (np.abs(z) ** 2).sum(), z)
    close(gradient, 2 * z.numpy())


def _twice(x: Any) -> Any:
    return x, x


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda x: vjp(lambda x: x, x), ag.errors.ShapeError, "one element only"),
        (lambda x: vjp(lambda x: x, x, tensor([1.0])), ag.errors.ShapeError, "vector 0 is"),
        (lambda x: vjp(lambda x: x, x, 3.0), ag.errors.ArgumentTypeError, "vector 0 is a float"),
        (lambda x: vjp(_twice, x, (x,)), ag.errors.ArgumentError, "1 vectors for 2 outputs"),
        (lambda x: jvp(lambda x: x, x), ag.errors.ShapeError, "one element only"),
        (lambda x: jvp(lambda x: x, (x, x), (x,)), ag.errors.ArgumentError, "1 vectors for 2 inputs"),
        (lambda x: hessian(lambda x: x, x), ag.errors.ShapeError, "single element"),
        (lambda x: value_and_grad(_twice, x), ag.errors.ShapeError, "2 output"),
        (lambda x: value_and_grad(lambda x: x.sum(), x, has_aux=True), ag.errors.ArgumentTypeError, "pair"),
        (lambda x: value_and_grad(lambda x: x.sum() * 1j, x), ag.errors.ArgumentTypeError, "real number"),
        (lambda x: jacobian(x.sum(), x), ag.errors.ArgumentTypeError, "expected a function of the inputs, found Tensor"),
        (lambda x: value_and_grad(x.sum(), x), ag.errors.ArgumentTypeError, "expected a function of the inputs, found Tensor"),
        (lambda x: jacobian(lambda x: 3.0, x), ag.errors.ArgumentTypeError, "output 0 of fn is a float"),
        (lambda x: jacobian(lambda x: (), x), ag.errors.ArgumentError, "no outputs"),
        (lambda x: jacobian(lambda x: x > 0, x), ag.errors.ArgumentTypeError, "dtype bool"),
        (lambda x: jacobian(lambda x: x * 1j, x), ag.errors.ArgumentTypeError, "complex"),
        (lambda x: jacobian(lambda x: x, ()), ag.errors.ArgumentError, "at least one input"),
        (lambda x: jacobian(lambda x: x, [1.0]), ag.errors.ArgumentTypeError, "input 0 is a float"),
        (lambda x: jacobian(lambda x: x, ag.tensor([1, 2])), ag.errors.ArgumentTypeError, "dtype int64"),
    ],
)
async def test_wrong_calls(call: Any, error: type[Exception], match: str) -> None:
    await assert_awaiting_raises(error, match, call(tensor([1.0, 2.0])))


async def test_an_error_in_the_function_comes_through_and_the_mode_is_restored() -> None:
    def f(x: Any) -> Any:
        raise KeyError("mine")

    with ag.no_grad():
        await assert_awaiting_raises(KeyError, "mine", jacobian(f, tensor([1.0])))
        assert not ag.is_grad_enabled()


async def test_concurrent_calls_do_not_disturb_each_other() -> None:
    async def one(k: float) -> None:
        close(await jacobian(lambda x: x * x * k, tensor([1.0, 2.0])), np.diag([2.0 * k, 4.0 * k]))

    await asyncio.gather(*(one(float(k)) for k in range(5)))

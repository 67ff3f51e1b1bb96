"""Complex numbers: the gradient of a real loss is dL/dx + i dL/dy, checked against closed forms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.errors import ArgumentTypeError
from tests.support import assert_raises, leaf

Z = np.array([1.5 - 0.5j, -0.7 + 2.0j, 0.3 + 0.4j])


async def gradient(function: Any, *values: Any) -> Any:
    leaves = [leaf(v) for v in values]
    await function(*leaves).sum().backward()
    grads = [x.grad.numpy() for x in leaves]
    return grads[0] if len(grads) == 1 else grads


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda z: np.real(z), lambda z: np.ones_like(z)),
        (lambda z: np.imag(z), lambda z: 1j * np.ones_like(z)),
        (lambda z: np.real(z * np.conj(z)), lambda z: 2 * z),
        (lambda z: np.abs(z), lambda z: z / np.abs(z)),
        (lambda z: np.real(z * z), lambda z: 2 * np.conj(z)),
        (lambda z: np.imag(z * z), lambda z: np.conj(-2j * z)),
        (lambda z: np.real(np.exp(z)), lambda z: np.conj(np.exp(z))),
        (lambda z: np.real(1 / z), lambda z: np.conj(-1 / z**2)),
        (lambda z: np.real(np.sin(z) * (2 - 1j)), lambda z: np.conj(np.cos(z) * (2 - 1j))),
        (lambda z: np.real(np.log(z)), lambda z: np.conj(1 / z)),
        (lambda z: np.angle(z), lambda z: 1j * z / np.abs(z) ** 2),
        (lambda z: np.real(np.sqrt(z)), lambda z: np.conj(0.5 / np.sqrt(z))),
        (lambda z: np.real(z.sum() * z[0]), None),
    ],
)
async def test_closed_forms(function: Any, expected: Any) -> None:
    if expected is None:  # Re(s z0): d/dz0 = conj(s + z0), d/dzi = conj(z0)
        wanted = np.conj(np.full(3, Z[0]))
        wanted[0] += np.conj(Z.sum())
    else:
        wanted = expected(Z)
    np.testing.assert_allclose(await gradient(function, Z), wanted, rtol=1e-12)


async def test_a_step_against_the_gradient_goes_downhill() -> None:
    z = leaf(Z)
    for _ in range(200):
        loss = np.square(np.abs(z - (2 + 1j))).sum()
        (g,) = await ag.grad(loss, z)
        with ag.no_grad():
            z -= g * 0.1
    np.testing.assert_allclose(z.detach().numpy(), np.full(3, 2 + 1j), atol=1e-6)


async def test_a_real_argument_of_a_complex_operation_gets_a_real_gradient() -> None:
    x = leaf(np.array([1.0, 2.0]))
    c = np.array([1 + 2j, 3 - 1j])
    await np.real(x * ag.tensor(c) * x).sum().backward()
    assert x.grad.dtype == np.float64
    np.testing.assert_allclose(x.grad.numpy(), 2 * x.detach().numpy() * c.real)


async def test_a_matrix_product() -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=(3, 3)) + 1j * rng.normal(size=(3, 3)) for _ in range(2))
    ga, gb = await gradient(lambda a, b: np.real(a @ b), a, b)
    ones = np.ones((3, 3))
    np.testing.assert_allclose(ga, ones @ np.conj(b).T)
    np.testing.assert_allclose(gb, np.conj(a).T @ ones)


async def test_a_complex_output_needs_a_seed_which_is_the_gradient_by_the_convention() -> None:
    z = leaf(Z)
    seed = np.array([1.0, 1j, 1 + 1j])
    await (z * z).backward(ag.tensor(seed))
    np.testing.assert_allclose(z.grad.numpy(), seed * np.conj(2 * Z))


async def test_second_derivatives() -> None:
    z = leaf(Z)
    (g,) = await ag.grad(np.real(z * z * z).sum(), z, create_graph=True)  # conj(3 z^2)
    (g2,) = await ag.grad(np.real(g).sum(), z)
    np.testing.assert_allclose(g2.numpy(), np.conj(6 * Z))


async def test_in_place_and_views() -> None:
    z = leaf(Z)
    w = z * 1
    w[0:1] *= 2j
    w[1] = w[2] * (1 - 1j)
    await np.real(w * ag.tensor([1.0, 10.0, 100.0])).sum().backward()
    np.testing.assert_allclose(z.grad.numpy(), np.conj([2j, 0.0, 100 + 10 * (1 - 1j)]))


async def test_a_row_for_real_numbers_refuses_complex_ones_that_need_a_gradient() -> None:
    z = leaf(Z)
    assert_raises(ArgumentTypeError, "gradient is defined for real numbers only", np.sort, z)
    with ag.no_grad():
        assert np.sort(z).dtype == np.complex128


async def test_real_scalar_losses_only() -> None:
    z = leaf(Z)
    assert_raises(ArgumentTypeError, "real scalar outputs; output 0 has dtype complex128", lambda: z.sum().backward())

"""`ag.special` and SciPy's own ufuncs on Tensors: values as SciPy's over the whole range, gradients by finite differences, first and second."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import scipy.special

import aiograd as ag
from aiograd.errors import ArgumentError, NoRuleError
from aiograd.tensors.scipy_names import SCIPY, scipy_function
from tests.support import assert_awaiting_raises, assert_raises

rng = np.random.default_rng(0)
EVERYWHERE = np.concatenate([rng.uniform(-30, 30, 800), rng.uniform(-1e-2, 1e-2, 50), 10.0 ** rng.uniform(-8, 2, 100)])
POSITIVE = np.concatenate([rng.uniform(1e-3, 40, 500), rng.uniform(0.8, 2.7, 300), 10.0 ** rng.uniform(-8, 2, 100)])
UNIT = np.concatenate([rng.uniform(0, 1, 500), 10.0 ** -rng.uniform(0, 12, 100), 1 - 10.0 ** -rng.uniform(1, 12, 100)])

#: name in both modules -> arguments, and how far values may be off: a multiple of 1e-15 of the value, or absolutely
ONE: dict[str, tuple[Any, float]] = {
    "erf": (EVERYWHERE, 2), "erfc": (EVERYWHERE, 5), "expit": (EVERYWHERE, 2), "logit": (UNIT, 2), "entr": (POSITIVE, 2), "erfinv": (2 * UNIT - 1, 3),
    "ndtr": (EVERYWHERE, 10), "log_ndtr": (EVERYWHERE, 10), "gammaln": (EVERYWHERE, 10), "gamma": (EVERYWHERE / 2, 100), "psi": (POSITIVE, 10),
    "digamma": (POSITIVE, 10), "i0": (EVERYWHERE, 10), "i1": (EVERYWHERE, 10), "i0e": (EVERYWHERE, 5), "i1e": (EVERYWHERE, 5), "j0": (EVERYWHERE, 10),
    "j1": (EVERYWHERE, 10), "y0": (POSITIVE, 20), "y1": (POSITIVE, 20), "sinc": (EVERYWHERE, 10),
    "k0": (POSITIVE, 10), "k1": (POSITIVE, 10), "rgamma": (EVERYWHERE, 200), "gammasgn": (EVERYWHERE, 1), "erfcx": (POSITIVE, 5), "ndtri": (UNIT, 10),
    "erfcinv": (2 * UNIT, 10), "exprel": (EVERYWHERE, 5),
}  # fmt: skip
TWO: dict[str, tuple[Any, Any]] = {
    "xlogy": (UNIT, POSITIVE[: UNIT.size]), "xlog1py": (UNIT, POSITIVE[: UNIT.size]), "beta": (POSITIVE[:300], POSITIVE[300:600]),
    "betaln": (POSITIVE[:300], POSITIVE[300:600]), "zeta": (rng.uniform(1.5, 6, 200), rng.uniform(0.1, 9, 200)),
    "jv": (rng.uniform(-6, 90, 600), 10.0 ** rng.uniform(0, 2, 600)), "jn": (rng.integers(-30, 90, 600), rng.uniform(-100, 100, 600)),
    "yn": (rng.integers(0, 20, 600), rng.uniform(5, 100, 600)), "ive": (rng.uniform(-9, 90, 600), 10.0 ** rng.uniform(0, 3, 600)),
    "iv": (rng.integers(0, 30, 600), rng.uniform(-10, 10, 600)), "rel_entr": (UNIT, POSITIVE[: UNIT.size]),
    "gammainc": (POSITIVE, np.flip(POSITIVE)),
    "stdtr": (POSITIVE[:600] ** 2, rng.uniform(-9, 9, 600)), "gammaincc": (rng.uniform(1, 900, 600), rng.uniform(1, 900, 600)),
}  # fmt: skip


def close(found: Any, expected: Any, times: float) -> None:
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(np.isfinite(found), finite)
    error = np.abs(found[finite] - expected[finite]) / np.maximum(np.abs(expected[finite]), 1.0)
    assert error.max() < times * 1e-15


@pytest.mark.parametrize("name", ONE)
def test_values_are_those_of_scipy(name: str) -> None:
    x, times = ONE[name]
    expected = getattr(scipy.special, name)(x)
    close(getattr(ag.special, name)(x).numpy(), expected, times)
    single = getattr(ag.special, name)(x.astype(np.float32))
    assert single.dtype == np.float32


@pytest.mark.parametrize("name", TWO)
def test_values_of_two_arguments_are_those_of_scipy(name: str) -> None:
    close(getattr(ag.special, name)(*TWO[name]).numpy(), getattr(scipy.special, name)(*TWO[name]), 100)


def test_the_incomplete_beta_function_is_that_of_scipy() -> None:
    drawn = np.random.default_rng(4)
    for (low, high), (least, most) in itertools.product([(0.01, 5), (5, 100), (100, 1e5)], repeat=2):
        a, b = drawn.uniform(low, high, 300), drawn.uniform(least, most, 300)
        for x in (drawn.beta(a, b), drawn.uniform(0, 1, 300)):
            close(ag.special.betainc(a, b, x).numpy(), scipy.special.betainc(a, b, x), 1e4)
            close(ag.special.betaincc(a, b, x).numpy(), scipy.special.betaincc(a, b, x), 1e4)


def test_figures_that_need_more_digits_than_scipy_has() -> None:
    """Computed in 40 digits: far out in a tail, near the peak of large arguments, and beside a zero."""
    for function, arguments, expected in (
        (ag.special.gammainc, (9916301.307153996, 9902021.998372173), 2.858378516582836e-06),
        (ag.special.gammainc, (19.59189050032237, 5.300585713972597e-10), 2.6267893682228752e-200),
        (ag.special.betainc, (60678.140983037, 9.984636282553392, 0.9998155642246742), 0.31820231093782663),
        (ag.special.betainc, (3.8638502876964536, 99180.52758268845, 5.1566227516207074e-05), 0.77177023165417476),
    ):
        assert function(*(np.array(x) for x in arguments)).item() == pytest.approx(expected, rel=1e-12)


def test_orders_and_arguments_beyond_the_functions() -> None:
    assert_raises(ArgumentError, "5000", ag.special.jv, 1e6, 1.0)
    assert_raises(ArgumentError, "multigammaln", ag.special.multigammaln, 1.0, 0)
    assert np.isnan(ag.special.jv(0.5, -1.0).item()) and np.isnan(ag.special.yn(0.5, 1.0).item()) and np.isnan(ag.special.gammainc(-1.0, 1.0).item())
    assert ag.special.jv(-1e-20, 30.0).item() == pytest.approx(ag.special.j0(30.0).item())
    assert ag.special.rgamma(np.array([0.0, -1.0, -7.0])).tolist() == [0, 0, 0]
    assert ag.special.ndtri(np.array([0.0, 1.0])).tolist() == [-np.inf, np.inf]
    assert ag.special.rel_entr(np.array([0.0, 1.0, -1.0]), np.array([0.0, 0.0, 1.0])).tolist() == [0, np.inf, np.inf]
    assert np.isnan(ag.special.multigammaln(np.array([0.3, 0.5, 0.7]), 2).numpy()).tolist() == [True, True, False]
    wide = np.array([1e-200, 1e200, 1e-320, 1e200]), np.array([1e200, 1e-200, 1e4, 2e200])
    np.testing.assert_allclose(ag.special.rel_entr(*wide).numpy(), wide[0] * (np.log(wide[0]) - np.log(wide[1])), rtol=1e-13)
    assert np.isnan(ag.special.xlog1py(0.0, np.nan).item()) and ag.special.xlog1py(0.0, -1.0).item() == 0
    assert ag.special.k0(0.0).item() == np.inf and ag.special.jv(2, 0.0).item() == 0 and ag.special.exprel(0.0).item() == 1
    x = np.array([3.5, 7.0])
    np.testing.assert_allclose(ag.special.multigammaln(x, 3).numpy(), scipy.special.multigammaln(x, 3), rtol=1e-13)


@pytest.mark.parametrize("name", ["jv", "iv", "ive", "yn"])
async def test_bessel_functions_have_gradients_at_all_orders_and_at_zero(name: str) -> None:
    function = getattr(ag.special, name)
    for order in (0, 1, 2, -3) if name == "yn" else (0, 1, 2, 3.5, 0.5, -0.5, -3, 40.25):
        x = ag.tensor([0.7, 3.3, 11.0, 26.0], dtype=ag.float64, requires_grad=True)
        size = function(order, x).detach()
        assert await ag.gradcheck(lambda x, order=order, size=size: function(order, x) / size, (x,), rtol=1e-4)
    if name in ("jv", "iv"):
        x = ag.tensor([0.0], dtype=ag.float64, requires_grad=True)
        first = await ag.grad(function(1, x).sum(), x)
        assert first[0].item() == 0.5
        (slope,) = await ag.grad(function(2, x).sum(), x, create_graph=True)
        (bend,) = await ag.grad(slope.sum(), x)
        assert slope.item() == 0 and bend.item() == 0.25


@pytest.mark.parametrize("axis", [None, 0, (0, 1)])
@pytest.mark.parametrize("keepdims", [False, True])
async def test_logsumexp_takes_weights(axis: Any, keepdims: bool) -> None:
    a, b = np.random.default_rng(1).normal(size=(2, 3)), np.array([[0.5, 2.0, 0.0], [1.0, 0.0, 3.0]])
    found = ag.special.logsumexp(a, axis=axis, b=b, keepdims=keepdims).numpy()
    np.testing.assert_allclose(found, scipy.special.logsumexp(a, axis=axis, b=b, keepdims=keepdims), rtol=1e-13)
    inputs = (ag.tensor(a, requires_grad=True), ag.tensor(b, requires_grad=True))
    assert await ag.gradcheck(lambda a, b: ag.special.logsumexp(a, axis, b, keepdims), inputs)
    far = np.array([1000.0, 1.0, -np.inf]), np.array([0.0, 1.0, 1.0])
    assert ag.special.logsumexp(far[0], b=far[1]).item() == 1
    with np.errstate(divide="ignore"):
        assert ag.special.logsumexp(np.array([-np.inf, -np.inf]), b=2.0).item() == -np.inf


async def test_numbers_close_to_real_ones_are_made_real_with_their_gradients() -> None:
    z = ag.tensor([1 + 1e-20j, 2.0], dtype=ag.complex128, requires_grad=True)
    assert np.iscomplex(z).tolist() == [True, False] and np.isreal(z).tolist() == [False, True]
    assert np.iscomplexobj(np.real_if_close(z * 1j)) and np.real_if_close(z).dtype == np.float64
    await np.real_if_close(z).sum().backward()
    assert z.grad is not None and z.grad.tolist() == [1, 1]
    assert await ag.gradcheck(np.exp2, (ag.tensor([0.3 + 0.4j], dtype=ag.complex128, requires_grad=True),))


@pytest.mark.parametrize(
    ("name", "expected"), [("i1", lambda x: 3 * x / 8), ("j1", lambda x: -3 * x / 8), ("i1e", lambda x: -np.sign(x) + 15 * x / 8)]
)
async def test_second_derivatives_of_bessel_functions_near_zero(name: str, expected: Any) -> None:
    x = ag.tensor([0.0, 1e-300, -1e-160, 1e-9, -1e-9, 1e-5], dtype=ag.float64, requires_grad=True)
    (slope,) = await ag.grad(getattr(ag.special, name)(x).sum(), x, create_graph=True)
    (bend,) = await ag.grad(slope.sum(), x)
    np.testing.assert_allclose(bend.numpy(), expected(x.detach().numpy()), rtol=1e-8, atol=1e-20)
    for at in (0.2499999999, 0.2500000001):  # where the formula changes
        x = ag.tensor([at, -at], dtype=ag.float64, requires_grad=True)
        assert await ag.gradgradcheck(getattr(ag.special, name), (x,), atol=1e-5)
        (slope,) = await ag.grad(getattr(ag.special, name)(x).sum(), x)
        first = scipy.special.ivp(1, at)
        slopes = {"i1": first, "j1": scipy.special.jvp(1, at), "i1e": math.exp(-at) * (first - scipy.special.iv(1, at))}
        np.testing.assert_allclose(slope.numpy(), slopes[name], rtol=1e-14)


async def test_the_gradient_of_rgamma_at_its_zeros() -> None:
    x = ag.tensor([0.0, -1.0, -2.0, -3.0], dtype=ag.float64, requires_grad=True)
    (slope,) = await ag.grad(ag.special.rgamma(x).sum(), x)
    np.testing.assert_allclose(slope.numpy(), [1.0, -1.0, 2.0, -6.0], rtol=1e-13)


@pytest.mark.parametrize(
    ("name", "wanted", "arguments"),
    [("gammainc", 0, (2.0, 1.0)), ("gammaincc", 0, (2.0, 1.0)), ("betainc", 0, (2.0, 3.0, 0.5)), ("betainc", 1, (2.0, 3.0, 0.5)),
     ("jv", 0, (1.5, 2.0)), ("iv", 0, (1.5, 2.0)), ("ive", 0, (1.5, 2.0)), ("yn", 0, (1.0, 2.0))],
)  # fmt: skip
async def test_a_derivative_without_a_closed_form_is_an_error_and_no_zero(name: str, wanted: int, arguments: tuple[float, ...]) -> None:
    for function in (getattr(ag.special, name), getattr(scipy.special, name)):
        inputs = [ag.tensor(x, dtype=ag.float64, requires_grad=True) for x in arguments]
        result = function(*inputs)
        await assert_awaiting_raises(NoRuleError, f"{name} by its .* has no closed form", result.backward())
        assert inputs[wanted].grad is None
        inputs[:-1] = [x.detach() for x in inputs[:-1]]
        await function(*inputs).backward()
        assert inputs[-1].grad is not None


async def test_logit_has_neither_a_value_nor_a_derivative_outside_of_its_interval() -> None:
    x = ag.tensor([-0.5, 0.3, 1.5], requires_grad=True)
    y = ag.logit(x)
    await y.sum().backward()
    _, tangent = await ag.jvp(ag.logit, x.detach(), ag.ones(3))
    for found in (y.detach(), x.grad, tangent):
        assert np.isnan(found.numpy()).tolist() == [True, False, True]
    np.testing.assert_allclose(tangent.numpy()[1], 1 / 0.21, rtol=1e-6)


def test_polygamma_and_ends() -> None:
    for n in range(1, 6):
        close(ag.special.polygamma(n, POSITIVE[:800]).numpy() / np.abs(scipy.special.polygamma(n, POSITIVE[:800])),
              np.sign(scipy.special.polygamma(n, POSITIVE[:800])), 50)  # fmt: skip
    assert ag.special.polygamma(1, np.inf).item() == 0 and ag.special.zeta(2.0, np.inf).item() == 0
    ends = np.array([0.0, -1.0, -2.0, np.inf, -np.inf, np.nan])
    assert ag.special.gammaln(ends).tolist()[:5] == [np.inf] * 5 and np.isnan(ag.special.gammaln(ends).tolist()[5])
    assert np.isnan(ag.special.gamma(-1.0).item()) and ag.special.gamma(200.0).item() == np.inf and ag.special.gamma(5.0).item() == 24
    assert ag.special.erfinv(np.array([-1.0, 1.0])).tolist() == [-np.inf, np.inf] and np.isnan(ag.special.erfinv(1.5).item())
    assert ag.special.y0(0.0).item() == -np.inf and np.isnan(ag.special.y0(-1.0).item()) and ag.special.j0(np.inf).item() == 0
    x, q = np.array([2.0, 3.0]), np.array([-1.5, -20.25])
    np.testing.assert_allclose(ag.special.zeta(x, q).numpy(), scipy.special.zeta(x, q), rtol=1e-12)
    assert ag.special.zeta(2.0).item() == pytest.approx(np.pi**2 / 6)


#: arguments at which each of SciPy's ufuncs is smooth
AT = {name: (np.array([0.3, 0.7]),) for name in SCIPY} | {
    "xlogy": (np.array([0.3, 0.7]), np.array([1.2, 0.4])), "xlog1py": (np.array([0.3, 0.7]), np.array([1.2, 0.4])),
    "beta": (np.array([0.3, 1.7]), np.array([1.2, 0.4])), "betaln": (np.array([0.3, 1.7]), np.array([1.2, 0.4])),
    "_zeta": (2.0, np.array([1.2, 0.4])), "rel_entr": (np.array([0.3, 0.7]), np.array([1.2, 0.4])),
    "betainc": (2.0, 1.5, np.array([0.2, 0.4])), "betaincc": (2.0, 1.5, np.array([0.2, 0.4])), "yn": (2, np.array([1.2, 3.4])),
    **{name: (1.5, np.array([1.2, 3.4])) for name in ("gammainc", "gammaincc", "jv", "iv", "ive", "stdtr")},
}  # fmt: skip


@pytest.mark.parametrize("name", SCIPY)
async def test_ufuncs_of_scipy_find_their_rows(name: str) -> None:
    ufunc = getattr(scipy.special, name, None) or getattr(scipy.special._ufuncs, name, None)
    if ufunc is None:
        pytest.skip(f"this SciPy has no ufunc {name}")
    arrays = [x for x in AT[name] if isinstance(x, np.ndarray)]
    numbers = [x for x in AT[name] if not isinstance(x, np.ndarray)]
    inputs = tuple(ag.tensor(x, requires_grad=True) for x in arrays)
    result = ufunc(*numbers, *inputs)
    assert isinstance(result, ag.Tensor) and result.requires_grad
    np.testing.assert_allclose(result.detach().numpy(), ufunc(*numbers, *arrays), rtol=1e-13)
    assert await ag.gradcheck(lambda *t: ufunc(*numbers, *t), inputs)
    assert await ag.gradgradcheck(lambda *t: ufunc(*numbers, *t), inputs, atol=1e-4, rtol=1e-3)


def test_ufuncs_without_a_row_are_refused() -> None:
    x = ag.tensor([0.5], requires_grad=True)
    assert_raises(NoRuleError, "scipy.special.spence", scipy.special.spence, x)
    assert_raises(NoRuleError, "out", lambda: scipy.special.erf(x, out=np.zeros(1)))
    assert scipy.special.spence(x.detach()).tolist() == pytest.approx([scipy.special.spence(0.5)])
    assert scipy_function(scipy.special.erf) is SCIPY["erf"] and scipy_function(np.exp2) is None, "exp2 is numpy's, whose rows have their own table"


async def test_beta_has_the_sign_and_the_zeros_of_negative_arguments_and_digits_of_large_ones() -> None:
    a = np.array([-0.5, -2.5, -1.5, 171.5, -0.5, -9.25, 1e10, 1e20, 200.0, 1e5, 12.5])
    b = np.array([-0.3, 3.0, 2.2, -0.5, 0.5, 3.7, 1e-5, 0.5, 200.0, 1e5, 11.0])
    for first, second in ((a, b), (b, a)):
        np.testing.assert_allclose(ag.special.beta(first, second).numpy(), scipy.special.beta(first, second), rtol=1e-9, atol=1e-15)
        np.testing.assert_allclose(ag.special.betaln(first, second).numpy(), scipy.special.betaln(first, second), rtol=1e-12)
    x, y = (ag.tensor(np.array([v]), requires_grad=True) for v in (-0.5, 0.5))
    slopes = await ag.grad(ag.special.beta(x, y).sum(), [x, y])
    np.testing.assert_allclose([s.item() for s in slopes], -2 * np.pi, rtol=1e-12)  # gamma(x) gamma(y) times the slope 1 of 1 / gamma at 0
    for pair in ((-0.4, -0.3), (-2.5, 3.0), (30.0, -2.7), (40.0, 0.7), (40.0, 30.0), (30.0, 30.0)):
        inputs = tuple(ag.tensor(np.array([v]), requires_grad=True) for v in pair)
        size = ag.special.beta(*inputs).detach()
        for function in (ag.special.betaln, lambda x, y, size=size: ag.special.beta(x, y) / size):
            assert await ag.gradcheck(function, inputs) and await ag.gradgradcheck(function, inputs)
    with np.errstate(invalid="ignore"):
        assert np.isnan(ag.special.beta(-2.0, 1.0).item()) and ag.special.beta(-2.0, 3.0).item() == np.inf


def test_zeta_of_huge_arguments() -> None:
    zeta = ag.special.zeta
    s = np.array([1e300, 1e300, 1e300, np.inf, np.inf, 2.0, 1.5, 1e5])
    q = np.array([1.0, 0.5, 2.0, 1.0, 2.0, 1e200, 1e300, 1.5])
    np.testing.assert_allclose(zeta(s, q).numpy(), [1.0, np.inf, 0.0, 1.0, 0.0, 1e-200, 2e-150, 0.0], rtol=1e-13)


async def test_derivatives_of_log_ndtr_far_in_the_tail() -> None:
    for dtype, tolerance in ((np.float64, 1e-9), (np.float32, 2e-6)):
        z = np.array([2.0, 11.9, 12.1, 37.0, 1e3, 1e5, 1e8, 1e10, 1e18], dtype)
        x = ag.tensor(-z, requires_grad=True)
        found = [ag.special.log_ndtr(x)]
        for _ in range(3):
            found += await ag.grad(found[-1].sum(), x, create_graph=True)
        wide, gap = z.astype(np.float64), np.zeros(z.shape)
        for k in range(400, 0, -1):  # the continued fraction of Laplace
            gap = k / (wide + gap)
        wanted = [wide + gap, -(wide + gap) * gap]
        for each, expected in zip(found[1:], wanted, strict=False):
            np.testing.assert_allclose(each.detach().numpy(), expected, rtol=tolerance)
        np.testing.assert_allclose(found[3].detach().numpy()[4:8], 2 / wide[4:8] ** 3, rtol=2e-5)
        _, slopes = await ag.jvp(ag.special.log_ndtr, x.detach(), ag.ones(z.shape, dtype=dtype))
        np.testing.assert_allclose(slopes.numpy(), wanted[0], rtol=tolerance)
    inputs = (ag.tensor([-20.0, -12.0, -11.9, -3.0, -0.1, 0.1, 3.0], dtype=np.float64, requires_grad=True),)
    assert await ag.gradcheck(ag.special.log_ndtr, inputs) and await ag.gradgradcheck(ag.special.log_ndtr, inputs)


async def test_rel_entr_near_1_and_its_derivatives_at_edges() -> None:
    near = np.array([1.0, 1.0, 3.0, 1e300]), np.array([1.0 - 1e-12, 1.0 + 1e-15, 3.0 + 1e-13, 1.001e300])
    np.testing.assert_allclose(ag.special.rel_entr(*near).numpy(), scipy.special.rel_entr(*near), rtol=1e-14)
    x, y = (ag.tensor(np.array(v), requires_grad=True) for v in ([0.0, 0.0, 1e-300, 1e300, 1.0], [1.0, 0.0, 1e300, 1e-300, 1e-320]))
    with np.errstate(divide="ignore", over="ignore"):
        first, second = await ag.grad(ag.special.rel_entr(x, y).sum(), [x, y], create_graph=True)
        mixed = await ag.grad(first[:1].sum(), y, retain_graph=True)
    np.testing.assert_allclose(first.detach().numpy(), [-np.inf, -np.inf, 1 - 600 * np.log(10), 1 + 600 * np.log(10), 1 - np.log(1e-320)], rtol=1e-13)
    np.testing.assert_array_equal(second.detach().numpy(), [0, 0, 0, -np.inf, -np.inf])
    assert mixed[0].tolist()[0] == -1.0

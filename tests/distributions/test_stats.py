"""`ag.stats` beside `scipy.stats`: values in the support, at its ends and beyond, of parameters and of none; gradients by finite differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy

import aiograd as ag
from aiograd.errors import ArgumentError, NoRuleError, ShapeError
from tests.support import assert_awaiting_raises, assert_raises

SHAPES: dict[str, tuple[float, ...]] = {"norm": (), "uniform": (), "expon": (), "gamma": (2.3,), "chi2": (3.0,), "beta": (2.2, 1.4), "t": (3.5,)}
FUNCTIONS = ("pdf", "logpdf", "cdf", "logcdf", "sf", "logsf")
AT = np.array([-np.inf, -3.0, 0.0, 0.05, 0.4, 0.9, 1.0, 1.7, 12.0, np.inf, np.nan])
K = np.array([-1.0, 0.0, 1.0, 2.5, 7.0, 40.0])
COV = np.array([[2.0, 0.3, 0.1], [0.3, 1.0, -0.2], [0.1, -0.2, 0.7]])


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("name", SHAPES)
def test_values_are_those_of_scipy(name: str, function: str) -> None:
    ours, theirs = getattr(getattr(ag.stats, name), function), getattr(getattr(scipy.stats, name), function)
    shapes = SHAPES[name]
    with np.errstate(all="ignore"):
        for loc, scale in ((0.0, 1.0), (0.2, 1.5), (0.0, -1.0)):
            expected = theirs(AT, *shapes, loc=loc, scale=scale)
            np.testing.assert_allclose(ours(AT, *shapes, loc=loc, scale=scale).numpy(), expected, rtol=1e-11, atol=1e-15)
        np.testing.assert_allclose(ours(AT, *shapes, 0.2, 1.5).numpy(), theirs(AT, *shapes, 0.2, 1.5), rtol=1e-11, atol=1e-15)
        if shapes:
            bad = (-1.0, *shapes[1:])
            np.testing.assert_array_equal(np.isnan(ours(AT, *bad).numpy()), True)


@pytest.mark.parametrize("name", SHAPES)
async def test_gradients(name: str) -> None:
    distribution, shapes = getattr(ag.stats, name), SHAPES[name]
    x, loc, scale, *rest = (ag.tensor(v, dtype=ag.float64, requires_grad=True) for v in ([0.3, 0.6, 0.9], 0.1, 1.3, *shapes))
    for function in ("pdf", "logpdf"):
        assert await ag.gradcheck(getattr(distribution, function), (x, *rest, loc, scale))
    assert await ag.gradgradcheck(distribution.logpdf, (x, *rest, loc, scale), atol=1e-4, rtol=1e-3)
    for function in ("cdf", "logcdf", "sf", "logsf"):
        f = getattr(distribution, function)
        assert await ag.gradcheck(lambda x, loc, scale, f=f: f(x, *shapes, loc, scale), (x, loc, scale))
        if rest:
            await assert_awaiting_raises(NoRuleError, "no closed form", f(x, *rest, loc, scale).sum().backward())
    shapes_only = [value.detach().requires_grad_() for value in (*rest, scale)]
    assert await ag.gradcheck(lambda *p: distribution.entropy(*p[:-1], scale=p[-1]) * 1.0, tuple(shapes_only))
    expected = getattr(scipy.stats, name).entropy(*shapes, scale=1.3)
    assert distribution.entropy(*shapes, scale=1.3).item() == pytest.approx(expected, abs=1e-6)


async def test_what_is_outside_of_the_support_has_no_part_in_gradients() -> None:
    x = ag.tensor([-1.0, 0.5, 2.0], dtype=ag.float64, requires_grad=True)
    await ag.stats.beta.pdf(x, 2.0, 3.0).sum().backward()
    assert x.grad is not None and np.isfinite(x.grad.numpy()).all() and x.grad.tolist()[::2] == [0, 0]
    middle = ag.tensor(0.0, dtype=ag.float64, requires_grad=True)
    await ag.stats.t.cdf(middle, 4.0).backward()
    assert middle.grad is not None and middle.grad.item() == pytest.approx(scipy.stats.t.pdf(0.0, 4.0))


@pytest.mark.parametrize("function", ["pmf", "logpmf", "cdf", "sf", "logcdf", "logsf"])
async def test_poisson(function: str) -> None:
    f = getattr(ag.stats.poisson, function)
    with np.errstate(all="ignore"):
        for mu in (0.0, 2.2, -1.0):
            np.testing.assert_allclose(f(K, mu).numpy(), getattr(scipy.stats.poisson, function)(K, mu), rtol=1e-11)
        np.testing.assert_allclose(f(np.arange(4), 2.2, 1).numpy(), getattr(scipy.stats.poisson, function)(np.arange(4), 2.2, 1), rtol=1e-11)
    mu = ag.tensor([0.5, 2.0], dtype=ag.float64, requires_grad=True)
    assert await ag.gradcheck(lambda mu: f(np.array([1.0, 3.0]), mu), (mu,))
    assert_raises(NoRuleError, "counts", lambda: f(ag.tensor(1.0, requires_grad=True), mu))


async def test_dirichlet() -> None:
    alpha, x = np.array([1.5, 2.0, 0.7]), np.array([0.2, 0.5, 0.3])
    several = np.stack([x, x[::-1]], axis=1)
    for function in ("pdf", "logpdf"):
        ours, theirs = getattr(ag.stats.dirichlet, function), getattr(scipy.stats.dirichlet, function)
        for at in (x, several, x[:2]):
            np.testing.assert_allclose(ours(at, alpha).numpy(), theirs(at, alpha), rtol=1e-12)
    assert ag.stats.dirichlet.entropy(alpha).item() == pytest.approx(scipy.stats.dirichlet.entropy(alpha))
    inputs = (ag.tensor(x[:2], requires_grad=True), ag.tensor(alpha, requires_grad=True))
    assert await ag.gradcheck(ag.stats.dirichlet.logpdf, inputs)
    assert_raises(ArgumentError, "sum is 1", lambda: ag.stats.dirichlet.logpdf(2 * x, alpha))
    assert_raises(ShapeError, "alpha", lambda: ag.stats.dirichlet.logpdf(x, alpha[:1]))


async def test_multivariate_normal() -> None:
    rng = np.random.default_rng(0)
    x, mean = rng.normal(size=(5, 3)), rng.normal(size=3)
    for function in ("pdf", "logpdf"):
        ours, theirs = getattr(ag.stats.multivariate_normal, function), getattr(scipy.stats.multivariate_normal, function)
        for at in (x, x[0]):
            for cov in (COV, np.diag(COV), 2.0):
                np.testing.assert_allclose(ours(at, mean, cov).numpy(), theirs(at, mean, cov), rtol=1e-12)
        np.testing.assert_allclose(ours(x[0]).numpy(), theirs(x[0]), rtol=1e-12)
        np.testing.assert_allclose(ours(x[:, 0], 0.5, 2.0).numpy(), theirs(x[:, 0], 0.5, 2.0), rtol=1e-12)
        singular = np.diag([1.0, 2.0, 0.0])
        flat = x * [1, 1, 0]
        np.testing.assert_allclose(ours(flat, None, singular, True).numpy(), theirs(flat, None, singular, True), rtol=1e-12)
        assert ours(x, None, singular, True).tolist() == theirs(x, None, singular, True).tolist()
    assert ag.stats.multivariate_normal.entropy(mean, COV).item() == pytest.approx(scipy.stats.multivariate_normal.entropy(mean, COV))
    inputs: tuple[Any, ...] = tuple(ag.tensor(v, requires_grad=True) for v in (x, mean, COV))
    assert await ag.gradcheck(lambda x, mean, cov: ag.stats.multivariate_normal.logpdf(x, mean, (cov + cov.T) / 2), inputs)
    assert await ag.gradcheck(lambda x, mean: ag.stats.multivariate_normal.logpdf(x * [1, 1, 0], mean * [1, 1, 0], singular, True), inputs[:2])
    assert_raises(np.linalg.LinAlgError, None, ag.stats.multivariate_normal.pdf, x, mean, -COV)
    assert_raises(NoRuleError, "singular", lambda: ag.stats.multivariate_normal.pdf(x, mean, inputs[2], True))


def test_arguments_are_checked_before_anything_is_computed() -> None:
    for wrong in (lambda: ag.stats.gamma.pdf(1.0), lambda: ag.stats.norm.pdf(1.0, 0.0, 1.0, 2.0), lambda: ag.stats.norm.pdf(1.0, 0.0, loc=0.0)):
        assert_raises(ArgumentError, r"expected \(x", wrong)
    assert_raises(ShapeError, "cov", lambda: ag.stats.multivariate_normal.logpdf(np.zeros(2), np.zeros(3), COV))

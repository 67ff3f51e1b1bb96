"""`ag.special` and SciPy's own ufuncs on Tensors: values as SciPy's over the whole range, gradients by finite differences, first and second."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.special

import aiograd as ag
from aiograd.errors import NoRuleError
from aiograd.tensors.scipy_names import SCIPY, scipy_function

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
}  # fmt: skip
TWO: dict[str, tuple[Any, Any]] = {
    "xlogy": (UNIT, POSITIVE[: UNIT.size]), "xlog1py": (UNIT, POSITIVE[: UNIT.size]), "beta": (POSITIVE[:300], POSITIVE[300:600]),
    "betaln": (POSITIVE[:300], POSITIVE[300:600]), "zeta": (rng.uniform(1.5, 6, 200), rng.uniform(0.1, 9, 200)),
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


def test_polygamma_and_ends() -> None:
    for n in range(1, 6):
        close(ag.special.polygamma(n, POSITIVE[:800]).numpy() / np.abs(scipy.special.polygamma(n, POSITIVE[:800])),
              np.sign(scipy.special.polygamma(n, POSITIVE[:800])), 50)  # fmt: skip
    ends = np.array([0.0, -1.0, -2.0, np.inf, np.nan])
    assert ag.special.gammaln(ends).tolist()[:4] == [np.inf] * 4 and np.isnan(ag.special.gammaln(ends).tolist()[4])
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
    "_zeta": (2.0, np.array([1.2, 0.4])),
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
    with pytest.raises(NoRuleError, match="scipy.special.spence"):
        scipy.special.spence(x)
    with pytest.raises(NoRuleError, match="out"):
        scipy.special.erf(x, out=np.zeros(1))
    assert scipy.special.spence(x.detach()).tolist() == pytest.approx([scipy.special.spence(0.5)])
    assert scipy_function(scipy.special.erf) is SCIPY["erf"] and scipy_function(np.exp2) is None, "exp2 is numpy's, whose rows have their own table"

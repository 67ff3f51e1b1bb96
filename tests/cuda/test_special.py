"""Special functions on a simulated CUDA device: the error functions, the logistic one, sinc and its derivatives, angles."""

from __future__ import annotations

import math

import numpy as np
import pytest

from aiograd.cuda.device import CudaDevice
from aiograd.ops.op import ROWS
from tests.ops.test_tails import ACTIVATIONS
from tests.ops.test_tails import X as FAR
from tests.tolerance import tolerance

X = np.array([-40.0, -6.0, -1.5, -0.25, 0.0, 0.3, 2.0, 9.0, 200.0, np.inf, -np.inf, np.nan])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_error_functions_keep_their_accuracy_in_the_tails(dtype: type, device: CudaDevice) -> None:
    a = device.from_host(X.astype(dtype))
    for name, function in (("erf", math.erf), ("erfc", math.erfc)):
        found = device.to_host(ROWS[name](a))
        assert found.dtype == dtype
        np.testing.assert_allclose(found, [function(float(dtype(x))) for x in X], rtol=tolerance(dtype))
    assert device.to_host(ROWS["erf"](device.from_host(np.array([1])))).dtype == np.float64


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_the_logistic_function_does_not_overflow(dtype: type, device: CudaDevice) -> None:
    x = X.astype(dtype)
    found = device.to_host(ROWS["sigmoid"](device.from_host(x)))
    with np.errstate(over="ignore"):
        wanted = 1 / (1 + np.exp(-x.astype(np.float64)))
    np.testing.assert_allclose(found, wanted, rtol=tolerance(dtype), atol=np.finfo(dtype).tiny)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_in_the_tails_are_those_of_the_host(name: str, dtype: type, device: CudaDevice) -> None:
    row_name, statics, *_ = ACTIVATIONS[name]
    row = ROWS[row_name]
    x = np.array([v for v in FAR if abs(v) < float(np.finfo(dtype).max)], dtype)
    statics = {**{key: row.defaults[key] for key in row.statics}, **statics}
    wanted, here = row(x, **statics), device.from_host(x)
    found = row(here, **statics)
    ((_, rule, names),) = row.rule_plan(row.rules, {})
    values, values_here = ({**statics, "x": x, "out": wanted}, {**statics, "x": here, "out": found})
    slope = rule(np.ones_like(x), *[values[key] for key in names])
    slope_here = rule(device.from_host(np.ones_like(x)), *[values_here[key] for key in names])
    limits = np.finfo(dtype)
    for ours, theirs in ((found, wanted), (slope_here, slope)):
        bound = 100 * float(limits.eps) * (1 + np.minimum(np.abs(x.astype(np.float64)), 100) ** 2) * np.abs(theirs) + 8 * float(limits.eps)
        assert np.all(np.abs(device.to_host(ours).astype(np.float64) - theirs) <= bound)


@pytest.mark.parametrize("order", range(5))
def test_derivatives_of_sinc(order: int, device: CudaDevice) -> None:
    x = np.array([-3.3, -1.0, -0.4, -1e-3, 0.0, 0.2, 0.7, 1.9, 6.0])
    np.testing.assert_allclose(device.to_host(ROWS["sinc"](device.from_host(x), order=order)), ROWS["sinc"](x, order=order), rtol=1e-9, atol=1e-9)
    if order == 0:
        np.testing.assert_allclose(device.to_host(np.sinc(device.from_host(x))), np.sinc(x), rtol=tolerance(x.dtype), atol=tolerance(x.dtype))


def test_angles_of_real_numbers(device: CudaDevice) -> None:
    x = np.array([1.0, -1.0, 0.0, -0.0, np.nan])
    np.testing.assert_array_equal(device.to_host(np.angle(device.from_host(x))), np.angle(x))
    np.testing.assert_array_equal(device.to_host(np.angle(device.from_host(x), deg=True)), np.angle(x, deg=True))
    np.testing.assert_array_equal(device.to_host(np.imag(device.from_host(x))), np.imag(x))
    assert device.statistics().fallbacks == {}

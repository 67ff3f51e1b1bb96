"""Element-wise operations on a simulated CUDA device: every ufunc with a template over every dtype, every row, and what falls back."""

from __future__ import annotations

import numpy as np
import pytest

from aiograd.cuda import tables
from aiograd.cuda.device import CudaDevice
from aiograd.cuda.templates import TEMPLATES
from tests.cuda.on_both import row_agrees
from tests.cuda.samples import DOMAINS, NOT_ON_DEVICES
from tests.support import assert_raises
from tests.sweeps import swept

#: rows that the host computes for the device, forward or backward: decompositions, and complex numbers
ON_HOST = frozenset(
    """
    bessel_i0 bessel_i0e bessel_i1 bessel_i1e bessel_j0 bessel_j1 bessel_y0 bessel_y1 cholesky cofactors complex cummax cummin det digamma eig
    bessel_iv bessel_ive bessel_jv bessel_k0 bessel_k1 bessel_yn betainc betaincc cofactors_grad
    eigh eigvals eigvalsh erfinv expm gamma gammaln inv irfft log_ndtr logcumsumexp pinv qr rfft scatter_extreme slogdet solve svd svdvals windows
    fft ifft erfcx exprel gammainc gammaincc gammasgn mills_gap ndtri rel_entr rgamma stdtr windows_adjoint zeta vector_norm
    """.split()  # vector_norm: one order of five
)
#: those of the families that are tested in modules of their own
HERE = frozenset(
    """
    abs acos acosh add angle asin asinh atan atan2 atanh cbrt ceil clamp clone conj copysign cos cosh deg2rad div divmod elu erf erfc exp
    exp2 expm1 fabs float_power floor fmax fmin fmod gelu hypot imag ldexp leaky_relu log log10 log1p log2 log_sigmoid logaddexp logaddexp2
    mask maximum minimum mul nan_to_num neg positive pow rad2deg real reciprocal relu remainder round rsqrt sgn sigmoid sign silu sin sinc
    sinh softplus softsign sqrt square sub tan tanh to_copy trunc where xlogy xlog1py clamp_max clamp_min
    """.split()
)
DTYPES = ("float32", "float64", "float16", "int32", "int64", "uint8", "uint64", "int8", "bool")
UFUNCS = sorted(name for name in TEMPLATES if isinstance(getattr(np, name, None), np.ufunc))


def numbers(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if dtype.startswith("float"):
        values = rng.standard_normal(shape) * 2
        values.flat[:4] = [0.0, -0.0, np.inf, np.nan]
        return values.astype(dtype)
    low = 0 if dtype.startswith("uint") else -6
    return rng.integers(low, 7, shape).astype(dtype)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", UFUNCS)
def test_ufuncs_are_those_of_numpy(name: str, device: CudaDevice) -> None:
    ufunc, native = getattr(np, name), 0
    for dtype in DTYPES:
        rng = np.random.default_rng(3)
        args = [numbers(rng, dtype, (4, 5)) for _ in range(ufunc.nin)]
        if len(args) == 2:
            args[1] = args[1][:, :1] if name != "ldexp" else rng.integers(-3, 4, (4, 1))
        if name in ("power", "left_shift", "right_shift") and args[1].dtype.kind == "i":
            args[1] = np.abs(args[1])
        try:
            wanted = ufunc(*args)
        except TypeError:
            continue
        before = device.statistics().host_fallbacks
        found = device.to_host(ufunc(*[device.from_host(arg) for arg in args]))
        native += device.statistics().host_fallbacks == before
        assert found.dtype == wanted.dtype, dtype
        if wanted.dtype.kind == "f":
            tolerance = {2: 4e-3, 4: 3e-6, 8: 1e-13}[wanted.itemsize]
            np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance, err_msg=dtype)
            exact = np.isfinite(wanted) & (wanted == 0)
            if name not in ("maximum", "minimum", "fmax", "fmin"):  # which of 0.0 and -0.0 is larger depends on the processor
                np.testing.assert_array_equal(np.signbit(found[exact]), np.signbit(wanted[exact]), err_msg=dtype)
        else:
            np.testing.assert_array_equal(found, wanted, err_msg=dtype)
    assert native >= (2 if "shift" not in name and "bitwise" not in name and name != "invert" else 5), "most dtypes have kernels"


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("name", swept(sorted(HERE), keep=80))
def test_rows_and_their_rules_are_native(name: str, dtype: str, device: CudaDevice) -> None:
    for variety in range(DOMAINS[name].varieties):
        row_agrees(device, name, variety, dtype)
    assert device.statistics().fallbacks == {}


@pytest.mark.parametrize("name", swept(sorted(DOMAINS.keys() - NOT_ON_DEVICES), keep=40))
def test_what_the_host_has_to_compute(name: str, device: CudaDevice) -> None:
    assert ON_HOST <= DOMAINS.keys()
    before = device.statistics().host_fallbacks
    for variety in range(DOMAINS[name].varieties):
        row_agrees(device, name, variety, "float64")
    assert (device.statistics().host_fallbacks > before) is (name in ON_HOST)


@pytest.mark.parametrize("dtype", ["int8", "int32", "int64", "uint8", "uint64"])
def test_integer_powers_wrap_as_numpys(dtype: str, device: CudaDevice) -> None:
    base = np.array([0, 1, 2, 3, 7, 11, 250 if dtype[0] == "u" else -3], dtype)
    for exponent in (np.arange(9, dtype=dtype)[:, None], 2, 0):
        there = device.from_host(exponent) if isinstance(exponent, np.ndarray) else exponent
        np.testing.assert_array_equal(device.to_host(device.from_host(base) ** there), base**exponent)
    if dtype[0] == "i":
        assert_raises(ValueError, "negative integer powers", lambda: device.from_host(base) ** -1)
        found = device.to_host(np.power(device.from_host(np.array([1, -1, -1, 2], dtype)), device.from_host(np.array([-2, -2, -3, -1], dtype))))
        np.testing.assert_array_equal(found, [1, 1, -1, 0])


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8"])
def test_shifts_beyond_the_width(dtype: str, device: CudaDevice) -> None:
    x = np.array([1, 5, 100, 0], dtype)
    if dtype[0] == "i":
        x[0] = -7
    by = np.array([0, 3, 40, 70], dtype)[:, None]
    for function in (np.left_shift, np.right_shift):
        np.testing.assert_array_equal(device.to_host(function(device.from_host(x), device.from_host(by))), function(x, by))


def test_functions_with_two_results(device: CudaDevice) -> None:
    x, y = np.array([7.5, -7.5, 0.0, np.inf]), np.array([2.0, 2.0, -3.0, 1.0])
    for found, wanted in zip(np.divmod(device.from_host(x), y), (np.floor_divide(x[:3], y[:3]), np.remainder(x[:3], y[:3])), strict=True):
        np.testing.assert_array_equal(device.to_host(found)[:3], wanted)
    for found, wanted in zip(np.modf(device.from_host(x)), np.modf(x), strict=True):
        np.testing.assert_array_equal(device.to_host(found), wanted)
    assert device.statistics().fallbacks == {}


def test_promotion_is_numpys(device: CudaDevice) -> None:
    for left in DTYPES:
        for right in (*(np.ones(2, dtype) for dtype in DTYPES), 2, 2.5, True):
            x = np.ones(2, left)
            try:
                wanted = np.add(x, right)
            except (TypeError, OverflowError):
                continue
            assert np.add(device.from_host(x), right).dtype == wanted.dtype, (left, right)


def test_every_template_that_no_ufunc_names_serves_a_row_or_a_function() -> None:
    assert set(TEMPLATES) - set(UFUNCS) == {"cast", "where", "erf", "erfc", "sigmoid", "nan_to_num"}
    assert {"erf", "erfc", "sigmoid", "nan_to_num", "where"} <= set(tables.ROW_KERNELS)

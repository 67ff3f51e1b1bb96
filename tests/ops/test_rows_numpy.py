"""Every row of `DOMAINS` against finite differences, with nothing but the tables: first and second derivatives, real and complex.

Also dtypes, the accuracy of erf, products with zeros, ties, and what a row does at the points its domain keeps clear of.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import numpy as np
import pytest

from aiograd.ops import ROWS, Op, error_function, indexing
from aiograd.ops.masking import BITS_FROM
from aiograd.ops.scan import LOOP
from tests.ops.domains_core import DOMAINS
from tests.ops.traced import Traced, bind, call_rules, check, flatten, floating, vjp
from tests.support import assert_raises

NAMES = sorted(DOMAINS)


@pytest.mark.parametrize("name", NAMES)
def test_derivatives(name: str) -> None:
    domain, row = DOMAINS[name], ROWS[name]
    for variety in range(domain.varieties):
        rng = np.random.default_rng([variety, 1])
        args, kwargs = domain.draw(rng, variety)
        function, inputs = bind(domain, row, args, kwargs)
        check(function, inputs, rng, second=domain.second_order)


@pytest.mark.parametrize("name", [name for name in NAMES if DOMAINS[name].complex])
def test_complex_derivatives(name: str) -> None:
    domain, row = DOMAINS[name], ROWS[name]
    assert row.complex != "real"
    for variety in range(domain.varieties):
        rng = np.random.default_rng([variety, 2])
        args, kwargs = domain.draw(rng, variety)
        args = tuple(a + 1j * rng.uniform(0.1, 0.4, a.shape) if floating(a) else a for a in args)
        function, inputs = bind(domain, row, args, kwargs)
        check(function, inputs, rng, second=domain.second_order)


@pytest.mark.parametrize("name", NAMES)
def test_rules_leave_their_inputs_alone_and_keep_the_dtype(name: str) -> None:
    """In float32, on read-only arrays; and with only some of several outputs differentiated."""
    domain, row = DOMAINS[name], ROWS[name]
    for variety in range(domain.varieties):
        rng = np.random.default_rng([variety, 3])
        args, kwargs = domain.draw(rng, variety)
        args = tuple(a.astype(np.float32) if floating(a) else a for a in args)
        if domain.prepare is not None:
            args = domain.prepare(*args)
        for a in args:
            if isinstance(a, np.ndarray):
                a.setflags(write=False)
        out = row(*args, **kwargs)
        outs = flatten(out)
        smooth = [i for i, o in enumerate(outs) if o.dtype.kind in "fc" and i in (row.differentiable_outputs or range(len(outs)))]
        if "float32" in domain.dtypes:
            assert all(outs[i].dtype == np.float32 for i in smooth)
        for chosen in ([*((i,) for i in smooth)] if len(smooth) > 1 else []) + [tuple(smooth)]:
            pieces = []
            for i, o in enumerate(outs):
                piece = np.asarray(rng.normal(size=o.shape), o.dtype) if i in chosen else None
                if piece is not None:
                    piece.setflags(write=False)
                pieces.append(piece)
            gradients = call_rules(row, args, kwargs, out, pieces[0] if row.outputs == 1 else tuple(pieces))
            for gradient in gradients.values():
                assert gradient.dtype == np.float32 or "float32" not in domain.dtypes


def test_every_row_of_the_core_tables_has_a_domain() -> None:
    ours = {name for name, row in ROWS.items() if row.differentiable and _is_core(row)}
    assert ours - set(DOMAINS) == set()
    assert set(DOMAINS) <= ours
    assert len(DOMAINS) >= 100


def _is_core(row: Op) -> bool:
    """True if a module of `aiograd.ops` other than those of networks defines the row."""
    rule = next(iter((*row.rules.values(), *row.joint.values())))
    module = getattr(inspect.getmodule(rule), "__name__", "")
    return module.startswith("aiograd.ops.") and not module.startswith("aiograd.ops.nn")


def gradient(name: str, *args: Any, **kwargs: Any) -> list[Any]:
    """Gradients of the sum of a row's output by all of its floating arguments."""
    traced = [Traced(a) if floating(np.asarray(a)) else a for a in args]
    out = flatten(ROWS[name](*traced, **kwargs))[0]
    return vjp([out], [np.ones(out.shape, out.dtype)], [t for t in traced if isinstance(t, Traced)])


# The error function.


@pytest.mark.parametrize("size", [7, error_function.FEW + 1, 2 * error_function.BLOCK + 3])
def test_erf_agrees_with_the_library_of_c(size: int) -> None:
    rng = np.random.default_rng(size)
    for low, high in ((-1, 1), (-7, 7), (0.4, 0.6), (-30, 30)):
        x = rng.uniform(low, high, size)
        for ours, exact, units in ((error_function.erf, math.erf, 2), (error_function.erfc, math.erfc, 10)):
            expected = np.array([exact(v) for v in x])
            np.testing.assert_array_less(np.abs(ours(x) - expected), units * np.spacing(np.abs(expected)) + 5e-324)


@pytest.mark.parametrize("size", [8, 1000])
def test_erf_of_float32_and_of_special_values(size: int) -> None:
    special = np.resize(np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-30, 40.0, -40.0]), size)
    for dtype in (np.float32, np.float64, np.float16):
        x = special.astype(dtype)
        assert error_function.erf(x).dtype == dtype
        np.testing.assert_allclose(error_function.erf(x)[:8], [0.0, -0.0, 1.0, -1.0, np.nan, float(x[5]) * 1.1283791670955126, 1, -1], rtol=1e-6)
        assert np.signbit(error_function.erf(x)[1])
        np.testing.assert_allclose(error_function.erfc(x)[:8], [1.0, 1.0, 0.0, 2.0, np.nan, 1.0, 0.0, 2.0])
    x = np.random.default_rng(0).normal(size=size).astype(np.float32)
    np.testing.assert_allclose(error_function.erf(x), [math.erf(v) for v in x.tolist()], rtol=6e-7)
    np.testing.assert_allclose(error_function.erfc(x), [math.erfc(v) for v in x.tolist()], rtol=2e-7)
    assert error_function.erf(np.arange(3)).dtype == np.float64
    assert error_function.erf(np.zeros((2, 0, 3))).shape == (2, 0, 3)


# Points that the domains keep clear of.


def _others(x: Any) -> Any:
    return np.array([np.prod(np.delete(x, i)) for i in range(x.size)])


@pytest.mark.parametrize("zeros", [0, 1, 2, 5])
def test_the_gradient_of_a_product_is_exact_with_zeros(zeros: int) -> None:
    x = np.random.default_rng(zeros).integers(1, 5, 6).astype(float)
    x[:zeros] = 0.0
    (of_prod,) = gradient("prod", x)
    np.testing.assert_array_equal(of_prod, _others(x))
    (of_cumprod,) = gradient("cumprod", x)
    expected = sum(np.pad(_others(x[: k + 1]), (0, 5 - k)) for k in range(6))
    np.testing.assert_array_equal(of_cumprod, expected)


def test_products_that_underflow_still_have_gradients() -> None:
    np.testing.assert_array_equal(gradient("prod", np.array([1e-200, 1e-200, 2.0]))[0], [2e-200, 2e-200, 0.0])


@pytest.mark.parametrize("length", [1, LOOP, LOOP + 1, 1000, 3 * LOOP + 7])
@pytest.mark.parametrize("reverse", [False, True])
def test_a_linear_recurrence_is_the_same_in_blocks(length: int, reverse: bool) -> None:
    rng = np.random.default_rng(length)
    x, factor = rng.normal(size=(2, length)), rng.uniform(-1.1, 1.1, size=(2, length))
    expected, h = np.empty_like(x), np.zeros(2)
    for k in reversed(range(length)) if reverse else range(length):
        h = x[:, k] + factor[:, k] * h
        expected[:, k] = h
    np.testing.assert_allclose(ROWS["linear_scan"](x, factor, axis=1, reverse=reverse), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "args", "kwargs", "expected"),
    [
        ("max", (np.array([1.0, 3.0, 3.0]),), {}, [[0.0, 0.5, 0.5]]),
        ("min", (np.array([[2.0, 2.0], [1.0, 2.0]]),), {"axis": 1}, [[[0.5, 0.5], [1.0, 0.0]]]),
        ("maximum", (np.array([1.0, 2.0]), np.array([1.0, 1.0])), {}, [[0.5, 1.0], [0.5, 0.0]]),
        ("minimum", (np.array([1.0, 2.0]), np.array([1.0, 1.0])), {}, [[0.5, 0.0], [0.5, 1.0]]),
        ("fmax", (np.array([np.nan, 2.0]), np.array([1.0, np.nan])), {}, [[0.0, 1.0], [1.0, 0.0]]),
        ("fmin", (np.array([1.0, 2.0]), np.array([1.0, 3.0])), {}, [[1.0, 1.0], [0.0, 0.0]]),
        ("clamp", (np.array([-1.0, -0.5, 0.0, 0.5, 1.0]),), {"min": -0.5, "max": 0.5}, [[0.0, 1.0, 1.0, 1.0, 0.0]]),
        ("clamp_min", (np.array([1.0, 2.0, 0.0, np.nan]), np.array([1.0, 1.0, 1.0, 1.0])), {}, [[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0]]),
        ("clamp_max", (np.array([1.0, 2.0, 0.0, np.nan]), np.array([1.0, 1.0, 1.0, 1.0])), {}, [[1.0, 0.0, 1.0, 0.0], [0.0, 1.0, 0.0, 0.0]]),
        ("pow", (np.zeros(3), np.array([0.0, 1.0, 2.0])), {}, [[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]),
        ("pow", (np.zeros(2), 2), {}, [[0.0, 0.0]]),
        ("pow", (np.array([2.0]), np.zeros(1)), {}, [[0.0], [math.log(2.0)]]),
        ("relu", (np.array([-1.0, 0.0, 1.0]),), {}, [[0.0, 0.0, 1.0]]),
        ("abs", (np.array([-2.0, 0.0]),), {}, [[-1.0, 0.0]]),
        ("abs", (np.array([0j, 3 + 4j]),), {}, [[0.0, 0.6 + 0.8j]]),
        ("sgn", (np.array([0j, 3 + 4j]),), {}, [[0.0, 0.128 - 0.096j]]),
        ("hypot", (np.array([0.0, 3.0]), np.array([0.0, 4.0])), {}, [[0.0, 0.6], [0.0, 0.8]]),
        ("atan2", (np.array([0.0]), np.array([0.0])), {}, [[0.0], [0.0]]),
        ("sinc", (np.array([0.0]),), {}, [[0.0]]),
        ("sinc", (np.array([0.0]),), {"order": 1}, [[-math.pi**2 / 3]]),
        ("xlogy", (np.array([0.0, 0.0, 2.0]), np.array([0.0, 2.0, 1.0])), {}, [[0.0, math.log(2.0), 0.0], [0.0, 0.0, 2.0]]),
        ("xlog1py", (np.array([0.0, 0.0, 2.0]), np.array([-1.0, 1.0, 0.0])), {}, [[0.0, math.log(2.0), 0.0], [0.0, 0.0, 2.0]]),
        ("std", (np.array([2.0, 2.0]),), {}, [[0.0, 0.0]]),
        ("vector_norm", (np.zeros(2),), {}, [[0.0, 0.0]]),
        ("vector_norm", (np.array([-2.0, 2.0, 1.0]),), {"ord": math.inf}, [[-0.5, 0.5, 0.0]]),
        ("logaddexp", (np.array([-np.inf, 0.0]), np.array([-np.inf, -np.inf])), {}, [[0.0, 1.0], [0.0, 0.0]]),
        ("logsumexp", (np.full((2, 2), -np.inf),), {"axis": 1}, [np.zeros((2, 2))]),
        ("logsumexp", (np.array([-np.inf, 0.0]),), {}, [[0.0, 1.0]]),
        ("copysign", (np.array([0.0, 2.0]), np.array([1.0, -1.0])), {}, [[0.0, -1.0], [0.0, 0.0]]),
        ("nan_to_num", (np.array([np.nan, 1.0, np.inf]),), {}, [[0.0, 1.0, 0.0]]),
        ("where", (np.array([True, False]), np.array([1.0, np.nan]), np.array([np.inf, 2.0])), {}, [[1.0, 0.0], [0.0, 1.0]]),
        ("det", (np.array([[1.0, 2.0], [2.0, 4.0]]),), {}, [[[4.0, -2.0], [-2.0, 1.0]]]),
        ("det", (np.zeros((3, 3)),), {}, [np.zeros((3, 3))]),
        ("eigh", (np.eye(3),), {}, [np.eye(3)]),
        ("svd", (np.zeros((2, 3)),), {}, None),
        ("floor", (np.array([0.5]),), {}, [[0.0]]),
        ("divmod", (np.array([7.0]), np.array([2.0])), {}, [[0.0], [0.0]]),
    ],
)
def test_gradients_at_kinks_ties_and_poles(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], expected: list[Any] | None) -> None:
    found = gradient(name, *args, **kwargs)
    if expected is None:
        assert all(np.isfinite(g).all() for g in found[:1])
        return
    for g, e in zip(found, expected, strict=True):
        np.testing.assert_allclose(g, e, atol=1e-12)


@pytest.mark.parametrize("order", range(8))
def test_derivatives_of_sinc_in_single_precision(order: int) -> None:
    x = np.linspace(-4, 4, 81)
    precise = ROWS["sinc"](x, order=order)
    with np.errstate(all="raise", under="ignore"):
        found = ROWS["sinc"](x.astype(np.float32), order=order)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, precise, atol=3e-5 * np.abs(precise).max() * (order + 1))


def test_masked_gradients_are_zero_even_where_they_were_infinite() -> None:
    for size in (4, BITS_FROM + 1):
        x = np.resize(np.array([1.0, -1.0, 2.0, -2.0]), size)
        for dtype in (np.float32, np.float64, np.float16):
            g = np.where(x > 0, x, np.nan).astype(dtype)
            kept = ROWS["mask"](g, x > 0)
            assert kept.dtype == dtype
            np.testing.assert_array_equal(kept, np.where(x > 0, x, 0).astype(dtype))
            chosen = ROWS["where"](x > 0, g, np.full_like(g, -3.0))
            np.testing.assert_array_equal(chosen, np.where(x > 0, x, -3).astype(dtype))
        np.testing.assert_array_equal(ROWS["where"](x > 0, x, 0), np.where(x > 0, x, 0))
        np.testing.assert_array_equal(ROWS["where"](x > 0, 1, x[:1]), np.where(x > 0, 1, x[:1]))
        np.testing.assert_array_equal(ROWS["mask"](np.float64(2.0), x > 0), np.where(x > 0, 2.0, 0.0))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sigmoid_and_its_relatives_are_accurate_in_the_tails(dtype: Any) -> None:
    x = np.array([-1e4, -80.0, -20.0, 0.0, 20.0, 80.0, 1e4, np.inf, -np.inf], dtype)
    precise = x.astype(np.longdouble)
    with np.errstate(over="ignore"):
        expected = 1 / (1 + np.exp(-precise))
    tolerance = 4 * np.finfo(dtype).eps
    np.testing.assert_allclose(ROWS["sigmoid"](x), expected.astype(dtype), rtol=tolerance, atol=float(np.finfo(dtype).tiny) * 4)
    np.testing.assert_allclose(ROWS["softplus"](x), np.logaddexp(x, 0), rtol=tolerance)
    np.testing.assert_allclose(ROWS["log_sigmoid"](x), -np.logaddexp(-x, 0), rtol=tolerance)
    assert ROWS["sigmoid"](x).dtype == dtype
    assert ROWS["sigmoid"](dtype(0.0)) == 0.5


# dtypes


def test_casts_give_the_gradient_back_in_the_dtype_it_came_from() -> None:
    x = np.arange(3, dtype=np.float32)
    out = ROWS["to_copy"](x, dtype=np.float64)
    assert out.dtype == np.float64
    (g,) = call_rules(ROWS["to_copy"], (x,), {"dtype": np.float64}, out, np.ones(3)).values()
    assert g.dtype == np.float32
    z = ROWS["to_copy"](x, dtype=np.complex64)
    (g,) = call_rules(ROWS["to_copy"], (x,), {"dtype": np.complex64}, z, np.full(3, 2 + 3j, np.complex64)).values()
    np.testing.assert_array_equal(g, np.full(3, 2, np.float32))
    assert ROWS["to_copy"](x, dtype=np.float32, copy=False) is x


def test_complex_phases_of_factorisations_do_not_matter() -> None:
    """A @ A.H and A itself rebuilt from factors: the gradient of the rebuilt matrix is that of the identity map."""
    rng = np.random.default_rng(5)
    a = rng.normal(size=(2, 3, 3)) + 1j * rng.normal(size=(2, 3, 3))
    seed = rng.normal(size=(2, 3, 3)) + 1j * rng.normal(size=(2, 3, 3))

    def rebuilt(name: str, matrix: Any, build: Any) -> Any:
        traced = Traced(matrix)
        return vjp([build(*ROWS[name](traced))], [seed], [traced])[0]

    np.testing.assert_allclose(rebuilt("qr", a, np.matmul), seed, atol=1e-10)
    np.testing.assert_allclose(rebuilt("svd", a, lambda u, s, vh: np.matmul(u * np.expand_dims(s, -2), vh)), seed, atol=1e-10)
    hermitian = a + np.conjugate(np.swapaxes(a, -1, -2))
    even = (seed + np.conjugate(np.swapaxes(seed, -1, -2))) / 2
    found = rebuilt("eigh", hermitian, lambda w, v: np.matmul(v * np.expand_dims(w, -2), np.conjugate(np.swapaxes(v, -1, -2))))
    np.testing.assert_allclose(found, even, atol=1e-10)


def test_variadic_rules_and_outputs_without_gradients() -> None:
    x = np.arange(6.0).reshape(2, 3)
    split = ROWS["split"]
    parts = split(x, cuts=(1, 2), axis=1)
    (g,) = call_rules(split, (x,), {"cuts": (1, 2), "axis": 1}, parts, (None, np.ones((2, 1)), None)).values()
    np.testing.assert_array_equal(g, [[0, 1, 0], [0, 1, 0]])
    unbind = ROWS["unbind"]
    (g,) = call_rules(unbind, (x,), {"axis": 0}, unbind(x), (None, np.ones(3))).values()
    np.testing.assert_array_equal(g, [[0, 0, 0], [1, 1, 1]])


@pytest.mark.parametrize("few", [0, indexing.FEW])
def test_scattering_adds_in_every_layout(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexing, "FEW", few)
    rng = np.random.default_rng(1)
    layouts: list[tuple[tuple[int, ...], Any]] = [
        ((5, 3), np.array([0, 4, 4, -1])), ((4, 5), (np.array([[0], [3]]), np.array([1, 1, 2]))), ((100,), np.array([3, 3])),
        ((3, 4), (slice(None), np.array([1, 1, 0]))), ((100, 4), (slice(None, None, 99), np.array([1, 1]))),
        ((2, 3, 4), (np.array([1, 1]), slice(None), np.array([0, 0]))), ((6,), [2, 2, -2]),
    ]  # fmt: skip
    for dtype in (np.float32, np.float64, np.complex128):
        for shape, index in layouts:
            g = rng.normal(size=np.zeros(shape)[index].shape).astype(dtype)
            expected = np.zeros(shape, dtype)
            np.add.at(expected, index, g)
            np.testing.assert_allclose(ROWS["index_adjoint"](g, index=index, shape=shape), expected, rtol=1e-6)
    assert_raises(IndexError, None, lambda: ROWS["take_adjoint"](np.ones(1), np.array([3]), shape=(3,), axis=0))


def test_names_of_nodes() -> None:
    assert ROWS["mul"].node_name == "MulBackward"
    assert ROWS["log_sigmoid"].node_name == "LogSigmoidBackward"

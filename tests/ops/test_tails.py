"""Activations and losses far out: the accurate value, to the precision of the dtype, from the plain rows and from every set of kernels.

Expected values are worked out in float64 by formulas that do not cancel. Where the result is below the normal numbers of the dtype only its size is
checked: kernels flush such numbers to zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from aiograd.kernels import selection
from aiograd.ops import ROWS, Op
from tests.ops.traced import Traced, vjp

# the first test compiles all kernels where the user's cache does not hold them yet
pytestmark = pytest.mark.timeout(900)

X = (-1e30, -1e4, -800.0, -700.0, -120.0, -100.0, -85.0, -50.0, -40.0, -30.0, -20.0, -15.0, -11.5, -8.0, -3.0, -0.5, -1e-3, 0.0,
     1e-3, 0.5, 3.0, 8.0, 12.0, 20.0, 40.0, 100.0, 700.0, 1e4, 1e30)  # fmt: skip


def logistic(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(max(x, -745.0)) / (1 + math.exp(x)) if x > -745 else 0.0


def phi(x: float) -> float:
    return 0.5 * math.erfc(-x * math.sqrt(0.5))


def density(x: float) -> float:
    return math.exp(-0.5 * x * x) / math.sqrt(2 * math.pi) if abs(x) < 1e3 else 0.0


def inner(x: float) -> tuple[float, float]:
    """Of gelu's approximation: twice the argument of tanh, and its derivative."""
    x = min(max(x, -1e3), 1e3)
    root = math.sqrt(2 / math.pi)
    return 2 * root * (x + 0.044715 * x**3), 2 * root * (1 + 3 * 0.044715 * x * x)


def _gelu_tanh_slope(x: float) -> float:
    u, slope = inner(x)
    return logistic(u) + (x * logistic(u) * logistic(-u) * slope if abs(x) < 1e3 else 0.0)


#: row, its static arguments, the function and its derivative, how much the rounding of an intermediate result of size x**power is magnified
ACTIVATIONS: dict[str, tuple[str, dict[str, Any], Callable[[float], float], Callable[[float], float], int]] = {
    "sigmoid": ("sigmoid", {}, logistic, lambda x: logistic(x) * logistic(-x), 1),
    "log_sigmoid": ("log_sigmoid", {}, lambda x: min(x, 0.0) - math.log1p(math.exp(-abs(x))), lambda x: logistic(-x), 1),
    "softplus": ("softplus", {}, lambda x: max(x, 0.0) + math.log1p(math.exp(-abs(x))), logistic, 1),
    "silu": ("silu", {}, lambda x: x * logistic(x), lambda x: logistic(x) + (x * logistic(x) * logistic(-x)), 1),
    "gelu": ("gelu", {}, lambda x: x * phi(x), lambda x: phi(x) + x * density(x), 2),
    "gelu by tanh": ("gelu", {"approximate": "tanh"}, lambda x: x * logistic(inner(x)[0]), _gelu_tanh_slope, 3),
    "elu": ("elu", {"alpha": 1.5}, lambda x: x if x > 0 else 1.5 * math.expm1(x), lambda x: 1.0 if x > 0 else 1.5 * math.exp(x), 1),
    "tanh": ("tanh", {}, math.tanh, lambda x: 1 - math.tanh(x) ** 2, 0),
    "softsign": ("softsign", {}, lambda x: x / (1 + abs(x)), lambda x: 1 / (1 + abs(x)) ** 2, 0),
}  # fmt: skip
#: derivatives made from the output, which has lost what one less it was
FROM_OUTPUT = ("sigmoid", "tanh")


@pytest.fixture(params=["plain", "numpy", "numba"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    before = selection.selected()
    if request.param == "numba":
        if not selection.available():
            pytest.skip("numba is not installed")
        monkeypatch.setattr(selection, "THRESHOLD", 1)
        selection.use("numba")
    else:
        selection.use("numpy")
    yield request.param
    selection._chosen = before


def run(kernels: str, row: Op, x: Any, statics: dict[str, Any]) -> tuple[Any, Any]:
    """The row's output, and the gradient of its sum."""
    statics = {**{name: row.defaults[name] for name in row.statics if name in row.defaults}, **statics}
    if kernels == "plain" or row.fused is None:
        traced = Traced(x)
        out = row(traced, **statics)
        return out.value, vjp([out], [np.ones(out.shape, x.dtype)], [traced])[0]
    out, *residuals = row.fused.forward(x, **statics)
    known = {**statics, **dict(zip(row.fused.residuals, residuals, strict=True)), row.arrays[0]: x, "out": out}
    ((_, rule, names),) = row.rule_plan(row.fused.rules, {})
    return out, rule(np.ones_like(out), *[known[name] for name in names])


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_keep_their_accuracy_in_the_tails(name: str, dtype: Any, kernels: str) -> None:
    row, statics, function, slope, power = ACTIVATIONS[name]
    x = np.array([v for v in X if abs(v) < float(np.finfo(dtype).max)], dtype)
    value, gradient = run(kernels, ROWS[row], x, statics)
    for found, wanted in ((value, function), (gradient, slope)):
        assert found.dtype == dtype
        expected = np.array([wanted(float(v)) for v in x])
        limits = np.finfo(dtype)
        reach = np.abs(x.astype(np.float64)) ** power if power else np.ones(x.size)
        tolerance = 40 * float(limits.eps) * (1 + np.minimum(reach, 1e4)) * np.abs(expected) + float(limits.tiny)
        if wanted is slope and row in FROM_OUTPUT:
            tolerance += 4 * float(limits.eps)
        error = np.abs(found.astype(np.float64) - expected)
        wrong = error > tolerance
        assert not wrong.any(), list(zip(x[wrong].tolist(), found[wrong].tolist(), expected[wrong].tolist(), strict=True))


def test_the_logistic_function_ends_in_zero_and_one() -> None:
    for dtype in (np.float16, np.float32, np.float64, np.longdouble):
        found = ROWS["sigmoid"](np.array([-np.inf, np.inf, np.nan], dtype))
        assert found.dtype == dtype and found[0] == 0 and found[1] == 1 and np.isnan(found[2])
        assert ROWS["sigmoid"](np.array(-np.inf, dtype)) == 0


def test_the_logistic_function_takes_every_kind_of_number() -> None:
    row = ROWS["sigmoid"]
    for x in (np.array([0, 1, -3]), np.array([True, False]), np.array(5, np.uint8)):
        found = row(x)
        assert found.dtype == np.float64
        np.testing.assert_allclose(found, 1 / (1 + np.exp(-x.astype(np.float64))), rtol=1e-15)
    z = np.array([0.3 - 0.7j, -2.0 + 1j, 800 + 1j, -800 - 2j])
    with np.errstate(over="ignore", invalid="ignore"):
        wanted = np.where(z.real < -700, 0, 1 / (1 + np.exp(-z)))
    np.testing.assert_allclose(row(z), wanted, rtol=1e-14)


# -------------------------------------------------------------------- sums of exponentials


def gradients(name: str, *args: Any, **statics: Any) -> list[Any]:
    traced = [Traced(np.asarray(a, np.float64)) for a in args]
    out = ROWS[name](*traced, **statics)
    return [np.asarray(g).tolist() for g in vjp([out], [np.ones(out.shape)], traced)]


def test_an_infinite_term_takes_the_gradient_of_a_sum_of_exponentials() -> None:
    inf = np.inf
    for name in ("logaddexp", "logaddexp2"):
        assert gradients(name, [inf, 5.0, -inf, 3.0, -inf], [2.0, inf, 3.0, -inf, -inf]) == [[1, 0, 0, 1, 0], [0, 1, 1, 0, 0]]
    assert gradients("logsumexp", [[inf, 1000.0], [2.0, -inf], [-inf, -inf]], axis=1) == [[[1, 0], [1, 0], [0, 0]]]


# -------------------------------------------------------------------- losses


@pytest.mark.parametrize("smoothing", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_classes_that_count_for_nothing_add_nothing(reduction: str, smoothing: float, dtype: Any, kernels: str) -> None:
    logits = np.array([[0.0, -np.inf, 1.0], [2.0, -np.inf, 0.5], [-np.inf, -np.inf, -np.inf]], dtype)[: 2 if smoothing else 3]
    target = np.array([1, 0, 1])[: len(logits)]
    statics = {"target": target, "weight": np.array([1.0, 0.0, 2.0], dtype), "label_smoothing": smoothing, "reduction": reduction}
    statics["ignore_index"] = -100
    with np.errstate(invalid="ignore"):
        loss, gradient = run(kernels, ROWS["cross_entropy"], logits, statics)
    # of the classes that count
    rest = logits[:2, [0, 2]].astype(np.float64)
    logp = rest - np.log(np.exp(rest).sum(axis=1, keepdims=True))
    each = np.array([[0.0, 0.0], [1.0 - smoothing, 0.0]]) + smoothing / 3 * np.array([1.0, 2.0])
    wanted = np.append(-(each * logp).sum(axis=1), 0.0)[: len(logits)]
    wanted = wanted if reduction == "none" else wanted.sum()  # the weights of the targets come to 1
    np.testing.assert_allclose(loss, wanted, rtol=20 * np.finfo(dtype).eps, atol=20 * np.finfo(dtype).eps)
    slope = np.exp(logp) * each.sum(axis=1, keepdims=True) - each
    np.testing.assert_allclose(gradient[:2, [0, 2]], slope, rtol=20 * np.finfo(dtype).eps, atol=20 * np.finfo(dtype).eps)
    assert gradient[:2, 1].tolist() == [0, 0]


def test_an_infinite_loss_of_full_smoothing_is_infinite(kernels: str) -> None:
    statics = {"target": np.array([1]), "weight": None, "label_smoothing": 1.0, "reduction": "sum", "ignore_index": -100}
    with np.errstate(invalid="ignore"):
        assert run(kernels, ROWS["cross_entropy"], np.array([[0.0, -np.inf]]), statics)[0] == np.inf


def test_binary_cross_entropy_is_accurate_and_finite_where_the_target_is_right() -> None:
    row = ROWS["binary_cross_entropy_with_logits"]
    for logit, target in ((-40.0, 0.0), (40.0, 1.0), (-300.0, 0.0), (300.0, 1.0)):
        x = np.array([logit])
        np.testing.assert_allclose(row(x, np.array([target]), reduction="sum"), math.exp(-abs(logit)), rtol=1e-14)
        found = gradients("binary_cross_entropy_with_logits", [logit], [target], reduction="sum")
        np.testing.assert_allclose(found[0], [math.copysign(math.exp(-abs(logit)), -logit)], rtol=1e-14)
    for logit, target, wanted in ((-np.inf, 0.0, 0.0), (np.inf, 1.0, 0.0), (np.inf, 0.0, np.inf), (-np.inf, 1.0, np.inf)):
        for positive in (None, np.array([3.0])):
            assert row(np.array([logit]), np.array([target]), None, positive, reduction="sum") == wanted


# -------------------------------------------------------------------- what no gradient may be dropped from


def test_a_step_to_the_next_number_passes_the_gradient() -> None:
    assert gradients("nextafter", [1.0, -2.0], [3.0, -2.0]) == [[1, 1], [0, 0]]
    assert gradients("heaviside", [0.0, -2.0, 3.0], [3.0, 4.0, 5.0]) == [[0, 0, 0], [1, 0, 0]]

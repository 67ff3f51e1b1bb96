"""The rows of networks: derivatives over their domains, fused kernels against plain rules, what they refuse."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from aiograd import errors
from aiograd.kernels import selection
from aiograd.ops import ROWS, Op, unbroadcast
from tests.ops.domains_nn import DOMAINS
from tests.ops.traced import bind, call_rules, check, flatten, floating, named_values
from tests.support import assert_raises
from tests.sweeps import swept

NAMES = sorted(DOMAINS)
FUSED = sorted(name for name in NAMES if ROWS[name].fused is not None)


def draws(name: str, seed: int) -> Iterator[tuple[tuple[Any, ...], dict[str, Any], np.random.Generator]]:
    """The cases of a row's domain."""
    domain = DOMAINS[name]
    for variety in range(domain.varieties):
        rng = np.random.default_rng([variety, seed])
        args, kwargs = domain.draw(rng, variety)
        yield args, kwargs, rng


@pytest.mark.parametrize("name", swept(NAMES, keep=7))
def test_derivatives(name: str) -> None:
    for args, kwargs, rng in draws(name, 1):
        function, inputs = bind(DOMAINS[name], ROWS[name], args, kwargs)
        check(function, inputs, rng, second=DOMAINS[name].second_order)


def test_every_row_of_networks_has_a_domain() -> None:
    ours = set()
    for name, row in ROWS.items():
        if row.differentiable:
            module = inspect.getmodule(next(iter((*row.rules.values(), *row.joint.values()))))
            if getattr(module, "__name__", "").startswith("aiograd.ops.nn"):
                ours.add(name)
    assert ours == set(DOMAINS)


def fused_rules(row: Op, args: Sequence[Any], kwargs: dict[str, Any], g: Any) -> tuple[Any, dict[str, Any]]:
    """The output of a row's fused forward, and the gradients its fused rules give, as an engine calls them."""
    fused = row.fused
    assert fused is not None
    given = {name: (args[i] if i < len(args) else row.defaults[name]) for i, name in enumerate(row.arrays)}
    statics = {name: kwargs.get(name, row.defaults.get(name)) for name in row.statics}
    out, *residuals = fused.forward(*given.values(), **statics)
    values = {**named_values(row, tuple(given.values()), statics, out), **dict(zip(fused.residuals, residuals, strict=True))}
    gradients = {}
    for arguments, rule, names in row.rule_plan(fused.rules, fused.joint):
        needs = tuple(floating(given[a]) for a in arguments)
        if any(needs):
            values["needs"] = needs
            result = rule(g, *(values[n] for n in names))
            results = result if arguments in fused.joint else (result,)
            gradients.update({a: unbroadcast(r, given[a].shape) for a, r, need in zip(arguments, results, needs, strict=True) if need})
    return out, gradients


def seeds(row: Op, out: Any, rng: np.random.Generator) -> Any:
    """A gradient of a row's output: read-only, for rules may not write to it."""
    pieces = []
    for i, piece in enumerate(flatten(out)):
        carries = row.differentiable_outputs is None or i in row.differentiable_outputs
        pieces.append(np.asarray(rng.normal(size=piece.shape), piece.dtype) if carries else None)
        if carries:
            pieces[-1].setflags(write=False)  # type: ignore[union-attr]
    return pieces[0] if row.outputs == 1 else tuple(pieces)


@pytest.mark.timeout(900)  # may have to compile the kernels first
@pytest.mark.parametrize("kernels", ["numpy", "numba"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", FUSED)
def test_fused_rules_agree_with_plain_ones(name: str, dtype: str, kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernels == "numba" and not selection.available():
        pytest.skip("numba is not installed")
    monkeypatch.setattr(selection, "_chosen", selection.selected())
    monkeypatch.setattr(selection, "THRESHOLD", 1)
    row = ROWS[name]
    tolerance = 2e-5 if dtype == "float32" else 1e-12
    for args, kwargs, rng in draws(name, 2):
        args = tuple(a.astype(dtype) if floating(a) else a for a in args)
        for a in args:
            if isinstance(a, np.ndarray):
                a.setflags(write=False)
        selection.use("numpy")
        out = row.forward(*args, **kwargs)
        g = seeds(row, out, rng)
        expected = call_rules(row, args, kwargs, out, g)
        selection.use(kernels)
        fused_out, found = fused_rules(row, args, kwargs, g)
        for a, b in zip(flatten(fused_out), flatten(out), strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
        assert {row.arrays.index(a) for a in found} == set(expected)
        for argument, gradient in found.items():
            other = expected[row.arrays.index(argument)]
            assert gradient.dtype == other.dtype and gradient.dtype == np.dtype(dtype)
            assert gradient.shape == other.shape
            np.testing.assert_allclose(gradient, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", FUSED)
def test_fused_rules_give_only_what_is_needed(name: str) -> None:
    """With one argument at a time, the others' gradients are None or left out, and the one asked for is the same."""
    row = ROWS[name]
    fused = row.fused
    assert fused is not None
    for args, kwargs, rng in draws(name, 3):
        out = row.forward(*args, **kwargs)
        g = seeds(row, out, rng)
        expected = call_rules(row, args, kwargs, out, g)
        given = {n: (args[i] if i < len(args) else row.defaults[n]) for i, n in enumerate(row.arrays)}
        statics = {n: kwargs.get(n, row.defaults.get(n)) for n in row.statics}
        out, *residuals = fused.forward(*given.values(), **statics)
        values = {**named_values(row, tuple(given.values()), statics, out), **dict(zip(fused.residuals, residuals, strict=True))}
        for arguments, rule in fused.joint.items():
            for position, argument in enumerate(arguments):
                if row.arrays.index(argument) in expected:
                    values["needs"] = tuple(i == position for i in range(len(arguments)))
                    result = rule(g, *(values[n] for n in inspect.signature(rule).parameters if n != "g"))
                    found = unbroadcast(result[position], given[argument].shape)
                    np.testing.assert_allclose(found, expected[row.arrays.index(argument)], rtol=1e-9, atol=1e-9)


def test_weights_of_binary_cross_entropy() -> None:
    """They scale the loss and its gradients; the row gives them none of their own."""
    rng = np.random.default_rng(4)
    row = ROWS["binary_cross_entropy_with_logits"]
    x, t, w, p = rng.normal(size=(3, 4)), rng.random((3, 4)), rng.random((3, 4)), rng.uniform(0.5, 2.0, 4)
    for reduction in ("mean", "sum", "none"):
        function = lambda a, b: (row(a, b, w, p, reduction=reduction),)  # noqa: B023, E731
        check(function, [x, t], rng, second=True)
    s = 1 / (1 + np.exp(-x))
    expected = -w * (p * t * np.log(s) + (1 - t) * np.log(1 - s))
    np.testing.assert_allclose(row(x, t, w, p, reduction="none"), expected, rtol=1e-12)


def test_an_index_that_is_padding_takes_no_gradient() -> None:
    row, weight, indices = ROWS["embedding"], np.ones((3, 2)), np.array([[0, 1], [1, 1]])
    out = row(weight, indices=indices, padding_idx=1)
    (g,) = call_rules(row, (weight,), {"indices": indices, "padding_idx": 1}, out, np.ones_like(out)).values()
    np.testing.assert_array_equal(g, [[1, 1], [0, 0], [0, 0]])


def test_queries_that_see_nothing_give_zeros() -> None:
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(3, 2, 4))
    mask = np.array([[True, True], [False, False]])
    row = ROWS["scaled_dot_product_attention"]
    out = row(q, k, v, mask)
    np.testing.assert_array_equal(out[1], np.zeros(4))
    dq, dk, dv = call_rules(row, (q, k, v, mask), {}, out, np.ones_like(out)).values()
    assert np.isfinite(dk).all() and np.isfinite(dv).all()
    np.testing.assert_array_equal(dq[1], np.zeros(4))


def test_cross_entropy_of_hopeless_logits() -> None:
    """Huge logits give huge losses, not NaN; only a target of probability zero gives infinity; nothing to average gives NaN."""
    row = ROWS["cross_entropy"]
    logits = np.array([[1e4, -1e4, 0.0], [0.0, -np.inf, 0.0]])
    for kernels in (row.forward, lambda *a, **k: row.fused.forward(*a, weight=None, ignore_index=-100, label_smoothing=0.0, **k)[0]):  # type: ignore[union-attr]
        np.testing.assert_allclose(kernels(logits, target=np.array([1, 0]), reduction="none"), [2e4, np.log(2.0)])
        with np.errstate(all="ignore"):
            assert kernels(logits[1:], target=np.array([1]), reduction="sum") == np.inf
            assert np.isnan(kernels(logits, target=np.array([-100, -100]), reduction="mean"))


@pytest.mark.parametrize(
    ("name", "args", "kwargs", "error", "message"),
    [
        ("linear", (np.ones((2, 3)), np.ones((4, 2))), {}, errors.ShapeError, r"x \(2, 3\), weight \(4, 2\)"),
        ("conv2d", (np.ones((1, 3, 4, 4)), np.ones((2, 2, 3, 3))), {}, errors.ShapeError, "3 channels"),
        ("conv2d", (np.ones((1, 2, 2, 2)), np.ones((2, 2, 3, 3))), {}, errors.ShapeError, "does not fit"),
        ("conv2d", (np.ones((1, 2, 4, 4)), np.ones((2, 2, 3, 3))), {"stride": 0}, errors.ArgumentError, "at least 1"),
        ("conv2d", (np.ones((1, 2, 4, 4)), np.ones((2, 2, 3, 3)), np.ones(3)), {}, errors.ShapeError, "bias"),
        ("conv2d", (np.ones((2, 4, 4)), np.ones((2, 2, 3, 3))), {}, errors.ShapeError, r"\(N, C, H, W\)"),
        ("max_pool2d", (np.ones((1, 1, 4, 4)),), {"kernel_size": 2, "padding": 2}, errors.ShapeError, "half the window"),
        ("max_pool2d", (np.ones((1, 1, 4, 4)),), {"kernel_size": (1, 2, 3)}, errors.ArgumentError, "two ints"),
        ("layer_norm", (np.ones((2, 3)), np.ones(2)), {}, errors.ShapeError, "weight"),
        ("layer_norm", (np.ones((2, 3)),), {"ndims": 3}, errors.ArgumentError, "ndims=3"),
        ("group_norm", (np.ones((2, 3, 4)),), {"num_groups": 2}, errors.ArgumentError, "does not divide"),
        ("batch_norm", (np.ones((2, 3)), np.ones(2)), {}, errors.ShapeError, "channel"),
        ("cross_entropy", (np.ones((2, 3)),), {"target": np.array([0, 3])}, errors.ArgumentError, "target 3"),
        ("cross_entropy", (np.ones((2, 3)),), {"target": np.array([0.0, 1.0])}, errors.ArgumentTypeError, "float64"),
        ("cross_entropy", (np.ones((2, 3)),), {"target": np.array([0])}, errors.ShapeError, r"expected \(2,\)"),
        ("cross_entropy", (np.ones((2, 3)),), {"target": np.array([0, 1]), "weight": np.ones(2)}, errors.ShapeError, "per class"),
        ("cross_entropy", (np.ones((2, 3)),), {"target": np.array([0, 1]), "label_smoothing": 1.5}, errors.ArgumentError, "label_smoothing"),
        ("cross_entropy", (np.ones((2, 3)),), {"target": np.array([0, 1]), "reduction": "median"}, errors.ArgumentError, "'median'"),
        ("mse_loss", (np.ones((2, 3)), np.ones(3)), {}, errors.ShapeError, "same shape"),
        ("huber_loss", (np.ones(3), np.ones(3)), {"delta": 0.0}, errors.ArgumentError, "positive"),
        ("embedding", (np.ones((3, 2)),), {"indices": np.array([3])}, errors.ArgumentError, "0 to 2"),
        ("embedding", (np.ones((3, 2)),), {"indices": np.array([-1])}, errors.ArgumentError, "from -1"),
        ("embedding", (np.ones((3, 2)),), {"indices": np.array([0.5])}, errors.ArgumentTypeError, "integers"),
        ("scaled_dot_product_attention", (np.ones((2, 3)), np.ones((2, 4)), np.ones((2, 3))), {}, errors.ShapeError, r"k \(2, 4\)"),
        ("scaled_dot_product_attention", (np.ones((2, 3)),) * 3 + (np.ones((2, 2), int),), {}, errors.ArgumentTypeError, "int64"),
        ("lstm_cell", (np.ones((2, 6)), np.ones((2, 2))), {}, errors.ShapeError, "4 \\* hidden"),
        ("lstm", (np.ones((2, 1, 3)), np.ones((1, 2)), np.ones((1, 2)), np.ones((8, 2)), np.ones((8, 2))), {}, errors.ShapeError, "w_ih"),
    ],
)
def test_refused(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], error: type[Exception], message: str) -> None:
    row = ROWS[name]
    statics = {n: kwargs.get(n, row.defaults.get(n)) for n in row.statics}
    present = [*args, *[None] * (len(row.arrays) - len(args))]
    assert_raises(error, message, lambda: row(*args, **kwargs))
    if row.fused is not None:
        assert_raises(error, message, lambda: row.fused.forward(*present, **statics))

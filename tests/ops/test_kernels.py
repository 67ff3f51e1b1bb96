"""Compiled kernels agree with numpy's, repeat to the bit from any number of threads, and the fused rules agree with the plain ones."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from aiograd.kernels import (
    activation,
    arrays,
    attention,
    convolution,
    layout,
    matmul,
    normalization,
    optimizer,
    pool,
    pooling,
    recurrent,
    reduction,
    selection,
    softmax,
    unfold,
)
from aiograd.kernels.erfcx import normal_cdf
from aiograd.kernels.window import window
from tests.support import assert_raises

# the first test compiles all kernels where the user's cache does not hold them yet
pytestmark = [pytest.mark.skipif(not selection.available(), reason="numba is not installed"), pytest.mark.timeout(900)]

#: relative tolerance, times the square root of the length of the sums in a case
TOLERANCE = {"float32": 2e-6, "float64": 2e-14}


@pytest.fixture(autouse=True)
def _restore(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels are used from one element on; the process's own choice comes back afterwards."""
    before = selection.selected()
    monkeypatch.setattr(selection, "THRESHOLD", 1)
    monkeypatch.setattr(pool, "GRAIN", 512)
    monkeypatch.setattr(matmul, "MULTIPLICATIONS", 1)
    monkeypatch.setattr(matmul, "PIECE", 512)
    monkeypatch.setattr(importlib.import_module("aiograd.kernels.compiled.gemm"), "OUTRUNS_BLAS", True)
    yield
    selection._chosen = before


Case = Callable[[np.random.Generator, type[np.floating[Any]]], Callable[[], Any]]
CASES: dict[str, tuple[Case, int]] = {}


def case(name: str, length: int = 1) -> Callable[[Case], Case]:
    """Register a case: given a generator and a dtype it draws arguments and returns the call; `length` is that of its sums."""

    def register(draw: Case) -> Case:
        CASES[name] = draw, length
        return draw

    return register


def draw(rng: np.random.Generator, dtype: Any, *shape: int) -> Any:
    """Normal numbers."""
    return rng.standard_normal(shape).astype(dtype)


def _pair(name: str) -> None:
    forward, backward = getattr(activation, name), getattr(activation, f"{name}_grad")

    @case(name)
    def _(rng: np.random.Generator, dtype: Any) -> Callable[[], Any]:
        x, g = 4 * draw(rng, dtype, 37, 129), draw(rng, dtype, 37, 129)
        return lambda: (forward(x), backward(g, x))


for _name in ("relu", "gelu", "silu"):
    _pair(_name)


@case("gelu tanh")
def _gelu_tanh(rng: np.random.Generator, dtype: Any) -> Callable[[], Any]:
    x, g = 4 * draw(rng, dtype, 37, 129), draw(rng, dtype, 37, 129)
    return lambda: (activation.gelu(x, "tanh"), activation.gelu_grad(g, x, "tanh"))


@case("layer_norm", 77)
def _layer_norm(rng: np.random.Generator, dtype: Any) -> Callable[[], Any]:
    x, g, w, b = draw(rng, dtype, 65, 77) + 3, draw(rng, dtype, 65, 77), draw(rng, dtype, 77), draw(rng, dtype, 77)

    def call() -> Any:
        out, mean, rstd = normalization.layer_norm(x, w, b, 1e-5)
        bare = normalization.layer_norm(x, None, None, 1e-5)[0]
        half = normalization.layer_norm(x, None, b, 1e-5)[0], normalization.layer_norm(x, w, None, 1e-5)[0]
        grads = normalization.layer_norm_grad(g, x, w, mean, rstd), normalization.layer_norm_grad(g, x, None, mean, rstd, (True, False, False))[:1]
        return out, mean, rstd, bare, half, grads, normalization.layer_norm_grad(g, x, w, mean, rstd, (False, True, True))[1:]

    return call


@case("rms_norm", 77)
def _rms_norm(rng: np.random.Generator, dtype: Any) -> Callable[[], Any]:
    x, g, w = draw(rng, dtype, 65, 77), draw(rng, dtype, 65, 77), draw(rng, dtype, 77)

    def call() -> Any:
        out, scale = normalization.rms_norm(x, w, 1e-5)
        bare = normalization.rms_norm(x, None, 1e-5)[0]
        return out, scale, bare, normalization.rms_norm_grad(g, x, w, scale), normalization.rms_norm_grad(g, x, None, scale, (True, False))[:1]

    return call


@case("softmax", 53)
def _softmax(rng: np.random.Generator, dtype: Any) -> Callable[[], Any]:
    x, g = 3 * draw(rng, dtype, 4, 31, 53), draw(rng, dtype, 4, 31, 53)

    def call() -> Any:
        out, log = softmax.softmax(x), softmax.log_softmax(x)
        return out, log, softmax.softmax_grad(g, out), softmax.log_softmax_grad(g, log)

    return call


@case("cross_entropy", 53)
def _cross_entropy(rng: np.random.Generator, dtype: Any) -> Callable[[], Any]:
    x, scale, w = 3 * draw(rng, dtype, 41, 53), draw(rng, dtype, 41), rng.random(53).astype(dtype)
    target = rng.integers(0, 53, 41)
    target[[3, 11]] = -100

    def call() -> Any:
        results = []
        for weight, smoothing in ((None, 0.0), (w, 0.0), (None, 0.1), (w, 0.1)):
            loss, counts, shift = softmax.cross_entropy(x, target, weight, -100, smoothing)
            results.append((loss, counts, shift, softmax.cross_entropy_grad(scale, x, target, weight, -100, smoothing, shift)))
        return results

    return call


@case("sums", 5000)
def _sums(rng: np.random.Generator, dtype: Any) -> Callable[[], Any]:
    x, y = draw(rng, dtype, 301, 67), draw(rng, dtype, 5, 7, 11, 13)
    return lambda: (reduction.column_sum(x), reduction.row_sum(x), reduction.channel_sum(y), reduction.total(x))


@case("layout", 20)
def _layout(rng: np.random.Generator, dtype: Any) -> Callable[[], Any]:
    x, rows, index = draw(rng, dtype, 3, 67, 93), draw(rng, dtype, 200, 33), rng.integers(0, 40, 200)
    return lambda: (arrays.transposed(x), arrays.contiguous(x.swapaxes(1, 2)), layout.scatter_rows(rows, index, 45))


WINDOWS = [window(2, 2), window(3, 2, 1), window((3, 2), 1, (1, 1), 2), window(3, (1, 2))]


@case("windows", 9)
def _windows(rng: np.random.Generator, dtype: Any) -> Callable[[], Any]:
    x = draw(rng, dtype, 3, 5, 13, 15)
    x[0, 0, :4, :4] = np.nan
    x[0, 1, :5, :5] = -np.inf
    x[0, 2, :5, :5] = 1.0  # ties
    columns = {win: draw(rng, dtype, 3, 5, win.taps, int(np.prod(win.outputs(13, 15)))) for win in WINDOWS}

    def call() -> Any:
        results: list[Any] = []
        for win in WINDOWS:
            values, index = pooling.max_pool(x, win)
            results.append((values, index, pooling.max_unpool(columns[win][:, :, 0].reshape(values.shape), index, win, 13, 15)))
            results.append((unfold.unfold(x, win), unfold.fold(columns[win], win, 13, 15)))
        return results

    return call


@case("convolution", 2000)
def _convolution(rng: np.random.Generator, dtype: Any) -> Callable[[], Any]:
    drawn = []
    for win, channels, out, groups in ((WINDOWS[1], 3, 10, 1), (window(3, 1, 1), 16, 33, 1), (WINDOWS[2], 16, 32, 2), (window(1), 9, 70, 1)):
        x, w, b = draw(rng, dtype, 5, channels, 13, 15), draw(rng, dtype, out, channels // groups, *win.size), draw(rng, dtype, out)
        drawn.append((x, w, b, draw(rng, dtype, 5, out, *win.outputs(13, 15)), win, groups))

    def call() -> Any:
        return [
            (
                convolution.conv2d(x, w, b, win, groups),
                convolution.conv2d(x, w, None, win, groups),
                convolution.input_grad(g, w, win, groups, 13, 15),
                convolution.weight_grad(x, g, win, groups),
            )
            for x, w, b, g, win, groups in drawn
        ]

    return call


@case("depthwise convolution", 1000)
def _depthwise(rng: np.random.Generator, dtype: Any) -> Callable[[], Any]:
    drawn = []
    near, mixed, single = (window(3, 1, 1), 6), (window((2, 3), (3, 2), (0, 2), (2, 1)), 6), (window(1, 2), 18)
    second, double, open_, far = (window(3, 2, 1), 12), (window(3, 1, 1), 12), (window(3), 6), (window(3, 1, (4, 3)), 6)
    shapes = ((13, 15, near), (13, 15, second), (13, 15, mixed), (13, 15, single), (4, 37, near), (4, 70, mixed))
    more = ((5, 16, double), (3, 3, open_), (6, 35, open_), (1, 1, near), (2, 5, far))
    halved = ((5, 70, second), (8, 33, (window(3, 2), 6)), (7, 36, (window(3, 2, 2), 6)), (1, 2, (window(3, 2, (1, 3)), 6)))
    for height, width, (win, out) in shapes + more + halved:
        x, w, b = draw(rng, dtype, 5, 6, height, width), draw(rng, dtype, out, 1, *win.size), draw(rng, dtype, out)
        drawn.append((x, w, b, draw(rng, dtype, 5, out, *win.outputs(height, width)), win))

    def call() -> Any:
        return [
            (
                convolution.conv2d(x, w, b, win, 6),
                convolution.conv2d(x, w, None, win, 6),
                convolution.input_grad(g, w, win, 6, *x.shape[2:]),
                convolution.weight_grad(x, g, win, 6),
            )
            for x, w, b, g, win in drawn
        ]

    return call


@case("batch_norm", 300)
def _batch_norm(rng: np.random.Generator, dtype: Any) -> Callable[[], Any]:
    x, g, w, b = draw(rng, dtype, 5, 9, 60) + 3, draw(rng, dtype, 5, 9, 60), draw(rng, dtype, 9), draw(rng, dtype, 9)

    def call() -> Any:
        out, mean, var, rstd = normalization.batch_norm(x, w, b, 1e-5)
        bare = normalization.batch_norm(x, None, None, 1e-5)
        half = normalization.batch_norm(x, None, b, 1e-5)[0], normalization.batch_norm(x, w, None, 1e-5)[0]
        grads = normalization.batch_norm_grad(g, x, w, mean, rstd), normalization.batch_norm_grad(g, x, None, mean, rstd)
        return out, mean, var, rstd, bare, half, grads, normalization.batch_norm_grad(g, x, w, mean, rstd, False)

    return call


@case("batch_norm_columns", 61)
def _batch_norm_columns(rng: np.random.Generator, dtype: Any) -> Callable[[], Any]:
    x, g, w, b = draw(rng, dtype, 61, 53, 1) + 3, draw(rng, dtype, 61, 53, 1), draw(rng, dtype, 53), draw(rng, dtype, 53)

    def call() -> Any:
        out, mean, var, rstd = normalization.batch_norm(x, w, b, 1e-5)
        half = normalization.batch_norm(x, None, b, 1e-5)[0], normalization.batch_norm(x, w, None, 1e-5)[0]
        grads = normalization.batch_norm_grad(g, x, w, mean, rstd), normalization.batch_norm_grad(g, x, None, mean, rstd)
        return out, mean, var, rstd, half, grads, normalization.batch_norm_grad(g, x, w, mean, rstd, False)

    return call


@case("matrix product", 600)
def _product(rng: np.random.Generator, dtype: Any) -> Callable[[], Any]:
    """Sums in one depth and in three, whole blocks and rests of rows and columns, several packings of rows and of columns."""
    a, b, bias = draw(rng, dtype, 53, 70), draw(rng, dtype, 70, 45), draw(rng, dtype, 45)
    deep, wide, tall = draw(rng, dtype, 64, 600), draw(rng, dtype, 600, 96), draw(rng, dtype, 300, 600)
    broad, nothing = draw(rng, dtype, 8, 1100), np.empty((0, 70), dtype)
    product = matmul.product

    def call() -> Any:
        plain = (
            product(a, b), product(a, b, bias), product(a[::2], b), product(a[:, ::2], b[::2], bias), product(nothing, b), product(a.T[:1].T, b[:1]),
        )  # fmt: skip
        turned = product(np.asfortranarray(a), b, bias), product(a, np.asfortranarray(b)), product(b.T, a.T), product(a.T, a)
        return plain, turned, product(deep, wide), product(tall, wide, wide[0]), product(deep.T, broad[:, :64].T.copy()), product(broad.T, broad)

    return call


@case("attention", 200)
def _attention(rng: np.random.Generator, dtype: Any) -> Callable[[], Any]:
    q, k, v = draw(rng, dtype, 2, 75, 3, 20).swapaxes(1, 2), draw(rng, dtype, 2, 3, 90, 20), draw(rng, dtype, 2, 3, 90, 35)
    g, added = draw(rng, dtype, 2, 3, 75, 35), draw(rng, dtype, 75, 90)
    allowed = rng.random((2, 1, 75, 90)) < 0.7
    allowed[:, :, 5] = False

    def call() -> Any:
        results = []
        for allow, add, causal in ((None, None, False), (None, None, True), (allowed, None, False), (allowed, added, True)):
            out, shift = attention.attention(q, k, v, allow, add, causal, 0.2)
            results.append((out, shift, attention.attention_grad(g, q, k, v, allow, add, causal, 0.2, shift, add is not None)))
        flat = attention.attention(q[0, 0], k[0, 0], v[0, 0], None, None, False, 0.2)
        return results, flat, attention.attention(q, k[:1], v, None, None, False, 0.2)

    return call


@case("lstm", 200)
def _lstm(rng: np.random.Generator, dtype: Any) -> Callable[[], Any]:
    gates, h, c, w = draw(rng, dtype, 6, 21, 4 * 19), draw(rng, dtype, 21, 19), draw(rng, dtype, 21, 19), 0.3 * draw(rng, dtype, 4 * 19, 19)
    g, dh, dc = draw(rng, dtype, 6, 21, 19), draw(rng, dtype, 21, 19), draw(rng, dtype, 21, 19)

    def call() -> Any:
        hidden, cells, active = recurrent.lstm(gates.copy(), h, c, w)
        grads = recurrent.lstm_grad(g, dh, dc, active, cells, w), recurrent.lstm_grad(g, None, None, active, cells, w)
        out, after, act = recurrent.lstm_cell(gates[0], c)
        steps = recurrent.lstm_cell_grad(dh, dc, act, c, after), recurrent.lstm_cell_grad(None, dc, act, c, after)
        return hidden, cells, active, grads, out, after, act, steps

    return call


@case("optimizers", 4)
def _optimizers(rng: np.random.Generator, dtype: Any) -> Callable[[], Any]:
    start, gradients = draw(rng, dtype, 40, 31), draw(rng, dtype, 3, 40, 31)

    def sgd(**options: Any) -> Any:
        p, v = start.copy(), np.zeros_like(start) if options.get("momentum") else None
        for step, g in enumerate(gradients):
            optimizer.sgd(p, g, v, lr=0.1, first=step == 0, **options)
        return (p,) if v is None else (p, v)

    def adam(amsgrad: bool = False, **options: Any) -> Any:
        p, m, s = start.copy(), np.zeros_like(start), np.zeros_like(start)
        top = np.zeros_like(start) if amsgrad else None
        for step, g in enumerate(gradients, 1):
            optimizer.adam(p, g, m, s, top, step=step, lr=0.1, **options)
        return (p, m, s) if top is None else (p, m, s, top)

    return lambda: (
        sgd(), sgd(weight_decay=0.1, maximize=True), sgd(momentum=0.9, dampening=0.2, weight_decay=0.1), sgd(momentum=0.9, nesterov=True), adam(),
        adam(weight_decay=0.1), adam(weight_decay=0.1, decoupled=True, maximize=True), adam(amsgrad=True, eps=1e-3),
    )  # fmt: skip


def leaves(value: Any) -> list[Any]:
    """The arrays in nested tuples and lists."""
    if isinstance(value, (tuple, list)):
        return [leaf for item in value for leaf in leaves(item)]
    return [] if value is None else [np.asarray(value)]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_numpy(name: str, dtype: str) -> None:
    make, length = CASES[name]
    call = make(np.random.default_rng(7), np.dtype(dtype).type)
    selection.use("numpy")
    expected = leaves(call())
    selection.use("numba")
    found = leaves(call())
    tolerance = TOLERANCE[dtype] * length**0.5
    assert len(found) == len(expected)
    for number, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert a.dtype == b.dtype and a.shape == b.shape, number
        finite = b[np.isfinite(b)]
        scale = float(np.abs(finite).max()) if finite.size else 1.0
        np.testing.assert_allclose(a, b, rtol=20 * tolerance, atol=tolerance * max(scale, 1e-3), err_msg=f"result {number}")


@pytest.mark.parametrize("name", CASES)
def test_bits_do_not_depend_on_threads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread, three threads, and four calls at the same time from four threads give the same bits."""
    selection.use("numba")
    call = CASES[name][0](np.random.default_rng(3), np.float32)
    monkeypatch.setattr(pool, "_pool", pool.KernelThreadPool(1))
    expected = [a.tobytes() for a in leaves(call())]
    three = pool.KernelThreadPool(3)
    monkeypatch.setattr(pool, "_pool", three)
    results: list[list[bytes]] = []
    barrier = threading.Barrier(4)

    def work() -> None:
        barrier.wait(20)
        for _ in range(3):
            results.append([a.tobytes() for a in leaves(call())])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    three.stop()
    assert len(results) == 12
    assert all(result == expected for result in results)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-6), ("float64", 2e-14)])
def test_normal_cdf_is_accurate_far_out(dtype: str, tolerance: float) -> None:
    import math

    x = np.linspace(-9, 9, 181).astype(dtype)
    exact = np.array([0.5 * math.erfc(-float(v) / math.sqrt(2.0)) for v in x])
    near = np.abs(x) < 5
    found = normal_cdf(x)[0]
    np.testing.assert_allclose(found[near], exact[near], rtol=tolerance)
    np.testing.assert_allclose(found, exact, rtol=20 * tolerance)
    selection.use("numba")
    np.testing.assert_allclose(activation.gelu(x), x * exact, rtol=20 * tolerance, atol=1e-30)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_extremes(dtype: str) -> None:
    """Infinities, NaN and huge numbers come out of compiled kernels as out of numpy's."""
    x = np.array([-np.inf, -1e30, -800.0, -90.0, -0.0, 0.0, 1e-30, 90.0, 800.0, 1e30, np.inf, np.nan], dtype)
    rows = np.array([[0.0, -np.inf, 1.0], [np.nan, 0.0, 1.0], [1e30, -1e30, 0.0], [-np.inf, -np.inf, -np.inf]], dtype)
    for name in ("numpy", "numba"):
        selection.use(name)
        with np.errstate(all="ignore"):
            np.testing.assert_array_equal(activation.relu(x)[-2:], [np.inf, np.nan])
            for function in (activation.gelu, activation.silu, lambda v: activation.gelu(v, "tanh")):
                np.testing.assert_allclose(function(x)[1:-1], np.where(x > 0, x, 0)[1:-1], atol=1e-29, rtol=1e-6)
                assert np.isnan(function(x)[-1])
            found = softmax.softmax(rows)
        np.testing.assert_allclose(found[0], np.array([1.0, 0.0, np.e]) / (1.0 + np.e), rtol=1e-6)
        assert np.isnan(found[1]).all() and np.isnan(found[3]).all()
        np.testing.assert_array_equal(found[2], [1.0, 0.0, 0.0])


def test_read_only_unaligned_and_strided_arguments() -> None:
    selection.use("numba")
    x = np.arange(12.0, dtype=np.float32).reshape(3, 4) - 6
    expected = np.maximum(x, 0)
    frozen = x.copy()
    frozen.flags.writeable = False
    unaligned = np.frombuffer(b"x" + x.tobytes(), np.float32, offset=1).reshape(3, 4)
    for view in (frozen, unaligned, np.asfortranarray(x), np.repeat(x, 2, 1)[:, ::2]):
        np.testing.assert_array_equal(activation.relu(view), expected)


def test_compiled_functions_are_closed() -> None:
    """A call with types that were not compiled ahead is an error, not a compilation on the caller's time."""
    selection.use("numba")
    kernels = selection.compiled(10, np.zeros(1, np.float32))
    assert_raises(TypeError, "No matching definition", lambda: kernels.activation.relu(np.zeros(4, np.float16), np.zeros(4, np.float16), 0, 0, 4))


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("special", [np.nan, np.inf])
def test_a_number_that_is_not_finite_spoils_only_the_windows_that_see_it(special: float, stride: int) -> None:
    """In a depthwise convolution rows end in the middle of a vector, and for most windows planes lie in scratch memory beside other numbers."""
    rng = np.random.default_rng(5)
    win = window(3, stride, 1)
    x, w, g = draw(rng, np.float32, 2, 3, 9, 8), draw(rng, np.float32, 3, 1, 3, 3), draw(rng, np.float32, 2, 3, *win.outputs(9, 8))
    x[0, 1, 0, 7] = special
    g[1, 2, 0, 0] = special
    bad = w.copy()
    bad[0, 0, 0, 2] = special
    found = []
    for name in ("numpy", "numba"):
        selection.use(name)
        with np.errstate(all="ignore"):
            found.append(
                (
                    convolution.conv2d(x, w, None, win, 3),
                    convolution.input_grad(g, w, win, 3, 9, 8),
                    convolution.input_grad(g[:1], bad, win, 3, 9, 8),
                    convolution.weight_grad(x, g, win, 3),
                )
            )
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(np.isfinite(one), np.isfinite(other))
        assert not np.isfinite(one).all()


def test_which_products_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large ones, and only where the compiled loops outrun BLAS."""
    selection.use("numba")
    pieces: list[int] = []
    run_pieces = matmul.run_pieces
    monkeypatch.setattr(matmul, "run_pieces", lambda kernel, count, *args: (pieces.append(count), run_pieces(kernel, count, *args)))
    monkeypatch.setattr(matmul, "MULTIPLICATIONS", 15 * 16 * 16)
    rng = np.random.default_rng(2)
    a, b = draw(rng, np.float32, 16, 16), draw(rng, np.float32, 16, 16)
    matmul.product(a, b[:, :15])
    matmul.product(a.astype(np.float64), b)
    assert pieces == []
    matmul.product(a, b)
    assert pieces == [matmul.shared_by() * 2]
    monkeypatch.setattr(importlib.import_module("aiograd.kernels.compiled.gemm"), "OUTRUNS_BLAS", False)
    np.testing.assert_array_equal(matmul.product(a, b), a.dot(b))
    assert len(pieces) == 1


@pytest.mark.parametrize("rows", [1, 2, 33, matmul.FEW_ROWS, matmul.FEW_ROWS + 1])
def test_a_product_by_blas_is_right_whichever_way_around_it_is_computed(rows: int) -> None:
    generator = np.random.default_rng(rows)
    for a in (generator.standard_normal((rows, 96)), generator.standard_normal((96, rows)).T):
        for b in (generator.standard_normal((200, 96)).T, generator.standard_normal((96, 200)), generator.standard_normal((50, 96)).T):
            for dtype in (np.float32, np.float64):
                found = matmul.by_blas(a.astype(dtype), b.astype(dtype))
                assert found.dtype == dtype and found.flags.c_contiguous and found.flags.writeable and found.base is None
                np.testing.assert_allclose(found, a @ b, rtol=1e-4, atol=1e-4)


def test_the_bits_of_a_product_do_not_depend_on_its_other_rows_and_columns() -> None:
    selection.use("numba")
    rng = np.random.default_rng(4)
    a, b, bias = draw(rng, np.float32, 150, 300), draw(rng, np.float32, 300, 70), draw(rng, np.float32, 70)
    whole = matmul.product(a, b, bias)
    np.testing.assert_array_equal(matmul.product(a[17:33], b, bias), whole[17:33])
    np.testing.assert_array_equal(matmul.product(a, np.asfortranarray(b[:, 5:40]), bias[5:40]), whole[:, 5:40])


def test_a_number_that_is_not_finite_spoils_only_its_row_and_column_of_a_product() -> None:
    selection.use("numba")
    rng = np.random.default_rng(6)
    a, b = draw(rng, np.float32, 13, 40), draw(rng, np.float32, 40, 37)
    a[11, 3] = np.inf
    b[7, 36] = np.nan
    found = matmul.product(a, b)
    spoiled = np.zeros(found.shape, np.bool_)
    spoiled[11], spoiled[:, 36] = True, True
    np.testing.assert_array_equal(np.isfinite(found), ~spoiled)

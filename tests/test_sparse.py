"""Sparse Jacobians: patterns by hand, entries against dense ones, colors, and what a plan holds on to."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest

import aiograd as ag
from aiograd.errors import ArgumentError, ArgumentTypeError, InPlaceError, MissingExtraError, ShapeError, TraceError
from aiograd.ops import ROWS
from aiograd.running.devices import _devices
from aiograd.sparse.rules import RULES
from tests.ops.test_rows_gradcheck import DIFFERENTIABLE, DOMAINS, drawn, floating
from tests.support import assert_awaiting_raises, assert_raises
from tests.sweeps import swept

sparse = pytest.importorskip("scipy.sparse")

F = ag.nn.functional
MODES = ("forward", "reverse")
rng = np.random.default_rng(0)
MATRIX = ag.tensor(rng.normal(size=(3, 3)))
SIGNAL = ag.tensor(np.arange(1.0, 4.0).reshape(1, 1, 3))

#: functions of six numbers, and their patterns
PATTERNS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "element by element": (lambda x: ag.sin(x[:3]) * 2 + 1, "100000 010000 001000"),
    "a square, at 0 as well": (lambda x: (x * 0)[:2] ** 2, "100000 010000"),
    "both branches": (lambda x: ag.where(x[:2] > 0, x[2:4], x[4:]), "001010 000101"),
    "a sum along an axis": (lambda x: x.reshape(2, 3).sum(0), "100100 010010 001001"),
    "a norm along the other": (lambda x: ag.linalg.vector_norm(x.reshape(2, 3), axis=1), "111000 000111"),
    "centered": (lambda x: x[:4].reshape(2, 2) - x[:4].reshape(2, 2).mean(1, keepdims=True), "110000 110000 001100 001100"),
    "up to each": (lambda x: x.reshape(2, 3).cumsum(1), "100000 110000 111000 000100 000110 000111"),
    "transposed": (lambda x: x.reshape(2, 3).T, "100000 000100 010000 000010 001000 000001"),
    "slices": (lambda x: x[::-2] * x[0], "100001 100100 110000"),
    "integer indices": (lambda x: x[np.array([5, 0, 5])], "000001 100000 000001"),
    "added into numbers": (lambda x: ag.zeros(4, dtype=np.float64).scatter_add(0, [1, 3, 3], x[:3]), "000000 100000 000000 011000"),
    "joined": (lambda x: ag.concat([x[4:], ag.zeros(1, dtype=np.float64), x[:1]]), "000010 000001 000000 100000"),
    "padded and rolled": (lambda x: ag.roll(np.pad(x[:2], 1), 1), "000000 000000 100000 010000"),
    "padded with a number": (lambda x: np.pad(x[:2], 1, constant_values=3.0), "000000 100000 010000 000000"),
    "a triangle": (lambda x: ag.tril(x[:4].reshape(2, 2)), "100000 000000 001000 000100"),
    "a product": (lambda x: x.reshape(2, 3) @ MATRIX[:, :2], "111000 111000 000111 000111"),
    "two factors": (lambda x: x[:2].reshape(2, 1) @ x[2:4].reshape(1, 2), "101000 100100 011000 010100"),
    "einsum": (lambda x: ag.einsum("ab,ac->bc", x[:4].reshape(2, 2), MATRIX[:2, :1]), "101000 010100"),
    "a convolution": (lambda x: F.conv1d(x.reshape(1, 1, 6), SIGNAL, stride=2, padding=1), "110000 011100 000111"),
    "a softmax": (lambda x: ag.softmax(x[:4].reshape(2, 2), axis=0), "101000 010100 101000 010100"),
    "a batch of matrices": (lambda x: ag.linalg.det(ag.stack([x[:4], x[2:]]).reshape(2, 2, 2)), "111100 001111"),
    "everything": (lambda x: (x * x).sum(), "111111"),
    "nothing": (lambda x: ag.ones(2, dtype=np.float64) * 3, "000000 000000"),
    "not through detach": (lambda x: x[:2] * x[2:4].detach(), "100000 010000"),
}


def by_hand(text: str) -> Any:
    return np.array([[entry == "1" for entry in row] for row in text.split()])


def point(size: int, seed: int = 0) -> Any:
    return ag.tensor(np.random.default_rng(seed).normal(size=size))


async def dense(fn: Any, x: Any) -> Any:
    jacobian = (await ag.jacobian(fn, x)).numpy()
    return jacobian.reshape(int(np.prod(jacobian.shape[: jacobian.ndim - x.ndim])), x.size)


async def assert_right(fn: Any, x: Any, *others: Any) -> list[Any]:
    """The Jacobian is the dense one in both modes, also at other points with the plan of the first; the plans."""
    plans = []
    for mode in MODES:
        plan = await ag.jacobian_plan(fn, x, mode=mode)
        for at in (x, *others):
            found = await plan(at)
            assert isinstance(found, sparse.csr_array) and found.dtype == at.dtype and found.nnz == plan.pattern.nnz
            np.testing.assert_allclose(found.toarray(), await dense(fn, at), rtol=1e-9, atol=1e-9)
        plans.append(plan)
    return plans


@pytest.mark.parametrize("name", PATTERNS)
async def test_a_pattern_is_what_it_is_by_hand(name: str) -> None:
    fn, expected = PATTERNS[name]
    for plan in await assert_right(fn, point(6), point(6, 1), ag.tensor(np.zeros(6)) + 0.1):
        assert plan.pattern.dtype == bool and plan.passes <= 6
        np.testing.assert_array_equal(plan.pattern.toarray(), by_hand(expected))


@pytest.mark.parametrize("name", swept([name for name in DIFFERENTIABLE if name != "to_device"], 24))
async def test_the_pattern_of_a_row_has_all_its_derivatives(name: str) -> None:
    domain, row = DOMAINS[name], ROWS[name]
    for args, kwargs in drawn(domain, 4, 60, False):
        for i in [i for i, a in enumerate(args) if floating(a)]:
            shape = np.shape(args[i])

            def fn(x: Any, args: Any = args, kwargs: Any = kwargs, i: int = i, shape: Any = shape) -> Any:
                out = domain.call(row, [x.reshape(shape) if k == i else a for k, a in enumerate(args)], kwargs)
                parts = [part for part in (out if isinstance(out, tuple) else (out,)) if part.dtype.kind in "fc"]
                reals = [half for part in parts for half in ((part.real, part.imag) if part.dtype.kind == "c" else (part,))]
                return ag.concat([part.reshape(-1) for part in reals])

            x = ag.tensor(np.array(args[i]).reshape(-1))
            plan = await ag.jacobian_plan(fn, x)
            found, expected = (await plan(x)).toarray(), await dense(fn, x)
            np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-8)


def test_rules_are_of_rows_that_exist() -> None:
    assert set(RULES) <= set(ROWS)


# -------------------------------------------------------------------- colors


def tridiagonal(x: Any) -> Any:
    inner = np.pad(x, 1)
    return inner[:-2] * inner[1:-1] + inner[2:] - x**2


def laplacian(x: Any, rows: int = 9) -> Any:
    u = np.pad(x.reshape(rows, -1), 1)
    return u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:] - 4 * u[1:-1, 1:-1] ** 3


@pytest.mark.parametrize("size", [3, 4, 57, 10_000])
async def test_tridiagonal_of_any_size_in_three_passes(size: int) -> None:
    plan = await ag.jacobian_plan(tridiagonal, point(size))
    assert plan.passes == 3 and plan.pattern.nnz == 3 * size - 2
    u = point(size, 1)
    values, found = u.numpy(), await plan(u)
    np.testing.assert_allclose(found.diagonal(), np.append(0.0, values[:-1]) - 2 * values)
    np.testing.assert_allclose(found.diagonal(-1), values[1:])
    np.testing.assert_allclose(found.diagonal(1), np.ones(size - 1))


@pytest.mark.parametrize("columns", [2, 9, 30])
async def test_a_five_point_stencil_in_at_most_seven_passes(columns: int) -> None:
    for plan in await assert_right(laplacian, point(9 * columns)):
        assert 3 < plan.passes <= 7


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mode", MODES)
async def test_columns_of_one_color_have_no_row_in_common(seed: int, mode: str) -> None:
    picked = np.random.default_rng(seed).integers(0, 30, (40, 3))
    plan = await ag.jacobian_plan(lambda x: x[picked].prod(1), point(30), mode=mode)
    matrix = plan.pattern.toarray() if mode == "forward" else plan.pattern.toarray().T
    assert plan.colors.shape == (matrix.shape[1],) and plan.passes == plan.colors.max() + 1
    for color in range(plan.passes):
        assert matrix[:, plan.colors == color].sum(1).max() == 1


async def test_the_side_with_fewer_colors_is_taken() -> None:
    wide = await ag.jacobian_plan(lambda x: x.reshape(2, 50).sum(1), point(100))
    tall = await ag.jacobian_plan(lambda x: ag.tile(x[:2], (50,)), point(2))
    arrow = await ag.jacobian_plan(lambda x: x * x[0], point(20))
    assert (wide.mode, wide.passes, tall.mode, tall.passes, arrow.mode, arrow.passes) == ("reverse", 1, "forward", 1, "forward", 2)


async def test_a_function_runs_once_for_all_products() -> None:
    calls = []

    def fn(x: Any) -> Any:
        calls.append(x.shape)
        return tridiagonal(x)

    plan = await ag.jacobian_plan(fn, point(50))
    assert calls == [(50,)]
    await plan(point(50, 1))
    assert calls == [(50,)] * 2


# -------------------------------------------------------------------- what functions may do


async def gradient(x: Any) -> Any:
    _, found = await ag.value_and_grad(lambda v: (v[1:] * v[:-1] ** 2).sum() + ag.log1p(v * v)[np.array([0, 2, 2])].sum(), x, create_graph=True)
    return found


async def own_pass(x: Any) -> Any:
    v = (x * 1.0).requires_grad_()
    (found,) = await ag.grad((v[1:] * v[:-1] ** 2).sum(), [v], create_graph=True)
    return found


def written(x: Any) -> Any:
    y = x * 1.0
    y[1:] -= x[:-1]
    y[0] = 5.0
    grid = y.reshape(2, -1)
    row, turned = grid[1], grid.T
    row *= x[0]
    turned[0] = x[5]
    return ag.concat([y, row, turned.reshape(-1)])


def filled(x: Any) -> Any:
    out = ag.zeros_like(x)
    part = out[2:4]
    part[0] = x[5]
    part += x[:2]
    with ag.no_grad():
        out[0] = 3.0
    return out


def buffered(x: Any) -> Any:
    out = ag.zeros(6, dtype=np.float64)
    edge = out[:1]
    out[1:] = x[1:] * x[:-1]
    out[2] = x[0]
    edge += x[4]
    return out


class Cube(ag.Function):
    """Computed by numpy."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return ag.tensor(x.numpy() ** 3)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (x,) = ctx.saved_tensors
        return grad * 3 * x * x


async def slow(x: Any) -> Any:
    await asyncio.sleep(0)
    return x[1:] * x[:-1]


FUNCTIONS: dict[str, Any] = {
    "async": slow,
    "a gradient": gradient,
    "a pass of its own": own_pass,
    "writes in place": written,
    "writes into views of zeros": filled,
    "fills a buffer": buffered,
    "checkpointed": lambda x: ag.checkpoint(lambda v: ag.sin(v) * v[::-1], x),
    "vmap inside": lambda x: ag.vmap(lambda row: row.cumsum() * row[0])(x.reshape(2, -1)),
    "reads a comparison": lambda x: x * 2 if bool((x < 99).all()) else x[::-1],
    "a custom function": lambda x: Cube.apply(x[:3]) * x[3:],
    "a module": lambda x: ag.tanh(F.linear(x.reshape(-1, 3), MATRIX)),
    "cancelled out": lambda x: x - x + x[::-1],
    "no elements": lambda x: x[:0] * 2,
    "one element": lambda x: x[0] * x[1],
    "another dtype inside": lambda x: (x.astype(np.float32) * 2).astype(np.float64),
}


@pytest.mark.parametrize("name", FUNCTIONS)
async def test_functions_of_all_kinds_agree_with_the_dense_jacobian(name: str) -> None:
    await assert_right(FUNCTIONS[name], point(6), point(6, 1))


async def test_nothing_of_a_point_is_changed_and_none_of_the_levels_stays() -> None:
    before, x = set(_devices), point(6)
    kept = x.numpy().copy()

    def fn(x: Any) -> Any:
        x += 1
        return x * x

    found = await ag.sparse_jacobian(fn, x)
    np.testing.assert_allclose(found.diagonal(), 2 * (kept + 1))
    await assert_awaiting_raises(ZeroDivisionError, None, ag.jacobian_plan(lambda x: 1 / 0, x))
    plan = await ag.jacobian_plan(slow, x)
    running = asyncio.ensure_future(plan(x))
    await asyncio.sleep(0)
    running.cancel()
    await assert_awaiting_raises(asyncio.CancelledError, None, running)
    np.testing.assert_array_equal(x.numpy(), kept)
    assert set(_devices) == before and x.grad is None and not x.requires_grad


async def test_many_at_once() -> None:
    points = [point(6, seed) for seed in range(20)]
    plan = await ag.jacobian_plan(slow, points[0])
    for x, found in zip(points, await asyncio.gather(*map(plan, points)), strict=True):
        np.testing.assert_allclose(found.toarray(), await dense(slow, x))


async def test_the_dtype_is_that_of_the_point() -> None:
    plan = await ag.jacobian_plan(tridiagonal, point(8))
    for dtype in (np.float32, np.float64):
        found = await plan(point(8).astype(dtype))
        assert found.dtype == dtype
        np.testing.assert_allclose(found.toarray(), await dense(tridiagonal, point(8)), rtol=1e-5)


# -------------------------------------------------------------------- other rows


async def test_a_function_that_runs_other_rows_is_told_with_the_row() -> None:
    x = ag.tensor(np.arange(1.0, 5.0))

    def fn(x: Any) -> Any:
        return ag.sin(x) if x[0].item() > 0 else ag.concat([x[1:], x[:1]])

    for mode in MODES:
        plan = await ag.jacobian_plan(fn, x, mode=mode)
        np.testing.assert_allclose((await plan(x + 1)).diagonal(), np.cos(np.arange(2.0, 6.0)))
        await assert_awaiting_raises(TraceError, "Row 1 is getitem.*expected sin.*jacobian_plan", plan(-x))
        np.testing.assert_allclose((await plan(x)).diagonal(), np.cos(np.arange(1.0, 5.0)))
    longer = await ag.jacobian_plan(lambda x: ag.sin(x) * 2, x)
    await assert_awaiting_raises(TraceError, "Row 1 is the end, expected mul", ag.sparse_jacobian(ag.sin, x, plan=longer))
    await assert_awaiting_raises(TraceError, "expected the end", ag.sparse_jacobian(lambda x: ag.sin(x) * 2 + 1, x, plan=longer))


async def test_other_integer_indices_are_other_rows_and_other_constants_are_not() -> None:
    x = point(4)

    def at(index: Any, factor: float = 2.0) -> Any:
        return lambda x: ag.take(x, index, axis=0) * ag.tensor(np.full(2, factor)) + x[np.asarray(index)]

    plan = await ag.jacobian_plan(at([0, 1]), x)
    found = await ag.sparse_jacobian(at([0, 1], 5.0), x, plan=plan)
    np.testing.assert_array_equal(found.toarray(), 6 * np.eye(4)[:2])
    await assert_awaiting_raises(TraceError, "Row 0 is take", ag.sparse_jacobian(at([0, 2]), x, plan=plan))
    order = await ag.jacobian_plan(lambda x: x[ag.argsort(x)], ag.tensor([1.0, 3.0, 2.0]))
    await assert_awaiting_raises(TraceError, "index", order(ag.tensor([1.0, 2.0, 3.0])))


async def test_where_does_not_need_another_plan() -> None:
    plan = await ag.jacobian_plan(lambda x: ag.where(x > 0, x, 3 * x[::-1]), point(4))
    for seed in range(3):
        x = point(4, seed)
        expected = np.diag((x.numpy() > 0).astype(float)) + 3 * np.diag((x.numpy() <= 0).astype(float))[:, ::-1]
        np.testing.assert_allclose((await plan(x)).toarray(), expected)


# -------------------------------------------------------------------- bad input, the picture


async def test_wrong_arguments_are_refused_before_anything_runs() -> None:
    x = point(4)

    def never(x: Any) -> Any:
        raise AssertionError("it ran")

    for call in (ag.jacobian_plan, ag.sparse_jacobian):
        await assert_awaiting_raises(ArgumentTypeError, "int64", call(never, ag.arange(3)))
        await assert_awaiting_raises(ArgumentTypeError, "complex", call(never, ag.tensor([1j])))
        await assert_awaiting_raises(ArgumentTypeError, "ndarray", call(never, np.ones(3)))
        await assert_awaiting_raises(ArgumentTypeError, "tuple.*concatenate", call(never, (x, x)))
        await assert_awaiting_raises(ArgumentTypeError, "function", call(cast(Any, 3), x))
        await assert_awaiting_raises(ArgumentError, "'sideways'.*'auto'", call(never, x, mode="sideways"))
        await assert_awaiting_raises(ArgumentTypeError, "float", call(lambda x: 3.0, x))
        await assert_awaiting_raises(ArgumentTypeError, "one real Tensor", call(lambda x: (x, x), x))
        await assert_awaiting_raises(ArgumentTypeError, "one real Tensor|bool", call(lambda x: x > 0, x))
        await assert_awaiting_raises(ArgumentTypeError, "complex128", call(lambda x: x * 1j, x))
        await assert_awaiting_raises(ArgumentError, "would drop a derivative", call(lambda x: ag.tensor(x.numpy()), x))
    plan = await ag.jacobian_plan(tridiagonal, x, mode="reverse")
    await assert_awaiting_raises(ShapeError, r"\[5\].*\[4\]", plan(point(5)))
    await assert_awaiting_raises(ArgumentTypeError, "jacobian_plan", ag.sparse_jacobian(tridiagonal, x, plan=plan.pattern))
    await assert_awaiting_raises(ArgumentError, "'forward'.*'reverse'", ag.sparse_jacobian(tridiagonal, x, plan=plan, mode="forward"))
    await assert_awaiting_raises(InPlaceError, "read-only", ag.jacobian_plan(lambda x: np.broadcast_to(x, (2, 4)).__iadd__(1), x))


async def test_without_scipy_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.sparse", None)
    monkeypatch.setitem(sys.modules, "scipy", None)
    await assert_awaiting_raises(MissingExtraError, r"pip install 'aiograd\[scipy\]'", ag.jacobian_plan(tridiagonal, point(4)))


async def test_a_plan_is_frozen() -> None:
    plan = await ag.jacobian_plan(tridiagonal, point(4))
    assert_raises(dataclasses.FrozenInstanceError, None, setattr, plan, "passes", 1)
    assert_raises(ValueError, "read-only", plan.colors.__setitem__, 0, 1)
    assert_raises(ValueError, "read-only", plan.pattern.data.__setitem__, 0, False)
    found = await plan(point(4))
    found.data[:] = 0
    assert (await plan(point(4))).data.any()


async def test_the_picture_shows_every_entry_in_the_color_of_its_product() -> None:
    plan = await ag.jacobian_plan(tridiagonal, point(6))
    picture = plan.svg()
    assert "6 × 6, 16 entries: 3 products with columns" in picture
    assert picture.count("<path") == 3 and picture.count("M") - picture.count("<path") == 16 - 3
    large = (await ag.jacobian_plan(tridiagonal, point(10_000))).svg()
    assert len(large) < 100_000 and "29998 entries" in large

"""Implicit functions: the derivatives of closed forms and of unrolled solvers, from any solver, in constant memory, or a typed error."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import implicit, nn
from aiograd.errors import (
    ArgumentError,
    ArgumentTypeError,
    ConvergenceError,
    GraphFreedError,
    ModifiedError,
    NoGraphError,
    OnceDifferentiableError,
    ShapeError,
    UnusedInputError,
)
from aiograd.implicit.solvers import IMPLICIT_COUNTS
from tests.support import assert_awaiting_raises, assert_raises, cancel

rng = np.random.default_rng(0)
#: a nonsymmetric matrix without a small eigenvalue
M = np.eye(5) + 0.2 * rng.normal(size=(5, 5))
B = rng.normal(size=5)


def assert_close(found: Any, wanted: Any, rtol: float = 1e-12, atol: float = 0.0) -> None:
    values = found.detach().numpy() if isinstance(found, ag.Tensor) else found
    np.testing.assert_allclose(values, wanted, rtol=rtol, atol=atol)


def param(values: Any, dtype: Any = np.float64) -> Any:
    return ag.tensor(np.asarray(values, dtype), requires_grad=True)


def start(n: int, dtype: Any = np.float64) -> Any:
    return ag.ones(n, dtype=dtype)


def babylon(x: Any, a: Any) -> Any:
    """Square roots."""
    for _ in range(40):
        x = (x + a / x) / 2
    return x


square_root = implicit.root(lambda x, a: x * x - a)(babylon)


# -------------------------------------------------------------------- the right numbers


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("solve", ["cg", "gmres", "bicgstab"])
async def test_a_square_root(solve: str, dtype: str) -> None:
    a = param([4.0, 9.0, 0.25], dtype)
    x = await implicit.root(lambda x, a: x * x - a, solve=solve)(babylon)(start(3, dtype), a)
    assert x.dtype == dtype and x.requires_grad
    root = np.sqrt(a.detach().numpy())
    assert_close(x, root, rtol=1e-6)
    await (x * x * x).sum().backward()
    assert_close(a.grad, 1.5 * root, rtol=1e-5 if dtype == "float32" else 1e-12)


async def test_ridge_regression() -> None:
    """x = (A^T A + l I)^-1 A^T b, and dx/dl = -(A^T A + l I)^-1 x."""
    design, target = rng.normal(size=(20, 6)), rng.normal(size=20)

    @implicit.argmin(lambda x, penalty, b: ((ag.asarray(design) @ x - b) ** 2).sum() + penalty * (x * x).sum())
    async def ridge(x: Any, penalty: Any, b: Any) -> Any:
        return np.linalg.solve(design.T @ design + penalty.item() * np.eye(6), design.T @ b.numpy())

    penalty, b, weights = param(0.7), param(target), rng.normal(size=6)
    x = await ridge(ag.zeros(6, dtype=np.float64), penalty, b)
    await (x * ag.asarray(weights)).sum().backward()
    inverse = np.linalg.inv(design.T @ design + 0.7 * np.eye(6))
    assert_close(penalty.grad, -weights @ inverse @ x.detach().numpy(), rtol=1e-9)
    assert_close(b.grad, design @ inverse @ weights, rtol=1e-8, atol=1e-10)


async def test_the_fixed_point_of_a_cosine() -> None:
    def iterate(x: Any, a: Any) -> Any:
        for _ in range(300):
            x = np.cos(a * x)
        return x

    a = param([1.0, 0.5])
    x = await implicit.fixed_point(lambda x, a: np.cos(a * x))(iterate)(start(2), a)
    await x.sum().backward()
    found, slope = x.detach().numpy(), np.sin(a.detach().numpy() * x.detach().numpy())
    assert_close(a.grad, -slope * found / (1 + a.detach().numpy() * slope), rtol=1e-9)


class Layer(nn.Module):
    """A contraction of x, with an input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 5, dtype=np.float64, generator=ag.Generator(1))
        self.outer = nn.Linear(3, 5, dtype=np.float64, generator=ag.Generator(2))

    async def forward(self, x: Any, u: Any) -> Any:
        return np.tanh(0.5 * self.inner(x) + self.outer(u))


@pytest.mark.parametrize("solve", ["gmres", "bicgstab"])
async def test_captured_parameters_get_the_gradients_of_the_unrolled_solver(solve: str) -> None:
    layer, u = Layer(), param(rng.normal(size=(4, 3)))

    async def iterate(x: Any, u: Any) -> Any:
        for _ in range(200):
            x = await layer(x, u)
        return x

    wanted = await ag.grad(((await iterate(start(5).reshape(1, 5) * ag.ones((4, 1)), u)) ** 3).sum(), [u, *layer.parameters()])
    x = await implicit.fixed_point(layer, solve=solve)(iterate)(ag.ones((4, 5), dtype=np.float64), u)
    await (x**3).sum().backward()
    for found, expected in zip([u.grad, *(each.grad for each in layer.parameters())], wanted, strict=True):
        assert_close(found, expected.numpy(), rtol=1e-8, atol=1e-10)


async def test_scipy_as_the_solver_of_a_system_that_is_not_symmetric() -> None:
    optimize = pytest.importorskip("scipy.optimize")

    @implicit.root(lambda x, m, b: m @ x + 0.1 * x**3 - b)
    def solve(x: Any, m: Any, b: Any) -> Any:
        return optimize.root(lambda x: m.numpy() @ x + 0.1 * x**3 - b.numpy(), x.numpy(), tol=1e-13).x

    assert await ag.gradcheck(lambda m, b: solve(start(5), m, b), (param(M), param(B)), eps=1e-5, atol=1e-6)


async def test_arguments_nest_keywords_reach_the_solver_and_the_start_gets_no_gradient() -> None:
    seen = []

    @implicit.root(lambda x, pair: x * x - pair["a"] * pair["b"])
    def solve(x: Any, pair: dict[str, Any], *, steps: int) -> Any:
        seen.append((steps, x.requires_grad, pair["a"].requires_grad, ag.is_grad_enabled()))
        return babylon(x, pair["a"] * pair["b"])

    a, b, x0 = param([4.0]), param([9.0]), param([1.0])
    x = await solve(x0, pair={"a": a, "b": b}, steps=3)
    assert seen == [(3, False, False, False)]
    await x.sum().backward()
    assert_close(a.grad, [9 / 12])
    assert_close(b.grad, [4 / 12])
    assert x0.grad is None
    await assert_awaiting_raises(UnusedInputError, None, ag.grad((await solve(x0, {"a": a, "b": b}, steps=1)).sum(), [x0]))


async def test_an_answer_requires_grad_where_something_behind_it_does() -> None:
    a = param([4.0])
    assert (await square_root(start(1), a * 1)).requires_grad
    assert not (await square_root(start(1), a.detach())).requires_grad
    with ag.no_grad():
        assert not (await square_root(start(1), a)).requires_grad


@pytest.mark.parametrize(
    "residual",
    [lambda x, a: ag.zeros(1, dtype=np.float64), lambda x, a: x.detach() ** 2 - 4.0, lambda x, a: ag.asarray(x.detach().numpy() ** 2 - 4.0)],
)
async def test_a_residual_that_records_nothing_is_an_error_where_derivatives_are_asked_for(residual: Any) -> None:
    a = param([4.0])
    solve, message = implicit.root(residual)(babylon), "the residual at the answer does not depend on x"
    await assert_awaiting_raises(NoGraphError, message, solve(start(1), a))
    await assert_awaiting_raises(NoGraphError, message, ag.jvp(lambda a: solve(start(1), a), a.detach(), start(1)))
    assert_close(await solve(start(1), a.detach()), [2.0])
    with ag.no_grad():
        assert_close(await solve(start(1), a), [2.0])


@pytest.mark.parametrize("kind", ["def", "async def", "vectors"])
async def test_a_linear_solver_of_ones_own(kind: str) -> None:
    async def dense(matvec: Any, b: Any) -> Any:
        columns = [await matvec(row) for row in np.eye(b.size)]
        return np.linalg.solve(np.stack([column.numpy() for column in columns], 1), b.numpy())

    def solve(matvec: Any, b: Any) -> Any:
        return np.linalg.solve(M.T, b.numpy())

    async def vectors(matvec: Any, b: Any) -> Any:
        x = ag.zeros(5, dtype=np.float64)
        for _ in range(200):
            x = x + 0.5 * (b - await matvec(x))
        return x

    given = {"def": solve, "async def": dense, "vectors": vectors}[kind]
    b = param(B)
    x = await implicit.root(lambda x, b: ag.asarray(M) @ x - b, solve=given, maxiter=500)(lambda x, b: np.linalg.solve(M, b.numpy()))(start(5), b)
    await x.sum().backward()
    assert_close(b.grad, np.linalg.solve(M.T, np.ones(5)), rtol=1e-9)


async def test_an_answer_of_no_elements_and_one_of_none_dimension() -> None:
    a = param(np.zeros((0, 3)))
    x = await implicit.root(lambda x, a: x - a)(lambda x, a: a * 1)(ag.zeros((0, 3), dtype=np.float64), a)
    await x.sum().backward()
    assert a.grad.shape == (0, 3)
    a = param(9.0)
    await (await square_root(ag.tensor(1.0, dtype=np.float64), a)).backward()
    assert_close(a.grad, 1 / 6)


# -------------------------------------------------------------------- passes


async def peak(iterations: int) -> int:
    def iterate(x: Any, a: Any) -> Any:
        for _ in range(iterations):
            x = np.cos(a * x)
        return x

    a = param(np.full(10_000, 0.3))
    tracemalloc.start()
    try:
        x = await implicit.fixed_point(lambda x, a: np.cos(a * x))(iterate)(start(10_000), a)
        await x.sum().backward()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.one_loop
async def test_memory_does_not_grow_with_the_iterations() -> None:
    await peak(20)
    assert await peak(2000) <= 1.1 * await peak(20)


async def test_passes_at_the_same_time() -> None:
    """Over one graph, and over graphs of their own."""
    a = param([4.0, 9.0])
    x = await square_root(start(2), a)
    await asyncio.gather(*((x * i).sum().backward(retain_graph=True) for i in range(5)))
    assert_close(a.grad, 10 * 0.5 / np.sqrt([4.0, 9.0]))

    async def one(value: float) -> Any:
        a = param([value])
        await (await square_root(start(1), a)).sum().backward()
        return a.grad.item()

    found = await asyncio.gather(*(one(1.0 + i) for i in range(50)))
    assert_close(found, 0.5 / np.sqrt(1.0 + np.arange(50)))


async def test_a_second_pass_needs_the_graph_and_a_second_derivative_is_refused() -> None:
    a = param([4.0, 9.0])
    x = await square_root(start(2), a)
    (g,) = await ag.grad(x.sum(), [a], create_graph=True)
    await assert_awaiting_raises(OnceDifferentiableError, None, ag.grad(g.sum(), [a]))
    await x.sum().backward()
    await assert_awaiting_raises(GraphFreedError, None, x.sum().backward())
    assert_close(a.grad, 0.5 / np.sqrt([4.0, 9.0]))


class Held(ag.Function):
    """The identity, whose backward waits for permission from the third time on."""

    gate: Any
    calls: Any

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 1

    @staticmethod
    async def backward(ctx: Any, g: Any) -> Any:
        Held.calls.append(1)
        if len(Held.calls) == 3:
            Held.gate.set()
            await asyncio.Event().wait()
        return g


async def test_cancelling_in_the_middle_of_the_linear_solve_changes_nothing() -> None:
    Held.gate, Held.calls = asyncio.Event(), []
    b, m = param(B), ag.asarray(M)
    solve = implicit.root(lambda x, b: m @ Held.apply(x) - b)(lambda x, b: np.linalg.solve(M, b.numpy()))
    x = await solve(start(5), b)
    b.grad = ag.ones(5, dtype=np.float64)
    task = asyncio.ensure_future((x * x).sum().backward(retain_graph=True))
    await Held.gate.wait()
    await cancel(task)
    assert_close(b.grad, np.ones(5))
    await (x * x).sum().backward()
    assert_close(b.grad, 1 + np.linalg.solve(M.T, 2 * np.linalg.solve(M, B)), rtol=1e-9)


async def test_cancelling_the_call_cancels_the_solver() -> None:
    begun, ended = asyncio.Event(), []

    @implicit.root(lambda x, a: x * x - a)
    async def solve(x: Any, a: Any) -> Any:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    task = asyncio.ensure_future(solve(start(1), param([4.0])))
    await begun.wait()
    await cancel(task)
    assert ended


async def test_an_answer_that_is_modified_or_whose_memory_is_used_again() -> None:
    a, buffer = param([4.0]), np.ones(1)

    def solve(x: Any, a: Any) -> Any:
        buffer[:] = np.sqrt(a.numpy())
        return buffer

    x = await implicit.root(lambda x, a: x * x - a)(solve)(start(1), a)
    buffer[:] = 100.0
    await x.sum().backward()
    assert_close(a.grad, [0.25])
    x = await square_root(start(1), a)
    loss = x.sum()
    with ag.no_grad():
        x += 1.0
    await assert_awaiting_raises(ModifiedError, None, loss.backward())
    assert_close(a.grad, [0.25])


async def test_the_profiler_has_a_scope_of_each_solve() -> None:
    a = param([4.0])
    with ag.profiler.profile() as profile:
        await (await square_root(start(1), a)).sum().backward()
    scopes = [event.name for event in profile.events if event.category == "scope"]
    assert scopes == ["implicit babylon", "implicit solve babylon"]


async def test_a_compiled_function_says_why_it_runs_eagerly() -> None:
    async def loss(a: Any) -> Any:
        return (await square_root(start(2), a)).sum()

    compiled = ag.compile(loss)
    with pytest.warns(UserWarning, match="it calls babylon, an implicit function: test_implicit.py"):
        await compiled(param([4.0, 9.0]))
    for _ in range(2):
        a = param([4.0, 9.0])
        await (await compiled(a)).backward()
        assert_close(a.grad, 0.5 / np.sqrt([4.0, 9.0]))


# -------------------------------------------------------------------- no wrong gradient in silence


def nowhere(x: Any, a: Any) -> Any:
    return a * 0


def asymmetric(x: Any, a: Any) -> Any:
    return ag.asarray(M) @ x - a


def exact(x: Any, a: Any) -> Any:
    return np.linalg.solve(M, a.numpy())


def same(x: Any, a: Any) -> Any:
    return a * 1


DOUBLE = np.ones((2, 2))
NEARLY = np.array([[1.0, 1.0], [1.0, np.nextafter(1.0, 2.0)]])
Case = tuple[Callable[..., Any], Callable[..., Any], Any, dict[str, Any], str]
FAILURES: dict[str, Case] = {
    "singular": (lambda x, a: (x - a) * (x - a), same, [1.0, 2.0], {}, "is the Jacobian singular"),
    "no dependence": (lambda x, a: a - a.detach() + 0 * x, same, [1.0, 2.0], {}, "is the Jacobian singular"),
    "rank one": (lambda x, a: ag.asarray(DOUBLE) @ (x - a), same, [1.0, 2.0], {}, "is the Jacobian singular"),
    "rank one, cg": (lambda x, a: ag.asarray(DOUBLE) @ (x - a), same, [1.0, 2.0], {"solve": "cg"}, "the linear solve by cg"),
    "rank one, bicgstab": (lambda x, a: ag.asarray(DOUBLE) @ (x - a), same, [1.0, 2.0], {"solve": "bicgstab"}, "the linear solve|is not finite"),
    "nearly rank one": (lambda x, a: ag.asarray(NEARLY) @ (x - a), same, [1.0, 2.0], {}, "the linear solve"),
    "asymmetric, cg": (asymmetric, exact, B, {"solve": "cg"}, "cg needs a symmetric Jacobian, .*; use solve=\"gmres\""),
    "too few products": (asymmetric, exact, B, {"maxiter": 2}, "did not converge.*, after 3 products"),
    "too few products, bicgstab": (asymmetric, exact, B, {"maxiter": 2, "solve": "bicgstab"}, "the linear solve by bicgstab"),
    "a wrong solver": (asymmetric, exact, B, {"solve": lambda matvec, b: b * 0.5}, "the linear solve by .*lambda"),
    "a solver of NaN": (asymmetric, exact, B, {"solve": lambda matvec, b: b * np.nan}, "is not finite|the linear solve"),
    "an infinite slope": (lambda x, a: np.cbrt(x - a), same, [1.0, 2.0], {}, "not finite"),
}


@pytest.mark.parametrize("name", FAILURES)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
async def test_a_linear_solve_that_fails(name: str) -> None:
    residual, solver, values, options, match = FAILURES[name]
    a, other, failures = param(values), param(2.0), IMPLICIT_COUNTS.failures
    x = await implicit.root(residual, **options)(solver)(start(len(values)), a)
    a.grad = ag.ones(len(values), dtype=np.float64)
    weights = ag.asarray(np.arange(1.0, 1 + len(values)))
    with pytest.raises(ConvergenceError, match=match) as caught:
        await ((x * weights).sum() * other + other * other).backward()
    assert f"recorded at {__file__}:" in str(caught.value.__notes__)
    assert not caught.value.committed and IMPLICIT_COUNTS.failures == failures + 1
    assert not caught.value.norm <= caught.value.limit
    assert_close(a.grad, np.ones(len(values)))
    assert other.grad is None


@pytest.mark.parametrize(
    ("solver", "dtype", "tolerance", "match"),
    [
        (lambda x, a: np.sqrt(a) + 1e-3, np.float64, "auto", r"residual at its answer is 0.00[46]\d*, expected at most 0.0001"),
        (lambda x, a: np.sqrt(a) + 1e-2, np.float32, "auto", "expected at most 0.01"),
        (lambda x, a: np.sqrt(a) + 1e-6, np.float64, 1e-7, "expected at most 1e-07"),
        (lambda x, a: a * np.nan, np.float64, "auto", "is nan"),
        (lambda x, a: a * np.inf, np.float64, "auto", "is inf"),
    ],
)
async def test_an_answer_that_is_no_root(solver: Any, dtype: Any, tolerance: Any, match: str) -> None:
    a = param([4.0, 9.0], dtype)
    solve = implicit.root(lambda x, a: x * x - a, residual_tol=tolerance)(solver)
    for context in (ag.enable_grad(), ag.no_grad()):
        with context, pytest.raises(ConvergenceError, match=match) as caught:
            await solve(start(2, dtype), a)
        assert not caught.value.norm <= caught.value.limit
    await implicit.root(lambda x, a: x * x - a, residual_tol=None)(solver)(start(2, dtype), a)


async def test_a_gradient_that_is_not_finite() -> None:
    a = param([4.0])
    x = await square_root(start(1), a)
    await assert_awaiting_raises(ConvergenceError, "gradient that arrived is not finite", (x * np.nan).sum().backward())
    assert a.grad is None


async def test_shapes_that_do_not_fit() -> None:
    a = param([4.0, 9.0])
    solve = implicit.root(lambda x, a: x * x - a)
    await assert_awaiting_raises(ShapeError, r"returned float64\[3\]; expected .* shape of x0, \[2\]", solve(lambda x, a: np.ones(3))(start(2), a))
    await assert_awaiting_raises(ShapeError, "returned int64", solve(lambda x, a: np.ones(2, int))(start(2), a))
    one = implicit.root(lambda x, a: (x - a).sum())(same)
    await assert_awaiting_raises(ShapeError, r"the residual at the answer is float64\[\]", one(start(2), a))
    for decorator in (implicit.root, implicit.fixed_point, implicit.argmin):
        await assert_awaiting_raises(ShapeError, "returned 2 Tensors", decorator(lambda x, a: (x, a))(same)(start(2), a))
        await assert_awaiting_raises(ArgumentTypeError, "is a ndarray", decorator(lambda x, a: x.detach().numpy())(same)(start(2), a))
    two = implicit.argmin(lambda x, a: x - a)(same)
    await assert_awaiting_raises(ShapeError, "scalar", two(start(2), a))

    async def stack(matvec: Any, b: Any) -> Any:
        return await matvec(np.ones(3))

    for method, match in ((stack, "matvec got a vector of shape"), (lambda matvec, b: np.ones(3), "returned shape")):
        x = await implicit.root(lambda x, a: x - a, solve=method)(same)(start(2), a)
        await assert_awaiting_raises(ShapeError, match, x.sum().backward())


async def test_arguments_that_cannot_work_are_refused_before_anything_runs() -> None:
    ran: list[Any] = []
    solve = implicit.root(lambda x, a: ran.append(x))(lambda x, a, *, k=None: ran.append(x))
    await assert_awaiting_raises(ArgumentTypeError, "x0 has dtype int64", solve(np.ones(2, int), param([1.0])))
    await assert_awaiting_raises(ArgumentTypeError, "x0 has dtype complex128", solve(np.ones(2, complex), param([1.0])))
    await assert_awaiting_raises(ArgumentError, "the residual does not get keywords", solve(start(1), param([1.0]), k=param([1.0])))
    await assert_awaiting_raises(TypeError, "missing a required argument", solve(start(1)))
    for options, match in (
        ({"solve": "lu"}, "expected one of 'cg', 'gmres', 'bicgstab'"), ({"solve": 3}, "expected one of"), ({"tol": 0}, "between 0 and 1"),
        ({"tol": True}, "between 0 and 1"), ({"maxiter": 0}, "positive int"), ({"maxiter": 2.0}, "positive int"),
        ({"residual_tol": -1.0}, "above 0"), ({"residual_tol": "none"}, "above 0"), ({"residual_tol": float("nan")}, "above 0"),
    ):  # fmt: skip
        for decorator in (implicit.root, implicit.fixed_point, implicit.argmin):
            assert_raises(ArgumentError, match, decorator, lambda x: x, **options)
    assert_raises(ArgumentTypeError, "expected a function of", implicit.root, 3)
    assert_raises(ArgumentTypeError, "decorates a solver", implicit.root(lambda x: x), 3)
    assert not ran


async def test_vmap_is_refused() -> None:
    await assert_awaiting_raises(ArgumentError, "vmap", ag.vmap(lambda a: square_root(start(1), a))(param([[4.0], [9.0]])))

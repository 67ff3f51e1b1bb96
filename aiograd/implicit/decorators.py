"""`root`, `fixed_point` and `argmin`: decorators of solvers."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, Literal

import numpy as np

from aiograd.engine.run import current_engine
from aiograd.errors import ArgumentError, ArgumentTypeError, NoGraphError, ShapeError
from aiograd.functional.derivatives import call
from aiograd.implicit.equation import Equation, followed, stripped
from aiograd.implicit.solvers import METHODS
from aiograd.profiler import scope
from aiograd.running import foreign_modes
from aiograd.running.caller import type_found
from aiograd.running.modes import ModeScope, enable_grad, is_grad_enabled, no_grad, tell_compiler
from aiograd.running.offloading import STEP_CALLS, ready
from aiograd.running.trees import leaves_of, map_tree
from aiograd.tensors.core import TensorCore, outside
from aiograd.tensors.creation import asarray
from aiograd.tensors.passes import grad

Solver = Callable[..., Any]
Solve = str | Callable[..., Any]
Tolerance = float | Literal["auto"] | None


def root(
    residual: Callable[..., Any], *, solve: Solve = "gmres", tol: float = 1e-10, maxiter: int | None = None, residual_tol: Tolerance = "auto"
) -> Callable[[Solver], Callable[..., Awaitable[Any]]]:
    """Decorator of a solver of ``residual(x, *args) = 0``: its answer gets derivatives by the implicit function theorem.

    The decorated function is called as ``await solver(x0, *args)``. The solver runs without a graph, on Tensors outside of one, and may be
    anything: ``async def``, a call to another worker, SciPy (a plain ``def`` runs on the engine's executor). Then the residual is recorded once
    at the answer, so memory does not grow with the solver's iterations, and gradients reach everything that the residual reads: `args`,
    parameters that it captures, values of other workers. A backward pass solves ``J^T u = g`` by products with the residual's Jacobian J, each
    a pass of its own. The answer does not depend on x0. It can be differentiated once; a second time is an `OnceDifferentiableError`.

    Cancelling the call cancels the solver; cancelling a pass stops the linear solve, and no gradient changes.

    Args:
        residual: function of ``(x, *args)``, ``def`` or ``async def``, of x's shape, real.
        solve: ``"gmres"``, ``"bicgstab"``, ``"cg"`` (for a symmetric J), or ``def | async def solve(matvec, b)``, which returns u with
            ``await matvec(u)`` = b; the vectors are float64 Tensors of x's shape.
        tol: the largest ``|J^T u - g| / |g|`` that is accepted; where rounding in x's dtype leaves more, as small as that allows.
        maxiter: the largest number of products; None: ten times the elements of x, at least 100 and at most 10,000 (no limit for a function).
        residual_tol: the largest element of the residual at the answer; ``"auto"``: 1e-4 in float64, else 1e-2; None: not checked.

    Returns:
        The decorator: the decorated solver returns a coroutine of the answer, a Tensor of x0's shape and dtype.

    Raises:
        ArgumentError: an option is wrong, x0 is not real, or a keyword that the residual does not get requires grad.
        When awaited, ShapeError: the answer or the residual has not x0's shape. NoGraphError: arguments require grad, and the residual is computed
        from x and them by operations that are not recorded. ConvergenceError: the answer is no root; in a pass, the linear
        solve failed, as where J is singular. Exceptions of the solver and the residual pass through.

    >>> @ag.implicit.root(lambda x, a: x * x - a)
    ... def newton(x, a):
    ...     for _ in range(20):
    ...         x = (x + a / x) / 2
    ...     return x
    >>> a = ag.tensor([4.0, 9.0], requires_grad=True)
    >>> x = await newton(ag.ones(2), a)
    >>> await x.sum().backward()
    >>> a.grad
    tensor([0.25      , 0.16666667])

    Source: Blondel et al., Efficient and modular implicit differentiation (2022).
    """
    return _decorator("root", residual, residual, solve, tol, maxiter, residual_tol)


def fixed_point(
    step: Callable[..., Any], *, solve: Solve = "gmres", tol: float = 1e-10, maxiter: int | None = None, residual_tol: Tolerance = "auto"
) -> Callable[[Solver], Callable[..., Awaitable[Any]]]:
    """Decorator of a solver of ``step(x, *args) = x``; otherwise as `root`, with the residual ``step(x, *args) - x``.

    Cancelling works as for `root`.

    Args:
        step: function of ``(x, *args)``, ``def`` or ``async def``, of x's shape.
        solve, tol, maxiter, residual_tol: as of `root`.

    Returns:
        The decorator.

    Raises:
        As `root`.

    >>> @ag.implicit.fixed_point(lambda x, a: np.cos(a * x))
    ... def iterate(x, a):
    ...     for _ in range(100):
    ...         x = np.cos(a * x)
    ...     return x
    >>> a = ag.tensor([1.0], requires_grad=True)
    >>> x = await iterate(ag.ones(1), a)
    >>> await x.sum().backward()
    >>> x, a.grad
    (tensor([0.7391], grad_fn=<ImplicitSolveBackward>), tensor([-0.2975]))

    Source: Christianson, Reverse accumulation and attractive fixed points (1994).
    """

    async def residual(x: Any, *args: Any) -> Any:
        return await _one(step, (x, *args), "implicit.fixed_point") - x

    return _decorator("fixed_point", step, residual, solve, tol, maxiter, residual_tol)


def argmin(
    objective: Callable[..., Any], *, solve: Solve = "cg", tol: float = 1e-10, maxiter: int | None = None, residual_tol: Tolerance = "auto"
) -> Callable[[Solver], Callable[..., Awaitable[Any]]]:
    """Decorator of a solver that minimises ``objective(x, *args)``; otherwise as `root`, with the gradient of the objective as residual.

    The Jacobian is the Hessian of the objective, hence ``"cg"``. Cancelling works as for `root`.

    Args:
        objective: function of ``(x, *args)``, ``def`` or ``async def``, that returns one real element.
        solve, tol, maxiter, residual_tol: as of `root`.

    Returns:
        The decorator.

    Raises:
        ShapeError: when awaited, the objective has more than one element. UnusedInputError: when awaited, it does not depend on x.
        ArgumentError, ConvergenceError: as for `root`.

    >>> @ag.implicit.argmin(lambda x, a: ((x - a) ** 2).sum() + (x * x).sum())
    ... def halve(x, a):
    ...     return a / 2
    >>> a = ag.tensor([1.0, 2.0], requires_grad=True)
    >>> await (await halve(ag.zeros(2), a)).sum().backward()
    >>> a.grad
    tensor([0.5000, 0.5000])

    Source: Blondel et al., Efficient and modular implicit differentiation (2022).
    """

    async def residual(x: Any, *args: Any) -> Any:
        records = is_grad_enabled()
        x = x if x.requires_grad else outside(x).requires_grad_()
        with enable_grad():
            value = await _one(objective, (x, *args), "implicit.argmin")
            (gradient,) = await grad(value, [x], create_graph=records)
        return gradient

    return _decorator("argmin", objective, residual, solve, tol, maxiter, residual_tol)


def _decorator(
    kind: str, given: Any, residual: Callable[..., Any], solve: Solve, tol: float, maxiter: int | None, residual_tol: Tolerance
) -> Callable[[Solver], Callable[..., Awaitable[Any]]]:
    """The decorator for a residual, its options checked; `given` is the function that the user gave."""
    what = f"implicit.{kind}"
    if not callable(given):
        raise ArgumentTypeError(f"{what}: expected a function of (x, *args), found {type_found(given)}")
    if not callable(solve) and (not isinstance(solve, str) or solve not in METHODS):
        raise ArgumentError(f"{what}(solve={solve!r}): expected one of {', '.join(map(repr, METHODS))}, or a function of (matvec, b)")
    if not _is_number(tol) or not 0 < tol < 1:
        raise ArgumentError(f"{what}(tol={tol!r}): expected a number between 0 and 1")
    if maxiter is not None and (isinstance(maxiter, bool) or not isinstance(maxiter, (int, np.integer)) or maxiter < 1):
        raise ArgumentError(f"{what}(maxiter={maxiter!r}): expected a positive int, or None")
    if residual_tol is not None and residual_tol != "auto" and not (_is_number(residual_tol) and residual_tol > 0):
        raise ArgumentError(f"{what}(residual_tol={residual_tol!r}): expected a number above 0, 'auto', or None")

    def decorator(solver: Solver) -> Callable[..., Awaitable[Any]]:
        if not callable(solver):
            raise ArgumentTypeError(f"{what}: decorates a solver, a function of (x0, *args); found {type_found(solver)}")
        name = getattr(solver, "__qualname__", type(solver).__name__)

        @functools.wraps(solver)
        async def solved(*positional: Any, **keywords: Any) -> Any:
            tell_compiler(f"calls {name}, an implicit function")
            x0, args, keywords = _bound(name, solver, positional, keywords)
            with ModeScope(trace=None), scope(f"implicit {name}"):
                values = map_tree(stripped, args, TensorCore)
                answer = await _answer(name, solver, x0, values, keywords)
                equation = Equation(name, answer, residual, values, solve, tol, maxiter)
                equation.residual = await _one(residual, (equation.point, *args), what)
                if equation.residual.shape != answer.shape or equation.residual.dtype.kind != "f":
                    raise ShapeError(
                        f"{name}: the residual at the answer is {equation.residual.dtype}{list(equation.residual.shape)}; expected a real one of the "
                        f"answer's shape {list(answer.shape)}"
                    )
                await _check_recorded(equation, args, what)
                if residual_tol is not None:
                    await equation.check((1e-4 if answer.dtype == np.float64 else 1e-2) if residual_tol == "auto" else residual_tol)
                return equation.tied()

        return solved

    return decorator


async def _one(function: Callable[..., Any], args: tuple[Any, ...], what: str) -> Any:
    outputs, is_one = await call(function, args, what)
    if not is_one:
        raise ShapeError(f"{what}: the function of x returned {len(outputs)} Tensors in a sequence; expected one Tensor")
    return outputs[0]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


async def _check_recorded(equation: Equation, args: tuple[Any, ...], what: str) -> None:
    """Raise where arguments need derivatives and the residual records nothing of x. Cancelling it cancels the residual, if that runs again.

    Raises:
        NoGraphError: so it is.
    """
    recorded, tensors = equation.residual, list(leaves_of(args, TensorCore))
    if followed(recorded) is not None or not any(map(_has_derivative, tensors)):
        return
    if not is_grad_enabled():
        if all(followed(tensor) is None for tensor in tensors):
            return
        with enable_grad():  # forward mode follows the arguments, and not x
            recorded = await _one(equation.function, (equation.point, *equation.args), what)
    if not recorded.requires_grad:
        raise NoGraphError(
            f"{equation.name}: the residual at the answer does not depend on x by recorded operations, so derivatives by the arguments are unknown. "
            "Compute it of Tensors, without numpy() and detach(), or pass detached arguments"
        )


def _has_derivative(tensor: Any) -> bool:
    return tensor.requires_grad or followed(tensor) is not None


def _bound(name: str, solver: Solver, given: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """x0, the arguments that the solver and the residual get, and the keywords that only the solver gets, checked."""
    try:
        bound = inspect.signature(solver).bind(*given, **keywords)
        given, keywords = bound.args, bound.kwargs
    except ValueError:  # of a function without a signature
        pass
    if not given:
        raise ArgumentError(f"{name}(): the first argument is missing, the point x0 to start from")
    x0 = asarray(given[0])
    if x0.dtype.kind != "f":
        raise ArgumentTypeError(f"{name}: x0 has dtype {x0.dtype}; expected a real floating dtype, since others have no derivative")
    for key, value in keywords.items():
        if any(map(_has_derivative, leaves_of(value, TensorCore))):
            raise ArgumentError(f"{name}({key}=...) requires grad, and the residual does not get keywords: pass it by position, or detached")
    return stripped(x0), given[1:], keywords


async def _answer(name: str, solver: Solver, x0: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """The answer of the solver, outside of any graph and in memory of its own."""
    run = functools.partial(solver, x0, *args, **keywords)
    with no_grad():
        if inspect.iscoroutinefunction(solver) or inspect.iscoroutinefunction(type(solver).__call__):
            found = await run()
        else:
            found = await (STEP_CALLS.get() or current_engine()).offload(foreign_modes.within(run, foreign_modes.noted()))
            if inspect.isawaitable(found) and not isinstance(found, TensorCore):
                found = await found
        answer = stripped(asarray(await ready(found)))
        if answer.shape != x0.shape or answer.dtype.kind != "f":
            raise ShapeError(f"{name} returned {answer.dtype}{list(answer.shape)}; expected a real answer of the shape of x0, {list(x0.shape)}")
        return asarray(answer, x0.dtype, copy=True)

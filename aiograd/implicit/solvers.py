"""Linear systems A u = b of which only products A v are known, solved by awaited products on vectors of the host.

Note [Cycles and the true residual]
    A method runs in cycles: from zero, for the residual that is left. Its own estimate of the residual only ends a cycle: after each one,
    ``b - A u`` is computed from ``u``, and the loop ends when that is small, when a cycle gained nothing, or when `maxiter` products are spent. So
    restarted GMRES, refinement after rounding and the final check are one loop.

Note [As small as rounding allows]
    In ``b - A u`` rounding alone leaves about ``eps |A| |u|``, with ``|A|`` from below: the largest ``|A v| / |v|`` that was seen. Where that is
    more than `tol` asks for, it is enough, up to ``sqrt(eps) |b|``: a system so near to a singular one that rounding leaves more has no answer.

Source: Saad, Iterative Methods for Sparse Linear Systems (2003): algorithms 6.18, 6.9 and 7.7.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from aiograd.errors import ConvergenceError, ShapeError
from aiograd.tensors.core import TensorCore, host_array, make

Vector = np.ndarray[Any, np.dtype[np.float64]]
Product = Callable[[Vector], Awaitable[Vector]]
#: products of GMRES between two restarts: at least, at most, and as many as make vectors of that many elements in all
FEWEST, MOST, ELEMENTS = 20, 200, 10_000_000
#: a cycle that leaves more than this part of the residual gains nothing
STAGNANT = 0.99


class ImplicitCounts:
    """Counts of the process since it began: linear systems, their products, and calls that ended with a `ConvergenceError`."""

    solves = 0
    iterations = 0
    failures = 0


IMPLICIT_COUNTS = ImplicitCounts()


class LinearSystem:
    """One system, solved once; see the notes of the module.

    Args:
        what: names the system in messages.
        multiply: the product with A.
        eps: rounding of `multiply`, relative.
        tol: the largest ``|b - A u| / |b|``.
        maxiter: the largest number of products; None: ten times the unknowns, at least 100 and at most 10,000.
    """

    def __init__(self, what: str, multiply: Product, eps: float, tol: float, maxiter: int | None) -> None:
        self.what = what
        self.multiply = multiply
        self.eps = eps
        self.tol = tol
        self.maxiter = maxiter
        self.products = 0
        #: numpy's handling of overflow in `multiply`; in a method itself the result shows it
        self.warnings = np.geterr()
        #: the largest ``|A v| / |v|`` so far
        self.norm = 0.0

    async def product(self, v: Vector) -> Vector:
        """A v, counted. Cancelling it cancels the product."""
        if not np.isfinite(v).all():
            raise self.failed("the linear solve diverged", float("nan"), self.tol)
        self.products += 1
        IMPLICIT_COUNTS.iterations += 1
        with np.errstate(**self.warnings):
            found = await self.multiply(v)
        length = float(np.linalg.norm(v))
        if not np.isfinite(found).all():
            raise self.failed("a product with the Jacobian is not finite", float("nan"), self.tol)
        if length:
            self.norm = max(self.norm, float(np.linalg.norm(found)) / length)
        return found

    def failed(self, why: str, found: float, limit: float) -> ConvergenceError:
        """The error for a system that has no solution here."""
        return ConvergenceError(f"{self.what}: {why}, after {self.products} products", norm=found, limit=limit, iterations=self.products)

    async def solve(self, method: str | Callable[..., Any], b: Vector) -> Vector:
        """The solution; a callable `method` gets vectors of `b`'s shape as Tensors.

        Raises:
            ConvergenceError: there is none, or `method` did not find it.
        """
        IMPLICIT_COUNTS.solves += 1
        largest = float(np.abs(b).max(initial=0.0))
        if not np.isfinite(largest):
            raise self.failed("the gradient that arrived is not finite", largest, self.tol)
        if largest == 0.0:
            return np.zeros_like(b)
        if not isinstance(method, str):
            scale, most = 1.0, self.maxiter or (1 << 60)
        else:
            scale, most = largest, self.maxiter or min(max(10 * b.size, 100), 10_000)
        flat = b.ravel() / scale
        u, residual, size = np.zeros_like(flat), flat, float(np.linalg.norm(flat))
        whole = size
        while True:
            with np.errstate(all="ignore"):
                if isinstance(method, str):
                    step = await METHODS[method](self, residual, 0.5 * max(self.tol, 4 * self.eps) * whole, most - self.products)
                else:
                    step = await self._solved_by(method, b, most)
                following = u + step
                residual = flat - await self.product(following) if np.isfinite(following).all() else np.full_like(flat, np.nan)
                left = float(np.linalg.norm(residual))
                rounding = min(np.sqrt(self.eps), 8 * self.eps * self.norm * float(np.linalg.norm(following)) / whole)
            limit = max(self.tol, rounding) * whole
            if left <= limit:
                return (following * scale).reshape(b.shape)
            if not left < STAGNANT * size or self.products >= most or not isinstance(method, str):
                name = method if isinstance(method, str) else getattr(method, "__qualname__", type(method).__name__)
                why = "has no solution near (is the Jacobian singular at the answer?)" if left >= STAGNANT * size else "did not converge"
                raise self.failed(
                    f"the linear solve by {name} {why}: of a right side of norm {whole * scale:.3g} a residual of {left * scale:.3g} is left, "
                    f"expected at most {limit * scale:.3g}", left * scale, limit * scale
                )  # fmt: skip
            u, size = following, left

    async def _solved_by(self, method: Callable[..., Any], b: Vector, most: int) -> Vector:
        """The answer of a method that the user wrote."""

        async def matvec(v: Any) -> Any:
            given = _host(v)
            if given.shape != b.shape:
                raise ShapeError(f"{self.what}: matvec got a vector of shape {list(given.shape)}, expected {list(b.shape)}")
            if self.products >= most:
                raise self.failed("the method that was given for `solve` took more products than maxiter allows", float("nan"), self.tol)
            return make((await self.product(given.ravel())).reshape(b.shape))

        found = method(matvec, make(b.copy()))
        if inspect.isawaitable(found) and not isinstance(found, TensorCore):
            found = await found
        answer = _host(found)
        if answer.shape != b.shape:
            raise ShapeError(f"{self.what}: the method that was given for `solve` returned shape {list(answer.shape)}, expected {list(b.shape)}")
        return answer.ravel()


def _host(vector: Any) -> Vector:
    return np.asarray(host_array(vector) if isinstance(vector, TensorCore) else vector, np.float64)


async def cg(system: LinearSystem, b: Vector, target: float, steps: int) -> Vector:
    """Conjugate gradients, for a symmetric A. Each two successive directions v, w are compared: (v, A w) that differs from (A v, w) is an error."""
    x, residual, direction, before = np.zeros_like(b), b.copy(), b, None
    square = float(b @ b)
    for _ in range(steps):
        image = await system.product(direction)
        if before is not None:
            gap = abs(float(before[0] @ image) - float(before[1] @ direction))
            allowed = 10 * np.sqrt(system.eps) * system.norm * float(np.linalg.norm(before[0]) * np.linalg.norm(direction))
            if gap > allowed:
                raise system.failed(
                    f"cg needs a symmetric Jacobian, and (v, J w) differs from (J v, w) by {gap:.3g}, expected at most {allowed:.3g}; "
                    'use solve="gmres"', gap, allowed
                )  # fmt: skip
        curvature = float(direction @ image)
        if curvature == 0.0:
            break
        x = x + square / curvature * direction
        residual -= square / curvature * image
        following = float(residual @ residual)
        if np.sqrt(following) <= target:
            break
        before = direction, image
        direction, square = residual + following / square * direction, following
    return x


async def gmres(system: LinearSystem, b: Vector, target: float, steps: int) -> Vector:
    """Generalised minimal residuals, one cycle up to a restart."""
    length = float(np.linalg.norm(b))
    basis, columns = [b / length], min(max(steps, 1), max(FEWEST, min(MOST, ELEMENTS // b.size)), b.size)
    small, k, left = np.zeros((columns + 1, columns)), 0, length
    #: rotations that make the small matrix triangular; their sines say how much of the residual is left
    turns: list[tuple[float, float]] = []
    for k in range(columns):
        image = await system.product(basis[k])
        size = float(np.linalg.norm(image))
        for _ in range(2):  # the second time takes away what rounding left
            for i, vector in enumerate(basis):
                share = float(vector @ image)
                small[i, k] += share
                image = image - share * vector
        small[k + 1, k] = beyond = float(np.linalg.norm(image))
        column = small[: k + 2, k].copy()
        for i, (cosine, sine) in enumerate(turns):
            column[i : i + 2] = cosine * column[i] + sine * column[i + 1], cosine * column[i + 1] - sine * column[i]
        radius = float(np.hypot(column[k], beyond)) or 1.0
        turns.append((float(column[k]) / radius, beyond / radius))
        left *= beyond / radius
        if left <= target or beyond <= system.eps * size:
            break
        basis.append(image / beyond)
    right = np.zeros(k + 2)
    right[0] = length
    weights = np.linalg.lstsq(small[: k + 2, : k + 1], right)[0]
    return sum((weight * vector for weight, vector in zip(weights, basis, strict=False)), np.zeros_like(b))


async def bicgstab(system: LinearSystem, b: Vector, target: float, steps: int) -> Vector:
    """Stabilised bi-conjugate gradients, two products a step; a breakdown ends the cycle."""
    x, residual, direction, rho = np.zeros_like(b), b, b, float(b @ b)
    for _ in range(max(steps // 2, 1)):
        image = await system.product(direction)
        along = float(b @ image)
        if along == 0.0:
            break
        alpha = rho / along
        half = residual - alpha * image
        x = x + alpha * direction
        if np.linalg.norm(half) <= target:
            break
        turned = await system.product(half)
        square = float(turned @ turned)
        omega = float(turned @ half) / square if square else 0.0
        x = x + omega * half
        residual = half - omega * turned
        following = float(b @ residual)
        if np.linalg.norm(residual) <= target or omega == 0.0 or following == 0.0:
            break
        direction = residual + following / rho * alpha / omega * (direction - omega * image)
        rho = following
    return x


METHODS: dict[str, Callable[[LinearSystem, Vector, float, int], Awaitable[Vector]]] = {"cg": cg, "gmres": gmres, "bicgstab": bicgstab}

"""Where a row of the op tables may be differentiated: how to draw its arguments, and how to make a smooth function of it.

Every differentiable row has a `Domain`; a test that walks the table fails for a row without one. A domain draws float64 arguments
that keep clear of kinks, poles and ties, in several shapes (scalars, broadcasts and empty arrays where they are legal) and with
several settings of the static arguments.

Note [Prepare and finish]
    Some functions are smooth only on a part of the space of arrays, or only up to a choice that the algorithm makes: `eigh` reads
    one triangle of a symmetric matrix, and the sign of an eigenvector is anybody's. `prepare` maps freely drawn arrays into the part
    that counts and `finish` maps the outputs to something unambiguous, so that finite differences are taken of
    ``finish(row(*prepare(*arrays)))``. Both use dispatching functions only, so they can be differentiated too. `call` composes them.

Rejected: Hypothesis strategies for the arrays themselves. Shrinking floats teaches nothing about a derivative, and a seed with a small
variety index says all there is to know about a failing case; the index can still be drawn by Hypothesis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Draw = Callable[[np.random.Generator, int], Arguments]


@dataclass(frozen=True, slots=True)
class Domain:
    """How to draw arguments for one row.

    Attributes:
        draw: ``draw(rng, variety)`` returns ``(args, kwargs)``: the row's array arguments, float64 where they can be differentiated,
            and its static arguments. `variety` is any integer >= 0; the cases repeat after `varieties`.
        varieties: how many different cases there are.
        prepare: maps the drawn array arguments to those the row is called with; see Note [Prepare and finish].
        finish: maps what the row returns to what is differentiated.
        complex: the row can be checked with complex numbers too: adding a small imaginary part to the arrays stays in the domain.
        second_order: the gradient may itself be differentiated here (False where the second derivative is a distribution).
        dtypes: dtypes the row is expected to keep: arguments of that dtype give an output of that dtype.
    """

    draw: Draw
    varieties: int
    prepare: Callable[..., tuple[Any, ...]] | None = None
    finish: Callable[[Any], Any] | None = None
    complex: bool = False
    second_order: bool = True
    dtypes: tuple[str, ...] = ("float32", "float64")

    def call(self, row: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """``finish(row(*prepare(*args), **kwargs))``: the smooth function to check."""
        prepared = tuple(args) if self.prepare is None else self.prepare(*args)
        out = row(*prepared, **kwargs)
        return out if self.finish is None else self.finish(out)


def cases(*draws: Callable[[np.random.Generator], Arguments], **options: Any) -> Domain:
    """A domain that goes round a list of draws, one per variety."""

    def draw(rng: np.random.Generator, variety: int) -> Arguments:
        return draws[variety % len(draws)](rng)

    return Domain(draw, len(draws), **options)


#: shapes for functions of one array, elementwise
SHAPES: tuple[tuple[int, ...], ...] = ((), (3,), (2, 3), (0,), (2, 1, 3))
#: pairs of shapes that broadcast
PAIRS: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
    ((3,), (3,)), ((2, 3), (3,)), ((), (2, 2)), ((2, 1), (1, 3)), ((0, 3), (3,)), ((), ()), ((1, 2, 1), (4, 1, 3)),
)  # fmt: skip


def uniform(
    rng: np.random.Generator, shape: tuple[int, ...], low: float = -2.0, high: float = 2.0, *, away: Sequence[float] = (), gap: float = 0.1
) -> Any:
    """Uniform numbers in [low, high] at least `gap` from every point of `away` (moved there, not redrawn)."""
    x = np.asarray(rng.uniform(low, high, shape))
    for point in away:
        near = np.abs(x - point) < gap
        x = np.where(near, point + np.where(x >= point, gap, -gap) * (1.0 + np.abs(x - point)), x)
    return np.asarray(x)


def distinct(rng: np.random.Generator, shape: tuple[int, ...], gap: float = 0.3) -> Any:
    """Numbers no two of which are closer than `gap` / 2, in random order: no ties for max, sort and the like."""
    count = int(np.prod(shape))
    levels = (np.arange(count) - count / 2) * gap + rng.uniform(-gap / 4, gap / 4, count)
    return rng.permutation(levels).reshape(shape)


def unary(
    low: float = -2.0,
    high: float = 2.0,
    *,
    away: Sequence[float] = (),
    gap: float = 0.1,
    statics: Sequence[dict[str, Any]] = ({},),
    **options: Any,
) -> Domain:
    """Elementwise functions of one array, over `SHAPES` and the given static arguments."""

    def one(shape: tuple[int, ...], kwargs: dict[str, Any]) -> Callable[[np.random.Generator], Arguments]:
        return lambda rng: ((uniform(rng, shape, low, high, away=away, gap=gap),), dict(kwargs))

    return cases(*(one(shape, kwargs) for kwargs in statics for shape in SHAPES), **options)


def binary(
    first: tuple[float, float] = (-2.0, 2.0),
    second: tuple[float, float] = (-2.0, 2.0),
    *,
    away: tuple[Sequence[float], Sequence[float]] = ((), ()),
    apart: float = 0.0,
    statics: Sequence[dict[str, Any]] = ({},),
    **options: Any,
) -> Domain:
    """Elementwise functions of two arrays, over `PAIRS`; with `apart`, no element of one comes closer than that to its partner."""

    def one(shapes: tuple[tuple[int, ...], tuple[int, ...]], kwargs: dict[str, Any]) -> Callable[[np.random.Generator], Arguments]:
        def draw(rng: np.random.Generator) -> Arguments:
            x1, x2 = uniform(rng, shapes[0], *first, away=away[0]), uniform(rng, shapes[1], *second, away=away[1])
            if apart:  # one operand on even, the other on odd multiples of `apart`
                x1 = np.round(x1 / (2 * apart)) * 2 * apart
                x2 = np.round(x2 / (2 * apart)) * 2 * apart + apart
            return (x1, x2), dict(kwargs)

        return draw

    return cases(*(one(shapes, kwargs) for kwargs in statics for shapes in PAIRS), **options)


def arrays(*shapes: tuple[int, ...], low: float = -2.0, high: float = 2.0, **kwargs: Any) -> Callable[[np.random.Generator], Arguments]:
    """One case: an array of each shape, and these static arguments."""
    return lambda rng: (tuple(uniform(rng, shape, low, high) for shape in shapes), dict(kwargs))


def apart(shape: tuple[int, ...], **kwargs: Any) -> Callable[[np.random.Generator], Arguments]:
    """One case: an array without ties, and these static arguments."""
    return lambda rng: ((distinct(rng, shape),), dict(kwargs))

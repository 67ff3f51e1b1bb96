"""A line search for the strong Wolfe conditions, with an awaited function.

Source: Nocedal and Wright, Numerical Optimization (2006), algorithms 3.5 and 3.6 (bracketing, then zoom) with cubic interpolation; guards and
constants as in ``torch.optim.LBFGS``.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import numpy as np


class LinePoint(NamedTuple):
    """A point of the line: how far, the loss, the gradient, and its part along the line."""

    t: float
    loss: float
    gradient: Any
    slope: float


Evaluate = Callable[[float], Awaitable[LinePoint]]


def _cubic_minimum(a: LinePoint, b: LinePoint, low: float, high: float) -> float:
    """The minimum in [low, high] of the cubic through two points with their slopes; the middle where it has none."""
    if a.t > b.t:
        a, b = b, a
    bend = a.slope + b.slope - 3 * (a.loss - b.loss) / (a.t - b.t) if a.t != b.t else math.nan
    square = bend**2 - a.slope * b.slope
    if not square >= 0:
        return (low + high) / 2.0
    root = math.sqrt(square)
    below = b.slope - a.slope + 2 * root
    if below == 0:
        return (low + high) / 2.0
    place = b.t - (b.t - a.t) * ((b.slope + root - bend) / below)
    return min(max(place, low), high)


async def strong_wolfe(
    evaluate: Evaluate,
    start: LinePoint,
    t: float,
    length: float,
    *,
    decrease: float = 1e-4,
    curvature: float = 0.9,
    tolerance_change: float = 1e-9,
    max_evaluations: int = 25,
) -> tuple[LinePoint, int]:
    """A point that decreases the loss enough and where the slope is small enough.

    Args:
        evaluate: computes the point at a distance.
        start: the point at distance 0.
        t: the first distance to try.
        length: the largest magnitude of an element of the direction.
        decrease, curvature: the constants of the two conditions.
        tolerance_change: brackets that move the parameters by less are not divided further.
        max_evaluations: how many points may be evaluated.

    Returns:
        The best point found, and how many were evaluated.
    """

    def flat_enough(point: LinePoint) -> bool:
        return abs(point.slope) <= -curvature * start.slope

    before, point, count = start, await evaluate(t), 1
    bracket: list[LinePoint] = []
    while True:
        if count > max_evaluations:
            bracket = [start, point]
            break
        too_high = point.loss > start.loss + decrease * point.t * start.slope or (count > 2 and point.loss >= before.loss)
        if not too_high and flat_enough(point):
            return point, count
        if too_high or point.slope >= 0:
            bracket = [before, point]
            break
        low, high = point.t + 0.01 * (point.t - before.t), point.t * 10
        step = _cubic_minimum(before, point, low, high)
        before, point, count = point, await evaluate(step), count + 1
    stuck = False
    best = 0 if bracket[0].loss <= bracket[-1].loss else 1
    while count <= max_evaluations:
        ends = [each.t for each in bracket]
        width = abs(ends[1] - ends[0])
        if width * length < tolerance_change:
            break
        step = _cubic_minimum(bracket[0], bracket[1], min(ends), max(ends))
        margin = 0.1 * width
        if min(max(ends) - step, step - min(ends)) < margin:  # too near an end: not twice in a row
            if stuck or step >= max(ends) or step <= min(ends):
                step = max(ends) - margin if abs(step - max(ends)) < abs(step - min(ends)) else min(ends) + margin
                stuck = False
            else:
                stuck = True
        else:
            stuck = False
        point, count = await evaluate(step), count + 1
        if point.loss > start.loss + decrease * point.t * start.slope or point.loss >= bracket[best].loss:
            bracket[1 - best] = point
            best = 0 if bracket[0].loss <= bracket[1].loss else 1
            continue
        if flat_enough(point):
            return point, count
        if point.slope * (bracket[1 - best].t - bracket[best].t) >= 0:
            bracket[1 - best] = bracket[best]
        bracket[best] = point
    return bracket[best], count


def inner(a: Any, b: Any) -> float:
    """The inner product of two vectors."""
    return float(np.dot(a, b))

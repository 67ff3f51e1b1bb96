"""Scenarios: a function written once, run as it is and compiled, with everything that it reports compared."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

import aiograd as ag

#: by name; each takes a function that compiles, one that reports values, and one that makes Tensors of numbers
Scenario = Callable[[Callable[..., Any], Callable[..., None], Callable[..., Any]], Any]


def seen(value: Any) -> Any:
    """A value as a user sees it."""
    if isinstance(value, ag.Tensor):
        grad = seen(value.grad) if value.is_leaf and value.grad is not None else None
        return value.shape, str(value.dtype), value.detach().numpy().tobytes(), value.requires_grad, value.is_leaf, value.version, grad
    if isinstance(value, (tuple, list)):
        return type(value).__name__, tuple(map(seen, value))
    if isinstance(value, dict):
        return type(value).__name__, tuple([(str(key), seen(item)) for key, item in value.items()])
    return type(value).__name__ if isinstance(value, BaseException) else repr(value)


async def reports(scenario: Scenario, compiles: bool) -> tuple[list[Any], list[Any]]:
    """The reports of a scenario, and the compiled functions that it has made."""
    ag.seed(0)
    rng = np.random.default_rng(0)
    log: list[Any] = []
    made: list[Any] = []

    def tensor(*shape: int, grad: bool = False) -> Any:
        return ag.tensor(rng.normal(size=shape).astype(np.float32), requires_grad=grad)

    def wrap(function: Any = None, **options: Any) -> Any:
        if function is None:
            return lambda inner: wrap(inner, **options)
        if compiles:
            made.append(ag.compile(function, **options))
        return made[-1] if compiles else function

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the compiled function")
        result = scenario(wrap, lambda *values: log.append(seen(values)), tensor)
        if inspect.isawaitable(result):
            await result
    return log, made


async def check(scenario: Scenario) -> list[Any]:
    """Compare a scenario with itself compiled; returns its compiled functions."""
    expected, _ = await reports(scenario, False)
    found, made = await reports(scenario, True)
    assert found == expected
    assert len(expected) > 1
    return made

"""Graphs as deep as one likes: built, run and freed without recursion.

These tests take seconds and say nothing about event loops, so each runs on one loop only.
"""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from tests.support import custom_function, leaf
from tests.sweeps import swept


@custom_function(inline=True, saves=True)
def Pass(ctx: Any, g: Any) -> Any:
    """Saves its argument and passes the gradient on."""
    _ = ctx.saved_tensors
    return g


def on_one_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """The test as a plain function that runs a loop of its own."""

    @functools.wraps(test)
    def run(**arguments: Any) -> None:
        ag.run(test(**arguments), tune_gc=False)

    return run


def chain(x: Any, depth: int) -> Any:
    y = x
    for _ in range(depth):
        y = y + 1.0
    return y


def products(x: Any, depth: int) -> Any:
    y = x
    for _ in range(depth):
        y = y * 1.0
    return y


def ladder(x: Any, depth: int) -> Any:
    """Every rung is used twice."""
    y, z = x * 1, x * 1
    for _ in range(depth // 2):
        y, z = y + z * 0.5, z
        z = z * 1
    return y + z


@pytest.mark.parametrize(("build", "general"), swept([(chain, False), (products, True), (ladder, False)]))
@on_one_loop
async def test_a_graph_of_150_000_nodes(build: Any, general: bool) -> None:
    x = leaf([1.0])
    y = build(x, 150_000)
    if general:
        y.register_hook(lambda g: None)
    await y.sum().backward()
    expected = 1.0 + 1.0 + 0.5 * 75_000 if build is ladder else 1.0
    np.testing.assert_allclose(x.grad.numpy(), [expected])


@on_one_loop
async def test_a_deep_chain_of_custom_functions() -> None:
    x = leaf([1.0])
    y = x
    for _ in range(30_000):
        y = Pass.apply(y)
    await y.backward()
    np.testing.assert_array_equal(x.grad.numpy(), [1.0])


@pytest.mark.parametrize("run", [False, True], ids=["never run", "run"])
@pytest.mark.parametrize("kind", ["rows", "functions", "views", "deep hooks"])
@on_one_loop
async def test_deep_graphs_are_freed_at_once_and_without_recursion(kind: str, run: bool) -> None:
    depth = 5_000 if kind == "functions" else 50_000
    x = leaf([1.0, 2.0])
    y: Any = x * 1
    for _ in range(depth):
        if kind == "rows":
            y = y * y[0:1] if _ % 1000 == 0 else y * 1.0
        elif kind == "functions":
            y = Pass.apply(y)
        elif kind == "views":
            y = y[:]
        else:
            y = y + 1.0
            if _ % 10 == 0:
                y.register_hook(lambda g: None)
    limit = sys.getrecursionlimit()
    gc.collect()
    gc.disable()
    try:
        alive = weakref.ref(y.grad_fn)
        if run:
            await y.sum().backward()
        del y
        assert alive() is None
    finally:
        gc.enable()
    assert sys.getrecursionlimit() == limit


@on_one_loop
async def test_a_deep_graph_is_walked_for_inputs_too() -> None:
    x, w = leaf([1.0]), leaf([1.0])
    y = chain(x, 25_000) + chain(w, 25_000)
    (g,) = await ag.grad(y.sum(), w, retain_graph=True)
    np.testing.assert_array_equal(g.numpy(), [1.0])
    await y.sum().backward(inputs=[x])
    np.testing.assert_array_equal(x.grad.numpy(), [1.0])
    assert w.grad is None


@on_one_loop
async def test_a_deep_second_derivative() -> None:
    x = leaf([1.001])
    y = x
    for _ in range(2_000):
        y = y * x
    (g,) = await ag.grad(y.sum(), x, create_graph=True)
    (g2,) = await ag.grad(g.sum(), x)
    np.testing.assert_allclose(g.item(), 2001 * 1.001**2000, rtol=1e-9)
    np.testing.assert_allclose(g2.item(), 2001 * 2000 * 1.001**1999, rtol=1e-9)

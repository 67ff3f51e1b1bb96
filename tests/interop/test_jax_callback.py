"""aiograd's functions in JAX programs: jitted, mapped, differentiated; what they return is checked, and nothing waits forever."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.errors import ArgumentTypeError
from aiograd.interop import BackgroundLoop
from aiograd.interop.jax import function, wrap
from tests.support import assert_raises
from tests.tolerance import assert_close

jax: Any = pytest.importorskip("jax")
jnp: Any = pytest.importorskip("jax.numpy")
RANDOM = np.random.default_rng(0)


def draw(*shape: int) -> np.ndarray[Any, Any]:
    return RANDOM.normal(size=shape).astype(np.float32)


@pytest.fixture
def loop() -> Iterator[BackgroundLoop]:
    with BackgroundLoop() as background:
        yield background


async def layer(x: Any, w: Any) -> Any:
    await asyncio.sleep(0)
    return (x @ w).tanh()


def same(x: Any, w: Any) -> Any:
    return jnp.tanh(x @ w)


@pytest.mark.parametrize("jit", [jax.jit, lambda f: f])
@pytest.mark.parametrize("is_async", [True, False])
def test_values_and_gradients_are_those_of_aiograd(loop: BackgroundLoop, jit: Any, is_async: bool) -> None:
    bridged = function(layer if is_async else lambda x, w: (x @ w).tanh(), loop=loop)
    x, w, seed = draw(5, 4), draw(4, 3), draw(5, 3)

    def program(x: Any, w: Any) -> Any:
        return (bridged(x, w) * seed).sum()

    async def alone() -> Any:
        tensors = ag.tensor(x, requires_grad=True), ag.tensor(w, requires_grad=True)
        value = await layer(*tensors)
        await ag.backward(value, ag.tensor(seed))
        return value, tensors[0].grad, tensors[1].grad

    value, *grads = loop.run(alone())
    np.testing.assert_array_equal(jit(bridged)(x, w), value.detach().numpy())
    for found, grad in zip(jit(jax.grad(program, argnums=(0, 1)))(x, w), grads, strict=True):
        np.testing.assert_array_equal(found, grad.numpy())


def test_derivatives_of_second_order_and_maps(loop: BackgroundLoop) -> None:
    bridged = function(layer, loop=loop)
    x, w = draw(5, 4), draw(4, 3)

    def penalty(f: Any) -> Any:
        return jax.grad(lambda w: (jax.grad(lambda w: (f(x, w) ** 2).sum())(w) ** 2).sum())

    assert_close(np.asarray(jax.jit(penalty(bridged))(w)), np.asarray(penalty(same)(w)), 100)
    rows = jax.vmap(lambda row: bridged(row[None], w)[0])(x)
    assert_close(np.asarray(rows), np.asarray(same(x, w)))
    mapped = jax.vmap(jax.grad(lambda row: bridged(row[None], w).sum()))(x)
    assert_close(np.asarray(mapped), np.asarray(jax.grad(lambda x: same(x, w).sum())(x)))


def test_complex_gradients_are_jaxs() -> None:
    with BackgroundLoop() as loop:
        z = np.array([1 + 2j, 0.5 - 1j], np.complex64)
        found = jax.grad(lambda z: function(lambda z: (z * z * z).imag, loop=loop)(z).sum())(z)
        np.testing.assert_allclose(found, jax.grad(lambda z: (z * z * z).imag.sum())(z), rtol=1e-6)
    jax.clear_caches()


def test_nested_arguments_integers_and_static_ones(loop: BackgroundLoop) -> None:
    async def model(inputs: Any, index: Any, *, how: str, scale: float) -> Any:
        assert how == "plain"
        return {"taken": inputs["x"][index] * scale, "where": inputs["x"].argmax().astype("int32"), "fixed": [ag.ones(2)]}

    bridged = function(model, loop=loop)
    x, index = np.array([1.0, 5.0, 2.0], np.float32), np.array([2, 2], np.int32)

    def program(x: Any, scale: Any) -> Any:
        found = bridged({"x": x}, index, how="plain", scale=scale)
        return found["taken"].sum() + found["where"] + found["fixed"][0].sum()

    assert jax.jit(program)(x, 3.0) == 2 * 6 + 1 + 2
    grads = jax.jit(jax.grad(program, argnums=(0, 1)))(x, 3.0)
    assert grads[0].tolist() == [0.0, 0.0, 6.0] and grads[1] == 4.0


def test_large_arrays_and_many_threads(loop: BackgroundLoop) -> None:
    """JAX's threads hold its work while they call back: reading an argument must not wait for more of them."""
    bridged = function(layer, loop=loop)
    grad = jax.jit(jax.grad(lambda w, x: bridged(x, w).sum()))
    x, w = draw(600, 500), draw(500, 400)
    wanted = grad(w, x)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: grad(w, x), range(8)):
            np.testing.assert_array_equal(found, wanted)


async def test_a_program_may_be_run_by_a_thread_whose_loop_waits_for_it() -> None:
    with BackgroundLoop() as loop:
        found = jax.jit(function(layer, loop=loop))(draw(2, 4), draw(4, 3))
        assert found.shape == (2, 3)
    bridged = function(layer)
    assert jax.jit(bridged)(draw(2, 4), draw(4, 3)).shape == (2, 3), "made on this loop, run in the background"
    del bridged
    jax.clear_caches()
    gc.collect()


async def test_there_and_back(loop: BackgroundLoop) -> None:
    """A JAX function that calls aiograd is itself a node of aiograd."""
    x, w = draw(3, 4), draw(4, 2)
    bridged = function(layer, loop=loop)
    node = wrap(jax.jit(lambda x, w: bridged(x, w) * 2))
    tensors = ag.tensor(x, requires_grad=True), ag.tensor(w, requires_grad=True)
    await node(*tensors).sum().backward()
    wanted = jax.grad(lambda x, w: 2 * same(x, w).sum(), argnums=(0, 1))(x, w)
    for tensor, grad in zip(tensors, wanted, strict=True):
        assert tensor.grad is not None
        assert_close(tensor.grad.numpy(), np.asarray(grad))


# -------------------------------------------------------------------- shapes of results, failures


def test_shapes_of_results_may_be_announced(loop: BackgroundLoop) -> None:
    calls: list[threading.Thread] = []

    async def model(x: Any) -> Any:
        calls.append(threading.current_thread())
        return x.sum(axis=0), x * 2

    struct = jax.ShapeDtypeStruct
    x = draw(3, 2)
    for announced in ((struct((2,), np.float32), struct((3, 2), np.float32)), lambda x: (struct(x.shape[1:], x.dtype), struct(x.shape, x.dtype))):
        calls.clear()
        total, double = jax.jit(function(model, result_shape_dtypes=announced, loop=loop))(x)
        assert_close(np.asarray(total), x.sum(0))
        np.testing.assert_array_equal(double, x * 2)
        assert len(calls) == 1
    calls.clear()
    jax.jit(function(model, loop=loop))(x)
    assert len(calls) == 2, "once with zeros"
    for wrong in (struct((2,), np.float32), (struct((1,), np.float32), struct((3, 2), np.float32))):
        with pytest.raises(Exception, match=r"expected results nested as|was announced as float32 \[1\]"):
            jax.block_until_ready(function(model, result_shape_dtypes=wrong, loop=loop)(x))


def test_failures(loop: BackgroundLoop) -> None:
    async def fails(x: Any) -> Any:
        if x.sum().item():
            raise KeyError("not with numbers")
        return x * 1

    assert_raises(Exception, "not with numbers", lambda: jax.block_until_ready(jax.jit(function(fails, loop=loop))(jnp.ones(2))))
    assert_raises(ArgumentTypeError, r"a result is int64.*astype\('int32'\)", lambda: function(lambda x: x.argmax(), loop=loop)(jnp.ones(2)))
    assert_raises(ArgumentTypeError, "returned a float; expected a Tensor", lambda: function(lambda x: 3.0, loop=loop)(jnp.ones(2)))
    assert_raises(ArgumentTypeError, "expected a function on Tensors, found int", function, 3)
    found = function(lambda x: ag.ones(3), loop=loop)
    assert jax.grad(lambda x: found(x).sum())(jnp.ones(2)).tolist() == [0.0, 0.0], "a result that does not depend on the argument"


def test_arguments_are_copies(loop: BackgroundLoop) -> None:
    kept: list[Any] = []

    def overwrite(x: Any) -> Any:
        x += 1
        kept.append(x)
        return x * 2

    x = jnp.ones(2)
    assert function(overwrite, loop=loop)(x).tolist() == [4.0, 4.0] and x.tolist() == [1.0, 1.0]
    assert [tensor.tolist() for tensor in kept] == [[1.0, 1.0], [2.0, 2.0]]


def test_it_is_made_once_for_a_signature(loop: BackgroundLoop) -> None:
    calls = 0

    def count(x: Any, how: str = "") -> Any:
        nonlocal calls
        calls += 1
        return x * 2

    bridged = function(count, loop=loop)
    for _ in range(3):
        bridged(jnp.ones(2))
    assert calls == 1 + 3
    bridged(jnp.ones(3))
    bridged(jnp.ones(2), how="other")
    assert calls == 4 + 2 + 2

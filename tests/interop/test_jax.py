"""JAX functions as nodes: values and gradients are JAX's own, to the bit, and everything else is as of any node."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.errors import ArgumentTypeError, DeviceError, GraphFreedError, InPlaceError, ModifiedError
from aiograd.interop.jax import from_jax, to_jax, wrap
from tests.support import assert_awaiting_raises, assert_raises, cancel
from tests.tolerance import assert_close
from tests.toy_device import ToyDevice

jax: Any = pytest.importorskip("jax")
jnp: Any = pytest.importorskip("jax.numpy")
RANDOM = np.random.default_rng(0)


def draw(*shape: int, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    return RANDOM.normal(size=shape).astype(dtype)


def recurrent(cell: Any, x: Any) -> Any:
    def step(state: Any, row: Any) -> Any:
        state = jnp.tanh(row @ cell["in"] + state @ cell["over"])
        return state, state

    return jax.lax.scan(step, jnp.zeros(cell["over"].shape[0], x.dtype), x)


def attention(x: Any, keys: Any) -> Any:
    return jax.nn.softmax(x @ keys.T / 3, axis=-1) @ keys


MODELS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "layer": (lambda p, x: jnp.tanh(x @ p["w"]) + p["b"], ({"w": draw(5, 3), "b": draw(3)}, draw(7, 5))),
    "loss": (lambda z: -jax.nn.log_softmax(z)[jnp.arange(4), jnp.arange(4)].mean(), (draw(4, 6),)),
    "convolution": (lambda x, k: jax.lax.conv(x, k, (2, 1), "SAME"), (draw(2, 3, 9, 8), draw(4, 3, 3, 3))),
    "recurrent": (recurrent, ({"in": draw(4, 6), "over": draw(6, 6)}, draw(10, 4))),
    "attention": (attention, (draw(5, 8), draw(9, 8))),
    "several": (lambda xs: ({"sum": xs[0] + xs[1], "largest": jnp.sort(xs[0])[-3:]}, [xs[1] * 2]), ([draw(8), draw(8)],)),
    "normalized": (lambda x: (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5), (draw(6, 32),)),
    "gathered": (lambda table: table[jnp.array([0, 2, 2, 5])].prod(axis=0), (draw(6, 3),)),
}


@pytest.mark.parametrize("name", MODELS)
async def test_values_and_gradients_are_those_of_jax_alone_to_the_bit(name: str) -> None:
    function, arguments = MODELS[name]
    function = jax.jit(function)
    values, pull_back = jax.vjp(function, *arguments)
    seeds = jax.tree.map(lambda value: jnp.asarray(RANDOM.normal(size=value.shape), value.dtype), values)
    tensors = jax.tree.map(lambda array: ag.tensor(array, requires_grad=True), arguments)
    for _ in range(2):  # compiled in the first round
        results = wrap(function)(*tensors)
        assert jax.tree.structure(results) == jax.tree.structure(values)
        for result, value in zip(jax.tree.leaves(results), jax.tree.leaves(values), strict=True):
            np.testing.assert_array_equal(result.detach().numpy(), value, strict=True)
        leaves = jax.tree.leaves(tensors)
        found = await ag.grad(jax.tree.leaves(results), leaves, from_jax(jax.tree.leaves(seeds)))
        for grad, wanted in zip(found, jax.tree.leaves(pull_back(seeds)), strict=True):
            np.testing.assert_array_equal(grad.numpy(), wanted, strict=True)


async def test_a_training_loop_equals_one_of_jax_to_the_bit() -> None:
    @jax.jit
    def model(p: Any, x: Any) -> Any:
        return jnp.tanh(x @ p["a"]) @ p["b"]

    x, y, arrays = draw(16, 4), draw(16, 2), {"a": draw(4, 8), "b": draw(8, 2)}
    parameters = {key: ag.nn.Parameter(array.copy()) for key, array in arrays.items()}
    optimizer, layer = ag.optim.SGD(parameters.values(), lr=0.125), wrap(model)
    for _ in range(5):
        prediction = layer(parameters, ag.tensor(x))
        await ag.backward(prediction, (prediction - ag.tensor(y)).detach())
        optimizer.step()
        optimizer.zero_grad()
        value, pull_back = jax.vjp(lambda p: model(p, x), arrays)
        arrays = jax.tree.map(lambda p, g: np.asarray(p) - np.float32(0.125) * np.asarray(g), arrays, pull_back(value - y)[0])
    for key, array in arrays.items():
        np.testing.assert_array_equal(parameters[key].detach().numpy(), array)


# -------------------------------------------------------------------- arguments and results


async def test_integers_constants_keywords_and_results_without_gradient() -> None:
    @jax.jit
    def model(x: Any, index: Any, *, scale: float, table: Any, extra: Any = None) -> Any:
        assert extra is None
        return {"taken": x[index] * scale * table, "where": jnp.argmax(x), "above": x > 0, "unused": x * 2}

    x, index = ag.tensor([1.0, -2.0, 3.0], requires_grad=True), ag.tensor(np.array([2, 0], np.int32))
    found = wrap(model)(x, index, scale=2.0, table=np.array([1.0, 10.0], np.float32), extra=None)
    assert found["taken"].tolist() == [6.0, 20.0] and found["where"].item() == 2 and found["above"].tolist() == [True, False, True]
    assert found["taken"].requires_grad and found["unused"].requires_grad and not found["where"].requires_grad and not found["above"].requires_grad
    await found["taken"].sum().backward()
    assert x.grad is not None and x.grad.tolist() == [20.0, 0.0, 2.0]


async def test_arguments_that_jax_must_not_trace() -> None:
    traced: list[Any] = []

    def model(x: Any, n: int, how: str = "sum") -> Any:
        traced.append((n, how))
        for _ in range(n):
            x = x * x
        return x.sum() if how == "sum" else x.max()

    layer = wrap(model, static_argnames=("n",))
    x = ag.tensor([2.0, 3.0], requires_grad=True)
    assert [layer(x, 1).item(), layer(x, n=2).item(), layer(x, 1, how="max").item(), layer(x, 1).item()] == [13.0, 97.0, 9.0, 13.0]
    assert traced == [(1, "sum"), (2, "sum"), (1, "max")], "compiled once for each"
    assert_raises(ArgumentTypeError, r"static_argnames \['m'\]", wrap, model, static_argnames="m")


async def test_it_is_compiled_once_for_a_structure() -> None:
    traces = 0

    def model(x: Any, scale: Any) -> Any:
        nonlocal traces
        traces += 1
        return x * scale

    layer, x = wrap(model), ag.tensor([1.0, 2.0], requires_grad=True)
    for step in range(4):
        await layer(x, float(step)).sum().backward()
    assert traces == 1
    with ag.no_grad():
        assert not layer(x, 1.0).requires_grad
    layer(x, 1)
    assert traces == 3


async def test_registered_pytrees_and_random_keys() -> None:
    @jax.tree_util.register_dataclass
    @dataclass
    class State:
        w: Any
        noise: Any

    @jax.jit
    def model(state: State, key: Any) -> State:
        return State(state.w * 2, state.noise + jax.random.normal(key, state.noise.shape))

    key = jax.random.key(3)
    state = State(ag.tensor([1.0, 2.0], requires_grad=True), ag.zeros(4))
    found = wrap(model)(state, key)
    np.testing.assert_array_equal(found.noise.numpy(), jax.random.normal(key, (4,)))
    await found.w.sum().backward()
    assert state.w.grad.tolist() == [2.0, 2.0]


def test_memory_is_shared() -> None:
    array = jnp.arange(4.0)
    tensor = from_jax({"x": [array], "y": 1})["x"][0]
    assert tensor.numpy().ctypes.data == np.asarray(array).ctypes.data
    with pytest.raises(InPlaceError, match="read-only"):
        tensor += 1
    back = to_jax((tensor, "text"))
    assert isinstance(back[0], jax.Array) and back[1] == "text" and back[0].tolist() == [0.0, 1.0, 2.0, 3.0]
    held: list[Any] = []
    result = wrap(lambda x: x + 1)(tensor)
    held.append(result)
    assert not result.numpy().flags.owndata and not result.numpy().flags.writeable, "JAX's memory"
    own = wrap(lambda x: x)(source := ag.tensor([1.0, 2.0]))
    source += 1
    assert own.tolist() == [1.0, 2.0], "a result that is an argument has memory of its own"


async def test_gradients_can_be_written() -> None:
    x = ag.tensor([3.0, 4.0], requires_grad=True)
    await wrap(lambda x: x * x)(x).sum().backward()
    assert x.grad is not None
    x.grad *= 0.5
    assert x.grad.tolist() == [3.0, 4.0]


# -------------------------------------------------------------------- dtypes


WIDE = {np.float64: "float32", np.int64: "int32", np.complex128: "complex64", np.uint64: "uint32"}


@pytest.mark.parametrize("dtype", WIDE)
def test_no_dtype_changes_in_silence(dtype: Any) -> None:
    array = np.ones(3, dtype)
    for argument in (ag.tensor(array), array):
        with pytest.raises(ArgumentTypeError, match=rf"{np.dtype(dtype).name}.*astype\('{WIDE[dtype]}'\).*jax_enable_x64"):
            wrap(lambda x: x)(argument)
    assert_raises(ArgumentTypeError, "jax_enable_x64", lambda: to_jax(ag.tensor(array)))
    with jax.enable_x64(True):
        assert wrap(lambda x: x)(ag.tensor(array)).dtype == dtype == to_jax(ag.tensor(array)).dtype


async def test_a_call_in_64_bits_has_gradients_in_64_bits() -> None:
    """The setting belongs to the thread; backward runs on another one, and later."""
    x = ag.tensor(np.array([1.0, 1e-12]), requires_grad=True)
    with jax.enable_x64(True):
        y = wrap(jax.jit(lambda x: jnp.sin(x) + 1))(x)
    await y.sum().backward()
    assert y.dtype == np.float64 and x.grad is not None and x.grad.dtype == np.float64
    np.testing.assert_array_equal(x.grad.numpy(), np.asarray(np.cos([1.0, 1e-12])))


def test_halves_work_and_dtypes_that_numpy_lacks_are_refused() -> None:
    half = wrap(lambda x: x * 2)(ag.ones(3, dtype=np.float16))
    assert half.dtype == np.float16 and half.tolist() == [2.0] * 3
    assert_raises(ArgumentTypeError, "bfloat16.*astype", lambda: wrap(lambda x: x.astype(jnp.bfloat16))(ag.ones(3)))
    assert_raises(ArgumentTypeError, "key.*numpy does not have", lambda: from_jax(jax.random.key(0)))


async def test_values_of_such_a_dtype_may_lie_between() -> None:
    def model(x: Any) -> Any:
        return (jnp.sin(x.astype(jnp.bfloat16)) ** 2).astype(jnp.float32)

    x = ag.tensor(draw(5), requires_grad=True)
    y = wrap(model)(x)
    await y.sum().backward()
    assert x.grad is not None
    np.testing.assert_array_equal(x.grad.numpy(), jax.jit(jax.grad(lambda x: model(x).sum()))(x.detach().numpy()))


# -------------------------------------------------------------------- derivatives


@pytest.fixture
def wide() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("dtype", [np.float64, np.complex128])
async def test_derivatives_of_first_and_second_order(dtype: Any) -> None:
    x, w = ag.tensor(draw(3, 4, dtype=np.float64).astype(dtype), requires_grad=True), ag.tensor(draw(4, 2, dtype=np.float64), requires_grad=True)
    if dtype == np.complex128:
        x = (x + 0.5j * x * x).detach().requires_grad_()
    layer = wrap(jax.jit(lambda x, w: (jnp.sin(x @ w) * 2, (x * jnp.conj(x)).real.sum())))
    assert await ag.gradcheck(layer, (x, w)) and await ag.gradgradcheck(layer, (x, w))


@pytest.mark.usefixtures("wide")
async def test_derivatives_of_third_order() -> None:
    x = ag.tensor(np.array([0.3, 0.7]), requires_grad=True)
    y: Any = wrap(jnp.sin)(x).sum()
    for _ in range(3):
        (y,) = await ag.grad(y.sum(), [x], create_graph=True)
    np.testing.assert_allclose(y.detach().numpy(), -np.cos([0.3, 0.7]), rtol=1e-14)


async def test_a_recorded_backward_gives_the_same_gradient() -> None:
    x = ag.tensor(draw(6, 5), requires_grad=True)
    layer = wrap(jax.jit(lambda x: jax.nn.gelu(x) * x.sum()))
    (plain,) = await ag.grad(layer(x).sum(), [x])
    (recorded,) = await ag.grad(layer(x).sum(), [x], create_graph=True)
    assert recorded.requires_grad and not plain.requires_grad
    assert_close(recorded.detach().numpy(), plain.numpy())


# -------------------------------------------------------------------- as any node


class Backward:
    """A JAX function with a backward that Python code has a say in, once: when it is compiled, in the first backward."""

    def __init__(self, action: Callable[[], Any]) -> None:
        @jax.custom_vjp
        def function(x: Any) -> Any:
            return x * 2

        def backward(_: Any, grad: Any) -> Any:
            action()
            return (grad * 2,)

        function.defvjp(lambda x: (function(x), None), backward)
        self.wrapped = wrap(function)


async def test_backward_runs_on_the_executor() -> None:
    threads: list[threading.Thread] = []
    node = Backward(lambda: threads.append(threading.current_thread()))
    x = ag.tensor([1.0], requires_grad=True)
    await node.wrapped(x).sum().backward()
    assert [thread.name.startswith("aiograd-compute") for thread in threads] == [True]
    with ag.no_grad():
        assert (await ag.offload(node.wrapped, x)).tolist() == [2.0]


async def test_a_pass_that_fails_changes_nothing() -> None:
    def fail() -> None:
        raise ValueError("no gradient today")

    x, other = ag.tensor([1.0], requires_grad=True), ag.tensor([1.0], requires_grad=True)
    node = Backward(fail)
    await assert_awaiting_raises(ValueError, "no gradient today", (node.wrapped(x) * other).sum().backward())
    assert x.grad is None and other.grad is None


async def test_a_pass_that_is_cancelled_changes_nothing() -> None:
    entered, go = threading.Event(), threading.Event()

    def block() -> None:
        entered.set()
        go.wait()

    x, other = ag.tensor([1.0], requires_grad=True), ag.tensor([1.0], requires_grad=True)
    loss = (Backward(block).wrapped(x) * other).sum()
    task = asyncio.create_task(_pass(loss))
    try:
        await asyncio.to_thread(entered.wait)  # the loop runs meanwhile
        await cancel(task)
    finally:
        go.set()
    assert x.grad is None and other.grad is None


async def _pass(loss: Any) -> None:
    await loss.backward()


async def test_an_argument_that_was_modified_is_noticed() -> None:
    x, c = ag.tensor(draw(64), requires_grad=True), ag.tensor(draw(64))
    for position in range(2):
        arguments = [x * 1, c]
        z = wrap(lambda a, b: a * b)(*arguments)
        arguments[position] += 1
        await assert_awaiting_raises(ModifiedError, None, z.sum().backward())


async def test_saved_values_are_released_with_the_graph_and_seen_by_hooks() -> None:
    x = ag.tensor(draw(8), requires_grad=True)
    layer = wrap(jnp.sin)
    y = layer(x)
    await y.sum().backward(retain_graph=True)
    await y.sum().backward()
    await assert_awaiting_raises(GraphFreedError, None, y.sum().backward())
    assert x.grad is not None
    np.testing.assert_array_equal(x.grad.numpy(), 2 * np.asarray(jnp.cos(x.detach().numpy())))
    packed: list[Any] = []

    def pack(tensor: Any) -> Any:
        packed.append(tensor)
        return tensor

    with ag.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        await layer(x).sum().backward()
    assert any(np.array_equal(tensor.detach().numpy(), jnp.cos(x.detach().numpy())) for tensor in packed), "the derivative, which JAX keeps"


async def test_the_graph_goes_with_the_result() -> None:
    layer, x = wrap(lambda x: x * 2), ag.tensor([1.0], requires_grad=True)
    y = layer(x)
    node = weakref.ref(y.grad_fn)
    del y
    gc.collect()
    assert node() is None


# -------------------------------------------------------------------- bad input


async def _coroutine(x: Any) -> Any:
    return x


@pytest.mark.parametrize("what", [_coroutine, 3, None])
def test_only_functions_that_jax_can_trace(what: Any) -> None:
    assert_raises(ArgumentTypeError, "expected a function that JAX can trace", wrap, what)


def test_an_argument_by_which_calls_cannot_be_told_apart() -> None:
    assert_raises(ArgumentTypeError, "<lambda>.*set.*cannot be hashed.*pytree", lambda: wrap(lambda x, names: x)(ag.ones(2), {"a"}))


def test_inside_a_transformation_of_jax() -> None:
    layer = wrap(lambda x: x * 2)
    assert_raises(ArgumentTypeError, r"traced by JAX.*interop.jax.function", lambda: jax.jit(layer)(jnp.ones(3)))


def test_a_tensor_of_another_device(toy: ToyDevice) -> None:
    assert_raises(DeviceError, r"toy:0.*host only.*to\('cpu'\)", lambda: wrap(lambda x: x)(ag.ones(3).to("toy:0")))
    assert_raises(DeviceError, "toy:0", lambda: to_jax(ag.ones(3).to("toy:0")))


@pytest.fixture
def toy() -> Iterator[ToyDevice]:
    with ToyDevice() as device:
        yield device


SPREAD = """
import jax, jax.numpy as jnp, numpy as np, aiograd as ag
from aiograd.interop.jax import from_jax, wrap
from aiograd.errors import DeviceError
spread = jax.device_put(jnp.ones(4), jax.sharding.NamedSharding(jax.make_mesh((2,), ("a",)), jax.sharding.PartitionSpec("a")))
for call in (lambda: from_jax(spread), lambda: wrap(lambda x: x)(spread)):
    try:
        call()
    except DeviceError as error:
        print(error)
"""


@pytest.mark.proc
def test_an_array_that_is_spread_over_devices() -> None:
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    done = subprocess.run([sys.executable, "-c", SPREAD], env=environment, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and len(lines) == 2, done.stderr
    assert all("one device of the host" in line for line in lines)


async def test_derivatives_of_forward_mode_and_matrices_are_those_of_jax() -> None:
    x, v = draw(3, 2), draw(3, 2)

    def model(x: Any) -> Any:
        return jnp.sin(x) * x

    wrapped, at = wrap(model), ag.tensor(x)
    assert_close((await ag.jvp(wrapped, at, ag.tensor(v)))[1].numpy(), np.asarray(jax.jvp(model, (x,), (v,))[1]))
    wanted = np.asarray(jax.jacobian(model)(x))
    for transform in (ag.jacfwd, ag.jacrev, ag.jacobian):
        assert_close((await transform(wrapped, at)).numpy(), wanted)
    second = np.asarray(jax.hessian(lambda x: model(x).sum())(x))
    assert_close((await ag.hessian(lambda x: wrapped(x).sum(), at)).numpy(), second)
    assert_close((await ag.hvp(lambda x: wrapped(x).sum(), at, ag.tensor(v)))[1].numpy(), np.einsum("abcd,cd", second, v))
    assert_raises(ArgumentTypeError, r"batch of vmap.*whole batch", lambda: ag.vmap(wrapped)(at))

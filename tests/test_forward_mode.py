"""Forward mode: `jvp` through views and writes, custom functions, levels within levels, tasks, and what it refuses."""

from __future__ import annotations

import asyncio
import gc
import inspect
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.errors import (
    ArgumentTypeError,
    GradcheckError,
    GradientError,
    GraphError,
    InPlaceError,
    NoRuleError,
    OnceDifferentiableError,
    UnusedInputError,
)
from aiograd.running.devices import known_devices
from aiograd.tensors.passes import start_grad
from tests.toy_device import ToyDevice

rng = np.random.default_rng(0)
X, V, M = rng.normal(size=4), rng.normal(size=4), rng.normal(size=(4, 4))


def tensor(values: Any) -> Any:
    return ag.tensor(np.asarray(values, np.float64))


def close(found: Any, expected: Any, tolerance: float = 1e-9) -> None:
    np.testing.assert_allclose(found.detach().numpy(), expected, rtol=tolerance, atol=tolerance)


async def value(fn: Any, x: Any) -> Any:
    made = fn(x)
    return await made if inspect.iscoroutine(made) else made


async def check(fn: Any) -> Any:
    """Compare with differences, and the values with those of the function alone."""
    output, product = await ag.jvp(fn, tensor(X), tensor(V))
    ends = [(await value(fn, tensor(X + step * V))).detach().numpy() for step in (-2e-4, -1e-4, 1e-4, 2e-4)]
    close(product, (ends[0] - 8 * ends[1] + 8 * ends[2] - ends[3]) / 12e-4, 1e-7)
    np.testing.assert_array_equal(output.numpy(), (await value(fn, tensor(X))).detach().numpy())
    return product


# -------------------------------------------------------------------- one run, nothing recorded


async def test_the_function_runs_once_and_no_pass_runs(monkeypatch: Any) -> None:
    weight = tensor(M).requires_grad_()
    runs = []

    def fn(x: Any) -> Any:
        runs.append(x)
        y = np.tanh(weight @ x)
        assert y.grad_fn is None and not y.requires_grad
        return y

    monkeypatch.setattr("aiograd.tensors.passes.start_grad", None)
    await ag.jvp(fn, tensor(X), tensor(V))
    assert len(runs) == 1 and start_grad is not None


async def test_memory_does_not_grow_with_depth() -> None:
    weight = ag.tensor(np.eye(32, dtype=np.float32)).requires_grad_()
    x = ag.ones((128, 32))
    peaks = []
    for depth in (10, 400):

        def fn(x: Any, depth: int = depth) -> Any:
            for _ in range(depth):
                x = np.tanh(x @ weight.T)
            return x

        await ag.jvp(fn, x, x)
        gc.collect()
        tracemalloc.start()
        await ag.jvp(fn, x, x)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] <= 1.1 * peaks[0]


async def test_values_can_be_read() -> None:
    def fn(x: Any) -> Any:
        y = x * 2
        for _ in range(3):
            y = y * 0.5 if y[0] > 0.1 or bool(y.sum() > 100) else y + x
        return y * float(y.detach().numpy()[0] > -1e9) if y.sum().item() < 1e9 else x

    await check(fn)


@pytest.mark.parametrize("fn", [lambda x: x.max(), lambda x: np.maximum(x, x[::-1].detach()).sum(), lambda x: np.fmax(x, 1.0).sum(), np.median])
async def test_ties_are_the_rules_own(fn: Any) -> None:
    x = tensor([1.0, 1.0, 1.0])
    _, gradient = await ag.value_and_grad(fn, x)
    for direction in np.eye(3):
        close((await ag.jvp(fn, x, tensor(direction)))[1], gradient.numpy() @ direction)


# -------------------------------------------------------------------- views and writes


def nothing_selected(x: Any) -> Any:
    y = x * 2.0
    turned = y[::-1]
    turned[y > 100.0] = 1.0
    turned[y > 100.0] = x.sum()
    y *= x
    return y + turned * x


def buffers(x: Any) -> Any:
    whole = ag.zeros(6, dtype=np.float64)
    part, other = whole[1:5], whole[2:4]
    part[1] = x[0] * x[1]
    whole[3] = x[2] ** 2
    part *= 2
    column = other.reshape(2, 1)
    whole[4] += x[3]
    return np.concatenate([whole * whole, other, column[:, 0], part])


def written_through_a_view(x: Any) -> Any:
    y = x * 1.0
    first = y[:2]
    first += x[2:] * 3
    y[3] = 0.5
    return y * x


def chosen_elements(x: Any) -> Any:
    y = np.exp(x)
    y[ag.tensor([0, 2])] = x[:2]
    y.reshape(2, 2)[0] = x[0]
    y /= x
    y[y > 1] = 0.0
    z = ag.zeros(4, dtype=np.float64)
    np.multiply(x, x, out=z)
    return y * x + z


def shared_tangents(x: Any) -> Any:
    y = x + 1.0  # has the tangent of x
    y *= 2.0
    z = x + 0.0
    z[0] = 5.0
    return y * x + z


def stale(take: Any, write: Any, read: bool = False) -> Any:
    """A function that returns a part of a tensor that is written after it was taken."""

    def fn(x: Any) -> Any:
        y = (x * 2.0).reshape(1, 4)
        part = take(y)
        write(y)
        if read:
            with ag.no_grad():
                part + 1
        return part

    return fn


TAKES: dict[str, Any] = {
    "slice": lambda y: y[:, 1:], "flatten": lambda y: y.flatten(), "squeeze": lambda y: y.squeeze(), "unbind": lambda y: y[0].unbind()[1],
    "split": lambda y: y[0].split(2)[1], "movedim": lambda y: y.movedim(0, 1), "windows": lambda y: y.unfold(1, 2, 1),
    "cpu": lambda y: y.cpu(), "to": lambda y: y.to("cpu"), "view of view": lambda y: y[0][1:].reshape(3, 1),
}  # fmt: skip


def masked(y: Any) -> None:
    y[y > 0] = 0.5


def quietly(y: Any) -> None:
    with ag.no_grad():
        y *= 3.0


@pytest.mark.parametrize("name", TAKES)
async def test_outputs_have_the_tangents_of_what_was_written_last(name: str) -> None:
    for write in (lambda y: y.mul_(3.0), masked, lambda y: y.copy_(y.flip(1) * 3.0)):
        for read in (False, True):
            fn = stale(TAKES[name], write, read)
            product = await check(fn)
            close((await (await ag.linearize(fn, tensor(X)))[1](tensor(V))), product.numpy())
            close((await ag.jacfwd(fn, tensor(X))), (await ag.jacrev(fn, tensor(X))).numpy())
            compiled = ag.compile(fn)
            for _ in range(3):
                close((await ag.jvp(compiled, tensor(X), tensor(V)))[1], product.numpy())
    _, product = await ag.hvp(lambda x: stale(TAKES[name], masked)(x * x).sum(), tensor(X), tensor(V))
    _, twice = await ag.hvp(lambda x: (stale(TAKES[name], lambda y: y.mul_(x.reshape(1, 4)))(x) * 1).sum(), tensor(X), tensor(V))
    _, plain = await ag.hvp(lambda x: TAKES[name]((x * 2.0 * x).reshape(1, 4)).sum(), tensor(X), tensor(V))
    close(twice, plain.numpy())
    assert not product.numpy()[X != 0].any()


async def test_a_pass_within_takes_the_tangent_of_what_was_written_last() -> None:
    async def fn(x: Any) -> Any:
        y = x * 2.0
        part = y[1:]
        y.mul_(3.0)
        value, gradient = await ag.value_and_grad(lambda part: (part * part).sum(), part)
        return value + gradient

    _, product = await ag.jvp(fn, tensor(X), tensor(V))
    close(product, 72.0 * (X[1:] * V[1:]).sum() + 12.0 * V[1:])


async def test_a_write_without_recording_leaves_tangents_as_they_were() -> None:
    def through_the_part(x: Any) -> Any:
        y = x * 2.0
        part = y[1:]
        y *= 2.0
        quietly(part)
        return y, part

    def through_the_whole(x: Any) -> Any:
        y = x * 2.0
        part = y[1:]
        quietly(y)
        return y, part

    for fn in (through_the_part, through_the_whole):
        _, tangents = await ag.jvp(fn, tensor(X), tensor(V))
        for tangent, jacobian in zip(tangents, await ag.jacrev(fn, tensor(X)), strict=True):
            close(tangent, jacobian.numpy() @ V)


@pytest.mark.parametrize("fn", [buffers, written_through_a_view, chosen_elements, shared_tangents, nothing_selected])
async def test_writes_in_place(fn: Any) -> None:
    await check(fn)


async def test_a_tensor_of_the_caller_that_is_written_is_plain_afterwards() -> None:
    whole = ag.zeros(3, dtype=np.float64)
    part = whole[1:]

    def fn(x: Any) -> Any:
        part[0] = x[0] * x[1]
        return whole * 2

    _, product = await ag.jvp(fn, tensor(X), tensor(V))
    close(product, [0, 2 * (X[0] * V[1] + X[1] * V[0]), 0])
    close(whole + 0, [0, X[0] * X[1], 0])
    close(part + 0, [X[0] * X[1], 0])


async def test_inputs_may_not_be_written() -> None:
    for write in (lambda x: x.__iadd__(1.0), lambda x: x[1:].__setitem__(0, 1.0)):
        x = tensor(X)
        with pytest.raises(InPlaceError, match="an input of the function that jvp"):
            await ag.jvp(write, x, tensor(V))
        close(x, X)


async def test_detach_and_no_grad_stop_tangents_as_they_stop_gradients() -> None:
    def fn(x: Any) -> Any:
        with ag.no_grad():
            square = x * x
        return square * x + x.detach() * x

    _, product = await ag.jvp(fn, tensor(X), tensor(V))
    close(product, (X * X + X) * V)
    _, (pulled,) = await ag.vjp(fn, (tensor(X),), tensor(V))
    close(product, pulled.numpy())


async def test_running_statistics_take_values() -> None:
    norm = ag.nn.BatchNorm1d(3).train()
    x = rng.normal(size=(5, 3)).astype(np.float32)
    await ag.jvp(norm, ag.tensor(x), ag.tensor(x))
    np.testing.assert_allclose(norm.running_mean.numpy(), 0.1 * x.mean(0), rtol=1e-5)


async def test_arrays_of_a_device() -> None:
    products = []
    with ToyDevice("toy:0"):
        for name in ("cpu", "toy:0"):
            weight = tensor(M).to(name)

            def fn(x: Any, weight: Any = weight) -> Any:
                y = np.tanh(weight @ x) + x
                y[0] = x[1]
                return ag.nn.functional.softmax(y, -1)

            async def gradient(x: Any, fn: Any = fn) -> Any:
                return (await ag.value_and_grad(lambda x: (fn(x) * x).sum(), x))[1]

            for function in (fn, gradient):
                _, product = await ag.jvp(function, tensor(X).to(name), tensor(V).to(name))
                await product
                assert product.device == name
                products.append(product.cpu().numpy())
    np.testing.assert_allclose(products[:2], products[2:], rtol=1e-12)


async def test_a_profile_has_the_call_as_a_scope() -> None:
    with ag.profiler.profile() as profile:
        await ag.jvp(np.sin, tensor(X), tensor(V))
    assert "jvp" in [event.name for event in profile.events if event.category == "scope"]


# -------------------------------------------------------------------- levels


async def derivative(fn: Any, x: Any) -> Any:
    return (await ag.jvp(fn, x, ag.ones_like(x)))[1]


async def test_levels_within_levels() -> None:
    async def mixed(x: Any) -> Any:
        return await derivative(lambda y: y**4 * x, x)

    output, product = await ag.jvp(mixed, tensor(2.0), tensor(1.0))
    close(output, 64.0)
    close(product, 128.0)

    async def third(x: Any) -> Any:
        return await derivative(lambda y: derivative(lambda z: derivative(lambda w: np.sin(w) * w, z), y), x)

    close(await third(tensor(0.7)), -3 * np.sin(0.7) - 0.7 * np.cos(0.7))


async def test_perturbations_are_not_confused() -> None:
    async def fn(x: Any) -> Any:
        return x * await derivative(lambda y: x + y, tensor(1.0))

    close((await ag.jvp(fn, tensor(3.0), tensor(1.0)))[1], 1.0)


async def gradient_of_inputs(x: Any) -> Any:
    return (await ag.value_and_grad(lambda x: (np.sin(x) * x**3).sum() + x.prod(), x))[1]


async def gradient_of_captured(x: Any) -> Any:
    return (await ag.value_and_grad(lambda w: (np.tanh(w * x) * x).sum(), tensor(V)))[1]


async def gradient_by_hand(x: Any) -> Any:
    leaf = tensor(V).requires_grad_()
    with ag.enable_grad():
        loss = (np.tanh(leaf * x) * x).sum()
    return (await ag.grad(loss, leaf))[0]


async def gradient_through_a_checkpoint(x: Any) -> Any:
    return (await ag.value_and_grad(lambda x: ag.checkpoint(lambda y: (np.tanh(tensor(M) @ y) * y).sum(), x), x))[1]


async def gradient_with_writes(x: Any) -> Any:
    def loss(x: Any) -> Any:
        y = x * 1.5
        y[1:] *= x[1:]
        return (y * x).sum()

    return (await ag.value_and_grad(loss, x))[1]


@pytest.mark.parametrize("fn", [gradient_of_inputs, gradient_of_captured, gradient_by_hand, gradient_through_a_checkpoint, gradient_with_writes])
async def test_passes_within(fn: Any) -> None:
    await check(fn)


async def test_products_can_be_differentiated() -> None:
    x, scale = tensor(X).requires_grad_(), tensor(2.0).requires_grad_()
    _, product = await ag.jvp(lambda x: (np.sin(x) * x * scale).sum(), x, tensor(V), create_graph=True)
    by_x, by_scale = await ag.grad(product, (x, scale))
    close(by_x, 2 * (2 * np.cos(X) - X * np.sin(X)) * V)
    close(by_scale, ((np.sin(X) + X * np.cos(X)) * V).sum())


async def test_vmap_inside_and_outside() -> None:
    rows = rng.normal(size=(5, 4))

    def inside(x: Any) -> Any:
        return ag.vmap(lambda row: (row * row).sum() + x[0, 0])(x)

    _, product = await ag.jvp(inside, tensor(rows), tensor(rows))
    close(product, 2 * (rows * rows).sum(1) + rows[0, 0])

    def solved(x: Any) -> Any:
        return np.linalg.inv(np.outer(x, x) + np.eye(4)) @ ag.nn.functional.softmax(x, 0)

    async def column(v: Any) -> Any:
        return (await ag.jvp(solved, tensor(X), v))[1]

    columns = await ag.vmap(column)(tensor(np.eye(4)))
    close(columns, (await ag.jacobian(solved, tensor(X))).numpy().T)

    async def columns_at(x: Any) -> Any:  # a batch of tangents and values of another call meet in each rule
        async def column(v: Any) -> Any:
            return (await ag.jvp(lambda x: np.sin(x) * x[0] * WithJvp.apply(x, 1.0) / x.max(), x, v))[1]

        return await ag.vmap(column)(tensor(np.eye(4)))

    await check(columns_at)


async def test_checkpoints_pass_through() -> None:
    weight = tensor(M)
    await check(lambda x: ag.checkpoint(lambda y: np.tanh(weight @ y) * y, x))

    async def region(y: Any) -> Any:
        await asyncio.sleep(0)
        return np.tanh(weight @ y)

    async def fn(x: Any) -> Any:
        return await ag.checkpoint(region, x)

    await check(fn)
    x = tensor(X).requires_grad_()
    grads = []
    for function in (lambda y: ag.checkpoint(lambda y: np.tanh(weight @ y) * y, y), lambda y: np.tanh(weight @ y) * y):
        _, product = await ag.jvp(function, x, tensor(V), create_graph=True)
        grads.append((await ag.grad(product.sum(), x))[0].numpy())
    np.testing.assert_allclose(*grads, rtol=1e-12)


# -------------------------------------------------------------------- tasks


def levels() -> list[str]:
    return [name for name in known_devices() if name.startswith("jvp:")]


async def test_a_thousand_calls_at_once() -> None:
    async def fn(x: Any) -> Any:
        await asyncio.sleep(0)
        y = x * x
        await asyncio.sleep(0)
        return y * x

    found = await asyncio.gather(*(ag.jvp(fn, tensor(float(i)), tensor(1.0)) for i in range(1000)))
    for i, (_, product) in enumerate(found):
        close(product, 3.0 * i * i)
    assert levels() == []


async def test_a_call_that_is_cancelled_or_fails_leaves_nothing() -> None:
    async def waits(x: Any) -> Any:
        await asyncio.Event().wait()

    task = asyncio.ensure_future(ag.jvp(waits, tensor(1.0)))
    await asyncio.sleep(0)
    assert len(levels()) == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(ZeroDivisionError):
        await ag.jvp(lambda x: 1 / 0, tensor(1.0))
    assert levels() == []


USES: dict[str, Callable[[Any], Any]] = {
    "add": lambda y: y + 1, "sum": lambda y: y.sum(), "numpy": lambda y: y.numpy(), "index": lambda y: y[0], "beside": lambda y: ag.ones(4) * y,
    "item": lambda y: y.sum().item(), "write": lambda y: y.__setitem__(0, 1.0),
}  # fmt: skip


@pytest.mark.parametrize("use", USES.values(), ids=USES)
async def test_a_tensor_kept_beyond_its_call_says_so(use: Any) -> None:
    kept = []
    await ag.jvp(lambda x: kept.append(x * 2) or x, tensor(X), tensor(V))
    with pytest.raises(GraphError, match="has ended"):
        use(kept[0])


# -------------------------------------------------------------------- custom functions


class Cube(ag.Function):
    """``k * x**3`` by numpy, so that only its rules give derivatives."""

    @staticmethod
    def forward(ctx: Any, x: Any, k: float) -> Any:
        ctx.save_for_backward(x)
        ctx.k = k
        return ag.tensor(k * x.numpy() ** 3)

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        (x,) = ctx.saved_tensors
        return 3 * ctx.k * g * x * x, None


class WithJvp(Cube):
    @staticmethod
    def jvp(ctx: Any, t: Any, none: Any) -> Any:
        assert none is None and ctx.needs_input_grad == (True, False)
        (x,) = ctx.saved_tensors
        return 3 * ctx.k * t * x * x


class AwaitedBackward(Cube):
    @staticmethod
    async def backward(ctx: Any, g: Any) -> Any:
        await asyncio.sleep(0)
        return Cube.backward(ctx, g)


class AwaitedJvp(Cube):
    @staticmethod
    async def jvp(ctx: Any, t: Any, _: Any) -> Any:
        await asyncio.sleep(0)
        (x,) = ctx.saved_tensors
        return 3 * ctx.k * t * x * x


class AwaitedForward(Cube):
    @staticmethod
    async def forward(ctx: Any, x: Any, k: float) -> Any:
        await asyncio.sleep(0)
        return Cube.forward(ctx, x, k)


class FunctionsInBackward(Cube):
    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        (x,) = ctx.saved_tensors
        return 3 * ctx.k * g * AwaitedBackward.apply(x, 1.0) / x, None


@pytest.mark.parametrize("function", [Cube, WithJvp, AwaitedBackward, AwaitedJvp, AwaitedForward, FunctionsInBackward])
async def test_a_custom_function(function: Any) -> None:
    async def fn(x: Any) -> Any:
        y = function.apply(np.sin(x), 2.0)
        return (await y if inspect.iscoroutine(y) else y) * x

    async def gradient(x: Any) -> Any:
        async def loss(x: Any) -> Any:
            return (await fn(x)).sum()

        return (await ag.value_and_grad(loss, x))[1]

    async def along(v: Any) -> Any:
        return (await ag.jvp(fn, tensor(X), v))[1]

    await check(fn)
    await check(lambda x: derivative(fn, x))
    await check(gradient)
    columns = await ag.vmap(along)(tensor(np.eye(4)))
    close(columns, np.diag((await along(tensor(np.ones(4)))).numpy()))
    x = tensor(X).requires_grad_()
    _, product = await ag.jvp(fn, x, tensor(V), create_graph=True)
    _, expected = await ag.jvp(lambda x: 2 * np.sin(x) ** 3 * x, x, tensor(V), create_graph=True)
    close((await ag.grad(product.sum(), x))[0], (await ag.grad(expected.sum(), x))[0].numpy())


class Nested(ag.Function):
    """Two arguments, two outputs of which one is nested; what is saved is an output and an argument."""

    @staticmethod
    def forward(ctx: Any, x: Any, y: Any) -> Any:
        z = np.exp(x)
        ctx.save_for_backward(z, y)
        return z, {"product": y * z}

    @staticmethod
    def backward(ctx: Any, gz: Any, gp: Any) -> Any:
        z, y = ctx.saved_tensors
        return gz * z + gp["product"] * y * z, gp["product"] * z


class NestedJvp(Nested):
    @staticmethod
    def jvp(ctx: Any, tx: Any, ty: Any) -> Any:
        z, y = ctx.saved_tensors
        product = (0 if tx is None else tx * z * y) + (0 if ty is None else ty * z)
        return None if tx is None else tx * z, {"product": product}


class Doubled(ag.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        x *= 2
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return 2 * g


@pytest.mark.parametrize("function", [Nested, NestedJvp])
async def test_a_custom_function_of_several(function: Any) -> None:
    def fn(x: Any, first: Any) -> Any:
        z, rest = function.apply(first(x), np.sin(x))
        return z * rest["product"]

    await check(lambda x: fn(x, lambda x: x))
    await check(lambda x: fn(x, lambda x: tensor(X)))
    await check(lambda x: derivative(lambda x: fn(x, lambda x: x), x))


async def test_a_custom_function_that_modifies_its_argument() -> None:
    def fn(x: Any) -> Any:
        y = x * x
        Doubled.apply(y[1:])
        z = x * 1.0
        return y * Doubled.apply(z) * z

    await check(fn)


class Once(Cube):
    backward = ag.once_differentiable(Cube.backward)


class OnceWithJvp(Once):
    jvp = WithJvp.jvp


class Unrecorded(Cube):
    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        (x,) = ctx.saved_tensors
        return ag.tensor(3 * g.detach().numpy() * x.numpy() ** 2), None


class WrongShape(Cube):
    @staticmethod
    def jvp(ctx: Any, t: Any, _: Any) -> Any:
        return t[:2]


class WrongNumber(Cube):
    @staticmethod
    def jvp(ctx: Any, t: Any, _: Any) -> Any:
        return t, t


@pytest.mark.parametrize(
    ("function", "error", "text"),
    [
        (Once, NoRuleError, "Once: its backward is once_differentiable"),
        (Unrecorded, NoRuleError, "Unrecorded: its backward computes"),
        (WrongShape, GradientError, r"WrongShape.jvp returned float64\[2\] for output 0"),
        (WrongNumber, GradientError, "WrongNumber.jvp returned 2 tangents for 1 outputs"),
    ],
)
async def test_custom_functions_without_a_tangent(function: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        await ag.jvp(lambda x: function.apply(x, 1.0), tensor(X), tensor(V))
    assert levels() == []


async def test_a_backward_that_is_differentiable_once_is_not_followed() -> None:
    async def gradient(x: Any) -> Any:
        return (await ag.value_and_grad(lambda x: OnceWithJvp.apply(x, 1.0).sum(), x))[1]

    with pytest.raises(OnceDifferentiableError):
        await ag.jvp(gradient, tensor(X), tensor(V))


# -------------------------------------------------------------------- refusals, strict, gradcheck


async def test_values_cannot_leave_with_their_tangent() -> None:
    for leave in (lambda x: ag.tensor(np.asarray(x) * 2), lambda x: ag.tensor(np.array([x[0], x[1]])), lambda x: x.clip(x[0].item(), x).astype(int)):
        with pytest.raises((GraphError, ArgumentTypeError)):
            await ag.jvp(leave, tensor(X), tensor(V))


async def test_strict_names_the_input() -> None:
    inputs = tensor(X), tensor(V)
    close((await ag.jvp(lambda x, y: x * 2, inputs, inputs))[1], 2 * X)
    with pytest.raises(UnusedInputError, match="input 1"):
        await ag.jvp(lambda x, y: x * 2, inputs, inputs, strict=True)
    close((await ag.jvp(lambda x, y: x * y, inputs, inputs, strict=True))[1], 2 * X * V)


class WrongJvp(WithJvp):
    @staticmethod
    def jvp(ctx: Any, t: Any, _: Any) -> Any:
        (x,) = ctx.saved_tensors
        return 2 * t * x


async def test_gradcheck_looks_at_forward_mode() -> None:
    x = tensor(X).requires_grad_()
    assert await ag.gradcheck(lambda x: WrongJvp.apply(x, 1.0), (x,))
    with pytest.raises(GradcheckError, match="in forward mode"):
        await ag.gradcheck(lambda x: WrongJvp.apply(x, 1.0), (x,), check_forward_ad=True)
    assert await ag.gradcheck(lambda x: WithJvp.apply(x, 1.0), (x,), check_forward_ad=True)
    z = ag.tensor(X + 1j * V).requires_grad_()
    assert await ag.gradcheck(lambda z, x: (z * z * x, abs(z), np.argsort(x), np.fft.fft(z)), (z, x), check_forward_ad=True)


async def test_a_function_returns_an_array_beside_an_object() -> None:
    class Doubled(ag.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.numpy() * 2, object()

        @staticmethod
        def backward(ctx: Any, grad: Any, _: Any) -> Any:
            return grad * 2

    _, product = await ag.jvp(lambda x: Doubled.apply(x)[0], ag.ones(3), ag.ones(3))
    assert product.tolist() == [2, 2, 2]

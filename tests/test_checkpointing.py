"""`checkpoint`: the same gradients to the bit, less memory, one recomputation per pass, and errors where the function did something else."""

from __future__ import annotations

import asyncio
import re
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.functional.checkpointing import checkpoint
from aiograd.ops import ROWS
from aiograd.running.modes import current_mode
from aiograd.running.offloading import offload
from aiograd.running.random import Generator, default_generator, seed
from tests.support import assert_awaiting_raises, assert_raises, cancel
from tests.tolerance import assert_close

rng = np.random.default_rng(0)
X, W = rng.normal(size=(3, 4)), rng.normal(size=(4, 4))


def leaves() -> tuple[Any, Any]:
    return ag.tensor(X, requires_grad=True), ag.tensor(W, requires_grad=True)


def same(found: Any, expected: Any) -> None:
    """Bitwise."""
    for f, e in zip(found, expected, strict=True):
        np.testing.assert_array_equal(f.detach().numpy(), e.detach().numpy())


class Square(ag.Function):
    """Saves its input and its output."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        y = x * x
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    async def backward(ctx: Any, g: Any) -> Any:
        x, y = ctx.saved_tensors
        await asyncio.sleep(0)
        return g * (2.0 * x + 0.0 * y)


def body(x: Any, w: Any) -> Any:
    """Rows that save arguments, outputs, several of both, none; a fused row with residuals; a custom function."""
    h = np.tanh(x @ w) * np.exp(x)
    h = Square.apply(h) + np.concatenate([h[:1], h[1:]])
    h = np.einsum("ab,cb->ac", h, w)  # type: ignore[arg-type]
    h = ROWS["layer_norm"](h, w[0], w[1])
    return np.sqrt(h * h + 1.0).sum(axis=1), (h / (1.0 + x * x)).sum()


async def body_async(x: Any, w: Any) -> Any:
    await asyncio.sleep(0)
    first, second = body(x, w)
    await asyncio.sleep(0)
    return first, second


async def value(result: Any) -> Any:
    return await result if asyncio.iscoroutine(result) else result


@pytest.fixture(params=[body, body_async], ids=["def", "async def"])
def fn(request: pytest.FixtureRequest) -> Any:
    return request.param


# The same gradients


async def test_gradients_are_bitwise_those_without_checkpoint(fn: Any) -> None:
    x, w = leaves()
    outputs = await value(fn(x, w))
    seeds = [ag.tensor(rng.normal(size=output.shape)) for output in outputs]
    expected = await ag.grad(outputs, [x, w], seeds)
    again = await value(checkpoint(fn, x, w))
    same(again, outputs)
    same(await ag.grad(again, [x, w], seeds), expected)

    outputs = await value(checkpoint(fn, x, w))
    await ag.backward(outputs, seeds)
    same([x.grad, w.grad], expected)


async def test_inputs_of_a_pass_can_be_chosen(fn: Any) -> None:
    x, w = leaves()
    (gx,) = await ag.grad((await value(fn(x, w)))[1], x)
    (found,) = await ag.grad((await value(checkpoint(fn, x, w)))[1], x)
    same([found], [gx])
    await (await value(checkpoint(fn, x, w)))[1].backward(inputs=[x])
    same([x.grad], [gx])
    assert w.grad is None


async def test_the_graph_can_be_kept_for_another_pass_and_is_spent_otherwise(fn: Any) -> None:
    x, w = leaves()
    y = (await value(checkpoint(fn, x, w)))[1]
    first = await ag.grad(y, [x, w], retain_graph=True)
    same(await ag.grad(y, [x, w]), first)
    await assert_awaiting_raises(ag.errors.GraphFreedError, None, ag.grad(y, [x, w]))


async def test_second_derivatives(fn: Any) -> None:
    async def second(result: Any) -> Any:
        first = await ag.grad((await value(result))[1], [x, w], create_graph=True)
        return await ag.grad(sum((g * g).sum() for g in first), [x, w])

    x, w = leaves()
    found = await second(checkpoint(fn, x, w))
    expected = await second(fn(x, w))
    for f, e in zip(found, expected, strict=True):
        assert_close(f.numpy(), e.numpy())


async def test_hooks_and_retained_gradients_inside_see_what_they_always_see() -> None:
    seen: list[Any] = []

    def hooked(x: Any) -> Any:
        h = np.tanh(x)
        if h.requires_grad:
            h.register_hook(lambda g: seen.append(g) or g * 10.0)
        return (h * h).sum()

    x, _ = leaves()
    (expected,) = await ag.grad(hooked(x), x)
    (found,) = await ag.grad(checkpoint(hooked, x), x)
    same([found, seen[1]], [expected, seen[0]])
    assert len(seen) == 2


# How often and where


def counted(function: Callable[..., Any]) -> tuple[Callable[..., Any], list[int]]:
    threads: list[int] = []

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        threads.append(threading.get_ident())
        return function(*args, **kwargs)

    return wrapper, threads


async def test_once_per_pass_and_on_the_executor() -> None:
    fn, threads = counted(body)
    x, w = leaves()
    y = checkpoint(fn, x, w)[1]
    assert threads == [threading.get_ident()]
    await ag.grad(y, [x, w], retain_graph=True)
    await ag.grad(y, [x, w])
    assert len(threads) == 3
    assert threading.get_ident() not in threads[1:]


async def test_coroutine_functions_are_computed_again_on_the_loop() -> None:
    threads: list[int] = []

    async def fn(x: Any) -> Any:
        threads.append(threading.get_ident())
        return np.tanh(x).sum()

    x, _ = leaves()
    await (await checkpoint(fn, x)).backward()
    assert threads == [threading.get_ident()] * 2


async def test_a_function_that_returns_a_coroutine() -> None:
    def fn(x: Any) -> Any:
        return body_async(np.tanh(x), w)

    x, w = leaves()
    expected = await ag.grad((await fn(x))[1], [x, w])
    same(await ag.grad((await checkpoint(fn, x))[1], [x, w]), expected)


async def test_nothing_is_computed_again_where_nothing_is_needed() -> None:
    fn, threads = counted(lambda x, w: x + w.sum())
    x, w = leaves()
    await checkpoint(fn, x, w).sum().backward()
    assert len(threads) == 1  # its rules need no values

    fn, threads = counted(body)
    y = checkpoint(fn, x, w)[1] * w.sum()
    await ag.grad(y, [y], ag.tensor(1.0, dtype=np.float64))
    with ag.no_grad():
        checkpoint(fn, x, w)
    assert len(threads) == 2


@pytest.mark.parametrize("rounds", [0, 1, 5])
async def test_nodes_that_need_the_region_at_the_same_time_share_one_recomputation(rounds: int) -> None:
    running: list[int] = []

    async def fn(x: Any) -> Any:
        running.append(1)
        for _ in range(rounds):
            await asyncio.sleep(0)
        return np.exp(x), np.sin(x), np.tanh(x)

    x, _ = leaves()
    outputs = await checkpoint(fn, x)
    expected = await ag.grad([np.exp(x), np.sin(x), np.tanh(x)], x, [o.detach() for o in outputs])
    same(await ag.grad(outputs, x, [o.detach() for o in outputs]), expected)
    assert len(running) == 2


async def test_concurrent_passes_over_one_graph_each_compute_it() -> None:
    fn, threads = counted(body)
    x, w = leaves()
    y = checkpoint(fn, x, w)[1]
    results = await asyncio.gather(*(ag.grad(y, [x, w], retain_graph=True) for _ in range(4)))
    for result in results[1:]:
        same(result, results[0])
    assert len(threads) == 5


# Arguments


async def test_arguments_in_trees_and_by_name() -> None:
    def fn(parts: Any, *, more: Any, k: float, flag: Any = None) -> Any:
        assert flag is None
        a, (b, [c]) = parts
        return {"y": (a * b * c * more["d"]).sum() * k, "other": "thing"}

    a, b, c, d = (ag.tensor(rng.normal(size=(3,)), requires_grad=i != 2) for i in range(4))
    call = lambda f: f((a, (b, [c])), more={"d": d}, k=2.0)  # noqa: E731
    expected = await ag.grad(call(fn)["y"], [a, b, d])
    result = call(lambda *args, **kwargs: checkpoint(fn, *args, **kwargs))
    assert result["other"] == "thing"
    same(await ag.grad(result["y"], [a, b, d]), expected)


async def test_the_region_uses_tensors_that_are_no_arguments() -> None:
    x, w = leaves()
    expected = await ag.grad(np.exp(x @ w).sum(), [x, w])
    same(await ag.grad(checkpoint(lambda: np.exp(x @ w).sum()), [x, w]), expected)


async def test_an_argument_can_come_back_as_it_is() -> None:
    x, _ = leaves()
    h = x * 2.0
    assert checkpoint(lambda h: h, h) is h


@pytest.mark.parametrize("fn", [3, None, (lambda: (yield)), "text"])
def test_what_is_no_function_is_refused(fn: Any) -> None:
    assert_raises(ag.errors.ArgumentTypeError, "checkpoint: expected a function", checkpoint, fn)


async def test_hooks_that_are_disabled_refuse_it() -> None:
    with ag.graph.disable_saved_tensors_hooks("not here"), pytest.raises(ag.errors.GraphError, match="not here"):
        checkpoint(body, *leaves())


async def test_errors_of_the_first_call_come_through() -> None:
    def fails(x: Any) -> Any:
        raise KeyError("first")

    async def fails_later(x: Any) -> Any:
        raise KeyError("second")

    assert_raises(KeyError, "first", lambda: checkpoint(fails, leaves()[0]))
    await assert_awaiting_raises(KeyError, "second", checkpoint(fails_later, leaves()[0]))
    assert current_mode().saved_hooks is None


# Nesting


async def test_checkpoints_nest(fn: Any) -> None:
    calls: list[str] = []

    def outer(x: Any, w: Any) -> Any:
        calls.append("outer")

        def inner(h: Any, w: Any) -> Any:
            calls.append("inner")
            return np.exp(np.sin(h @ w))

        h = np.tanh(x @ w)
        h = checkpoint(inner, h * h, w)
        return (h * np.cos(x)).sum() + checkpoint(inner, h, w).sum()

    x, w = leaves()
    expected = await ag.grad(outer(x, w), [x, w])
    y = checkpoint(outer, x, w)
    calls.clear()
    same(await ag.grad(y, [x, w], retain_graph=True), expected)
    # the outer region once, with both inner ones in it, and each inner one for its own values
    assert sorted(calls) == ["inner"] * 4 + ["outer"]
    same(await ag.grad(y, [x, w]), expected)


async def test_a_tower_of_checkpoints() -> None:
    def level(x: Any, k: int) -> Any:
        h = np.tanh(x * 1.1)
        return h * h if k == 0 else np.sin(checkpoint(level, h, k - 1)) * h

    x, _ = leaves()
    (found,) = await ag.grad(checkpoint(level, x, 5).sum(), x)

    def plain(x: Any, k: int) -> Any:
        h = np.tanh(x * 1.1)
        return h * h if k == 0 else np.sin(plain(h, k - 1)) * h

    same([found], await ag.grad(plain(x, 5).sum(), x))


async def test_passes_inside_of_a_region() -> None:
    async def penalty(x: Any, w: Any) -> Any:
        y = np.tanh(x @ w)
        (g,) = await ag.grad(y.sum(), w, create_graph=True)
        return (g * g).sum() + y.sum()

    x, w = leaves()
    expected = await ag.grad(await penalty(x, w), [x, w])
    same(await ag.grad(await checkpoint(penalty, x, w), [x, w]), expected)


async def test_hooks_of_the_caller_get_the_arguments() -> None:
    store: list[Any] = []

    async def fetch(number: int) -> Any:
        await asyncio.sleep(0)
        return ag.tensor(store[number])

    def pack(tensor: Any) -> int:
        store.append(tensor.detach().numpy().copy())
        return len(store) - 1

    x, w = leaves()
    expected = await ag.grad(np.exp(np.tanh(x @ w)).sum(), [x, w])
    h = x @ w
    with ag.graph.saved_tensors_hooks(pack, fetch):
        y = checkpoint(lambda h: np.exp(np.tanh(h)).sum(), h)
    assert len(store) == 1
    kept = weakref.ref(h._data)
    del h
    assert kept() is None
    same(await ag.grad(y, [x, w]), expected)


async def test_many_in_a_row_are_freed_without_recursion() -> None:
    x = ag.tensor(1.0, dtype=np.float64, requires_grad=True)
    y = x
    for _ in range(20_000):
        y = checkpoint(np.sin, y)  # type: ignore[arg-type]
    del y


# The same again: modes and random numbers


async def test_random_numbers_are_repeated_and_generators_are_not_moved(fn: Any) -> None:
    generator = Generator(3)
    seed(4)

    def drops(x: Any, w: Any) -> Any:
        h = np.tanh(x) * generator.dropout_mask(x.shape, 0.5, dtype=np.float64)
        h = h * default_generator().normal(x.shape, dtype=np.float64)
        return fn(h, w)

    x, w = leaves()
    before = generator.state_dict(), default_generator().state_dict()
    expected = await ag.grad((await value(drops(x, w)))[1], [x, w])
    generator.load_state_dict(before[0])
    default_generator().load_state_dict(before[1])
    y = (await value(checkpoint(drops, x, w)))[1]
    drawn = generator.normal((3,)).tolist()
    after = generator.state_dict(), default_generator().state_dict()
    same(await ag.grad(y, [x, w], retain_graph=True), expected)
    same(await ag.grad(y, [x, w]), expected)
    assert (generator.state_dict(), default_generator().state_dict()) == after
    assert drawn


async def test_tasks_that_share_a_generator_while_regions_wait() -> None:
    generator = Generator(3)
    turns = asyncio.Barrier(2)

    async def region(x: Any) -> Any:
        for _ in range(3):
            x = x * generator.normal(x.shape, dtype=np.float64)
            await turns.wait()
        return x.sum()

    async def step() -> None:
        x = ag.tensor(np.ones(50), requires_grad=True)
        y = await checkpoint(region, x)
        (g,) = await ag.grad(y, x)
        np.testing.assert_allclose(g.numpy().sum(), y.item())

    await asyncio.gather(step(), step())


async def test_nested_regions_draw_the_same() -> None:
    generator = Generator(3)

    def inner(x: Any) -> Any:
        return np.exp(x * generator.normal(x.shape, dtype=np.float64))

    def outer(run: Any) -> Callable[[Any], Any]:
        return lambda x: (run(inner, np.tanh(x)) * generator.normal(x.shape, dtype=np.float64) * run(inner, x)).sum()

    x, _ = leaves()
    state = generator.state_dict()
    expected = await ag.grad(outer(lambda f, x: f(x))(x), x)
    generator.load_state_dict(state)
    same(await ag.grad(checkpoint(outer(checkpoint), x), x), expected)


async def test_grad_mode_and_default_dtype_are_those_of_the_first_time() -> None:
    seen: list[Any] = []

    def fn(x: Any) -> Any:
        seen.append((ag.is_grad_enabled(), ag.get_default_dtype(), current_mode().anomaly))
        with ag.no_grad():
            scale = np.tanh(x)
        return (np.exp(x) * scale * ag.tensor([2.0])).sum()

    x, _ = leaves()
    ag.set_default_dtype(np.float64)
    y = checkpoint(fn, x)
    ag.set_default_dtype(np.float32)
    with ag.detect_anomaly():
        await y.backward()
    assert seen == [(True, np.float64, None)] * 2


async def test_a_region_recorded_with_gradients_off_outside_and_on_inside() -> None:
    x, _ = leaves()

    @ag.enable_grad()
    def fn(x: Any) -> Any:
        return np.exp(x).sum()

    with ag.no_grad():
        y = checkpoint(fn, x)
    same(await ag.grad(y, x), [np.exp(x)])


async def test_a_region_recorded_on_another_thread() -> None:
    x, w = leaves()
    expected = await ag.grad(body(x, w)[1], [x, w])
    y = (await offload(checkpoint, body, x, w))[1]
    same(await ag.grad(y, [x, w]), expected)


# Something else the second time


async def refused(fn: Any, *args: Any, error: type[Exception] = ag.errors.CheckpointError) -> str:
    x, w = leaves()
    y = await value(checkpoint(fn, x * 1.0, w * 1.0, *args))
    caught = await assert_awaiting_raises(error, None, (y[1] if isinstance(y, tuple) else y).backward())
    assert x.grad is None
    assert w.grad is None
    assert "in the backward of" in "".join(caught.__notes__)
    return str(caught)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (lambda x, w: np.exp(x @ w).sum(), "saved 4 tensors in forward and 3 when"),
        (lambda x, w: np.exp(np.sin(np.cos(x @ w))).sum(), "saved 4 tensors in forward and 5 when"),
        (lambda x, w: np.exp(np.cos((x @ w)[:2])).sum(), r"float64\[3, 4\] on cpu as tensor 2 of 4 in forward, and float64\[2, 4\] on cpu when"),
        (lambda x, w: np.exp(np.cos((x @ w).float())).sum(), r"float64\[3, 4\] on cpu as tensor 2 of 4 in forward, and float32\[3, 4\] on cpu when"),
        (lambda x, w: np.exp(np.cos(x @ (w + x[0]))).sum(), "saved other values when it was computed again"),
    ],
    ids=["fewer", "more", "shape", "dtype", "values"],
)
@pytest.mark.parametrize("asynchronous", [False, True])
async def test_what_differs_is_named_with_both(second: Any, message: str, asynchronous: bool) -> None:
    versions = iter([lambda x, w: np.exp(np.cos(x @ w)).sum(), second])

    def fn(x: Any, w: Any) -> Any:
        return next(versions)(x, w)

    async def fn_async(x: Any, w: Any) -> Any:
        return fn(x, w)

    text = await refused(fn_async if asynchronous else fn)
    assert re.search(message, text)
    assert "fn" in text
    assert len(text) < 800


async def test_numbers_from_elsewhere_are_noticed() -> None:
    unseeded = np.random.default_rng(0)
    assert "saved other values" in await refused(lambda x, w: (x * unseeded.normal(size=(3, 4))).sum() + (x @ w).sum() ** 2)


async def test_order_that_depends_on_timing_is_noticed() -> None:
    waits = iter([(1, 5), (5, 1)])

    async def branch(x: Any, rounds: int) -> Any:
        for _ in range(rounds):
            await asyncio.sleep(0)
        return np.exp(x).sum()

    async def fn(x: Any, w: Any) -> Any:
        a, b = next(waits)
        return sum(await asyncio.gather(branch(x, a), branch(x * 2.0, b)))

    assert "saved other values" in await refused(fn)


async def test_an_error_the_second_time_keeps_its_type() -> None:
    calls: list[int] = []

    def fn(x: Any, w: Any) -> Any:
        calls.append(1)
        if len(calls) > 1:
            raise KeyError("gone")
        return np.exp(x @ w).sum()

    x, w = leaves()
    y = checkpoint(fn, x, w)
    caught = await assert_awaiting_raises(KeyError, "gone", y.backward())
    notes = "\n".join(caught.__notes__)
    assert "fn was computed again" in notes
    assert "ExpBackward" in notes
    assert x.grad is None


async def test_every_node_that_waits_gets_the_error() -> None:
    calls: list[int] = []

    async def fn(x: Any) -> Any:
        calls.append(1)
        for _ in range(3):
            await asyncio.sleep(0)
        if len(calls) > 1:
            raise KeyError("gone")
        return np.exp(x), np.sin(x)

    x, _ = leaves()
    a, b = await checkpoint(fn, x)
    await assert_awaiting_raises(KeyError, "gone", (a.sum() + b.sum()).backward())
    assert len(calls) == 2
    assert x.grad is None


async def test_values_modified_in_place_are_noticed() -> None:
    x, w = leaves()
    h = x * 1.0
    y = checkpoint(lambda h: (h + 1.0).sum() * np.tanh(h).sum(), h)
    h.detach().add_(1e-9)
    await assert_awaiting_raises(ag.errors.ModifiedError, r"an argument of the checkpointed function", y.backward())

    y = checkpoint(lambda x: np.exp(x @ w).sum(), x)
    with ag.no_grad():
        w += 1e-9
    await assert_awaiting_raises(ag.errors.ModifiedError, r"tensor 1 saved by the checkpointed function", y.backward())
    assert x.grad is None


async def test_a_region_that_modifies_what_it_saved() -> None:
    def fn(x: Any) -> Any:
        h = np.exp(x)
        z = h.sum()
        h += 1.0
        return z + h.sum()

    x, _ = leaves()
    await assert_awaiting_raises(ag.errors.ModifiedError, None, fn(x).backward())
    await assert_awaiting_raises(ag.errors.ModifiedError, None, checkpoint(fn, x).backward())


async def test_a_region_that_modifies_its_argument() -> None:
    def fn(h: Any) -> Any:
        h += 1.0
        return np.exp(h).sum()

    x, _ = leaves()
    y = checkpoint(fn, x * 1.0)
    await assert_awaiting_raises(ag.errors.ModifiedError, "argument", y.backward())


async def test_in_place_operations_on_its_own_tensors_are_fine() -> None:
    def fn(x: Any) -> Any:
        h = x * 2.0
        h += x
        h[0] = 1.0
        return np.exp(h).sum()

    x, _ = leaves()
    (expected,) = await ag.grad(fn(x), x)
    same(await ag.grad(checkpoint(fn, x), x), [expected])


async def test_unpacking_outside_of_a_pass_is_refused() -> None:
    x, _ = leaves()
    y = checkpoint(Square.apply, x)
    assert_raises(ag.errors.GraphError, "in a backward pass only", y.grad_fn.unpack_saved)


# Memory


class Tracked:
    """Counts which arrays of a region are alive."""

    def __init__(self) -> None:
        self.refs: list[weakref.ref[Any]] = []

    def __call__(self, tensor: Any) -> Any:
        self.refs.append(weakref.ref(tensor._data))
        return tensor

    @property
    def alive(self) -> int:
        return sum(ref() is not None for ref in self.refs)


def layers(track: Tracked, x: Any, count: int = 6) -> Any:
    for _ in range(count):
        x = track(np.exp(track(np.tanh(x))))
    return x


@pytest.mark.usefixtures("no_collector")
async def test_saved_values_are_not_kept() -> None:
    x, _ = leaves()
    plain, track = Tracked(), Tracked()
    y = layers(plain, x)
    assert plain.alive == 12
    z = checkpoint(layers, track, x)
    assert track.alive == 1  # the result
    assert len(track.refs) == 12
    del y, z


async def test_no_node_of_a_region_holds_an_array(fn: Any) -> None:
    x, w = leaves()
    stack: list[Any] = [output.grad_fn for output in await value(checkpoint(fn, x, w))]
    seen: dict[str, Any] = {}
    while stack:
        node = stack.pop()
        if node is not None and not node.is_leaf:
            seen[node.name] = node._saved
            stack.extend(node.next_nodes)
    assert {"MulBackward", "ExpBackward", "EinsumBackward", "LayerNormBackward", "SquareBackward"} <= seen.keys()
    for name, saved in seen.items():
        held: list[Any] = [*getattr(saved, "values", saved)]
        while held:
            entry = held.pop()
            assert not isinstance(entry, (np.ndarray, ag.Tensor)), name
            held.extend(entry if isinstance(entry, (tuple, list)) else ())


@pytest.mark.usefixtures("no_collector")
async def test_one_region_at_a_time_is_there_in_backward_and_goes_node_by_node() -> None:
    x, _ = leaves()
    track = Tracked()
    y = x
    for _ in range(4):
        y = checkpoint(layers, track, y)
    track.refs.clear()
    most: list[int] = []
    # a hook on every region's first node runs when the rest of the region has been through
    node: Any = y.grad_fn
    while node is not None and node.next_nodes:
        node.register_hook(lambda *_: most.append(track.alive))
        node = node.next_nodes[0]
    await y.sum().backward()
    assert len(track.refs) == 48
    assert len(most) == 48
    assert max(most) <= 13
    assert most[10] <= 3  # the first region is nearly through
    assert track.alive == 0


@pytest.mark.usefixtures("no_collector")
async def test_nested_regions_need_less_still() -> None:
    x, _ = leaves()
    track = Tracked()

    def outer(x: Any) -> Any:
        for _ in range(4):
            x = checkpoint(layers, track, x)
        return x

    y = checkpoint(outer, x)
    assert track.alive == 1
    await y.sum().backward()
    del y
    assert track.alive == 0


@pytest.mark.usefixtures("no_collector")
async def test_values_and_arguments_go_with_the_pass() -> None:
    track = Tracked()
    x = ag.tensor(X, requires_grad=True)
    argument = track(x * 2.0)
    y = checkpoint(layers, track, argument).sum()
    del argument
    assert track.alive == 1
    await ag.grad(y, x, retain_graph=True)
    assert track.alive == 1  # kept for another pass
    await y.backward()
    assert track.alive == 0


@pytest.mark.usefixtures("no_collector")
async def test_what_a_pass_does_not_take_goes_with_the_pass() -> None:
    x, w = leaves()
    track = Tracked()

    def fn(x: Any, w: Any) -> Any:
        return (layers(track, x) * layers(track, w).sum()).sum()

    y = checkpoint(fn, x, w)
    await ag.grad(y, x, retain_graph=True)
    assert track.alive == 0
    await ag.grad(y, w, retain_graph=True)
    assert track.alive == 0


@pytest.mark.usefixtures("no_collector")
async def test_a_failed_pass_keeps_nothing() -> None:
    x, _ = leaves()
    track = Tracked()

    def fn(x: Any) -> Any:
        h = layers(track, x)
        if h.requires_grad:
            h.register_hook(raises)
        return layers(track, h)

    def raises(g: Any) -> Any:
        raise KeyError("hook")

    y = checkpoint(fn, x).sum()
    await assert_awaiting_raises(KeyError, None, ag.grad(y, x, retain_graph=True))
    assert track.alive == 0


@pytest.mark.usefixtures("no_collector")
async def test_a_cancelled_pass_keeps_nothing_and_the_coroutine_is_cancelled() -> None:
    x, _ = leaves()
    track = Tracked()
    calls, ended = [0], asyncio.Event()
    waits = asyncio.Event()

    async def fn(x: Any) -> Any:
        calls[0] += 1
        h = layers(track, x)
        if calls[0] > 1:
            waits.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()
        return h.sum()

    y = await checkpoint(fn, x)
    running = asyncio.ensure_future(y.backward())
    await waits.wait()
    assert track.alive > 0
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert ended.is_set()
    del running
    await asyncio.sleep(0)  # in the step that gets it asyncio itself holds on to the cancellation, and that to the frames it went through
    assert x.grad is None
    assert track.alive == 0


async def test_cancelling_while_a_plain_function_is_computed_again() -> None:
    x, _ = leaves()
    loop, begun, release, calls = asyncio.get_running_loop(), asyncio.Event(), threading.Event(), [0]

    def fn(x: Any) -> Any:
        calls[0] += 1
        h = np.exp(x)
        if calls[0] > 1:
            loop.call_soon_threadsafe(begun.set)
            release.wait(30)
        return h.sum()

    y = checkpoint(fn, x)
    running = asyncio.ensure_future(y.backward(retain_graph=True))
    await begun.wait()
    await cancel(running)
    release.set()
    assert x.grad is None
    await y.backward()
    same([x.grad], [np.exp(x)])

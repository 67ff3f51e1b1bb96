"""One function on many argument sets: forward and backward at the same time, one node."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.errors import ArgumentError, ArgumentTypeError, GraphFreedError, OnceDifferentiableError
from aiograd.parallel import IsolatedContext, map_with_parallel_backward, run_isolated_backward, run_isolated_forward
from aiograd.testing import simulated_run
from aiograd.testing.virtual_clock import VirtualClock
from tests.support import assert_awaiting_raises, assert_raises, leaf


class Multiply(ag.Function):
    """x * y by a rule of its own."""

    @staticmethod
    def forward(ctx: Any, x: Any, y: Any) -> Any:
        ctx.save_for_backward(x, y)
        ctx.label = "kept"
        return x * y

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        x, y = ctx.saved_tensors
        return g * y if ctx.needs_input_grad[0] else None, g * x if ctx.needs_input_grad[1] else None


class SumAndDifference(ag.Function):
    """Two outputs, asynchronous both ways, with an argument that is no Tensor."""

    @staticmethod
    async def forward(ctx: Any, x: Any, y: Any, scale: float) -> Any:
        ctx.scale = scale
        await asyncio.sleep(0)
        return (x + y) * scale, (x - y) * scale

    @staticmethod
    async def backward(ctx: Any, s: Any, d: Any) -> Any:
        await asyncio.sleep(0)
        return (s + d) * ctx.scale, (s - d) * ctx.scale, None


async def test_values_and_gradients_are_those_of_the_calls_one_by_one() -> None:
    a, b, c = leaf([1, 2]), leaf([5, 7]), leaf([-1, 4])
    (p,), (q,) = await map_with_parallel_backward(Multiply, (a, b), (b * 2, c))
    await ((p * p).sum() + q.sum()).backward()
    got = [t.grad.numpy() for t in (a, b, c)]
    for t in (a, b, c):
        t.grad = None
    p, q = a * b, b * 2 * c
    await ((p * p).sum() + q.sum()).backward()
    for t, grad in zip((a, b, c), got, strict=True):
        np.testing.assert_array_equal(grad, t.grad.numpy())


async def test_outputs_come_in_order_a_bare_tensor_is_one_and_other_arguments_pass() -> None:
    a, b = leaf([1, 2]), leaf([3, 4])
    first, second = await map_with_parallel_backward(SumAndDifference, (a, b, 2.0), (b, a, 1.0))
    np.testing.assert_array_equal(first[1].detach().numpy(), [-4, -4])
    np.testing.assert_array_equal(second[1].detach().numpy(), [2, 2])
    assert len(await map_with_parallel_backward(Multiply, (a, b))) == 1
    assert first[0].grad_fn is second[1].grad_fn, "one node for all calls"
    await (first[0].sum() + second[1].sum()).backward()
    np.testing.assert_array_equal(a.grad.numpy(), [1, 1])
    np.testing.assert_array_equal(b.grad.numpy(), [3, 3])


async def test_plain_callables_and_what_they_use_besides_their_arguments() -> None:
    model = ag.nn.Linear(3, 2, generator=ag.Generator(0))
    xs = [ag.tensor(np.random.default_rng(i).normal(size=(4, 3)).astype(np.float32), requires_grad=True) for i in range(3)]
    outputs = await map_with_parallel_backward(model, *((x,) for x in xs))
    await sum(((y * y).sum() for (y,) in outputs), start=ag.tensor(0.0)).backward()
    got = [t.grad.numpy() for t in (*xs, model.weight, model.bias)]
    for t in (*xs, model.weight, model.bias):
        t.grad = None
    await sum(((model(x) * model(x)).sum() for x in xs), start=ag.tensor(0.0)).backward()
    for t, grad in zip((*xs, model.weight, model.bias), got, strict=True):
        np.testing.assert_allclose(grad, t.grad.numpy(), rtol=1e-5)


async def test_a_value_computed_outside_gets_its_gradient_through_the_node() -> None:
    a, x = leaf([2, 3]), leaf([1, 1])
    outer = a * a

    async def fn(x: Any) -> Any:
        return x * outer

    (p,), (q,) = await map_with_parallel_backward(fn, (x,), (x * 3,))
    await (p.sum() + q.sum()).backward()
    np.testing.assert_array_equal(a.grad.numpy(), [4 * 4, 4 * 6])
    np.testing.assert_array_equal(x.grad.numpy(), [4 * 4, 4 * 9])


async def test_nested_outputs_are_differentiated() -> None:
    a, b = leaf([1, 2]), leaf([5, 7])

    def fn(x: Any, form: int) -> Any:
        return [{"y": x * 2}, (x * 3, [x * 2, "text"]), [x, {"z": (x * x,), "n": 3}]][form]

    (first,), second, third = await map_with_parallel_backward(fn, (a, 0), (b, 1), (b * 1.0, 2))
    assert second[1][1] == "text" and third[1]["n"] == 3
    await (first["y"] + second[0] + second[1][0] * 10 + third[1]["z"][0]).sum().backward()
    np.testing.assert_array_equal(a.grad.numpy(), [2, 2])
    np.testing.assert_array_equal(b.grad.numpy(), [33, 37])


async def test_an_isolated_backward_takes_gradients_nested_as_the_outputs() -> None:
    one = ag.tensor([1.0], dtype=ag.float64)
    ctx, (first, second) = await run_isolated_forward(lambda x: (x * 2, {"y": [x * 3], "n": 1}), leaf([1]))
    assert second["y"][0].tolist() == [3] and second["n"] == 1
    for wrong in ((one, one), (one, {"y": [one]}), (one, {"y": [], "n": None}), (one, {"y": [leaf([1, 2])], "n": None})):
        await assert_awaiting_raises(ArgumentError, "gradient 1", run_isolated_backward(None, ctx, *wrong))
    (grad,) = await run_isolated_backward(None, ctx, None, {"y": [one], "n": None})
    assert grad.tolist() == [3]


async def test_a_call_that_returns_nothing() -> None:
    def fn(x: Any) -> Any:
        x * 2

    await assert_awaiting_raises(ArgumentTypeError, "fn returned None.*Was `return` forgotten", map_with_parallel_backward(fn, (leaf([1]),)))


async def test_forward_and_backward_of_all_calls_run_at_the_same_time(virtual_clock: VirtualClock) -> None:
    class Slow(ag.Function):
        @staticmethod
        async def forward(ctx: Any, x: Any) -> Any:
            await asyncio.sleep(1)
            return x * 1.0

        @staticmethod
        async def backward(ctx: Any, g: Any) -> Any:
            await asyncio.sleep(10)
            return g

    loop = asyncio.get_running_loop()
    xs = [leaf([1]) for _ in range(5)]
    outputs = await map_with_parallel_backward(Slow, *((x,) for x in xs))
    forward = loop.time()
    await sum((y.sum() for (y,) in outputs), start=ag.tensor(0.0)).backward()
    assert all(x.grad is not None for x in xs)
    assert (forward, loop.time() - forward) == (1, 10)


async def test_unused_outputs_and_arguments_that_need_no_gradient() -> None:
    a, b, c = leaf([1, 2]), ag.tensor([5.0, 7.0], dtype=ag.float64), leaf([3, 3])
    (p,), (_,) = await map_with_parallel_backward(Multiply, (a, b), (c, b))
    await p.sum().backward()
    np.testing.assert_array_equal(a.grad.numpy(), [5, 7])
    assert c.grad is None or not c.grad.numpy().any()
    assert b.grad is None


async def test_without_grad_nothing_is_recorded() -> None:
    a = leaf([1, 2])
    with ag.no_grad():
        ((p,),) = await map_with_parallel_backward(Multiply, (a, a))
    assert not p.requires_grad


async def test_a_call_that_raises_cancels_the_others() -> None:
    cancelled: list[int] = []

    async def fn(x: Any, i: int) -> Any:
        if i == 1:
            raise ValueError("call 1")
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(i)
            raise

    await assert_awaiting_raises(ValueError, "call 1", map_with_parallel_backward(fn, (leaf([1]), 0), (leaf([1]), 1), (leaf([1]), 2)))
    assert cancelled == [0, 2]


@pytest.mark.parametrize("way", ["another fails", "cancelled", "cancelled in backward"])
async def test_a_call_that_ignores_cancellation_is_waited_for_no_longer_than_the_grace_period(virtual_clock: VirtualClock, way: str) -> None:
    class Stubborn(ag.Function):
        @staticmethod
        async def forward(ctx: Any, x: Any, i: int) -> Any:
            if way == "another fails" and i == 1:
                raise ValueError("call 1")
            if "backward" not in way:
                await ignoring()
            return x * 2

        @staticmethod
        async def backward(ctx: Any, g: Any) -> Any:
            await ignoring()
            return g * 2, None

    async def ignoring() -> None:
        until = asyncio.get_running_loop().time() + 50
        while (left := until - asyncio.get_running_loop().time()) > 0:
            try:
                await asyncio.sleep(left)
            except asyncio.CancelledError:
                continue

    loop = asyncio.get_running_loop()
    reported: list[str] = []
    loop.set_exception_handler(lambda loop, context: reported.append(context["message"]))

    async def work() -> None:
        (p,), (q,) = await map_with_parallel_backward(Stubborn, (leaf([1]), 0), (leaf([2]), 1))
        await (p.sum() + q.sum()).backward()

    task = asyncio.ensure_future(work())
    if way != "another fails":
        loop.call_later(10, task.cancel)
    try:
        await task
    except (ValueError, asyncio.CancelledError):
        ended = loop.time()
    await asyncio.sleep(100)
    assert ended <= (1 if way == "another fails" else 12)
    assert reported and "did not stop within 1 s of being cancelled" in reported[0]


async def test_a_backward_that_raises_leaves_every_grad_as_it_was() -> None:
    class Broken(ag.Function):
        @staticmethod
        async def forward(ctx: Any, x: Any, breaks: bool) -> Any:
            ctx.breaks = breaks
            return x * 1.0

        @staticmethod
        async def backward(ctx: Any, g: Any) -> Any:
            if ctx.breaks:
                raise ArithmeticError("no derivative")
            return g, None

    a, b = leaf([1]), leaf([2])
    (p,), (q,) = await map_with_parallel_backward(Broken, (a, False), (b, True))
    await assert_awaiting_raises(ArithmeticError, "no derivative", (p.sum() + q.sum()).backward())
    assert a.grad is None and b.grad is None


async def test_retaining_the_graph_allows_a_second_pass_and_not_retaining_it_does_not() -> None:
    a, b = leaf([1, 2]), leaf([3, 4])
    ((p,),) = await map_with_parallel_backward(lambda x, y: x * y * y, (a, b))
    loss = p.sum()
    await loss.backward(retain_graph=True)
    await loss.backward()
    np.testing.assert_array_equal(a.grad.numpy(), [18, 32])
    await assert_awaiting_raises(GraphFreedError, None, loss.backward())


async def test_the_result_can_be_differentiated_once() -> None:
    a = leaf([1, 2])
    ((p,),) = await map_with_parallel_backward(lambda x: x * x, (a,))
    (g,) = await ag.grad(p.sum(), [a], create_graph=True)
    await assert_awaiting_raises(OnceDifferentiableError, None, ag.grad(g.sum(), [a]))


async def test_wrong_arguments() -> None:
    a = leaf([1])
    with pytest.raises(ArgumentError, match="All input sets must have the same number of arguments"):
        await map_with_parallel_backward(Multiply, (a, a), (a,))
    await assert_awaiting_raises(ArgumentTypeError, "Function class or a callable", map_with_parallel_backward(3, (a,)))
    for args in (a, 3, "ab", {"x": a}):
        await assert_awaiting_raises(ArgumentTypeError, rf"of call 1 are a {type(args).__name__}", map_with_parallel_backward(Multiply, (a,), args))
    ctx, _ = await run_isolated_forward(Multiply, a, a)
    await assert_awaiting_raises(ArgumentError, "2 gradients for 1 outputs", run_isolated_backward(Multiply, ctx, a, a))
    await assert_awaiting_raises(ArgumentError, "shape", run_isolated_backward(Multiply, ctx, leaf([1, 2])))
    await assert_awaiting_raises(ArgumentTypeError, "expected the context", run_isolated_backward(Multiply, "ctx", a))  # type: ignore[arg-type]
    assert await map_with_parallel_backward(Multiply) == ()


async def test_the_isolated_passes_on_their_own() -> None:
    a, b = leaf([1, 2]) * 1.0, ag.tensor([5.0, 7.0], dtype=ag.float64)
    ctx, outputs = await run_isolated_forward(Multiply, a, b)
    assert isinstance(ctx, IsolatedContext)
    assert isinstance(outputs, tuple) and len(outputs) == 1 and not outputs[0].requires_grad
    assert ctx.label == "kept" and ctx.needs_input_grad == (True, False)
    np.testing.assert_array_equal(ctx.saved_tensors[1].numpy(), [5, 7])
    da, db = await run_isolated_backward(Multiply, ctx, ag.tensor([1.0, 10.0], dtype=ag.float64))
    np.testing.assert_array_equal(da.numpy(), [5, 70])
    assert db is None
    assert_raises(AttributeError, None, lambda: ctx.nothing_of_that_name)


async def test_an_isolated_backward_accumulates_into_parameters_once_with_their_hooks() -> None:
    w = leaf([2, 3])
    calls: list[Any] = []
    w.register_hook(lambda g: calls.append(g.numpy()))
    ctx, _ = await run_isolated_forward(lambda x: x * w * w, leaf([1, 1]))
    assert w.grad is None
    await run_isolated_backward(None, ctx, ag.tensor([1.0, 1.0], dtype=ag.float64))
    np.testing.assert_array_equal(w.grad.numpy(), [4, 6])
    assert len(calls) == 1


async def test_arguments_are_never_changed_and_their_graph_is_not_seen() -> None:
    a = leaf([1, 2])
    b = a * 2
    seen: list[Any] = []

    def fn(x: Any) -> Any:
        seen.append(x)
        return x * 1.0

    ((p,),) = await map_with_parallel_backward(fn, (b,))
    assert seen[0].is_leaf and seen[0].requires_grad and seen[0] is not b
    await p.sum().backward()
    assert b.grad_fn is not None and seen[0].grad is None
    np.testing.assert_array_equal(a.grad.numpy(), [2, 2])


async def test_a_function_that_returns_its_argument_or_something_from_outside() -> None:
    a, w = leaf([1, 2]), leaf([3, 4])
    ((p, q),) = await map_with_parallel_backward(lambda x: (x, w), (a,))
    await (p * q).sum().backward()
    np.testing.assert_array_equal(a.grad.numpy(), [3, 4])
    np.testing.assert_array_equal(w.grad.numpy(), [1, 2])


async def test_everything_dies_with_its_last_reference() -> None:
    gc.collect()
    gc.disable()
    try:
        a = leaf([1, 2])
        ((p,),) = await map_with_parallel_backward(lambda x: x * x, (a,))
        node = weakref.ref(p.grad_fn)
        await p.sum().backward()
        del p
        await asyncio.sleep(0)
        assert node() is None
    finally:
        gc.enable()


def test_cancelled_at_every_step_nothing_is_left_and_no_grad_has_changed() -> None:
    a, b = leaf([1, 2]), leaf([3, 4])

    async def fn(x: Any) -> Any:
        await asyncio.sleep(0.1)
        return x * b

    async def main() -> None:
        outputs = await map_with_parallel_backward(fn, (a,), (a * 2,))
        await sum((p.sum() for (p,) in outputs), start=ag.tensor(0.0, dtype=ag.float64)).backward()

    steps = simulated_run(main).steps
    want = a.grad.numpy()
    assert steps > 10
    for step in range(1, steps + 1):
        a.grad = b.grad = None
        try:
            run = simulated_run(main, cancel_at=step)
        except asyncio.CancelledError:
            assert (a.grad is None and b.grad is None) or np.array_equal(a.grad.numpy(), want)
        else:
            assert not run.leftover_tasks

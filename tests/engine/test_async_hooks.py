"""Hooks that are coroutines: awaited in order, and in the way of nothing but what depends on them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import aiograd as ag
from aiograd.errors import GraphError, HookError, HookTypeError
from aiograd.testing.virtual_clock import VirtualClock
from tests.engine.cases import Switch, function, message, number, rounds
from tests.support import assert_awaiting_raises, assert_raises, leaf

# -------------------------------------------------------------------- what they delay


async def test_an_awaited_hook_delays_only_what_depends_on_it(virtual_clock: VirtualClock) -> None:
    log: list[str] = []
    leave = Switch()

    async def slow(g: Any) -> Any:
        log.append("slow begins")
        await leave
        log.append("slow ends")
        return g * 10.0

    x, y = leaf(2.0), leaf(3.0)
    left, right = x * 2.0, y * 3.0
    left.register_hook(slow)
    x.register_hook(lambda g: log.append(f"x {number(g)}"))
    for i in range(3):
        right = right * 1.0
        right.register_hook(lambda g, i=i: log.append(f"right {i}"))
    y.register_hook(lambda g: (log.append(f"y {number(g)}"), leave.on())[1])
    late = right + left  # the left branch has the lower numbers, so put its priority first
    left.grad_fn.set_sequence_nr(10**9)
    await late.backward()
    assert number(x.grad) == 20.0 and number(y.grad) == 3.0
    assert log == ["slow begins", "right 2", "right 1", "right 0", "y 3.0", "slow ends", "x 20.0"]


async def test_hooks_of_different_tensors_wait_at_the_same_time(virtual_clock: VirtualClock) -> None:
    async def hook(*_: Any) -> None:
        await asyncio.sleep(1)

    x = leaf(1.0)
    parts = [x * float(i) for i in range(8)]
    for part in parts[:3]:
        part.register_hook(hook)
    for part in parts[3:5]:
        part.grad_fn.register_prehook(hook)
    for part in parts[5:]:
        part.grad_fn.register_hook(hook)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    await total.backward()
    assert asyncio.get_running_loop().time() == 1


async def test_hooks_of_one_node_are_awaited_one_after_another_in_order(virtual_clock: VirtualClock) -> None:
    log: list[str] = []

    def hook(name: str, wait: float, factor: float | None = None) -> Any:
        async def later(first: Any, *_: Any) -> Any:
            log.append(f"{name} begins")
            await asyncio.sleep(wait)
            log.append(f"{name} ends")
            if factor is None:
                return None
            return tuple(t * factor for t in first) if isinstance(first, tuple) else first * factor

        return later

    x = leaf(1.0)
    y = x * 2.0
    y.register_hook(hook("tensor 1", 3, 2.0))
    y.register_hook(lambda g: log.append(f"sync {number(g)}"))
    y.register_hook(hook("tensor 2", 1, 3.0))
    y.retain_grad()
    y.grad_fn.register_prehook(hook("pre", 2, 5.0))
    y.grad_fn.register_hook(hook("post", 1))
    x.register_hook(hook("leaf", 1, 7.0))
    x.register_post_accumulate_grad_hook(hook("after", 1))
    z = y * 1.0
    await z.backward()
    assert number(y.grad) == 6.0
    assert number(x.grad) == 2.0 * 2 * 3 * 5 * 7
    took = asyncio.get_running_loop().time()
    assert log == [
        "tensor 1 begins", "tensor 1 ends", "sync 2.0", "tensor 2 begins", "tensor 2 ends", "pre begins", "pre ends", "post begins", "post ends",
        "leaf begins", "leaf ends", "after begins", "after ends",
    ]  # fmt: skip
    assert took == 9


async def test_hooks_may_return_futures_and_several_may_wait_for_one(virtual_clock: VirtualClock) -> None:
    loop = asyncio.get_running_loop()
    shared = loop.create_future()
    loop.call_later(5, shared.set_result, None)
    x = leaf(1.0)
    a, b, c = x * 2.0, x * 3.0, x * 5.0
    for part in (a, b, c):
        part.register_hook(lambda g: shared)
    await (a + b + c).backward()
    own = loop.create_future()
    loop.call_later(1, own.set_result, ag.tensor(7.0, dtype="float64"))
    d = x * 1.0
    d.register_hook(lambda g: own)
    (captured,) = await ag.grad(d * 1.0, x)
    assert [number(x.grad), loop.time(), number(captured)] == [10.0, 6.0, 7.0]


async def test_rules_may_return_futures_and_coroutines(virtual_clock: VirtualClock) -> None:
    loop = asyncio.get_running_loop()
    future = loop.create_future()
    loop.call_later(1, future.set_result, ag.tensor(3.0, dtype="float64"))

    async def other(g: Any) -> Any:
        await asyncio.sleep(1)
        return g * 5.0

    x = leaf(1.0)
    total = function(lambda ctx, g: future, inline=True)(x) + function(lambda ctx, g: future, inline=True)(x)
    total = total + function(lambda ctx, g: other(g), inline=True)(x) + function(lambda ctx, g: other(g))(x)
    await total.backward()
    assert loop.time() == 1
    assert number(x.grad) == 16.0


async def test_hooks_that_do_not_suspend_do_not_let_anything_else_run() -> None:
    async def quick(g: Any) -> Any:
        return g * 2.0

    x = leaf(1.0)
    y = x
    for _ in range(20):
        y = y * 1.0
        y.register_hook(quick)
    ran: list[bool] = []
    async with ag.Engine(clock=lambda: 0.0):
        asyncio.get_running_loop().call_soon(ran.append, True)
        await y.backward()
        assert ran == []  # awaited in place: no task, no round of the loop
    assert number(x.grad) == 2.0**20


async def test_awaitables_of_other_kinds_are_not_awaited_and_refused() -> None:
    class Awaitable:
        def __await__(self) -> Any:
            raise AssertionError("awaited")

    x = leaf(1.0)
    y = x * 2.0
    y.register_hook(lambda g: Awaitable())
    await assert_awaiting_raises(HookTypeError, "returned Awaitable", (y * 1.0).backward())


# -------------------------------------------------------------------- what they may do


@pytest.mark.parametrize("kind", ["def", "async"])
async def test_captures_are_taken_after_the_hooks(kind: str) -> None:
    def times_ten(g: Any) -> Any:
        return g * 10.0

    async def times_ten_later(g: Any) -> Any:
        await asyncio.sleep(0)
        return g * 10.0

    a = leaf(1.0)
    b = a * 2.0
    b.register_hook(times_ten if kind == "def" else times_ten_later)
    c = b * 2.0
    assert [number(g) for g in await ag.grad(c, (a, b), retain_graph=True)] == [40.0, 20.0]
    assert [number(g) for g in await ag.grad(c, b, retain_graph=True)] == [20.0]
    assert [number(g) for g in await ag.grad(c, a, retain_graph=True)] == [40.0]
    b.retain_grad()
    await c.backward()
    assert (number(a.grad), number(b.grad)) == (40.0, 20.0)


async def test_a_hook_may_remove_itself_and_others_while_it_runs() -> None:
    log: list[str] = []
    x = leaf(1.0)

    async def once(g: Any) -> None:
        await asyncio.sleep(0)
        log.append("once")
        handle.remove()

    handle = x.register_hook(once)
    x.register_hook(lambda g: log.append("always"))
    for _ in range(2):
        await (x * 2.0).backward()
    assert log == ["once", "always", "always"]


async def test_the_current_node_and_pass_are_known_in_whatever_runs_for_them() -> None:
    seen: dict[str, tuple[str | None, int]] = {}

    def note(name: str) -> None:
        node = ag.graph.current_node()
        seen[name] = (None if node is None else node.name, ag.graph.current_graph_task_id())

    async def hook(name: str) -> None:
        note(name)
        await asyncio.sleep(0)
        note(f"{name} later")

    async def rule(ctx: Any, g: Any) -> Any:
        await hook("rule")
        return g

    def in_thread(ctx: Any, g: Any) -> Any:
        note("thread")
        return g

    x = leaf(1.0)
    note("before")
    y = x * 2.0
    y.register_hook(lambda g: hook("hook"))
    other = x * 3.0
    other.register_hook(lambda g: hook("beside"))
    z = function(rule)(y) + function(in_thread)(other)
    x.register_post_accumulate_grad_hook(lambda t: hook("after"))
    z.register_hook(lambda g: ag.graph.queue_callback(lambda: hook("callback")))
    await (z * 1.0).backward()
    note("afterwards")
    number_of_pass = seen["hook"][1]
    assert number_of_pass >= 0
    assert seen["before"] == seen["afterwards"] == (None, -1)
    expected = {"hook": "MulBackward", "beside": "MulBackward", "rule": "FBackward", "after": "AccumulateGrad", "callback": None}
    for name, node in expected.items():
        assert seen[name] == seen[f"{name} later"] == (node, number_of_pass), name
    assert seen["thread"] == ("FBackward", number_of_pass)


async def test_execution_order_and_will_run_can_be_asked_inside_a_pass_only() -> None:
    assert_raises(GraphError, "during a backward pass", ag.graph.execution_order)
    x, y = leaf(1.0), leaf(2.0)
    a, b = x * 2.0, y * 3.0
    c = a * b
    answers: list[Any] = []

    async def hook(g: Any) -> None:
        await asyncio.sleep(0)
        answers.append([ag.graph.will_run(node) for node in (a.grad_fn, b.grad_fn, ag.graph.get_gradient_edge(x).node)])

    c.register_hook(hook)
    await ag.grad(c * 1.0, a, retain_graph=True)
    await ag.backward(c * 1.0, inputs=[x], retain_graph=True)
    await (c * 1.0).backward()
    assert answers == [[False, False, False], [True, False, True], [True, True, True]]


# -------------------------------------------------------------------- several tensors


async def test_multi_grad_hooks_may_be_coroutines(virtual_clock: VirtualClock) -> None:
    log: list[Any] = []

    async def both(grads: Any) -> str:
        await asyncio.sleep(1)
        log.append([None if g is None else number(g) for g in grads])
        return "ignored"

    async def first(g: Any) -> ag.Tensor:
        await asyncio.sleep(1)
        log.append(("any", number(g)))
        return g * 100.0  # ignored as well

    x, y, z = leaf(1.0), leaf(2.0), leaf(3.0)
    ag.graph.register_multi_grad_hook([x, y, z], both)
    ag.graph.register_multi_grad_hook([x, y, z], first, mode="any")
    await (x * 2.0 + y * 3.0).backward()
    assert (number(x.grad), number(y.grad)) == (2.0, 3.0)
    await (z * 4.0).backward()
    took = asyncio.get_running_loop().time()
    assert ("any", 4.0) in log and [None, None, 4.0] in log and [2.0, 3.0, None] in log
    assert len(log) == 4
    assert took == 3  # in the first pass at two leaves side by side, in the second at one leaf one after the other


async def test_a_multi_grad_hook_fires_once_in_each_of_several_passes_at_once() -> None:
    fired: list[list[float]] = []
    inside, leave = Switch(), Switch()

    async def slow(g: Any) -> None:
        inside.on()
        await leave

    x, y = leaf(1.0), leaf(2.0)
    ag.graph.register_multi_grad_hook([x, y], lambda grads: fired.append([number(g) for g in grads]))
    blocked = x * 2.0
    blocked.register_hook(slow)
    first = asyncio.create_task((blocked + y * 3.0).backward())
    await inside
    await (x * 5.0 + y * 7.0).backward()
    assert fired == [[5.0, 7.0]]
    leave.on()
    await first
    assert fired == [[5.0, 7.0], [2.0, 3.0]]


# -------------------------------------------------------------------- bad results


@pytest.mark.parametrize("kind", ["def", "async"])
@pytest.mark.parametrize(
    ("place", "result", "error", "text"),
    [
        ("tensor", "text", HookTypeError, "returned str"),
        ("tensor", [1.0, 2.0], HookError, "changed the size"),
        ("prehook", (None, None), HookError, "returned 2"),
        ("prehook", 5, HookTypeError, "returned int"),
        ("posthook", (None,), HookError, "returned 1"),
        ("unpack", 5, HookTypeError, "unpack hook"),
    ],
)
async def test_nonsense_from_a_hook_names_it(place: str, result: Any, error: type[Exception], text: str, kind: str) -> None:
    value = ag.tensor(result, dtype="float64") if isinstance(result, list) else result

    def nonsense(*_: Any) -> Any:
        return value

    async def nonsense_later(*_: Any) -> Any:
        await asyncio.sleep(0)
        return value

    hook = nonsense if kind == "def" else nonsense_later
    x, y = leaf(1.0, grad=1.0), leaf(2.0)
    with ag.graph.saved_tensors_hooks(lambda t: t, hook if place == "unpack" else (lambda t: t)):
        z = x * y
    if place == "tensor":
        z.register_hook(hook)
    if place == "prehook":
        z.grad_fn.register_prehook(hook)
    if place == "posthook":
        z.grad_fn.register_hook(hook)
    raised = await assert_awaiting_raises(error, text, (z * 1.0).backward())
    assert "nonsense" in str(raised)
    assert "MulBackward" in message(raised)
    assert number(x.grad) == 1.0 and y.grad is None


async def test_a_coroutine_that_is_no_longer_wanted_is_closed_without_a_warning() -> None:
    """Another node fails before the hook's coroutine has had its first turn."""
    x = leaf(1.0)

    async def never(g: Any) -> None:
        raise AssertionError

    def fails(ctx: Any, g: Any) -> Any:
        raise ValueError

    y = x * 1.0
    y.register_hook(never)
    failing = function(fails, inline=True)(x)
    y.grad_fn.set_sequence_nr(10**9)
    async with ag.Engine(clock=lambda: 0.0):
        for total in (y + failing, failing + y):
            await assert_awaiting_raises(ValueError, None, total.backward(retain_graph=True))
            await rounds(2)

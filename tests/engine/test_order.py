"""The order in which nodes run: by sequence number, leaves first, and what changes it."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.graph import current_node, execution_order
from tests.support import custom_function, leaf


class Recorder:
    """Records the order in which marked tensors get their gradients."""

    def __init__(self) -> None:
        self.order: list[str] = []

    def mark(self, name: str, tensor: Any) -> Any:
        tensor.register_hook(lambda g: self.order.append(name))
        return tensor


async def test_what_was_recorded_last_runs_first() -> None:
    r = Recorder()
    x = leaf([1.0])
    a = r.mark("a", x * 1)
    b = r.mark("b", x * 2)
    c = r.mark("c", a * 3)
    d = r.mark("d", b * 4)
    await (d + c).sum().backward()
    assert r.order == ["d", "c", "b", "a"]


async def test_a_node_waits_for_all_its_users_whatever_its_number() -> None:
    r = Recorder()
    x = leaf([1.0])
    a = r.mark("a", x * 1)
    late = r.mark("late", x * 2)
    users = [r.mark(f"user{i}", a * i) for i in range(3)]
    late.grad_fn.set_sequence_nr(10**9)
    out = users[0] + users[1] + users[2] + late
    await out.sum().backward()
    assert r.order == ["late", "user2", "user1", "user0", "a"]


async def test_leaves_come_as_soon_as_they_are_complete() -> None:
    r = Recorder()
    x, w = r.mark("x", leaf([1.0])), r.mark("w", leaf([1.0]))
    a = r.mark("a", w * 1)
    b = r.mark("b", x * 2)
    await (a * 5 + b).sum().backward()
    assert r.order == ["b", "x", "a", "w"]


async def test_a_priority_set_by_hand_changes_the_order_but_not_the_bits() -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(size=(6, 40))

    async def gradient(priorities: list[int | None]) -> tuple[list[str], bytes]:
        r = Recorder()
        x = leaf(np.ones(40))
        shared = r.mark("shared", x * 1)
        parts = [r.mark(str(i), shared * ag.tensor(v)) for i, v in enumerate(values)]
        for part, priority in zip(parts, priorities, strict=True):
            if priority is not None:
                part.grad_fn.set_sequence_nr(priority)
        total = parts[0]
        for part in parts[1:]:
            total = total + part * 1.5
        await total.sum().backward()
        return r.order, x.grad.numpy().tobytes()

    default, bits = await gradient([None] * 6)
    assert default == ["5", "4", "3", "2", "1", "0", "shared"]
    for _ in range(10):
        order, found = await gradient([int(p) for p in rng.integers(1, 10**12, size=6)])
        assert found == bits
        assert order[-1] == "shared"


async def test_ties_keep_the_order_in_which_they_became_ready() -> None:
    r = Recorder()
    x = leaf([1.0])
    parts = [r.mark(str(i), x * i) for i in range(5)]
    for part in parts:
        part.grad_fn.set_sequence_nr(77)
    await ag.backward([p.sum() for p in parts])
    assert r.order == ["4", "3", "2", "1", "0"]


@pytest.mark.parametrize("suspending", [False, True])
async def test_with_a_concurrency_of_one_the_order_is_the_predicted_one_whatever_suspends(suspending: bool) -> None:
    ran: list[Any] = []
    predicted: list[Any] = []

    @custom_function()
    async def Slow(ctx: Any, g: Any) -> Any:
        ran.append(current_node())
        if suspending:
            for _ in range(int(abs(g.detach().numpy()[0])) % 4):
                await asyncio.sleep(0)
        ran.append(current_node())
        return g * 2

    @custom_function()
    def Threaded(ctx: Any, g: Any) -> Any:
        ran.append(current_node())
        return g * 3

    x, w = leaf([1.0]), leaf([2.0])
    parts = [Slow.apply(x * 3), Threaded.apply(w), Slow.apply(w * 2), Threaded.apply(x), Slow.apply(x)]
    out = Slow.apply(parts[0] + parts[1]) + parts[2] * parts[3] + parts[4]
    out.register_hook(lambda g: predicted.extend(execution_order()))
    async with ag.Engine(concurrency=1):
        await out.sum().backward()
    once = [node for i, node in enumerate(ran) if i == 0 or ran[i - 1] is not node]
    assert once == [node for node in predicted if node in ran]
    assert len(set(once)) == 6


async def test_a_slow_node_with_a_high_number_starts_first_and_the_rest_goes_on_meanwhile() -> None:
    order: list[str] = []
    gate = asyncio.Event()

    @custom_function()
    async def Remote(ctx: Any, g: Any) -> Any:
        order.append("remote starts")
        await gate.wait()
        order.append("remote ends")
        return g

    x, w = leaf([1.0]), leaf([1.0])
    remote = Remote.apply(x)
    local = w * 1
    for i in range(3):
        local = local * 2
        local.register_hook(lambda g, i=i: order.append(f"local {i}"))
    w.register_hook(lambda g: (order.append("local done"), gate.set())[0])
    remote.grad_fn.set_sequence_nr(2**60)
    await (local + remote).sum().backward()
    assert order == ["remote starts", "local 2", "local 1", "local 0", "local done", "remote ends"]
    np.testing.assert_array_equal(x.grad.numpy(), [1.0])
    np.testing.assert_array_equal(w.grad.numpy(), [8.0])

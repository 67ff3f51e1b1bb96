"""The order in which nodes run: by sequence number, leaves first, and what changes it."""

from __future__ import annotations

from typing import Any

import aiograd as ag
from tests.support import leaf


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


async def test_ties_keep_the_order_in_which_they_became_ready() -> None:
    r = Recorder()
    x = leaf([1.0])
    parts = [r.mark(str(i), x * i) for i in range(5)]
    for part in parts:
        part.grad_fn.set_sequence_nr(77)
    await ag.backward([p.sum() for p in parts])
    assert r.order == ["4", "3", "2", "1", "0"]

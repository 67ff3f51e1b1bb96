"""The same bits whatever finishes first, and the documented order wherever it is promised."""

from __future__ import annotations

import asyncio
import threading
from random import Random
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.engine.run import runner
from aiograd.testing import simulated_run
from aiograd.testing.virtual_clock import VirtualClock
from tests.engine.cases import chain, function, number, ticking
from tests.support import assert_awaiting_raises, bits, leaf

KINDS = ("row", "def", "inline", "async")


class Graph:
    """A drawn graph in which the order of every sum shows: gradients differ by many orders of magnitude.

    Args:
        seed: draws the graph; the values are the same in every instance.
        delays: draws how long asynchronous rules take, or None for not at all.
        hooks: attach a hook somewhere, so that the pass cannot take the short cut.
    """

    def __init__(self, seed: int, *, delays: Random | None = None, hooks: bool = False, kinds: tuple[str, ...] = KINDS) -> None:
        draws = Random(seed)
        self.leaves = [leaf(np.array([draws.uniform(-1, 1) * 10.0 ** draws.randint(-6, 6) for _ in range(5)])) for _ in range(3)]
        tensors: list[ag.Tensor] = list(self.leaves)
        for _ in range(30):
            a, b = draws.choice(tensors), draws.choice(tensors[-6:])
            operation, kind, factor = draws.choice(("add", "mul", "apply")), draws.choice(kinds), 10.0 ** draws.randint(-4, 4) / 3.0
            if operation == "add":
                made = a + b
            elif operation == "mul":
                made = a * factor + b * (1.0 / factor)
            else:
                made = a * factor if kind == "row" else function(self._rule(kind, factor, delays), inline=kind == "inline", factor=factor)(a) + b
            tensors.append(made)
        wide = tensors[-1]
        for i in range(40):  # one leaf with many contributions
            wide = wide + self.leaves[i % 3] * (10.0 ** draws.randint(-5, 5) / 7.0)
        self.nodes = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
        if hooks:
            tensors[-1].register_hook(lambda g: None)
        self.loss = wide.sum()

    @staticmethod
    def _rule(kind: str, factor: float, delays: Random | None) -> Any:
        async def later(ctx: Any, g: Any) -> Any:
            if delays is not None:
                for _ in range(delays.randint(0, 3)):
                    await asyncio.sleep(delays.choice((0, 0, delays.random())))
            return g * factor

        return later if kind == "async" else lambda ctx, g: g * factor

    def bits(self) -> list[Any]:
        return bits(*(tensor.grad for tensor in self.leaves))


async def gradients(seed: int, delays: int | None = None, hooks: bool = False, kinds: tuple[str, ...] = KINDS, **engine: Any) -> list[bytes | None]:
    graph = Graph(seed, delays=None if delays is None else Random(delays), hooks=hooks, kinds=kinds)
    async with ag.Engine(**engine):
        await graph.loss.backward()
    return graph.bits()


async def test_the_order_of_these_sums_shows(virtual_clock: VirtualClock) -> None:
    """The tests below would prove nothing on sums that come out the same in every order."""
    terms = []
    graph = Graph(0)
    for child in graph.leaves:
        child.register_hook(lambda g: None)
    x = graph.leaves[0]
    for node in graph.nodes:
        node.register_hook(lambda gi, go: terms.extend(t.numpy()[0] for t in gi if t is not None))
    await graph.loss.backward()
    assert x.grad is not None
    draws = Random(1)
    sums = set()
    for _ in range(20):
        draws.shuffle(terms)
        total = np.float64(0.0)
        for term in terms:
            total = total + term
        sums.add(total.tobytes())
    assert len(sums) > 1


@pytest.mark.parametrize("seed", range(6))
def test_the_same_bits_for_any_completion_order(seed: int) -> None:
    expected = simulated_run(gradients, seed).value
    assert len(set(expected)) == 3
    for schedule in range(25):
        assert simulated_run(gradients, seed, schedule, seed=schedule, order="permuted").value == expected
        assert simulated_run(gradients, seed, schedule, seed=schedule).value == expected


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "engine",
    [
        {"concurrency": 1}, {"concurrency": 2}, {"inline_ns": 1.0}, {"inline_ns": float("inf")}, {"budget": 1.0, "clock": "ticking"},
        {"budget": 7.0, "clock": "ticking"},
    ],
    ids=str,
)  # fmt: skip
def test_the_same_bits_wherever_nodes_run_and_however_often_the_pass_pauses(seed: int, engine: dict[str, Any]) -> None:
    expected = simulated_run(gradients, seed).value

    async def main(schedule: int) -> list[bytes | None]:
        options = {**engine, "clock": ticking()} if "clock" in engine else engine
        return await gradients(seed, schedule, **options)

    for schedule in range(5):
        assert simulated_run(main, schedule, seed=schedule, order="permuted").value == expected


@pytest.mark.parametrize("seed", range(4))
def test_the_same_bits_by_the_short_cut_and_by_the_general_path(seed: int) -> None:
    rows = ("row",)
    expected = simulated_run(gradients, seed, None, False, rows).value
    assert simulated_run(gradients, seed, None, True, rows).value == expected

    async def captured() -> list[bytes | None]:
        graph = Graph(seed, kinds=rows)
        return bits(*await ag.grad(graph.loss, graph.leaves))

    async def recorded() -> list[bytes | None]:
        graph = Graph(seed, kinds=rows)
        return bits(*await ag.grad(graph.loss, graph.leaves, create_graph=True))

    async def packed() -> list[bytes | None]:
        with ag.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            graph = Graph(seed, kinds=rows)
        await graph.loss.backward()
        return graph.bits()

    async def under_anomaly_mode() -> list[bytes | None]:
        with ag.detect_anomaly():
            graph = Graph(seed, kinds=rows)
            await graph.loss.backward()
        return graph.bits()

    for other in (captured, recorded, packed, under_anomaly_mode):
        assert simulated_run(other).value == expected, other.__name__


@pytest.mark.parametrize("seed", range(4))
def test_priorities_set_by_hand_change_no_sum(seed: int) -> None:
    expected = simulated_run(gradients, seed).value

    async def main(priorities: int) -> list[bytes | None]:
        graph = Graph(seed)
        draws = Random(priorities)
        for node in graph.nodes:
            if draws.random() < 0.7:
                node.set_sequence_nr(draws.randint(0, 2**40))
        await graph.loss.backward()
        return graph.bits()

    for priorities in range(20):
        assert simulated_run(main, priorities).value == expected


@pytest.mark.parametrize("seed", range(3))
async def test_the_same_bits_on_real_threads(seed: int, frantic_threads: None) -> None:
    expected = await gradients(seed)
    for _ in range(6):
        assert await gradients(seed, threads=8) == expected
        assert await gradients(seed, threads=8, inline_ns=1.0) == expected
    results = await asyncio.gather(*(gradients(seed, threads=2, inline_ns=1.0) for _ in range(6)))
    assert all(result == expected for result in results)


async def test_large_sums_have_the_same_bits_on_the_executor_and_on_the_loop(frantic_threads: None) -> None:
    """Sums above a MiB are folded by a thread while contributions still arrive."""

    async def run(**engine: Any) -> list[bytes | None]:
        draws = np.random.default_rng(0)
        x = leaf(draws.normal(size=1 << 18))
        total = x * 1.0
        for i in range(10):
            total = total + function(lambda ctx, g, f=10.0**i / 3.0: g * f)(x) + x * (10.0 ** (5 - i) / 7.0)
        async with ag.Engine(**engine):
            await total.sum().backward()
        return bits(x.grad)

    expected = await run(concurrency=1)
    for _ in range(3):
        assert await run(threads=4) == expected


@pytest.mark.parametrize("seed", range(3))
def test_second_order_gradients_have_the_same_bits(seed: int) -> None:
    async def main(delays: int | None) -> list[bytes | None]:
        draws = Random(seed)
        wait = None if delays is None else Random(delays)

        async def rule(ctx: Any, g: Any) -> Any:
            if wait is not None:
                await asyncio.sleep(wait.random())
            (x,) = ctx.saved_tensors
            return g * x * 2.0

        x = leaf([draws.uniform(0.5, 2.0) for _ in range(4)])
        y = x * 1.0
        for _ in range(8):
            y = y * x + function(rule)(x) * draws.uniform(-5, 5) + y * 1e-3
        (first,) = await ag.grad(y.sum(), x, create_graph=True)
        await (first * first).sum().backward()
        return bits(first, x.grad)

    expected = simulated_run(main, None).value
    for schedule in range(10):
        assert simulated_run(main, schedule, seed=schedule, order="permuted").value == expected


async def three_orders(seed: int, hooks: bool) -> tuple[list[bytes | None], list[tuple[str, int]]]:
    """Derivatives of three orders of a drawn product of rows, and the nodes behind the second ones by the rank of their numbers."""
    draws = Random(seed)
    kinds: tuple[Any, ...] = (
        lambda a, b, f: a * f + b * (1 / f),
        lambda a, b, f: (a * b).tanh() * f,
        lambda a, b, f: a.tanh().exp() / (b * b + f),
    )
    leaves = [leaf([draws.uniform(0.5, 1.5) for _ in range(5)]) for _ in range(3)]
    tensors = list(leaves)
    for _ in range(25):
        a, b, factor = draws.choice(tensors), draws.choice(tensors[-6:]), 10.0 ** draws.randint(-4, 4) / 3.0
        tensors.append(draws.choice(kinds)(a, b, factor))
    if hooks:
        leaves[0].register_hook(lambda g: None)
    first = await ag.grad(sum([*tensors[-8:], *(each.exp() for each in leaves)]).sum(), leaves, create_graph=True)
    second = await ag.grad(sum((g * g).sum() for g in first), leaves, create_graph=True)
    third = await ag.grad(sum((g * g).sum() for g in second), leaves)
    nodes: list[Any] = []
    seen: set[Any] = set()
    stack = [g.grad_fn for g in second]
    while stack:
        node = stack.pop()
        if node is not None and node not in seen and not node.is_leaf:
            seen.add(node)
            nodes.append(node)
            stack.extend(node.next_nodes)
    ranks = {node: rank for rank, node in enumerate(sorted(nodes, key=lambda node: node.sequence_nr))}
    return bits(*first, *second, *third), [(node.name, ranks[node]) for node in nodes]


@pytest.mark.parametrize("seed", range(4))
def test_a_pass_that_records_gives_the_same_bits_and_numbers_by_the_short_cut_and_by_the_general_path(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    swept: list[Any] = []
    walk = runner.GraphWalk
    monkeypatch.setattr(runner, "GraphWalk", lambda task, *args: swept.append(task) or walk(task, *args))
    expected = simulated_run(three_orders, seed, True).value
    assert not swept
    found = simulated_run(three_orders, seed, False).value
    assert len(swept) == 3
    assert found == expected


async def test_a_failed_pass_that_records_names_its_node_by_the_short_cut_too(monkeypatch: pytest.MonkeyPatch) -> None:
    x = leaf([1.0, 2.0])
    y = (x * x).exp()
    monkeypatch.setattr(type(y.grad_fn), "compute", lambda *_: 1 / 0)
    caught = await assert_awaiting_raises(ZeroDivisionError, None, ag.grad(y.sum(), x, create_graph=True))
    assert any("ExpBackward" in note for note in caught.__notes__)
    assert x.grad is None


# -------------------------------------------------------------------- order


def watched(graph: Graph, log: list[int]) -> None:
    """Log when nodes of the graph are about to run."""
    for node in graph.nodes:
        node.register_prehook(lambda gs, node=node: log.append(node.sequence_nr))


@pytest.mark.parametrize("seed", range(6))
async def test_without_suspension_nodes_run_in_descending_sequence_number(virtual_clock: VirtualClock, seed: int) -> None:
    graph = Graph(seed, kinds=("row", "inline"))
    log: list[int] = []
    predicted: list[int] = []
    watched(graph, log)
    graph.loss.register_hook(lambda g: predicted.extend(node.sequence_nr for node in ag.graph.execution_order()))
    await graph.loss.backward()
    known = {node.sequence_nr for node in graph.nodes}
    predicted = [number for number in predicted if number in known]
    assert log == sorted(log, reverse=True)
    assert log == predicted


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("schedule", [None, 0, 1, 2])
def test_with_concurrency_one_the_order_holds_whatever_suspends_and_leaves_the_loop(seed: int, schedule: int | None) -> None:
    async def main() -> tuple[list[int], list[int]]:
        graph = Graph(seed, delays=Random(schedule or 0))
        log: list[int] = []
        watched(graph, log)
        order: list[int] = []
        graph.loss.register_hook(lambda g: order.extend(node.sequence_nr for node in ag.graph.execution_order()))
        async with ag.Engine(concurrency=1):
            await graph.loss.backward()
        known = {node.sequence_nr for node in graph.nodes}
        return log, [number for number in order if number in known]

    log, order = simulated_run(main, seed=schedule, order="fifo" if schedule is None else "permuted").value
    assert log == order
    assert log == sorted(log, reverse=True)


@pytest.mark.parametrize("seed", range(4))
async def test_priorities_decide_when_ready_nodes_run(virtual_clock: VirtualClock, seed: int) -> None:
    """Against a straightforward simulation: of the nodes whose consumers have all run, the one with the highest number."""

    graph = Graph(seed, kinds=("row", "inline"))
    draws = Random(seed)
    for node in graph.nodes:
        if draws.random() < 0.5:
            node.set_sequence_nr(draws.randint(0, 10**6))
    log: list[Any] = []
    predicted: list[Any] = []
    for node in graph.nodes:
        node.register_prehook(lambda gs, node=node: log.append(node))
    graph.loss.register_hook(lambda g: predicted.extend(ag.graph.execution_order()))
    await graph.loss.backward()
    predicted, expected = [node for node in predicted if node in graph.nodes], reference_order(graph.loss.grad_fn, set(graph.nodes))
    assert log == expected
    assert predicted == expected


def reference_order(root: Any, wanted: set[Any]) -> list[Any]:
    waiting: dict[Any, int] = {}
    found, stack = {root}, [root]
    while stack:
        for child in stack.pop().next_nodes:
            if child is not None:
                waiting[child] = waiting.get(child, 0) + 1
                if child not in found:
                    found.add(child)
                    stack.append(child)
    ready, order = [root], []
    while ready:
        node = max(ready, key=lambda node: node.sequence_nr)
        ready.remove(node)
        order.append(node)
        for child in node.next_nodes:
            if child is not None:
                waiting[child] -= 1
                if waiting[child] == 0:
                    ready.append(child)
    return [node for node in order if node in wanted]


async def test_leaves_accumulate_as_soon_as_they_are_ready() -> None:
    log: list[str] = []
    x, y = leaf(1.0), leaf(2.0)
    product = x * y
    deep = chain(product, 3)
    top = deep + y * 1.0
    y2 = leaf(3.0)
    last = top * y2
    y2.register_hook(lambda g: log.append("y2"))
    x.register_hook(lambda g: log.append("x"))
    product.register_hook(lambda g: log.append("product"))
    deep.register_hook(lambda g: log.append("deep"))
    await last.backward()
    assert log == ["y2", "deep", "product", "x"]


async def test_saved_values_are_unpacked_in_the_order_in_which_nodes_run() -> None:
    packed: list[int] = []
    unpacked: list[int] = []
    per_node: list[list[int]] = []

    def pack(tensor: Any) -> tuple[int, Any]:
        packed.append(len(packed))
        return packed[-1], tensor

    def note(tensor: ag.Tensor) -> ag.Tensor:
        done = sum(map(len, per_node))
        per_node.append(packed[done:])
        return tensor

    with ag.graph.saved_tensors_hooks(pack, lambda pair: unpacked.append(pair[0]) or pair[1]):
        x, y = leaf([1.0, 2.0]), leaf([3.0, 4.0])
        z = note(x * y)
        z = note(z * x)
        z = note(z / y)
        z = note(z * z)
    async with ag.Engine(concurrency=1):
        await z.sum().backward()
    assert all(per_node)
    assert unpacked == [number for numbers in reversed(per_node) for number in numbers]


async def test_the_same_graph_runs_the_same_way_every_time() -> None:
    async def once() -> list[str]:
        log: list[str] = []
        x = leaf(1.0)
        parts = [function(lambda ctx, g, i=i: log.append(f"rule {i}") or g, inline=True)(x * float(i)) for i in range(5)]
        for i, part in enumerate(parts):
            part.register_hook(lambda g, i=i: log.append(f"hook {i}"))
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        await total.backward()
        assert number(x.grad) == 10.0
        return log

    first = await once()
    assert first == [line for i in reversed(range(5)) for line in (f"hook {i}", f"rule {i}")]
    for _ in range(5):
        assert await once() == first


async def test_bits_do_not_depend_on_which_thread_recorded_what() -> None:
    """The sequence numbers of two threads interleave; within a graph they still order it."""
    results: list[list[bytes | None]] = []
    start = threading.Barrier(4)

    def work() -> None:
        start.wait(timeout=30)

        async def main() -> None:
            for seed in range(3):
                results.append([bytes([seed]), *await gradients(seed)])

        asyncio.run(main())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        await asyncio.get_running_loop().run_in_executor(None, thread.join)
    await asyncio.get_running_loop().shutdown_default_executor()
    for seed in range(3):
        expected = await gradients(seed)
        same = [result[1:] for result in results if result[0] == bytes([seed])]
        assert len(same) == 4 and all(result == expected for result in same)


async def test_a_recorded_pass_may_use_what_another_task_records_meanwhile(virtual_clock: VirtualClock) -> None:
    """Its nodes get their numbers anew at the end, and then no longer come after what they were made from."""

    early, made = asyncio.Event(), asyncio.Event()
    x, z = leaf(2.0), leaf(3.0)
    shared: list[ag.Tensor] = []

    async def late(ctx: Any, g: Any) -> Any:
        await made.wait()
        return g * shared[0] * 1.0

    async def first(ctx: Any, g: Any) -> Any:
        (value,) = ctx.saved_tensors
        g = chain(g * value, 10)
        early.set()
        return g

    async def other() -> None:
        await early.wait()
        shared.append(z * z)
        made.set()

    task = asyncio.create_task(other())
    y = function(first)(x) + function(late)(x)  # undisturbed, `late` runs first
    (grad,) = await ag.grad(y, x, create_graph=True)
    await task
    await (grad * 1.0).backward()
    assert (number(grad), number(z.grad)) == (11.0, 6.0)

"""Two things at once in one pass: heavy branches on two cores, and waiting for elsewhere beside computing here.

The branches are chains of products of square matrices from two leaves into one sum. BLAS has one thread on either side, so the second core can
only be used by running the branches side by side, which PyTorch's CPU backward does not do. Only the backward pass is timed.
"""

from __future__ import annotations

import asyncio
import functools
import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

import aiograd as ag
from tests.benchmarks.harness import Settings, Side, Table, Workload, compare, goal_cells, interleave, milliseconds, sides, threads

TITLE = "Two independent heavy branches in one backward pass, 1 BLAS thread each"


def run(settings: Settings) -> Iterator[Table]:
    """Time branches beside torch, then a remote node beside local compute."""
    with threads(1):
        yield ag.run(_branches(settings))
        yield ag.run(_remote(settings))


# -------------------------------------------------------------------- branches


async def _branches(settings: Settings) -> Table:
    size, depth = settings.of(768, 16), settings.of(6, 2)
    rng = np.random.default_rng(0)
    weights = [(rng.normal(size=(size, size)) / np.sqrt(size)).astype(np.float32) for _ in range(depth)]
    starts = [rng.normal(size=(size, size)).astype(np.float32) for _ in range(2)]

    def total(leaves: list[Any], factors: list[Any]) -> Any:
        ends = []
        for leaf in leaves:
            y = leaf
            for factor in factors:
                y = y @ factor
            ends.append((y * y).sum())
        return ends[0] + ends[1]

    def ours() -> Side:
        leaves = [ag.tensor(start, requires_grad=True) for start in starts]
        loss = total(leaves, [ag.tensor(weight) for weight in weights])

        async def step() -> None:
            await loss.backward(retain_graph=True)
            for leaf in leaves:
                leaf.grad = None

        async def result() -> list[Any]:
            await loss.backward(retain_graph=True)
            found = [leaf.grad.numpy().copy() for leaf in leaves if leaf.grad is not None]
            for leaf in leaves:
                leaf.grad = None
            return found

        return Side(step, result)

    def torch_() -> Side:
        import torch

        leaves = [torch.tensor(start, requires_grad=True) for start in starts]
        loss = total(leaves, [torch.tensor(weight) for weight in weights])

        def step() -> None:
            loss.backward(retain_graph=True)
            for leaf in leaves:
                leaf.grad = None

        def result() -> list[Any]:
            loss.backward(retain_graph=True)
            found = [leaf.grad.numpy().copy() for leaf in leaves]
            for leaf in leaves:
                leaf.grad = None
            return found

        return Side(step, result)

    name = f"2 branches of {depth} products {size}×{size}"
    async with ag.Engine(threads=2):
        return await compare(TITLE, [Workload(name, sides(settings, ours, torch=torch_), 0.55, None, rtol=1e-3)], settings, rounds=10)


# -------------------------------------------------------------------- a remote node


class Elsewhere(ag.Function):
    """The identity, whose backward waits as for another machine."""

    seconds = 0.2

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        """Returns its argument's value."""
        return x.clone()

    @staticmethod
    async def backward(ctx: Any, grad: Any) -> Any:
        """Waits, then passes the gradient on."""
        await asyncio.sleep(Elsewhere.seconds)
        return grad


async def _remote(settings: Settings) -> Table:
    seconds = 0.01 if settings.tiny else 0.2
    Elsewhere.seconds = seconds
    size = settings.of(256, 8)
    rng = np.random.default_rng(1)
    leaf = ag.tensor(rng.normal(size=(size, size)).astype(np.float32), requires_grad=True)
    factor = ag.tensor((rng.normal(size=(size, size)) / np.sqrt(size)).astype(np.float32))
    distant = ag.tensor([1.0], requires_grad=True)

    def local(products: int) -> Any:
        y = leaf
        for _ in range(products):
            y = y @ factor
        return (y * y).sum()

    async def seconds_of(loss: Any) -> float:
        started = time.perf_counter()
        await loss.backward(retain_graph=True)
        return time.perf_counter() - started

    products = 8
    each = min([await seconds_of(local(products)) for _ in range(5)]) / products
    products = max(1, round(seconds / each))
    remote_loss = Elsewhere.apply(distant).sum()
    local_loss = local(products)
    both = Elsewhere.apply(distant).sum() + local_loss
    node = both.grad_fn.next_edges[0].node.next_edges[0].node
    node.set_sequence_nr(2**40)  # what waits elsewhere goes first
    losses = {"local": local_loss, "remote": remote_loss, "both": both}
    steps = {name: functools.partial(loss.backward, retain_graph=True) for name, loss in losses.items()}
    timings = await interleave(steps, rounds=settings.of(7, 1), repeats=1, warm=0)
    table = Table(
        f"A remote node of {seconds:g} s beside {seconds:g} s of local compute, in one pass",
        ["local alone ms min/median", "remote alone ms", "both ms", "both / larger", "target", "beyond", "verdict"],
    )
    larger = max(timings["local"].minimum, timings["remote"].minimum)
    together = timings["both"].minimum
    goals = goal_cells(None if settings.tiny else together, 0.22, None)
    table.add(*map(milliseconds, timings.values()), f"{together / larger:.3f}", *goals)
    table.notes.append("target: 0.22 s for 0.2 s beside 0.2 s; the median is " + f"{statistics.median(timings['both'].seconds):.3f} s")
    return table

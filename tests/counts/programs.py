"""Programs that are counted: the small graphs, shortened, and one edge between two workers. ``python -m tests.counts.programs LIBRARY [NAME ...]``.

Note [N and 2 N]
    Each program runs N times and then 2 N times; the difference is N passes without the beginning and the end of a count. This is done `PAIRS` times,
    and the median counts. The collector of garbage is off, since it runs where the allocations of all programs before have led it. The loop has
    virtual time: the engine, which lets others go first after so many milliseconds, does so at the same places however slow the machine is, and no
    timer runs in one count and not in the next.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiograd as ag
from aiograd import distributed as dist
from aiograd.testing import simulated_run
from tests.benchmarks import small_graphs
from tests.benchmarks.harness import OURS, Settings, Workload
from tests.distributed.memory import Switchboard

PAIRS = 3
#: passes before the first count
WARM = 4
_ALONE = Settings(peers=())

#: name -> the workload and N
GRAPHS: dict[str, tuple[Callable[[], Workload], int]] = {
    "chain of 100, gradient of x": (lambda: small_graphs.chain(_ALONE, 100, every_leaf=False), 4),
    "chain of 200, gradient of x": (lambda: small_graphs.chain(_ALONE, 200, every_leaf=False), 4),
    "chain of 100, gradient of x, a and b": (lambda: small_graphs.chain(_ALONE, 100, every_leaf=True), 4),
    "100 branches, own leaves": (lambda: small_graphs.wide(_ALONE, 100, own_leaves=True), 4),
    "100 branches, one leaf": (lambda: small_graphs.wide(_ALONE, 100, own_leaves=False), 4),
    "MLP step, SGD by hand": (lambda: small_graphs.mlp(_ALONE, by_optim=False), 20),
    "MLP step, optim.SGD": (lambda: small_graphs.mlp(_ALONE, by_optim=True), 20),
    "LSTM of 5 steps": (lambda: small_graphs.lstm(_ALONE, 5), 8),
}
EDGE, EDGE_PASSES = "edge between two workers", 10
NAMES = (*GRAPHS, EDGE)
#: derived: (longer, shorter, by how many links)
LINK = ("link of a chain", "chain of 200, gradient of x", "chain of 100, gradient of x", 100)


class Marks:
    """The library of ``marks.c``."""

    def __init__(self, library: Any) -> None:
        self._library = library

    async def count(self, name: str, step: Callable[[], Awaitable[Any]], passes: int) -> None:
        """Count a step, see Note [N and 2 N]."""
        for _ in range(WARM):
            await step()
        for pair in range(PAIRS):
            for times in (passes, 2 * passes):
                self._library.begin()
                for _ in range(times):
                    await step()
                self._library.end(f"{name}: {pair} {times}".encode())


@asynccontextmanager
async def edge() -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """A step forward and backward through one function of another worker, as in `tests.benchmarks.remote`; both workers are in this process."""
    service, board, secret = dist.Service(), Switchboard(), b"counted!" * 4

    @service.function
    async def scaled(x: ag.Tensor) -> ag.Tensor:
        return x * 2.0

    async with (
        dist.Worker("b", service=service, secret=secret, transport=board.transport("b")) as b,
        dist.Worker("a", secret=secret, transport=board.transport("a"), peers={"b": b.url}) as a,
    ):
        x = ag.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)

        async def step() -> None:
            async with a.context() as ctx:
                await ctx.backward((await a.call("b", "scaled", x)).sum())

        yield step


async def graph(marks: Marks, name: str) -> None:
    """Count one of `GRAPHS`."""
    make, passes = GRAPHS[name]
    await marks.count(name, make().sides[OURS].step, passes)


async def remote(marks: Marks) -> None:
    """Count the edge."""
    async with edge() as step:
        await marks.count(EDGE, step, EDGE_PASSES)


def count(marks: Marks, names: list[str]) -> None:
    """Count the programs of these names, each on a loop of its own."""
    for name in names:
        simulated_run(*((remote, marks) if name == EDGE else (graph, marks, name)))


if __name__ == "__main__":
    gc.disable()
    count(Marks(ctypes.CDLL(sys.argv[1])), sys.argv[2:] or [*NAMES])

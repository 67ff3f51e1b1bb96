"""Groups on networks that fail: results are right to the bit or there is a typed error on every member, in time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine
from random import Random
from typing import Any

import numpy as np
import pytest

from aiograd import distributed as dist
from aiograd.errors import CollectiveError, DeadlineError, WorkerLostError
from aiograd.testing import simulated_run
from aiograd.testing.network import Faults, HostKilledError, SimulatedNetwork
from tests.distributed.workers import SECRET

TYPED = (CollectiveError, WorkerLostError, DeadlineError)
OPERATIONS, SECONDS = 12, 8.0


class GroupRun:
    """One seed: a group carries out operations while the network and its hosts are in trouble."""

    def __init__(self, seed: int) -> None:
        self.random = Random(f"{seed}:group")
        self.is_calm = seed % 4 == 0
        faults = Faults(latency=(1e-4, 1e-2), jitter=3e-3) if self.is_calm else Faults.drawn(Random(f"{seed}:faults"))
        self.network = SimulatedNetwork(seed, faults=faults)
        self.names = tuple(f"w{i}" for i in range(self.random.randint(2, 5)))
        self.shapes = [self.random.choice((1, 7, 3000, 20_000)) for _ in range(OPERATIONS)]
        self.kinds = [self.random.choice(("all_reduce", "reduce_scatter", "all_gather", "broadcast", "barrier")) for _ in range(OPERATIONS)]
        self.outcomes: dict[str, str] = {}
        self.done: Counter[str] = Counter()
        self.killed: set[str] = set()
        self.ended: dict[str, float] = {}

    def values(self, rank: int, number: int) -> Any:
        return np.random.default_rng([rank, number]).standard_normal(self.shapes[number]).astype(np.float32)

    def total(self, number: int) -> Any:
        total = self.values(0, number)
        for rank in range(1, len(self.names)):
            total = total + self.values(rank, number)
        return total

    def operate(self, group: dist.Group, number: int) -> Coroutine[Any, Any, None]:
        """Begin an operation now; returns what waits for its result and checks it."""
        mine = self.values(group.rank, number)
        waiting: Coroutine[Any, Any, Any]
        expected: list[Any]
        match self.kinds[number]:
            case "all_reduce":
                waiting, expected = group.all_reduce([mine], timeout=SECONDS), [self.total(number)]
            case "reduce_scatter":
                waiting, expected = group.reduce_scatter(mine, timeout=SECONDS), [np.array_split(self.total(number), group.size)[group.rank]]
            case "all_gather":
                waiting, expected = group.all_gather(mine, timeout=SECONDS), [self.values(rank, number) for rank in range(group.size)]
            case "broadcast":
                root = number % group.size
                waiting = group.broadcast([mine] if group.rank == root else None, root, timeout=SECONDS)
                expected = [self.values(root, number)]
            case _:
                waiting, expected = group.barrier(timeout=SECONDS), []
        return self.check(waiting, expected)

    async def check(self, waiting: Coroutine[Any, Any, Any], expected: list[Any]) -> None:
        found = await waiting
        found = [] if found is None else found if isinstance(found, list) else [found]
        assert [array.tobytes() for array in found] == [array.tobytes() for array in expected]

    async def member(self, name: str) -> None:
        transport = self.network.transport(name)
        async with dist.Worker(name, secret=SECRET, transport=transport) as worker:
            for other in self.names:
                if other != name:
                    worker.add_peer(other, f"sim://{other}")
            try:
                group = await dist.join_group(worker, self.names, timeout=SECONDS)
                pending = list(range(OPERATIONS))
                while pending:
                    together, pending = pending[:3], pending[3:]
                    for outcome in await asyncio.gather(*(self.operate(group, number) for number in together), return_exceptions=True):
                        if isinstance(outcome, BaseException):
                            raise outcome
                    self.done[name] += len(together)
                    await asyncio.sleep(0.01)
                self.outcomes[name] = "done"
            except TYPED as error:
                self.outcomes[name] = type(error).__name__
                await asyncio.sleep(2 * SECONDS)  # the others are to find out from it, not from its end
            self.ended[name] = asyncio.get_running_loop().time()
            await asyncio.sleep(4 * SECONDS)

    async def host(self, name: str) -> None:
        try:
            await self.network.spawn(name, self.member(name))
        except HostKilledError:
            self.outcomes[name] = "killed"

    async def trouble(self) -> None:
        later = asyncio.get_running_loop().call_later
        for _ in range(0 if self.is_calm else self.random.randrange(3)):
            await asyncio.sleep(self.random.uniform(0, 0.5))
            a, b = self.random.sample(self.names, 2)
            match self.random.choice(("kill", "reset", "cut", "freeze")):
                case "kill":
                    self.killed.add(a)
                    self.network.kill(a, silent=self.random.random() < 0.5)
                case "reset":
                    self.network.reset(a, b)
                case "cut":
                    self.network.cut(a, b)
                    later(self.random.uniform(0, 3), self.network.heal, a, b)
                case "freeze":
                    self.network.freeze(a, self.random.uniform(0, 3))

    async def main(self) -> None:
        running: list[Coroutine[Any, Any, None]] = [self.host(name) for name in self.names]
        await asyncio.gather(*running, self.trouble())


@pytest.mark.sim
@pytest.mark.parametrize("block", range(4))
def test_whatever_fails_results_are_right_or_all_members_are_told(block: int) -> None:
    outcomes: Counter[str] = Counter()
    for seed in range(8 * block, 8 * block + 8):
        run = GroupRun(seed)
        simulated = simulated_run(run.main, seed=seed, order=run.random.choice(("fifo", "permuted")))
        assert not simulated.leftover_tasks, (seed, simulated.leftover_tasks)
        assert set(run.outcomes) == set(run.names), (seed, run.outcomes)
        assert all(seconds < 8 * SECONDS for seconds in run.ended.values()), (seed, run.ended)
        living = {outcome for name, outcome in run.outcomes.items() if name not in run.killed}
        if run.is_calm:
            assert living == {"done"}, (seed, run.outcomes)
        elif "done" in living and living != {"done"}:  # an operation may be over on some when a member is lost; then it was the last
            assert min(run.done[name] for name in run.names if name not in run.killed) >= OPERATIONS - 3, (seed, run.outcomes, run.done)
        outcomes.update(run.outcomes.values())
    assert outcomes["done"] > 10, outcomes

"""Members that train together on networks that fail: a pass is committed on all of them, with the bits of one process, or on none."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Coroutine
from random import Random
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import distributed as dist
from aiograd.errors import CommitUnknown, DistributedError
from aiograd.testing import simulated_run
from aiograd.testing.network import Faults, HostKilledError, SimulatedNetwork
from tests.distributed.data_parallel.replicas import bits, gradients, loss_of, net
from tests.distributed.workers import SECRET

STEPS, SECONDS = 6, 8.0


class TrainingRun:
    """One seed: a group trains while the network and its hosts are in trouble."""

    def __init__(self, seed: int) -> None:
        self.random = Random(f"{seed}:training")
        self.is_calm = seed % 4 == 0
        faults = Faults(latency=(1e-4, 1e-2), jitter=3e-3) if self.is_calm else Faults.drawn(Random(f"{seed}:faults"))
        self.network = SimulatedNetwork(seed, faults=faults)
        self.names = tuple(f"w{i}" for i in range(self.random.randint(2, 4)))
        self.bucket_bytes = self.random.choice((1, 1 << 20))
        #: by step, the members that have committed it and the bits of their gradients
        self.committed: dict[int, dict[str, list[Any]]] = defaultdict(dict)
        self.outcomes: dict[str, str] = {}
        self.weights: dict[str, list[Any]] = {}
        self.killed: set[str] = set()

    async def train(self, name: str, group: dist.Group) -> None:
        ddp = dist.DistributedDataParallel(net(group.rank), group, bucket_bytes=self.bucket_bytes, timeout=SECONDS)
        optimizer = ag.optim.SGD(ddp.parameters(), lr=0.1)
        await ddp.synchronize()
        for step in range(STEPS):
            optimizer.zero_grad()
            try:
                await loss_of(ddp, group.rank, step).backward()
            except BaseException as error:
                is_committed = getattr(error, "committed", False)
                assert is_committed == any(gradients(ddp)), error
                if not is_committed:
                    raise
            assert all(gradients(ddp))
            self.committed[step][name] = gradients(ddp)
            optimizer.step()
            await asyncio.sleep(0.01)
        self.weights[name] = bits(ddp.parameters())

    async def member(self, name: str) -> None:
        transport = self.network.transport(name)
        async with dist.Worker(name, secret=SECRET, transport=transport) as worker:
            for other in self.names:
                if other != name:
                    worker.add_peer(other, f"sim://{other}")
            try:
                await self.train(name, await dist.join_group(worker, self.names, timeout=SECONDS))
                self.outcomes[name] = "done"
            except DistributedError as error:
                self.outcomes[name] = type(error).__name__
            await asyncio.sleep(6 * SECONDS)  # the others are to find out from its messages, not from its end

    async def host(self, name: str) -> None:
        try:
            await self.network.spawn(name, self.member(name))
        except HostKilledError:
            self.outcomes[name] = "killed"

    async def trouble(self) -> None:
        later = asyncio.get_running_loop().call_later
        for _ in range(0 if self.is_calm else self.random.randrange(3)):
            await asyncio.sleep(self.random.uniform(0, 0.3))
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


def alone(count: int) -> tuple[list[list[Any]], list[Any]]:
    """The gradients of each step, and the weights at the end, of one process that adds up the shards in the order of the ranks."""

    async def main() -> tuple[list[list[Any]], list[Any]]:
        model = net()
        optimizer: Any = ag.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for step in range(STEPS):
            total: list[Any] = []
            for rank in range(count):
                model.zero_grad()
                await loss_of(model, rank, step).backward()
                grads = [p.grad.numpy() for p in model.parameters()]
                total = grads if not total else [a + b for a, b in zip(total, grads, strict=True)]
            mean = [ag.tensor(each / np.float32(count)) for each in total]
            found.append(bits(mean))
            optimizer.step(mean)
        return found, bits(model.parameters())

    return ag.run(main(), tune_gc=False)


def check(run: TrainingRun, expected: tuple[list[list[Any]], list[Any]]) -> None:
    """Steps are taken by all members that can tell, with the bits of one process."""
    grads, weights = expected
    living = [name for name in run.names if name not in run.killed]
    for step, committed in run.committed.items():
        assert all(each == grads[step] for each in committed.values()), step
        others = {run.outcomes[name] for name in living if name not in committed}
        assert others <= {CommitUnknown.__name__}, (step, committed.keys(), run.outcomes)
    assert all(each == weights for each in run.weights.values())
    if run.is_calm:
        assert set(run.outcomes.values()) == {"done"}, run.outcomes


@pytest.mark.sim
@pytest.mark.parametrize("block", range(4))
def test_whatever_fails_a_pass_is_committed_on_all_members_or_on_none(block: int) -> None:
    expected = {count: alone(count) for count in (2, 3, 4)}
    outcomes: Counter[str] = Counter()
    for seed in range(8 * block, 8 * block + 8):
        run = TrainingRun(seed)
        simulated = simulated_run(run.main, seed=seed, order=run.random.choice(("fifo", "permuted")))
        assert not simulated.leftover_tasks, (seed, simulated.leftover_tasks)
        assert set(run.outcomes) == set(run.names), (seed, run.outcomes)
        try:
            check(run, expected[len(run.names)])
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise
        outcomes.update(run.outcomes.values())
    assert outcomes["done"] > 8 and len(outcomes) > 1, outcomes

"""Leases with `DistributedDataParallel`: all members take their rows of the same batches, and every batch counts once, with a loss at any moment."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import distributed as dist
from aiograd.errors import ArgumentError, ArgumentTypeError, DistributedError
from aiograd.testing import Faults, HostKilledError, SimulatedNetwork, simulated_run
from tests.distributed.data_parallel.replicas import bits, mean_of, net
from tests.distributed.groups import everywhere, groups
from tests.distributed.workers import SECRET
from tests.support import assert_raises

NAMES = ("w0", "w1", "w2")
BATCHES, EPOCHS = 4, 2
#: OpenBLAS's kernel of one row with 5 columns of float32, on CPUs with AVX-512, reads numbers of its stack that it does not use; where these are by
#: chance signalling NaNs, numpy warns. The bits are compared here, so a NaN of our own is noticed.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in (dot|matmul):RuntimeWarning")
INPUTS = np.random.default_rng(0).standard_normal((15, 5)).astype(np.float32)
EVERY = [(epoch, number) for epoch in range(EPOCHS) for number in range(BATCHES)]


def loader(**options: Any) -> ag.data.DataLoader:
    return ag.data.DataLoader(INPUTS, 4, **{"shuffle": True, "generator": ag.Generator(3), **options})


async def oracle(history: list[tuple[int, int, int]]) -> list[Any]:
    """The parameters of one process that takes these steps: epoch and number of the batch, and the ranks that divided it."""
    model = net()
    optimizer = ag.optim.SGD(model.parameters(), lr=0.1)
    alone, batches = loader(), {}
    while alone.epoch < EPOCHS:
        async for lease in alone.leases():
            async with lease as batch:
                batches[lease.epoch, lease.number] = batch.numpy()
    for epoch, number, size in history:
        rows = np.array_split(batches[epoch, number], size)

        async def grads_of(rank: int, rows: Any = rows) -> Any:
            model.zero_grad()
            await model(ag.tensor(rows[rank])).square().mean().backward()
            return [p.grad.numpy() for p in model.parameters()]

        for p, each in zip(model.parameters(), await mean_of(grads_of, size), strict=True):
            p.grad = ag.tensor(np.frombuffer(each, np.float32).reshape(p.shape))
        optimizer.step()
    return bits(model.parameters())


class Elastic:
    """Members on a simulated network, of which one is lost at a moment; the others go on.

    Args:
        lost: the member that is killed, or has its pass cancelled.
        moment: virtual seconds after the members have met; None: never.
        trouble: the kind of loss.
    """

    def __init__(self, lost: str = "", moment: float | None = None, trouble: str = "kill") -> None:
        self.network = SimulatedNetwork(1, faults=Faults(latency=(0.001, 0.002)))
        self.lost, self.moment, self.trouble = lost, moment, trouble
        self.history: dict[str, list[tuple[int, int, int]]] = {name: [] for name in NAMES}
        self.results: dict[str, list[Any]] = {}
        self.killed: set[str] = set()
        self.failures = 0
        self.seconds = 0.0
        self.over = asyncio.Event()
        self.met = 0
        self.tasks: dict[str, asyncio.Task[Any]] = {}

    def strike(self) -> None:
        if self.trouble == "cancel":
            self.tasks[self.lost].cancel()
        else:
            self.killed.add(self.lost)
            if self.results.keys() | self.killed == set(NAMES):
                self.over.set()
            self.network.kill(self.lost, silent=self.trouble == "silent kill")

    async def member(self, name: str) -> None:
        peers = {other: f"sim://{other}" for other in NAMES if other != name}
        async with dist.Worker(name, peers=peers, secret=SECRET, transport=self.network.transport(name)) as worker:
            group = await dist.join_group(worker, NAMES, timeout=10.0)
            self.met += 1
            loop = asyncio.get_running_loop()
            began = loop.time()
            if self.met == len(NAMES) and self.moment is not None:
                self.network.loop.call_later(self.moment, self.strike)
            model, data = net(), loader()
            optimizer = ag.optim.SGD(model.parameters(), lr=0.1)
            while True:
                self.tasks[name] = asyncio.ensure_future(self.train(group, model, optimizer, data))
                try:
                    await asyncio.shield(self.tasks[name])
                    break
                except (DistributedError, asyncio.CancelledError):
                    if not self.tasks[name].done():
                        raise
                    self.failures += 1
                try:
                    if self.trouble == "cancel":
                        await group.aclose()  # the others may not be in a pass
                        group = await dist.join_group(worker, NAMES, name="again", timeout=10.0)
                    else:
                        group = await group.without(self.lost, timeout=10.0)
                except DistributedError:
                    assert data.epoch == EPOCHS  # the others know of the end, and have ended
                    break
            self.seconds = loop.time() - began
            self.results[name] = bits(model.parameters())
            if self.results.keys() | self.killed == set(NAMES):
                self.over.set()
            await self.over.wait()

    async def train(self, group: dist.Group, model: Any, optimizer: Any, data: Any) -> None:
        ddp = dist.DistributedDataParallel(model, group, data=data, timeout=10.0)
        try:
            await ddp.synchronize()
            while data.epoch < EPOCHS:
                async for lease in data.leases(group.rank, group.size):
                    async with lease as rows:
                        optimizer.zero_grad()
                        try:
                            await ddp(rows).square().mean().backward()
                        except BaseException as error:
                            if not getattr(error, "committed", False):
                                raise
                            self.took(group, lease, optimizer)
                            raise
                        self.took(group, lease, optimizer)
            await group.barrier(timeout=10.0)
        finally:
            ddp.detach()

    def took(self, group: dist.Group, lease: Any, optimizer: Any) -> None:
        optimizer.step()
        self.history[group.names[group.rank]].append((lease.epoch, lease.number, group.size))

    def run(self) -> None:
        async def main() -> None:
            running = [self.network.spawn(name, self.member(name)) for name in NAMES]
            for found in await asyncio.gather(*running, return_exceptions=True):
                if isinstance(found, BaseException) and not isinstance(found, HostKilledError):
                    raise found

        simulated_run(main)
        history = self.history[min(self.results.keys() - self.killed)]  # rank 0 of the last group, which never took the place of another
        assert [(epoch, number) for epoch, number, _ in history] == EVERY
        expected = asyncio.run(oracle(history))
        assert all(found == expected for found in self.results.values())
        assert len(self.results) >= len(NAMES) - 1


@pytest.mark.sim
def test_members_that_lease_train_as_one_process_would() -> None:
    run = Elastic()
    run.run()
    assert run.failures == 0 and len(run.results) == len(NAMES)
    assert run.history["w0"] == [(*place, 3) for place in EVERY]


@pytest.mark.sim
@pytest.mark.parametrize("lost", NAMES)
@pytest.mark.parametrize("trouble", ["kill", "silent kill", "cancel"])
@pytest.mark.parametrize("block", range(2))
def test_every_batch_counts_once_whichever_member_is_lost_when(lost: str, trouble: str, block: int) -> None:
    calm = Elastic()
    calm.run()
    failures = 0
    for part in range(block, 8, 2):
        run = Elastic(lost, calm.seconds * (part + 0.5) / 8, trouble)
        run.run()
        failures += run.failures > 0
    assert failures > 2


# ---------------------------------------------------------------- the place of rank 0

PAIR = NAMES[:2]


async def test_synchronize_carries_the_place_of_rank_0() -> None:
    async with groups(*PAIR) as (_, joined):

        async def read(group: dist.Group) -> Any:
            data = loader(generator=ag.Generator(group.rank))  # another order on each
            async for lease in data.leases():
                async with lease:
                    pass
                if group.rank == 1 or lease.number == 1:
                    break
            ddp = dist.DistributedDataParallel(net(group.rank), group, data=data)
            await ddp.synchronize()
            found = [data.state_dict()["batches"]]
            for _ in range(2):
                async for lease in data.leases(group.rank, group.size):
                    async with lease:
                        found.append((lease.epoch, lease.number, lease.indices))
            return found

        first, second = await everywhere(joined, read)
        assert first[0] == second[0] == 2 and [each[:2] for each in first[1:]] == [each[:2] for each in second[1:]]
        alone = loader(generator=ag.Generator(0))
        whole = []
        for _ in range(2):
            async for lease in alone.leases():
                async with lease:
                    whole.append(lease.indices)
        assert [one[2] + other[2] for one, other in zip(first[1:], second[1:], strict=True)] == whole[2:]


async def test_the_first_call_may_be_within_a_lease_if_all_are_at_one_place() -> None:
    async with groups(*PAIR) as (_, joined):

        async def read(group: dist.Group) -> Any:
            ag.seed(group.rank)
            data = ag.data.DataLoader(INPUTS, 4)
            if group.rank == 1 and not is_equal:
                await anext(aiter(data))
            ddp = dist.DistributedDataParallel(net(group.rank), group, data=data)
            async for lease in data.leases(group.rank, group.size):
                async with lease as rows:
                    await (await ddp(rows)).square().mean().backward()
                break
            return data.state_dict()["batches"]

        is_equal = True
        assert await everywhere(joined, read) == [1, 1]
    async with groups(*PAIR) as (_, joined):
        is_equal = False
        first, second = await everywhere(joined, read)
        assert isinstance(first, DistributedError) and isinstance(second, ArgumentError)
        assert "w1 (rank 1) computes with a batch of another place than w0 (rank 0); `await ddp.synchronize()` on all members" in str(second)


@pytest.mark.parametrize(
    ("other", "differs"),
    [
        (lambda: None, "no data on w1 (rank 1), 15 examples on w0 (rank 0)"),
        (lambda: ag.data.DataLoader(INPUTS[:9], 4, shuffle=True, generator=ag.Generator(3)), "9 examples on w1 (rank 1), 15 examples on w0 (rank 0)"),
        (lambda: ag.data.DataLoader(iter(INPUTS), 4), "a stream on w1 (rank 1), 15 examples on w0 (rank 0)"),
        (lambda: ag.data.DataLoader(INPUTS, 5, shuffle=True, generator=ag.Generator(3)), "batches of 5 on w1 (rank 1), batches of 4 on w0 (rank 0)"),
        (lambda: loader(shuffle=False), "the order of the source on w1 (rank 1), another order for every epoch on w0 (rank 0)"),
    ],
)
async def test_loaders_that_differ_are_named(other: Callable[[], Any], differs: str) -> None:
    async with groups(*PAIR) as (_, joined):

        async def begin(group: dist.Group) -> None:
            await dist.DistributedDataParallel(net(), group, data=other() if group.rank else loader()).synchronize()

        for found in await everywhere(joined, begin):
            assert isinstance(found, ArgumentError)
            assert f"the data differs between members: {differs}; every member needs a loader of the same data" in str(found)


async def test_data_that_is_none_is_refused() -> None:
    async with groups("w0") as (_, (group,)):
        make: Any = functools.partial(dist.DistributedDataParallel, net(), group)
        assert_raises(ArgumentTypeError, r"\(data=...\): expected an ag.data.DataLoader, found list", make, data=[1])
        assert_raises(ArgumentError, "the loader shuffles by the default generator, which differs", make, data=loader(generator=None))

        class Source:
            def __iter__(self) -> Any:
                return iter(INPUTS)

            def state_dict(self) -> Any:
                return {"place": ag.ones(1)}

        data = ag.data.DataLoader(Source(), 4)
        async for _ in data.leases():
            break
        async for lease in data.leases():
            async with lease:
                pass
            break
        with pytest.raises(ArgumentTypeError, match="the state of its source cannot be sent .*; expected numbers, texts, lists and dicts"):
            await make(data=data).synchronize()

"""Leases with steps that are transactions: every batch counts once under losses and cancellations, with the bits of an undisturbed run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import nn
from aiograd.data import DataLoader, TensorDataset, leases
from aiograd.data.epoch import Epoch
from aiograd.data.ledger import BatchLedger
from aiograd.errors import DistributedError, ModeError, WorkerLostError
from aiograd.pipeline import Pipeline, make_schedule
from aiograd.testing import simulated_run
from tests.distributed.data_parallel.simulated import World, expected
from tests.pipeline.models import blocks, gradients
from tests.pipeline.models import data as batch_of
from tests.pipeline.replicas import serial_replicas
from tests.pipeline.test_replicas_failures import ReplicatedWorld

ROWS, EPOCHS = 10, 2


def loader(columns: int = 4) -> DataLoader:
    random = np.random.default_rng(1)
    source = TensorDataset(ag.tensor(random.standard_normal((ROWS, columns)).astype(np.float32)), ag.tensor(random.integers(0, 3, ROWS)))
    return DataLoader(source, 4, shuffle=True, generator=ag.Generator(2))


def is_committed(error: BaseException) -> bool:
    return any(getattr(each, "committed", False) for each in (error, error.__cause__))


# ---- in one process


class Run:
    """A run that is cancelled at a step of the loop.

    Args:
        make: returns the modules, and a function that leaves the gradients of a batch in ``grad``.
    """

    def __init__(self, make: Callable[[], tuple[list[Any], Callable[..., Awaitable[Any]]]]) -> None:
        self.modules, self.gradients = make()
        self.data = loader()
        self.taken: list[tuple[int, int]] = []
        self.cancelled = 0

    async def main(self) -> list[bytes]:
        optimizer = ag.optim.SGD([p for module in self.modules for p in module.parameters()], lr=0.1, momentum=0.9)

        def take(lease: Any) -> None:
            optimizer.step()
            optimizer.zero_grad()
            self.taken.append((lease.epoch, lease.number))

        while self.data.epoch < EPOCHS:
            try:
                async for lease in self.data.leases():
                    async with lease as batch:
                        try:
                            await self.gradients(*batch)
                        except asyncio.CancelledError as error:
                            if is_committed(error):
                                take(lease)
                            raise
                        take(lease)
            except asyncio.CancelledError:
                self.cancelled += 1
        return [p.detach().numpy().tobytes() for module in self.modules for p in module.parameters()]


def one_module() -> Any:
    model = nn.Sequential(nn.Linear(4, 5, generator=ag.Generator(0)), nn.Dropout(0.5), nn.Tanh(), nn.Linear(5, 3, generator=ag.Generator(1)))

    async def pause(_: Any) -> None:  # after the commit: a cancellation here is raised with `committed` True
        await asyncio.sleep(0)

    model[0].weight.register_post_accumulate_grad_hook(pause)

    async def gradients(x: Any, target: Any) -> None:
        await nn.functional.cross_entropy(model(x), target).backward()

    return [model], gradients


def two_stages() -> Any:
    first = nn.Sequential(nn.Linear(4, 5, generator=ag.Generator(0)), nn.Dropout(0.5), nn.Tanh())
    second = nn.Linear(5, 3, generator=ag.Generator(1))
    pipe = Pipeline([first, second], make_schedule("1F1B", 2, 2), loss_fn=nn.functional.cross_entropy)
    return [first, second], pipe.step


@pytest.mark.parametrize("make", [one_module, two_stages])
@pytest.mark.parametrize("order", ["fifo", "permuted"])
def test_a_run_that_is_cancelled_at_any_step_of_the_loop_has_the_bits_of_one_that_is_not(make: Any, order: Any) -> None:
    options: dict[str, Any] = {"order": order, "seed": 1}
    calm = simulated_run(Run(make).main, **options)
    given_back = 0
    for step in range(2, calm.steps, 3 if make is one_module else 11):
        run = Run(make)
        found = simulated_run(run.main, cancel_at=step, **options)
        assert run.taken == [(epoch, number) for epoch in range(EPOCHS) for number in range(3)]
        assert found.value == calm.value and not found.leftover_tasks
        given_back += run.cancelled
    assert given_back > 5


# ---- replicas on workers


class Replicas:
    """A run of replicas on a simulated network, with trouble at a moment.

    Args:
        moment: virtual seconds after the beginning; None: no trouble.
        trouble: the kind of trouble.
        name: of the worker in trouble.
    """

    def __init__(self, moment: float | None = None, trouble: str = "", name: str = "w1") -> None:
        self.moment, self.trouble, self.name = moment, trouble, name
        self.world = World()
        self.data = loader()
        self.history: list[Any] = []
        self.taken: list[tuple[int, int]] = []
        self.failures = 0
        self.seconds = 0.0

    async def main(self, world: World) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        task = asyncio.current_task()
        assert task is not None
        if self.moment is not None:
            strike = task.cancel if self.trouble == "cancel" else lambda: world.network.kill(self.name, silent=self.trouble == "silent kill")
            loop.call_later(self.moment, strike)
        while self.data.epoch < EPOCHS:
            try:
                async for lease in self.data.leases():
                    async with lease as (x, target):
                        await self.step(world, lease, x.numpy(), target.numpy())
            except (DistributedError, asyncio.CancelledError) as error:
                self.failures += 1
                if isinstance(error, WorkerLostError):
                    await world.replicas.remove(error.worker)
        self.seconds = loop.time() - began
        assert self.taken == [(epoch, number) for epoch in range(EPOCHS) for number in range(3)]
        living = [name for name in world.replicas.names if name != self.name or "kill" not in self.trouble]
        assert len(living) >= 2 and [world.state(name) for name in living] == [await expected(self.history)] * len(living)

    async def step(self, world: World, lease: Any, x: Any, target: Any) -> None:
        count = len(world.replicas.names)
        shards = list(zip(np.array_split(x, count), np.array_split(target, count), strict=True))
        try:
            await world.replicas.step(shards)
        except BaseException as error:
            if is_committed(error):
                self.note(lease, shards)
            raise
        self.note(lease, shards)

    def note(self, lease: Any, shards: Any) -> None:
        self.history.append(shards)
        self.taken.append((lease.epoch, lease.number))


@pytest.mark.sim
@pytest.mark.parametrize("trouble", ["kill", "silent kill", "cancel"])
@pytest.mark.parametrize("block", range(3))
def test_replicas_count_every_batch_once_whatever_happens_when(trouble: str, block: int) -> None:
    calm = Replicas()
    calm.world.simulate(calm.main)
    failures = 0
    for part in range(block, 12, 3):
        run = Replicas(calm.seconds * (part + 0.5) / 12, trouble)
        run.world.simulate(run.main)
        failures += run.failures > 0
    assert failures > 2


# ---- replicas of a pipeline on workers


class Pipelines:
    """A run of a pipeline in two replicas of two stages; gradients add up over all batches.

    Args:
        moment, trouble, name: as of `Replicas`.
    """

    def __init__(self, moment: float | None = None, trouble: str = "", name: str = "b1") -> None:
        self.moment, self.trouble, self.name = moment, trouble, name
        self.data = DataLoader(TensorDataset(*batch_of(16)), 4, shuffle=True, generator=ag.Generator(2))
        self.taken: list[tuple[tuple[int, int], int, Any]] = []
        self.failures = 0
        self.seconds = 0.0

    async def main(self, world: Any) -> None:
        loop, task, pipe = asyncio.get_running_loop(), asyncio.current_task(), world.pipe
        assert task is not None
        began = loop.time()
        if self.moment is not None:
            loop.call_later(self.moment, task.cancel if self.trouble == "cancel" else lambda: world.network.kill(self.name))
        while self.data.epoch < 1:
            try:
                async for lease in self.data.leases():
                    async with lease as batch:
                        count = len(pipe.replicas)
                        try:
                            await pipe.step(*batch)
                        except BaseException as error:
                            if is_committed(error):
                                self.taken.append(((lease.epoch, lease.number), count, batch))
                            raise
                        self.taken.append(((lease.epoch, lease.number), count, batch))
            except (DistributedError, asyncio.CancelledError) as error:
                self.failures += 1
                if not isinstance(error, asyncio.CancelledError):
                    await pipe.remove(self.name)
        self.seconds = loop.time() - began
        assert [place for place, _, _ in self.taken] == [(0, number) for number in range(4)]
        modules = blocks(2)
        for _, count, batch in self.taken:
            await serial_replicas(modules, [2] * count, *batch)
        assert world.found[0] == gradients(modules)


@pytest.mark.sim
@pytest.mark.parametrize("trouble", ["kill", "cancel"])
@pytest.mark.parametrize("block", range(3))
def test_a_pipeline_counts_every_batch_once_whatever_happens_when(trouble: str, block: int) -> None:
    calm = Pipelines()
    ReplicatedWorld().run(calm.main)
    failures = 0
    for part in range(block, 9, 3):
        run = Pipelines(calm.seconds * (part + 0.5) / 9, trouble)
        ReplicatedWorld().run(run.main)
        failures += run.failures > 0
    assert failures > 1


# ---- ablations


def every_moment(make: Any) -> None:
    calm = simulated_run(Run(make).main)
    for step in range(2, calm.steps):
        run = Run(make)
        assert simulated_run(run.main, cancel_at=step).value == calm.value


@pytest.mark.parametrize(
    ("make", "owner", "name", "broken"),
    [
        (one_module, leases, "was_committed", lambda error: False),
        (two_stages, leases, "was_committed", lambda error: True),
        (two_stages, Epoch, "generator", lambda self, number, rank: ag.default_generator()),
        (two_stages, BatchLedger, "give_back", lambda self, place: self._open.discard(place)),
    ],
)
def test_a_protection_that_is_missing_is_missed(make: Any, owner: Any, name: str, broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, name, broken)
    ag.seed(0)
    with pytest.raises((AssertionError, ModeError)):
        every_moment(make)

"""Replicas on real processes: the bits of one process, also where workers are killed at random times."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from random import Random
from typing import Any

import pytest

import aiograd as ag
from aiograd.distributed import DataParallel, LocalCluster, RemoteModule
from aiograd.errors import WorkerLostError
from tests.chaos.training import run_training
from tests.distributed.data_parallel.models import Net, batches, bits, numbers, serial

pytestmark = pytest.mark.proc

SERVICE = "tests.distributed.data_parallel.models:service"
OPTIONS: dict[str, Any] = {"optimizer": ag.optim.AdamW, "optimizer_options": {"lr": 0.02}, "clip_norm": 1.0}


async def expected(history: Any) -> tuple[list[list[float]], dict[str, bytes]]:
    alone = Net()
    losses = await serial(alone, ag.optim.AdamW(alone.parameters(), lr=0.02), history, clip_norm=1.0)
    return losses, bits(alone.state_dict())


async def test_processes_have_the_bits_of_one_and_one_leaves_and_one_joins() -> None:
    three, two = batches(3, (4, 5, 6)), batches(3, (7, 8), seed=1)
    async with LocalCluster(4, service=SERVICE) as cluster:
        names = cluster.workers
        async with await DataParallel.create(cluster.driver, names[:3], Net, **OPTIONS) as replicas:
            losses = [numbers(await replicas.step(shards)) for shards in three[:2]]
            os.kill(cluster.pids[names[1]], signal.SIGKILL)
            with pytest.raises(WorkerLostError) as caught:
                await replicas.step(three[2])
            assert caught.value.worker == names[1]
            await replicas.remove(names[1])
            losses.append(numbers(await replicas.step(two[0])))
            await replicas.add(names[3])
            assert replicas.names == (names[0], names[2], names[3])
            losses.append(numbers(await replicas.step(three[2])))
            state = bits(await replicas.state_dict())
    assert (losses, state) == await expected([*three[:2], two[0], three[2]])


async def test_a_hundred_steps_under_random_kills() -> None:
    """A killed worker is restarted and takes its place again, with the state of another; the weights are those of the run without any kill."""
    given = batches(100)
    random = Random(0)
    kills, done = 0, 0
    async with LocalCluster(3, service=SERVICE, max_restarts=1000) as cluster:
        names = cluster.workers

        async def trouble() -> None:
            nonlocal kills
            while kills < 3:
                at = done + random.randrange(10, 30)
                while done < at:
                    await asyncio.sleep(0.002)  # whatever the step is busy with then
                name = random.choice(names)
                await cluster.wait_running(name)
                os.kill(cluster.pids[name], signal.SIGKILL)
                kills += 1

        async with await DataParallel.create(cluster.driver, names, Net, **OPTIONS) as replicas:
            killing = asyncio.ensure_future(trouble())
            losses = []
            while done < len(given):
                try:
                    losses.append(numbers(await replicas.step(given[done])))
                    done += 1
                except WorkerLostError as error:
                    assert error.worker in names
                    await cluster.wait_running(error.worker)
                    with contextlib.suppress(WorkerLostError):  # or another one is lost meanwhile: the next step says so
                        await replicas.add(error.worker)
            await killing
            states = [bits(await module_state(replicas, name)) for name in names]
    assert kills == 3
    wanted, state = await expected(given)
    assert losses == wanted and states == [state] * 3


async def test_steps_while_workers_are_killed_and_stopped() -> None:
    """A step that fails names the worker that is lost, and the next ones make up for it."""
    findings = await run_training(1, steps=21)
    assert not findings.wrong and findings.counts["training: steps"] == 21, findings


async def module_state(replicas: DataParallel, name: str) -> Any:
    """The state of one replica."""
    await replicas.eval([x for x, _ in batches(1)[0]])  # all are there
    remote = replicas._coordinator.find(name)
    assert remote is not None
    return await RemoteModule(replicas._coordinator.worker, name, remote.module).state_dict()

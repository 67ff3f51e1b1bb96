"""A pipeline in replicas on real processes: the bits of one process, also when one of them is killed."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

import aiograd as ag
from aiograd.distributed import DistributedOptimizer, LocalCluster
from aiograd.errors import WorkerLostError
from aiograd.pipeline import Pipeline, make_schedule
from tests.pipeline.models import blocks, data, values
from tests.pipeline.replicas import place_replicas, serial_replicas

pytestmark = pytest.mark.proc

SERVICE = "tests.pipeline.remote:service"


async def test_two_replicas_of_two_stages_and_one_that_takes_the_place_of_another() -> None:
    x, target = data(14)
    alone = blocks(2)
    mine = ag.optim.AdamW([parameter for stage in alone for parameter in stage.parameters()], lr=0.05)
    async with LocalCluster(5, service=SERVICE) as cluster:
        a0, a1, b0, b1, spare = cluster.workers
        a, b = await place_replicas(cluster.driver, [[a0, a1], [b0, b1]])
        optimizer = DistributedOptimizer(cluster.driver, ag.optim.AdamW, [*a, *b], lr=0.05)

        async def step(pipe: Pipeline, replicas: int) -> None:
            losses = values(await pipe.step(x, target))
            assert losses == await serial_replicas(alone, [3] * replicas, x, target)
            bits = [b"".join(parameter.grad.numpy().tobytes() for parameter in stage.parameters()) for stage in alone]
            for replica in pipe.replicas:
                assert [await module.ref.call("gradient") for module in replica] == bits
            await optimizer.step()
            mine.step()
            mine.zero_grad()

        for name in ("1F1B", "ZB-H1"):
            async with Pipeline([a, b], make_schedule(name, 2, 3)) as pipe:
                await step(pipe, 2)
                await step(pipe, 2)
        async with Pipeline([a, b], make_schedule("ZB-H1", 2, 3)) as pipe:
            await step(pipe, 2)
            os.kill(cluster.pids[a1], signal.SIGKILL)
            with pytest.raises(WorkerLostError) as caught:
                await pipe.step(x, target)
            assert caught.value.worker == a1
            await pipe.remove(a1)
            await optimizer.remove(a1)
            await step(pipe, 1)
            fresh: Any = await cluster.driver.remote_module(spare, "Last", 1)
            await pipe.add([a[0], fresh])
            await optimizer.remove(a0)  # it took no part in the last step, so its state is copied as well
            await optimizer.add([a[0]], b0)
            await optimizer.add([fresh], b1)
            await step(pipe, 2)
            await step(pipe, 2)
        await optimizer.delete()


@pytest.mark.sweep
async def test_four_replicas_of_four_stages_absorb_losses() -> None:
    """Between steps, and in the midst of one."""
    x, target = data(40)
    alone = blocks(4)
    async with LocalCluster(16, service=SERVICE) as cluster:
        names = [list(cluster.workers[first : first + 4]) for first in range(0, 16, 4)]
        lost: set[str] = set()

        async def step(pipe: Pipeline) -> None:
            losses = values(await pipe.step(x, target))
            assert losses == await serial_replicas(alone, [4] * 4, x, target)
            bits = [b"".join(parameter.grad.numpy().tobytes() for parameter in stage.parameters()) for stage in alone]
            for replica in pipe.replicas:
                for stage, module in enumerate(replica):
                    assert module.peer in lost or await module.ref.call("gradient") == bits[stage]

        def kill(name: str) -> None:
            os.kill(cluster.pids[name], signal.SIGKILL)
            lost.add(name)

        async with Pipeline(await place_replicas(cluster.driver, names), make_schedule("1F1B", 4, 4), absorb=True) as pipe:
            await step(pipe)
            kill(names[0][1])
            await step(pipe)
            assert pipe.absorbed == {(0, 1): (names[1][1], names[2][1], names[3][1])}
            await pipe.replicas[2][3].ref.call("end_at", 2)  # of its forwards from now on
            lost.add(names[2][3])
            await step(pipe)
            assert pipe.absorbed == {
                (0, 1): (names[1][1], names[2][1], names[3][1]), (2, 3): (names[0][3], names[1][3], names[3][3]),
            }  # fmt: skip
            kill(names[3][0])
            await step(pipe)
            assert len(pipe.absorbed) == 3

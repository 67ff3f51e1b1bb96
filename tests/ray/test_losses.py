"""Actors and nodes that end: typed errors at once, the worker back under its name, and training that goes on to the same bits."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

import aiograd.distributed as dist
from aiograd.errors import ArgumentError, UnknownPeerError, WorkerLostError
from tests.ray.conftest import Start
from tests.ray.nodes import Nodes
from tests.ray.training import SERVICE, train

pytestmark = pytest.mark.proc


class Events:
    """The callbacks of a cluster."""

    def __init__(self) -> None:
        self.lost: list[tuple[str, int]] = []
        self.returned: list[tuple[str, str]] = []
        self._changed = asyncio.Event()

    @property
    def callbacks(self) -> dict[str, Any]:
        return {"on_lost": lambda *event: self.lost.append(event), "on_return": self._return}

    def _return(self, name: str, url: str) -> None:
        self.returned.append((name, url))
        self._changed.set()

    async def wait_returned(self, count: int) -> None:
        """Wait until so many workers are back; they can be called a little before all others have been told."""
        while len(self.returned) < count:
            self._changed.clear()
            await self._changed.wait()


async def test_an_actor_that_is_killed_is_back_under_its_name_and_training_goes_on_to_the_same_bits(start: Start) -> None:
    async with dist.LocalCluster(2, service=SERVICE) as local:
        expected = await train(local, 5)
    events = Events()
    async with start(2, **events.callbacks) as cluster:
        import ray

        pids, urls = cluster.pids, cluster.urls

        async def trouble(step: int) -> None:
            if step == 1 and not events.lost:
                os.kill(cluster.pids["worker1"], signal.SIGKILL)
                assert await cluster.wait_lost("worker1") != 0
            if step == 3 and len(events.lost) == 1:
                ray.kill(cluster._actors["worker0"], no_restart=False)
                with pytest.raises(WorkerLostError):
                    while True:
                        await cluster.driver.call("worker0", "process")

        assert await train(cluster, 5, trouble) == expected
        assert events.lost == [("worker1", 1), ("worker0", 1)]
        await events.wait_returned(2)
        assert events.returned == [("worker1", cluster.urls["worker1"]), ("worker0", cluster.urls["worker0"])]
        assert not set(cluster.pids.values()) & set(pids.values()) and not set(cluster.urls.values()) & set(urls.values())
        for name, other in (("worker0", "worker1"), ("worker1", "worker0")):  # each knows where the other is now
            assert (await cluster.driver.call(name, "double_at", other, 2.0)) == 4.0


async def test_a_worker_that_ray_does_not_make_again_is_lost_until_it_is_restarted(start: Start) -> None:
    events = Events()
    async with start(2, max_restarts=1, **events.callbacks) as cluster:
        for _ in range(2):
            await cluster.wait_running("worker0")
            os.kill(cluster.pids["worker0"], signal.SIGKILL)
            await cluster.wait_lost("worker0")
        with pytest.raises(WorkerLostError, match=r"call restart\('worker0'\)"):
            await cluster.wait_running("worker0")
        await cluster.restart("worker0")
        await cluster.wait_running("worker0")
        assert await cluster.driver.call("worker1", "double_at", "worker0", 1.0) == 2.0
        pid = cluster.pids["worker0"]
        await asyncio.gather(cluster.restart("worker0"), cluster.restart("worker0"))  # one restart for both
        assert cluster.pids["worker0"] not in (pid, cluster.pids["worker1"])
        assert events.lost == [("worker0", 1)] * 2, "a restart that was asked for is no loss"
        await events.wait_returned(3)
        assert [name for name, _ in events.returned] == ["worker0"] * 3


async def test_workers_on_a_node_that_is_removed_come_back_on_another(nodes: Nodes, start: Start) -> None:
    async with dist.LocalCluster(2, service=SERVICE) as local:
        expected = await train(local, 3)
    node, first = await nodes.add(num_cpus=1, resources={"spare": 2})
    events = Events()
    second: list[Any] = []
    async with start(2, resources={"num_cpus": 0, "resources": {"spare": 1}}, strategy="PACK", **events.callbacks) as cluster:
        assert {cluster.node_of(name) for name in cluster.workers} == {first}

        async def trouble(step: int) -> None:
            if step == 1 and not second:
                async with asyncio.TaskGroup() as losses:
                    for name in cluster.workers:  # as they now are: they may be back before the second node is known to have started
                        losses.create_task(cluster.wait_lost(name))
                    await asyncio.sleep(0)  # each has begun to wait
                    await nodes.remove(node)
                    second.extend(await nodes.add(num_cpus=1, resources={"spare": 2}))

        try:
            assert await train(cluster, 3, trouble) == expected
            assert {cluster.node_of(name) for name in cluster.workers} == {second[1]}
            await events.wait_returned(2)
            assert sorted(events.returned) == sorted(cluster.urls.items())
        finally:
            await nodes.remove(second[0])


async def test_workers_are_added_and_removed(start: Start) -> None:
    async with start(1) as cluster:
        await cluster.add("late")
        assert cluster.workers == ("worker0", "late")
        assert await cluster.driver.call("worker0", "double_at", "late", 1.0) == 2.0
        with pytest.raises(ArgumentError, match="there is a worker of this name"):
            await cluster.add("late")
        pid = cluster.pids["late"]
        await cluster.remove("late")
        assert cluster.workers == ("worker0",) and "late" not in cluster.pids
        for wrong in (cluster.remove("late"), cluster.restart("late"), cluster.wait_running("late"), cluster.driver.call("late", "process")):
            with pytest.raises(UnknownPeerError):
                await wrong
        with pytest.raises(UnknownPeerError):
            cluster.node_of("late")
        await cluster.add("next")  # takes the place that is free
        assert await cluster.driver.call("next", "process") == cluster.pids["next"] != pid


async def test_each_worker_sees_the_device_that_ray_gave_it(start: Start) -> None:
    async with start(2, resources={"num_cpus": 1, "num_gpus": 1}) as cluster:
        assert {await cluster.driver.call(name, "variable", "CUDA_VISIBLE_DEVICES") for name in cluster.workers} == {"0", "1"}

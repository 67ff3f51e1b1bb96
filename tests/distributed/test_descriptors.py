"""A process that runs out of file descriptors: what is connected goes on, who is new waits, and all is well when there are some again."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from aiograd import distributed as dist
from aiograd.distributed.cluster import LocalCluster
from aiograd.errors import DeadlineError, DistributedError, WorkerLostError
from tests.distributed.workers import leaf, values

pytestmark = [pytest.mark.proc, pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="this system does not list descriptors")]
SERVICE = "tests.distributed.descriptor_service:service"
LEFT = 6


async def one_pass(caller: dist.Worker, function: str = "triple", *args: str) -> None:
    async with caller.context() as ctx:
        x = leaf(1.0)
        await ctx.backward((await caller.call("w", function, *args, x)).sum())
        assert values(ctx.grads[x]) == [3]


async def test_running_out_of_descriptors_and_coming_back(capfd: pytest.CaptureFixture[str]) -> None:
    async with LocalCluster(2, names=["w", "v"], service=SERVICE) as cluster, contextlib.AsyncExitStack() as stack:
        driver = cluster.driver
        await one_pass(driver)
        await driver.call("w", "leave_descriptors", LEFT)
        host = urlsplit(cluster.urls["w"])
        # more than the process can have: the rest waits to be accepted
        strangers = [stack.enter_context(socket.create_connection((str(host.hostname), host.port or 0))) for _ in range(LEFT + 5)]
        while await driver.call("w", "descriptors_left", 1):
            await asyncio.sleep(0.01)

        for _ in range(20):  # who is connected does not notice
            await one_pass(driver)
        new = await stack.enter_async_context(dist.Worker("new", secret=cluster._secret, peers={"w": cluster.urls["w"]}))
        with pytest.raises((WorkerLostError, DeadlineError)):
            await new.call("w", "triple", leaf(1.0).detach(), timeout=0.3)
        with pytest.raises(DistributedError):  # it cannot connect to others either
            await driver.call("w", "triple_at", "v", leaf(1.0).detach(), timeout=0.5)
        await one_pass(driver)

        for stranger in strangers:
            stranger.close()
        while True:
            try:
                await one_pass(new)
                break
            except (WorkerLostError, DeadlineError):
                continue
        await one_pass(driver, "triple_at", "v")
        while await driver.call("w", "descriptors_left", LEFT) < LEFT - 2:  # two are the connections of v and of the new one
            await asyncio.sleep(0.01)
        await one_pass(driver)
    said = capfd.readouterr().err
    assert "Traceback" not in said and "accepting a connection failed" in said

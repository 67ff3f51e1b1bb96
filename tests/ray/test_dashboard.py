"""The dashboard of a driver whose workers live in actors of Ray."""

from __future__ import annotations

import asyncio

import aiohttp
import numpy as np
import pytest

import aiograd as ag
from tests.ray.conftest import Start
from tests.watchdog import SECONDS

pytestmark = pytest.mark.proc


async def test_the_page_shows_the_workers_and_what_they_did(start: Start) -> None:
    wanted = {("worker0", "double_at", "serve"), ("worker1", "double", "serve")}
    async with start(2, dashboard=True) as cluster, aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as browser:
        assert cluster.dashboard_url is not None
        async with browser.get(cluster.dashboard_url) as door:
            assert door.status == 200
        states: dict[str, str] = {}
        seen: set[tuple[str, str, str]] = set()
        async with asyncio.timeout(SECONDS / 2):
            while not wanted <= seen:
                async with cluster.driver.context() as ctx:
                    x = ag.asarray(np.ones(2, np.float32)).requires_grad_()
                    await ctx.backward((await cluster.driver.call("worker0", "double_at", "worker1", x)).sum())
                async with browser.get(f"{cluster.driver.url}/dashboard/data") as answer:
                    data = await answer.json()
                states.update((worker["name"], worker["state"]) for worker in data["workers"])
                seen.update((event[0], event[1], event[2]) for event in data["events"])
                await asyncio.sleep(0.1)  # the page asks a few times a second, too
        assert states == {"driver": "running", "worker0": "running", "worker1": "running"}

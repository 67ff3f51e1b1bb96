"""The dashboard's panel for servers: one that learns, publishes and rolls back, and its follower on another worker."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import numpy as np

import aiograd as ag
from aiograd import distributed as dist
from aiograd import serving
from tests.browser.geometry import OVERFLOWS, PARTS

SECONDS = 60_000.0
WIDTHS = (1280, 800, 400)
COLUMNS = 16


def model() -> ag.nn.Sequential:
    """A model that is slow enough to have a latency."""
    return ag.nn.Sequential(ag.nn.Linear(COLUMNS, 256), ag.nn.ReLU(), ag.nn.Linear(256, 1))


@contextlib.asynccontextmanager
async def requests(*servers: serving.Server) -> AsyncIterator[None]:
    """Requests to each server for as long as the block runs; in bursts, so that a queue forms."""

    async def ask(server: serving.Server) -> None:
        generator = np.random.default_rng(0)
        while True:
            count = int(generator.integers(1, 40))
            rows = generator.normal(size=(count, 1, COLUMNS)).astype(np.float32)
            await asyncio.gather(*(server.predict(row) for row in rows))
            await asyncio.sleep(0.02)

    tasks = [asyncio.create_task(ask(server)) for server in servers]
    yield
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def look_at_serving(browser: Any, checks: Any, folder: Any) -> None:
    """Versions, latency, promotions and a rollback are shown, of the server that learns and of its follower; and nothing without a server."""
    print("a server that learns, and its follower")
    service, learned = dist.Service(), model()
    async with dist.Worker("leader", service=service, dashboard=True) as leader, dist.Worker("edge", peers={"leader": leader.url}) as edge:
        assert leader.dashboard_url is not None
        page = await browser.new_page(viewport={"width": 1280, "height": 900})
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if message.type in ("error", "warning") else None)
        await page.goto(leader.dashboard_url)
        await page.wait_for_selector("#connection.live", timeout=SECONDS)
        checks.check(await page.locator("#serving").is_hidden(), "there is no panel without a server")
        async with serving.Server(learned, max_batch=16, max_queue=256) as server:
            serving.lead(service, server)
            optimizer = ag.optim.AdamW(learned.parameters(), lr=1e-3)
            loss = lambda module, x, y: ((module(x) - y) ** 2).mean()  # noqa: E731
            buffer = serving.ReplayBuffer(1000)
            trainer = serving.Trainer(server, optimizer, loss, buffer=buffer, rate=20, publish_every=10)
            async with serving.Follower(edge, "leader", model()) as follower, requests(server, follower):
                x = np.random.default_rng(1).normal(size=(500, COLUMNS)).astype(np.float32)
                await trainer.learn(x, x[:, :1])
                async with trainer:
                    await page.wait_for_timeout(6000)
                candidate = await server.publish(metrics={"accuracy": 0.875, "loss": 0.25}, promote=False)
                server.shadow(candidate.number, 0.5)
                server.rollback(server.current.number - 2)
                server.split({server.current.number: 0.9, candidate.number - 1: 0.1})
                await page.wait_for_timeout(4000)
                cards = await page.locator(".server").all()
                texts = [await card.inner_text() for card in cards]
                checks.check(len(cards) == 2, f"{len(cards)} servers are shown")
                for text, parts in zip(texts, (("on edge", "follows leader"), ("on leader", "steps")), strict=False):
                    checks.check(all(part in text for part in parts), f"{' '.join(text.split())[:110]}")
                states = [text.replace("\xa0", " ") for text in await page.locator(".server .state").all_inner_texts()]
                wanted = ("serves, split 90 %", "split 10 %", "candidate, shadow 50 %", "kept")
                checks.check(all(state in states for state in wanted), f"each version has its state: {', '.join(states)}")
                labels = [await canvas.get_attribute("aria-label") for canvas in await page.locator(".server canvas").all()]
                checks.check(all("1 rollbacks" in label and "p50 –" not in label for label in labels), f"on the time axis: {labels}")
                for width in WIDTHS:
                    for scheme in ("light", "dark"):
                        await page.set_viewport_size({"width": width, "height": 2400})
                        await page.emulate_media(color_scheme=scheme)
                        await page.wait_for_timeout(700)
                        await page.locator("#serving").screenshot(path=folder / f"serving-{width}-{scheme}.png")
                    wrong = await page.evaluate(OVERFLOWS, PARTS)
                    checks.check(not wrong, f"all servers have room at {width} px {wrong[:4] or ''}")
                await page.locator(".server canvas").first.hover(position={"x": 200, "y": 60})
                checks.check("rows queued" in await page.locator(".server figcaption").first.inner_text(), "the pointer tells what was when")
        await page.wait_for_selector("#serving", state="hidden", timeout=SECONDS)
        checks.check(True, "and the panel leaves with the servers")
        checks.check(not errors, f"no script has failed {errors[:3] or ''}")
        await page.close()

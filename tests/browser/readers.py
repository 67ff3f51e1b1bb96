"""Other programs that read what aiograd writes: TensorBoard its event files, promtool the page for Prometheus."""

from __future__ import annotations

import asyncio
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

import aiohttp

import aiograd as ag
from aiograd import distributed as dist
from aiograd.running.scalars import TensorBoardWriter

Check = Callable[[object, str], None]


def read_event_files(folder: Path, check: Check) -> None:
    """TensorBoard's own reader finds the values that were logged, at their steps.

    Args:
        folder: where the event files go.
        check: notes a fact, and how it is told.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    values = {0: 2.5, 1: 1.25, 7: 0.625}
    with TensorBoardWriter(folder):
        for step, loss in values.items():
            ag.log("loss", loss, step)
            ag.log("learning rate", 0.1, step)
    reader = EventAccumulator(str(folder))
    reader.Reload()
    check(set(reader.Tags()["scalars"]) == {"loss", "learning rate"}, "TensorBoard lists the scalars that were logged")
    check({event.step: event.value for event in reader.Scalars("loss")} == values, "TensorBoard reads their values and steps")


async def read_metrics(check: Check) -> None:
    """Promtool, where it is installed (Debian's package prometheus), has nothing against the page for Prometheus after a pass and two logged values.

    Args:
        check: notes a fact, and how it is told.
    """
    program = shutil.which("promtool")
    if program is None:
        print("  (promtool is not installed: metrics are read by prometheus_client's parser alone, in the tests)")
        return
    service = dist.Service()

    @service.function
    def square(x: ag.Tensor) -> ag.Tensor:
        return (x * x).sum()

    secret = secrets.token_bytes(32)
    async with dist.Worker("driver", secret=secret, dashboard=True) as driver, dist.Worker("left", secret=secret, service=service) as left:
        driver.add_peer("left", left.url)
        async with driver.context() as ctx:
            await ctx.backward(await driver.call("left", "square", ag.tensor([1.0, 2.0], requires_grad=True)))
        ag.log("loss", 0.5)
        ag.log("learning rate", 0.1)
        async with aiohttp.ClientSession() as session, session.get(f"{driver.url}/metrics") as answer:
            page = await answer.read()
    process = await asyncio.create_subprocess_exec(
        program, "check", "metrics", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    said, _ = await process.communicate(page)
    is_clean = process.returncode == 0 and not said and page.count(b"# TYPE") > 10
    check(is_clean, "promtool has nothing against /metrics" if is_clean else f"promtool: {said.decode()}")

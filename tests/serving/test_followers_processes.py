"""A follower of a leader in another process, which is frozen, killed and started again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from aiograd import distributed as dist
from aiograd import serving
from tests.distributed.workers import SECRET
from tests.serving.models import Two, ones, values

LEADER = """
import asyncio, sys
from aiograd import distributed as dist, serving
from tests.distributed.workers import SECRET
from tests.serving.models import Two

async def main():
    model, service = Two(0.0), dist.Service()
    async with serving.Server(model, log=sys.argv[1]) as server, dist.Worker("leader", service=service, port=int(sys.argv[2]), secret=SECRET):
        serving.lead(service, server)
        while True:
            model.set(server.versions[-1].number + 1)
            await server.publish()
            await asyncio.sleep(0.01)

asyncio.run(main())
"""


@contextlib.asynccontextmanager
async def leading(folder: Path, port: int) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process in which version n holds n, for each n but the first."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OPENBLAS_NUM_THREADS": "1"}
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", LEADER, str(folder), str(port), env=environment)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def wait_until(follower: serving.Follower, connected: bool) -> None:
    while follower.connected is not connected:
        await asyncio.sleep(0.01)


@pytest.mark.proc
async def test_a_follower_outlives_its_leader(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    numbers: list[int] = []

    async def ask() -> None:
        while True:
            answer = await follower.predict(ones())
            assert values(answer) == {float(answer.version) if answer.version > 1 else 0.0}
            numbers.append(answer.version)
            await asyncio.sleep(0.002)

    async with asyncio.timeout(120), contextlib.AsyncExitStack() as stack:
        process = await stack.enter_async_context(leading(tmp_path, port))
        worker = await stack.enter_async_context(dist.Worker("follower", peers={"leader": f"http://127.0.0.1:{port}"}, secret=SECRET))
        follower = await stack.enter_async_context(serving.Follower(worker, "leader", Two(-1.0)))
        asking = asyncio.create_task(ask())
        await follower.reach(20)
        process.send_signal(signal.SIGSTOP)
        await wait_until(follower, False)
        process.send_signal(signal.SIGCONT)
        await follower.reach(follower.current.number + 10)
        process.kill()
        await wait_until(follower, False)
        last, answers = follower.current.number, len(numbers)
        while len(numbers) < answers + 20:
            await asyncio.sleep(0.01)
        assert numbers[-1] == last, "it goes on serving"
        await stack.enter_async_context(leading(tmp_path, port))
        await follower.reach(last + 10)
        assert follower.connected and numbers == sorted(numbers), "the numbers go on from the log"
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

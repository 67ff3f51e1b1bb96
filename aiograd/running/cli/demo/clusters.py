"""Where the demo runs: on this machine, on Ray, or on workers that join, which are then started here as a launcher would start them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from aiograd.distributed import Cluster, JoinCluster, Limits, LocalCluster, RayCluster
from aiograd.errors import DeadlineError

SERVICE = "aiograd.running.cli.demo.service:service"
#: on a machine that has other things to do, a worker may be silent for a while; one that is gone is noticed at once all the same
PATIENT = Limits(missed_heartbeats=12)
#: seconds until processes have joined
START_SECONDS = 60.0

#: the process numbers of the workers, as they are now
Pids = Callable[[], Mapping[str, int]]


@contextlib.asynccontextmanager
async def cluster_on(on: str, names: Sequence[str]) -> AsyncIterator[tuple[Cluster, Pids]]:
    """A cluster of the demo's workers, which are started again when they are killed, and their process numbers.

    Cancelling it ends them.

    Args:
        on: "local", "ray" or "join". names: of the workers.
    """
    n = len(names)
    if on == "join":
        async with _launched(names) as (joined, pids):
            yield joined, lambda: pids
        return
    cluster: LocalCluster | RayCluster
    if on == "ray":
        cluster = RayCluster(n, service=SERVICE, names=names, limits=PATIENT, start_timeout=START_SECONDS, dashboard=True)
    else:
        cluster = LocalCluster(n, service=SERVICE, names=names, limits=PATIENT, max_restarts=1, dashboard=True)
    async with cluster:
        yield cluster, lambda: cluster.pids


@contextlib.asynccontextmanager
async def _launched(names: Sequence[str]) -> AsyncIterator[tuple[JoinCluster, dict[str, int]]]:
    secret = secrets.token_bytes(32)
    pids: dict[str, int] = {}
    launching: list[asyncio.Task[None]] = []
    try:
        async with JoinCluster(0, at_most=len(names), secret=secret, limits=PATIENT, dashboard=True) as cluster:
            launching += [asyncio.create_task(_keep_running(name, cluster.url, secret, pids), name=f"launcher of {name}") for name in names]
            try:
                async with asyncio.timeout(START_SECONDS):
                    await cluster.wait_joined(len(names))
            except TimeoutError:
                raise DeadlineError(f"the demo's workers did not join within {START_SECONDS:g} s; see above what they say") from None
            yield cluster, pids
        await asyncio.wait(launching, timeout=10.0)  # told that the cluster is closed, they end
    finally:
        for task in launching:
            task.cancel()
        await asyncio.gather(*launching, return_exceptions=True)


async def _keep_running(name: str, url: str, secret: bytes, pids: dict[str, int]) -> None:
    """Start a worker again until it ends with status 0. Cancelled, it kills it."""
    environment = {**os.environ, "AIOGRAD_SECRET": secret.hex(), "OPENBLAS_NUM_THREADS": os.environ.get("OPENBLAS_NUM_THREADS", "1")}
    environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    environment.pop("AIOGRAD_SECRET_FILE", None)
    command = [sys.executable, "-m", "aiograd", "worker", "--join", url, "--name", name, "--service", SERVICE, "--log-level", "warning"]
    while True:
        process = await asyncio.create_subprocess_exec(*command, env=environment, stdout=asyncio.subprocess.DEVNULL, start_new_session=True)
        pids[name] = process.pid
        try:
            status = await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if status >= 0:  # it has ended by itself, and would do so again
            return

"""The traces of a cluster in Ray, its logs and the system: never its key while it runs, and nothing of it afterwards."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ray.conftest import Start, left_behind
from tests.ray.nodes import HEAD, ROOT, Nodes
from tests.ray.tables import of_ray, spellings
from tests.watchdog import SECONDS

pytestmark = pytest.mark.proc

#: how Linux spells this state in its tables
TIME_WAIT = "06"

DRIVER = """
import asyncio, functools, sys
import ray
import aiograd.distributed as dist

async def main():
    async with dist.RayCluster(2, service="tests.ray.service:service", address=sys.argv[1], start_timeout=300.0) as cluster:
        await cluster.driver.call("worker1", "complain", "something to say")
        print("pids", *cluster.pids.values(), flush=True)
        await asyncio.to_thread(sys.stdin.readline)  # Ray hands on what workers log a little later
        if sys.argv[3] == "stay":
            await asyncio.Event().wait()

ray.init = functools.partial(ray.init, _node_ip_address=sys.argv[2])
asyncio.run(main())
assert not ray.is_initialized()
"""


async def test_the_key_is_in_no_table_log_command_line_or_environment(start: Start, nodes: Nodes) -> None:
    async with start(2, log_level="debug") as cluster:
        secret = cluster._secret
        await cluster.driver.call("worker0", "double_at", "worker1", 1.0)
        seen = of_ray()
        for table in ("actors", "tasks", "fun"):
            assert any(name.startswith(table) and b"RayWorker" in value for name, value in seen.items()), f"the records of {table} were found"
        logs = {str(path): path.read_bytes() for path in nodes.logs.parent.rglob("*") if path.is_file()}
        assert any("worker-" in name for name in logs)
        processes: dict[str, bytes] = {}
        for folder in Path("/proc").iterdir():
            for name in ("cmdline", "environ"):
                try:
                    processes[f"{folder}/{name}"] = (folder / name).read_bytes() if folder.name.isdigit() else b""
                except OSError:
                    continue
        assert all(any(f"/{pid}/" in name for name in processes) for pid in cluster.pids.values())
        for name, value in {**seen, **logs, **processes}.items():
            assert not any(spelling in value for spelling in spellings(secret)), f"the key is in {name}"


async def test_nothing_is_left_after_the_block(start: Start) -> None:
    async with start(2) as cluster:
        pids = list(cluster.pids.values())
        await cluster.add("late")
        pids.append(cluster.pids["late"])
        ports = {int(url.rpartition(":")[2]) for url in cluster.urls.values()}
        assert await cluster.driver.call("worker0", "double_at", "late", 1.0) == 2.0
        assert ports == {port for port in ports if sockets(port)}, "they are found while they are there"
    await left_behind(*pids)
    assert not [line for port in ports for line in sockets(port)]


def sockets(port: int) -> list[str]:
    """TCP sockets of this machine that listen at, or are connected to or from, a port. Those that only wait for late packets belong to nobody."""
    found = []
    for line in [line for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]:
        _, local, remote, state, *_ = line.split()
        if state != TIME_WAIT and f"{port:04X}" in (local.rpartition(":")[2], remote.rpartition(":")[2]):
            found.append(line)
    return found


async def test_nothing_is_left_of_a_cluster_that_is_cancelled_while_it_starts(start: Start) -> None:
    cluster = start(2)
    starting = asyncio.ensure_future(cluster.__aenter__())
    while not cluster._actors:
        await asyncio.sleep(0.01)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await left_behind()


@pytest.mark.parametrize("how", ["stay", "leave"])
async def test_nothing_is_left_of_a_driver_that_is_killed_and_its_workers_log_with_their_names(nodes: Nodes, how: str) -> None:
    command = [sys.executable, "-c", DRIVER, nodes.address, HEAD, how]
    pipe = subprocess.PIPE
    driver = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True)  # noqa: ASYNC220 - read in a thread
    try:
        assert driver.stdout is not None and driver.stdin is not None
        lines: list[str] = []
        async with asyncio.timeout(SECONDS):
            while not (any(line.startswith("pids") for line in lines) and any("something to say" in line for line in lines)):
                line = await asyncio.to_thread(driver.stdout.readline)
                assert line, lines
                lines.append(line)
        assert any(re.search(r"\(worker1 pid=.*something to say", line) for line in lines), lines
        if how == "stay":
            driver.kill()
        else:
            driver.stdin.write("go on\n")
            driver.stdin.flush()
        assert (await asyncio.to_thread(driver.wait, SECONDS) == 0) == (how == "leave")
        pids = next(line for line in lines if line.startswith("pids")).split()[1:]
        await left_behind(*map(int, pids))
    finally:
        driver.kill()
        driver.communicate()

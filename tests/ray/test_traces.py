"""What Ray, its logs and the system can see of a cluster: never its key while it runs, and nothing of it afterwards."""

from __future__ import annotations

import asyncio
import base64
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ray.conftest import HEAD, ROOT, Nodes, Start, left_behind
from tests.watchdog import SECONDS

pytestmark = pytest.mark.proc

DRIVER = """
import asyncio, functools, sys
import ray
import aiograd.distributed as dist

async def main():
    async with dist.RayCluster(2, service="tests.ray.service:service", address=sys.argv[1]) as cluster:
        await cluster.driver.call("worker1", "complain", "something to say")
        print("pids", *cluster.pids.values(), flush=True)
        if sys.argv[3] == "stay":
            await asyncio.Event().wait()

ray.init = functools.partial(ray.init, _node_ip_address=sys.argv[2])
asyncio.run(main())
assert not ray.is_initialized()
"""


def spellings(secret: bytes) -> list[bytes]:
    """The ways in which a key may be written."""
    return [secret, secret.hex().encode(), secret.hex().upper().encode(), base64.b64encode(secret).rstrip(b"="), repr(secret)[2:-1].encode()]


def of_ray() -> dict[str, bytes]:
    """What Ray's tables hold: whole records of actors, jobs, workers, placement groups and tasks, and every value that is stored by key."""
    from ray._private.state import state
    from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_list

    tables = state._connect_and_get_accessor()
    records = {
        "actors": tables.get_actor_table(None, None),
        "jobs": tables.get_job_table(skip_submission_job_info_field=True, skip_is_running_tasks_field=True),
        "workers": tables.get_worker_table(),
        "groups": tables.get_placement_group_table(),
        "tasks": tables.get_task_events(),
    }
    found = {f"{name} {i}": record for name, several in records.items() for i, record in enumerate(several)}
    for namespace in (None, "fun", "job", "session", "cluster", "dashboard", "healthcheck", "tracing", "ray_pdb"):
        for key in _internal_kv_list(b"", namespace=namespace):
            found[f"{namespace} {key!r}"] = _internal_kv_get(key, namespace=namespace) or b""
    return found


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
    await left_behind(*pids)


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
    driver = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)  # noqa: ASYNC220 - its lines are read in a thread
    try:
        assert driver.stdout is not None
        lines: list[str] = []
        async with asyncio.timeout(SECONDS):
            while not (any(line.startswith("pids") for line in lines) and any("something to say" in line for line in lines)):
                line = await asyncio.to_thread(driver.stdout.readline)
                assert line, lines
                lines.append(line)
        assert any(re.search(r"\(worker1 pid=.*something to say", line) for line in lines), lines
        if how == "stay":
            driver.kill()
        assert (await asyncio.to_thread(driver.wait, SECONDS) == 0) == (how == "leave")
        pids = next(line for line in lines if line.startswith("pids")).split()[1:]
        await left_behind(*map(int, pids))
    finally:
        driver.kill()
        driver.communicate()

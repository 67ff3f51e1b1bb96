"""A Ray cluster of several nodes, shared by all tests here, which are collected only where Ray is installed."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import aiograd.distributed as dist
from tests.ray.nodes import LONGEST, Nodes, running_nodes
from tests.ray.training import SERVICE
from tests.watchdog import SECONDS

if find_spec("ray") is None:
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give tests time for nodes to start in, and let those that start a Ray of their own begin, before there is one that they would find."""
    folder = str(Path(__file__).parent) + os.sep
    own = [item for item in items if str(item.path).startswith(folder)]
    for item in own:
        item.add_marker(pytest.mark.timeout(LONGEST))
    if own:
        items.sort(key=lambda item: item.path != Path(__file__).parent / "test_own_ray.py")


@pytest.fixture(scope="session")
def nodes() -> Iterator[Nodes]:
    """Three nodes; the third has two devices, which are made up."""
    with running_nodes() as running:
        yield running


Start = Callable[..., dist.RayCluster]


@pytest.fixture
def start(nodes: Nodes) -> Start:
    """Makes clusters of workers, to be entered."""

    def make(n: int = 2, **options: Any) -> dist.RayCluster:
        return dist.RayCluster(n, **{"service": SERVICE, **options})

    return make


@pytest.fixture(autouse=True)
def _no_leaks(_no_unhandled_errors: None, request: pytest.FixtureRequest) -> None:
    """As everywhere, but for threads and descriptors, of which Ray opens some whenever it likes."""
    if request.node.get_closest_marker("asyncio") is not None:
        request.getfixturevalue("_tasks_left_on_the_loop")


async def left_behind(*pids: int) -> None:
    """Wait until nothing of a cluster is left in Ray: no actor, no placement group, none of these processes."""
    import ray
    from ray._private.state import actors

    def living() -> list[str]:
        found = [actor["State"] for actor in actors().values() if actor["ActorClassName"] in ("RayWorker", "Silent") and actor["State"] != "DEAD"]
        found += [group["state"] for group in ray.util.placement_group_table().values() if group["state"] != "REMOVED"]
        return found + [f"process {pid}" for pid in pids if is_running(pid)]

    async with asyncio.timeout(SECONDS / 2):
        while living():
            await asyncio.sleep(0.05)


def is_running(pid: int) -> bool:
    """True if there is such a process; one that only waits to be buried by Ray is none."""
    try:
        return b") Z " not in Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False

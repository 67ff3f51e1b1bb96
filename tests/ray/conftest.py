"""A Ray cluster of several nodes on this machine, shared by all tests here, which are collected only where Ray is installed.

Note [Nodes]
    Each node has an address of its own in 127.0.0.0/8, so nodes are as separate as machines and nothing listens beyond this one. Starting them
    takes long, so they are started once. A test that removes a node adds one for itself first.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import aiograd.distributed as dist
from tests.ray.training import SERVICE
from tests.watchdog import SECONDS

if find_spec("ray") is None:
    collect_ignore_glob = ["test_*.py"]

ROOT = Path(__file__).parents[2]
HEAD = "127.0.0.2"
#: what the processes of Ray's nodes find in their environment
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}


class Nodes:
    """The nodes, as tests see them."""

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self._hosts = itertools.count(5)

    @property
    def address(self) -> str:
        """Of the head node."""
        return str(self._cluster.address)

    @property
    def logs(self) -> Path:
        """Where processes of all nodes log."""
        return Path(self._cluster.head_node.get_session_dir_path()) / "logs"

    async def add(self, **options: Any) -> tuple[Any, str]:
        """Another node, and its id."""
        host = f"127.0.0.{next(self._hosts)}"
        node = await asyncio.to_thread(self._cluster.add_node, node_ip_address=host, **options)
        return node, node.node_id

    async def remove(self, node: Any) -> None:
        """End a node as when its machine fails."""
        await asyncio.to_thread(self._cluster.remove_node, node, allow_graceful=False)


@pytest.fixture(scope="session")
def nodes() -> Iterator[Nodes]:
    """Three nodes; the third has two devices, which are made up."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Ray, about itself
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        import ray
        from ray.cluster_utils import Cluster

        patch.setattr("ray._private.utils.set_sigterm_handler", lambda handler: None)  # so that a node can be added from a thread
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "node_ip_address": HEAD, "include_dashboard": False})
        try:
            cluster.add_node(num_cpus=4, node_ip_address="127.0.0.3")
            cluster.add_node(num_cpus=4, num_gpus=2, node_ip_address="127.0.0.4")
            ray.init(address=cluster.address, _node_ip_address=HEAD, logging_level=logging.WARNING, log_to_driver=False)
            yield Nodes(cluster)
        finally:
            ray.shutdown()
            cluster.shutdown()


Start = Callable[..., dist.RayCluster]


@pytest.fixture
def start(nodes: Nodes) -> Start:
    """Makes clusters of workers, to be entered."""

    def make(n: int = 2, **options: Any) -> dist.RayCluster:
        return dist.RayCluster(n, **{"service": SERVICE, **options})

    return make


@pytest.fixture(autouse=True)
def _no_leaks(nodes: Nodes, _no_unhandled_errors: None, request: pytest.FixtureRequest) -> None:
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
    """Whether there is such a process; one that only waits to be buried by Ray is none."""
    try:
        return b") Z " not in Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False

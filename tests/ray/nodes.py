"""A Ray cluster of several nodes on this machine.

Note [Nodes]
    Each node has an address of its own in 127.0.0.0/8, so nodes are as separate as machines and nothing listens beyond this one. Starting them
    takes long, so they are started once. A test that removes a node adds one for itself first.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
HEAD = "127.0.0.2"
#: what the processes of Ray's nodes find in their environment
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_worker_niceness": "0",  # as fast as the processes that they are compared with
    "RAY_prestart_worker_first_driver": "0",  # processes that nobody uses
}
#: seconds that a test may take, the start of all nodes included
LONGEST = 600


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


@contextlib.contextmanager
def running_nodes() -> Iterator[Nodes]:
    """Three nodes, to which this process is connected; the third has two devices, which are made up."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Ray, about itself
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        import ray
        from ray.cluster_utils import Cluster

        patch.setattr("ray._private.utils.set_sigterm_handler", lambda handler: None)  # so that a node can be added from a thread
        patch.setattr("ray._private.services.get_node", _patient(ray._private.services.get_node))
        patch.setattr("aiograd.distributed.cluster.ray_cluster.START_SECONDS", LONGEST / 6)  # this machine may be busy
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "node_ip_address": HEAD, "include_dashboard": False})
        try:
            cluster.add_node(num_cpus=2, node_ip_address="127.0.0.3")
            cluster.add_node(num_cpus=2, num_gpus=2, node_ip_address="127.0.0.4")
            ray.init(address=cluster.address, _node_ip_address=HEAD, logging_level=logging.WARNING, log_to_driver=False)
            yield Nodes(cluster)
        finally:
            ray.shutdown()
            cluster.shutdown()


def _patient(get_node: Callable[..., Any]) -> Callable[..., Any]:
    """The same question for a node, asked until it is answered: Ray gives a node half a minute to start, which on a busy machine is too little."""

    def asked(*args: Any, **kwargs: Any) -> Any:
        until = time.monotonic() + LONGEST / 2
        while True:
            try:
                return get_node(*args, **kwargs)
            except RuntimeError:
                if time.monotonic() >= until:
                    raise
                time.sleep(0.5)

    return asked

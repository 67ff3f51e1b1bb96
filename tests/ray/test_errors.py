"""A request that Ray cannot fulfil, or a faulty service, gives one typed error, in seconds, that names the cause."""

from __future__ import annotations

from typing import Any

import pytest

from aiograd.distributed.cluster.ray_connection import check_reachable
from aiograd.distributed.cluster.ray_worker import RayWorker
from aiograd.errors import AiogradError, ArgumentError, ClusterError, VersionMismatch, WorkerLostError
from tests.ray.conftest import Start, left_behind
from tests.ray.nodes import Nodes

pytestmark = pytest.mark.proc

WRONG: dict[str, tuple[dict[str, Any], type[AiogradError], str]] = {
    "no such resource": ({"resources": {"resources": {"nothing": 1}}}, ClusterError, "no node has 1 nothing"),
    "no node so large": ({"resources": {"num_cpus": 1000}}, ClusterError, "no node has 1000 CPU"),
    "too many": ({"n": 3, "resources": {"num_gpus": 1}}, ClusterError, "3 worker.* together have only 2 GPU"),
    "too few nodes": ({"n": 4, "strategy": "STRICT_SPREAD"}, ClusterError, r"strategy STRICT_SPREAD.*3 node\(s\) cannot hold them in this way"),
    "no such module": ({"service": "no_such_module:service"}, ArgumentError, "no module no_such_module"),
    "no such service": ({"service": "tests.ray.service:nothing"}, ArgumentError, "has no nothing; it has tests.ray.service:service"),
    "beyond the machine": ({"host": "0.0.0.0"}, ArgumentError, "allow_plaintext"),  # noqa: S104 - refused
    "no such certificate": ({"certificate": "/none/cert.pem", "key": "/none/key.pem"}, ArgumentError, "/none/cert.pem"),
}


@pytest.mark.parametrize("name", WRONG)
async def test_what_cannot_be_had_is_a_typed_error_and_leaves_nothing_behind(start: Start, name: str) -> None:
    options, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        async with start(**{"n": 1, **options}):
            pass
    await left_behind()


async def test_an_actor_that_dies_while_it_is_started_is_a_lost_worker(start: Start) -> None:
    with pytest.raises(WorkerLostError, match="worker0 ended while it was being started"):
        async with start(1, service="tests.ray.deadly:service", max_restarts=0):
            pass
    await left_behind()


async def test_another_version_on_a_node_is_named(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiograd.running.version.__version__", "0.0.1")
    with pytest.raises(VersionMismatch, match=r"worker0 on node 127\.0\.0\.\d has aiograd .*, the coordinator 0\.0\.1; .*: upgrade the coordinator"):
        async with start(1):
            pass
    await left_behind()


async def test_an_actor_that_answers_no_more_is_given_up_after_the_timeout(start: Start, monkeypatch: pytest.MonkeyPatch, nodes: Nodes) -> None:
    monkeypatch.setattr("aiograd.distributed.cluster.ray_cluster.RayWorker", Silent)
    with pytest.raises(ClusterError, match="worker0 did not listen within 4 s"):
        async with start(1, start_timeout=4.0):
            pass
    await left_behind()


class Silent(RayWorker):
    """Does not greet."""

    async def greet(self) -> Any:
        await self.lifetime()


async def test_the_address_of_a_ray_is_found_to_be_one(nodes: Nodes) -> None:
    await check_reachable(nodes.address)


@pytest.mark.parametrize("options", [{"address": "ray://127.0.0.1:10001"}, {}])
async def test_a_ray_client_is_refused_at_once(start: Start, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    if not options:
        monkeypatch.setattr("ray.util.client.ray.is_connected", lambda: True)
    with pytest.raises(ClusterError, match=r"Ray's client.*Run the driver on a node of the Ray cluster"):
        async with start(1, **options):
            pass

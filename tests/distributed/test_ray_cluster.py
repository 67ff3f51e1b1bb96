"""The errors of `RayCluster` before it needs a Ray: of its arguments, of a Ray that is not installed, of an address where there is none.

What it does on Ray is tested in ``tests/ray``.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

import pytest

from aiograd.distributed import RayCluster
from aiograd.distributed.cluster.ray_connection import check_reachable
from aiograd.distributed.cluster.ray_placement import bundle_of
from aiograd.errors import ArgumentError, ClusterError

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "strategy": ({"strategy": "ROUND"}, "expected one of SPREAD, STRICT_SPREAD, PACK, STRICT_PACK"),
    "service": ({"service": "module"}, "module:name"),
    "names": ({"names": ["a", "a"]}, "different names"),
    "max_restarts": ({"max_restarts": -2}, "max_restarts=-2"),
    "start_timeout": ({"start_timeout": 0.0}, "start_timeout=0.0"),
    "log_level": ({"log_level": "loud"}, "log_level='loud'"),
    "resource": ({"resources": {"cpus": 1}}, "no 'cpus'; expected num_cpus, num_gpus, memory"),
    "amount": ({"resources": {"num_gpus": -1}}, "GPU=-1; expected a number of at least 0"),
    "no number": ({"resources": {"resources": {"mine": "one"}}}, "mine='one'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_arguments_that_make_no_sense_are_refused(name: str) -> None:
    options, message = WRONG[name]
    with pytest.raises(ArgumentError, match=message):
        RayCluster(2, **{"service": "tests.ray.service:service", **options})


def test_without_ray_one_line_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ClusterError) as refused:
        RayCluster(2, service="tests.ray.service:service")
    assert str(refused.value) == "RayCluster needs Ray: pip install 'aiograd[ray]'"


def test_resources_become_what_a_placement_group_is_asked_for() -> None:
    assert bundle_of({"num_cpus": 2, "num_gpus": 0.5, "memory": 1000, "resources": {"mine": 1}}) == {
        "CPU": 2.0, "GPU": 0.5, "memory": 1000.0, "mine": 1.0,
    }  # fmt: skip
    assert sum(bundle_of({"num_cpus": 0}).values()) > 0, "Ray refuses a bundle of nothing"


async def _hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()


async def _speak_http_1(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    writer.close()


async def _say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()
    writer.close()


@pytest.mark.net
@pytest.mark.parametrize("serve", [None, _hang_up, _speak_http_1, _say_nothing])
async def test_an_address_without_ray_is_refused_in_seconds(serve: Callable[..., Any] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiograd.distributed.cluster.ray_connection.REACH_SECONDS", 0.2)
    server = await asyncio.start_server(serve or _hang_up, "127.0.0.1")
    port = server.sockets[0].getsockname()[1]
    if serve is None:
        server.close()
    try:
        with pytest.raises(ClusterError, match=rf"RayCluster\(address='127\.0\.0\.1:{port}'\): .*Ray"):
            await check_reachable(f"127.0.0.1:{port}")
    finally:
        server.close()
        await server.wait_closed()

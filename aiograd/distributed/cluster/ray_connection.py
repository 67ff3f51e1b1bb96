"""The way to a Ray: the one that this process is connected to, one that runs elsewhere, or one that is started here.

Note [Priority]
    Ray runs its workers at nice 15. On a machine that has other things to do, an answer then takes a hundred times as long. A Ray that is
    started here runs them at the priority of this process. For one that is there already, ``RAY_worker_niceness=0`` does that where it is started.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import os
from collections.abc import Mapping
from typing import Any

from aiograd.distributed.cluster.process import through_cancellation
from aiograd.errors import ClusterError

#: seconds in which a Ray that listens answers
REACH_SECONDS = 3.0
#: how a client begins to speak HTTP/2, with settings that are empty; a server begins with its own (RFC 9113)
HTTP2_PREFACE, HTTP2_SETTINGS = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00", 4
#: how the address of a Ray client's server begins
CLIENT = "ray://"


def import_ray() -> Any:
    """The module `ray`, with its submodules for placing actors.

    Raises:
        ClusterError: it is not installed.
    """
    try:
        import ray
        import ray.util.client
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise ClusterError("RayCluster needs Ray: pip install 'aiograd[ray]'") from error
    return ray


class Connection(enum.Enum):
    """How this process has come to be a driver of a Ray."""

    FOUND = "it was one before"
    MADE = "it has been connected to one that was there"
    STARTED = "one has been started for it"


async def connect(
    ray: Any, address: str | None, namespace: str, runtime_env: Mapping[str, Any], cpus: int, exits: contextlib.AsyncExitStack
) -> Connection:
    """Connect this process to Ray as a driver.

    Cancelled, or after a failure, `exits` undoes the finished steps, as it does when it is closed.

    Args:
        ray: the module.
        address: of the head node; "auto": the Ray that runs on this machine; None: the address in ``RAY_ADDRESS``, else "auto", else a new Ray is
        started.
        namespace: of the actors.
        runtime_env: of all of them, unless this process was connected before.
        cpus: how many a Ray that is started here takes this machine to have.
        exits: where leaving this Ray is left, unless this process was connected to it before.

    Raises:
        ClusterError: there is no answer, it is of another version, or it is reached by Ray's client.
    """
    if ray.util.client.ray.is_connected():
        raise ClusterError(_no_client("in a process that is connected to ray://..."))
    is_connected = ray.is_initialized()
    if address is None and not is_connected:
        address = os.environ.get("RAY_ADDRESS") or None  # an empty one names none
    if address is not None and address.startswith(CLIENT):
        raise ClusterError(_no_client(f"address={address!r}"))
    if is_connected:
        return Connection.FOUND
    if address is not None and address != "auto":
        await check_reachable(address)
    options: dict[str, Any] = {"namespace": namespace, "logging_level": "warning", "configure_logging": False}
    if runtime_env:
        options["runtime_env"] = dict(runtime_env)
    exits.push_async_callback(asyncio.to_thread, ray.shutdown)
    try:
        await through_cancellation(asyncio.to_thread(ray.init, address=address or "auto", **options))
        return Connection.MADE
    except Exception as error:  # of many kinds: no process there, another version of Ray or of Python
        if address is not None or not isinstance(error, ConnectionError):
            raise ClusterError(f"RayCluster(address={address!r}): connecting to Ray failed: {story(error)}") from error
    options |= {"num_cpus": cpus, "include_dashboard": False, "_system_config": {"worker_niceness": 0}}  # see Note [Priority]
    if "RAY_ADDRESS" in os.environ:  # empty
        options["address"] = "local"
    await through_cancellation(asyncio.to_thread(ray.init, **options))
    return Connection.STARTED


def _no_client(subject: str) -> str:
    return (
        f"RayCluster({subject}): Ray's client passes on calls of Ray and nothing else, and the driver talks to its workers directly. Run the driver "
        "on a node of the Ray cluster (`ray job submit`, or address='auto' there), or let workers join by themselves (JoinCluster)"
    )


async def check_reachable(address: str) -> None:
    """See that a gRPC server listens there; Ray itself would try for minutes.

    Raises:
        ClusterError: it does not.
    """
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdigit() or os.environ.get("RAY_USE_TLS", "0") not in ("0", "false"):
        return  # another kind of address, or none at all: Ray says so at once
    try:
        async with asyncio.timeout(REACH_SECONDS):
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            try:
                writer.write(HTTP2_PREFACE)
                is_grpc = (await reader.readexactly(9))[3] == HTTP2_SETTINGS
            finally:
                writer.close()
    except (OSError, TimeoutError, EOFError, OverflowError) as error:
        reason = str(error) or type(error).__name__
        raise ClusterError(f"RayCluster(address={address!r}): no Ray answers there ({reason}); is it the head node's?") from error
    if not is_grpc:
        raise ClusterError(f"RayCluster(address={address!r}): what listens there is no Ray; expected the head node's address, port 6379 by default")


def story(error: BaseException) -> str:
    """The message of an error, on one line."""
    return " ".join(str(error).split())

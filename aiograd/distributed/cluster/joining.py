"""Joining: a worker's side of a `JoinCluster`, as ``aiograd worker --join`` runs it.

A worker asks the coordinator to be taken in, and asks again while no process listens there: the order of starts does not matter. From then on it
serves, until the coordinator closes the cluster, wants it to start anew, or is lost. A coordinator that was lost may be back soon: it is asked again
for a while.
"""

from __future__ import annotations

import asyncio
import enum
import socket
from collections.abc import Iterable

from aiograd.distributed.messages.library import JoinRequest
from aiograd.distributed.rpc.http.addresses import parse_url, resolve
from aiograd.distributed.worker import Worker
from aiograd.errors import AddressError, DeadlineError, DistributedError, NameTakenError, Overloaded, WorkerLostError
from aiograd.running.log_fields import structured_logger
from aiograd.running.version import __version__

log = structured_logger("aiograd.distributed")

#: the name of the coordinator of a cluster
LEADER = "driver"
#: seconds between two attempts to join, at first and at most
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0
#: seconds that a coordinator has to answer
ASK_SECONDS = 10.0
#: how long a new worker waits for the old one of its name to be noticed as lost, as a multiple of the time that noticing takes
TAKEN = 2.0


class StopReason(enum.Enum):
    """Why a worker no longer serves."""

    STOPPED = "it was asked to stop"
    DISMISSED = "the cluster was closed"
    RESTART = "its coordinator wants it to start anew"
    ORPHANED = "its coordinator was lost"


async def serve_cluster(worker: Worker, url: str, stopping: asyncio.Event, rejoin_seconds: float = 60.0) -> StopReason:
    """Join the cluster of the coordinator at `url` with an open worker, and serve it; returns why that is over.

    Cancelling it leaves the worker open and the coordinator to notice.

    Args:
        worker: open.
        url: of the coordinator.
        stopping: set when the worker shall end.
        rejoin_seconds: how long a coordinator that was lost is waited for. One that was never there is waited for without end.

    Raises:
        ClusterError, VersionMismatch: the coordinator refuses this worker; `NameTakenError` where another of its name is alive. AuthenticationError:
        it has another secret. Other errors of `Worker.call` that another attempt would not change.
    """
    membership = worker.membership
    membership.leader = LEADER
    worker.add_peer(LEADER, url)
    loop = asyncio.get_running_loop()
    until: float | None = None
    while True:
        given_up: float | None = None
        pause = FIRST_PAUSE
        while True:
            if until is None and membership.leader_lost.is_set():  # it was there, and gone before it answered
                until = loop.time() + rejoin_seconds
            membership.leader_lost.clear()
            try:
                await worker.call_apart(LEADER, JoinRequest.form.name, worker.url, __version__, timeout=ASK_SECONDS)
                break
            except NameTakenError:  # by one that is about to be noticed missing, perhaps
                given_up = given_up or loop.time() + TAKEN * worker.limits.silence
                if loop.time() >= given_up:
                    raise
            except (AddressError, WorkerLostError, DeadlineError, Overloaded) as error:
                if isinstance(error, AddressError) and await way_to(url) is not None:
                    raise  # there is such a host: it speaks TLS and we do not, or the other way round
                if until is not None and loop.time() >= until:
                    return StopReason.ORPHANED
                _say_once(worker.name, url, pause, error)
            if await _first([stopping], pause) is not None:
                return StopReason.STOPPED
            pause = min(2 * pause, LONGEST_PAUSE)
        happened = await _first([stopping, membership.dismissed, membership.restarting, membership.leader_lost])
        if happened is stopping:
            return StopReason.STOPPED
        if happened is membership.dismissed:
            return StopReason.DISMISSED
        if happened is membership.restarting:
            return StopReason.RESTART
        until = loop.time() + rejoin_seconds


async def _first(events: Iterable[asyncio.Event], timeout: float | None = None) -> asyncio.Event | None:
    """The first of these events that is set, in this order; None where none is within `timeout` seconds."""
    tasks = {asyncio.ensure_future(event.wait()): event for event in events}
    try:
        done, _ = await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
    return next((event for task, event in tasks.items() if task in done), None)


async def wait_for_way(name: str, url: str, stopping: asyncio.Event) -> str | None:
    """Wait until the coordinator's name is known and there is a way to it; returns the address of this machine that it begins at, None when stopped.

    Cancelling it changes nothing.

    Args:
        name: the worker's, for the log. url: of the coordinator. stopping: set when the worker shall end.

    Raises:
        ArgumentError: it is no URL. PermissionError: it leads to a forbidden address.
    """
    pause = FIRST_PAUSE
    while (address := await way_to(url)) is None:
        _say_once(name, url, pause, "its name is not known, or there is no way to it")
        if await _first([stopping], pause) is not None:
            return None
        pause = min(2 * pause, LONGEST_PAUSE)
    return address


async def way_to(url: str) -> str | None:
    """The address of this machine from which the coordinator at `url` is reached; nothing is sent to it. None: there is no way to it now."""
    address = parse_url(url)
    try:
        host = (await resolve(address))[0]
        family, kind, protocol, _, there = (await asyncio.get_running_loop().getaddrinfo(host, address.port, type=socket.SOCK_DGRAM))[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(there)
            return str(probe.getsockname()[0])
    except PermissionError:
        raise
    except (AddressError, OSError):
        return None


def _say_once(name: str, url: str, pause: float, why: DistributedError | str) -> None:
    if pause == FIRST_PAUSE:
        log.info("worker %s waits for the coordinator at %s: %s", name, url, why)

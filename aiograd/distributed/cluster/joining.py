"""Joining: a worker's side of a `JoinCluster`, as ``aiograd worker --join`` runs it.

A worker asks the driver to be taken in, and asks again while nobody listens there: who starts first does not matter. From then on it serves,
until the driver closes the cluster, wants it to start anew, or is lost. A driver that was lost may be back soon: it is asked again for a while.
"""

from __future__ import annotations

import asyncio
import enum
import socket
from collections.abc import Iterable

from aiograd.distributed.driver.membership import JOIN
from aiograd.distributed.worker import Worker
from aiograd.errors import DeadlineError, NameTakenError, Overloaded, WorkerLostError
from aiograd.version import __version__

#: what workers call the driver of their cluster
LEADER = "driver"
#: seconds between two attempts to join, at first and at most
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0
#: seconds that a driver has to answer
ASK_SECONDS = 10.0
#: how many times as long as it takes to notice a silent worker a new one of its name waits for that
TAKEN = 2.0


class Ending(enum.Enum):
    """Why a worker no longer serves."""

    STOPPED = "it was asked to stop"
    DISMISSED = "the cluster was closed"
    RESTART = "its driver wants it to start anew"
    ORPHANED = "its driver was lost"


async def serve_cluster(worker: Worker, url: str, stopping: asyncio.Event, rejoin_seconds: float = 60.0) -> Ending:
    """Join the cluster of the driver at `url` with an open worker, and serve it; returns why that is over.

    Cancelling it leaves the worker open and the driver to notice.

    Args:
        worker: open.
        url: of the driver.
        stopping: set when the worker shall end.
        rejoin_seconds: how long a driver that was lost is waited for. One that was never there is waited for without end.

    Raises:
        ClusterError, VersionMismatch: the driver refuses this worker; `NameTakenError` where another of its name is alive. AuthenticationError: it
        has another secret. Other errors of `Worker.call` that another attempt would not change.
    """
    membership = worker.membership
    membership.leader = LEADER
    worker.add_peer(LEADER, url)
    loop = asyncio.get_running_loop()
    until: float | None = None
    given_up: float | None = None
    while True:
        membership.leader_lost.clear()
        pause = FIRST_PAUSE
        while True:
            try:
                await worker.call_apart(LEADER, JOIN, worker.url, __version__, timeout=ASK_SECONDS)
                break
            except NameTakenError:  # by one that is about to be noticed missing, perhaps
                given_up = given_up or loop.time() + TAKEN * worker.limits.silence
                if loop.time() >= given_up:
                    raise
            except (WorkerLostError, DeadlineError, Overloaded):
                if until is not None and loop.time() >= until:
                    return Ending.ORPHANED
            if await _first([stopping], pause) is not None:
                return Ending.STOPPED
            pause = min(2 * pause, LONGEST_PAUSE)
        happened = await _first([stopping, membership.dismissed, membership.restarting, membership.leader_lost])
        if happened is stopping:
            return Ending.STOPPED
        if happened is membership.dismissed:
            return Ending.DISMISSED
        if happened is membership.restarting:
            return Ending.RESTART
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


def address_towards(host: str, port: int) -> str:
    """The address of this machine from which `host` is reached; nothing is sent.

    Raises:
        OSError: there is no way to it.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])

"""JoinCluster: a coordinator that waits for workers started elsewhere: by Slurm, Kubernetes, compose, systemd, or a person in another terminal."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, Self

from aiograd.distributed.cluster.base import BaseCluster
from aiograd.distributed.cluster.joining import LEADER
from aiograd.distributed.cluster.roster import LostCallback, ReturnCallback, Roster
from aiograd.distributed.dashboard_options import DashboardOptions
from aiograd.distributed.messages.library import Restart
from aiograd.distributed.rpc.encodings import Encoding
from aiograd.distributed.rpc.identity import PeerIdentity
from aiograd.distributed.rpc.keyring import Keyring
from aiograd.distributed.rpc.limits import Limits, check_number
from aiograd.distributed.rpc.transport import Transport
from aiograd.distributed.service import Service
from aiograd.distributed.worker import Worker
from aiograd.errors import ArgumentError, ClusterError, DeadlineError, EngineClosedError, Overloaded, WorkerLostError
from aiograd.running.log_fields import structured_logger
from aiograd.running.version import check_release

log = structured_logger("aiograd.distributed")

#: seconds that workers have to hear that the cluster is closed
GOODBYE_SECONDS = 2.0
#: why a worker was lost is not known here: the process is not this one's child
UNKNOWN_STATUS = 1


class JoinCluster(BaseCluster):
    """Workers that come by themselves, and a coordinator that waits for them. An async context manager::

        async with JoinCluster(expect=4, port=7000, secret=dist.read_secret_file("cluster.key")) as cluster:      # until all four are there
            await cluster.driver.call("w3", "predict", x)

    and on each of four machines, before or after that::

        aiograd worker --join http://driver:7000 --name w3 --service my_service:service

    A worker that is lost may come back under its name, without its state. When the block ends, workers are told and end with status 0.

    Args:
        expect: how many workers to wait for.
        at_most: how many may join; `expect` by default.
        service: the functions and classes of the coordinator that its workers may use.
        host, port, secret, ssl, client_ssl, allow_plaintext, trusted_hosts, limits, encoding, gradient_encoding: of the coordinator, as of `Worker`.
        timeout: seconds to wait for them.
        dashboard: of the coordinator, as of `Worker`; it shows all workers.
        transport: of the coordinator, as of `Worker`; None: HTTP. One of a simulated network lets a whole cluster run in a test.
        on_lost, on_return: called on the loop with name and status when a worker is lost, with name and URL when it is back.

    Raises:
        ArgumentError, ArgumentTypeError: an argument cannot be used.
    """

    def __init__(
        self,
        expect: int,
        *,
        at_most: int | None = None,
        service: Service | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        secret: bytes | str | Keyring | None = None,
        ssl: Any = None,
        client_ssl: Any = None,
        allow_plaintext: bool = False,
        trusted_hosts: tuple[str, ...] = (),
        limits: Limits | None = None,
        encoding: Encoding = Encoding.PLAIN,
        gradient_encoding: Encoding = Encoding.PLAIN,
        timeout: float = 300.0,
        on_lost: LostCallback | None = None,
        on_return: ReturnCallback | None = None,
        dashboard: bool | DashboardOptions = False,
        transport: Transport | None = None,
    ) -> None:
        super().__init__()
        self._expect = expect
        self._at_most = expect if at_most is None else at_most
        if expect < 0 or self._at_most < max(expect, 1):
            raise ArgumentError(f"JoinCluster(expect={expect}, at_most={at_most}): expected at least 0, and at least as many that may join")
        check_number("JoinCluster(): timeout", timeout)
        self._timeout = timeout
        self._on_lost, self._on_return = on_lost, on_return
        self._worker = Worker(
            LEADER, service=service, host=host, port=port, secret=secret, ssl=ssl, client_ssl=client_ssl, allow_plaintext=allow_plaintext,
            trusted_hosts=trusted_hosts, limits=limits, encoding=encoding, gradient_encoding=gradient_encoding,
            dashboard=dashboard, transport=transport,
        )  # fmt: skip
        self._incarnations: dict[str, bytes] = {}
        self._joined = asyncio.Condition()
        self._is_closing = False

    # ---------------------------------------------------------------- what there is

    @property
    def url(self) -> str:
        """The URL that workers join: known as soon as the coordinator listens, which is before all of them are there.

        Raises:
            DistributedError: the coordinator does not listen yet.
        """
        return self._worker.url

    @property
    def workers(self) -> tuple[str, ...]:
        """Names of the workers that have joined, sorted: the order in which they came is an accident."""
        return () if self._roster is None else tuple(sorted(self._roster.names))

    async def wait_running(self, name: str) -> None:
        """Wait until this worker is there: at once if it is, or when it is back. Cancelling changes nothing.

        Args:
            name: name of the worker.

        Raises:
            UnknownPeerError: no such worker.
        """
        await self._open().wait_running(name)

    async def wait_joined(self, count: int) -> None:
        """Wait until so many workers are there. Cancelling changes nothing.

        Args:
            count: how many.
        """
        roster = self._open()
        async with self._joined:
            await self._joined.wait_for(lambda: sum(roster.member(name).is_running for name in roster.names) >= count)

    # ---------------------------------------------------------------- changing it

    async def restart(self, name: str) -> None:
        """Ask a worker to start anew; one that is lost is waited for, since this cluster cannot start it. It has lost its state.

        Cancelling it stops the waiting only.

        Args:
            name: name of the worker.

        Raises:
            UnknownPeerError: no such worker. DeadlineError: it was not back within the cluster's `timeout`.
        """
        roster = self._open()
        member = roster.member(name)
        try:
            async with asyncio.timeout(self._timeout):
                if member.is_running:
                    with contextlib.suppress(WorkerLostError):  # which is about to be reported
                        await roster.ask(name, Restart())
                    roster.lost(name, UNKNOWN_STATUS, is_returning=True, was_asked=True)
                await roster.wait_running(name)
        except TimeoutError:
            raise DeadlineError(
                f"JoinCluster.restart({name!r}): it was not back within {self._timeout:g} s. This cluster starts no processes: whatever started "
                f"worker {name} has to start it again"
            ) from None

    async def add(self, name: str) -> None:
        """Let one more worker join, and wait until this one has. Cancelled, it may still join.

        Args:
            name: its name.

        Raises:
            DeadlineError: it has not joined within the cluster's `timeout`.
            ArgumentError: there is a worker of this name.
        """
        roster = self._open()
        if name in roster.names:
            raise ArgumentError(f"JoinCluster.add({name!r}): there is a worker of this name; expected another name")
        self._at_most += 1
        try:
            async with asyncio.timeout(self._timeout), self._joined:
                await self._joined.wait_for(lambda: name in roster.names and roster.member(name).is_running)
        except TimeoutError:
            self._at_most -= 1
            raise DeadlineError(f"JoinCluster.add({name!r}): it has not joined within {self._timeout:g} s at {self.url}") from None

    async def remove(self, name: str) -> None:
        """Dismiss a worker: it ends with status 0, and its name may be taken by another.

        Args:
            name: name of the worker.

        Raises:
            UnknownPeerError: no such worker.

        Cancelled, the worker may have been dismissed, and its name is taken until `remove` is called again.
        """
        roster = self._open()
        roster.member(name)
        self._incarnations.pop(name, None)  # its end is expected
        await roster.dismiss(GOODBYE_SECONDS, name)
        await roster.forget(name)

    # ---------------------------------------------------------------- workers come and go

    async def _take_in(self, caller: PeerIdentity, url: str, version: str) -> None:
        """A worker asks to join. Asking again changes nothing: its first question's answer may have been lost."""
        roster, name = self._roster, caller.name
        if roster is None:
            raise Overloaded(f"{name} asks to join a cluster that is being closed; another may be opened here")
        check_release(f"worker {name}", version)
        if name in roster.names:
            if roster.member(name).is_running and self._incarnations.get(name) != caller.incarnation:
                raise ClusterError(f"a worker named {name} has joined already, from {roster.member(name).url}; give each its own --name")
        elif len(roster.names) >= self._at_most:
            raise ClusterError(f"the cluster has the {self._at_most} worker(s) that may join: {', '.join(self.workers)}; {name} is one too many")
        roster.add(name)
        self._incarnations[name] = caller.incarnation
        await roster.introduce(name, url, caller.incarnation)
        async with self._joined:
            self._joined.notify_all()
        log.info("worker %s has joined from %s", name, url)

    def _peer_lost(self, name: str, incarnation: bytes) -> None:
        roster = self._roster
        if roster is not None and not self._is_closing and self._incarnations.get(name) == incarnation:
            roster.lost(name, UNKNOWN_STATUS, is_returning=True)

    async def __aenter__(self) -> Self:
        """Listen, and wait for the workers. Cancelled, it tells the present workers that the cluster is closed.

        Raises:
            DeadlineError: they were not all there within `timeout`. OSError: the coordinator cannot listen there.
        """
        if self._roster is not None or self._is_closing:
            raise EngineClosedError("JoinCluster: its `async with` block was entered twice; make another JoinCluster")
        async with contextlib.AsyncExitStack() as exits:
            driver = self._worker
            exits.callback(setattr, self, "_roster", None)
            self._roster = Roster("JoinCluster", driver, self._on_lost, self._on_return)
            driver.endpoint.keeps_names = True
            driver.membership.on_join = self._take_in  # before it listens: a worker may be waiting at the door
            driver.membership.on_peer_lost = self._peer_lost
            await exits.enter_async_context(driver)
            exits.push_async_callback(self._say_goodbye)
            log.info("waiting for %d worker(s) at %s", self._expect, driver.url)
            try:
                async with asyncio.timeout(self._timeout):
                    await self.wait_joined(self._expect)
            except TimeoutError:
                there = f"only {', '.join(self.workers)}" if self.workers else "no worker"
                raise DeadlineError(
                    f"JoinCluster(expect={self._expect}): after {self._timeout:g} s at {driver.url} {there} had joined. Start the others with "
                    f"`aiograd worker --join {driver.url} --name NAME --service MODULE:NAME` and the same secret"
                ) from None
            self._exits = exits.pop_all()
        return self

    async def _say_goodbye(self) -> None:
        self._is_closing = True
        roster, self._roster = self._roster, None
        if roster is not None:
            await roster.dismiss(GOODBYE_SECONDS)

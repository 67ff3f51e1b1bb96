"""LocalCluster: a coordinator in this process and workers in processes of their own, all on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from typing import Self

from aiograd.distributed.cluster.base import BaseCluster
from aiograd.distributed.cluster.forked import fork
from aiograd.distributed.cluster.names import check_names, check_service
from aiograd.distributed.cluster.process import PROGRAM, Launch, WorkerProcess, spawn, through_cancellation
from aiograd.distributed.cluster.roster import LostCallback, ReturnCallback, Roster, describe_status
from aiograd.distributed.dashboard_options import DashboardOptions, read_options
from aiograd.distributed.messages.library import SetPeers
from aiograd.distributed.rpc.encodings import Encoding
from aiograd.distributed.rpc.limits import Limits, check_number
from aiograd.distributed.worker import Worker
from aiograd.errors import ArgumentError, DistributedError, EngineClosedError, UnknownPeerError, WorkerLostError
from aiograd.running.log_fields import structured_logger

log = structured_logger("aiograd.distributed")

#: seconds that workers have to end by themselves before they are killed
STOP_GRACE = 5.0
#: seconds that a worker has to show that it is there; one that is busy for longer counts as running until its process has ended
ASK_SECONDS = 1.0
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
#: the ways to start a worker's process, by the argument `start`
STARTS: Mapping[str, Launch] = {"fork": fork, "spawn": spawn}
#: a process per core does the work; threads of BLAS and OpenMP inside of them would fight over the cores
ONE_THREAD = {name: "1" for name in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")}


class LocalCluster(BaseCluster):
    """Workers in processes of their own, and a coordinator that calls them. An async context manager::

        async with LocalCluster(2, service="my_service:service") as cluster:
            await cluster.driver.call("worker0", "predict", x)

    The workers share a random secret with the coordinator and know each other. They end with the block, and when this process is killed. Their
    output is printed to standard error here, each line with the worker's name before it.

    Args:
        n: how many workers.
        service: the service of the workers, ``"module:name"`` of a `Service`; imported in each worker, with this process's ``sys.path``.
        names: of the workers; ``worker0`` and so on by default.
        host: the address they listen on, each at a free port.
        max_restarts: how often a worker that ended without being asked to is started again, each; it has lost its state.
        on_lost: called on the loop with name and exit status (negative: number of a signal) when a worker has ended without being asked to.
        on_return: called on the loop with name and URL when a worker runs again.
        environment: environment variables of the workers, beside those of this process. One thread per process is used for BLAS and OpenMP
            where neither says otherwise.
        limits: of the workers and of the coordinator.
        encoding, gradient_encoding: reduced precision for what the workers and the coordinator send, as of `Worker`.
        log_level: from which level on the workers log on standard error: "debug", "info", "warning", "error" or "critical". Tracebacks of
            functions that raise are logged as warnings.
        start_timeout: seconds that a worker may take to listen.
        start: "fork", the default, starts workers as forks of a small process that has imported aiograd, in a tenth of the time; on Linux, and where
            BLAS is given one thread per process. Elsewhere, as on macOS, and with "spawn", each has an interpreter of its own from the beginning.
        dashboard: of the coordinator, as of `Worker`; it shows all workers.

    Raises:
        ArgumentError: names or numbers that make no sense.

    >>> cluster.workers
    ('worker0',)
    >>> await cluster.driver.call("worker0", "double", ag.ones(2))
    tensor([2., 2.])
    """

    def __init__(
        self,
        n: int = 2,
        *,
        service: str,
        names: Sequence[str] | None = None,
        host: str = "127.0.0.1",
        max_restarts: int = 0,
        on_lost: LostCallback | None = None,
        on_return: ReturnCallback | None = None,
        environment: Mapping[str, str] | None = None,
        limits: Limits | None = None,
        encoding: Encoding = Encoding.PLAIN,
        gradient_encoding: Encoding = Encoding.PLAIN,
        log_level: str = "warning",
        start_timeout: float = 30.0,
        start: str = "fork",
        dashboard: bool | DashboardOptions = False,
    ) -> None:
        super().__init__(check_names("LocalCluster", n, names))
        check_service("LocalCluster", service)
        check_number("LocalCluster(): start_timeout", start_timeout)
        if max_restarts < 0:
            raise ArgumentError(f"LocalCluster(max_restarts={max_restarts}): expected at least 0")
        if log_level not in LOG_LEVELS:
            raise ArgumentError(f"LocalCluster(log_level={log_level!r}): expected one of {', '.join(LOG_LEVELS)}")
        if start not in STARTS:
            raise ArgumentError(f"LocalCluster(start={start!r}): expected one of {', '.join(STARTS)}")
        self._launch = STARTS[start]
        self._encoding, self._gradient_encoding = Encoding(encoding), Encoding(gradient_encoding)
        self._log_level = log_level
        self._service = service
        self._host = host
        self._on_lost, self._on_return = on_lost, on_return
        self._limits = Limits() if limits is None else limits
        self._start_timeout = start_timeout
        self._dashboard = read_options(dashboard) or False
        self._secret = secrets.token_bytes(32)
        self._environment = {**ONE_THREAD, **os.environ, **(environment or {})}
        self._environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
        self._environment["AIOGRAD_SECRET"] = self._secret.hex()
        self._environment.pop("AIOGRAD_SECRET_FILE", None)
        self._max_restarts = max_restarts
        self._restarts_left: dict[str, int] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._processes: dict[str, WorkerProcess] = {}
        #: processes with an expected end
        self._dismissed: set[WorkerProcess] = set()
        self._restarting: dict[str, asyncio.Task[None]] = {}
        self._is_closing = False

    # ---------------------------------------------------------------- what there is

    @property
    def pids(self) -> dict[str, int]:
        """Process number of each worker."""
        return {name: self._processes[name].pid for name in self.workers if name in self._processes}

    # ---------------------------------------------------------------- losing and restarting

    async def restart(self, name: str) -> None:
        """Start a worker anew, after killing it if it runs, and tell all workers its new address. It has lost its state.

        A call while a restart is under way waits for the same restart. Cancelled, it may leave the worker killed and not started.

        Args:
            name: name of the worker.

        Raises:
            UnknownPeerError: no such worker. WorkerLostError, DeadlineError: it ended, or did not listen, within `start_timeout`.

        >>> await cluster.restart("worker0")
        """
        process = self._process(name)
        async with self._locks[name]:
            if self._process(name) is process:
                await self._restart(name)

    async def wait_lost(self, name: str) -> int:
        """Wait until the process that now is this worker has ended; returns its exit status, negative for a signal. Cancelling changes nothing.

        Args:
            name: name of the worker.

        Returns:
            The exit status.

        Raises:
            UnknownPeerError: no such worker.

        >>> import os
        >>> os.kill(await cluster.driver.call("worker0", "process"), 9)
        >>> await cluster.wait_lost("worker0")
        -9
        """
        return await self._process(name).wait()

    async def wait_running(self, name: str) -> None:
        """Wait until this worker runs: at once if it answers, or when a restart that is under way, or due, is done. Cancelling changes nothing.

        A worker that was only silent, as a suspended process is, is waited for until it answers.

        Args:
            name: name of the worker.

        Raises:
            UnknownPeerError: no such worker. WorkerLostError: it has ended and is not being restarted.

        >>> await cluster.wait_running("worker0")
        """
        while True:
            self._process(name)
            if name in self._restarting:
                await asyncio.wait((self._restarting[name],))
            async with self._locks[name]:
                process = self._process(name)
            if process.status is not None:
                break
            try:  # it may be gone already, and the loop has yet to hear of it: one that answers is there
                async with asyncio.timeout(ASK_SECONDS):
                    await self._open().ask(name, SetPeers({}))
                return
            except WorkerLostError:  # it is about to end, or was silent for too long
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), ASK_SECONDS)
            except TimeoutError:
                if self._open().is_connected(name):
                    return  # busy
        raise WorkerLostError(
            f"worker {name} has ended ({describe_status(process.status)}) and nothing restarts it: call restart({name!r}), or give max_restarts",
            worker=name, stage="restart",
        )  # fmt: skip

    async def add(self, name: str) -> None:
        """Start another worker, and tell all workers its address. Cancelled, it ends the worker again.

        Args:
            name: its name.

        Raises:
            ArgumentError: the name is taken. WorkerLostError, DeadlineError: it ended, or did not listen, within `start_timeout`.

        >>> await cluster.add("worker1")
        >>> cluster.workers
        ('worker0', 'worker1')
        """
        roster = self._open()
        check_names("LocalCluster", 1, [name])
        if name in roster.names:
            raise ArgumentError(f"LocalCluster.add({name!r}): there is a worker of this name; expected another name, or restart({name!r})")
        self._admit(name)
        try:
            async with self._locks[name]:
                await self._start(name)
                await self._introduce(name)
        except BaseException:
            await self._dismiss(name, 0.0)
            raise

    async def remove(self, name: str) -> None:
        """End a worker for good: it is asked to, and killed after 5 seconds. Cancelled, it kills it at once.

        Args:
            name: name of the worker.

        Raises:
            UnknownPeerError: no such worker.

        >>> await cluster.remove("worker0")
        >>> cluster.workers
        ()
        """
        self._process(name)
        async with self._locks[name]:
            await self._dismiss(name, STOP_GRACE)

    def _admit(self, name: str) -> None:
        self._open().add(name)
        self._restarts_left[name] = self._max_restarts
        self._locks[name] = asyncio.Lock()

    async def _dismiss(self, name: str, grace: float) -> None:
        process = self._processes.pop(name, None)
        del self._locks[name], self._restarts_left[name]
        try:
            if process is not None:
                self._dismissed.add(process)
                await process.stop(grace)
                self._dismissed.discard(process)
        finally:
            await self._open().forget(name)

    def _process(self, name: str) -> WorkerProcess:
        process = self._processes.get(name)
        if process is None:
            raise UnknownPeerError(f"LocalCluster has no worker {name!r}; it has {', '.join(self._processes) or 'none now'}")
        return process

    async def _restart(self, name: str) -> None:
        old = self._processes[name]
        self._dismissed.add(old)
        await old.stop(0.0)
        self._dismissed.discard(old)
        self._open().lost(name, old.status or 0, is_returning=True, was_asked=True)
        await self._start(name)
        await self._introduce(name)

    def _ended(self, process: WorkerProcess) -> None:
        name = process.name
        if self._is_closing or process in self._dismissed or self._processes.get(name, process) is not process:
            return
        is_returning = self._restarts_left[name] > 0
        self._open().lost(name, process.status or 0, is_returning=is_returning)
        if is_returning:
            self._restarts_left[name] -= 1
            task = asyncio.get_running_loop().create_task(self._restart_lost(process, self._locks[name]), name=f"restart of {name}")
            self._restarting[name] = task
            task.add_done_callback(lambda task: self._restarting.pop(name, None))

    async def _restart_lost(self, process: WorkerProcess, lock: asyncio.Lock) -> None:
        name = process.name
        async with lock:
            while self._processes.get(name) is process:
                try:
                    await self._restart(name)
                except (DistributedError, OSError) as error:
                    log.error("restarting %s: %s", name, error)
                    if self._restarts_left[name] <= 0:
                        return
                    self._restarts_left[name] -= 1

    # ---------------------------------------------------------------- starting and stopping

    async def _start(self, name: str) -> None:
        defaults = dataclasses.asdict(Limits())
        limits = {name: value for name, value in dataclasses.asdict(self._limits).items() if value != defaults[name]}
        command = [
            *PROGRAM, "worker", "--managed", "--name", name, "--listen", f"{_bracketed(self._host)}:0",
            "--service", self._service, "--limits", json.dumps(limits), "--log-level", self._log_level,
            "--encoding", self._encoding.name.lower(), "--gradient-encoding", self._gradient_encoding.name.lower(),
        ]  # fmt: skip
        for peer, url in self._open().peers_of(name).items():  # so that it knows them before it answers
            command += "--peer", f"{peer}={url}"
        process = await WorkerProcess.start(name, command, self._environment, self._start_timeout, self._ended, self._launch)
        if self._is_closing:
            await process.stop(0.0)
            raise EngineClosedError(f"LocalCluster: it was closed while {name} was being started")
        self._processes[name] = process

    async def _introduce(self, name: str) -> None:
        process = self._processes[name]
        await self._open().introduce(name, process.url, process.incarnation)

    async def __aenter__(self) -> Self:
        """Start everything. Cancelled, or after a failure, it ends the workers that have been started.

        Raises:
            WorkerLostError: a worker ended instead of listening. DeadlineError: it did not listen within `start_timeout`.
        """
        if self._roster is not None or self._is_closing:
            raise EngineClosedError("LocalCluster: its `async with` block was entered twice; make another LocalCluster")
        async with contextlib.AsyncExitStack() as exits:
            exits.push_async_callback(self._stop)
            driver = Worker(
                "driver", host=self._host, secret=self._secret, limits=self._limits,
                encoding=self._encoding, gradient_encoding=self._gradient_encoding,
                dashboard=self._dashboard,
            )  # fmt: skip
            await exits.enter_async_context(driver)
            self._roster = Roster("LocalCluster", driver, self._on_lost, self._on_return, is_local=True)
            for name in self._names:
                self._admit(name)
            starts = [asyncio.create_task(self._start(name), name=f"start of {name}") for name in self._names]
            try:
                await asyncio.gather(*starts)
            except BaseException:
                for start in starts:
                    start.cancel()
                await through_cancellation(asyncio.wait(starts))
                raise
            for name in self._names:
                await self._introduce(name)
            exits.push_async_callback(self._stop_restarting)
            self._exits = exits.pop_all()
        return self

    async def _stop_restarting(self) -> None:
        self._is_closing = True
        tasks = list(self._restarting.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await through_cancellation(asyncio.wait(tasks))

    async def _stop(self) -> None:
        self._is_closing = True
        processes = list(self._processes.values())
        self._dismissed.update(processes)
        await asyncio.gather(*(process.stop(STOP_GRACE) for process in processes))
        self._processes = {}
        self._roster = None


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host

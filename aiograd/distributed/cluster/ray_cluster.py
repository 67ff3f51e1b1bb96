"""RayCluster: workers as actors of a Ray cluster. Ray places them, restarts dead ones and holds their resources; gradients do not go through it.

Note [Ray's part and aiograd's]
    Ray knows nodes, resources and processes. It is asked for a placement group with one bundle per worker and an actor in each. aiograd's own
    connections carry everything else, so a pass across nodes costs the same as on one machine. Each actor has one call that never returns
    (`lifetime`); Ray fails it when the actor dies, which is how the coordinator hears of a death that it did not notice itself.

Note [Coming back]
    Ray makes a dead actor again, on another node if need be. It is a new process without key, state or URL. The coordinator starts a worker in it
    under the old name, tells the others the new URL and reports its return. The state of the worker is lost: restore it from a checkpoint.

Source: Ray's documentation of actors, fault tolerance and placement groups (2.60).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Self

from aiograd.distributed.cluster.base import BaseCluster
from aiograd.distributed.cluster.local import LOG_LEVELS
from aiograd.distributed.cluster.names import check_names, check_service
from aiograd.distributed.cluster.process import through_cancellation
from aiograd.distributed.cluster.ray_connection import Connection, connect, import_ray, story
from aiograd.distributed.cluster.ray_placement import PLACE_SECONDS, STRATEGIES, RayPlacement, bundle_of
from aiograd.distributed.cluster.ray_worker import RayWorker, Settings, WorkerHandshake
from aiograd.distributed.cluster.roster import LostCallback, ReturnCallback, Roster
from aiograd.distributed.cluster.sealed import seal
from aiograd.distributed.dashboard_options import DashboardOptions, read_options
from aiograd.distributed.messages.library import SetPeers
from aiograd.distributed.rpc.encodings import Encoding
from aiograd.distributed.rpc.limits import Limits
from aiograd.distributed.worker import Worker
from aiograd.engine.run.together import together
from aiograd.errors import ArgumentError, ClusterError, EngineClosedError, WorkerLostError
from aiograd.running.log_fields import structured_logger
from aiograd.running.version import check_release

log = structured_logger("aiograd.distributed")

#: seconds until a worker that has been placed listens
START_SECONDS = PLACE_SECONDS
#: seconds that workers have to close in order when the cluster does, and that Ray has to report their end
STOP_GRACE = 5.0
#: seconds between questions to an actor that Ray is making again, at first and at most; the latter is also the time that a worker has to answer
ASK_SECONDS = 0.05, 1.0
#: Ray does not tell how a process ended
UNKNOWN_STATUS = 1


class RayCluster(BaseCluster):
    """Workers on a Ray cluster, and a coordinator in this process. An async context manager::

        async with RayCluster(4, service="my_service:service", resources={"num_cpus": 1, "num_gpus": 1}) as cluster:
            await cluster.driver.call("worker0", "predict", x)

    Needs the extra ``ray``. Uses the Ray that this process is connected to, else the one at `address` (or ``RAY_ADDRESS``), else one that runs
    on this machine, else starts one here, which ends with the block. The service's module has to be importable on every node: ship it by
    `runtime_env`. A worker that dies is made again by Ray and comes back under its name, without its state.

    Args:
        n: how many workers.
        service: the service of the workers, ``"module:name"`` of a `Service`.
        address: of Ray's head node, ``"10.0.0.2:6379"``; ``"auto"``: the Ray that runs on this machine. Not ``"ray://..."``: the coordinator talks to
            its workers directly, so it runs on a node of the cluster.
        resources: resources of each worker, by Ray's options: ``num_cpus``, ``num_gpus``, ``memory`` in bytes, ``resources`` of your own. With
            ``num_gpus`` each worker sees the devices that Ray gave it alone: ``cuda:0`` is its own.
        strategy: how Ray places them: "SPREAD" over nodes where it can, "STRICT_SPREAD", "PACK", "STRICT_PACK".
        runtime_env: files, packages and variables for the workers, as of Ray. Where ``ray.init`` has been called before, folders of this machine
            are given to that.
        names: of the workers; ``worker0`` and so on by default.
        max_restarts: the number of times that Ray restarts each worker; -1: always.
        host: the address that workers listen on; by default the address that their node has for Ray, and 127.0.0.1 in a Ray that was started here.
        certificate, key, ca: TLS files (PEM) of the workers, present on every node, as of ``aiograd worker``.
        client_ssl: an ``ssl.SSLContext`` for the coordinator's connections to them.
        allow_plaintext: let workers listen beyond their machine without TLS; messages are encrypted all the same.
        on_lost, on_return: called on the loop with name and status when a worker is lost, with name and URL when it is back.
        limits, encoding, gradient_encoding, log_level: as of `LocalCluster`.
        dashboard: of the coordinator, as of `Worker`; it shows all workers.
        start_timeout: seconds until all workers have been placed, and again until each listens. By default 30, and 5 for placing where Ray's nodes
            together could not hold them even if they were idle: say more where nodes come on demand.

    Raises:
        ArgumentError: names or numbers that make no sense. ClusterError: Ray is not installed.
    """

    def __init__(
        self,
        n: int = 2,
        *,
        service: str,
        address: str | None = None,
        resources: Mapping[str, Any] | None = None,
        strategy: str = "SPREAD",
        runtime_env: Mapping[str, Any] | None = None,
        names: Sequence[str] | None = None,
        max_restarts: int = -1,
        host: str | None = None,
        certificate: str | None = None,
        key: str | None = None,
        ca: str | None = None,
        client_ssl: Any = None,
        allow_plaintext: bool = False,
        on_lost: LostCallback | None = None,
        on_return: ReturnCallback | None = None,
        limits: Limits | None = None,
        encoding: Encoding = Encoding.PLAIN,
        gradient_encoding: Encoding = Encoding.PLAIN,
        log_level: str = "warning",
        start_timeout: float | None = None,
        dashboard: bool | DashboardOptions = False,
    ) -> None:
        super().__init__(check_names("RayCluster", n, names))
        check_service("RayCluster", service)
        if str(strategy).upper() not in STRATEGIES:
            raise ArgumentError(f"RayCluster(strategy={strategy!r}): expected one of {', '.join(STRATEGIES)}")
        if (start_timeout is not None and not start_timeout > 0) or max_restarts < -1:
            raise ArgumentError(f"RayCluster(max_restarts={max_restarts}, start_timeout={start_timeout}): expected at least -1 and above 0")
        if log_level not in LOG_LEVELS:
            raise ArgumentError(f"RayCluster(log_level={log_level!r}): expected one of {', '.join(LOG_LEVELS)}")
        self._resources = {"num_cpus": 1, **(resources or {})}
        bundle = bundle_of(self._resources)
        self._ray = import_ray()
        self._id = f"aiograd-{secrets.token_hex(4)}"
        self._placement = RayPlacement(self._ray, self._id, bundle, strategy.upper(), start_timeout)
        self._address = address
        self._runtime_env = dict(runtime_env or {})
        #: the part of the runtime environment that has to be given to each actor
        self._actor_env = self._runtime_env
        self._max_restarts = max_restarts
        self._on_lost, self._on_return = on_lost, on_return
        self._limits = Limits() if limits is None else limits
        self._start_timeout = START_SECONDS if start_timeout is None else start_timeout
        self._client_ssl = client_ssl
        self._dashboard = read_options(dashboard) or False
        defaults = dataclasses.asdict(Limits())
        self._settings = Settings(
            name="", leader="driver", service=service, host=host, allow_plaintext=allow_plaintext, certificates=(certificate, key, ca),
            limits={name: value for name, value in dataclasses.asdict(self._limits).items() if value != defaults[name]},
            encoding=Encoding(encoding).name, gradient_encoding=Encoding(gradient_encoding).name, log_level=log_level,
        )  # fmt: skip
        self._secret = secrets.token_bytes(32)
        self._actors: dict[str, Any] = {}
        self._handshakes: dict[str, WorkerHandshake] = {}
        self._watching: dict[str, asyncio.Task[None]] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    # ---------------------------------------------------------------- what there is

    @property
    def pids(self) -> dict[str, int]:
        """Process number of each worker, on its own node."""
        return {name: handshake.pid for name, handshake in self._handshakes.items()}

    def node_of(self, name: str) -> str:
        """The id that Ray has for the node where this worker runs.

        Args:
            name: name of the worker.

        Returns:
            The id, in hexadecimal.

        Raises:
            UnknownPeerError: no such worker.
        """
        return self._handshakes[self._open().member(name).name].node

    async def wait_running(self, name: str) -> None:
        """Wait until this worker runs: at once if it answers, or when Ray has made it again. Cancelling changes nothing.

        Args:
            name: name of the worker.

        Raises:
            UnknownPeerError: no such worker. WorkerLostError: it died, and Ray does not make it again.
        """
        roster = self._open()
        while True:
            await roster.wait_running(name)
            changed = roster.member(name).changed
            try:  # its connection may have ended before Ray has told of its death: one that answers is there
                async with asyncio.timeout(ASK_SECONDS[1]):
                    await roster.ask(name, SetPeers({}))
                return
            except WorkerLostError:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), ASK_SECONDS[1])
            except TimeoutError:
                return  # busy

    # ---------------------------------------------------------------- changing it

    async def restart(self, name: str) -> None:
        """Replace a worker by a new actor with the same place and name, whether it lives or not. It has lost its state.

        Cancelled, it may leave the worker ended and not started.

        Args:
            name: name of the worker.

        Raises:
            UnknownPeerError: no such worker. ClusterError: it was not placed, or did not start, within `start_timeout`.
        """
        roster = self._open()
        member = roster.member(name)
        url = member.url
        async with self._locks[name]:
            if member.is_running and member.url != url:
                return  # another caller has just restarted it
            await self._end(name)
            roster.lost(name, UNKNOWN_STATUS, is_returning=True, was_asked=True)
            try:
                await self._begin(name)
            except BaseException:
                roster.lost(name, UNKNOWN_STATUS, is_returning=False)
                raise

    async def add(self, name: str) -> None:
        """Start another worker, in a placement group of its own, or in the place of one that was removed.

        Args:
            name: its name.

        Raises:
            ArgumentError: the name is taken. ClusterError: Ray has no room for it within `start_timeout`.

        Cancelled, it ends the worker again.
        """
        roster = self._open()
        check_names("RayCluster", 1, [name])
        if name in roster.names:
            raise ArgumentError(f"RayCluster.add({name!r}): there is a worker of this name; expected another name, or restart({name!r})")
        self._locks[name] = asyncio.Lock()
        roster.add(name)
        try:
            await self._placement.reserve([name])
            await self._begin(name)
        except BaseException:
            await self._end(name)
            self._placement.release(name)
            await roster.forget(name)
            raise

    async def remove(self, name: str) -> None:
        """End a worker for good: it is asked to, and killed after 5 seconds. Cancelled, it is killed at once.

        Its place is kept for the next `add`, since a placement group of Ray does not shrink.

        Args:
            name: name of the worker.

        Raises:
            UnknownPeerError: no such worker.
        """
        roster = self._open()
        roster.member(name)
        async with self._locks[name]:
            await self._end(name, STOP_GRACE)
            self._placement.release(name)
            await roster.forget(name)
            del self._locks[name]

    # ---------------------------------------------------------------- starting and stopping

    async def __aenter__(self) -> Self:
        """Start everything. Cancelled, or after a failure, it ends the workers that have been started.

        Raises:
            ClusterError: Ray cannot be reached, or lacks the requested resources, within `start_timeout`. VersionMismatch: the nodes have another
            version of aiograd. Exceptions of importing the service.
        """
        if self._roster is not None:
            raise EngineClosedError("RayCluster: its `async with` block was entered twice; make another RayCluster")
        async with contextlib.AsyncExitStack() as exits:
            cpus = max(os.cpu_count() or 1, round(self._resources["num_cpus"] * len(self._names)))  # workers wait more than they compute
            connection = await connect(self._ray, self._address, self._id, self._runtime_env, cpus, exits)
            self._actor_env = self._runtime_env if connection is Connection.FOUND else {}
            if connection is Connection.STARTED:  # then all workers are on this machine
                self._settings = dataclasses.replace(self._settings, host=self._settings.host or "127.0.0.1")
            driver = Worker(
                "driver", secret=self._secret, limits=self._limits, client_ssl=self._client_ssl,
                encoding=Encoding[self._settings.encoding], gradient_encoding=Encoding[self._settings.gradient_encoding],
                dashboard=self._dashboard,
            )  # fmt: skip
            exits.callback(setattr, self, "_roster", None)
            exits.push_async_callback(self._stop)
            self._roster = Roster("RayCluster", await exits.enter_async_context(driver), self._on_lost, self._on_return)
            await self._placement.reserve(self._names)
            for name in self._names:
                self._locks[name] = asyncio.Lock()
                self._roster.add(name)
            await together([self._begin(name) for name in self._names])
            self._exits = exits.pop_all()
        return self

    async def _begin(self, name: str) -> None:
        """Make an actor, start the worker in it, introduce it, and watch over it."""
        ray = self._ray
        options = {
            **self._resources, "max_restarts": self._max_restarts, "max_concurrency": 1000, "scheduling_strategy": self._placement.strategy_of(name),
        }  # fmt: skip
        if self._actor_env:
            options["runtime_env"] = self._actor_env
        try:
            actor = ray.remote(RayWorker).options(**options).remote(name)
        except (TypeError, ValueError) as error:
            raise ArgumentError(
                f"RayCluster(runtime_env={self._runtime_env}): {story(error)}. Folders of this machine are taken in only where RayCluster itself "
                "connects to Ray; where ray.init() has been called before, they are given to that."
            ) from error
        self._actors[name] = actor
        try:
            async with asyncio.timeout(self._start_timeout) as limit:
                await self._start(name, actor)
        except BaseException as error:
            await self._end(name)
            if limit.expired():
                raise ClusterError(
                    f"RayCluster: worker {name} did not listen within {self._start_timeout:g} s: raise start_timeout, or see what its service does "
                    "when it is imported"
                ) from None
            if isinstance(error, ray.exceptions.RayError):
                raise WorkerLostError(f"worker {name} ended while it was being started: {story(error)}", worker=name, stage="start") from error
            raise
        self._watching[name] = asyncio.get_running_loop().create_task(self._watch(name, actor), name=f"watch over {name}")

    async def _start(self, name: str, actor: Any) -> None:
        handshake: WorkerHandshake = await self._result(name, actor.greet.remote())
        check_release(f"worker {name} on node {handshake.address}", handshake.version)
        settings = dataclasses.replace(self._settings, name=name)
        if not handshake.url:
            handshake = await self._result(name, actor.start.remote(settings, seal(self._secret, handshake.public)))
        self._handshakes[name] = handshake
        await self._open().introduce(name, handshake.url, handshake.incarnation)

    async def _result(self, name: str, reference: Any) -> Any:
        """Await a method of an actor; cancelling stops the waiting only."""
        try:
            return await reference
        except self._ray.exceptions.RayTaskError as error:
            if not isinstance(error.cause, Exception):
                raise
            error.cause.add_note(f"(raised by worker {name} of a RayCluster)")
            raise error.cause from None

    async def _watch(self, name: str, actor: Any) -> None:
        """Hear of the end of an actor, and start the worker in the one that Ray puts in its place; see Note [Coming back]."""
        while True:
            with contextlib.suppress(self._ray.exceptions.RayError):  # whether it is gone for good is seen when it is to be started
                await actor.lifetime.remote()
            if self._actors.get(name) is not actor:
                return
            self._open().lost(name, UNKNOWN_STATUS, is_returning=True)
            try:
                await self._start_again(name, actor)
            except Exception as error:
                if self._actors.get(name) is not actor:
                    return
                log.error("worker %s does not come back: %s", name, story(error))
                self._open().lost(name, UNKNOWN_STATUS, is_returning=False)
                return

    async def _start_again(self, name: str, actor: Any) -> None:
        """As `_start`, as soon as Ray has made the actor again; raises where it does not."""
        pause, longest = ASK_SECONDS
        while True:
            try:
                return await self._start(name, actor)
            except (self._ray.exceptions.ActorUnavailableError, WorkerLostError):  # one that died again says so when it is asked
                await asyncio.sleep(pause)
            pause = min(2 * pause, longest)

    async def _end(self, name: str, grace: float = 0.0) -> None:
        """End the actor of a worker, without another in its place: in order within `grace` seconds, else it is killed. Cancelled, it is killed."""
        actor, watching = self._actors.pop(name, None), self._watching.pop(name, None)
        self._handshakes.pop(name, None)
        if actor is None:
            return
        stopping = asyncio.ensure_future(_settled(actor.stop.remote() if grace else None))
        try:
            await asyncio.wait((stopping,), timeout=grace)
        finally:
            stopping.cancel()
            self._ray.kill(actor, no_restart=True)
            if watching is not None:
                await through_cancellation(asyncio.wait((watching,), timeout=STOP_GRACE))  # the call that never returns has failed
                watching.cancel()

    async def _stop(self) -> None:
        """End all workers and give their places back."""
        try:
            await asyncio.gather(*(self._end(name, STOP_GRACE) for name in list(self._actors)))
        finally:
            self._placement.close()


async def _settled(reference: Any) -> None:
    """Wait until a call of an actor has ended, with or without an error; None: there was none."""
    if reference is not None:
        with contextlib.suppress(Exception):
            await reference

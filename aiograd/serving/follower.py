"""Followers: servers in other processes that serve a leader's versions, to the bit.

Note [One request in flight]
    A follower asks with the number and digest of its version and is answered when the leader serves another one: by a delta where the leader still
    has the follower's version, else by the whole state, which is a delta from zeros. So a slow follower skips versions and no queue grows, a
    rollback travels as any other version, and connecting again is the next request. A leader that was restarted with other weights under the
    same number has another digest. The follower applies a delta out of place, compares the digest, then swaps one reference.

Note [Parts]
    A payload that is too large for a message follows in parts, one request each. The leader keeps it until the last part, or until the follower
    has not asked for `FORGET` seconds, so a follower on a slow link gets a whole version also where the leader has dropped that version.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Mapping
from typing import Any, NamedTuple, get_type_hints

import numpy as np

from aiograd.distributed.scope import current_worker
from aiograd.distributed.service import Service
from aiograd.distributed.worker import Worker
from aiograd.engine.run import current_engine
from aiograd.errors import ArgumentError, ArgumentTypeError, AuthenticationError, DeltaError, DistributedError, ServingError
from aiograd.nn.module import Module
from aiograd.serving.arguments import checked_number, checked_timeout
from aiograd.serving.delta import apply_delta, encode_delta
from aiograd.serving.server import Server
from aiograd.serving.versions import Array, Version
from aiograd.tensors.core import TensorCore, host_array, make

logger = logging.getLogger("aiograd.serving")

#: name of the function that a leader exposes
FUNCTION = "serving.follow"
#: seconds after which a leader answers that nothing has changed
LONG_POLL = 10.0
#: seconds within which a leader answers, at most; it keeps the parts of a payload as long
FORGET = 3 * LONG_POLL
#: bytes of a payload in one message, and bytes that it may have besides twice the bytes of the model
PART, _SURPLUS = 1 << 22, 1 << 20
#: payloads that a leader keeps for followers that ask for the same one, and delays that a follower keeps
PAYLOADS, DELAYS = 4, 1000
#: seconds between two attempts to reach the leader: the first, and the longest
RETRY, LONGEST_RETRY = 0.05, 1.0
#: handshakes in a row that fail before the first version until entering raises; fewer may be due to a leader that closes
MOST_REFUSALS = 4


def zeros_of(state: Mapping[str, Any]) -> Version:
    """The version from which a whole state is a delta: zeros of the same paths, shapes and dtypes, with a digest of these."""
    description = json.dumps([(path, array.dtype.name, array.shape) for path, array in state.items()])
    digest = f"zeros {hashlib.sha256(description.encode()).hexdigest()}"
    return Version.of(0, {path: np.zeros(array.shape, array.dtype) for path, array in state.items()}, digest=digest, is_finite=True)


def part_bytes(worker: Worker) -> int:
    """The bytes of a payload that fit into a message of a worker."""
    return max(1, min(PART, worker.limits.message_bytes // 2, worker.limits.bytes_per_peer // 2))


class _Answer(NamedTuple):
    """An answer that has a version, but the part of the payload."""

    number: int
    digest: str
    model: str  #: digest of `zeros_of` the version's state
    since: float  #: seconds since the epoch at which the version began to serve
    is_whole: bool  #: True if the payload is a delta from zeros
    size: int  #: bytes of the payload
    transfer: int  #: number to ask for further parts with


_TYPES = get_type_hints(_Answer)


class Leader:
    """Answers followers of a server, see Note [One request in flight]."""

    def __init__(self, server: Server) -> None:
        self._server = server
        #: by digest of the base, number and digest of the target: tasks that encode it, or have
        self._payloads: OrderedDict[tuple[str, int, str], asyncio.Task[bytes]] = OrderedDict()
        #: by number: payloads of which a follower fetches the parts, with the time of the loop at its last request
        self._transfers: dict[int, tuple[_Answer, bytes, float]] = {}
        self._numbers = itertools.count(1)
        self._zeros: Version | None = None

    async def follow(self, number: int, digest: str, transfer: int, offset: int, most: int) -> dict[str, Any]:
        """Answer a follower when another version serves than its own (0 and "" without one), or `LONG_POLL` has passed.

        `transfer` and `offset` tell the part that is asked for, 0 and 0 the first one of the version that serves; a part has `most` bytes at most.
        Returns the fields of `_Answer`, and ``part``, a Tensor of uint8; nothing where nothing has changed; ``refused``, a text, without a version.
        """
        now = asyncio.get_running_loop().time
        if transfer:
            found = self._transfers.pop(transfer, None)
            if found is None:
                return {"refused": f"there is no transfer {transfer}, or it has been dropped: ask from the start"}
            answer, payload, _ = found
        else:
            try:
                self._server._check_open()
                await self._server._serves(lambda version: (version.number, version.digest) != (number, digest), now() + LONG_POLL)
                version, since = self._server.current, self._server._serving_since
            except ServingError as error:
                return {"refused": str(error)}
            if (version.number, version.digest) == (number, digest):
                return {}
            zeros = self._zeros = self._zeros or zeros_of(version.state)
            base = next((each for each in self._server.versions if (each.number, each.digest) == (number, digest)), None)
            payload = await self._payload(base or zeros, version)
            answer = _Answer(version.number, version.digest, zeros.digest, since, base is None, len(payload), next(self._numbers))
        end = max(0, offset) + max(1, min(most, part_bytes(current_worker())))
        self._transfers = {each: kept for each, kept in self._transfers.items() if now() - kept[2] < FORGET}
        if end < len(payload):
            self._transfers[answer.transfer] = answer, payload, now()
        return {**answer._asdict(), "part": make(np.frombuffer(payload, np.uint8)[max(0, offset) : end])}

    async def _payload(self, base: Version, target: Version) -> bytes:
        """The delta between two versions, encoded once on the executor for all followers."""
        key = (base.digest, target.number, target.digest)
        task = self._payloads.get(key)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            encoding = current_engine().offload(lambda: encode_delta(base, target))
            task = self._payloads[key] = current_worker()._core.spawn(encoding, "delta")  # which cancels it when it closes
            while len(self._payloads) > PAYLOADS:
                self._payloads.popitem(last=False)
        self._payloads.move_to_end(key)
        return await asyncio.shield(task)


def lead(service: Service, server: Server) -> None:
    """Let followers on other workers follow a server.

    Args:
        service: of the worker on which the followers call.
        server: the leader.

    Raises:
        ArgumentError, ArgumentTypeError: no service and server, or the service has a leader already.

    >>> service = dist.Service()
    >>> ag.serving.lead(service, ag.serving.Server(ag.nn.Linear(2, 1)))
    >>> service
    <Service: serving.follow>
    """
    if not isinstance(service, Service) or not isinstance(server, Server):
        raise ArgumentTypeError(f"lead: expected a dist.Service and a Server, found {type(service).__name__} and {type(server).__name__}")
    if FUNCTION in service.names:
        raise ArgumentError(f"lead: {FUNCTION!r} is exposed by this service already; use a service and a worker for each leader")
    service.function(FUNCTION)(Leader(server).follow)


class Follower(Server):
    """A server of the versions of a leader on another worker. Without the leader it serves its last version, and `connected` is False.

    Entering waits for the first version. `publish`, `promote` and `rollback` raise `ServingError`: they are the leader's.

    Args:
        worker: this process's worker.
        leader: name of the leader's worker.
        model: a module of the same parameters and buffers as the leader's; its own values are not used.
        options: as of `Server`, but `log`.

    Attributes:
        connected: True while the last request to the leader succeeded.
        error: the exception of the last failed request, None while `connected`.
        bytes_received: bytes of all payloads.
        behind: of the last 1,000 versions but the first, the seconds from serving on the leader to serving here, by the clocks of both hosts.

    Raises:
        ArgumentError, ArgumentTypeError: settings that cannot be. On entry: ArgumentError, the leader serves another model. AuthenticationError: the
            worker has another secret than the leader's.

    >>> service, server = dist.Service(), ag.serving.Server(ag.nn.Linear(2, 1))
    >>> ag.serving.lead(service, server)
    >>> async with server, dist.Worker("leader", service=service) as leader, dist.Worker("left", peers={"leader": leader.url}) as left:
    ...     async with ag.serving.Follower(left, "leader", ag.nn.Linear(2, 1)) as follower:
    ...         answer = await follower.predict(ag.ones(3, 2))
    >>> answer.version, answer.digest == server.current.digest
    (1, True)
    """

    def __init__(self, worker: Worker, leader: str, model: Module, **options: Any) -> None:
        if not isinstance(worker, Worker) or not isinstance(leader, str):
            raise ArgumentTypeError(f"Follower: expected a Worker and the name of the leader's, found {type(worker).__name__} and {leader!r}")
        if options.get("log") is not None:
            raise ArgumentError("Follower(log=): the leader keeps the log; expected no folder")
        super().__init__(model, **options)
        self.worker: Worker = worker
        self.leader: str = leader
        self.connected: bool = False
        self.error: Exception | None = None
        self.bytes_received: int = 0
        self.behind: deque[float] = deque(maxlen=DELAYS)
        self._zeros = zeros_of(model.state_dict())
        self._task: asyncio.Task[None] | None = None

    async def reach(self, number: int, timeout: float | None = None) -> None:
        """Wait until a version of at least this number serves. Cancelling stops the waiting.

        Args:
            number: of the version.
            timeout: seconds; None for no limit.

        Raises:
            ArgumentError, ArgumentTypeError: no number of a version, or no seconds. DeadlineError: it does not serve in time. ServingError: the
            follower is closed.

        >>> await follower.reach((await server.publish()).number, timeout=5.0)
        >>> follower.current.number
        2
        """
        self._check_open()
        seconds = checked_timeout("reach", timeout)
        await self._reached(checked_number("reach", number), None if seconds is None else asyncio.get_running_loop().time() + seconds)

    async def publish(self, state: Any = None, *, metrics: Any = None, promote: bool = True) -> Version:
        raise self._refused("publish")

    def promote(self, number: int) -> Version:
        raise self._refused("promote")

    def rollback(self, number: int | None = None) -> Version:
        raise self._refused("rollback")

    def _require_own_versions(self, what: str) -> None:
        raise self._refused(what)

    def _refused(self, method: str) -> ServingError:
        return ServingError(f"{method}: a follower serves what its leader serves; call it on the server of worker {self.leader!r}")

    async def _begin(self) -> None:
        first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.get_running_loop().create_task(self._follow(first), name="aiograd:follower")
        try:
            await first
        except BaseException:
            await self._end()
            raise

    async def aclose(self) -> None:
        try:
            await self._end()
        finally:
            await super().aclose()

    async def _end(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _follow(self, first: asyncio.Future[None]) -> None:
        """Ask the leader for the next version, for ever."""
        pause, has_base, refusals = RETRY, True, 0
        while True:
            try:
                await self._ask(has_base)
            except Exception as error:
                refusals = refusals + 1 if isinstance(error, AuthenticationError) else 0
                if not first.done() and (isinstance(error, ArgumentError) or refusals == MOST_REFUSALS):
                    first.set_exception(error)
                    return
                if self.connected or self.error is None:
                    so = " and serves its last version" if self._serving else ", so it has no version yet"
                    logger.warning("%r is without its leader %r%s: %s", self, self.leader, so, error)
                self.connected, self.error = False, error
                has_base = has_base and not isinstance(error, DeltaError)
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_RETRY)
            else:
                self.connected, self.error, pause, has_base = True, None, RETRY, True
                if not first.done() and self._serving:
                    first.set_result(None)

    async def _ask(self, has_base: bool) -> None:
        """Make one request, and serve the version that answers it; without `has_base` ask for a whole state."""
        base = self.current if self._serving and has_base else None
        known = (0, "") if base is None else (base.number, base.digest)
        found = await self._call(*known, 0, 0)
        if found is None:
            return
        answer, part = found
        if answer.model != self._zeros.digest:
            own = f"{type(self.model).__name__}: its paths, shapes, dtypes, or the order of its paths differ; compare both `state_dict()`"
            raise ArgumentError(f"the leader {self.leader!r} serves another model than {own}")
        if answer.size > 2 * self._zeros.nbytes + _SURPLUS:
            raise DeltaError(f"version {answer.number} from {self.leader!r}: {answer.size} bytes for a model of {self._zeros.nbytes}")
        payload = bytearray(part.data)
        while len(payload) < answer.size and part.size:
            more = await self._call(*known, answer.transfer, len(payload))
            if more is None or more[0] != answer:
                raise DeltaError(f"a part of version {answer.number} from {self.leader!r} does not fit the parts before it")
            part = more[1]
            payload += part.data
        start = self._zeros if base is None or answer.is_whole else base
        version: Version = await current_engine().offload(lambda: apply_delta(start, bytes(payload)))
        if (version.number, version.digest) != (answer.number, answer.digest):
            raise DeltaError(f"version {answer.number} was announced by {self.leader!r}, and version {version.number} came")
        is_first = self._serving is None
        self._adopt(version)
        if not is_first:
            self.behind.append(max(0.0, time.time() - answer.since))

    async def _call(self, *args: Any) -> tuple[_Answer, Array] | None:
        """The answer of the leader, and its part of the payload; None: nothing has changed."""
        seconds = min(FORGET, self.worker.limits.max_deadline)
        found: Any = await self.worker.call_apart(self.leader, FUNCTION, *args, part_bytes(self.worker), timeout=seconds)
        if found == {}:
            return None
        if isinstance(found, dict) and isinstance(found.get("refused"), str):
            raise ServingError(f"the leader {self.leader!r} has no version: {found['refused']}")
        part = found.pop("part", None) if isinstance(found, dict) else None
        if not isinstance(part, TensorCore) or part.dtype != np.uint8 or part.ndim != 1 or {key: type(found[key]) for key in found} != _TYPES:
            raise DistributedError(f"worker {self.leader!r} answered {FUNCTION} with other fields than {', '.join(_TYPES)}, part")
        self.bytes_received += part.size
        return _Answer(**found), host_array(part)

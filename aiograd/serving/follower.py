"""Followers: servers in other processes that serve a leader's versions, to the bit.

Note [One request in flight]
    A follower asks with the number and digest of its version and is answered when the leader serves another one: by a delta where the leader still
    has the follower's version, else by the whole state, which is a delta from zeros. So a slow follower skips versions and no queue grows, a
    rollback travels as any other version, and connecting again is the next request. A leader that was restarted with other weights under the
    same number has another digest. The follower applies a delta out of place, compares the digest, then swaps one reference. Payloads that do
    not fit into a message follow in parts.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from aiograd.distributed.service import Service
from aiograd.distributed.worker import Worker
from aiograd.engine.run import current_engine
from aiograd.errors import AiogradError, ArgumentError, DeltaError, DistributedError, ServingError
from aiograd.nn.module import Module
from aiograd.serving.delta import apply_delta, encode_delta
from aiograd.serving.server import Server
from aiograd.serving.versions import Version
from aiograd.tensors.core import TensorCore, host_array, make

#: name of the function that a leader exposes
FUNCTION = "serving.follow"
#: seconds after which a leader answers that nothing has changed
LONG_POLL = 10.0
#: bytes of a payload in one message
PART = 1 << 20
#: payloads that a leader keeps for followers that ask for the same one
PAYLOADS = 4
#: seconds between two attempts to reach the leader: the first, and the longest
RETRY, LONGEST_RETRY = 0.05, 1.0
#: delays that a follower keeps
DELAYS = 1000


def zeros_of(state: Mapping[str, Any]) -> Version:
    """The version from which a whole state is a delta: zeros of the same shapes and dtypes."""
    return Version.of(0, {path: np.zeros(array.shape, array.dtype) for path, array in state.items()}, digest="", is_finite=True)


class Leader:
    """Answers followers; see Note [One request in flight].

    Args:
        server: the server that is followed.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        #: by numbers and digests of base and target: the payload, or the task that encodes it
        self._payloads: OrderedDict[tuple[str, str], asyncio.Task[bytes]] = OrderedDict()
        self._zeros: Version | None = None

    async def follow(self, number: int, digest: str, target: int, target_digest: str, offset: int) -> dict[str, Any]:
        """Answer a follower when another version serves than its own, or `LONG_POLL` has passed.

        Args:
            number, digest: of the follower's version; 0 and "" without one.
            target, target_digest: of the version of which a part is asked for; 0 and "" for the first part of whichever serves.
            offset: of the part in the payload.

        Returns:
            ``number`` and ``digest`` of the version, ``created``, ``size`` of the payload in bytes, ``is_whole`` if it is a delta from zeros, and
            ``part``, a Tensor of uint8. Without ``part``: nothing has changed.
        """
        if not target:
            await self._server.changed(number, digest, LONG_POLL)
            version = self._server.current
            if (version.number, version.digest) == (number, digest):
                return {"number": number}
        else:
            version = self._server.version(target)
            if version.digest != target_digest:
                raise ServingError(f"follow: version {target} is another one now; ask again from the start")
        base = next((each for each in self._server.versions if (each.number, each.digest) == (number, digest)), None)
        payload = await self._payload(base, version)
        part = np.frombuffer(payload, np.uint8)[offset : offset + PART]
        return {
            "number": version.number,
            "digest": version.digest,
            "created": version.created,
            "size": len(payload),
            "is_whole": base is None,
            "part": make(part),
        }

    async def _payload(self, base: Version | None, target: Version) -> bytes:
        """The delta between two versions, encoded once on the executor for all followers."""
        key = ("" if base is None else base.digest, f"{target.number} {target.digest}")
        task = self._payloads.get(key)
        if task is None:
            if base is None:
                base = self._zeros = self._zeros or zeros_of(target.state)
            task = self._payloads[key] = asyncio.get_running_loop().create_task(_encoded(base, target), name="aiograd:delta")
            while len(self._payloads) > PAYLOADS:
                self._payloads.popitem(last=False)
        self._payloads.move_to_end(key)
        return await asyncio.shield(task)


async def _encoded(base: Version, target: Version) -> bytes:
    return await current_engine().offload(lambda: encode_delta(base, target))  # type: ignore[no-any-return]


def lead(service: Service, server: Server) -> None:
    """Let followers on other workers follow a server.

    Args:
        service: of the worker on which the followers call.
        server: the leader.

    Raises:
        ArgumentError: the service has a leader already.

    >>> service = dist.Service()
    >>> ag.serving.lead(service, ag.serving.Server(ag.nn.Linear(2, 1)))
    >>> service
    <Service: serving.follow>
    """
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
        behind: seconds from publishing to serving of the last 1,000 versions, by the clocks of both hosts.
    """

    def __init__(self, worker: Worker, leader: str, model: Module, **options: Any) -> None:
        if options.get("log") is not None:
            raise ArgumentError("Follower(log=): the leader keeps the log; expected no folder")
        super().__init__(model, **options)
        self.worker = worker
        self.leader = leader
        self.connected = False
        self.error: Exception | None = None
        self.bytes_received = 0
        self.behind: deque[float] = deque(maxlen=DELAYS)
        self._zeros = zeros_of({path: host_array(tensor) for path, tensor in model.state_dict().items()})
        self._task: asyncio.Task[None] | None = None

    async def reach(self, number: int, timeout: float | None = None) -> None:
        """Wait until a version of at least this number serves.

        Args:
            number: of the version.
            timeout: seconds; None for no limit.

        Raises:
            DeadlineError: it does not serve in time.
        """
        await self._publisher.reached(number, None if timeout is None else asyncio.get_running_loop().time() + timeout)

    async def publish(self, state: Any = None, *, metrics: Any = None, promote: bool = True) -> Version:
        """Raise ServingError: versions come from the leader."""
        raise self._refused("publish")

    def promote(self, number: int) -> Version:
        """Raise ServingError: versions come from the leader."""
        raise self._refused("promote")

    def rollback(self, number: int | None = None) -> Version:
        """Raise ServingError: versions come from the leader."""
        raise self._refused("rollback")

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
        """As `Server.aclose`; stops following."""
        await self._end()
        await super().aclose()

    async def _end(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _follow(self, first: asyncio.Future[None]) -> None:
        """Ask the leader for the next version, for ever."""
        pause = RETRY
        has_base = True
        while True:
            try:
                has_base = await self._ask(has_base)
            except ArgumentError as error:  # the leader serves another model
                self.connected, self.error = False, error
                if not first.done():
                    first.set_exception(error)
                    return
            except (AiogradError, OSError) as error:
                self.connected, self.error = False, error
                has_base = has_base and not isinstance(error, DeltaError)
            else:
                self.connected, self.error, pause = True, None, RETRY
                if self._publisher.serving is not None and not first.done():
                    first.set_result(None)
                continue
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_RETRY)

    async def _ask(self, has_base: bool) -> bool:
        """One request, and the version that answers it; returns True: the next delta may start from the version that serves."""
        base = self.current if self._publisher.serving is not None and has_base else None
        known = (base.number, base.digest) if base is not None else (0, "")
        answer = await self._call(*known, 0, "", 0)
        if "part" not in answer:
            return True
        number, digest, size, is_whole = (answer[name] for name in ("number", "digest", "size", "is_whole"))
        parts = [answer["part"]]
        received = parts[0].shape[0]
        while received < size:
            more = await self._call(*known, number, digest, received)
            if (more["digest"], more["size"], more["is_whole"]) != (digest, size, is_whole) or not more["part"].shape[0]:
                raise DeltaError(f"a part of version {number} from {self.leader!r} does not fit the parts before it")
            parts.append(more["part"])
            received += more["part"].shape[0]
        self.bytes_received += received
        payload = b"".join(host_array(part).tobytes() for part in parts)
        start = self._zeros if is_whole or base is None else base
        version = await current_engine().offload(lambda: apply_delta(start, payload))
        self._publisher.adopt(version)
        self.behind.append(max(0.0, time.time() - version.created))
        return True

    async def _call(self, *args: Any) -> dict[str, Any]:
        answer: dict[str, Any] = await self.worker.call_apart(self.leader, FUNCTION, *args, timeout=3 * LONG_POLL)
        expected = {"number": int, "digest": str, "created": float, "size": int, "is_whole": bool, "part": TensorCore}
        is_right = isinstance(answer, dict) and all(isinstance(value, expected.get(name, ())) for name, value in answer.items())
        if not is_right or ("part" in answer and (answer.keys() != expected.keys() or answer["part"].dtype != np.uint8 or answer["part"].ndim != 1)):
            raise DistributedError(f"worker {self.leader!r} answered {FUNCTION} with other fields than {', '.join(expected)}")
        return answer

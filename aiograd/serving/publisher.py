"""Publisher: the versions of a server, the reference to the one that serves, and the log that keeps them.

Note [One reference]
    The version that serves is one reference. A batch takes it once and keeps it over every await of the forward; `publish`, `promote` and
    `rollback` replace it in one synchronous section. So no answer mixes two versions, no reader waits for a publication, and an array is freed by
    reference count when the last version and the last batch that use it are gone.

Note [Durable]
    Versions are published one after the other. With a log, a version is durable before it serves and before `publish` returns; `promote` and
    `rollback` serve at once, and the log names their version as soon as it is written. A write is never interrupted: a publication that is
    cancelled while it is written is completed, and the cancellation is raised afterwards.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from aiograd.engine.run import current_engine
from aiograd.errors import ArgumentError, DeadlineError, RejectedVersionError, ServingError, VersionLogError
from aiograd.nn.module import Module
from aiograd.running import tracing
from aiograd.running.caller import warn_caller
from aiograd.running.digest import state_digest
from aiograd.serving.copying import copy_of_state
from aiograd.serving.forward import BoundVersion
from aiograd.serving.log import VersionLog
from aiograd.serving.shadow import Shadow
from aiograd.serving.versions import Precision, Version, VersionSplit, VersionStore, check_fits
from aiograd.tensors.core import host_array


class ChosenBySplit(NamedTuple):
    """The group of requests that a split gives to a version; a rollback ends the split and gives them to the version that serves."""

    bound: BoundVersion


class Publisher:
    """The versions of one model.

    Args:
        model: the module to publish.
        keep, precision, log: see `Server`.
    """

    def __init__(self, model: Module, keep: int, precision: Precision, log: VersionLog | None) -> None:
        self.model = model
        self.precision = precision
        self.log = log
        self.store = VersionStore(keep)
        self.split: VersionSplit | None = None
        #: the version that serves; None before the first
        self.serving: BoundVersion | None = None
        #: seconds since the epoch at which it began to serve
        self.serving_since = 0.0
        self.published = self.promoted = self.rollbacks = 0
        #: the failure of the last promotion that was written to the log
        self.log_error: Exception | None = None
        self._bound: dict[int, BoundVersion] = {}
        self._publishing = asyncio.Lock()
        #: futures that resolve when another version serves
        self._changes: set[asyncio.Future[None]] = set()
        self._log_task: asyncio.Task[None] | None = None
        self._log_is_open = self._is_closed = False

    async def begin(self) -> None:
        """Take the first version from the log, or publish the model."""
        if not self.model.state_dict():
            raise ArgumentError(f"Server: {type(self.model).__name__} has no parameters and no buffers, so it has no versions")
        last = None
        if self.log is not None:
            last = await _uninterrupted(self._open(self.log))
        if last is None:
            await self.publish(None, None, promote=True)
            return
        try:
            self.adopt(last)
        except ArgumentError as error:
            raise VersionLogError(f"{self.log!r} belongs to another model than {type(self.model).__name__}: {error}") from error
        self.load_model(last)

    async def _open(self, log: VersionLog) -> Version | None:
        last = await current_engine().offload(log.open)
        self._log_is_open = True
        self.store.skip(await current_engine().offload(lambda: log.highest))
        return last  # type: ignore[no-any-return]

    async def aclose(self) -> None:
        """Fail the requests that wait for a version, and close the log when it is written, also if this is cancelled."""
        await _uninterrupted(self._aclose())

    async def _aclose(self) -> None:
        self._is_closed = True
        for future in self._changes:
            if not future.done():
                future.set_exception(ServingError("the server has been closed"))
        if self.log_error is not None:
            self._log_promotion()
        if self._log_task is not None:
            await asyncio.wait([self._log_task])
        async with self._publishing:
            if self.log is not None and self._log_is_open:
                self._log_is_open = False
                self.log.close()

    # ---------------------------------------------------------------- reading

    def bound_now(self) -> BoundVersion:
        """The version that serves now."""
        if self.serving is None:
            raise ServingError("this Server has no version yet: use `async with`")
        return self.serving

    def bind(self, version: Version) -> BoundVersion:
        """A version of the store with its Tensors."""
        bound = self._bound.get(version.number)
        if bound is None or bound.version is not version:
            bound = self._bound[version.number] = BoundVersion(version)
        return bound

    def group_of(self, number: int | None, key: Any) -> BoundVersion | ChosenBySplit | None:
        """The version that a request asks for, or the choice of the split; None for the version that serves when its batch begins."""
        if number is not None:
            return self.bind(self.store.get(number))
        return None if self.split is None else ChosenBySplit(self.bind(self.store.get(self.split.choose(key))))

    def bound_of(self, group: BoundVersion | ChosenBySplit | None) -> BoundVersion:
        """The version that a group of requests is answered by now."""
        if group is None:
            return self.bound_now()
        return group.bound if isinstance(group, ChosenBySplit) else group

    async def reached(self, number: int, until: float | None) -> None:
        """Wait until a version of at least this number serves.

        Args:
            number: of the version.
            until: time of the loop; None for no limit.

        Raises:
            DeadlineError: none does in time.
        """
        while self.bound_now().version.number < number:
            if not await self.change(until):
                raise DeadlineError(f"version {number} or a later one does not serve in time; version {self.bound_now().version.number} does")

    async def change(self, until: float | None) -> bool:
        """Wait until another version serves; returns False if the time `until` of the loop came first."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self._changes.add(future)
        timer = None if until is None else loop.call_at(until, future.cancel)
        try:
            await asyncio.wait([future])
            return not future.cancelled() and future.result() is None
        finally:
            self._changes.discard(future)
            future.cancel()
            if timer is not None:
                timer.cancel()

    def states(self, shadow: Shadow | None) -> dict[int, str]:
        """The state of each kept version by its number, see `ServingStatistics`."""
        current, shares = self.bound_now().version.number, self.split.shares if self.split else {}
        found: dict[int, str] = {}
        for number in (version.number for version in self.store.versions):
            parts = ["serves"] if number == current else ["candidate"] if number in self.store.candidates else []
            if number in shares:
                parts.append(f"split {100 * shares[number]:.3g} %")
            if shadow is not None and shadow.bound.version.number == number:
                parts.append(f"shadow {100 * shadow.share:.3g} %")
            found[number] = ", ".join(parts) or "kept"
        return found

    # ---------------------------------------------------------------- changing

    async def publish(self, state: Mapping[str, Any] | None, metrics: Mapping[str, float] | None, promote: bool) -> Version:
        """Make a version, see `Server.publish`."""
        async with self._publishing:
            with tracing.span("publish"):
                return await self._publish(state, metrics, promote)

    async def _publish(self, state: Mapping[str, Any] | None, metrics: Mapping[str, float] | None, promote: bool) -> Version:
        base = None if self.serving is None else self.serving.version
        arrays, digest, is_finite = await copy_of_state(self.model, state, base, self.precision)
        if promote and not is_finite:
            raise RejectedVersionError("publish: the state is not finite, so it may not serve; publish it with promote=False to look at it")
        parent = None if base is None else base.number
        number, now = self.store.next_number, time.time()
        version = Version.of(number, arrays, digest=digest, parent=parent, metrics=metrics, created=now, is_finite=is_finite)
        if self._is_closed:
            raise ServingError("publish: the server has been closed")
        if self.log is None:
            self._admit(version, promote)
        else:
            await _uninterrupted(self._write(self.log, version, promote))
        return version

    async def _write(self, log: VersionLog, version: Version, promote: bool) -> None:
        pinned = {*self.store.pinned, *(() if self.serving is None else (self.serving.version.number,))}
        await current_engine().offload(lambda: log.append(version, promote=promote, pinned=pinned))
        self._admit(version, promote)
        if self.log_error is not None:
            self._log_promotion()

    def _admit(self, version: Version, promote: bool) -> None:
        self.store.admit(version, promote=promote)
        self.published += 1
        if promote:
            self.promoted += 1
            self._serve()

    def adopt(self, version: Version) -> None:
        """Serve a version that was made elsewhere, under its own number.

        Raises:
            ArgumentError: it is of another model.
        """
        state = check_fits(version.state, {path: host_array(tensor) for path, tensor in self.model.state_dict().items()})
        if list(state) != list(version.state):  # the digest covers the order
            version = replace(version, state=MappingProxyType(state), digest=state_digest(state))
        self.store.adopt(version)
        self._serve()

    def promote(self, number: int) -> Version:
        """Let a version serve, see `Server.promote`."""
        version = self.store.promote(number)
        self.promoted += 1
        self._serve()
        self._log_promotion()
        return version

    def rollback(self, number: int | None) -> Version:
        """Let an earlier version serve again, see `Server.rollback`."""
        version = self.store.rollback(number)
        self.rollbacks += 1
        self.split = None
        self._serve()
        self._log_promotion()
        return version

    def load_model(self, version: Version) -> None:
        """Write a version's arrays into the model, in place."""
        self.model.load_state_dict(version.state)

    def retain(self, pinned: Iterable[int]) -> None:
        """Keep these versions, those in the split and the last ones, and the one that serves."""
        self.store.pinned = {*pinned, *(self.split.shares if self.split else ())}
        self._unbind()

    def _serve(self) -> None:
        """Let the store's current version serve: one reference."""
        self.serving, self.serving_since = self.bind(self.store.current), time.time()
        self._unbind()
        for future in self._changes:
            if not future.done():
                future.set_result(None)

    def _unbind(self) -> None:
        for number in self._bound.keys() - {version.number for version in self.store.versions}:
            del self._bound[number]

    def _log_promotion(self) -> None:
        """Have the log name the version that serves, without waiting."""
        if self.log is not None and (self._log_task is None or self._log_task.done()):
            self._log_task = asyncio.get_running_loop().create_task(self._write_promotions(self.log), name="aiograd:version-log")

    async def _write_promotions(self, log: VersionLog) -> None:
        written = None
        while written != self.bound_now().version.number:
            async with self._publishing:
                number = written = self.bound_now().version.number
                try:
                    await current_engine().offload(lambda number=number: log.promote(number))  # type: ignore[misc]
                    self.log_error = None
                except (VersionLogError, LookupError) as error:
                    self.log_error = error
                    warn_caller(f"version {number} serves, but after a restart an earlier one would: {error}")


async def _uninterrupted(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine; if this is cancelled meanwhile, the cancellation is raised when the coroutine has ended."""
    task = asyncio.get_running_loop().create_task(coroutine, name="aiograd:version-log")
    is_cancelled = False
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            is_cancelled = True
    if is_cancelled:
        if not task.cancelled():
            task.exception()
        raise asyncio.CancelledError
    return task.result()

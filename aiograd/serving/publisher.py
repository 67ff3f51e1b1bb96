"""Publisher: the part of a server that publishes versions, lets them serve and takes them back, and keeps them in a log.

Note [One reference]
    The version that serves is one reference. A batch takes it once and keeps it over every await of the forward; `publish`, `promote` and
    `rollback` replace it in one synchronous section. So no answer mixes two versions, no reader waits for a publication, and an array is freed by
    reference count when the last version and the last batch that use it are gone.

Note [Durable]
    Versions are published one after the other. With a log, a version is durable before it serves and before `publish` returns; `promote` and
    `rollback` serve at once, and the log names their version as soon as it is written, with its file where a publication has deleted that
    meanwhile. A write is never interrupted: a publication that is cancelled while it is written is completed, and the cancellation is raised
    afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from aiograd.engine.run import current_engine
from aiograd.errors import ArgumentError, DeadlineError, LoopError, RejectedVersionError, ServingError, VersionLogError
from aiograd.nn.module import Module
from aiograd.running import tracing
from aiograd.running.caller import warn_caller
from aiograd.running.digest import state_digest
from aiograd.serving.arguments import checked_real
from aiograd.serving.batcher import Batcher
from aiograd.serving.copying import copy_of_state
from aiograd.serving.forward import BoundVersion, VersionedForward
from aiograd.serving.log import VersionLog
from aiograd.serving.shadow import DifferenceSum, Shadow
from aiograd.serving.versions import Precision, Version, VersionSplit, VersionStore, check_fits
from aiograd.tensors.core import host_array


class ChosenBySplit(NamedTuple):
    """The group of requests that a split gives to a version; a rollback ends the split and gives them to the version that serves."""

    bound: BoundVersion


class Publisher:
    """The versions of a server, see `Server`."""

    _batcher: Batcher
    _forward: VersionedForward

    def __init__(self, model: Module, keep: int, precision: Precision, log: VersionLog | None) -> None:
        self.model = model
        self._precision = precision
        self._log = log
        self._store = VersionStore(keep)
        self._state = "new"
        #: the event loop in which it was entered
        self._loop: asyncio.AbstractEventLoop | None = None
        #: the version that serves; None before the first
        self._serving: BoundVersion | None = None
        #: seconds since the epoch at which it began to serve
        self._serving_since = 0.0
        self._split: VersionSplit | None = None
        self._shadow: Shadow | None = None
        self._difference_sums: dict[int, DifferenceSum] = {}
        self._pinned: tuple[int, ...] = ()
        #: the Trainer that trains the model, or trained it last
        self._trainer: Any = None
        self._published = self._promoted = self._rollbacks = 0
        #: the failure of the last promotion that was written to the log
        self._log_error: Exception | None = None
        self._bound: dict[Version, BoundVersion] = {}
        self._publishing = asyncio.Lock()
        #: set for a moment when another version serves, or none will
        self._change = asyncio.Event()
        self._log_task: asyncio.Task[None] | None = None
        self._log_is_open = False

    def _check_open(self) -> None:
        if self._state != "open":
            before = "before it is entered: use `async with`" if self._state in ("new", "entering") else "after it was closed"
            raise ServingError(f"this Server cannot be used {before}")
        self._check_loop()

    def _check_loop(self) -> None:
        """Raise `LoopError` on another event loop than the server's, and in another thread while that runs."""
        own = self._loop
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            loop = None
        if own is not None and loop is not own and (loop is not None or own.is_running()):
            raise LoopError(
                f"{self!r} belongs to the event loop in which it was entered, and cannot be used from another loop or thread: use there "
                "asyncio.run_coroutine_threadsafe(server.predict(rows), loop), loop.call_soon_threadsafe(server.rollback), or a Server for each loop"
            )

    def _require_own_versions(self, what: str) -> None:
        """Raise `ServingError` where the versions are another server's."""

    # ---------------------------------------------------------------- entering and leaving

    async def _begin(self) -> None:
        """Take the first version from the log, or publish the model."""
        if not self.model.state_dict():
            raise ArgumentError(f"Server: {type(self.model).__name__} has no parameters and no buffers, so it has no versions")
        last = None if self._log is None else await uninterrupted(self._open(self._log))
        if last is None:
            await self._publish(None, None, lambda: True)
            return
        try:
            self._adopt(last)
        except ArgumentError as error:
            raise VersionLogError(f"{self._log!r} belongs to another model than {type(self.model).__name__}: {error}") from error
        self.model.load_state_dict(last.state)

    async def _open(self, log: VersionLog) -> Version | None:
        last, highest = await current_engine().offload(log._open)
        self._log_is_open = True
        self._store.skip(highest)
        return last  # type: ignore[no-any-return]

    async def _close_versions(self) -> None:
        """Fail the requests that wait for a version, and close the log when it is written; runs `uninterrupted`."""
        self._tell_change()
        if self._log_error is not None:
            self._log_promotion()
        if self._log_task is not None:
            await asyncio.wait([self._log_task])
        async with self._publishing:
            if self._log is not None and self._log_is_open:
                self._log_is_open = False
                self._log._close()

    # ---------------------------------------------------------------- reading

    @property
    def current(self) -> Version:
        """The version that serves."""
        return self._bound_of(None).version

    @property
    def versions(self) -> tuple[Version, ...]:
        """The versions that are kept, by number."""
        return self._store.versions

    def version(self, number: int) -> Version:
        """The version of a number.

        Args:
            number: of a version that is kept.

        Returns:
            The version.

        Raises:
            VersionNotFoundError: there is none, or it is not kept any more.
        """
        return self._store.get(number)

    def _bind(self, version: Version) -> BoundVersion:
        """A version of the store with its Tensors."""
        if version not in self._bound:
            self._bound[version] = BoundVersion(version)
        return self._bound[version]

    def _group_of(self, number: int | None, key: Any) -> BoundVersion | ChosenBySplit | None:
        """The version that a request asks for, or the choice of the split; None for the version that serves when its batch begins."""
        if number is not None:
            return self._bind(self.version(number))
        return None if self._split is None else ChosenBySplit(self._bind(self.version(self._split.choose(key))))

    def _bound_of(self, group: BoundVersion | ChosenBySplit | None) -> BoundVersion:
        """The version that a group of requests is answered by now."""
        bound = group.bound if isinstance(group, ChosenBySplit) else group or self._serving
        if bound is None:
            raise ServingError("this Server has no version yet: use `async with`")
        return bound

    async def _reached(self, number: int, until: float | None) -> None:
        """Wait until a version of at least this number serves; raises `DeadlineError` if none does at the time `until` of the loop."""
        if not await self._serves(lambda version: version.number >= number, until):
            raise DeadlineError(f"version {number} or a later one does not serve in time; version {self.current.number} does")

    async def _serves(self, condition: Callable[[Version], bool], until: float | None) -> bool:
        """Wait until a version serves for which `condition` is true; returns False if the time `until` of the loop came first."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                while not condition(self.current):
                    await self._change.wait()
                    if self._state == "closed":
                        raise ServingError("the server has been closed")
                return True
        return False

    def _states(self) -> dict[int, str]:
        """The state of each kept version by its number, see `ServingStatistics`."""
        shares, shadow = self._split.shares if self._split else {}, self._shadow
        found: dict[int, str] = {}
        for number in (version.number for version in self.versions):
            parts = ["serves"] if number == self.current.number else ["candidate"] if number in self._store.candidates else []
            if number in shares:
                parts.append(f"split {100 * shares[number]:.3g} %")
            if shadow is not None and shadow.bound.version.number == number:
                parts.append(f"shadow {100 * shadow.share:.3g} %")
            found[number] = ", ".join(parts) or "kept"
        return found

    # ---------------------------------------------------------------- changing

    async def publish(
        self, state: Mapping[str, Any] | None = None, *, metrics: Mapping[str, float] | None = None, promote: bool = True
    ) -> Version:
        """Make a version of a snapshot, and let it serve.

        Cancelling leaves the versions as they are, or publishes whole.

        Args:
            state: Tensors or arrays by path, as ``state_dict()`` of the model; None for the model's present ones.
            metrics: numbers to keep with the version.
            promote: False for a candidate, which answers only requests that ask for it by number.

        Returns:
            The version.

        Raises:
            ArgumentError: a state of other paths, shapes or dtypes. RejectedVersionError: a state that is not finite, with `promote`.
            VersionLogError: the log could not be written; nothing has changed.

        >>> async with ag.serving.Server(ag.nn.Linear(2, 1)) as server:
        ...     candidate = await server.publish(promote=False)
        ...     server.promote(candidate.number).number
        2
        """
        self._check_open()
        return await self._publish(state, metrics, lambda: promote)

    async def _publish(self, state: Mapping[str, Any] | None, metrics: Mapping[str, float] | None, serves: Callable[[], bool]) -> Version:
        """As `publish`; ``serves()`` at the commit tells a version that serves from a candidate."""
        async with self._publishing:
            with tracing.span("publish"):
                base = None if self._serving is None else self._serving.version
                arrays, digest, is_finite = await copy_of_state(self.model, state, base, self._precision)
                if serves() and not is_finite:
                    raise RejectedVersionError("publish: the state is not finite, so it may not serve; publish it with promote=False to look at it")
                version = Version.of(
                    self._store.next_number, arrays, digest=digest, parent=self.current.number if base else None, metrics=metrics,
                    created=time.time(), is_finite=is_finite,
                )  # fmt: skip
                if self._state == "closed":
                    raise ServingError("publish: the server has been closed")
                if self._log is None:
                    self._admit(version, serves())
                else:
                    await uninterrupted(self._write(self._log, version, serves))
                return version

    async def _write(self, log: VersionLog, version: Version, serves: Callable[[], bool]) -> None:
        pinned = {*self._store.pinned, *((self.current.number,) if self._serving else ())}
        promote = serves()
        await current_engine().offload(lambda: log.append(version, promote=promote, pinned=pinned))
        self._admit(version, serves())
        if self._log_error is not None:
            self._log_promotion()

    def _admit(self, version: Version, promote: bool) -> None:
        self._store.admit(version, promote=promote)
        self._published += 1
        if promote:
            self._promoted += 1
            self._serve()

    def _adopt(self, version: Version) -> None:
        """Serve a version that was made elsewhere, under its own number; raises `ArgumentError` if it is of another model."""
        state = check_fits(version.state, {path: host_array(tensor) for path, tensor in self.model.state_dict().items()})
        if list(state) != list(version.state):  # the digest covers the order
            version = replace(version, state=MappingProxyType(state), digest=state_digest(state))
        self._store.admit(version, promote=True)
        self._serve()

    def promote(self, number: int) -> Version:
        """Let a version serve.

        Args:
            number: of a version that is kept.

        Returns:
            The version.

        Raises:
            VersionNotFoundError: it is not kept. RejectedVersionError: its state is not finite.
        """
        self._check_open()
        version = self._store.promote(number)
        self._promoted += 1
        self._serve()
        self._log_promotion()
        return version

    def rollback(self, number: int | None = None) -> Version:
        """Let an earlier version serve again, and end the split.

        Args:
            number: of the version; None for the one that served before the present one.

        Returns:
            The version that serves now.

        Raises:
            VersionNotFoundError: there is none before, or it is not kept.
        """
        self._check_open()
        version = self._store.rollback(number)
        self._rollbacks += 1
        self._split = None
        self._serve()
        self._log_promotion()
        self._batcher.regroup(lambda group: None if isinstance(group, ChosenBySplit) else group)
        return version

    def split(self, shares: Mapping[int, float]) -> None:
        """Answer shares of the requests by several versions.

        Args:
            shares: share of requests by the number of the version; they add up to 1. An empty mapping ends the split.

        Raises:
            ArgumentError: shares that do not add up. VersionNotFoundError: a version that is not kept. RejectedVersionError: one that is not finite.
        """
        self._check_open()
        split = None if isinstance(shares, Mapping) and not shares else VersionSplit(shares, [version.number for version in self.versions])
        for number in split.shares if split is not None else ():
            if not self.version(number).is_finite:
                raise RejectedVersionError(f"split: version {number} may not serve: its state has NaN or infinity. Give it no share.")
        self._split = split
        self._retain()

    def shadow(self, number: int | None, share: float = 1.0) -> None:
        """Compute a share of the batches also with another version, after their answers have gone out, and compare.

        Figures are in ``statistics().comparisons``. Batches are left out while the shadow is behind.

        Args:
            number: of the version; None ends the comparison.
            share: from 0 to 1.

        Raises:
            VersionNotFoundError: it is not kept. ArgumentError: a share that cannot be.
        """
        self._check_open()
        part = checked_real("shadow(share=)", share, "a number from 0 to 1", most=1.0)
        bound = None if number is None else self._bind(self.version(number))
        if self._shadow is not None:
            self._shadow.stop()
        self._shadow = None
        if bound is not None:
            difference_sum = self._difference_sums.setdefault(bound.version.number, DifferenceSum())
            self._shadow = Shadow(self._forward, bound, part, difference_sum)
        self._retain()

    def _pin(self, *numbers: int) -> None:
        """Keep these versions, and no longer the ones that were pinned before."""
        self._pinned = numbers
        self._retain()

    def _retain(self) -> None:
        """Keep pinned versions and the versions of the split and the shadow, besides the last ones and the one that serves."""
        shadow = () if self._shadow is None else (self._shadow.bound.version.number,)
        self._store.retain({*self._pinned, *shadow, *(self._split.shares if self._split else ())})
        for version in self._bound.keys() - set(self.versions):
            del self._bound[version]

    def _serve(self) -> None:
        """Let the store's current version serve: one reference."""
        self._serving, self._serving_since = self._bind(self._store.current), time.time()
        self._retain()
        self._tell_change()

    def _tell_change(self) -> None:
        """Wake the tasks that wait in `_serves`."""
        self._change.set()
        self._change.clear()

    def _log_promotion(self) -> None:
        """Have the log name the version that serves, without waiting."""
        if self._log is not None and (self._log_task is None or self._log_task.done()):
            self._log_task = asyncio.get_running_loop().create_task(self._write_promotions(self._log), name="aiograd:version-log")

    async def _write_promotions(self, log: VersionLog) -> None:
        written = None
        while written != self.current.number:
            async with self._publishing:
                version, written = self.current, self.current.number
                try:
                    await current_engine().offload(lambda version=version: log._promote(version))  # type: ignore[misc]
                    self._log_error = None
                except VersionLogError as error:
                    self._log_error = error
                    warn_caller(f"version {version.number} serves, but after a restart another one would: {error}")


async def uninterrupted(coroutine: Coroutine[Any, Any, Any]) -> Any:
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

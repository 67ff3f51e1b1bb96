"""ServedVersions: the part of a server that publishes versions, lets them serve and takes them back."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from aiograd.errors import ArgumentError
from aiograd.serving.batcher import Batcher
from aiograd.serving.forward import VersionedForward
from aiograd.serving.publisher import ChosenBySplit, Publisher
from aiograd.serving.shadow import Shadow
from aiograd.serving.statistics import DifferenceSum
from aiograd.serving.versions import Version, VersionSplit


class ServedVersions:
    """The versions of a server, see `Server`."""

    _publisher: Publisher
    _batcher: Batcher
    _forward: VersionedForward
    _shadow: Shadow | None
    _pinned: tuple[int, ...]
    _difference_sums: dict[int, DifferenceSum]

    def _check_open(self) -> None:
        """Raise unless the server is entered and not closed."""
        raise NotImplementedError

    @property
    def has_version(self) -> bool:
        """True once a version serves."""
        return self._publisher.serving is not None

    @property
    def current(self) -> Version:
        """The version that serves."""
        return self._publisher.bound_now().version

    @property
    def versions(self) -> tuple[Version, ...]:
        """The versions that are kept, by number."""
        return self._publisher.store.versions

    def version(self, number: int) -> Version:
        """The version of a number.

        Args:
            number: of a version that is kept.

        Returns:
            The version.

        Raises:
            VersionNotFoundError: there is none, or it is not kept any more.
        """
        return self._publisher.store.get(number)

    @property
    def rollbacks(self) -> int:
        """The number of rollbacks so far."""
        return self._publisher.rollbacks

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
        return await self._publisher.publish(state, metrics, promote)

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
        return self._publisher.promote(number)

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
        version = self._publisher.rollback(number)
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
        publisher = self._publisher
        publisher.split = VersionSplit(shares, [version.number for version in publisher.store.versions]) if shares else None
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
        if not 0.0 <= share <= 1.0:
            raise ArgumentError(f"shadow(share={share!r}): expected a number from 0 to 1")
        bound = None if number is None else self._publisher.bind(self.version(number))
        self._shadow = None
        if bound is not None:
            difference_sum = self._difference_sums.setdefault(bound.version.number, DifferenceSum())
            self._shadow = Shadow(self._forward, bound, float(share), difference_sum)
        self._retain()

    def load_model(self, version: Version) -> None:
        """Write a version's arrays into the model, in place.

        Args:
            version: of this server.
        """
        self._publisher.load_model(version)

    def pin(self, *numbers: int) -> None:
        """Keep these versions, and no longer the ones that were pinned before.

        Args:
            numbers: of versions that are kept.

        Raises:
            VersionNotFoundError: a version that is not kept.
        """
        self._pinned = numbers
        self._retain()

    def _retain(self) -> None:
        self._publisher.retain((*self._pinned, *(() if self._shadow is None else (self._shadow.bound.version.number,))))

    async def changed(self, number: int, digest: str, timeout: float | None = None) -> bool:
        """Wait until another version serves than this one.

        Args:
            number, digest: of a version.
            timeout: seconds; None for no limit.

        Returns:
            True if another version serves, False if the time was up before.

        Cancelling stops the waiting.

        >>> async with ag.serving.Server(ag.nn.Linear(2, 1)) as server:
        ...     await server.changed(0, "")
        True
        """
        self._check_open()
        until = None if timeout is None else asyncio.get_running_loop().time() + timeout
        while (self.current.number, self.current.digest) == (number, digest):
            if not await self._publisher.change(until):
                return False
        return True

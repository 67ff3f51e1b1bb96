"""All links of a simulated network: cuts, clogs, rates and counts."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from random import Random

from aiograd.errors import ArgumentError
from aiograd.testing.network.access import Access, AccessLink, AccessQueue
from aiograd.testing.network.faults import FAULT_KINDS, FaultKind, Faults
from aiograd.testing.network.link import SimulatedLink
from aiograd.testing.network.records import LinkStatistics, Records

#: the faults of frames from one host to another, by name
FaultsOf = Callable[[str, str], Faults]


class Links:
    """The links between all hosts of a network, by name; a link exists as soon as it is spoken of.

    Names of hosts are checked once the network has hosts, so links can be set up before.

    Args:
        seed: decides everything that is drawn.
        faults: the faults of each link for which `set_faults` has set no others, or a function of its source and target.
        access: the line of each host, see `SimulatedNetwork`.

    Raises:
        ArgumentError: another `seed`; `faults` or `access` is neither what it says nor a function, or the function returns something else.
    """

    def __init__(self, seed: int | str, faults: Faults | FaultsOf, access: Access | None = None) -> None:
        if isinstance(seed, bool) or not isinstance(seed, (int, str)):
            raise ArgumentError(f"SimulatedNetwork(seed={seed!r}): expected an int or a text")
        if not callable(faults):
            _check_faults(faults)
        if isinstance(access, Mapping):
            for name, line in access.items():
                _check_line(name, line)
        elif access is not None and not callable(access):
            raise ArgumentError(f"SimulatedNetwork(access={access!r}): expected a mapping of hosts to AccessLink, or a function of a host's name")
        self.seed = seed
        self._faults = faults
        self._access = access.get if isinstance(access, Mapping) else access
        self._queues: dict[str, tuple[AccessQueue | None, AccessQueue | None]] = {}
        self._links: dict[tuple[str, str], SimulatedLink] = {}
        self._clogged: set[str] = set()
        self._when_healed: list[Callable[[], None]] = []
        self._records = Records()
        self._chaos = self.stream("chaos")

    def stream(self, name: str) -> Random:
        """A source of random numbers of its own for one purpose; every call starts the same sequence again."""
        return Random(f"{self.seed}:net:{name}")  # noqa: S311 - reproducible draws, not secrets

    def link(self, source: str, target: str) -> SimulatedLink:
        """One direction between two hosts."""
        link = self._links.get((source, target))
        if link is None:
            faults = self._faults if isinstance(self._faults, Faults) else _check_faults(self._faults(source, target))
            up, down = (None, None) if source == target else (self._lines(source)[0], self._lines(target)[1])
            link = SimulatedLink(source, target, faults, self.stream(f"{source}>{target}"), self._records, self._clogged, up, down)
            self._links[source, target] = link
        return link

    def when_healed(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, when any link heals."""
        self._when_healed.append(callback)

    # ---- what happens to frames

    def set_faults(self, a: str, b: str, faults: Faults, *, both: bool = True) -> None:
        """Set the faults of frames from `a` to `b`, and back if `both`."""
        _check_faults(faults)
        for link in self._between(a, b, both):
            link.faults = faults

    def force(self, a: str, b: str, kind: FaultKind, *, count: int = 1) -> None:
        """Let a fault strike when each of the next `count` frames is sent from `a` to `b`.

        Raises:
            ArgumentError: no such kind, or host.
        """
        if kind not in FAULT_KINDS:
            raise ArgumentError(f"force({kind!r}): expected one of {', '.join(FAULT_KINDS)}")
        for link in self._between(a, b, False):
            link.forced.extend([kind] * count)

    def cut(self, a: str, b: str, *, both: bool = True) -> None:
        """Let nothing pass from `a` to `b`, and back if `both`; no end notices. See Note [A cut] in `aiograd.testing.network.link`."""
        for link in self._between(a, b, both):
            link.cut()

    def heal(self, a: str, b: str) -> None:
        """End the cuts between `a` and `b`, both ways."""
        self._heal(self._between(a, b, True))

    def heal_all(self) -> None:
        """End all cuts and clogs."""
        self._clogged.clear()
        self._heal(self._links.values())

    def calm(self) -> None:
        """End all cuts and clogs, and all faults but latency, from now on."""
        for link in self._links.values():
            link.forced.clear()
            link.faults = Faults(latency=link.faults.latency)
        before = self._faults
        self._faults = Faults(latency=before.latency) if isinstance(before, Faults) else lambda a, b: Faults(latency=before(a, b).latency)
        self.heal_all()

    def partition(self, *groups: Iterable[str]) -> None:
        """Cut every link between hosts of different groups. Hosts in no group keep all their links."""
        for first, second in combinations([list(group) for group in groups], 2):
            for a in first:
                for b in second:
                    self.cut(a, b)

    def clog(self, name: str) -> None:
        """Let nothing pass to or from a host until `unclog`."""
        self._check_host(name)
        self._clogged.add(name)

    def unclog(self, name: str) -> None:
        """End a clog."""
        self._clogged.discard(name)
        self._heal([], resumed=[link for link in self._links.values() if name in (link.source, link.target)])

    async def swizzle_clog(self, names: Sequence[str] | None = None, *, seconds: float = 4.0) -> None:
        """Clog a drawn part of the hosts one after the other, then unclog them in another order. Cancelling it unclogs them.

        Args:
            names: the hosts to draw from; None: all that have a link.
            seconds: how long it takes in all.

        Source: FoundationDB, where it finds more than cuts that come and go at random.
        """
        known = list(dict.fromkeys(source for source, _ in self._links)) if names is None else list(names)
        chosen = self._chaos.sample(known, self._chaos.randint(1, len(known))) if known else []
        pause = seconds / max(1, 2 * len(chosen))
        try:
            for name in chosen:
                self.clog(name)
                await asyncio.sleep(self._chaos.uniform(0, 2 * pause))
            for name in self._chaos.sample(chosen, len(chosen)):
                self.unclog(name)
                await asyncio.sleep(self._chaos.uniform(0, 2 * pause))
        finally:
            for name in chosen:
                self.unclog(name)

    # ---- what happened

    @property
    def coverage(self) -> Counter[tuple[str, int | None]]:
        """How often each fault hit each kind of frame, see Note [Coverage] in `aiograd.testing.network.records`."""
        return self._records.coverage

    @property
    def point_coverage(self) -> Counter[tuple[str, str]]:
        """How often each fault came after each protocol point, once `observe_points` was called."""
        return self._records.point_coverage

    @property
    def trace_hash(self) -> str:
        """Hash of every frame sent, with its virtual time, and of every fault. Equal for equal runs."""
        return self._records.trace_hash

    def statistics(self) -> dict[tuple[str, str], LinkStatistics]:
        """The counts of each link (source, target)."""
        return {names: self._links[names].statistics() for names in sorted(self._links)}

    # ---- helpers

    def _lines(self, name: str) -> tuple[AccessQueue | None, AccessQueue | None]:
        """Both directions of a host's line, up and down; the same for all incarnations of the host."""
        if self._access is None:
            return None, None
        if name not in self._queues:
            line = _check_line(name, self._access(name))
            self._queues[name] = (None, None) if line is None else (AccessQueue(line.up), AccessQueue(line.down))
        return self._queues[name]

    def _now(self) -> float:
        """The time on the loop; 0 before the network is used on one."""
        raise NotImplementedError

    def _check_host(self, name: str) -> None:
        """Raise an ArgumentError if the network has hosts and `name` is none of them."""
        raise NotImplementedError

    def _between(self, a: str, b: str, both: bool) -> list[SimulatedLink]:
        self._check_host(a)
        self._check_host(b)
        return [self.link(a, b), self.link(b, a)] if both else [self.link(a, b)]

    def _heal(self, links: Iterable[SimulatedLink], resumed: Iterable[SimulatedLink] = ()) -> None:
        now = self._now()
        for link in links:
            link.heal(now)
        for link in resumed:
            link.resume(now)
        waiting, self._when_healed = self._when_healed, []
        for callback in waiting:
            callback()


def _check_faults(faults: Faults) -> Faults:
    if not isinstance(faults, Faults):
        raise ArgumentError(f"SimulatedNetwork(faults=): found {faults!r}; expected Faults, or a function of the names of two hosts")
    return faults


def _check_line(name: str, line: AccessLink | None) -> AccessLink | None:
    if line is not None and not isinstance(line, AccessLink):
        raise ArgumentError(f"SimulatedNetwork(access=): the line of host {name!r} is {line!r}; expected an AccessLink, or None for no bound")
    return line

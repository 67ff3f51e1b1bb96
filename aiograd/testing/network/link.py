"""SimulatedLink: one direction between two hosts, which decides what becomes of each frame.

All channels between the two share it: cuts, rates, draws and counts are per link. Each link draws from a stream of its own, so that one
more frame elsewhere changes nothing here.

Note [A cut]
    A cut is not reported, and no channel closes. Frames sent meanwhile are kept, as TCP does by resending, and arrive after
    the link has healed; so users must notice by themselves that nothing comes. The end of a channel is reported when the link has healed.
"""

from __future__ import annotations

from collections import Counter, deque
from random import Random
from typing import Protocol

from aiograd.testing.network.access import PACKET, AccessQueue
from aiograd.testing.network.faults import FaultKind, Faults
from aiograd.testing.network.records import LinkStatistics, Records

#: after a cut has healed, frames that were kept are resent within this many seconds
RESEND = 0.2
#: a packet that was lost is resent after this many seconds or two latencies
RETRANSMISSION = 0.2


class Carrier(Protocol):
    """One direction of a channel."""

    def push(self, frame: bytes, due: float) -> None:
        """Let `frame` arrive at the time `due`, and not before earlier frames."""

    def hold(self, frame: bytes, now: float) -> None:
        """Keep `frame` until the link has healed."""

    def resume(self, due: float) -> None:
        """The link has healed: frames that were held arrive at `due` or later."""

    def break_off(self, now: float) -> None:
        """The connection breaks; a part of the frames on their way still arrives."""

    def stall(self) -> None:
        """The connection goes silent in this direction."""


class SimulatedLink:
    """One direction between two hosts.

    Args:
        source, target: names of the hosts.
        faults: the faults of frames.
        random: where its draws come from.
        records: where it reports to.
        clogged: names of hosts with all links down; shared by the network.
        up: the line of the source in this direction; None: any number of bytes at once.
        down: the line of the target.
    """

    __slots__ = (
        "source", "target", "carriers", "forced", "up", "down", "_faults", "_is_plain", "_latency", "_busy_until", "_cut", "_clogged", "_random",
        "_records", "_label", "_sent", "_bytes", "_delivered", "_hits",
    )  # fmt: skip

    def __init__(
        self, source: str, target: str, faults: Faults, random: Random, records: Records, clogged: set[str],
        up: AccessQueue | None = None, down: AccessQueue | None = None,
    ) -> None:  # fmt: skip
        self.source: str = source
        self.target: str = target
        self.up: AccessQueue | None = up
        self.down: AccessQueue | None = down
        #: the open channels, as an ordered set
        self.carriers: dict[Carrier, None] = {}
        #: the faults forced on the next frames, one each
        self.forced: deque[FaultKind] = deque()
        self._random = random
        self._records = records
        self._label = f"{source}>{target}".encode()
        self._clogged = clogged
        self._cut = False
        self._busy_until = 0.0
        self._sent = self._bytes = self._delivered = 0
        self._hits: Counter[str] = Counter()
        self.faults = faults

    @property
    def faults(self) -> Faults:
        """The faults of this link. Setting it draws the latency of this link anew."""
        return self._faults

    @faults.setter
    def faults(self, faults: Faults) -> None:
        self._faults = faults
        self._is_plain = faults.is_plain
        self._latency = self._random.uniform(*faults.latency) if faults.latency[1] else 0.0

    @property
    def latency(self) -> float:
        """Seconds on the way, jitter left out."""
        return self._latency

    @property
    def is_down(self) -> bool:
        """True if nothing passes."""
        return self._cut or (bool(self._clogged) and (self.source in self._clogged or self.target in self._clogged))

    def cut(self) -> None:
        """Let nothing pass, see Note [A cut]."""
        self._cut = True

    def heal(self, now: float) -> None:
        """End a cut."""
        self._cut = False
        self.resume(now)

    def resume(self, now: float) -> None:
        """Let the frames that were kept arrive, unless the link is still down for another reason."""
        for carrier in list(self.carriers):
            carrier.resume(now + self._latency + self._random.uniform(0, RESEND))

    @property
    def is_shared(self) -> bool:
        """True if frames pass the line of a host, which they share with other connections."""
        return self.up is not None or self.down is not None

    def statistics(self) -> LinkStatistics:
        """The counts so far."""
        return LinkStatistics(self._sent, self._bytes, self._delivered, dict(sorted(self._hits.items())))

    def hit(self, kind: str, frame: bytes | None = None) -> None:
        """Count a fault."""
        self._hits[kind] += 1
        self._records.hit(kind, self.source, frame)

    def delivered(self) -> None:
        """Count a frame that arrived."""
        self._delivered += 1

    def chance(self, rate: float) -> bool:
        """True with probability `rate`."""
        return self._random.random() < rate

    def prefix(self, count: int) -> int:
        """How many of `count` frames that were on their way still arrive."""
        return self._random.randint(0, count)

    def delay(self, size: int, now: float) -> float:
        """How long a frame of `size` bytes takes that is sent now."""
        faults = self._faults
        delay = self._latency
        if faults.jitter:
            delay += self._random.expovariate(1 / faults.jitter)
        if faults.slow is not None:
            self._busy_until = max(now, self._busy_until) + size / faults.slow
            delay += self._busy_until - now
        return delay

    def pause(self, size: int) -> float:
        """How long `size` bytes of a connection wait for packets that are lost and sent again."""
        loss = self._faults.loss
        lost = sum(self.chance(loss) for _ in range(0, size, PACKET)) if loss else 0
        if lost:
            self.hit("loss")
        return lost * max(RETRANSMISSION, 2 * self._latency)

    def carry(self, carrier: Carrier, frame: bytes, now: float) -> None:
        """Decide what becomes of `frame`, which was sent now."""
        self._sent += 1
        self._bytes += len(frame)
        self._records.sent(now, self._label, frame)
        if self.is_down:
            self.hit("cut", frame)
            carrier.hold(frame, now)
        elif self._is_plain and not self.forced:
            carrier.push(frame, now)
        else:
            self._carry(carrier, frame, now)

    def _carry(self, carrier: Carrier, frame: bytes, now: float) -> None:
        faults, forced = self._faults, self.forced.popleft() if self.forced else None
        due = now if self.is_shared else now + self.delay(len(frame), now)
        if faults.slow is not None:
            self.hit("slow", frame)
        if self._strikes(faults.reset, forced == "reset"):
            self.hit("reset", frame)
            carrier.push(frame, due)
            carrier.break_off(now)
            return
        if self._strikes(faults.stall, forced == "stall"):
            self.hit("stall", frame)
            carrier.stall()
        carrier.push(frame, due)

    def _strikes(self, rate: float, forced: bool) -> bool:
        return forced or (rate > 0 and self.chance(rate))

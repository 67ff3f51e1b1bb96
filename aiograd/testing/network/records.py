"""Records of a simulated network: a hash to compare runs by, counts per link, and the messages that each fault has met.

Note [Coverage]
    A random fault may never meet the message it would break. Counting which fault met which message shows such gaps: `coverage` counts
    (fault, kind of frame), `point_coverage` (protocol point, fault), where the point is the last one that the sender of the frame had
    reached, see `aiograd.distributed.failpoints`. The kind is read off frames that are sent in the clear; it is None for encrypted ones,
    and for what happens to a whole host.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

MAGIC = b"AGRD"
KIND_AT = 5
_EVENT = struct.Struct("<dQ")
#: bytes of a frame at either end that go into the hash
HASHED = 256


@dataclass(frozen=True, slots=True)
class LinkStatistics:
    """Counts of one direction between two hosts.

    Attributes:
        sent: frames handed in.
        bytes: their bytes.
        delivered: frames that arrived.
        faults: the number of times that each kind of fault struck.

    >>> ag.testing.LinkStatistics(sent=3, bytes=120, delivered=2, faults={"reset": 1})
    LinkStatistics(sent=3, bytes=120, delivered=2, faults={'reset': 1})
    """

    sent: int
    bytes: int
    delivered: int
    faults: Mapping[str, int] = field(default_factory=dict)


class Records:
    """Where all links of one network report to."""

    def __init__(self) -> None:
        self.coverage: Counter[tuple[str, int | None]] = Counter()
        self.point_coverage: Counter[tuple[str, str]] = Counter()
        self.last_point: dict[str, str] = {}
        self._trace = hashlib.blake2b(digest_size=16)

    @property
    def trace_hash(self) -> str:
        """Hash of every frame sent, with its virtual time, and of every fault."""
        return self._trace.hexdigest()

    def sent(self, now: float, link: bytes, frame: bytes) -> None:
        """A frame was handed in."""
        size = len(frame)
        self._trace.update(link + _EVENT.pack(now, size))
        self._trace.update(frame if size <= 2 * HASHED else frame[:HASHED] + frame[-HASHED:])

    def hit(self, kind: str, source: str, frame: bytes | None) -> None:
        """A fault hit a frame that `source` sent, or the host itself where `frame` is None."""
        self._trace.update(kind.encode())
        self.coverage[kind, None if frame is None else frame_kind(frame)] += 1
        point = self.last_point.get(source)
        if point is not None:
            self.point_coverage[point, kind] += 1


def frame_kind(frame: bytes) -> int | None:
    """The kind of a frame that is not encrypted."""
    return frame[KIND_AT] if len(frame) > KIND_AT and frame.startswith(MAGIC) else None

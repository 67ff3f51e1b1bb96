"""Faults of the connections of a simulated network, and the mix of them that a seed draws.

Note [What can happen to a connection]
    A connection is a stream, as over TCP: a beginning of the bytes that were sent arrives, in order, and each byte once. So nothing is lost,
    doubled, overtaken or altered inside of a connection that stays open. It takes time, for a packet that is lost is sent again and the
    bytes behind it wait; it may be slow, it may break with an unknown part of its bytes delivered (a frame of which a part is missing has not
    arrived), or it may stop without a word and stay open. A frame sent over a broken connection may be sent again over the next one, and
    then arrives twice: that is how messages are repeated.

Note [Swarm testing]
    A run in which every kind of fault happens all the time explores little: a connection that is reset every ten frames never sees the
    hundredth. Each seed therefore draws which kinds it has and how much of each, and some seeds have none.

Source: swarm testing, Groce et al., ISSTA 2012; the simulator of FoundationDB.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, Literal, Self, get_args

from aiograd.errors import ArgumentError

#: faults of a connection that strike when a frame is sent over it, at random or forced
FaultKind = Literal["reset", "stall"]
FAULT_KINDS: tuple[FaultKind, ...] = get_args(FaultKind)

#: part of the seeds that draw no fault at all
CALM = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """The faults of a link. Rates are probabilities per frame that is sent, times are in seconds. See Note [What can happen to a connection].

    Args:
        latency: time on the way: each link draws its own from this range.
        jitter: mean of what each frame takes longer, exponentially distributed; later frames wait for it.
        reset: the connection breaks; of the frames on their way, this one included, the first few still arrive, so that their sender cannot know.
        stall: the connection goes silent: neither this frame nor a later one arrives over it, and no end notices, as with a half-open socket.
        slow: bytes per second that the link carries; None: any number.
        loss: probability per packet of 1,460 bytes that it is lost and sent again; the connection stalls meanwhile, for two latencies and at
            least 0.2 s.

    Raises:
        ArgumentError: a rate outside of 0 to 1, or a negative time.

    >>> ag.testing.Faults(latency=(0.01, 0.05), reset=0.1)
    Faults(latency=(0.01, 0.05), jitter=0.0, reset=0.1, stall=0.0, slow=None, loss=0.0)
    """

    latency: tuple[float, float] = (0.0, 0.0)
    jitter: float = 0.0
    reset: float = 0.0
    stall: float = 0.0
    slow: float | None = None
    loss: float = 0.0

    def __post_init__(self) -> None:
        for kind in (*FAULT_KINDS, "loss"):
            self._check(kind, lambda rate: 0 <= rate <= 1, "a probability, from 0 to 1")
        self._check("latency", lambda times: len(times) == 2 and 0 <= times[0] <= times[1] < math.inf, "a range of seconds, such as (0.001, 0.02)")
        self._check("jitter", lambda time: 0 <= time < math.inf, "seconds, at least 0")
        self._check("slow", lambda rate: rate is None or rate > 0, "bytes per second above 0, or None for no bound")

    def _check(self, name: str, is_right: Callable[[Any], bool], expected: str) -> None:
        try:
            fits = is_right(getattr(self, name))
        except TypeError:  # of a type that has no order, or no length
            fits = False
        if not fits:
            raise ArgumentError(f"Faults({name}={getattr(self, name)!r}): expected {expected}")

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of fault that can happen, latency and jitter left out."""
        return tuple(kind for kind in (*FAULT_KINDS, "slow", "loss") if getattr(self, kind))

    @property
    def is_plain(self) -> bool:
        """True if nothing happens to any frame, not even delay."""
        return not self.kinds and not self.jitter and not self.latency[1]

    def without(self, *kinds: str) -> Self:
        """The same without some kinds, to find out which of them a failure needs.

        Args:
            *kinds: names of the kinds.

        Returns:
            Other faults.

        Raises:
            ArgumentError: no such kind.
        """
        for kind in kinds:
            if kind not in (*FAULT_KINDS, "slow", "loss", "jitter"):
                raise ArgumentError(f"Faults.without({kind!r}): expected one of {', '.join(FAULT_KINDS)}, slow, loss, jitter")
        return dataclasses.replace(self, **{kind: None if kind == "slow" else 0.0 for kind in kinds})  # type: ignore[arg-type]

    @classmethod
    def drawn(cls, random: Random) -> Faults:
        """A random mix: which kinds there are, and how much of each. See Note [Swarm testing].

        Args:
            random: where the numbers come from.

        Returns:
            Other faults with each draw.
        """
        fastest = _log_uniform(random, 1e-4, 1e-2)
        latency = (fastest, fastest * random.uniform(1, 4))
        if random.random() < CALM:
            return cls(latency=latency)
        rates = {"reset": _log_uniform(random, 0.002, 0.15), "stall": _log_uniform(random, 0.001, 0.05)}
        chosen = {kind: rate for kind, rate in rates.items() if random.random() < 0.5}
        return cls(
            latency=latency,
            jitter=_log_uniform(random, 1e-4, 2e-2) if random.random() < 0.5 else 0.0,
            slow=_log_uniform(random, 3e4, 1e7) if random.random() < 0.25 else None,
            **chosen,
        )


def _log_uniform(random: Random, low: float, high: float) -> float:
    return math.exp(random.uniform(math.log(low), math.log(high)))

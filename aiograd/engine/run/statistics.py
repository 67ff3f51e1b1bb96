"""Statistics of an engine, frozen at one moment."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatistics:
    """Counts of an engine's passes since it was made, and the lag of its loop: ``begun == committed + failed + cancelled + in_flight``."""

    #: passes that began
    begun: int
    #: passes whose gradients were delivered; among them those of which a hook or callback failed afterwards
    committed: int
    #: passes that raised, and changed nothing
    failed: int
    #: passes that were cancelled, and changed nothing
    cancelled: int
    #: passes that run or wait for their turn
    in_flight: int
    #: seconds by which the event loop was late, for whatever reason, the last time it was measured beside a pass: a callback that was due
    #: when a pass began to compute had to wait that long
    lag: float
    #: the longest `lag` so far
    longest_lag: float

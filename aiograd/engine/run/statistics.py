"""Statistics of an engine, frozen at one moment."""

from __future__ import annotations

from typing import NamedTuple


class EngineStatistics(NamedTuple):
    """Counts of an engine's passes since it was made, and the lag of its loop: ``begun == committed + failed + cancelled + in_flight``."""

    #: passes that began
    begun: int
    #: passes that were committed, including those with a hook or callback that failed afterwards
    committed: int
    #: passes that raised, and changed nothing
    failed: int
    #: passes that were cancelled, and changed nothing
    cancelled: int
    #: passes that run or wait for their turn
    in_flight: int
    #: seconds by which the event loop was late, for any reason, when it was last measured: the delay of a callback that was due
    #: when a pass began to compute
    lag: float
    #: the longest `lag` so far
    longest_lag: float

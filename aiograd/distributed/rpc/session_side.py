"""SessionSide: the limits of the requests of one side of a session, and the room that they take. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from aiograd.distributed.rpc.budget import PeerBudget
from aiograd.distributed.rpc.effects import Effect
from aiograd.distributed.rpc.limits import Limits
from aiograd.distributed.rpc.outbox import SessionOutbox
from aiograd.distributed.rpc.timer_queue import TimerQueue
from aiograd.distributed.rpc.transport import Buffer


class SessionSide:
    """The requests of one side that are not resolved.

    Args:
        limits: of this side.
        budget: the bytes that the peer may take.
        outbox: takes the messages to send.
        effects: takes the effects of the session.
        overloaded: returns the message of a failure for want of room.

    Attributes:
        watermark: the lowest unresolved id.
        held: bytes reserved from the budget.
    """

    __slots__ = ("watermark", "held", "timers", "_limits", "_budget", "_outbox", "_effects", "_overloaded")

    def __init__(
        self, limits: Limits, budget: PeerBudget, outbox: SessionOutbox, effects: deque[Effect], overloaded: Callable[[], Sequence[Buffer]]
    ) -> None:
        self.watermark = 1
        self.held = 0
        self.timers = TimerQueue()
        self._limits = limits
        self._budget = budget
        self._outbox = outbox
        self._effects = effects
        self._overloaded = overloaded

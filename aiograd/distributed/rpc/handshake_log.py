"""The log's view of handshakes that fail: the first one in full, the following ones as a number.

Any computer that can connect can make handshakes fail, thousands a second; a line for each would fill the disk and hide everything else.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import Counter

from aiograd.distributed.rpc.timers import call_at
from aiograd.running.log_fields import structured_logger

logger = structured_logger("aiograd.distributed")

#: seconds for which failures are summed up
INTERVAL = 10.0
#: addresses that are told apart in one interval; further ones are counted together
ADDRESSES = 64


class HandshakeLog:
    """Writes to the log that handshakes have failed.

    Args:
        name: of the worker.
    """

    __slots__ = ("_name", "_timer", "_sources", "_others", "_last")

    def __init__(self, name: str) -> None:
        self._name = name
        self._timer: asyncio.TimerHandle | None = None
        self._sources: Counter[str] = Counter()
        #: failures of addresses that are not told apart
        self._others = 0
        self._last = ""

    def failed(self, remote: str, why: BaseException | None, context: contextvars.Context) -> None:
        """One more has failed.

        Args:
            remote: address and port.
            context: in which the timer is set.
        """
        if self._timer is None:
            logger.info("worker %s: a handshake with %s failed: %s", self._name, remote, why, extra={"worker": self._name, "peer": remote})
            self._arm(context)
            return
        source = remote.rpartition(":")[0] or remote
        if source in self._sources or len(self._sources) < ADDRESSES:
            self._sources[source] += 1
        else:
            self._others += 1
        self._last = f"{remote}: {why}"

    def _arm(self, context: contextvars.Context) -> None:
        loop = asyncio.get_running_loop()
        self._timer = call_at(context, loop, loop.time() + INTERVAL, self._due, context)

    def _due(self, context: contextvars.Context) -> None:
        self._timer = None
        if self._sum_up():
            self._arm(context)

    def close(self) -> None:
        """Write the number of failures that are not in the log yet."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._sum_up()

    def _sum_up(self) -> bool:
        """Write how many there were; returns whether there were any."""
        sources, self._sources = self._sources, Counter()
        others, self._others = self._others, 0
        if not sources:
            return False
        worst = ", ".join(f"{source} ({count})" for source, count in sources.most_common(3))
        more = f"{len(sources)} addresses" if not others else f"more than {len(sources)} addresses"
        logger.info(
            "worker %s: %d more handshakes failed within %g s, of %s, most often with %s; the last one with %s",
            self._name, sources.total() + others, INTERVAL, more, worst, self._last,
        )  # fmt: skip
        return True

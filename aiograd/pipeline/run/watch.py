"""Watch: what a host on a worker does about a step of whose driver nothing is heard any more: drops it, or finds out what was decided.

Note [In doubt]
    A host that has prepared a step may neither commit nor drop it by itself. So while it waits, it asks the driver now and then, and where the
    driver does not answer, the hosts that it exchanges values with. One that has committed or dropped the step settles it; so does one that has
    never heard of it, since nothing can have been decided without that host (which then refuses the step for good). A driver that has not
    decided yet, or a host that is still at work on the step, is a reason to wait on. If nobody can tell until the lease ends, the gradients are
    dropped and the step stays in doubt on this host: it takes no further steps, and no optimizer steps its parameters, until the driver says
    that the step was not committed or lets go of the host.

Note [Lease]
    The lease is that of the worker (`Limits.lease`), and begins anew with each sign of life. A step whose values have come but that nobody has asked
    to run is dropped when it ends. One that runs is bounded by the request that runs it, which ends with its deadline or with contact to the
    driver. A prepared step is kept for `kept_for(lease)` at least, which the driver is told: it decides while that holds. A host that was frozen for
    longer than its lease asks a few times before it gives up, since those it asks may be there all the time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol

from aiograd.errors import DistributedError

#: states of a step on a host; the last is that of a prepared step whose outcome was not to be learned
OPEN, RUNNING, PREPARED, COMMITTED, DROPPED, UNKNOWN = "open", "running", "prepared", "committed", "dropped", "unknown"
#: in them a host, or the driver, shows that nothing has been decided
_UNDECIDED = (OPEN, RUNNING)

#: seconds between two questions at most, and the part of the lease that they take at most
PAUSE, PART = 1.0, 8
#: questions in a row that nobody can answer before a host gives up
TRIES = 3


class Home(Protocol):
    """The worker that a host lives on."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def lease(self) -> float:
        """Seconds for which it keeps something for a peer that it does not hear from."""

    def keep(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run something apart from any request, as long as the worker is open."""


class Watched(Protocol):
    """A step on a host."""

    step: int
    state: str
    trains: bool
    #: time of the loop at which there was the last sign of life
    heard: float
    #: the driver's own host, if it can be asked
    driver: Any

    @property
    def others(self) -> Sequence[Any]:
        """The other hosts."""

    def hear(self) -> None:
        """There is a sign of life."""


def kept_for(lease: float) -> float:
    """Seconds for which a prepared step is kept without a sign of life, at least."""
    return lease * (PART - 2) / PART


async def watch(session: Watched, lease: float) -> str:
    """Wait until a step is over by itself; cancelled when somebody else ends it. See Note [In doubt] and Note [Lease].

    Returns:
        COMMITTED, DROPPED or UNKNOWN: what is to become of the step.
    """
    now = asyncio.get_running_loop().time
    pause = min(lease / PART, PAUSE)
    failures = 0
    while True:
        await asyncio.sleep(pause)
        if session.state == RUNNING:
            continue
        is_in_doubt = session.state == PREPARED and session.trains
        if is_in_doubt:
            word = await _ask_around(session, pause)
            if word in (COMMITTED, DROPPED):
                return word
            if word != UNKNOWN:
                session.hear()
                failures = 0
                continue
            failures += 1
            if failures < TRIES:
                continue
        if now() >= session.heard + kept_for(lease):
            return UNKNOWN if is_in_doubt else DROPPED


async def _ask_around(session: Watched, seconds: float) -> str:
    """What became of a step: COMMITTED or DROPPED; OPEN: nothing yet, and somebody is still at it; UNKNOWN: nobody can tell."""
    if session.driver is not None:
        word = await _ask(session.driver, session.step, seconds)
        if word in (COMMITTED, DROPPED):
            return word
        if word != UNKNOWN:
            return OPEN
    others = [host for host in session.others if host != session.driver]
    words = await asyncio.gather(*(_ask(host, session.step, seconds) for host in others))
    for decided in (COMMITTED, DROPPED):
        if decided in words:
            return decided
    return OPEN if any(word in _UNDECIDED for word in words) else UNKNOWN


async def _ask(host: Any, step: int, seconds: float) -> str:
    try:
        word = await host.call("outcome", step, timeout=seconds)
    except (DistributedError, MemoryError):
        return UNKNOWN
    return word if word in (OPEN, RUNNING, PREPARED, COMMITTED, DROPPED) else UNKNOWN

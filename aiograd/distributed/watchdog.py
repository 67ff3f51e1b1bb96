"""Watchdog: the thread that notices when an event loop of this process is held up, and tells the log and the peers.

Note [A loop that is held up]
    Code that computes on the loop, blocks or stands in a debugger holds up everything else on it, heartbeats as well. So a timer ticks on the loop,
    and a thread compares its ticks with the clock. A loop that is late by a sixth of the silence (0.25 s by default) is named to the workers
    that have a session with a worker on it and whose URL is known, each half second anew (Note [Pulses] in `aiograd.distributed.rpc.pulse`): a peer
    counts from the frame before, which may be as old again, and waits for half of the silence at least. The log has each hold once, after
    0.25 s, and at most one each 5 s.

    A process that is stopped stops the thread as well, and so does code that keeps the interpreter's lock. Then nothing is told, and the worker is
    lost by the silence. A look that comes late itself tells no peer, since the loop may be about to go on. The log has the line all the same, if the
    loop stands at one.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from types import CodeType
from typing import Any, NamedTuple

from aiograd.distributed.rpc.endpoint import Endpoint
from aiograd.distributed.rpc.http import HttpTransport
from aiograd.distributed.rpc.http.pulse import PulseCarrier
from aiograd.distributed.rpc.identity import PeerId
from aiograd.distributed.rpc.pulse import Pulse, Pulses
from aiograd.errors import ArgumentTypeError
from aiograd.running.caller import short_place
from aiograd.running.log_fields import structured_logger

#: a loop is late after this part of the silence, and ticks so many times until then
LATE, TICKS = 1 / 6, 2
#: seconds between two pulses to a peer; after which the log has a hold; and between two entries of the log
EVERY, WARN, PAUSE = 0.5, 0.25, 5.0
#: seconds that the thread may take to end
GRACE = 1.0

logger = structured_logger("aiograd.loop")

_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


class LoopLook(NamedTuple):
    """A loop that has been held up for so many seconds, and whether peers and the log are to be told of it now."""

    seconds: float
    tells: bool
    warns: bool


class LoopWatch:
    """Compares the ticks of a loop with the clock; see Note [A loop that is held up]. Pure. Times are seconds on any clock that never goes back.

    Args:
        silence: the shortest of the loop's workers, seconds.
        now: seconds.

    Attributes:
        period: seconds between two ticks.
        due: when the next look is due.
    """

    __slots__ = ("period", "due", "_late", "_ticked", "_told", "_warned")

    def __init__(self, silence: float, now: float) -> None:
        self._late = min(LATE * silence, WARN)
        self.period = self._late / TICKS
        self._ticked = now
        self.due = now + self._late
        #: the tick before the hold that peers, and the log, were last told of, and when they were
        self._told = self._warned = (-math.inf, -math.inf)

    def tick(self, now: float) -> None:
        """The loop runs."""
        self._ticked = now

    def look(self, now: float) -> LoopLook | None:
        """Compare; None where the loop is in time."""
        is_late_itself = now - self.due >= self._late
        ticked, step = self._ticked, self.period / 2
        seconds = now - ticked - step  # the hold began between two ticks
        self.due = max(now + self._late - seconds, now + step)
        if seconds < self._late:
            return None
        tells = not is_late_itself and (self._told[0] != ticked or now - self._told[1] >= EVERY)
        warns = seconds - step >= WARN and self._warned[0] != ticked and now - self._warned[1] >= PAUSE
        if tells:
            self._told = ticked, now
        if warns:
            self._warned = ticked, now
        return LoopLook(seconds, tells, warns)


def pulses_of(worker: Endpoint, seconds: float = 0.0, line: str = "") -> Iterator[tuple[Pulses, str, Pulse]]:
    """The pulses to the peers of a worker, and the URLs of these. A line of code is for peers of the worker's own principal.

    Args:
        worker: the worker.
        seconds: for which its loop has been held up; 0: first pulses, to peers that are connected for a while and have had none.
        line: the line that the loop stands at.
    """
    connected = worker.loop.time() - worker.limits.silence
    for session in worker.sessions():
        url = worker.url_of(PeerId(session.peer.principal, session.peer.name))
        if session.channel is None or session.pulses is None or url is None:
            continue
        if seconds or (not session.pulses.count and session.attached_at <= connected):
            is_own = session.peer.principal == worker.keyring.default_principal
            yield session.pulses, url, Pulse(seconds, line if is_own else "")


class WatchedLoop:
    """An event loop, on which this is made, and the workers that are open on it."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.workers: dict[Endpoint, HttpTransport] = {}
        self.watch: LoopWatch
        self._thread = threading.get_ident()
        #: of the frame that calls callbacks of the loop
        self._base: CodeType | None = None
        self._timer: asyncio.Handle | None = None
        self._first_at = 0.0

    def changed(self) -> None:
        """Tick for the workers as they are now."""
        if self._timer is not None:
            self._timer.cancel()
        if self.workers:
            self.watch = LoopWatch(min(worker.limits.silence for worker in self.workers), time.monotonic())
            self._timer = self.loop.call_soon(self._tick, context=contextvars.Context())

    def _tick(self) -> None:
        self.watch.tick(time.monotonic())
        self._base = sys._getframe(1).f_code
        self._timer = self.loop.call_later(self.watch.period, self._tick, context=contextvars.Context())

    def look(self, now: float, carrier: PulseCarrier) -> None:
        """Tell peers and the log, in the thread of the watchdog."""
        look = self.watch.look(now)
        workers = list(self.workers.items())
        line = "" if look is None else self._line()
        if look is None and now >= self._first_at:
            self._first_at = now + min((worker.limits.heartbeat for worker, _ in workers), default=0.0)
        elif look is None or not look.tells:
            workers = []
        for worker, transport in workers:
            for pulse in pulses_of(worker, 0.0 if look is None else look.seconds, line):
                carrier.post(*pulse, transport.client_context)
        if look is not None and look.warns and line:
            names = ", ".join(sorted(worker.name for worker in list(self.workers)))
            text = "worker %s: the event loop has been held up for %.2f s at %s; move such work to ag.offload"
            logger.warning(text, names, look.seconds, line, extra={"worker": names})

    def _line(self) -> str:
        """The line that the loop stands at: the innermost of the user's code, else of a library, else of the package; "" where it waits."""
        found = ["", "", ""]
        frame = sys._current_frames().get(self._thread)
        while frame is not None and frame.f_code is not self._base:
            path = frame.f_code.co_filename
            root = frame.f_globals.get("__name__", "").partition(".")[0]
            place = 2 if root in ("aiograd", "asyncio") else 1 if path.startswith(_LIBRARIES) else 0
            found[place] = found[place] or short_place(path, frame.f_lineno)
            frame = frame.f_back
        return "" if frame is None else found[0] or found[1] or found[2]


class Watchdog:
    """The thread of a process, which lives as long as a worker that is watched is open; see Note [A loop that is held up]."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loops: dict[asyncio.AbstractEventLoop, WatchedLoop] = {}
        self._thread: threading.Thread | None = None
        self._ends = threading.Event()

    def enter(self, worker: Endpoint, transport: HttpTransport | None) -> None:
        """Watch the running loop for a worker that was opened on it, which takes the pulses of its peers from now on; None: do nothing."""
        if transport is None:
            return
        transport.site.take_pulse = worker.pulse
        with self._lock:
            watched = self._loops.get(worker.loop) or self._loops.setdefault(worker.loop, WatchedLoop())
            watched.workers[worker] = transport
            watched.changed()
            if self._thread is None or not self._thread.is_alive():  # a child process has no thread of its parent
                self._ends = threading.Event()
                self._thread = threading.Thread(target=self._work, args=(self._ends,), name="aiograd watchdog", daemon=True)
                self._thread.start()

    def leave(self, worker: Endpoint) -> None:
        """The worker closes; with the last one the thread ends. Idempotent."""
        with self._lock:
            watched = self._loops.get(worker.loop) if worker.url is not None else None
            if watched is None or watched.workers.pop(worker, None) is None:
                return
            watched.changed()
            if not watched.workers:
                del self._loops[worker.loop]
            thread = None if self._loops else self._thread
            if thread is not None:
                self._ends.set()
                self._thread = None
        if thread is not None:
            thread.join(GRACE)

    def _work(self, ends: threading.Event) -> None:
        carrier = PulseCarrier()
        try:
            while not ends.is_set():
                with self._lock:
                    for loop in [loop for loop in self._loops if loop.is_closed()]:  # its workers were not closed
                        del self._loops[loop]
                    watched = list(self._loops.values())
                    if not watched:
                        return
                for each in watched:
                    try:
                        each.look(time.monotonic(), carrier)
                    except Exception:  # the thread goes on
                        logger.exception("looking at an event loop failed")
                seconds = max(min(each.watch.due for each in watched) - time.monotonic(), 0.0)
                if carrier.is_busy:
                    carrier.work(seconds)
                else:
                    ends.wait(seconds)
        finally:
            carrier.close()


WATCHDOG = Watchdog()


def watched(watchdog: Any, transport: Any) -> HttpTransport | None:
    """The transport of a worker whose loop is to be watched; None: it is not.

    Args:
        watchdog: as of the worker.
        transport: the worker's.

    Raises:
        ArgumentTypeError: `watchdog` is not True or False.
    """
    if not isinstance(watchdog, bool):
        raise ArgumentTypeError(f"Worker(watchdog={watchdog!r}): expected True or False")
    return transport if watchdog and isinstance(transport, HttpTransport) else None

"""Watchdog: the thread that notices when an event loop of this process is held up, and tells the log and the peers.

Note [A loop that is held up]
    Code that computes on the loop, blocks or stands in a debugger holds up everything else on it, heartbeats as well. The loop's *beat* is a timer;
    a thread compares it with the clock. A loop that is late by a sixth of the silence (0.25 s by default) is named to the workers that have a
    session with a worker on it and whose URL is known, each half second anew (Note [Pulses] in `aiograd.distributed.rpc.pulse`): a peer counts
    from the frame before, which may be as old again, and is lost after half of the silence at the earliest. The log has each such hold once, at
    0.25 s, and not more often than each 5 s.

    A process that is stopped stops the thread as well, and code that does not let go of the interpreter's lock does. Then nothing is told, and the
    worker is lost by the silence. A look that comes late itself tells no peer: what holds up the loop may be over. The log has the line all the
    same, if the loop stands at one.
"""

from __future__ import annotations

import asyncio
import contextvars
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from pathlib import PurePath
from types import CodeType
from typing import NamedTuple

from aiograd.distributed.rpc.endpoint import Endpoint
from aiograd.distributed.rpc.http import HttpTransport
from aiograd.distributed.rpc.http.pulse import PulseCarrier
from aiograd.distributed.rpc.pulse import Pulse, PulseSender
from aiograd.running.log_fields import structured_logger

#: a loop is late after this part of the silence; and is looked at so many times until then
LATE, LOOKS = 1 / 6, 4
#: seconds between two pulses to a peer; after which the log has a hold, at the latest looks of the thread; and between two entries of the log
EVERY, WARN, PAUSE = 0.5, 0.25, 5.0
#: seconds that the thread may take to end
GRACE = 1.0

logger = structured_logger("aiograd.loop")

_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


class LoopLook(NamedTuple):
    """A loop that is held up, since so many seconds, and what is to be done: tell peers, write to the log."""

    seconds: float
    tells: bool
    warns: bool


class LoopWatch:
    """Compares the beat of a loop with the clock; see Note [A loop that is held up]. Pure. Times are seconds on any clock that never goes back.

    Args:
        silence: the shortest of the loop's workers, seconds.
        now: seconds.

    Attributes:
        late: seconds after which the loop counts as held up.
        period: seconds between two beats, and between two looks.
    """

    __slots__ = ("late", "period", "_beaten", "_looked", "_told", "_warned")

    def __init__(self, silence: float, now: float) -> None:
        self.late = min(LATE * silence, WARN)
        self.period = self.late / LOOKS
        self._beaten = self._looked = now
        #: the beat before the latest hold that peers, and the log, were told of, and when
        self._told = self._warned = (now, float("-inf"))

    def beat(self, now: float) -> None:
        """The loop runs."""
        self._beaten = now

    def look(self, now: float) -> LoopLook | None:
        """Compare; None where the loop is in time."""
        is_late_itself = now - self._looked - self.period >= self.late
        self._looked = now
        beaten = self._beaten
        seconds = now - beaten - self.period
        if seconds < self.late:
            return None
        tells = not is_late_itself and (self._told[0] != beaten or now - self._told[1] >= EVERY)
        warns = seconds >= WARN and self._warned[0] != beaten and now - self._warned[1] >= PAUSE
        if tells:
            self._told = beaten, now
        if warns:
            self._warned = beaten, now
        return LoopLook(seconds, tells, warns)


def pulses_of(endpoint: Endpoint, seconds: float, line: str) -> list[tuple[PulseSender, str, Pulse]]:
    """What the peers of a worker are to be told, and their URLs. A line of code is for peers of the worker's own principal."""
    principal = endpoint.keyring.default_principal
    return [
        (session.pulses[0], url, Pulse(seconds, line if session.peer.principal == principal else ""))
        for session, url in endpoint.listeners()
        if session.pulses is not None
    ]


def first_pulses_of(endpoint: Endpoint) -> list[tuple[PulseSender, str, Pulse]]:
    """The first pulses to peers that have had none since the handshake, and have been connected for a while."""
    until = endpoint.loop.time() - endpoint.limits.silence
    return [
        (session.pulses[0], url, Pulse(0.0, ""))
        for session, url in endpoint.listeners()
        if session.pulses is not None and not session.pulses[0].count and session.attached_at <= until
    ]


class WatchedLoop:
    """One event loop, and the workers that are open on it.

    Args:
        loop: the running loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.workers: dict[Endpoint, HttpTransport] = {}
        self.watch = LoopWatch(float("inf"), time.monotonic())
        self._thread = threading.get_ident()
        self._base: CodeType | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._first_at = 0.0

    def changed(self) -> None:
        """Beat for the workers as they are now; called on the loop."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.workers:
            self.watch = LoopWatch(min(worker.limits.silence for worker in self.workers), time.monotonic())
            self._timer = self.loop.call_soon(self._beat, context=contextvars.Context())  # type: ignore[assignment]

    def look(self, now: float, carrier: PulseCarrier) -> None:
        """Tell peers and the log what there is to tell; called by the thread."""
        look = self.watch.look(now)
        workers = list(self.workers.items())
        if look is None:
            if now >= self._first_at and workers:
                self._first_at = now + min(worker.limits.silence for worker, _ in workers)
                for worker, transport in workers:
                    for pulse in first_pulses_of(worker):
                        carrier.post(*pulse, transport.client_context)
            return
        line = self._line()
        for worker, transport in workers if look.tells else ():
            for pulse in pulses_of(worker, look.seconds, line):
                carrier.post(*pulse, transport.client_context)
        if look.warns and line:
            names = ", ".join(sorted(worker.name for worker, _ in workers))
            logger.warning(
                "worker %s: the event loop has been held up for %.2f s at %s; move such work to ag.offload", names, look.seconds, line,
                extra={"worker": names},
            )  # fmt: skip

    def _beat(self) -> None:
        self.watch.beat(time.monotonic())
        self._base = sys._getframe(1).f_code
        self._timer = self.loop.call_later(self.watch.period, self._beat, context=contextvars.Context())

    def _line(self) -> str:
        """The line that the loop stands at: the innermost of the user's code, else of a library, else of the package; "" where it waits."""
        found = ["", "", ""]
        frame = sys._current_frames().get(self._thread)
        while frame is not None and frame.f_code is not self._base:
            path = frame.f_code.co_filename
            root = frame.f_globals.get("__name__", "").partition(".")[0]
            place = 2 if root in ("aiograd", "asyncio") else 1 if path.startswith(_LIBRARIES) else 0
            found[place] = found[place] or f"{'/'.join(PurePath(path).parts[-2:])}:{frame.f_lineno}"
            frame = frame.f_back
        return "" if frame is None else found[0] or found[1] or found[2]


class Watchdog:
    """The thread of a process, which lives as long as a worker that is watched is open; see Note [A loop that is held up]."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loops: dict[asyncio.AbstractEventLoop, WatchedLoop] = {}
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()

    def enter(self, worker: Endpoint, transport: HttpTransport) -> None:
        """Watch the running loop for a worker that was opened on it; it takes the pulses of its peers from now on.

        Args:
            worker: open.
            transport: of the worker.
        """
        transport.site.take_pulse = worker.pulse
        with self._lock:
            watched = self._loops.setdefault(worker.loop, WatchedLoop(worker.loop))
            watched.workers[worker] = transport
            watched.changed()
            if self._thread is None or not self._thread.is_alive():  # a child process has no thread of its parent
                self._wake = threading.Event()
                self._thread = threading.Thread(target=self._work, args=(self._wake,), name="aiograd watchdog", daemon=True)
                self._thread.start()

    def leave(self, worker: Endpoint) -> None:
        """The worker closes; with the last one the thread ends. Idempotent."""
        thread: threading.Thread | None = None
        with self._lock:
            watched = self._loops.get(worker.loop)
            if watched is None or watched.workers.pop(worker, None) is None:
                return
            watched.changed()
            if not watched.workers:
                del self._loops[worker.loop]
            if not self._loops:
                thread, self._thread = self._thread, None
                self._wake.set()
        if thread is not None:
            thread.join(GRACE)

    def _work(self, wake: threading.Event) -> None:
        carrier = PulseCarrier()
        try:
            while not wake.is_set():
                with self._lock:
                    for loop in [loop for loop in self._loops if loop.is_closed()]:  # its workers were not closed
                        del self._loops[loop]
                    watched = list(self._loops.values())
                    if not watched:
                        self._thread = None
                        return
                for each in watched:
                    self._guarded(each.look, carrier)
                period = min(each.watch.period for each in watched)
                if carrier.is_busy:
                    carrier.work(period)
                else:
                    wake.wait(period)
        finally:
            carrier.close()

    def _guarded(self, look: Callable[[float, PulseCarrier], None], carrier: PulseCarrier) -> None:
        try:
            look(time.monotonic(), carrier)
        except Exception:  # the thread goes on
            logger.exception("looking at an event loop failed")


WATCHDOG = Watchdog()

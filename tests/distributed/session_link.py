"""Two sessions and the link between them, in virtual time: no event loop, everything drawn from a seed.

Each side asks the other for things. Every message carries a token of its own, the ledger notes what happens to it, and `SessionLink.faults` says
afterwards what must not have happened.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from aiograd.distributed.rpc.budget import Budget, PeerBudget
from aiograd.distributed.rpc.frames import HEADER
from aiograd.distributed.rpc.limits import Limits
from aiograd.distributed.rpc.session import Abandon, Answered, Deliver, Expired, RpcSession
from aiograd.errors import ProtocolError

#: small, so that a few messages reach them
SMALL = Limits(message_bytes=4096, frame_bytes=256, bytes_per_peer=12288, bytes_total=16384, requests_per_peer=6, max_deadline=60.0)
OVERLOADED = b"overloaded, come back later"


def overloaded() -> Sequence[bytes]:
    return (OVERLOADED,)


def make(limits: Limits = SMALL, budget: PeerBudget | None = None) -> RpcSession:
    budget = budget or Budget(limits.bytes_per_peer, limits.bytes_total).child()
    return RpcSession(limits, budget, overloaded=overloaded)


def cut(message: bytes, rng: Random) -> list[bytes | memoryview]:
    """A message as several buffers, some of them empty."""
    places = sorted(rng.randrange(len(message) + 1) for _ in range(rng.randrange(4)))
    parts = [message[i:j] for i, j in itertools.pairwise([0, *places, len(message)])]
    return [memoryview(part) if rng.random() < 0.5 else part for part in parts]


def joined(frame: Sequence[bytes | bytearray | memoryview]) -> bytes:
    return b"".join(frame)


def receive(session: RpcSession, frame: bytes, now: float, *, in_place: bool) -> None:
    """Give a frame to a session, whole or as a link gives it a large one: the header and the body apart."""
    if not in_place or len(frame) == HEADER.size:
        session.receive(frame, now)
        return
    header, rest = frame[: HEADER.size], frame[HEADER.size :]
    body = session.place(header)
    if body is None:
        body = memoryview(bytearray(len(rest)))
    body[:] = rest
    session.receive(header, now, body)


def answer_to(message: bytes) -> bytes:
    """The answer of handlers: of another length, and every byte of the message counts."""
    return b"answer to " + message[::-1] + b"." * (len(message) // 2)


@dataclass
class Asked:
    """A request, as the driver of its requester sees it."""

    token: bytes
    message: bytes
    deadline: float
    outcome: str = ""
    cancelled: bool = False
    #: when it had an outcome or was cancelled
    ended: float = math.inf


@dataclass
class Faults:
    """Seconds."""

    latency: float = 0.01
    #: what a frame takes longer, at most; those that were sent after it wait for it
    jitter: float = 0.0
    #: mean time between losses of the channel; 0 for none
    cut: float = 0.0


@dataclass
class Side:
    session: RpcSession
    asked: dict[int, Asked] = field(default_factory=dict)
    #: requests of the other side that run here: id -> message, and when it was delivered
    running: dict[int, bytes] = field(default_factory=dict)
    #: handlers that were delivered a request: its token, as often as they were
    delivered: Counter[bytes] = field(default_factory=Counter)
    abandoned: set[bytes] = field(default_factory=set)
    answers: dict[bytes, bytes] = field(default_factory=dict)
    #: the number of its channel; 0 without one
    channel: int = 0


def token_of(message: bytes) -> bytes:
    return message.partition(b"|")[0]


class SessionLink:
    """Two sides, what is on its way between them, and the time."""

    def __init__(self, seed: int, faults: Faults, limits: Limits = SMALL) -> None:
        self.net, self.work = Random(f"{seed}:net"), Random(f"{seed}:work")
        self.faults_of_link = faults
        self.now = 100.0
        self.sides = tuple(Side(make(limits)) for _ in range(2))
        self.limits = limits
        self.channel = 0
        self.broken: list[str] = []
        self.errors: Counter[str] = Counter()
        #: when the latest frame for each side arrives
        self.due = [0.0, 0.0]
        self._events: list[tuple[float, int, str, tuple[object, ...]]] = []
        self._count = itertools.count()

    # ---- time

    def at(self, when: float, what: str, *arguments: object) -> None:
        heapq.heappush(self._events, (when, next(self._count), what, arguments))

    def run(self, until: float) -> None:
        """Let everything happen that happens before `until`."""
        while True:
            self._pump()
            ticks = [tick for side in self.sides if (tick := side.session.next_tick()) is not None]
            when = min([*ticks, self._events[0][0] if self._events else math.inf])
            if when > until:
                self.now = until
                return
            self.now = max(self.now, when)
            while self._events and self._events[0][0] <= self.now:
                _, _, what, arguments = heapq.heappop(self._events)
                getattr(self, "on_" + what)(*arguments)
                self._pump()
            self.tick()

    def tick(self) -> None:
        for side in self.sides:
            side.session.tick(self.now)
            again = side.session.next_tick()
            if again is not None and again <= self.now:
                raise AssertionError(f"tick at {self.now} left something due at {again}")

    def _pump(self) -> None:
        for index in range(2):
            while self.pull(index):
                pass
            self.work_off(index)

    def pull(self, index: int) -> bool:
        """One frame goes out."""
        frame = self.sides[index].session.next_frame(self.now)
        if frame is not None:
            self._send(1 - index, joined(frame))
        return frame is not None

    def work_off(self, index: int) -> None:
        """The driver of one side does what its session asks for."""
        effects = self.sides[index].session.effects
        while effects:
            self._carry_out(index, effects.popleft())

    # ---- the channel

    def attach(self, lag: float = 0.0) -> None:
        """A new channel; the second side learns of it `lag` seconds after the first."""
        self.channel += 1
        self.at(self.now, "open", 0, self.channel)
        self.at(self.now + lag, "open", 1, self.channel)
        if self.faults_of_link.cut:
            self.at(self.now + lag + self.net.expovariate(1 / self.faults_of_link.cut), "cut", self.channel)

    def on_attach(self, after: int, lag: float) -> None:
        if after == self.channel:
            self.attach(lag)

    def on_open(self, index: int, channel: int) -> None:
        if channel == self.channel:
            self.sides[index].channel = channel
            self.sides[index].session.attach(self.now)

    def on_closed(self, index: int, channel: int) -> None:
        if self.sides[index].channel == channel:
            self.sides[index].channel = 0
            self.sides[index].session.detach(self.now)

    def on_cut(self, channel: int, first: int = 0) -> None:
        """The channel closes; one side notices at once, the other some time later, and then there is a new one."""
        if channel == self.channel:
            self.on_closed(first, channel)
            self.at(self.now + self.net.uniform(0.0, 0.3), "closed", 1 - first, channel)
            self.at(self.now + self.net.uniform(0.3, 0.8), "attach", channel, self.net.uniform(0.0, 0.2))

    def heal(self) -> None:
        """From now on nothing goes wrong."""
        for index, side in enumerate(self.sides):
            self.on_closed(index, side.channel)
        self.faults_of_link = Faults()
        self.attach()

    def _send(self, to: int, frame: bytes) -> None:
        faults = self.faults_of_link
        self.due[to] = max(self.due[to], self.now + faults.latency + self.net.random() * faults.jitter)
        self.at(self.due[to], "frame", to, frame, self.sides[1 - to].channel)

    def on_frame(self, to: int, frame: bytes, channel: int) -> None:
        here = self.sides[to].channel
        if here == channel:
            try:
                receive(self.sides[to].session, frame, self.now, in_place=len(frame) % 2 == 1)
            except ProtocolError as error:
                self.errors[error.code] += 1
                self.on_cut(channel, to)
        elif here < channel == self.channel:  # the channel keeps it, and those after it, until this side has it
            self.due[to] = max(self.due[to], self.now + 0.01)
            self.at(self.now + 0.01, "frame", to, frame, channel)

    # ---- the drivers

    def ask(self, index: int, message: bytes, timeout: float = 5.0) -> int:
        side = self.sides[index]
        id = side.session.request(7, cut(message, self.work), timeout, self.now)
        side.asked[id] = Asked(token_of(message), message, self.now + timeout)
        return id

    def on_ask(self, index: int, message: bytes, timeout: float) -> None:
        self.ask(index, message, timeout)

    def cancel(self, index: int, id: int) -> None:
        asked = self.sides[index].asked[id]
        if not asked.outcome:
            asked.cancelled, asked.ended = True, self.now
            self.sides[index].session.cancel(id, self.now)

    def on_cancel_some(self, index: int) -> None:
        open_ids = [id for id, asked in self.sides[index].asked.items() if not asked.outcome and not asked.cancelled]
        if open_ids:
            self.cancel(index, self.work.choice(open_ids))

    def handler_time(self, timeout: float) -> float:
        """How long a handler runs; infinite for until it is abandoned."""
        draw = self.work.random()
        return math.inf if draw < 0.05 else 0.0 if draw < 0.3 else self.work.expovariate(2.0)

    def on_respond(self, index: int, id: int, message: bytes) -> None:
        side = self.sides[index]
        if side.running.get(id) is message:
            del side.running[id]
            answer = answer_to(message)[: self.limits.message_bytes]
            side.answers[token_of(message)] = answer
            side.session.respond(id, cut(answer, self.work), self.now, failed=len(message) % 5 == 0, hold=0.02 * (len(message) % 4 == 1))

    def _carry_out(self, index: int, effect: object) -> None:
        side = self.sides[index]
        match effect:
            case Deliver(id, kind, message, timeout):
                text = bytes(message)
                token = token_of(text)
                side.delivered[token] += 1
                if side.delivered[token] > 1:
                    self.broken.append(f"twice: {token!r} was delivered {side.delivered[token]} times")
                if kind != 7 or not timeout > 0 or not any(asked.message == text for asked in self.sides[1 - index].asked.values()):
                    self.broken.append(f"wrong: delivered {text[:40]!r} of kind {kind} with timeout {timeout}")
                side.running[id] = text
                duration = self.handler_time(timeout)
                if duration < math.inf:
                    self.at(self.now + duration, "respond", index, id, text)
            case Abandon(id):
                message = side.running.pop(id, None)
                if message is None:
                    self.broken.append(f"abandoned: {id} does not run")
                else:
                    side.abandoned.add(token_of(message))
            case Answered(id, message, failed):
                asked = side.asked.get(id)
                if asked is None:
                    self.broken.append(f"unasked: {bytes(message)[:40]!r} answers request {id}")
                    return
                self._resolved(asked, "refused" if failed and bytes(message) == OVERLOADED else "answered")
                other = self.sides[1 - index]
                if asked.outcome == "refused":
                    if other.delivered[asked.token]:
                        self.broken.append(f"refused: {asked.token!r} was delivered all the same")
                elif bytes(message) != other.answers.get(asked.token) or failed != (len(asked.message) % 5 == 0):
                    self.broken.append(f"wrong: answer to {asked.token!r} is {bytes(message)[:40]!r}, {failed=}")
            case Expired(id):
                asked = side.asked.get(id)
                if asked is None:
                    self.broken.append(f"unasked: request {id} has expired")
                    return
                self._resolved(asked, "expired")
                if self.now < asked.deadline:
                    self.broken.append(f"early: {asked.token!r} expired {asked.deadline - self.now} s before its deadline")

    def _resolved(self, asked: Asked, outcome: str) -> None:
        if asked.outcome or asked.cancelled:
            self.broken.append(f"again: {asked.token!r} was {outcome} after {asked.outcome or 'cancelled'}")
        asked.outcome, asked.ended = outcome, self.now

    # ---- what must hold

    def settle(self) -> None:
        """Heal the link and wait until nothing is left to happen: long past the last deadline, which no handler outlives."""
        self.heal()
        self.run(self.now + 1.5)
        for side, other in (self.sides, self.sides[::-1]):
            unwanted = {asked.token for asked in side.asked.values() if asked.ended < self.now - 2 * self.limits.heartbeat}
            for message in other.running.values():
                if token_of(message) in unwanted:
                    self.broken.append(f"idle: {token_of(message)!r} still runs, though nobody waits for it")
        last = max((asked.deadline for side in self.sides for asked in side.asked.values()), default=self.now)
        self.run(max(last, self.now) + 3.0)

    def faults(self) -> list[str]:
        """The broken promises; after `settle`."""
        found = list(self.broken)
        for index, side in enumerate(self.sides):
            statistics = side.session.statistics()
            for asked in side.asked.values():
                if not asked.outcome and not asked.cancelled:
                    found.append(f"lost: {asked.token!r} was never resolved")
            left = (statistics.outstanding, statistics.running, statistics.remembered)
            if any(left) or side.running:
                found.append(f"remembered: side {index} still has {left} and runs {len(side.running)}")
            if statistics.bytes_held or statistics.bytes_stored or statistics.bytes_unsent:
                found.append(f"bytes: side {index} still holds {statistics.bytes_held}, {statistics.bytes_stored}, {statistics.bytes_unsent}")
        return found


def traffic(link: SessionLink, requests: int, seconds: float, timeout: float = 8.0) -> None:
    """Both sides ask each other for things, of all sizes, and cancel some of it."""
    work = link.work
    for number in range(requests):
        size = work.choice([0, 10, 100, 256, 257, 700, 3000])
        index = work.randrange(2)
        message = b"%d.%d|" % (index, number) + work.randbytes(size)
        link.at(link.now + work.random() * seconds, "ask", index, message, work.uniform(0.1, timeout))
        if work.random() < 0.2:
            link.at(link.now + work.random() * (seconds + 1), "cancel_some", work.randrange(2))


def random_faults(seed: int) -> Faults:
    """A mix of faults: each seed has some of them, and some none."""
    rng = Random(f"{seed}:faults")

    def some(most: float) -> float:
        return rng.random() * most if rng.random() < 0.5 else 0.0

    cut = rng.uniform(0.2, 3.0) if rng.random() < 0.8 else 0.0
    return Faults(latency=rng.uniform(0.001, 0.05), jitter=some(0.3), cut=cut)


def simulate(seed: int, faults: Faults | None = None) -> SessionLink:
    """One seed: traffic over a bad link, then quiet."""
    link = SessionLink(seed, faults or random_faults(seed))
    link.attach()
    traffic(link, 30, 4.0)
    link.run(link.now + 6.0)
    link.settle()
    return link

"""The promises that hold under every fault, and the notes that are needed to check them.

Promises that only hold when nothing goes wrong count too: they are judged where no fault has struck (see `Notes.quiet`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple


class Broken(AssertionError):
    """A promise was not kept."""


class _Call(NamedTuple):
    until: float
    #: of the context that it belongs to
    key: bytes | None


class Notes:
    """The notes of one run, kept outside of all hosts: no fault touches them.

    Args:
        clock: the time.
        strikes: how many faults have struck so far.
        is_gentle: whether messages take next to no time where no fault strikes.
        heartbeat: seconds.
        silence: seconds after which somebody who is not heard is lost.
        grace: how much later than its deadline anything may end, in heartbeats.
    """

    def __init__(
        self, clock: Callable[[], float], strikes: Callable[[], int], is_gentle: bool, heartbeat: float, silence: float, grace: float = 1.0
    ) -> None:
        self.clock = clock
        self.strikes = strikes
        self.is_gentle = is_gentle
        self.heartbeat = heartbeat
        self.silence = silence
        self.grace = grace
        #: promises that were broken, in words
        self.broken: list[str] = []
        #: what happened, in words; None: nobody wants to know
        self.story: list[str] | None = None
        self.counts: Counter[str] = Counter()
        #: how often each call was run
        self.ran: Counter[int] = Counter()
        self._tokens = 0
        self._calls: dict[int, _Call] = {}
        self._given_up: dict[int, float] = {}
        self._released: dict[bytes, float] = {}
        self._frozen: dict[str, list[tuple[float, float]]] = {}

    # ---------------------------------------------------------------- in words

    def expect(self, condition: bool, promise: str) -> None:
        """Note that a promise was broken, unless `condition`."""
        if not condition:
            self.broken.append(f"at {self.clock():.3f} s: {promise}")
            self.tell(f"BROKEN: {promise}")

    def tell(self, text: str) -> None:
        """Go on with the story."""
        if self.story is not None:
            self.story.append(f"{self.clock():9.4f}  {text}")

    def count(self, what: str) -> None:
        """Count something, and tell it."""
        self.counts[what] += 1
        self.tell(what)

    # ---------------------------------------------------------------- time

    def quiet(self) -> bool:
        """True if no fault has struck so far, so that everything has to succeed, and at once."""
        return self.is_gentle and not self.strikes()

    def frozen(self, name: str, begin: float, end: float) -> None:
        """A host stands still for a while."""
        self._frozen.setdefault(name, []).append((begin, end))

    def in_time(self, name: str, what: str, begun: float, seconds: float) -> None:
        """Something that was awaited on a host has ended: did it in time?"""
        now = self.clock()
        stood_still = sum(min(end, now) - max(begin, begun) for begin, end in self._frozen.get(name, ()) if end > begun)
        allowed = seconds + self.grace * self.heartbeat + stood_still
        self.expect(now - begun <= allowed + 1e-6, f"{name}: {what} took {now - begun:.3f} s of {seconds:.3f} s")

    # ---------------------------------------------------------------- calls

    def new_token(self, until: float, key: bytes | None) -> int:
        """Names a call."""
        self._tokens += 1
        self._calls[self._tokens] = _Call(until, key)
        return self._tokens

    def begin(self, name: str, token: int, until: float) -> None:
        """A call is run on a host."""
        self.ran[token] += 1
        self.expect(self.ran[token] == 1, f"{name} runs call {token} a second time")

    def end(self, name: str, token: int, begun: float) -> None:
        """A call is over on a host."""
        now = self.clock()
        call = self._calls[token]
        if now > call.until:  # who asked says so, and is heard or found silent
            self.in_time(name, f"call {token}, past its deadline,", begun, max(0.0, call.until - begun) + (0.0 if self.quiet() else self.silence))
        since = {"its caller had given it up": self._given_up.get(token), "its context was released": self._released.get(call.key or b"")}
        for what, moment in since.items():
            if moment is not None and self.quiet():
                self.expect(now - moment <= self.heartbeat, f"{name} runs call {token} for {now - moment:.3f} s after {what}")

    def answered(self, token: int) -> None:
        """A call has come back with a value."""
        self.expect(self.ran[token] == 1, f"call {token} was answered and ran {self.ran[token]} times")

    def given_up(self, token: int) -> None:
        """Whoever made a call waits for it no more."""
        self._given_up[token] = self.clock()

    def released(self, key: bytes) -> None:
        """A context has been left."""
        self._released[key] = self.clock()

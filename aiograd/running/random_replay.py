"""The replay of random numbers where a forward is computed a second time.

Note [Replay]
    The draws of a region that will be recomputed (`aiograd.functional.checkpointing`) are recorded in a `Draws`: the state of the generator
    before every draw, and the default generator at every use of it. Within a `Replay` the same calls, in the same order, draw
    from clones put into the recorded states, so the numbers are the same, no generator advances, and draws of other tasks
    meanwhile do not matter. Regions nest: a region recorded inside a replay records the states of the clones.

Rejected: recording only the state at the first draw of a region (another task that draws from the same generator while the region awaits
something would silently change the second half of the replayed numbers); winding the generators themselves back and forth (visible to every
other task).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

from aiograd.running.random_stream import BitGeneratorState, RandomStream


class HasStream(Protocol):
    """A `Generator`."""

    _stream: RandomStream


def is_replaying() -> bool:
    """True if the running code is computed for a second time, and repeats what it drew the first time."""
    return tapes()[1] is not None


class Draws:
    """The recorded draws of a region: the state before each draw, by generator, and the default generator at each use of it."""

    __slots__ = ("states", "defaults", "foreign")

    def __init__(self) -> None:
        self.states: dict[HasStream, list[BitGeneratorState]] = {}
        self.defaults: list[Any] = []
        #: states of other libraries' generators, in the order of the calls that drew from them
        self.foreign: list[Any] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the draws of the block. May be entered several times; draws are appended."""
        token = TAPE.set(_Recording(self, TAPE.get()))
        try:
            yield
        finally:
            TAPE.reset(token)


class Replay:
    """Repeats the recorded `draws`; no generator advances. Any number of replays of the same draws may run at once."""

    __slots__ = ("draws", "clones", "drawn", "uses", "foreign_uses")

    def __init__(self, draws: Draws) -> None:
        self.draws = draws
        self.clones: dict[HasStream, RandomStream] = {}
        self.drawn: dict[HasStream, int] = {}
        self.uses = 0
        self.foreign_uses = 0

    @contextmanager
    def playing(self) -> Iterator[None]:
        """Repeat the recorded draws in the block. May be entered several times, and continues after the last draw."""
        token = TAPE.set(self)
        try:
            yield
        finally:
            TAPE.reset(token)

    def next_stream(self, generator: HasStream) -> RandomStream:
        """A clone in the state of the same draw in the recorded region; after the last recorded draw, the clone in its present state."""
        clone = self.clones.get(generator)
        if clone is None:
            clone = self.clones[generator] = generator._stream.clone()
        states = self.draws.states.get(generator, ())
        k = self.drawn.get(generator, 0)
        if k < len(states):
            clone.go_to(states[k])
        self.drawn[generator] = k + 1
        return clone

    def next_default(self) -> Any:
        """The default generator of the same use in the recorded region; None past its last use."""
        k, self.uses = self.uses, self.uses + 1
        return self.draws.defaults[k] if k < len(self.draws.defaults) else None

    def next_foreign(self) -> Any:
        """The state of the other library's generator at the same call of the recorded region; None past the last."""
        k, self.foreign_uses = self.foreign_uses, self.foreign_uses + 1
        return self.draws.foreign[k] if k < len(self.draws.foreign) else None


class _Recording(NamedTuple):
    draws: Draws
    outer: _Recording | Replay | None


TAPE: ContextVar[_Recording | Replay | None] = ContextVar("aiograd_randomTAPE", default=None)


def tapes() -> tuple[list[_Recording], Replay | None]:
    """The recordings that the running code is inside of, innermost first, up to the innermost replay, if there is one."""
    tape = TAPE.get()
    recordings: list[_Recording] = []
    while isinstance(tape, _Recording):
        recordings.append(tape)
        tape = tape.outer
    return recordings, tape


def stream_now(generator: HasStream) -> RandomStream:
    """The stream for one draw from `generator`, whose lock is held; records its state if a region is being recorded."""
    recordings, source = tapes()
    stream = generator._stream if source is None else source.next_stream(generator)
    if recordings:
        state = stream.state()
        for recording in recordings:
            recording.draws.states.setdefault(generator, []).append(state)
    return stream

"""Streams of random numbers, and their replay where a forward is computed a second time.

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

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy as np

from aiograd.errors import ArgumentError

ALGORITHM = "PCG64"


class BitGeneratorState(NamedTuple):
    """The state of a stream: the 128-bit state and increment of PCG64, its buffered half word, and the number of children it has spawned."""

    state: int
    increment: int
    has_uint32: int
    uinteger: int
    spawned: int


class RandomStream:
    """A PCG64 and the seed it came from."""

    __slots__ = ("entropy", "spawn_key", "spawned", "_numpy")

    def __init__(self, entropy: int | tuple[int, ...], spawn_key: tuple[int, ...] = ()) -> None:
        self.entropy = entropy
        self.spawn_key = spawn_key
        self.spawned = 0
        self._numpy: np.random.Generator | None = None

    @property
    def numpy(self) -> np.random.Generator:
        """It as numpy has it; made when something is drawn, since many streams are never used and seeding takes 20 µs."""
        if self._numpy is None:
            self._numpy = np.random.Generator(np.random.PCG64(np.random.SeedSequence(self.entropy, spawn_key=self.spawn_key)))
        return self._numpy

    @property
    def bits(self) -> np.random.PCG64:
        """The source of bits."""
        return self.numpy.bit_generator  # type: ignore[return-value]

    def state(self) -> BitGeneratorState:
        """The present state."""
        state: Mapping[str, Any] = self.bits.state
        return BitGeneratorState(state["state"]["state"], state["state"]["inc"], state["has_uint32"], state["uinteger"], self.spawned)

    def go_to(self, state: BitGeneratorState) -> None:
        """Continue from `state`."""
        self.bits.state = {
            "bit_generator": ALGORITHM,
            "state": {"state": state.state, "inc": state.increment},
            "has_uint32": state.has_uint32,
            "uinteger": state.uinteger,
        }
        self.spawned = state.spawned

    def as_dict(self) -> dict[str, Any]:
        """Seed and state, as ints, lists and strings that JSON can hold."""
        entropy = self.entropy if isinstance(self.entropy, int) else list(self.entropy)
        return {"algorithm": ALGORITHM, "seed": entropy, "spawn_key": list(self.spawn_key), **self.state()._asdict()}

    def clone(self) -> RandomStream:
        """Another stream in the same state."""
        clone = RandomStream(self.entropy, self.spawn_key)
        clone.go_to(self.state())
        return clone

    def spawn(self, count: int) -> list[RandomStream]:
        """Streams independent of this one and of each other, as numpy's SeedSequence spawns them."""
        first, self.spawned = self.spawned, self.spawned + count
        return [RandomStream(self.entropy, (*self.spawn_key, i)) for i in range(first, self.spawned)]


def stream_of(state: Any) -> RandomStream:
    """The stream that `RandomStream.as_dict` describes.

    Raises:
        ArgumentError: the state is malformed.
    """
    expected = {"algorithm", "seed", "spawn_key", *BitGeneratorState._fields}
    if not isinstance(state, Mapping) or set(state) != expected or state["algorithm"] != ALGORITHM:
        found = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        raise ArgumentError(f"Generator.load_state_dict: expected the keys {sorted(expected)} with algorithm {ALGORITHM!r}, found {found}")
    try:
        stream = RandomStream(entropy_of(state["seed"]), tuple(int(key) for key in state["spawn_key"]))
        stream.go_to(BitGeneratorState(*(int(state[name]) for name in BitGeneratorState._fields)))
    except (ValueError, TypeError, OverflowError) as error:
        raise ArgumentError(f"Generator.load_state_dict: the values are no state of a Generator ({error})") from None
    return stream


def entropy_of(seed: Any) -> int | tuple[int, ...]:
    """The seed of a generator as numpy takes it; fresh entropy for None.

    Raises:
        ArgumentError: no int of at least 0, and no sequence of them.
    """
    if seed is None:
        fresh = np.random.SeedSequence().entropy
        return entropy_of(fresh)
    several = isinstance(seed, (tuple, list))
    numbers = seed if several else [seed]
    if not numbers or any(isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < 0 for n in numbers):
        raise ArgumentError(f"Generator(seed={seed!r}): expected an int of at least 0, a sequence of them, or None")
    return tuple(map(int, numbers)) if several else int(seed)


class Draws:
    """The recorded draws of a region: the state before each draw, by generator, and the default generator at each use of it."""

    __slots__ = ("states", "defaults", "foreign")

    def __init__(self) -> None:
        self.states: dict[object, list[BitGeneratorState]] = {}
        self.defaults: list[Any] = []
        #: states of other libraries' generators, in the order of the calls that drew from them
        self.foreign: list[Any] = []

    def note(self, generator: object, state: Any) -> None:
        """A draw from `generator`, which is in this state; None: a generator of another library."""
        if generator is None:
            self.foreign.append(state)
        else:
            self.states.setdefault(generator, []).append(state)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the draws of the block. May be entered several times; draws are appended."""
        token = _tape.set(Recording(self, _tape.get()))
        try:
            yield
        finally:
            _tape.reset(token)


class RefusedDraws(Draws):
    """A region that may not draw: its first draw is an `ArgumentError`, and the generator does not advance.

    Args:
        message: of the error.
    """

    __slots__ = ("message",)

    def __init__(self, message: str) -> None:
        super().__init__()
        self.message = message

    def note(self, generator: object, state: Any) -> None:
        """Refuse.

        Raises:
            ArgumentError: always.
        """
        raise ArgumentError(self.message)


class Replay:
    """Repeats the recorded `draws`; no generator advances. Any number of replays of the same draws may run at once."""

    __slots__ = ("draws", "clones", "drawn", "uses", "foreign_uses")

    def __init__(self, draws: Draws) -> None:
        self.draws = draws
        self.clones: dict[object, RandomStream] = {}
        self.drawn: dict[object, int] = {}
        self.uses = 0
        self.foreign_uses = 0

    @contextmanager
    def playing(self) -> Iterator[None]:
        """Repeat the recorded draws in the block. May be entered several times, and continues after the last draw."""
        token = _tape.set(self)
        try:
            yield
        finally:
            _tape.reset(token)

    def next_stream(self, generator: object, stream: RandomStream) -> RandomStream:
        """A clone in the state of the same draw in the recorded region; after the last recorded draw, the clone in its present state."""
        clone = self.clones.get(generator)
        if clone is None:
            clone = self.clones[generator] = stream.clone()
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


class Recording(NamedTuple):
    """A region that is being recorded, within another one or a replay."""

    draws: Draws
    outer: Recording | Replay | None


_tape: ContextVar[Recording | Replay | None] = ContextVar("aiograd_random_tape", default=None)


def tapes() -> tuple[list[Recording], Replay | None]:
    """The recordings that the running code is inside of, innermost first, up to the innermost replay, if there is one."""
    tape = _tape.get()
    recordings: list[Recording] = []
    while isinstance(tape, Recording):
        recordings.append(tape)
        tape = tape.outer
    return recordings, tape


def is_recording_or_replaying() -> bool:
    """True in a region that is recorded or recomputed."""
    return _tape.get() is not None


def is_replaying() -> bool:
    """True if the running code is computed for a second time, and repeats the draws of the first time."""
    return tapes()[1] is not None


def stream_now(generator: object, stream: RandomStream) -> RandomStream:
    """The stream for one draw from a generator, which holds its lock; a region that is being recorded notes its state.

    Args:
        generator: the generator, by which draws are recorded.
        stream: its own stream.
    """
    recordings, source = tapes()
    if source is not None:
        stream = source.next_stream(generator, stream)
    if recordings:
        state = stream.state()
        for recording in recordings:
            recording.draws.note(generator, state)
    return stream

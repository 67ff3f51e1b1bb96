"""RandomStream: bits of PCG64 and the seed that they come from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

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

    def clone(self) -> RandomStream:
        """Another stream in the same state."""
        clone = RandomStream(self.entropy, self.spawn_key)
        clone.go_to(self.state())
        return clone

    def spawn(self, count: int) -> list[RandomStream]:
        """Streams independent of this one and of each other, as numpy's SeedSequence spawns them."""
        first, self.spawned = self.spawned, self.spawned + count
        return [RandomStream(self.entropy, (*self.spawn_key, i)) for i in range(first, self.spawned)]

"""Handles of the hardware's driver besides blocks of its memory pool: events, and memory that another library owns."""

from __future__ import annotations

from typing import Any


class Foreign:
    """Memory of another library, which stays its own."""

    __slots__ = ("address", "size", "owner")

    def __init__(self, address: int, size: int, owner: Any) -> None:
        self.address = address
        self.size = size
        #: keeps the memory alive
        self.owner = owner


class EventHandle:
    """A place in a stream. When the object is collected, its handle is used for another."""

    __slots__ = ("handle", "timing", "done", "_spare")

    def __init__(self, handle: Any, timing: bool, spare: list[Any]) -> None:
        self.handle = handle
        self.timing = timing
        #: the device is known to have come to it
        self.done = False
        self._spare = spare

    def __del__(self) -> None:
        self._spare.append(self.handle)  # used again by the device's thread

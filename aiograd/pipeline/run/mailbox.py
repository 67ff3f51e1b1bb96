"""Mailbox: the values on their way to one rank, each put once and taken once."""

from __future__ import annotations

import asyncio
from typing import Any

from aiograd.errors import GraphError
from aiograd.pipeline.step.rank import Key


class Mailbox:
    """The values on their way to one rank."""

    __slots__ = ("_values", "_waiting", "_taken")

    def __init__(self) -> None:
        self._values: dict[Key, Any] = {}
        self._waiting: dict[Key, asyncio.Future[None]] = {}
        self._taken: set[Key] = set()

    def put(self, key: Key, value: Any) -> None:
        """Leave a value. One that has come before is the same again, from a rank that had to be run again, and is dropped."""
        if key in self._taken or key in self._values:
            return
        self._values[key] = value
        waiting = self._waiting.pop(key, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    def has(self, key: Key) -> bool:
        """True if a value has come that is not taken and not waited for."""
        return key in self._values and key not in self._waiting

    def take(self, key: Key) -> Any:
        """Take a value that has come."""
        self._taken.add(key)
        return self._values.pop(key)

    async def receive(self, key: Key) -> Any:
        """Wait for a value and take it. Cancelling leaves it there.

        Raises:
            GraphError: it has been taken, or another caller waits for it.
        """
        if key in self._taken or key in self._waiting:
            raise GraphError(f"{key[0]} of stage {key[1]}, microbatch {key[2]}, is received twice")
        while key not in self._values:
            self._waiting[key] = asyncio.get_running_loop().create_future()
            try:
                await self._waiting[key]
            finally:
                self._waiting.pop(key, None)
        return self.take(key)

    @property
    def values(self) -> dict[Key, Any]:
        """The values that have come and are not taken."""
        return dict(self._values)

    def waiting(self) -> list[tuple[asyncio.Future[None], Key]]:
        """The values that are waited for."""
        return [(future, key) for key, future in self._waiting.items()]

    def clear(self) -> None:
        """Let go of everything."""
        self._values.clear()

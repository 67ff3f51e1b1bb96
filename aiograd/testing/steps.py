"""The steps of a simulated loop: the queue that they come from, and the trace of the steps that ran."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import itertools
import struct
import weakref
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any

from aiograd.errors import ArgumentError
from aiograd.testing.owner import OWNER
from aiograd.testing.suspension import coroutine_name

_pack_time = struct.Struct("<d").pack


class StepTrace:
    """The number of steps so far, a hash of them, and callbacks between two of them."""

    def __init__(self) -> None:
        self.steps = 0
        self._hash = hashlib.blake2b(digest_size=16)
        #: of the tasks that have run, see `_label`
        self.labels: weakref.WeakKeyDictionary[asyncio.Task[Any], bytes] = weakref.WeakKeyDictionary()
        self._next_serial = itertools.count()
        self._interrupts: dict[int, list[Callable[[], object]]] = {}

    def digest(self) -> str:
        """The hash of every step so far and of its virtual time."""
        return self._hash.hexdigest()

    def at_step(self, step: int, callback: Callable[[], object]) -> None:
        """See `SimulatedLoop.at_step`."""
        if step <= self.steps:
            raise ArgumentError(f"at_step({step}): step {self.steps} has begun already; expected a later one")
        self._interrupts.setdefault(step, []).append(callback)

    def record(self, handle: asyncio.Handle, now: float) -> None:
        """Count the step of a handle, which runs next at the virtual time `now`."""
        self.steps += 1
        self._hash.update(_pack_time(now) + self._label(handle))
        if self._interrupts:
            for callback in self._interrupts.pop(self.steps, ()):
                callback()

    def _label(self, handle: asyncio.Handle) -> bytes:
        """A name for a step that holds no address and no process-wide counter, so that it is the same in every run."""
        callback: Any = handle._callback  # type: ignore[attr-defined]
        while isinstance(callback, functools.partial):
            callback = callback.func
        owner = getattr(callback, "__self__", None)
        if isinstance(owner, asyncio.Task):
            label = self.labels.get(owner)
            if label is None:
                label = self.labels[owner] = f"{next(self._next_serial)}:{coroutine_name(owner)}".encode()
            return label
        return str(getattr(callback, "__qualname__", type(callback).__qualname__)).encode()


class HandleQueue(deque[asyncio.Handle]):
    """The ready queue: calls `step` with each handle that is about to run, and pops in a drawn order if given draws."""

    def __init__(self, loop: asyncio.AbstractEventLoop, step: Callable[[asyncio.Handle], None], draws: Random | None) -> None:
        super().__init__()
        self._step = step
        self._draws = draws
        # popped in place of a handle that may not run: the loop skips handles that were cancelled
        self._nothing = asyncio.Handle(int, (), loop)
        self._nothing.cancel()

    def popleft(self) -> asyncio.Handle:
        if self._draws is None:
            handle = super().popleft()
        else:
            index = self._draws.randrange(len(self))
            handle = self[index]
            del self[index]
        if handle.cancelled():
            return handle
        owner = handle._context.get(OWNER)  # type: ignore[attr-defined]
        if owner is not None and owner.is_stopped:
            owner.take(handle)
            return self._nothing
        self._step(handle)
        return handle

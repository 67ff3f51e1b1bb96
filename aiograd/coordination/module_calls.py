"""ModuleCalls: calls of modules on the executor during a step; and BufferSnapshot, with which a step that is given up leaves no trace in buffers.

Note [Calls that outlast their step]
    A function that runs on after it was given up would change the module while the next step uses it. So the changes of a step are
    undone once the last of its calls has ended, and the next step waits for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from aiograd.engine.run import current_engine
from aiograd.tensors import inplace
from aiograd.tensors.core import counter_of


class ThreadCall:
    """A function on a thread of the executor, which may outlast the step that it belongs to.

    Args:
        function: called without arguments.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._has_begun = self._is_withdrawn = False
        #: the function has returned, or raised
        self.has_ended = False
        #: of a call that was withdrawn while it ran: done when it has ended
        self.ended: asyncio.Future[None] = self._loop.create_future()

    def __call__(self) -> Any:
        with self._lock:
            if self._is_withdrawn:
                return None
            self._has_begun = True
        try:
            return self._function()
        finally:
            with self._lock:
                self.has_ended = True
                is_awaited = self._is_withdrawn
            if is_awaited:
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def withdraw(self) -> bool:
        """Give the call up; returns True if it runs all the same, until `ended`."""
        with self._lock:
            self._is_withdrawn = True
            return self._has_begun and not self.has_ended


class ModuleCalls:
    """The calls of modules by the steps of one replica or of one member of a pipeline; see Note [Calls that outlast their step]."""

    def __init__(self) -> None:
        self._running: set[ThreadCall] = set()
        #: the running calls of each step that still has changes to undo
        self._lingering: list[set[ThreadCall]] = []
        self._changed: asyncio.Future[None] | None = None

    async def offload(self, function: Callable[[], Any]) -> Any:
        """Call a function on the executor. However it ends, `release` has to follow when its step is over and has changed something.

        Args:
            function: called without arguments.

        Returns:
            Its result. Cancelling stops waiting for it.
        """
        call = ThreadCall(function)
        self._running.add(call)
        try:
            return await current_engine().offload(call)
        finally:
            if call.has_ended:
                self._running.discard(call)

    def release(self, undo: Callable[[], None]) -> None:
        """The step is over: undo its changes, at once or when the last of its calls has ended.

        Args:
            undo: called once, on the loop.
        """
        running = {call for call in self._running if call.withdraw()}
        self._running.clear()
        if not running:
            undo()
            return
        self._lingering.append(running)
        for call in running:
            call.ended.add_done_callback(functools.partial(self._ended, running, call, undo))

    def _ended(self, running: set[ThreadCall], call: ThreadCall, undo: Callable[[], None], _: asyncio.Future[None]) -> None:
        running.discard(call)
        if running:
            return
        self._lingering.remove(running)
        undo()
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)

    async def settled(self) -> None:
        """Wait until no call of an earlier step runs on, and its changes are undone. Cancelling stops waiting."""
        while self._lingering:
            if self._changed is None or self._changed.done():
                self._changed = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._changed])


class BufferSnapshot:
    """The buffers of modules as they are now.

    Args:
        modules: those without buffers, and functions, are passed over.
    """

    def __init__(self, modules: Iterable[Any]) -> None:
        #: each with the module that has it and its name there
        self._held = [
            (each, name, tensor, tensor._data.copy())
            for module in modules
            if callable(getattr(module, "modules", None)) and callable(getattr(module, "named_buffers", None))
            for each in module.modules()
            for name, tensor in each.named_buffers(recurse=False)
        ]
        #: the buffers with their versions when they were to change no more; None: that has not come
        self._left: list[tuple[Any, int]] | None = None

    def seal(self) -> None:
        """They are as the step has left them: `restore` does not touch what changes from now on, such as a state that is loaded."""
        found = (getattr(each, name) for each, name, _, _ in self._held)
        self._left = [(tensor, counter_of(tensor)[0]) for tensor in found]

    def restore(self) -> None:
        """Put the buffers back. Buffers on the host that have not changed are not written, so graphs that have saved them stay usable."""
        for index, (each, name, tensor, values) in enumerate(self._held):
            found = getattr(each, name)
            if self._left is not None and (found is not self._left[index][0] or counter_of(found)[0] != self._left[index][1]):
                continue
            if found is not tensor:
                setattr(each, name, tensor)
            if tensor._data.__class__ is not np.ndarray or tensor._data.tobytes() != values.tobytes():
                inplace.write(tensor, values)

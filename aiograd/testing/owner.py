"""Owners of the handles of a simulated loop: all handles of one owner can be stopped, for good or for a while.

A simulated process is a `HandleOwner`: handles that are scheduled while the ContextVar `OWNER` names it belong to it, and so do the handles that
these schedule in turn, since every handle carries the context it was made in.

Note [Killed means no finally]
    A process that is killed runs nothing more. Cancelling its tasks would run their cleanup, which may send messages that a killed process
    never sends, so nothing is cancelled: its handles are taken out of the ready queue and never run. Its objects are kept alive until the
    loop is closed, because a task or coroutine that is garbage runs its ``finally`` too. Tasks are taken off asyncio's list, or the end of
    the run would wait for them. Once the loop is closed the coroutines are closed, where they have no effect any more: in
    silence, and their errors are dropped. (Their ``finally`` blocks do run then; a test that looks at the effects of a host must look before
    the end of the run.)

Note [Killed in the middle of a step]
    Python code that kills its own owner is unwound with `Killed`, a BaseException, up to the loop, which ignores it.

Rejected: cancelling the tasks of a killed process, as simloop does.
Source: Note [Killed means no finally] follows simloom; the ContextVar is what FoundationDB's simulator calls the current process.
"""

from __future__ import annotations

import asyncio
import contextvars
import sys
import warnings
import weakref
from collections.abc import Coroutine
from contextlib import suppress
from contextvars import ContextVar
from typing import Any

#: times that one coroutine may refuse to be closed
CLOSES = 100


class Killed(BaseException):
    """Unwinds code that killed the owner it belongs to."""


class HandleOwner:
    """An owner of handles, tasks and futures of a `SimulatedLoop`. Stopped and resumed by the loop's methods."""

    __slots__ = ("name", "is_dead", "is_stopped", "_held", "_tasks", "_futures", "_generators", "_buried")

    def __init__(self, name: str) -> None:
        self.name: str = name
        #: stopped for good
        self.is_dead: bool = False
        #: no handle of this owner may run, for good or for now
        self.is_stopped: bool = False
        self._held: list[asyncio.Handle] = []
        self._tasks: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()
        self._futures: weakref.WeakSet[asyncio.Future[Any]] = weakref.WeakSet()
        self._generators: weakref.WeakSet[Any] = weakref.WeakSet()
        # strong references to the objects of a dead owner, see Note [Killed means no finally]
        self._buried: list[Any] = []

    def __repr__(self) -> str:
        return f"<HandleOwner {self.name}{' dead' if self.is_dead else ' stopped' if self.is_stopped else ''}>"

    def adopt_task(self, task: asyncio.Task[Any]) -> None:
        """A task was made by this owner."""
        self._tasks.add(task)
        if self.is_dead:
            self._bury_task(task)

    def adopt_future(self, future: asyncio.Future[Any]) -> None:
        """A future was made by this owner."""
        self._futures.add(future)
        if self.is_dead:
            self._buried.append(future)

    def adopt_generator(self, generator: Any) -> None:
        """An asynchronous generator was started by this owner."""
        self._generators.add(generator)

    def owns(self, task: asyncio.Task[Any]) -> bool:
        """True if this owner made `task`."""
        return task in self._tasks

    def take(self, handle: asyncio.Handle) -> None:
        """Keep a handle that came up to be run while this owner was stopped."""
        (self._buried if self.is_dead else self._held).append(handle)

    def release(self) -> list[asyncio.Handle]:
        """Remove and return the callbacks that `take` kept while the owner was frozen, in order."""
        held, self._held = self._held, []
        return held

    def bury(self) -> list[Any]:
        """Keep everything alive and off asyncio's lists, see Note [Killed means no finally].

        Returns:
            The asynchronous generators that the loop must not close.
        """
        for task in list(self._tasks):
            self._bury_task(task)
        generators = list(self._generators)
        self._buried += [*self._futures, *generators, *self.release()]
        return generators

    def _bury_task(self, task: asyncio.Task[Any]) -> None:
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        asyncio.tasks._unregister_task(task)
        self._buried.append(task)

    def dispose(self) -> None:
        """Let go of the objects of a dead owner; called once the loop is closed."""
        buried, self._buried = self._buried, []
        hook = sys.unraisablehook
        sys.unraisablehook = _ignore
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for item in buried:
                    if isinstance(item, asyncio.Future):
                        item._log_traceback = False  # its owner is dead
                        waiter = getattr(item, "_fut_waiter", None)  # `gather` makes its future without asking the loop
                        if isinstance(waiter, asyncio.Future):
                            waiter._log_traceback = False
                    if isinstance(item, asyncio.Task):
                        coroutine: Any = item.get_coro()
                        contextvars.Context().run(_close, coroutine, self)
                buried.clear()
        finally:
            sys.unraisablehook = hook


#: the owner of the running code; None for the test itself
OWNER: ContextVar[HandleOwner | None] = ContextVar("aiograd_simulated_owner", default=None)


def bare_context() -> contextvars.Context:
    """An empty context of the current owner, as a new thread has."""
    return context_of(OWNER.get())


def context_of(owner: HandleOwner | None, base: contextvars.Context | None = None) -> contextvars.Context:
    """A copy of `base` (None: an empty context) that belongs to `owner`."""
    context = contextvars.Context() if base is None else base.copy()
    if context.get(OWNER) is not owner:
        context.run(OWNER.set, owner)
    return context


def _close(coroutine: Coroutine[Any, Any, Any], owner: HandleOwner) -> None:
    OWNER.set(owner)
    for _ in range(CLOSES):
        # its cleanup may fail, or wait for something
        with suppress(Exception, asyncio.CancelledError, GeneratorExit, Killed):
            coroutine.close()
            return


def _ignore(_: Any) -> None:
    """Ignore exceptions that Python reports while the objects of a dead owner are freed."""

"""Modes that other libraries keep by thread, such as torch's autocast: noted where a call is made, entered where its work runs.

aiograd's own modes belong to the context of a task (`aiograd.running.modes`) and travel to threads with it. The modes of a thread do
not: a bridge registers a function that notes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")

#: enters modes, for a block
Enter: TypeAlias = Callable[[], AbstractContextManager[Any]]

_notes: list[Callable[[], Enter | None]] = []
_noted: ContextVar[tuple[Enter, ...]] = ContextVar("aiograd_foreign_modes", default=())


def register(note: Callable[[], Enter | None]) -> None:
    """Ask a function for the modes of the running thread from now on.

    Args:
        note: returns a function that enters them in another thread; None where every thread begins with these modes.
    """
    if note not in _notes:
        _notes.append(note)


def noted() -> tuple[Enter, ...]:
    """The modes of the running thread.

    Returns:
        Functions that enter them; none where every thread begins with these modes.
    """
    return tuple([enter for note in _notes if (enter := note()) is not None])


@contextmanager
def noting() -> Iterator[None]:
    """A block; work of its task, and of tasks that begin in it, runs in the present modes of this thread where it is called with `within`."""
    token = _noted.set(noted()) if _notes else None
    try:
        yield
    finally:
        if token is not None:
            _noted.reset(token)


def within(function: Callable[[], T], modes: tuple[Enter, ...] | None = None) -> Callable[[], T]:
    """A function that runs in modes that were noted.

    Args:
        function: takes nothing.
        modes: the result of `noted`; None: the modes of the surrounding `noting` block.

    Returns:
        `function` itself where there is nothing to enter, else one that enters the modes and calls it.
    """
    entered = _noted.get() if modes is None else modes
    if not entered:
        return function

    def call() -> T:
        with ExitStack() as stack:
            for enter in entered:
                stack.enter_context(enter())
            return function()

    return call

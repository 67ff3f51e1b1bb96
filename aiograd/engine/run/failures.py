"""Preparing an exception before it leaves the engine."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Sequence
from types import FrameType

from aiograd.running.exceptions import text_of


def clear_frames(error: BaseException, package: str = "aiograd.engine.") -> None:
    """Clear the engine's frames in the traceback of an exception, so that it keeps only the user's frames alive.

    The engine's frames refer to the pass, which refers to the error: a cycle that would keep the graph until the garbage collector runs. A coroutine
    that has caught the error and awaits something before it goes on stands in the traceback, too, where the same exception was raised in several
    coroutines; its frame is left alone, since clearing it would end the coroutine (before Python 3.13).

    Args:
        package: prefix of the names of modules; their frames are cleared.
    """
    chain: list[BaseException] = [error]
    for link in chain:
        trace = link.__traceback__
        while trace is not None:
            if trace.tb_frame.f_globals.get("__name__", "").startswith(package) and _has_ended(trace.tb_frame):
                with contextlib.suppress(RuntimeError):  # still running
                    trace.tb_frame.clear()
            trace = trace.tb_next
        chain.extend(other for other in (link.__cause__, link.__context__) if other is not None and other not in chain)


def _has_ended(frame: FrameType) -> bool:
    return bool(gc.get_referents(frame))  # locals of a suspended frame belong to its coroutine, for the collector too


def mark_committed(error: BaseException) -> None:
    """Mark an exception as raised after the gradients had been committed."""
    try:
        error.committed = True  # type: ignore[attr-defined]
    except AttributeError:
        error.add_note("raised after the gradients had been committed")


def first_of(failed: Sequence[tuple[str, BaseException]], first: BaseException | None = None) -> BaseException:
    """The error to raise where several have failed side by side, with the others as notes.

    Args:
        failed: names and errors, at least one.
        first: the error to raise; None: the first.
    """
    error = failed[0][1] if first is None else first
    for name, other in failed:
        if other is not error:
            error.add_note(f"{name} has failed, too: {type(other).__name__}: {text_of(other)}")
    return error

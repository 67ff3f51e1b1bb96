"""RecordedCoroutine: a coroutine that is run while it is recorded, and asked at every suspension if it waits for something that a program repeats.

The coroutine runs in the task that awaits it, as it would by itself. Whenever it suspends, the chain of coroutines that it waits for is looked
through: if one of them belongs to a pass that the recorder knows, that pass waits. Anything else ends the recording, see `CallRecorder.waits`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

from aiograd.compiler.lines import described_line, is_of_package
from aiograd.compiler.recorded_calls import CallRecorder


class RecordedCoroutine:
    """Awaited in place of a coroutine.

    Args:
        coroutine: the coroutine of the recorded function.
        recorder: the recorder of the call.
    """

    def __init__(self, coroutine: Any, recorder: CallRecorder) -> None:
        self._coroutine = coroutine
        self._recorder = recorder

    def __await__(self) -> Generator[Any, Any, Any]:
        coroutine = self._coroutine
        error: BaseException | None = None
        while True:
            try:
                with self._recorder.watcher.watching():
                    waits_for = coroutine.send(None) if error is None else coroutine.throw(error)
            except StopIteration as stop:
                return stop.value
            error = self._refusal() if self._recorder.broken is None else None
            if error is not None:
                if hasattr(waits_for, "cancel"):
                    waits_for.cancel()
                    waits_for.add_done_callback(_look_at)
                continue
            try:
                yield waits_for
            except GeneratorExit:
                coroutine.close()
                raise
            except BaseException as raised:
                error = raised

    def _refusal(self) -> BaseException | None:
        """The error to raise where the coroutine waits now; None: it may."""
        frame = None
        for awaited in _chain(self._coroutine):
            code = getattr(awaited, "cr_code", None)
            if code is CallRecorder._awaited.__code__ or code is CallRecorder._as_rows.__code__:
                return None
            inner = getattr(awaited, "cr_frame", None)
            if inner is not None and not is_of_package(inner) and inner.f_globals.get("__name__", "").partition(".")[0] != "asyncio":
                frame = inner
        if frame is None:
            return None
        try:
            self._recorder.waits(*described_line(frame.f_code.co_filename, frame.f_lineno, frame.f_globals))
        except Exception as refusal:
            return refusal
        return None


def _look_at(future: Any) -> None:
    """Retrieve the error of a future that is no longer awaited, so that asyncio does not report it."""
    if not future.cancelled():
        future.exception()


def _chain(awaited: Any) -> Iterator[Any]:
    while awaited is not None:
        yield awaited
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)

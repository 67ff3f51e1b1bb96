"""The surroundings of a recorded call, and the modes in which programs run."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator

from aiograd.compiler.lines import described_line, is_of_package, quoted
from aiograd.compiler.recorded_results import ResultRecorder
from aiograd.errors import TraceError
from aiograd.running.modes import Mode, ModeScope


@contextlib.contextmanager
def recording_scope(recorder: ResultRecorder, name: str) -> Iterator[None]:
    """Context of a recorded call; endless recursion raises an error that names the line."""
    try:
        with ModeScope(trace=recorder):
            yield
    except RecursionError as error:
        places = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__) if not is_of_package(frame)]
        calls = [(frame, line) for frame, line in places if line != frame.f_code.co_firstlineno] or places  # others have not begun
        where = [described_line(frame.f_code.co_filename, line, frame.f_globals) for frame, line in calls[-1:]]
        line = "".join([f"{quoted(*each)} " for each in where])
        raise TraceError(f"{line}calls without end while the compiled function {name} is recorded: {error}. End the recursion.") from None
    finally:
        recorder.watcher.ends()


def runs_programs(mode: Mode) -> bool:
    """True if a program can do in this mode all that the operations would."""
    watched = mode.grad and (mode.anomaly is not None or mode.saved_hooks is not None)
    return mode.trace is None and not watched

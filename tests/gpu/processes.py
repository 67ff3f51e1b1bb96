"""Processes with a limit of time, so that one that crashes or hangs takes nothing along."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.gpu import progress

ROOT = Path(__file__).parents[2]
#: seconds that a process gets to say where each of its threads is, before it is killed
_LAST_WORDS = 5.0
#: processes that one test file may take before it is given up
_TRIES = 25
#: codes of pytest for runs that came to an end: all passed, some failed, none were left
_ENDED = (0, 1, 5)
_one_writes = threading.Lock()


@dataclass(slots=True)
class Ended:
    """How a process ended."""

    code: int
    timed_out: bool
    seconds: float
    text: str


@dataclass(slots=True)
class Tested:
    """The outcomes of a test file, or of a part of it."""

    name: str
    seconds: float = 0.0
    timed_out: bool = False
    #: test -> its outcome; ``crashed`` where the process ended in it
    outcomes: dict[str, str] = field(default_factory=dict)
    #: the end of what was printed, where no test ran
    broken: str = ""

    def count(self, outcome: str) -> int:
        """The number of tests with an outcome."""
        return sum(each == outcome for each in self.outcomes.values())

    @property
    def is_well(self) -> bool:
        """True if every test passed or was skipped, in time."""
        return not (self.timed_out or self.broken or self.count("failed") or self.count("crashed"))


def run(command: Sequence[str], seconds: float, tell: Callable[[str], None], environment: Mapping[str, str] | None = None) -> Ended:
    """Run a command in the folder of the project; `tell` gets its output, line by line as it comes.

    One that takes longer is aborted, upon which Python says where its threads are, and then killed with its children.
    """
    started = time.monotonic()
    process = subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", **(environment or {})}, text=True,
        encoding="utf-8", errors="replace", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    timed_out = threading.Event()

    def end() -> None:
        timed_out.set()
        process.send_signal(signal.SIGABRT)
        try:
            process.wait(_LAST_WORDS)
        except subprocess.TimeoutExpired:
            pass
        _kill_all(process)

    timer = threading.Timer(seconds, end)
    timer.start()
    lines: list[str] = []
    assert process.stdout is not None
    try:
        for line in process.stdout:
            lines.append(line)
            with _one_writes:
                tell(line)
        code = process.wait()
    finally:
        timer.cancel()
        _kill_all(process)
        process.stdout.close()
        timer.join()
    return Ended(code, timed_out.is_set(), time.monotonic() - started, "".join(lines))


def _kill_all(process: subprocess.Popen[str]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def test(path: Path, seconds: float, tell: Callable[[str], None], notes: Path, part: str = "0/1") -> Tested:
    """Run the tests of a file; tests left over by a crash run in another process.

    Args:
        path: the file.
        seconds: for all of them together; a single test may take half.
        tell: gets the output, line by line.
        notes: a file for the progress, see `tests.gpu.progress`; it is made anew.
        part: the part of the tests that is run.
    """
    notes.unlink(missing_ok=True)
    tested = Tested(path.stem if part == "0/1" else f"{path.stem} {part}")
    command = [
        sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), str(path), "-q", "--tb=short",
        "--no-summary", "-p", "tests.gpu.progress", "-p", "no:benchmark", "-p", "no:xdist", "-p", "no:cacheprovider",
        "-o", f"timeout={seconds / 2:.0f}", "-o", f"faulthandler_timeout={seconds * 0.6:.0f}",
    ]  # fmt: skip
    environment = {"AIOGRAD_GPU_PROGRESS": str(notes), "AIOGRAD_GPU_PART": part, "AIOGRAD_TEST_SECONDS": f"{seconds / 2:.0f}"}
    for _ in range(_TRIES):
        before = tested.count("crashed")
        ended = run(command, seconds - tested.seconds, tell, environment)
        tested.seconds += ended.seconds
        tested.timed_out = ended.timed_out
        tested.outcomes = {name: "crashed" if word == progress.STARTED else word for name, word in progress.read(notes).items()}
        if ended.timed_out or tested.count("crashed") == before:
            break
        tell(f"{tested.name}: the process ended with {ended.code} in a test\n")
    if not ended.timed_out and ended.code not in _ENDED and tested.count("crashed") == before:
        tested.broken = ended.text.strip()[-300:] or f"ended with {ended.code}"
    return tested

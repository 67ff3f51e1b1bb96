"""Runs a system for some seconds, undisturbed or under a fault, and gives back the lines that it wrote."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.injection import Fault, Process, send, victim
from tests.faults.systems import ROOT, System, environment

#: seconds until the first steps, and that processes have to end; seconds between two looks
START_SECONDS, STOP_SECONDS, LOOK = 120.0, 5.0, 0.02
#: steps before a run counts
WARM_UP = 10


class FailedRunError(Exception):
    """A system did not train; the text has the last lines of its output."""


@dataclass
class Run:
    """What a run left.

    Attributes:
        lines: of its processes.
        faults: when faults struck, seconds on the clock of the lines.
        began, ended: the time that counts.
        restarted: how often the supervisor started a process that ended without being struck.
        load: mean load of the machine in the last minute, at the end.
    """

    lines: list[dict[str, Any]] = field(default_factory=list)
    faults: list[float] = field(default_factory=list)
    began: float = 0.0
    ended: float = 0.0
    restarted: int = 0
    load: float = 0.0


class Supervisor:
    """Runs one system once.

    Args:
        system: the system.
        fault: that strikes it; None: it runs undisturbed.
        seconds: that count, from the first `WARM_UP` steps on.
        replicas: how many.
        work: seconds of sleep as the work of a replica in each step.
    """

    def __init__(self, system: System, fault: Fault | None, seconds: float, replicas: int, work: float) -> None:
        self._system, self._fault = system, fault
        self._seconds, self._replicas, self._work = seconds, replicas, work
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._struck: set[int] = set()
        self._stopped: list[tuple[float, int]] = []
        self._run = Run()

    def run(self) -> Run:
        """Run it.

        Raises:
            UnavailableError: it cannot be installed. FailedRunError: it does not train. PermissionError: signals to its processes are not permitted.
        """
        with tempfile.TemporaryDirectory() as folder, self._system.met() as meeting:
            path, log = Path(folder) / "lines", Path(folder) / "log"
            path.touch()
            with self._started(path, log, meeting):
                self._wait_for_steps(path, log)
                self._watch(path, log, meeting)
            self._run.lines = _read(path)
        self._run.load = os.getloadavg()[0]
        return self._run

    # ---- processes

    @contextlib.contextmanager
    def _started(self, path: Path, log: Path, meeting: str) -> Iterator[None]:
        try:
            for rank in range(self._replicas if self._system.has_ranks else 1):
                self._start(rank, path, log, meeting)
            yield
        finally:
            self._end()

    def _start(self, rank: int, path: Path, log: Path, meeting: str) -> None:
        arguments = ["--lines", str(path), "--rank", str(rank), "--meet", meeting, "--work", str(self._work)]
        if self._fault is not None and self._fault.name == "join" and not self._system.has_ranks:
            arguments += ["--join", str(self._seconds / 2)]
        with log.open("ab") as file:
            command = self._system.command(self._replicas, arguments)
            self._processes[rank] = subprocess.Popen(
                command, cwd=ROOT, env=environment(), stdout=file, stderr=file, stdin=subprocess.DEVNULL, start_new_session=True
            )

    def _end(self) -> None:
        for _, pid in self._stopped:
            send(pid, signal.SIGCONT)
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in self._processes.values():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
            until = time.monotonic() + STOP_SECONDS
            for process in self._processes.values():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, until - time.monotonic()))

    def _start_ended(self, path: Path, log: Path, meeting: str) -> None:
        """Start again what has ended, as the supervisor of a cluster does; count a process that no fault struck."""
        for rank, process in list(self._processes.items()):
            if process.poll() is None:
                continue
            if not self._system.has_ranks:
                raise FailedRunError(f"{self._system.name} ended with status {process.returncode}: {_tail(log)}")
            self._run.restarted += process.pid not in self._struck
            self._start(rank, path, log, meeting)

    # ---- time

    def _wait_for_steps(self, path: Path, log: Path) -> None:
        until = time.monotonic() + START_SECONDS
        while sum(line["kind"] == "step" for line in _read(path)) < WARM_UP * (self._replicas if self._system.has_ranks else 1):
            ended = [process for process in self._processes.values() if process.poll() is not None]
            if ended or time.monotonic() > until:
                raise FailedRunError(f"{self._system.name} took no {WARM_UP} steps: {_tail(log)}")
            time.sleep(10 * LOOK)

    def _watch(self, path: Path, log: Path, meeting: str) -> None:
        run, fault = self._run, self._fault
        run.began = time.monotonic()
        run.ended = run.began + self._seconds
        times = fault.times(run.began, run.ended) if fault is not None and fault.begins is not None else []
        joins_at = run.began + self._seconds / 2 if fault is not None and fault.name == "join" and self._system.has_ranks else float("inf")
        while (now := time.monotonic()) < run.ended:
            if times and now >= times[0]:
                times.pop(0)
                self._strike(path)
            if now >= joins_at:
                joins_at = float("inf")
                run.faults.append(now)
                self._start(self._replicas, path, log, meeting)
            self._continue(now)
            self._start_ended(path, log, meeting)
            time.sleep(LOOK)
        if fault is not None and fault.name == "join" and not self._system.has_ranks:
            run.faults += [line["t"] for line in _read(path) if line["kind"] == "joins"]

    def _strike(self, path: Path) -> None:
        fault = self._fault
        assert fault is not None and fault.begins is not None
        processes = [Process(line["who"], line["pid"]) for line in _read(path) if line["kind"] == "runs"]
        struck = victim(processes, len(self._run.faults))
        if struck is None:
            return
        self._struck.add(struck.pid)
        now = time.monotonic()
        if send(struck.pid, fault.begins):
            self._run.faults.append(now)
            if fault.ends is not None:
                self._stopped.append((now + fault.seconds, struck.pid))

    def _continue(self, now: float) -> None:
        """End the faults whose time is over."""
        fault = self._fault
        for over, pid in [each for each in self._stopped if each[0] <= now]:
            assert fault is not None and fault.ends is not None
            send(pid, fault.ends)
            self._stopped.remove((over, pid))


def _read(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file."""
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    return [json.loads(line) for line in whole.splitlines()]


def _tail(log: Path) -> str:
    said = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()] if log.exists() else []
    return " / ".join(said[-3:])[-500:] or "it printed nothing"

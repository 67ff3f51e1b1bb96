"""Runs a system for some seconds, undisturbed or under a fault, and gives back the lines that it wrote."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.injection import Fault, Process, send, victim
from tests.faults.systems import ROOT, Place, System, environment, free_port
from tests.namespaces import Hosts

#: seconds until the first steps, and that processes have to end; seconds between two looks
START_SECONDS, STOP_SECONDS, LOOK = 120.0, 5.0, 0.02
#: steps before a run counts
WARM_UP = 10
#: how often a replica may end before that
START_AGAIN = 3
#: in the place of a rank: the process where the replicas find each other
MEETING = -1


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
        are_apart: each replica has a host of its own, a network namespace.
    """

    def __init__(self, system: System, fault: Fault | None, seconds: float, replicas: int, work: float, are_apart: bool = False) -> None:
        self._system, self._fault = system, fault
        self._seconds, self._replicas, self._work = seconds, replicas, work
        self._hosts = Hosts() if are_apart else None
        self._secret = secrets.token_hex(32)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._struck: set[int] = set()
        #: faults that last: when each is over, and what ends it
        self._lasting: list[tuple[float, Callable[[], object]]] = []
        self._run = Run()

    def run(self) -> Run:
        """Run it.

        Raises:
            UnavailableError: it cannot be installed. FailedRunError: it does not train. PermissionError: signals to its processes are not permitted.
            OSError, subprocess.CalledProcessError: its hosts cannot be made.
        """
        with tempfile.TemporaryDirectory() as folder, self._opened_hosts() as here:
            self._path, self._logs = Path(folder) / "lines", Path(folder)
            self._path.touch()
            self._meet = f"{here}:{free_port(here)}"
            with self._started():
                self._wait_for_steps()
                self._watch()
            self._run.lines = _read(self._path)
        self._run.load = os.getloadavg()[0]
        return self._run

    # ---- processes

    @contextlib.contextmanager
    def _opened_hosts(self) -> Iterator[str]:
        """Make a host for each replica; the address of this process for them."""
        if self._hosts is None:
            yield "127.0.0.1"
            return
        try:
            for number in range(self._replicas):
                self._hosts.open(number)
            yield self._hosts.here
        finally:
            self._hosts.close()

    @contextlib.contextmanager
    def _started(self) -> Iterator[None]:
        try:
            for rank in (*([MEETING] if self._system.meeting else []), *range(self._replicas if self._system.has_ranks else 1)):
                self._start(rank)
            yield
        finally:
            self._end()

    def _start(self, rank: int) -> None:
        arguments = ["--lines", str(self._path), "--work", str(self._work)]
        if self._fault is not None and self._fault.name == "join" and not self._system.has_ranks:
            arguments += ["--join", str(self._seconds / 2)]
        is_apart = self._hosts is not None and rank != MEETING
        host = self._hosts.address(rank) if self._hosts and is_apart else self._meet.partition(":")[0]
        place = Place(self._system.python(), self._replicas, rank, host, self._meet, tuple(arguments))
        command = self._system.meeting if rank == MEETING else self._system.command
        assert command is not None
        words = [*(self._hosts.command(rank) if self._hosts and is_apart else []), *command(place)]
        variables = {**environment(), "AIOGRAD_SECRET": self._secret}
        with self._log(rank).open("ab") as file:
            self._processes[rank] = subprocess.Popen(
                words, cwd=ROOT, env=variables, stdout=file, stderr=file, stdin=subprocess.DEVNULL, start_new_session=True
            )

    def _log(self, rank: int) -> Path:
        """The output of one rank: lines of two processes in one file may mix."""
        return self._logs / f"log {rank}"

    def _end(self) -> None:
        for _, end in self._lasting:
            end()
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in self._processes.values():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
            until = time.monotonic() + STOP_SECONDS
            for process in self._processes.values():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, until - time.monotonic()))

    def _start_ended(self) -> None:
        """Start again what has ended, as the supervisor of a cluster does; count a process that no fault struck."""
        for rank, process in list(self._processes.items()):
            if process.poll() is None:
                continue
            if rank == MEETING or not self._system.has_ranks:
                raise FailedRunError(f"{self._system.name} ended with status {process.returncode}: {_tail(self._log(rank))}")
            self._run.restarted += process.pid not in self._struck
            self._start(rank)

    # ---- time

    def _wait_for_steps(self) -> None:
        until = time.monotonic() + START_SECONDS
        while sum(line["kind"] == "step" for line in _read(self._path)) < WARM_UP * (self._replicas if self._system.has_ranks else 1):
            if self._system.has_ranks:
                self._start_ended()
            ended = [rank for rank, process in self._processes.items() if process.poll() is not None]
            if ended or self._run.restarted > START_AGAIN * self._replicas or time.monotonic() > until:
                raise FailedRunError(f"{self._system.name} took no {WARM_UP} steps: {_tail(*map(self._log, ended or self._processes))}")
            time.sleep(10 * LOOK)
        self._run.restarted = 0

    def _watch(self) -> None:
        run, fault = self._run, self._fault
        run.began = time.monotonic()
        run.ended = run.began + self._seconds
        times = fault.times(run.began, run.ended) if fault is not None and fault.name != "join" else []
        joins_at = run.began + self._seconds / 2 if fault is not None and fault.name == "join" and self._system.has_ranks else float("inf")
        while (now := time.monotonic()) < run.ended:
            if times and now >= times[0]:
                times.pop(0)
                self._strike()
            if now >= joins_at:
                joins_at = float("inf")
                run.faults.append(now)
                self._start(self._replicas)
            for over in [each for each in self._lasting if each[0] <= now]:
                self._lasting.remove(over)
                over[1]()
            self._start_ended()
            time.sleep(LOOK)
        if fault is not None and fault.name == "join" and not self._system.has_ranks:
            run.faults += [line["t"] for line in _read(self._path) if line["kind"] == "joins"]

    def _strike(self) -> None:
        fault = self._fault
        assert fault is not None
        end = self._limit_link(fault.rate) if fault.rate is not None else self._signal(fault)
        if end is not None:
            struck = time.monotonic()  # what begins from now on meets the fault
            self._run.faults.append(struck)
            if fault.seconds:
                self._lasting.append((struck + fault.seconds, end))

    def _limit_link(self, rate: float) -> Callable[[], object]:
        """Slow or cut the link of the next replica; what ends that."""
        hosts, number = self._hosts, len(self._run.faults) % self._replicas
        assert hosts is not None
        hosts.limit(number, rate)
        return lambda: hosts.limit(number, None)

    def _signal(self, fault: Fault) -> Callable[[], object] | None:
        """Send the signal to the next process; what ends that, None if there is no process."""
        assert fault.begins is not None
        struck = victim([Process(line["who"], line["pid"]) for line in _read(self._path) if line["kind"] == "runs"], len(self._run.faults))
        if struck is None:
            return None
        self._struck.add(struck.pid)
        ends = fault.ends
        return (lambda: ends is not None and send(struck.pid, ends)) if send(struck.pid, fault.begins) else None


def _read(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file."""
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    return [json.loads(line) for line in whole.splitlines()]


def _tail(*logs: Path) -> str:
    """The last lines of the first of these logs that has any."""
    texts = [log.read_text(encoding="utf-8", errors="replace") for log in logs if log.exists()]
    said = next(filter(None, ([line.strip() for line in text.splitlines() if line.strip()] for text in texts)), [])
    return " / ".join(said[-3:])[-500:] or "it printed nothing"

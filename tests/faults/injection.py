"""Faults, and when they strike."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Process:
    """A process that takes part in training: its name in its system, and its number."""

    who: str
    pid: int


@dataclass(frozen=True)
class Fault:
    """A kind of fault.

    Attributes:
        name: of the kind.
        every: seconds between two of them.
        seconds: that one lasts; 0: for good.
        begins, ends: the signals that begin and end it; None: the script does it by itself.
        rate: bytes a second, each way, that the link of what it strikes carries meanwhile, 0: none; None: it strikes no link. Every process then has
            a network namespace of its own.
    """

    name: str
    every: float
    seconds: float = 0.0
    begins: signal.Signals | None = None
    ends: signal.Signals | None = None
    rate: float | None = None

    def times(self, began: float, ended: float) -> list[float]:
        """When it strikes in a run: the last leaves two thirds of the interval for what comes after it."""
        count = int((ended - began) / self.every + 1 / 3)
        return [began + self.every * (number + 1 / 3) for number in range(count)]


FAULTS = {
    fault.name: fault
    for fault in (
        Fault("kill", 15.0, begins=signal.SIGKILL),
        Fault("freeze", 15.0, 4.0, signal.SIGSTOP, signal.SIGCONT),
        Fault("blink", 15.0, 0.3, rate=0.0),
        Fault("cut", 15.0, 4.0, rate=0.0),
        Fault("slow", 15.0, 7.5, rate=1e6),
        Fault("join", 30.0),
    )
}


def is_running(pid: int) -> bool:
    """True if there is such a process, and it has not ended."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] not in {"Z", "X"}
    except OSError:
        return False


def victim(processes: Sequence[Process], number: int) -> Process | None:
    """The process that fault `number` strikes: the running ones in turn, by name; None where none runs."""
    running = sorted({each.who: each for each in processes if is_running(each.pid)}.values(), key=lambda each: each.who)
    return running[number % len(running)] if running else None


def send(pid: int, number: signal.Signals) -> bool:
    """Send a signal; False if there is no such process.

    Raises:
        PermissionError: signals to it are not permitted.
    """
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True

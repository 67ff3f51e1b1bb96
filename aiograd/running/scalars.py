"""Scalars that a program logs while it trains: ``ag.log("loss", value)``; for the dashboard, Prometheus, and files.

::

    with ag.scalars.CsvWriter("run.csv"), ag.scalars.TensorBoardWriter("runs/today"):
        for step, batch in enumerate(batches):
            ...
            ag.log("loss", loss, step)

A scalar is kept in memory with the process, at most `CAPACITY` values of all names together; the oldest are dropped.
"""

from __future__ import annotations

import csv
import itertools
import math
import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple, Self, overload

from aiograd.array_functions import elementwise
from aiograd.array_functions.conversion import ArrayLike
from aiograd.errors import ArgumentError, ArgumentTypeError
from aiograd.tensors.core import TensorCore
from aiograd.tensors.tensor import Tensor

#: values that are kept in memory, and names; a further name raises
CAPACITY, NAMES = 20_000, 1000
NAME_LENGTH = 200
_MISSING: Any = object()


class LoggedScalar(NamedTuple):
    """A value that was logged."""

    #: counts all values of the process from 1
    number: int
    #: the worker that logged it; None outside of a worker's calls and contexts
    worker: str | None
    name: str
    step: int
    value: float
    #: seconds since 1970
    time: float


class ScalarLog:
    """The values that were logged in one process. Safe to use from several threads."""

    def __init__(self) -> None:
        self._entries: deque[LoggedScalar] = deque(maxlen=CAPACITY)
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self.renew()
        self._sinks: list[Callable[[LoggedScalar], None]] = []
        #: the last value of each name on each worker
        self.latest: dict[tuple[str | None, str], LoggedScalar] = {}
        #: gives the name of the worker that runs the code, or None; set by the distributed part
        self.worker_name: Callable[[], str | None] = _no_worker

    def renew(self) -> None:
        """Draw the name of the process; a process that was forked is another one."""
        #: tells this process from others
        self.process = os.urandom(8).hex()

    def add(self, name: str, value: float, step: int | None) -> None:
        """Log a value; see `log`."""
        worker = self.worker_name()
        with self._lock:
            before = self.latest.get((worker, name))
            if before is None and len(self.latest) >= NAMES:
                raise ArgumentError(f"ag.log({name!r}, ...): {NAMES} names are logged already; put what varies into `step`, not into the name")
            if step is None:
                step = 0 if before is None else before.step + 1
            entry = LoggedScalar(next(self._numbers), worker, name, step, value, time.time())
            self._entries.append(entry)
            self.latest[worker, name] = entry
            sinks = tuple(self._sinks)
        for sink in sinks:
            sink(entry)

    def after(self, number: int, most: int, *workers: str | None) -> list[LoggedScalar]:
        """The latest values with higher numbers, at most so many, in order: values of these workers; None: values without a worker."""
        with self._lock:
            found = [entry for entry in self._entries if entry.number > number and entry.worker in workers]
        return found[-most:]

    def attach(self, sink: Callable[[LoggedScalar], None]) -> None:
        """Call `sink` with every value from now on."""
        with self._lock:
            self._sinks.append(sink)

    def detach(self, sink: Callable[[LoggedScalar], None]) -> None:
        """Call it no more."""
        with self._lock:
            self._sinks.remove(sink)


def _no_worker() -> None:
    return None


#: the log of this process
LOG = ScalarLog()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=LOG.renew)


@overload
def log(name: str, value: Any, step: int | None = None) -> None: ...


@overload
def log(name: ArrayLike, /) -> Tensor: ...


def log(name: Any, value: Any = _MISSING, step: int | None = None) -> Any:
    """Log a scalar, ``log("loss", value)``; or natural logarithms, ``log(x)``, where the first argument is no text.

    A logged scalar is shown on the dashboard and by Prometheus, and goes to every open `CsvWriter` and `TensorBoardWriter`.

    Args:
        name: 1 to 200 printable characters; or an array, of which natural logarithms are taken.
        value: a real number, or a Tensor or array of one element that has been computed.
        step: the number of the step; by default one more than the step of the last value of this name.

    Returns:
        None; or the logarithms, a Tensor of the shape of the array.

    Raises:
        ArgumentTypeError, ArgumentError: the name, value or step cannot be used, or there are too many names. NotReadyError: a Tensor is pending.
    """
    if not isinstance(name, str):
        if value is not _MISSING or step is not None:
            raise ArgumentTypeError(
                f"ag.log(name, value, step): the name is {type(name).__name__}; expected text. ag.log(x) takes logarithms of x alone"
            )
        return elementwise.log(name)
    if value is _MISSING:
        raise ArgumentTypeError(f"ag.log({name[:40]!r}): there is no value; expected ag.log(name, value)")
    if not 0 < len(name) <= NAME_LENGTH or not name.isprintable():
        raise ArgumentError(f"ag.log({name[:40]!r}, ...): expected a name of 1 to {NAME_LENGTH} printable characters")
    if step is not None and (isinstance(step, bool) or not hasattr(step, "__index__")):
        raise ArgumentTypeError(f"ag.log({name!r}, ..., step={step!r}): expected a whole number")
    LOG.add(name, _number(name, value), None if step is None else int(step))
    return None


def _number(name: str, value: Any) -> float:
    try:
        if isinstance(value, TensorCore) or hasattr(value, "item"):
            value = value.item()
        if isinstance(value, (str, bytes)):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise ArgumentTypeError(
            f"ag.log({name!r}, ...): expected a real number, or a Tensor of one element, found {type(value).__name__}"
        ) from None


class _Writer:
    """Writes logged scalars to a file while its ``with`` block lasts."""

    _file: IO[Any]
    _entered = False

    def __enter__(self) -> Self:
        if self._entered or self._file.closed:
            state = "is closed" if self._file.closed else "is in its with block"
            raise ArgumentError(f"{type(self).__name__}: this writer {state}, and a writer has one such block. Make another for the next one.")
        self._entered = True
        LOG.attach(self.write)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        LOG.detach(self.write)
        self.close()

    def write(self, entry: LoggedScalar) -> None:
        """Write one value."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the file. Idempotent."""
        raise NotImplementedError


class CsvWriter(_Writer):
    """Logged scalars as rows ``time, worker, name, step, value`` of a CSV file, while its ``with`` block lasts; each is on disk when `log` returns.

    Args:
        path: the file; rows are appended to one that exists.

    Raises:
        OSError: it cannot be written. ArgumentError: when entered a second time, or closed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = open(path, "a", newline="", encoding="utf-8")
        self._lock = threading.Lock()
        self._rows = csv.writer(self._file)
        if not self._file.tell():
            self._rows.writerow(("time", "worker", "name", "step", "value"))
            self._file.flush()

    def write(self, entry: LoggedScalar) -> None:
        with self._lock:
            self._rows.writerow((repr(entry.time), entry.worker or "", entry.name, entry.step, repr(entry.value)))
            self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoardWriter(_Writer):
    """Logged scalars in TensorBoard's event format, while its ``with`` block lasts: ``tensorboard --logdir runs`` shows them. Needs no TensorFlow.

    A file of records, each a protocol buffer ``Event``; scalars of a worker are named ``worker/name``. Source: TensorFlow's ``record_writer.h`` and
    ``event.proto``, ``summary.proto``.

    Args:
        folder: of this run; it is made, and gets one new file.

    Raises:
        OSError: the file cannot be written. ArgumentError: when entered a second time, or closed.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_files)}"
        self._file = open(Path(folder) / name, "xb")
        self._lock = threading.Lock()
        self._record(_double(1, time.time()) + _bytes(3, b"brain.Event:2"))

    def write(self, entry: LoggedScalar) -> None:
        name = entry.name if entry.worker is None else f"{entry.worker}/{entry.name}"
        number = min(max(entry.value, -3.4028234e38), 3.4028234e38) if math.isfinite(entry.value) else entry.value
        value = _bytes(1, name.encode()) + _varint(2 << 3 | 5) + struct.pack("<f", number)
        self._record(_double(1, entry.time) + _varint(2 << 3) + _varint(entry.step & 0xFFFF_FFFF_FFFF_FFFF) + _bytes(5, _bytes(1, value)))

    def close(self) -> None:
        self._file.close()

    def _record(self, data: bytes) -> None:
        length = struct.pack("<Q", len(data))
        with self._lock:
            self._file.write(length + _masked_crc(length) + data + _masked_crc(data))
            self._file.flush()


_files = itertools.count()


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _bytes(field: int, data: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(data)) + data


def _double(field: int, number: float) -> bytes:
    return _varint(field << 3 | 1) + struct.pack("<d", number)


def _crc_row(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    return byte


_CRC_ROWS = tuple(map(_crc_row, range(256)))


def _masked_crc(data: bytes) -> bytes:
    """The CRC-32C of a record, turned and shifted as the format wants it."""
    crc = 0xFFFF_FFFF
    for byte in data:
        crc = _CRC_ROWS[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFF_FFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFF_FFFF)

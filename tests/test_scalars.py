"""Logged scalars: what may be logged, and the files that hold them."""

from __future__ import annotations

import csv
import math
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.errors import ArgumentError, ArgumentTypeError
from aiograd.running import scalars
from aiograd.running.scalars import CsvWriter, LoggedScalar, ScalarLog, TensorBoardWriter, _masked_crc
from tests.support import assert_raises


@pytest.fixture(autouse=True)
def log(monkeypatch: pytest.MonkeyPatch) -> ScalarLog:
    made = ScalarLog()
    monkeypatch.setattr(scalars, "LOG", made)
    return made


def entries(log: ScalarLog) -> list[tuple[str, int, float]]:
    return [(entry.name, entry.step, entry.value) for entry in log.after(0, 1000, None)]


def test_numbers_arrays_and_tensors_are_logged_with_steps(log: ScalarLog) -> None:
    for value in (1, 2.5, np.float32(3), np.array([4.0]), ag.tensor(5.0, requires_grad=True), True):
        ag.log("loss", value)
    ag.log("loss", 7, step=100)
    ag.log("loss", 8)
    ag.log("other", float("inf"), np.int64(3))
    values = [("loss", 0, 1.0), ("loss", 1, 2.5), ("loss", 2, 3.0), ("loss", 3, 4.0), ("loss", 4, 5.0), ("loss", 5, 1.0), ("loss", 100, 7.0)]
    assert entries(log) == [*values, ("loss", 101, 8.0), ("other", 3, math.inf)]


def test_without_a_name_it_is_the_logarithm() -> None:
    np.testing.assert_allclose(ag.log(ag.tensor([1.0, math.e])).numpy(), [0.0, 1.0], rtol=1e-6)
    np.testing.assert_allclose(ag.log([1.0]).numpy(), [0.0])
    assert_raises(ArgumentTypeError, "takes logarithms", lambda: ag.log(ag.tensor([1.0]), 2))


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (("loss",), ArgumentTypeError, "no value"), (("", 1), ArgumentError, "1 to 200"), (("x" * 201, 1), ArgumentError, "1 to 200"),
        (("a\nb", 1), ArgumentError, "printable"), (("loss", "1"), ArgumentTypeError, "real number"), (("loss", 1j), ArgumentTypeError, "complex"),
        (("loss", None), ArgumentTypeError, "NoneType"), (("loss", np.ones(2)), ArgumentTypeError, "ndarray"),
        (("loss", 1, 1.5), ArgumentTypeError, "step"),
        (("loss", 1, True), ArgumentTypeError, "step"), (("loss", 10**400), ArgumentTypeError, "int"),
    ],
)  # fmt: skip
def test_what_cannot_be_logged(arguments: Any, error: type[Exception], text: str, log: ScalarLog) -> None:
    assert_raises(error, text, lambda: ag.log(*arguments))
    assert entries(log) == []


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch, log: ScalarLog) -> None:
    monkeypatch.setattr(scalars, "NAMES", 3)
    for number in range(3):
        ag.log(f"name {number}", number)
    assert_raises(ArgumentError, "3 names", ag.log, "one more", 1)
    ag.log("name 0", 1)
    assert log._entries.maxlen == scalars.CAPACITY


def test_threads_lose_nothing(log: ScalarLog) -> None:
    threads = [threading.Thread(target=lambda: [ag.log("loss", 1.0) for _ in range(200)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = log.after(0, 10_000, None)
    assert [entry.step for entry in found] == list(range(800)) and [entry.number for entry in found] == list(range(1, 801))


def test_csv(tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    for number in range(2):
        with CsvWriter(path):
            ag.log('a "quoted", name', number + 0.1)
        ag.log("not written", 1)
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["name"], row["step"], float(row["value"]), row["worker"]) for row in rows] == [
        ('a "quoted", name', "0", 0.1, ""), ('a "quoted", name', "1", 1.1, ""),
    ]  # fmt: skip


def records(data: bytes) -> Iterator[bytes]:
    """The records of an event file, their checksums checked by the polynomial itself."""
    while data:
        (length,) = struct.unpack_from("<Q", data)
        assert data[8:12] == _masked_crc(data[:8]) and data[12 + length : 16 + length] == _masked_crc(data[12 : 12 + length])
        yield data[12 : 12 + length]
        data = data[16 + length :]


def fields(data: bytes) -> dict[int, Any]:
    """A protocol buffer, as far as events need it."""
    found: dict[int, Any] = {}
    place = 0

    def varint() -> int:
        nonlocal place
        number = shift = 0
        while True:
            byte = data[place]
            place += 1
            number |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return number

    while place < len(data):
        key = varint()
        match key & 7:
            case 0:
                found[key >> 3] = varint()
            case 1:
                (found[key >> 3],) = struct.unpack_from("<d", data, place)
                place += 8
            case 5:
                (found[key >> 3],) = struct.unpack_from("<f", data, place)
                place += 4
            case _:
                length = varint()
                found[key >> 3] = data[place : place + length]
                place += length
    return found


def test_the_checksum_is_crc32c() -> None:
    """Of RFC 3720, B.4: 32 bytes of zeros give 8A9136AA, and the masked form is that of the record format."""
    (masked,) = struct.unpack("<I", _masked_crc(bytes(32)))
    turned = (masked - 0xA282EAD8) & 0xFFFF_FFFF
    assert (turned << 15 | turned >> 17) & 0xFFFF_FFFF == 0x8A9136AA


def test_tensorboard_event_files(tmp_path: Path, log: ScalarLog) -> None:
    with TensorBoardWriter(tmp_path / "run") as writer:
        ag.log("loss", 0.5, 300)
        ag.log("loss", float("nan"))
        writer.write(LoggedScalar(1, "left", "loss", 2**40, 1e300, 5.0))
    (path,) = (tmp_path / "run").iterdir()
    assert path.name.startswith("events.out.tfevents.")
    first, *events = map(fields, records(path.read_bytes()))
    assert first[3] == b"brain.Event:2"
    seen = [(event[2], fields(fields(event[5])[1])) for event in events]
    assert [(step, value[1]) for step, value in seen] == [(300, b"loss"), (301, b"loss"), (2**40, b"left/loss")]
    assert seen[0][1][2] == 0.5 and math.isnan(seen[1][1][2]) and seen[2][1][2] > 3e38


def test_a_closed_writer_writes_no_more(tmp_path: Path) -> None:
    with TensorBoardWriter(tmp_path) as writer:
        pass
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    ag.log("loss", 1)
    writer.close()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == size


@pytest.mark.parametrize("kind", [CsvWriter, TensorBoardWriter])
def test_a_writer_has_one_block(tmp_path: Path, kind: Any, log: ScalarLog) -> None:
    writer = kind(tmp_path / "logged")
    with writer:
        assert_raises(ArgumentError, "is in its with block", writer.__enter__)
        ag.log("loss", 1)
    assert_raises(ArgumentError, "is closed", writer.__enter__)
    unused = kind(tmp_path / "other")
    unused.close()
    assert_raises(ArgumentError, "is closed", unused.__enter__)
    ag.log("loss", 2)

"""Ledger: which pieces of a long run are done, in a file, so that the run goes on where it was stopped.

Note [A line for each piece]
    The file has a first line with the size of the run and the commit, and one line of JSON for each piece that is done, written and synced before
    the next. A process that is killed leaves at most one line without its end: it is cut off when the file is read, and its piece runs again.
    Numbers of a piece count once.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from aiograd.errors import ArgumentError

ROOT = Path(__file__).parents[2]
NOTHING: Mapping[str, int] = {}


class LineFile:
    """The pieces of one run, with a line for each that is done; see Note [A line for each piece]. A piece is a value that JSON has.

    Args:
        path: of the file; made, with its folder, if it is not there.
        head: the run, by name: values that JSON has.

    Attributes:
        path: the file.
        lines: dicts with the name ``piece``, in the order of the file.

    Raises:
        ArgumentError: the file has pieces of a run with another head, or a line in the midst of it is damaged.
    """

    def __init__(self, path: Path, head: Mapping[str, Any]) -> None:
        self.path = path
        self.lines: list[dict[str, Any]] = []
        self._done: set[str] = set()
        expected = json.loads(json.dumps(head))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = self._read()
        if lines:
            self._compare(json.loads(lines[0]), expected)
            for line in lines[1:]:
                self._add(json.loads(line))
        else:
            self._write(expected)

    def todo(self, pieces: Iterable[Any]) -> list[Any]:
        """The pieces that are not done, in their order."""
        return [piece for piece in pieces if json.dumps(piece) not in self._done]

    def add(self, line: dict[str, Any]) -> None:
        """The piece of a line is done; the line is on the disk when this returns. It is ignored if the piece is done already."""
        if json.dumps(line["piece"]) not in self._done:
            self._write(line)
            self._add(line)

    def _read(self) -> list[bytes]:
        """Whole lines; the file is cut behind them."""
        try:
            found = self.path.read_bytes()
        except FileNotFoundError:
            return []
        *lines, torn = found.split(b"\n")
        if torn:
            os.truncate(self.path, len(found) - len(torn))
        for number, line in enumerate(lines, 1):
            try:
                json.loads(line)
            except ValueError:
                raise ArgumentError(f"{self.path}: line {number} of {len(lines)} is damaged; remove the file to begin again") from None
        return lines

    def _write(self, line: Any) -> None:
        with self.path.open("ab") as file:
            file.write(json.dumps(line).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def _compare(self, found: Any, expected: dict[str, Any]) -> None:
        for name, value in expected.items():
            if found.get(name) != value:
                raise ArgumentError(f"{self.path} has pieces of a run whose {name} is {found.get(name)}, expected {value}; choose another folder")

    def _add(self, line: dict[str, Any]) -> None:
        self.lines.append(line)
        self._done.add(json.dumps(line["piece"]))


class Ledger(LineFile):
    """The pieces of one run of chaos, and what came of them.

    Args:
        folder: where ``pieces.jsonl`` lies; made if it is not there.
        size: how much of everything the whole run is, a value that JSON has.

    Attributes:
        commit: the commit that the file names.
        lines: for each piece that is done the arguments of `done`, in the order of the file.

    Raises:
        ArgumentError: the folder has pieces of a run of another size or of another commit, or a line in the midst of the file is damaged.
    """

    def __init__(self, folder: Path | str, size: Any) -> None:
        self.commit = current_commit()
        super().__init__(Path(folder) / "pieces.jsonl", {"size": size, "commit": self.commit})

    def done(
        self, piece: Any, *, runs: int, failures: Sequence[str] = (), virtual: float = 0.0, real: float = 0.0, coverage: Mapping[str, int] = NOTHING
    ) -> None:
        """A piece is done; it is on the disk when this returns. A piece that is done already is ignored.

        Args:
            piece: as it is among the pieces of `todo`.
            runs: the number of runs in it.
            failures: texts of what went wrong.
            virtual, real: seconds.
            coverage: counts under names.
        """
        self.add({"piece": piece, "runs": runs, "failures": [*failures], "virtual": virtual, "real": real, "coverage": {**coverage}})

    @property
    def runs(self) -> int:
        """The number of runs of the pieces that are done."""
        return sum(line["runs"] for line in self.lines)

    @property
    def failures(self) -> list[str]:
        """Texts of what went wrong, in the order of the file."""
        return [failure for line in self.lines for failure in line["failures"]]

    @property
    def coverage(self) -> Counter[str]:
        """Counts under names, of all pieces together."""
        found: Counter[str] = Counter()
        for line in self.lines:
            found.update(line["coverage"])
        return found

    @property
    def ratio(self) -> float:
        """Virtual seconds for one real second; 0 where there is none."""
        return ratio(self.lines)


def ratio(lines: Iterable[Mapping[str, Any]]) -> float:
    """Virtual seconds of some pieces for one real second; 0 where there is none."""
    virtual, real = map(sum, zip(*((line["virtual"], line["real"]) for line in lines), strict=True)) if lines else (0.0, 0.0)
    return virtual / real if real else 0.0


def current_commit() -> str:
    """The commit of the working tree, with a mark if it has changes; empty where git does not tell."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""

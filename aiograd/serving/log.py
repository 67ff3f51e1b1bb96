"""VersionLog: versions in a folder, over restarts and crashes.

Note [The folder]
    ``00000017.safetensors`` holds version 17, its digest and its metrics. ``manifest.json`` names the promoted version, the versions that were
    promoted before it, and the highest number ever given. Both are written beside the old file, flushed and put in place by one rename, the version
    before the manifest that names it: a version is in the log when the manifest is, and after a crash at any point the manifest names whole
    versions. Both carry a checksum. A damaged version is passed over for a whole one before it, or is a `VersionLogError`; a damaged manifest is
    a `VersionLogError`.

    ``lock`` is held by the server that uses the log, by ``flock``, which ends with its process.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from aiograd.errors import AiogradError, VersionLogError, VersionNotFoundError
from aiograd.running.caller import warn_caller
from aiograd.running.digest import state_digest
from aiograd.saving.serialization import flush_folder, load, load_metadata, replacing, save
from aiograd.serving.arguments import checked_count
from aiograd.serving.versions import Version
from aiograd.tensors.core import host_array

try:
    import fcntl
except ImportError:  # a system without it has no lock
    fcntl = None  # type: ignore[assignment]

FORMAT = 1
_NAME = re.compile(r"(\d{8,})\.safetensors")
#: files that a crash left unfinished
_UNFINISHED = re.compile(r"\.(\d{8,}\.safetensors|manifest\.json)\.[0-9a-f]{16}\.tmp")


class VersionLog:
    """Versions in a folder: one safetensors file each, and a manifest that names the promoted one.

    All methods block: a `Server` calls them on the executor. A version is durable when `append` returns.

    Args:
        folder: path of the folder, made if it is missing.
        keep: the number of versions that are kept, besides the promoted one.

    Raises:
        ArgumentError: `keep` is no number of versions.

    >>> log = ag.serving.VersionLog(folder)
    >>> async with ag.serving.Server(ag.nn.Linear(2, 1), log=log) as server:
    ...     version = await server.publish()
    >>> log.last().digest == version.digest
    True
    """

    def __init__(self, folder: str | os.PathLike[str], *, keep: int = 10) -> None:
        self.folder: Path = Path(folder)
        self.keep: int = checked_count("VersionLog(keep=)", keep)
        self._lock_file: int | None = None

    def __repr__(self) -> str:
        return f"VersionLog({str(self.folder)!r})"

    def numbers(self) -> list[int]:
        """List the versions in the folder.

        Returns:
            Their numbers, in ascending order.

        Raises:
            VersionLogError: the folder cannot be read.
        """
        with self._failing("list it"):
            return self._numbers()

    def _numbers(self) -> list[int]:
        names: list[str] = []
        with contextlib.suppress(FileNotFoundError):
            names = os.listdir(self.folder)
        return sorted(int(found[1]) for name in names if (found := _NAME.fullmatch(name)))

    @property
    def promoted(self) -> int | None:
        """The number of the promoted version; None if none was promoted yet."""
        served, _ = self._manifest()
        return served[-1] if served else None

    def load(self, number: int) -> Version:
        """Read a version.

        Args:
            number: of the version.

        Returns:
            The version, with number, digest, parent, metrics and time as they were written.

        Raises:
            VersionNotFoundError: the folder has none of that number. VersionLogError: its file is damaged, or cannot be read.
        """
        if number not in (numbers := self.numbers()):
            raise VersionNotFoundError(f"the log {self.folder} has no version {number!r}; it has {', '.join(map(str, numbers)) or 'none'}")
        path = self._path(number)
        try:
            return _read(path, number)
        except (AiogradError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise VersionLogError(f"the log {self.folder}: {path.name} is damaged or cannot be read: {error}") from error

    def last(self) -> Version | None:
        """The promoted version; if its file is damaged, with a warning, the newest whole one before it.

        Versions that were promoted before it stand in first, other finite ones only where none of these is whole.

        Returns:
            The version, or None if the log has no promoted version.

        Raises:
            VersionLogError: none of these is whole, or the manifest is damaged.
        """
        failures: list[Exception] = []
        served, _ = self._manifest()
        others = [number for number in reversed(self.numbers()) if served and number < served[-1] and number not in served]
        for number in (*reversed(served), *others):
            try:
                version = self.load(number)
            except (VersionLogError, VersionNotFoundError) as error:
                failures.append(error)
                continue
            if number not in served and not version.is_finite:
                continue
            if failures:
                past = "was promoted before" if number in served else "was not promoted before"
                warn_caller(f"version {number}, which {past}, is taken instead of the promoted one: {failures[0]}")
            return version
        if failures:
            raise VersionLogError(f"the log {self.folder} has no whole version up to the promoted one: {failures[0]}") from failures[0]
        return None

    def _manifest(self) -> tuple[list[int], int]:
        """The promoted versions, each after the one that served before it and the present one last, and the highest number ever given."""
        path = self.folder / "manifest.json"
        try:
            content = json.loads(path.read_bytes())
            if content["format"] != FORMAT:
                raise VersionLogError(f"the log {self.folder} has format {content['format']!r}, expected {FORMAT}; update aiograd, or check the file")
            served, highest = content["served"], content["highest"]
            if content != _content(served, highest):
                raise ValueError("its checksum differs")
            return served, highest
        except FileNotFoundError:
            return [], 0
        except VersionLogError:
            raise
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            hint = "Without this file a server begins with the weights of its model, and the numbers go on."
            raise VersionLogError(f"the log {self.folder}: manifest.json is damaged or cannot be read: {error}. {hint}") from error

    def append(self, version: Version, *, promote: bool = False, pinned: Iterable[int] = ()) -> None:
        """Write a version, and delete the versions beyond `keep`.

        Args:
            version: the version; its number is higher than all in the manifest.
            promote: True to promote it too.
            pinned: numbers of versions to keep besides the last ones and the promoted one.

        Raises:
            VersionLogError: it cannot be written, or the number was given already; the log is as it was.
        """
        number = version.number
        with self._writing(f"write version {number}"):
            served, highest = self._manifest()
            if number <= highest:
                raise VersionLogError(f"the log {self.folder}: version {number} was to be written, but numbers up to {highest} are taken")
            served = [*served, number] if promote else served
            numbers = self._numbers()
            kept = {*sorted({*numbers, number})[-self.keep :], *served[-1:], *pinned}
            try:
                self._save(version)
                self._write_manifest([each for each in served if each in kept], number)
            except BaseException:
                if self._manifest()[1] < number:
                    self._path(number).unlink(missing_ok=True)
                raise
            for each in set(numbers) - kept:
                with contextlib.suppress(OSError):  # it is deleted with a later version
                    self._path(each).unlink()

    def promote(self, number: int) -> None:
        """Name a version as the one to serve. Versions that were promoted after an earlier promotion of it are forgotten, as by a rollback.

        Args:
            number: of the version.

        Raises:
            VersionNotFoundError: the folder has none of that number. VersionLogError: the manifest cannot be written; it is as it was.
        """
        if number not in self.numbers():
            raise VersionNotFoundError(f"the log {self.folder} has no version {number!r} to promote")
        with self._writing(f"promote version {number}"):
            self._name(number)

    def _promote(self, version: Version) -> None:
        """As `promote`; a version that is not in the folder any more is written again."""
        with self._writing(f"promote version {version.number}"):
            if version.number not in self._numbers():
                self._save(version)
            self._name(version.number)

    def _name(self, number: int) -> None:
        served, highest = self._manifest()
        before = served[: served.index(number)] if number in served else served
        self._write_manifest([*before, number], max(number, highest))

    def _save(self, version: Version) -> None:
        facts = {name: getattr(version, name) for name in ("number", "digest", "parent", "created")}
        description = json.dumps({**facts, "metrics": dict(version.metrics), "paths": list(version.state)})
        save(version.state, self._path(version.number), {"version": description, "checksum": _checksum(description)})

    def _open(self) -> tuple[Version | None, int]:
        """Take the lock until `_close`, remove unfinished files of a crash, and read the `last` version and the highest number ever given.

        Raises a VersionLogError if the folder cannot be used, or another server uses it, or as `last`; the lock is free again.
        """
        with self._failing("open it"):
            self._lock_file = self._lock()
            try:
                flush_folder(self.folder.parent)
                for name in filter(_UNFINISHED.fullmatch, os.listdir(self.folder)):
                    (self.folder / name).unlink()
                return self.last(), self._highest()
            except BaseException:
                self._close()
                raise

    def _highest(self) -> int:
        """The highest number that was ever given; 0 before the first."""
        return max([self._manifest()[1], *self._numbers()])

    def _close(self) -> None:
        """Release the lock. Idempotent."""
        if self._lock_file is not None:
            os.close(self._lock_file)
            self._lock_file = None

    def _lock(self) -> int:
        self.folder.mkdir(parents=True, exist_ok=True)
        file = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException as error:
            os.close(file)
            if isinstance(error, BlockingIOError):
                raise VersionLogError(f"the log {self.folder} is in use by another server; give each server a folder of its own") from error
            raise
        return file

    @contextlib.contextmanager
    def _writing(self, what: str) -> Iterator[None]:
        """Hold the lock, for this one change if the log is not open."""
        with self._failing(what), contextlib.ExitStack() as stack:
            if self._lock_file is None:
                stack.callback(os.close, self._lock())
            yield

    @contextlib.contextmanager
    def _failing(self, what: str) -> Iterator[None]:
        try:
            yield
        except AiogradError:
            raise
        except OSError as error:
            raise VersionLogError(f"the log {self.folder}: cannot {what}: {error}") from error

    def _write_manifest(self, served: list[int], highest: int) -> None:
        with replacing(self.folder / "manifest.json") as beside, open(beside, "x", encoding="utf-8") as file:
            file.write(json.dumps(_content(served, highest)))

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:08}.safetensors"


def _read(path: Path, number: int) -> Version:
    metadata, tensors = load_metadata(path), load(path)
    if metadata["checksum"] != _checksum(metadata["version"]):
        raise ValueError("its description has another checksum than was written")
    facts = json.loads(metadata["version"])
    state = {name: host_array(tensors[name]) for name in facts.pop("paths")}
    if facts["number"] != number or state_digest(state) != facts["digest"]:
        raise ValueError("its contents have another digest than was written")
    return Version.of(state=state, **facts)


def _content(served: list[int], highest: int) -> dict[str, Any]:
    """The JSON of a manifest, with its checksum."""
    content = {"format": FORMAT, "served": served, "highest": highest}
    return {**content, "checksum": _checksum(json.dumps(content))}


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()

"""VersionLog: versions in a folder, over restarts and crashes.

Note [The folder]
    ``00000017.safetensors`` holds version 17, its digest and its metrics. ``manifest.json`` names the promoted version, the versions that have been
    promoted, and the highest number ever given. Both are written beside the old file, flushed and put in place by one rename, the version
    before the manifest that names it; so after a crash at any point the manifest names a whole version. A file is compared with its digest
    when it is read: a damaged one is passed over for the one promoted before it, or is a `VersionLogError`, and is never served.

    ``lock`` is held by the server that uses the log, by ``flock``, which ends with its process.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from aiograd.errors import AiogradError, ArgumentError, VersionLogError, VersionNotFoundError
from aiograd.running.digest import state_digest
from aiograd.saving.serialization import flush_folder, load, load_metadata, save
from aiograd.serving.versions import Version
from aiograd.tensors.core import host_array

try:
    import fcntl
except ImportError:  # a system without it has no lock
    fcntl = None  # type: ignore[assignment]

FORMAT = 1
_NAME = re.compile(r"(\d{8,})\.safetensors")


class _Manifest(NamedTuple):
    """The contents of ``manifest.json``."""

    promoted: int | None
    #: numbers that have been promoted, the last one last
    served: tuple[int, ...]
    highest: int


class VersionLog:
    """Versions in a folder: one safetensors file each, and a manifest that names the promoted one.

    All methods block: a `Server` calls them on the executor. A version is durable when `append` returns.

    Args:
        folder: path of the folder, made if it is missing.
        keep: the number of versions that are kept, besides the promoted one.

    >>> log = ag.serving.VersionLog(folder)
    >>> async with ag.serving.Server(ag.nn.Linear(2, 1), log=log) as server:
    ...     version = await server.publish()
    >>> log.last().digest == version.digest
    True
    """

    def __init__(self, folder: str | os.PathLike[str], *, keep: int = 10) -> None:
        if type(keep) is not int or keep < 1:
            raise ArgumentError(f"VersionLog(keep={keep!r}): expected an int of at least 1")
        self.folder = Path(folder)
        self.keep = keep
        self._lock_file: int | None = None

    def __repr__(self) -> str:
        return f"VersionLog({str(self.folder)!r})"

    # ---------------------------------------------------------------- reading

    def numbers(self) -> list[int]:
        """The numbers of the versions in the folder, in ascending order."""
        if not self.folder.is_dir():
            return []
        return sorted(int(found[1]) for name in os.listdir(self.folder) if (found := _NAME.fullmatch(name)))

    @property
    def promoted(self) -> int | None:
        """The number of the promoted version; None if none was promoted yet."""
        return self._manifest().promoted

    @property
    def highest(self) -> int:
        """The highest number that was ever given; 0 before the first."""
        return max([self._manifest().highest, *self.numbers()])

    def load(self, number: int) -> Version:
        """Read a version.

        Raises:
            VersionNotFoundError: the folder has none of that number. VersionLogError: its file is damaged, or cannot be read.
        """
        path = self._path(number)
        try:
            facts = json.loads(load_metadata(path)["version"])
            tensors = load(path)
            state = {name: host_array(tensors[name]) for name in facts["paths"]}
            metrics, created = facts["metrics"], facts["created"]
            found = Version.of(number, state, digest=facts["digest"], parent=facts["parent"], metrics=metrics, created=created)
        except FileNotFoundError:
            numbers = ", ".join(map(str, self.numbers())) or "none"
            raise VersionNotFoundError(f"the log {self.folder} has no version {number}; it has {numbers}") from None
        except (AiogradError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise VersionLogError(f"the log {self.folder}: {path.name} cannot be read: {error}") from error
        if facts["number"] != number or state_digest(state) != found.digest:
            raise VersionLogError(f"the log {self.folder}: {path.name} is damaged: its contents have another digest than was written")
        return found

    def last(self) -> Version | None:
        """The promoted version; if its file is damaged the one promoted before it, or the newest whole one before it.

        Returns:
            The version, or None if the log has no promoted version.

        Raises:
            VersionLogError: no version in question is whole.
        """
        manifest = self._manifest()
        if manifest.promoted is None:
            return None
        earlier = [number for number in reversed(self.numbers()) if number < manifest.promoted]
        served = [number for number in reversed(manifest.served) if number in earlier]
        failure: Exception | None = None
        for number in dict.fromkeys((manifest.promoted, *served, *earlier)):
            try:
                version = self.load(number)
            except (VersionLogError, VersionNotFoundError) as error:
                failure = failure or error
            else:
                if version.is_finite:
                    return version
        raise VersionLogError(f"the log {self.folder} has no whole version up to the promoted one, {manifest.promoted}: {failure}") from failure

    def _manifest(self) -> _Manifest:
        path = self.folder / "manifest.json"
        try:
            content: Mapping[str, Any] = json.loads(path.read_bytes())
            if content["format"] != FORMAT:
                raise VersionLogError(f"the log {self.folder} has format {content['format']}, expected {FORMAT}; update aiograd")
            promoted, highest, served = content["promoted"], content["highest"], content["served"]
            if not all(type(number) is int for number in (highest, *served, *([] if promoted is None else [promoted]))):
                raise ValueError("a number in it is none")
        except FileNotFoundError:
            return _Manifest(None, (), 0)
        except VersionLogError:
            raise
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise VersionLogError(f"the log {self.folder}: manifest.json cannot be read: {error}") from error
        return _Manifest(promoted, tuple(served), highest)

    # ---------------------------------------------------------------- writing

    def append(self, version: Version, *, promote: bool = False) -> None:
        """Write a version, and delete the versions beyond `keep`.

        Args:
            version: the version; its number is higher than any in the log.
            promote: True to promote it too.

        Raises:
            VersionLogError: it cannot be written, or the number was given already; the log is as it was.
        """
        with self._writing(f"write version {version.number}"):
            manifest, highest = self._manifest(), self.highest
            if version.number <= highest:
                raise VersionLogError(f"the log {self.folder}: version {version.number} was to be written, but numbers up to {highest} are taken")
            facts = {
                "number": version.number,
                "digest": version.digest,
                "parent": version.parent,
                "metrics": dict(version.metrics),
                "created": version.created,
                "paths": list(version.state),
            }
            path = self._path(version.number)
            try:
                save(version.state, path, {"version": json.dumps(facts)})
                served = (*manifest.served, version.number) if promote else manifest.served
                self._write_manifest(_Manifest(version.number if promote else manifest.promoted, served, version.number))
            except BaseException:
                path.unlink(missing_ok=True)
                raise
            self._drop_old()

    def promote(self, number: int) -> None:
        """Name a version as the one to serve.

        Raises:
            VersionNotFoundError: the folder has none of that number. VersionLogError: the manifest cannot be written; it is as it was.
        """
        if number not in self.numbers():
            raise VersionNotFoundError(f"the log {self.folder} has no version {number} to promote")
        with self._writing(f"promote version {number}"):
            manifest = self._manifest()
            self._write_manifest(manifest._replace(promoted=number, served=(*manifest.served, number)))

    def open(self) -> Version | None:
        """Take the lock until `close`, remove unfinished files of a crash, and read the `last` version."""
        with self._failing("open it"):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock_file = self._lock()
            for name in os.listdir(self.folder):
                if name.startswith(".") and name.endswith(".tmp"):
                    (self.folder / name).unlink()
        return self.last()

    def close(self) -> None:
        """Release the lock. Idempotent."""
        if self._lock_file is not None:
            os.close(self._lock_file)
            self._lock_file = None

    def _lock(self) -> int:
        file = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(file)
            raise VersionLogError(f"the log {self.folder} is in use by another server; give each server a folder of its own") from error
        return file

    @contextlib.contextmanager
    def _writing(self, what: str) -> Iterator[None]:
        """Hold the lock, for this one change if the log is not open."""
        with self._failing(what):
            self.folder.mkdir(parents=True, exist_ok=True)
            file = self._lock() if self._lock_file is None else None
            try:
                yield
            finally:
                if file is not None:
                    os.close(file)

    @contextlib.contextmanager
    def _failing(self, what: str) -> Iterator[None]:
        try:
            yield
        except AiogradError:
            raise
        except OSError as error:
            raise VersionLogError(f"the log {self.folder}: cannot {what}: {error}") from error

    def _write_manifest(self, manifest: _Manifest) -> None:
        kept = {*self.numbers(), manifest.promoted}
        served = [number for n, number in enumerate(manifest.served) if number in kept and number not in manifest.served[n + 1 :]]
        content = json.dumps({"format": FORMAT, "promoted": manifest.promoted, "served": served, "highest": manifest.highest})
        beside = self.folder / f".manifest.{secrets.token_hex(8)}.tmp"
        try:
            with open(beside, "x", encoding="utf-8") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, self.folder / "manifest.json")
        finally:
            beside.unlink(missing_ok=True)
        flush_folder(self.folder)

    def _drop_old(self) -> None:
        numbers, promoted = self.numbers(), self._manifest().promoted
        for number in numbers[: -self.keep]:
            if number != promoted:
                self._path(number).unlink(missing_ok=True)

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:08}.safetensors"


"""CodeCache: machine code that was made before, in memory and in a private directory that processes share.

Note [Trusted files]
    Machine code is run as it is, so only this user may have written it: the directory is the one that `aiograd.kernels.cache` makes and checks,
    and an entry is a file of this user's own. A hash over key and code finds entries that are cut off, damaged or another key's; they are compiled
    anew. The key is a hash of everything that the code depends on, and an entry is put in its place by one rename, so processes may read and write
    at the same time.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from aiograd.compiler.native.machine import object_code, target_name
from aiograd.kernels.cache import private_directory

#: of the way from a text to machine code; another one makes every entry a stranger
VERSION = 1
#: bytes of code that one process keeps, and that the directory keeps
MOST_IN_MEMORY = 1 << 25
MOST_ON_DISK = 1 << 28
#: one of so many new entries, by its key, has the directory looked through for too much: 25,000 entries take 0.2 s
TRIMMING = 32
_MAGIC = b"aiograd native code\n"
_HASH_BYTES = hashlib.sha256().digest_size


class CodeCache:
    """Object code by the text that it is made from.

    Args:
        directory: gives the directory, or None where there is none to be trusted; asked at every look.
        compiled: makes the code of a text.
        target: names the machine that code is made for.
    """

    def __init__(
        self,
        directory: Callable[[], Path | None] = lambda: private_directory() and private_directory("kernels/native"),
        compiled: Callable[[str], bytes] = object_code,
        target: Callable[[], str] = target_name,
    ) -> None:
        self._directory = directory
        self._compiled = compiled
        self._target = target
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, bytes] = OrderedDict()
        self._kept_bytes = 0

    def code_of(self, text: str) -> tuple[bytes, bool]:
        """The object code of a text, and True if it was there already.

        Args:
            text: of LLVM.
        """
        key = hashlib.sha256("\n".join((str(VERSION), self._target(), np.__version__, text)).encode()).digest()
        with self._lock:
            code = self._kept.get(key)
            if code is not None:
                self._kept.move_to_end(key)
                return code, True
            directory = self._directory()
            code = None if directory is None else _read(directory / key.hex(), key)
            was_there = code is not None
            if code is None:
                code = self._compiled(text)
                if directory is not None:
                    _write(directory, key, code)
            self._keep(key, code)
            return code, was_there

    def _keep(self, key: bytes, code: bytes) -> None:
        self._kept[key] = code
        self._kept_bytes += len(code)
        while self._kept_bytes > MOST_IN_MEMORY and len(self._kept) > 1:
            self._kept_bytes -= len(self._kept.popitem(last=False)[1])

    def unlock(self) -> None:
        """Take the lock from a thread that a forked child does not have."""
        self._lock = threading.Lock()


def _hash_of(key: bytes, code: bytes) -> bytes:
    return hashlib.sha256(_MAGIC + key + code).digest()


def _read(path: Path, key: bytes) -> bytes | None:
    """The code of an entry; None if there is none, or none that is right."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode) or state.st_uid != os.geteuid() or state.st_mode & 0o022 or state.st_size > MOST_ON_DISK:
            return None
        with open(descriptor, "rb", closefd=False) as file:
            content = file.read()
        os.utime(descriptor)  # the ones used last are kept
    except OSError:
        return None
    finally:
        os.close(descriptor)
    begin = len(_MAGIC) + _HASH_BYTES
    code = content[begin:]
    return code if content[:begin] == _MAGIC + _hash_of(key, code) else None


def _write(directory: Path, key: bytes, code: bytes) -> None:
    """Add an entry, and now and then remove the ones used longest ago where there is too much. Where that fails the next process compiles."""
    temporary = ""
    try:
        descriptor, temporary = tempfile.mkstemp(prefix="new-", dir=directory)  # mode 0600
        with open(descriptor, "wb") as file:
            file.write(_MAGIC + _hash_of(key, code) + code)
        os.replace(temporary, directory / key.hex())
        if not key[0] % TRIMMING:
            _trim(directory)
    except OSError:
        if temporary:
            Path(temporary).unlink(missing_ok=True)


def _trim(directory: Path) -> None:
    entries = sorted(_entries(directory), reverse=True)
    total = 0
    for _, size, path in entries:
        total += size
        if total > MOST_ON_DISK:
            path.unlink(missing_ok=True)


def _entries(directory: Path) -> Iterator[tuple[int, int, Path]]:
    for path in directory.iterdir():
        try:
            state = path.lstat()
        except FileNotFoundError:  # another process has removed it
            continue
        if stat.S_ISREG(state.st_mode):
            yield state.st_mtime_ns, state.st_size, path


code_cache = CodeCache()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=code_cache.unlock)

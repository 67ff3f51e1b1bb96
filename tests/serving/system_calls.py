"""System calls that fail: the n-th call with which a log or `ag.save` changes a folder raises, and so do all later ones after a crash."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import aiograd.saving.serialization
import aiograd.serving.log


class Crash(BaseException):
    """The end of the process: clean-up code changes nothing any more."""


class FailingCalls:
    """Counts the calls and fails some of them.

    Args:
        first: number of the first call that fails, counted from 1; 0 for none.
        count: how many fail from there on.
        error: makes the exception.
    """

    def __init__(self, first: int = 0, count: int = 1 << 30, error: Callable[[], BaseException] = Crash) -> None:
        self.first, self.count, self.error = first, count, error
        #: names of the calls so far
        self.calls: list[str] = []

    def check(self, name: str) -> None:
        self.calls.append(name)
        if self.first and self.first <= len(self.calls) < self.first + self.count:
            raise self.error()

    def _wrapped(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.check(name)
            return function(*args, **kwargs)

        return call

    def _opened(self, path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        self.check("open")
        file = open(path, mode, *args, **kwargs)
        if "x" in mode and "b" not in mode:
            file.write = self._half_written(file.write, file.flush)
        return file

    def _half_written(self, write: Callable[[Any], Any], flush: Callable[[], Any]) -> Callable[[Any], None]:
        def write_halves(data: Any) -> None:
            self.check("write")
            write(data[: len(data) // 2])
            flush()
            self.check("write")
            write(data[len(data) // 2 :])

        return write_halves

    def _save_file(self, save_file: Callable[..., Any]) -> Callable[..., Any]:
        def save(arrays: Any, path: Path, notes: Any) -> None:
            self.check("write")
            save_file(arrays, path, notes)
            whole = path.read_bytes()
            path.write_bytes(whole[: len(whole) // 2])
            self.check("write")
            path.write_bytes(whole)

        return save

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Count and fail within the block."""
        with contextlib.ExitStack() as stack:
            for name in ("open", "replace", "fsync", "unlink", "mkdir", "chmod", "listdir"):
                stack.enter_context(mock.patch.object(os, name, self._wrapped(name, getattr(os, name))))
            stack.enter_context(mock.patch.object(fcntl, "flock", self._wrapped("flock", fcntl.flock)))
            for module in (aiograd.saving.serialization, aiograd.serving.log):
                stack.enter_context(mock.patch.object(module, "open", self._opened, create=True))
            save_file = self._save_file(aiograd.saving.serialization.save_file)
            stack.enter_context(mock.patch.object(aiograd.saving.serialization, "save_file", save_file))
            yield


def count_calls(action: Callable[[], Any]) -> list[str]:
    """The calls of an action that succeeds."""
    calls = FailingCalls()
    with calls.installed():
        action()
    return calls.calls

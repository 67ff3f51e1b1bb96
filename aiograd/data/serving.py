"""``python -m aiograd.data.serving module:object``: a process of a `ProcessSource`, which reads indices and writes examples."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any, BinaryIO

from aiograd.data.frames import HEADER, INDEX_SIZE, SHOWN, VALUE, index_of, packed
from aiograd.running.exceptions import text_of


def main() -> None:
    """Serve until the other side is gone."""
    requests = os.fdopen(os.dup(0), "rb", buffering=0)
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # texts that the source prints must not get among the answers
    module, _, name = sys.argv[1].partition(":")
    try:
        source: Any = getattr(importlib.import_module(module), name)
        if not hasattr(source, "__getitem__"):
            source = source()
        _write(answers, VALUE, packed(len(source)))
    except Exception as error:
        _write(answers, SHOWN, f"{type(error).__name__}: {text_of(error)}".encode())
        return
    while len(frame := _exactly(requests, INDEX_SIZE)) == INDEX_SIZE:
        try:
            status, content = VALUE, packed(source[index_of(frame)])
        except Exception as error:
            status, content = SHOWN, f"{type(error).__name__}: {text_of(error)}".encode()
        _write(answers, status, content)


def _exactly(stream: BinaryIO, count: int) -> bytes:
    found = b""
    while len(found) < count and (more := stream.read(count - len(found))):
        found += more
    return found


def _write(stream: BinaryIO, status: int, content: bytes) -> None:
    rest = memoryview(HEADER.pack(status, len(content)) + content)
    while rest:
        rest = rest[stream.write(rest) :]


if __name__ == "__main__":
    main()

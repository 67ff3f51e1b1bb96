"""Links that do not encrypt, so that the checksum of frames has to do what the seal of records does otherwise: tell what was altered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

from aiograd.distributed.cipher import Open, Seal
from aiograd.distributed.driver import endpoint
from aiograd.distributed.transport import Buffer


@contextmanager
def plain_links() -> Iterator[None]:
    """In this block frames travel in the clear, and have a checksum; handshakes are as ever."""
    as_they_are = SimpleNamespace(replace=lambda safeguards, **_: safeguards)  # else endpoints switch the checksum off
    with (
        mock.patch.object(Seal, "seal", _seal),
        mock.patch.object(Open, "open", _open),
        mock.patch.object(endpoint, "dataclasses", as_they_are),
    ):
        yield


def _seal(self: Seal, parts: Sequence[Buffer]) -> bytes:
    return b"".join(parts)


def _open(self: Open, record: Buffer) -> Buffer:
    return bytes(record)

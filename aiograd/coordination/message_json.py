"""Messages as JSON, where they go in an array of bytes. Pure."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from aiograd.coordination.malformed import malformed
from aiograd.coordination.message_form import M, WireMessage, encode, parse
from aiograd.errors import ArgumentError


def to_json(message: WireMessage) -> bytes:
    """A message as JSON.

    Args:
        message: the message, with numbers of Python or numpy in its fields of type `Any`.

    Returns:
        The JSON; equal for equal messages.

    Raises:
        ArgumentError: a value is no JSON.
    """

    def plain(value: Any) -> Any:
        if isinstance(value, np.generic):
            return value.item()
        raise ArgumentError(f"{message.form.name}: a value of type {type(value).__name__} has no JSON; expected a number, str, list or dict")

    return json.dumps(encode(message), default=plain, separators=(",", ":")).encode()


def from_json(cls: type[M], text: Any) -> M:
    """The message of a JSON that a peer has sent.

    Args:
        cls: the class of the message.
        text: bytes, or an array of bytes.

    Returns:
        The message.

    Raises:
        ProtocolError: as for `parse`; or it is no JSON.
    """
    data = bytes(text)
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        raise malformed(cls.form, f"{len(data)} bytes", "JSON") from None
    return parse(cls, value)

"""Pulses: what the watchdog of a worker tells a peer while the worker's event loop is held up. Pure.

Note [Pulses]
    A loop that is held up sends no heartbeats, so a thread speaks for it, over connections of its own. It says for how long the loop has been held
    up, and at which line. A pulse belongs to one handshake: its name and its key are derived there, one pair for each direction, so that no other
    session takes it. It is sealed with AES-256-GCM, since a line of code concerns none but the peer, under a nonce that counts up, and a peer takes
    no number twice or late. A pulse that is refused changes nothing.

    A first pulse of no seconds follows soon after a handshake. It shows that this worker can tell, and that its way to the peer is open: from
    then on the peer waits by what it has learned of the gaps, see Note [When a peer is silent] in `failure_detector`.
"""

from __future__ import annotations

import math
import struct
from typing import NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

#: bytes of the name of a handshake's direction, of the secrets of both directions, and of a line at most
NAME_BYTES = 16
SECRET_BYTES = 2 * (NAME_BYTES + 32)
LINE_BYTES = 200

_NUMBER, _NONCE, _SECONDS = struct.Struct(">Q"), struct.Struct(">4xQ"), struct.Struct(">d")


class Pulse(NamedTuple):
    """The seconds for which a loop has been held up, and the line that it stands at."""

    seconds: float
    line: str


class Pulses:
    """Makes the pulses of one side of a session, and takes those of the other side, each once and in order.

    Args:
        secret: of the handshake, `SECRET_BYTES`.
        dialled: True on the side that opened the connection.

    Attributes:
        count: pulses that were made.
    """

    __slots__ = ("count", "_taken", "_ours", "_theirs")

    def __init__(self, secret: bytes, *, dialled: bool) -> None:
        self.count: int = 0
        self._taken = 0
        both = secret[: SECRET_BYTES // 2], secret[SECRET_BYTES // 2 :]
        self._ours, self._theirs = both if dialled else both[::-1]

    def make(self, pulse: Pulse) -> bytes:
        """The next pulse, for the peer alone."""
        self.count += 1
        name, key = self._ours[:NAME_BYTES], self._ours[NAME_BYTES:]
        text = _SECONDS.pack(pulse.seconds) + pulse.line.encode(errors="replace")[:LINE_BYTES]
        return name + _NUMBER.pack(self.count) + AESGCM(key).encrypt(_NONCE.pack(self.count), text, name)

    def take(self, message: bytes) -> Pulse | None:
        """The pulse of a message; None for anything else, and for pulses of other sessions and of before."""
        name, sealed = message[:NAME_BYTES], message[NAME_BYTES + _NUMBER.size :]
        if name != self._theirs[:NAME_BYTES] or not 0 < len(sealed) <= _SECONDS.size + LINE_BYTES + 16:
            return None
        (count,) = _NUMBER.unpack_from(message, NAME_BYTES)
        if count <= self._taken:
            return None
        try:
            text = AESGCM(self._theirs[NAME_BYTES:]).decrypt(_NONCE.pack(count), sealed, name)
            (seconds,) = _SECONDS.unpack_from(text)
        except (InvalidTag, struct.error):
            return None
        self._taken = count
        line = "".join(filter(str.isprintable, text[_SECONDS.size :].decode(errors="replace")))
        return Pulse(seconds, line) if 0 <= seconds < math.inf else None

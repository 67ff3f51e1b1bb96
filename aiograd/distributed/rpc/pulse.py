"""Pulses: what the watchdog of a worker tells a peer while the worker's event loop is held up. Pure.

Note [Pulses]
    A loop that is held up sends no heartbeats, so a thread speaks for it, over connections of its own. It says for how long the loop has been held
    up, and at which line. A pulse belongs to one handshake: its name and its key are derived there, one pair for each direction, so that no other
    session takes it. It is sealed with AES-256-GCM, since a line of code concerns none but the peer, under a nonce that counts up, and a peer takes
    no number twice or late. What is refused changes nothing.

    A first pulse of no seconds follows soon after a handshake. It shows that this worker can tell, and that its way to the peer is open: from
    then on the peer waits by what it has learned of the gaps, see Note [When a peer is silent] in `failure_detector`.
"""

from __future__ import annotations

import math
import struct
from typing import NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

#: bytes of the name of a pulse's handshake and direction, of the secret of both directions, of a line at most, and of a pulse at most
NAME_BYTES = 16
SECRET_BYTES = 2 * (NAME_BYTES + 32)
LINE_BYTES = 200
MOST_BYTES = NAME_BYTES + 8 + 8 + LINE_BYTES + 16

_NUMBER, _NONCE, _SECONDS = struct.Struct(">Q"), struct.Struct(">4xQ"), struct.Struct(">d")


class Pulse(NamedTuple):
    """What a pulse says: seconds for which the loop has been held up, and the line that it stands at."""

    seconds: float
    line: str


class PulseSender:
    """Makes the pulses of one side of a session.

    Args:
        secret: of its direction.

    Attributes:
        count: pulses that were made.
    """

    __slots__ = ("count", "_name", "_key")

    def __init__(self, secret: bytes) -> None:
        self.count = 0
        self._name, self._key = secret[:NAME_BYTES], secret[NAME_BYTES:]

    def pulse(self, pulse: Pulse) -> bytes:
        """The next pulse, for the peer alone."""
        self.count += 1
        text = _SECONDS.pack(pulse.seconds) + pulse.line.encode(errors="replace")[:LINE_BYTES]
        return self._name + _NUMBER.pack(self.count) + AESGCM(self._key).encrypt(_NONCE.pack(self.count), text, self._name)


class PulseReceiver:
    """Takes the pulses of the other side of a session, each once and in order.

    Args:
        secret: of its direction.
    """

    __slots__ = ("_count", "_name", "_key")

    def __init__(self, secret: bytes) -> None:
        self._count = 0
        self._name, self._key = secret[:NAME_BYTES], secret[NAME_BYTES:]

    def open(self, message: bytes) -> Pulse | None:
        """What a pulse says; None for anything else, and for pulses of other sessions and of before."""
        name, sealed = message[:NAME_BYTES], message[NAME_BYTES + 8 :]
        if name != self._name or not 0 < len(sealed) <= MOST_BYTES - NAME_BYTES - 8:
            return None
        (count,) = _NUMBER.unpack_from(message, NAME_BYTES)
        if count <= self._count:
            return None
        try:
            text = AESGCM(self._key).decrypt(_NONCE.pack(count), sealed, name)
            (seconds,) = _SECONDS.unpack_from(text)
        except (InvalidTag, struct.error):
            return None
        self._count = count
        line = text[_SECONDS.size :].decode(errors="replace")
        return Pulse(seconds, "".join(filter(str.isprintable, line))) if 0 <= seconds < math.inf else None


def pulses(secret: bytes, *, dialled: bool) -> tuple[PulseSender, PulseReceiver]:
    """Both directions of one side.

    Args:
        secret: of `SECRET_BYTES`, the same on both sides.
        dialled: True on the side that opened the connection.
    """
    first, second = secret[: SECRET_BYTES // 2], secret[SECRET_BYTES // 2 :]
    return (PulseSender(first), PulseReceiver(second)) if dialled else (PulseSender(second), PulseReceiver(first))

"""Questions to a socket about the bytes that the system holds for it."""

from __future__ import annotations

import fcntl
import sys
import termios
from typing import Any

#: questions to a socket: bytes that were not read, and (SIOCOUTQNSD of Linux) bytes that were taken and have not been sent
UNREAD = getattr(termios, "FIONREAD", None)
NOT_SENT = 0x894B if sys.platform == "linux" else None


def bytes_in(connection: Any, what: int | None) -> int:
    """Bytes that the system holds for a socket; 0 where it does not say.

    Args:
        connection: the socket; None: not known.
        what: `UNREAD` or `NOT_SENT`.
    """
    if connection is None or what is None:
        return 0
    try:
        return int.from_bytes(fcntl.ioctl(connection.fileno(), what, bytes(4)), sys.byteorder)
    except (OSError, ValueError):  # it is closed
        return 0

"""The number of bytes that wait in a socket."""

from __future__ import annotations

import fcntl
import sys
import termios
from typing import Any

_UNREAD = getattr(termios, "FIONREAD", None)


def unread_bytes(connection: Any) -> int:
    """Bytes of a socket that have come and were not read; 0 where the system does not say.

    Args:
        connection: the socket; None: not known.
    """
    if connection is None or _UNREAD is None:
        return 0
    try:
        return int.from_bytes(fcntl.ioctl(connection.fileno(), _UNREAD, bytes(4)), sys.byteorder)
    except (OSError, ValueError):  # it is closed
        return 0

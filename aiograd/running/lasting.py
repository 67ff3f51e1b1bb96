"""File descriptors that belong to the process, not to the code that was the first to need them. A leak check passes over them."""

from __future__ import annotations

#: their numbers; the code that opens one adds it, and takes it out before it closes it
LASTING_DESCRIPTORS: set[int] = set()

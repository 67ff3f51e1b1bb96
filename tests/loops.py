"""The event loops that tests run on: asyncio's, and uvloop's where it is installed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

try:
    import uvloop
except ImportError:  # a row of `make matrix`
    uvloop = None  # type: ignore[assignment]

#: by name, the functions that make a loop
LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": asyncio.new_event_loop}
if uvloop is not None:
    LOOPS["uvloop"] = uvloop.new_event_loop

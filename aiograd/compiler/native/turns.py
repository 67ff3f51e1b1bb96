"""Work on the compiling thread that lets other threads go first."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

#: items after which the interpreter's lock is released, about half a millisecond of work
ITEMS = 16


def in_turns(items: Iterable[T]) -> Iterator[T]:
    """The items; between some of them the interpreter's lock is released, so that a loop in another thread does not wait for its switch interval."""
    for number, item in enumerate(items, 1):
        yield item
        if not number % ITEMS:
            time.sleep(0)

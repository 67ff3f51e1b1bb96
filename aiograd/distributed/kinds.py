"""Kind: the kinds of requests between workers, as an enum made from the table of messages."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Final

from aiograd.distributed.messages.requests import REQUESTS

#: by the names of the requests in `aiograd.distributed.messages`
Kind: Final[Any] = IntEnum("Kind", {REQUESTS.name_of(kind).upper(): int(kind) for kind in sorted(REQUESTS.kinds)})  # type: ignore[misc]

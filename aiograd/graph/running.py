"""The pass and node that the running code belongs to. A module below `Node`, so that nodes can use it."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, NamedTuple

from aiograd.running.log_fields import add_source


class Current(NamedTuple):
    """The pass and node that the running code belongs to."""

    #: the GraphTask
    task: Any
    #: the Node, or None in a final callback
    node: Any
    #: True inside a synchronous rule, where a nested pass cannot be awaited
    in_sync_rule: bool = False


#: the innermost pass that the running code is part of; set around hooks, rules and callbacks
CURRENT: ContextVar[Current | None] = ContextVar("aiograd_current_graph_task", default=None)


def _log_fields() -> dict[str, int]:
    current = CURRENT.get()
    return {} if current is None else {"pass": current.task.id}


add_source(_log_fields)

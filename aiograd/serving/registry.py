"""Registry: the servers of this process that are entered, for the dashboard and ``/metrics``."""

from __future__ import annotations

import itertools
from typing import Any
from weakref import WeakKeyDictionary


class ServingRegistry:
    """Refers weakly to the servers between entering and closing."""

    def __init__(self) -> None:
        self._names: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
        self._numbers = itertools.count(1)

    def add(self, server: Any) -> None:
        """A `Server` is entered; its name is the class of its model and a number that no other server of the process has."""
        self._names[server] = f"{type(server.model).__name__} {next(self._numbers)}"

    def remove(self, server: Any) -> None:
        """A `Server` is closed. Idempotent."""
        self._names.pop(server, None)

    def servers_of(self, worker: str, *, with_others: bool) -> list[tuple[str, Any]]:
        """Names and servers that have a version: followers on this worker, and servers that belong to no worker if `with_others`."""
        found = []
        for server, name in self._names.items():
            owner = getattr(server, "worker", None)
            if server._serving and (with_others if owner is None else owner.name == worker):
                found.append((name, server))
        return found


#: the registry of this process
REGISTRY = ServingRegistry()

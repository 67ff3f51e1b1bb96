"""Registry: the servers of this process that are entered, and their trainers, for the dashboard and ``/metrics``."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet


class RegisteredServer(NamedTuple):
    """A server of this process."""

    #: class of the model and a number that no other server of the process has
    name: str
    server: Any
    #: None without one
    trainer: Any


class ServingRegistry:
    """Refers weakly to the servers between entering and closing, and to the trainers."""

    def __init__(self) -> None:
        self._names: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
        self._trainers: WeakSet[Any] = WeakSet()
        self._numbers = itertools.count(1)

    def add(self, server: Any) -> None:
        """A `Server` is entered."""
        self._names[server] = f"{type(server.model).__name__} {next(self._numbers)}"

    def remove(self, server: Any) -> None:
        """A `Server` is closed. Idempotent."""
        self._names.pop(server, None)

    def add_trainer(self, trainer: Any) -> None:
        """A `Trainer` is made."""
        self._trainers.add(trainer)

    def servers_of(self, worker: str, *, with_others: bool) -> list[RegisteredServer]:
        """The servers that have a version: followers on this worker, and servers that belong to no worker if `with_others`."""
        trainers = {trainer.server: trainer for trainer in self._trainers}
        found = []
        for server, name in self._names.items():
            owner = getattr(server, "worker", None)
            if server.has_version and (with_others if owner is None else owner.name == worker):
                found.append(RegisteredServer(name, server, trainers.get(server)))
        return found


#: the registry of this process
REGISTRY = ServingRegistry()

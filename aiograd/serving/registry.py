"""Registry: the servers of this process that are entered, and their trainers, for the dashboard and ``/metrics``."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple
from weakref import WeakSet, WeakValueDictionary


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
        self._servers: WeakValueDictionary[str, Any] = WeakValueDictionary()
        self._trainers: WeakSet[Any] = WeakSet()
        self._numbers = itertools.count(1)

    def add(self, server: Any) -> None:
        """A `Server` is entered."""
        self._servers[f"{type(server.model).__name__} {next(self._numbers)}"] = server

    def remove(self, server: Any) -> None:
        """A `Server` is closed. Idempotent."""
        for name in [name for name, each in self._servers.items() if each is server]:
            del self._servers[name]

    def add_trainer(self, trainer: Any) -> None:
        """A `Trainer` is made."""
        self._trainers.add(trainer)

    def servers_of(self, worker: str, *, with_others: bool) -> list[RegisteredServer]:
        """The servers that have a version.

        Args:
            worker: name of a worker of this process. Followers on other workers are left out.
            with_others: True to include servers that belong to no worker.
        """
        trainers = {id(trainer.server): trainer for trainer in self._trainers}
        found = [RegisteredServer(name, server, trainers.get(id(server))) for name, server in self._servers.items() if server.has_version]
        owners = [getattr(each.server, "worker", None) for each in found]
        return [each for each, owner in zip(found, owners, strict=True) if (with_others if owner is None else owner.name == worker)]


#: the registry of this process
REGISTRY = ServingRegistry()

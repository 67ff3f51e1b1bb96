"""A leader and its followers, each on a worker of its own, on one switchboard."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import numpy as np

import aiograd as ag
from aiograd import distributed as dist
from aiograd import nn, serving
from tests.distributed.memory import MemoryTransport, Switchboard
from tests.distributed.workers import SECRET

PEERS = {"leader": "memory://leader"}


class Vector(nn.Module):
    """One parameter of random numbers, all of which change with each step."""

    def __init__(self, size: int = 1000, seed: int = 0) -> None:
        super().__init__()
        self._rng = np.random.default_rng(seed)
        self.weight = nn.Parameter(ag.tensor(self._rng.standard_normal(size).astype(np.float32)))

    def forward(self, x: Any) -> Any:
        return x * self.weight[:1]

    def step(self) -> None:
        """Change all weights."""
        with ag.no_grad():
            self.weight.copy_(ag.tensor(self._rng.standard_normal(self.weight.shape).astype(np.float32)))


class Scene:
    """A switchboard and the transports of its workers."""

    def __init__(self) -> None:
        self.board = Switchboard()
        self.transports: dict[str, MemoryTransport] = {}

    @contextlib.asynccontextmanager
    async def worker(self, name: str, **options: Any) -> AsyncIterator[dist.Worker]:
        """An open worker that knows the leader."""
        transport = self.transports[name] = self.board.transport(name)
        options.setdefault("peers", {peer: url for peer, url in PEERS.items() if peer != name})
        async with dist.Worker(name, transport=transport, **{"secret": SECRET, **options}) as worker:
            yield worker

    @contextlib.asynccontextmanager
    async def leader(self, model: Any, *, worker: dict[str, Any] | None = None, **options: Any) -> AsyncIterator[serving.Server]:
        """An entered server that leads, on the worker "leader"."""
        service, server = dist.Service(), serving.Server(model, **options)
        serving.lead(service, server)
        async with server, self.worker("leader", service=service, **worker or {}):
            yield server

    @contextlib.asynccontextmanager
    async def follower(self, model: Any, name: str = "follower", *, worker: dict[str, Any] | None = None, **options: Any) -> AsyncIterator[Any]:
        """An entered follower on a worker of its own."""
        async with self.worker(name, **worker or {}) as own, serving.Follower(own, "leader", model, **options) as follower:
            yield follower

    def crash(self, name: str) -> None:
        """As when the process is killed: connections are reset, and nothing is said."""
        self.transports[name].crash()


def same(follower: Any, server: Any) -> bool:
    """True if both serve the same version to the bit."""
    left, right = follower.current, server.current
    return (left.number, left.digest) == (right.number, right.digest) and all(
        left.state[path].tobytes() == array.tobytes() for path, array in right.state.items()
    )

"""One process that compresses the gradients of several ranks as they do, with a residual for each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

import aiograd as ag
from aiograd.distributed.data_parallel.shard_gradients import dealt
from tests.distributed.data_parallel.models import bits


class Ranks:
    """The residuals of some ranks, and the gradients that they combine, in one process."""

    def __init__(self, compressor: Any, ranks: Iterable[Any]) -> None:
        self.compressor = compressor
        self.residuals: dict[Any, dict[int, Any]] = {rank: {} for rank in ranks}

    def begin(self, ranks: Iterable[Any]) -> None:
        """A step of these ranks begins."""
        self.residuals = {rank: self.residuals.get(rank, {}) for rank in ranks}

    def combined(self, grads: dict[Any, list[Any]], share: int | None = None) -> list[Any]:
        """The mean by parameter of the gradients by rank; None where no rank has one. `share`: 1 for the sum."""
        found: list[Any] = []
        for index, each in enumerate(zip(*grads.values(), strict=True)):
            some = next((grad for grad in each if grad is not None), None)
            if some is None:
                found.append(None)
                continue
            total = np.zeros(some.size)
            for rank, grad in zip(grads, each, strict=True):
                values = np.zeros_like(some) if grad is None else grad
                payload, rest = self.compressor.encode(values, self.residuals[rank].get(index))
                self.residuals[rank][index] = rest
                total += self.compressor.decode(payload, some.size, np.float64)
            found.append((total / (share or len(grads))).astype(some.dtype).reshape(some.shape))
        return found

    def bits(self, rank: Any) -> list[bytes]:
        """The residuals of a rank."""
        return [self.residuals[rank][index].tobytes() for index in sorted(self.residuals[rank])]


async def summed_gradients(model: Any, ranks: Ranks, shards: Any, accumulate: int = 1) -> list[Any]:
    """The gradients of the shards of all replicas, decoded and added up; `ranks` has these replicas in this order."""
    rows, grads = sum(len(each[0]) for each in shards), {}
    for rank, run in zip(ranks.residuals, dealt(len(shards), len(ranks.residuals)), strict=True):
        model.zero_grad()
        for each in shards[run.start : run.stop]:
            await ag.backward(await model.loss(*map(ag.asarray, each)), ag.tensor(np.float32(len(each[0]) / rows / accumulate)))
        grads[rank] = [None if p.grad is None else p.grad.numpy().copy() for p in model.parameters()]
    return ranks.combined(grads, 1)


async def serial_replicas(
    model: Any, given: Any, ranks: Ranks, accumulate: int = 1, optimizer: Any = None, begun: Sequence[Iterable[Any]] = ()
) -> tuple[dict[str, bytes], Any]:
    """The parameters of one process that takes steps with the shards of all replicas, and the state of its optimizer; `begun` as of `Ranks.begin`."""
    optimizer = optimizer or ag.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    running: list[Any] = [None] * len(list(model.parameters()))
    for number, shards in enumerate(given, 1):
        if begun:
            ranks.begin(begun[number - 1])
        found = await summed_gradients(model, ranks, shards, accumulate)
        running = [b if a is None else a if b is None else a + b for a, b in zip(running, found, strict=True)]
        if number % accumulate == 0:
            for p, grad in zip(model.parameters(), running, strict=True):
                p.grad = None if grad is None else ag.tensor(grad)
            optimizer.step()
            running = [None] * len(running)
    return bits(model.state_dict()), optimizer.state_dict()

"""Training: the driver's side. Forward through the workers' parts, loss here, one awaited backward through all of them, a step on each.

Note [Going on after a loss]
    Weights and optimizer state live on the workers; the driver keeps a checkpoint of all of it, with the number of the batch it belongs to. When
    a worker is lost, its part is made anew in the new process, every worker, the surviving ones too, goes back to the checkpoint,
    and the batches since then are repeated. They are drawn from the epoch's number alone, so the run arrives at the same bits as one that
    nothing happened to.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from aiograd.distributed import DistributedOptimizer, RemoteModule, Worker
from aiograd.errors import DistributedError
from aiograd.nn.functional import cross_entropy
from aiograd.profiler import scope
from aiograd.running.cli.demo.alone import DECAY, RATE
from aiograd.running.cli.demo.model import cut
from aiograd.running.modes import no_grad
from aiograd.tensors.creation import asarray
from aiograd.tensors.tensor import Tensor


@dataclass(frozen=True)
class Checkpoint:
    """All that the training needs to go on from a batch."""

    epoch: int
    weights: dict[str, dict[str, Tensor]]
    optimizer: dict[str, Any]

    def all_weights(self) -> dict[str, Tensor]:
        """Weights by name, as one network has them."""
        return {name: value for part in self.weights.values() for name, value in part.items()}


class Training:
    """A network with its parts on workers.

    Args:
        driver: the worker of this process.
        workers: names of the workers that hold the parts, in order.
        seed: of the weights.
    """

    def __init__(self, driver: Worker, workers: Sequence[str], seed: int = 0) -> None:
        self.driver = driver
        self.parts = dict(zip(workers, cut(len(workers)), strict=True))
        self._seed = seed
        self._modules: dict[str, RemoteModule] = {}
        self._optimizer: DistributedOptimizer
        #: the stage that the batch is in, and the time of the last failure (``time.perf_counter``)
        self.stage = ""
        self.failed_at = 0.0

    async def build(self) -> None:
        """Make every part on its worker, untrained."""
        for name in self.parts:
            await self._make(name)
        self._make_optimizer()

    async def _make(self, name: str) -> None:
        ref = await self.driver.remote(name, "Network", self.parts[name], self._seed)
        self._modules[name] = RemoteModule(self.driver, name, ref)

    def _make_optimizer(self) -> None:
        self._optimizer = DistributedOptimizer(self.driver, "AdamW", self._modules.values(), lr=RATE, weight_decay=DECAY)

    # ---------------------------------------------------------------- a batch

    async def forward(self, images: Any) -> Any:
        """Scores of each digit, (n, 10), for images (n, 1, 8, 8)."""
        x: Any = asarray(images)
        for module in self._modules.values():
            x = await module(x)
        return x

    async def step(self, images: Any, labels: Any, *, midway: Callable[[], None] | None = None) -> float:
        """Learn from one batch; returns the loss before.

        Args:
            midway: called in the middle of the backward pass, when the gradients are about to leave this process.
        """
        async with self.driver.context() as ctx:
            with self._stage("forward pass"):
                scores = await self.forward(images)
                loss = cross_entropy(scores, asarray(labels))
            if midway is not None:
                scores.register_hook(lambda gradient: midway())
            with self._stage("backward pass"):
                await ctx.backward(loss)
            with self._stage("optimizer step"):
                await self._optimizer.step(ctx)
        return float(loss.item())

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        self.stage = name
        try:
            with scope(name):
                yield
        except DistributedError:
            self.failed_at = time.perf_counter()
            raise

    async def gradients(self, images: Any, labels: Any) -> dict[str, Tensor]:
        """Gradients of the loss of one batch by parameter, from all workers; nothing is learnt."""
        found: dict[str, Tensor] = {}
        async with self.driver.context() as ctx:
            await ctx.backward(cross_entropy(await self.forward(images), asarray(labels)))
            for name, module in self._modules.items():
                found |= await self.driver.call(name, "gradients", module.ref)
        return found

    async def evaluate(self, images: Any) -> Any:
        """Scores of each digit, outside of any graph."""
        with no_grad():
            return await self.forward(images)

    # ---------------------------------------------------------------- state

    async def weights(self) -> dict[str, Tensor]:
        """All weights by name, as one network has them."""
        found: dict[str, Tensor] = {}
        for module in self._modules.values():
            found |= await module.state_dict()
        return found

    async def begin_epoch(self, epoch: int, rate: float) -> Checkpoint:
        """Set the learning rate; returns a copy, in this process, of everything that training is going to change."""
        weights = {name: await module.state_dict() for name, module in self._modules.items()}
        optimizer = await self._optimizer.state_dict()
        for state in optimizer["workers"].values():
            for group in state["groups"]:
                group["lr"] = rate
        await self._optimizer.load_state_dict(optimizer)
        return Checkpoint(epoch, weights, optimizer)

    async def restore(self, checkpoint: Checkpoint, lost: str) -> None:
        """Make the part of a worker that has been restarted anew, and take every worker back to a checkpoint."""
        await self._make(lost)
        self._modules = {name: self._modules[name] for name in self.parts}
        for name, module in self._modules.items():
            await module.load_state_dict(checkpoint.weights[name])
        self._make_optimizer()
        await self._optimizer.load_state_dict(checkpoint.optimizer)

    # ---------------------------------------------------------------- profiles

    async def start_profiles(self) -> None:
        """Let every worker record a profile."""
        await asyncio.gather(*(self.driver.call(name, "start_profile") for name in self.parts))

    async def stop_profiles(self) -> list[str]:
        """The Chrome trace of each worker, as JSON."""
        texts: list[str] = await asyncio.gather(*(self.driver.call(name, "stop_profile") for name in self.parts))
        return texts

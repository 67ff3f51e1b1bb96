"""Models of replicas for tests, what one process makes of the same shards, and the replicas themselves as their workers have them."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

import aiograd as ag
from aiograd import distributed as dist
from aiograd import nn
from aiograd.nn import functional as F

service = dist.Service()


@service.reference
class Net(nn.Module):
    """Two layers; `unused` is a parameter that no graph reaches."""

    def __init__(self, seed: int = 0, width: int = 6) -> None:
        generator = ag.Generator(seed)
        self.first = nn.Linear(4, width, generator=generator)
        self.second = nn.Linear(width, 3, generator=generator)
        self.unused = nn.Parameter(ag.ones((3,)))
        self.fails = False
        self.waits = 0.0

    def forward(self, x: Any) -> Any:
        return self.second(ag.tanh(self.first(x)))

    async def loss(self, x: Any, target: Any) -> Any:
        if self.waits:
            await asyncio.sleep(self.waits)
        if self.fails:
            raise ZeroDivisionError("by nought")
        return F.cross_entropy(self(x), target)

    def plain_loss(self, x: Any, target: Any) -> Any:
        """The same, which runs on the executor."""
        return F.cross_entropy(self(x), target)

    async def fail(self, fails: bool) -> None:
        self.fails = fails

    async def wait(self, seconds: float) -> None:
        self.waits = seconds

    async def end(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


@service.reference
class Clamped(Net):
    """Writes to its parameters in the loss."""

    async def loss(self, x: Any, target: Any) -> Any:
        with ag.no_grad():
            for parameter in self.parameters():
                parameter.clamp_(-0.1, 0.1)
        return await super().loss(x, target)


@service.reference
class BatchNet(nn.Module):
    """With running statistics, and dropout where that is wanted."""

    def __init__(self, dropout: float = 0.0) -> None:
        generator = ag.Generator(3)
        self.first = nn.Linear(4, 5, generator=generator)
        self.norm = nn.BatchNorm1d(5)
        self.second = nn.Linear(5, 3, generator=generator)
        self.dropout = dropout
        self.slow = 0.0

    def forward(self, x: Any) -> Any:
        y = ag.tanh(self.norm(self.first(x)))
        if self.slow:
            time.sleep(self.slow)
        return self.second(F.dropout(y, self.dropout, self.training) if self.dropout else y)

    def loss(self, x: Any, target: Any) -> Any:
        return F.cross_entropy(self(x), target)


@service.reference
class Counting(nn.Module):
    """A loss that depends on how many losses there were before."""

    def __init__(self) -> None:
        self.first = nn.Linear(4, 3, generator=ag.Generator(3))
        self.register_buffer("count", ag.ones(()))

    def loss(self, x: Any, target: Any) -> Any:
        loss = F.cross_entropy(self.first(x), target) * self.count.detach()
        self.count = self.count + 1.0
        return loss


@service.reference
class PartlyUsed(nn.Module):
    """One of two layers is used, as the first number of the shard says."""

    def __init__(self) -> None:
        self.even = nn.Linear(2, 1, generator=ag.Generator(0))
        self.odd = nn.Linear(2, 1, generator=ag.Generator(1))

    def forward(self, x: Any) -> Any:
        return self.odd(x) if int(x[0, 0].item()) % 2 else self.even(x)

    def loss(self, x: Any) -> Any:
        return (self(x) ** 2).mean()


@service.reference
class Strange(nn.Module):
    """A model that is another one on each worker."""

    def __init__(self, kind: str) -> None:
        name = dist.current_worker().name
        width = {"shape": 2 + int(name[-1]), "more": 2, "dtype": 2}[kind]
        self.first = nn.Linear(2, width, dtype=np.float64 if kind == "dtype" and name != "w0" else np.float32)
        if kind == "more" and name != "w0":
            self.more = nn.Linear(1, 1)

    def forward(self, x: Any) -> Any:
        return self.first(x)

    def loss(self, x: Any) -> Any:
        return self.first(x).sum()


@service.reference
class BadLoss(nn.Module):
    """A loss that is none."""

    def __init__(self, kind: str) -> None:
        self.weight = nn.Parameter(ag.ones((2,)))
        self.kind = kind

    def forward(self, x: Any) -> Any:
        return x

    def loss(self, x: Any) -> Any:
        return {"number": 1.0, "many": self.weight * 2.0, "no graph": x.sum(), "complex": self.weight.sum() * 1j}[self.kind]


@service.reference
class Frozen(nn.Module):
    """Nothing to train."""

    def loss(self, x: Any) -> Any:
        return x.sum()


class Wait(ag.Function):
    """Nothing, whose backward waits until the module says so."""

    @staticmethod
    def forward(ctx: Any, x: Any, module: Any) -> Any:
        ctx.module = module
        return x * 1.0

    @staticmethod
    async def backward(ctx: Any, grad: Any) -> Any:
        await ctx.module.summed.wait()
        ctx.module.order.append("first layer")
        return grad, None


@service.reference
class Overlapping(nn.Module):
    """The backward of its first layer waits until a sum has come in."""

    def __init__(self) -> None:
        self.first = nn.Linear(2, 2, bias=False, generator=ag.Generator(0))
        self.second = nn.Linear(2, 1, bias=False, generator=ag.Generator(1))
        self.order: list[str] = []
        self.summed = asyncio.Event()

    async def note(self, reducing: Any) -> Any:
        self.order.append("begun")
        result = await reducing
        self.order.append("summed")
        self.summed.set()
        return result

    async def loss(self, x: Any) -> Any:
        return self.second(Wait.apply(self.first(x), self)).sum()


@service.reference
class Unlike(nn.Module):
    """A model that begins with other values on each worker."""

    def __init__(self, number: int = -1) -> None:
        given = number if number >= 0 else int(dist.current_worker().name[-1])
        self.weight = nn.Parameter(ag.full((2,), float(given)))
        self.register_buffer("hidden", ag.full((), float(given)), persistent=False)

    def loss(self, x: Any) -> Any:
        return (x @ self.weight).mean()


@service.reference
class Stepper:
    """An optimizer of another kind."""

    def __init__(self, params: Any, lr: float, momentum: float) -> None:
        self.params = params

    def step(self, gradients: Any = None) -> None:
        raise NotImplementedError


class FailingSGD(ag.optim.SGD):
    """An optimizer that fails after it has changed something."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)

    def step(self, gradients: Any = None) -> None:
        super().step(gradients)
        raise ArithmeticError("too steep")


service.reference(FailingSGD)


def batches(count: int, rows: Sequence[int] = (4, 4, 4), seed: int = 0) -> list[list[tuple[Any, Any]]]:
    """Batches of shards with so many rows each."""
    random = np.random.default_rng(seed)
    return [
        [(random.standard_normal((n, 4)).astype(np.float32), random.integers(0, 3, n)) for n in rows] for _ in range(count)
    ]


async def serial(
    module: Any, optimizer: Any, shards_of: Sequence[Sequence[Any]], *, clip_norm: float | None = None, accumulate: int = 1, method: str = "loss"
) -> list[list[float]]:
    """One process that adds up the gradients of the shards in order; returns the losses."""
    losses = []
    for number, shards in enumerate(shards_of):
        total = sum(len(shard[0]) for shard in shards)
        losses.append([])
        for shard in shards:
            loss = getattr(module, method)(*map(ag.asarray, shard))
            loss = await loss if asyncio.iscoroutine(loss) else loss
            await ag.backward(loss, ag.tensor(len(shard[0]) / total / accumulate, dtype=loss.dtype))
            losses[-1].append(loss.item())
        if (number + 1) % accumulate == 0:
            if clip_norm is not None:
                ag.optim.clip_grad_norm_(module.parameters(), clip_norm)
            optimizer.step()
            optimizer.zero_grad()
    return losses


def comparable(state: Any) -> Any:
    """A state of an optimizer as values that can be compared."""
    values = {
        number: {name: value.numpy().tobytes() if isinstance(value, ag.Tensor) else value for name, value in each.items()}
        for number, each in state["state"].items()
    }
    groups = [{name: list(value) if isinstance(value, tuple) else value for name, value in group.items()} for group in state["param_groups"]]
    return values, groups


def bits(state: Any) -> dict[str, bytes]:
    """A state dict, bit for bit."""
    return {name: value.detach().numpy().tobytes() for name, value in state.items()}


def numbers(losses: Sequence[Any]) -> list[float]:
    return [loss.item() for loss in losses]


def replicas_behind(replicas: dist.DataParallel, opened: Sequence[dist.Worker]) -> list[Any]:
    """The hosts of replicas as they are on their workers."""
    found = []
    for remote in replicas._coordinator.remotes:
        worker = next(each for each in opened if each.name == remote.owner)
        found.append(worker._objects.table._held[remote.ref.key].value)
    return found


def all_bits(replicas: dist.DataParallel, opened: Sequence[dist.Worker]) -> list[dict[str, bytes]]:
    """The states of all replicas, which have nothing in ``grad``."""
    hosts = replicas_behind(replicas, opened)
    assert all(parameter.grad is None for host in hosts for parameter in module_of(host).parameters())
    return [bits(module_of(host).state_dict()) for host in hosts]


def module_of(host: Any) -> Any:
    return host._replica.module

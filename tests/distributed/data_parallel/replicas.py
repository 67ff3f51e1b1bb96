"""Small modules and shards for tests of replicas, and what one process computes from the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import aiograd as ag

Loss = Callable[[Any, int], Any]


def net(seed: int = 0) -> Any:
    """A small network."""
    ag.seed(seed)
    return ag.nn.Sequential(ag.nn.Linear(5, 7), ag.nn.Tanh(), ag.nn.Linear(7, 3))


def shard(rank: int, step: int = 0) -> Any:
    """Inputs of a rank in a step."""
    return ag.tensor(np.random.default_rng([rank, step]).standard_normal((4, 5)).astype(np.float32))


def loss_of(model: Any, rank: int, step: int = 0) -> Any:
    """The loss of a rank's shard."""
    return model(shard(rank, step)).square().mean()


def bits(tensors: Any) -> list[Any]:
    """The bytes of Tensors; None for None."""
    return [None if each is None else each.detach().numpy().tobytes() for each in tensors]


def gradients(model: Any) -> list[Any]:
    """The bits of a module's gradients."""
    return bits(p.grad for p in model.parameters())


async def reduced(model: Any, count: int, step: int) -> None:
    """Leave in ``grad`` the mean of the gradients of all ranks' shards, added up in the order of the ranks."""
    total: list[Any] = []
    for rank in range(count):
        model.zero_grad()
        await loss_of(model, rank, step).backward()
        grads = [p.grad.numpy() for p in model.parameters()]
        total = grads if not total else [a + b for a, b in zip(total, grads, strict=True)]
    for p, each in zip(model.parameters(), total, strict=True):
        p.grad = ag.tensor(each / np.float32(count))


async def mean_of(grads_of: Callable[[int], Any], count: int) -> list[Any]:
    """The bits of the mean of gradients that each rank computes by itself, added up in the order of the ranks; None where no rank has one."""
    total: list[Any] = []
    for rank in range(count):
        grads = await grads_of(rank)
        total = grads if not total else [b if a is None else a if b is None else a + b for a, b in zip(total, grads, strict=True)]
    return [None if each is None else (each / each.dtype.type(count)).tobytes() for each in total]


async def mean_gradients(count: int, loss: Callable[..., Any] = loss_of, make: Callable[[], Any] = net) -> list[Any]:
    """The bits of the mean of all ranks' gradients of a loss."""

    async def grads_of(rank: int) -> Any:
        model = make()
        await loss(model, rank).backward()
        return [None if p.grad is None else p.grad.numpy() for p in model.parameters()]

    return await mean_of(grads_of, count)

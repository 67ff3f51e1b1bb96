"""Small modules and shards for tests of replicas, and what one process computes from the same."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import aiograd as ag
from aiograd import distributed as dist
from aiograd.distributed.data_parallel.reducer import GradientReducer
from aiograd.errors import CollectiveError

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


async def cancelled_pass(moment: int, joined: Sequence[dist.Group], models: Sequence[Any], **options: Any) -> tuple[list[Any], list[GradientReducer]]:
    """Reduce a pass of two members and cancel the second one after so many turns of the loop.

    Args:
        moment: the turns.
        joined, models: of the members.
        options: of the reducers.

    Returns:
        "committed", "cancelled" or "failed" for each member, none if the second one had not begun; and the reducers.
    """
    members = zip(joined, models, strict=True)
    reducers = [GradientReducer(group, model.parameters(), bucket_bytes=1, commit=group.commit, **options) for group, model in members]

    async def step(rank: int) -> str:
        reducers[rank].attach()
        try:
            await loss_of(models[rank], rank).backward()
        except asyncio.CancelledError as error:
            return "committed" if getattr(error, "committed", False) else "cancelled"
        except CollectiveError:
            return "failed"
        return "committed"

    running = [asyncio.ensure_future(step(group.rank)) for group in joined]
    for _ in range(moment):
        await asyncio.sleep(0)
    running[1].cancel()
    outcomes: list[Any] = await asyncio.gather(*running, return_exceptions=True)
    if isinstance(outcomes[1], asyncio.CancelledError):  # before it began
        joined[1].fail(CollectiveError("it never began"))
        return [], reducers
    return outcomes, reducers


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

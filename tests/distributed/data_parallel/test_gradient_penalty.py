"""Losses of replicas that contain gradients: penalties on gradients by inputs and by parameters have the bits of one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import distributed as dist
from aiograd import nn
from aiograd.nn import functional as F
from tests.distributed.data_parallel.models import all_bits, batches, bits, numbers, serial
from tests.distributed.data_parallel.replicas import bits as tensor_bits
from tests.distributed.data_parallel.replicas import mean_gradients, shard
from tests.distributed.groups import everywhere, groups
from tests.distributed.workers import workers

NAMES = ("w0", "w1", "w2")
service = dist.Service()


@service.reference
class Penalised(nn.Module):
    """A network whose loss has a penalty.

    Args:
        kind: of the gradient by the inputs, by the parameters, or of both, the one of the other.
    """

    def __init__(self, kind: str) -> None:
        generator = ag.Generator(2)
        self.first = nn.Linear(4, 6, generator=generator)
        self.second = nn.Linear(6, 3, generator=generator)
        self.kind = kind

    def forward(self, x: Any) -> Any:
        return self.second(ag.tanh(self.first(x)))

    async def loss(self, x: Any, target: Any) -> Any:
        x = ag.asarray(x).detach().requires_grad_()
        loss = F.cross_entropy(self(x), target)
        return loss + 3.0 * await penalty(self.kind, loss, x, list(self.parameters()))


async def penalty(kind: str, loss: Any, x: Any, parameters: list[Any]) -> Any:
    """The sum of squares of a gradient, which can be differentiated."""
    wanted = {"inputs": [x], "parameters": parameters, "both": parameters}[kind]
    grads = await ag.grad(loss, wanted, create_graph=True)
    total = sum((g * g).sum() for g in grads)
    if kind == "both":
        (grad,) = await ag.grad(total, [x], create_graph=True)
        total = (grad * grad).sum()
    return total


@pytest.mark.parametrize("kind", ["inputs", "parameters", "both"])
async def test_a_penalised_step_of_replicas_has_the_bits_of_one_process(kind: str) -> None:
    given = batches(3, (4, 2, 4, 3))
    async with workers("driver", *NAMES, service=service) as opened:
        options: dict[str, Any] = {"optimizer": ag.optim.SGD, "optimizer_options": {"lr": 0.1, "momentum": 0.9}}
        async with await dist.DataParallel.create(opened[0], NAMES, Penalised, kind, **options) as replicas:
            losses = [numbers(await replicas.step(shards)) for shards in given]
            found = all_bits(replicas, list(opened))
    alone, plain = Penalised(kind), Penalised(kind)
    assert losses == await serial(alone, ag.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9), given)
    assert found == [bits(alone.state_dict())] * 3
    for shards in given:  # the penalty matters
        for x, target in shards:
            await (F.cross_entropy(plain(ag.asarray(x)), target)).backward()
    assert bits(plain.state_dict()) != bits(alone.state_dict())


def network() -> Any:
    ag.seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


@pytest.mark.parametrize("kind", ["inputs", "parameters", "both"])
async def test_a_penalised_pass_of_a_group_has_the_bits_of_one_process(kind: str) -> None:
    async def gradients_of(model: Any, rank: int) -> Any:
        x = shard(rank).requires_grad_()
        loss = (await model(x) if isinstance(model, dist.DistributedDataParallel) else model(x)).square().mean()
        await (loss + 3.0 * await penalty(kind, loss, x, list(model.parameters()))).backward()
        return [p.grad.numpy() for p in model.parameters()]

    totals: list[Any] = []
    for rank in range(3):
        grads = await gradients_of(network(), rank)
        totals = grads if not totals else [a + b for a, b in zip(totals, grads, strict=True)]
    expected = [(total / np.float32(3)).tobytes() for total in totals]
    async with groups(*NAMES) as (_, joined):

        async def step(group: dist.Group) -> Any:
            model = dist.DistributedDataParallel(network(), group)
            await model.synchronize()
            return [g.tobytes() for g in await gradients_of(model, group.rank)]

        assert await everywhere(joined, step) == [expected] * 3

"""Losses of replicas that contain gradients: by inputs, by parameters, and of these again. Steps and passes have the bits of one process."""

from __future__ import annotations

from typing import Any

import pytest

import aiograd as ag
from aiograd import distributed as dist
from aiograd import nn
from aiograd.nn import functional as F
from tests.distributed.data_parallel.models import all_bits, batches, bits, numbers, serial
from tests.distributed.data_parallel.replicas import mean_of, net, shard
from tests.distributed.groups import everywhere, groups
from tests.distributed.workers import workers

NAMES = ("w0", "w1", "w2")
#: "alone" has no gradient for the bias of the last layer
KINDS = ("inputs", "parameters", "both", "alone")
SGD: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
service = dist.Service()


async def penalised(loss: Any, kind: str, x: Any, parameters: list[Any]) -> Any:
    """A loss and the sum of squares of a gradient of it; the latter alone."""
    grads = await ag.grad(loss, [x] if kind in ("inputs", "alone") else parameters, create_graph=True)
    penalty = sum((grad * grad).sum() for grad in grads)
    if kind == "both":
        (grad,) = await ag.grad(penalty, [x], create_graph=True)
        penalty = (grad * grad).sum()
    return 3.0 * penalty if kind == "alone" else loss + 3.0 * penalty


@service.reference
class Penalised(nn.Module):
    """A network and its loss with a penalty."""

    def __init__(self, kind: str) -> None:
        generator = ag.Generator(2)
        self.layers = nn.Sequential(nn.Linear(4, 6, generator=generator), nn.Tanh(), nn.Linear(6, 3, generator=generator))
        self.kind = kind

    async def loss(self, x: Any, target: Any) -> Any:
        x = ag.asarray(x).detach().requires_grad_()
        scores = self.layers(x)
        loss = scores.sum() if self.kind == "alone" else F.cross_entropy(scores, target)
        return await penalised(loss, self.kind, x, list(self.parameters()))


@pytest.mark.parametrize("kind", KINDS)
async def test_a_penalised_step_of_replicas(kind: str) -> None:
    given = batches(3, (4, 2, 4, 3))
    async with workers("driver", *NAMES, service=service) as opened:
        async with await dist.DataParallel.create(
            opened[0], NAMES, Penalised, kind, optimizer=ag.optim.SGD, optimizer_options=SGD
        ) as replicas:
            losses = [numbers(await replicas.step(shards)) for shards in given]
            found = all_bits(replicas, list(opened))
    alone = Penalised(kind)
    assert losses == await serial(alone, ag.optim.SGD(alone.parameters(), **SGD), given)
    assert found == [bits(alone.state_dict())] * 3 and found[0] != bits(Penalised(kind).state_dict())


@pytest.mark.parametrize("kind", KINDS)
async def test_a_penalised_pass_of_a_group(kind: str) -> None:
    async def grads_of(model: Any, rank: int) -> Any:
        x = shard(rank).requires_grad_()
        scores = await model(x) if isinstance(model, dist.DistributedDataParallel) else model(x)
        loss = scores.sum() if kind == "alone" else scores.square().mean()
        await (await penalised(loss, kind, x, list(model.parameters()))).backward()
        return [None if p.grad is None else p.grad.numpy() for p in model.parameters()]

    expected = await mean_of(lambda rank: grads_of(net(), rank), 3)
    assert (expected[-1] is None) == (kind == "alone")
    async with groups(*NAMES) as (_, joined):

        async def step(group: dist.Group) -> Any:
            model = dist.DistributedDataParallel(net(), group)
            await model.synchronize()
            return [None if each is None else each.tobytes() for each in await grads_of(model, group.rank)]

        assert await everywhere(joined, step) == [expected] * 3

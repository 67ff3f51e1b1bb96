"""Workers and their services, a distributed pass and optimizer step, a server with a trainer, in one process."""

from __future__ import annotations

from typing import assert_type

import numpy as np

import aiograd as ag
from aiograd import distributed as dist
from aiograd import nn, optim, serving

service = dist.Service()


@service.function
def cubed(x: ag.Tensor) -> ag.Tensor:
    return x**3


@service.reference
class Layer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2, generator=ag.Generator(0))


async def distributed_step() -> None:
    async with (
        dist.Worker("left", service=service) as left,
        dist.Worker("driver", peers={"left": left.url}) as driver,
    ):
        assert_type(driver, dist.Worker)
        layer = await driver.remote_module("left", Layer)
        optimizer = dist.DistributedOptimizer(driver, optim.SGD, [layer], lr=0.2)
        x = ag.tensor([0.5, -1.0], requires_grad=True)
        async with driver.context() as ctx:
            assert_type(ctx, dist.Context)
            y = await layer(x)
            z = await driver.call("left", "cubed", x)
            loss: ag.Tensor = ((y - z) ** 2).sum()
            assert_type(await ctx.backward(loss), None)
            await optimizer.step(ctx)
            assert ctx.grads[x] is not None
    assert cubed(ag.ones(2)).tolist() == [1.0, 1.0]  # the decorator leaves the function as it is


async def served() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    async with serving.Server(model, max_batch=16, keep=3) as server:
        assert_type(server, serving.Server)
        answer = await server.predict(np.ones((2, 3), np.float32), deadline=10)
        assert_type(answer.version, int)
        assert answer.value.shape == (2, 1)
        assert_type(await server.publish(), serving.Version)


async def main() -> None:
    await distributed_step()
    await served()


if __name__ == "__main__":
    ag.run(main())

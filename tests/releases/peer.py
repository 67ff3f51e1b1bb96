"""A worker that serves, and one that calls it: a call, a pass and an optimizer's step; run with the package of either release.

``python -m aiograd worker --service peer:service`` serves, ``python peer.py URL`` calls and prints what came of it as JSON. It runs with packages of
other releases, as a module of its own: it uses public names only, and nothing of the tests.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import aiograd as ag
from aiograd import distributed as dist
from aiograd import nn
from aiograd.errors import AiogradError

service = dist.Service()


@service.function
async def scaled(x: ag.Tensor, factor: float = 2.0) -> ag.Tensor:
    return x * factor


@service.reference
class Line(nn.Module):
    """A parameter on the worker that serves."""

    def __init__(self) -> None:
        self.weight = nn.Parameter(ag.tensor([1.0, 2.0, 3.0]))

    def forward(self, x: Any) -> Any:
        return (x * self.weight).sum()


async def call(url: str) -> dict[str, Any]:
    """Call, differentiate and step over the wire; what came of it, or the error that refused it."""
    async with dist.Worker("caller", secret=bytes.fromhex(os.environ["AIOGRAD_SECRET"]), peers={"server": url}) as worker:
        try:
            x = ag.tensor([1.0, -2.0, 0.5], requires_grad=True)
            line = await worker.remote_module("server", "Line")
            optimizer = dist.DistributedOptimizer(worker, ag.optim.SGD, [line], lr=0.5, momentum=0.9)
            found: dict[str, Any] = {"call": (await worker.call("server", "scaled", x.detach(), 3.0)).tolist(), "loss": []}
            for _ in range(2):
                async with worker.context() as ctx:
                    loss = await line(await worker.call("server", "scaled", x))
                    await ctx.backward(loss)
                    await optimizer.step(ctx)
                    found["loss"].append(loss.item())
                    found["gradient"] = ctx.grads[x].tolist()
            return {**found, "weight": (await line.state_dict())["weight"].tolist()}
        except AiogradError as error:
            return {"refused": type(error).__name__, "text": str(error)}


if __name__ == "__main__":
    print(json.dumps({"package": ag.__file__, **ag.run(call(sys.argv[1]))}))

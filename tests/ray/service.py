"""The service of the workers of these tests, as actors of Ray and as processes of this machine; imported there by name."""

from __future__ import annotations

import os
import signal
from typing import Any

import aiograd as ag
import aiograd.distributed as dist
from aiograd import nn
from aiograd.distributed import moe
from tests.distributed.cluster_service import double, double_at, process, variable

service = dist.Service()

EXPERTS = ("reader.0.0", "reader.0.1")


def _expert(seed: int) -> moe.ExpertBackend:
    module = nn.Linear(8, 4, generator=ag.Generator(seed))
    return moe.ExpertBackend(module, ag.optim.SGD(module.parameters(), lr=0.5))


moe.serve_experts(service, {uid: _expert(seed) for seed, uid in enumerate(EXPERTS)})


@service.reference
class Block(nn.Module):
    """A layer with a seed for its weights."""

    def __init__(self, seed: int) -> None:
        self.linear = nn.Linear(8, 8, generator=ag.Generator(seed))

    def forward(self, x: Any) -> Any:
        return self.linear(x).tanh()


for function in (double, double_at, process, variable):
    service.function(function)


@service.function
async def complain(text: str) -> None:
    print(text, flush=True)


@service.function
async def end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)

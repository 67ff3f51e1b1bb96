"""A worker process that stops itself at a failpoint, as SIGSTOP does it."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np

import aiograd as ag
from aiograd import distributed as dist
from aiograd.distributed import failpoints

service = dist.Service()
WEIGHT = ag.tensor(np.ones(3), requires_grad=True)


@service.function
async def times(x: Any) -> Any:
    return x * WEIGHT


@service.function
async def stop_at(point: str) -> None:
    failpoints.arm(point, lambda: os.kill(os.getpid(), signal.SIGSTOP))

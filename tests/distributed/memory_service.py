"""The service of the worker process of `test_out_of_memory`."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import numpy as np

import aiograd as ag
import aiograd.distributed as dist

service = dist.Service()


@service.function
async def limit_memory(more: int) -> int:
    """Let this process have so many bytes more than it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    return os.getpid()


@service.function
async def size(x: ag.Tensor) -> int:
    return x.size


@service.function
async def allocate(count: int) -> int:
    return np.ones(count).size


@service.function
def allocate_on_thread(count: int) -> int:
    return np.ones(count).size


@service.function
async def process() -> int:
    return os.getpid()


@service.function
async def bytes_held() -> int:
    return dist.current_worker().statistics().bytes_held

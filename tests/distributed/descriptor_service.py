"""The service of the worker process of `test_descriptors`."""

from __future__ import annotations

import errno
import os
import resource

import aiograd as ag
import aiograd.distributed as dist

service = dist.Service()


@service.function
async def leave_descriptors(more: int) -> None:
    """Let this process open so many descriptors and no more."""
    taken = set(map(int, os.listdir("/proc/self/fd")))
    free = [number for number in range(4096) if number not in taken]
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[more - 1], resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


@service.function
async def descriptors_left(most: int) -> int:
    """How many this process can open, at most `most`."""
    opened: list[int] = []
    try:
        while len(opened) < most:
            opened.append(os.dup(0))
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
    finally:
        for descriptor in opened:
            os.close(descriptor)
    return len(opened)


@service.function
async def triple(x: ag.Tensor) -> ag.Tensor:
    return x * 3


@service.function
async def triple_at(peer: str, x: ag.Tensor) -> ag.Tensor:
    return await dist.current_worker().call(peer, "triple", x)

"""The service of workers whose event loops are held up; imported by name in processes of their own."""

from __future__ import annotations

import os
import time

import numpy as np

import aiograd.distributed as dist

service = dist.Service()


@service.function
async def process() -> int:
    return os.getpid()


@service.function
async def sleep(seconds: float) -> None:
    time.sleep(seconds)  # noqa: ASYNC251 - it is about that


@service.function
async def count(seconds: float) -> None:
    until, number = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        number += 1


@service.function
async def multiply(seconds: float) -> None:
    until, factor = time.monotonic() + seconds, np.ones((600, 600))
    while time.monotonic() < until:
        factor @ factor

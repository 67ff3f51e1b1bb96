"""The service of the worker processes of `test_fork_server`; imported there by name."""

from __future__ import annotations

import gc
import json
import os
import random
import resource
import signal
import sys
import uuid
from collections import Counter
from pathlib import Path

import numpy as np

import aiograd as ag
import aiograd.distributed as dist
from aiograd.distributed.rpc import keyring_file
from aiograd.running.scalars import LOG

service = dist.Service()


@service.function
async def draws() -> list[str]:
    """Random numbers of every source."""
    return [
        str(np.random.random()),
        str(random.random()),
        str(float(ag.rand(()).item())),
        uuid.uuid4().hex,
        os.urandom(8).hex(),
        LOG.process,
        keyring_file._PROCESS_SECRET.hex(),
        dist.current_worker()._core.endpoint.incarnation.hex(),
    ]


@service.function
async def description() -> str:
    """All that the process could have from the way it was started, but for numbers that differ from process to process."""
    limits = {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")}
    umask = os.umask(0)
    os.umask(umask)
    streams = (sys.stdin, sys.stdout, sys.stderr, sys.__stdin__, sys.__stdout__, sys.__stderr__)
    described = {
        "main": sys.modules["__main__"].__spec__.name,  # type: ignore[union-attr]
        "words": sys.argv,
        "path": sys.path,
        "folder": os.getcwd(),
        "environment": dict(os.environ),
        "leads its session": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
        "umask": umask,
        "limits": limits,
        "processors": sorted(os.sched_getaffinity(0)),
        "flags": str(sys.flags),
        "signals": [str(signal.getsignal(number)).split(" at ")[0] for number in signal.valid_signals()],
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "files": Counter(_kind(number) for number in os.listdir("/proc/self/fd")),
        "streams": [(each.fileno(), each.encoding, each.errors, each.line_buffering, each.seekable(), each.isatty()) for each in streams if each],
        "collector": [gc.isenabled(), *gc.get_threshold()],
        "threads": len([number for number in os.listdir("/proc/self/task") if not _is_of_kernel(number)]),
    }
    return json.dumps(described, sort_keys=True, indent=1)


def _is_of_kernel(thread: str) -> bool:
    """True for the thread that the kernel has for an io_uring, which uvloop 0.21 makes."""
    return Path(f"/proc/self/task/{thread}/comm").read_text().startswith("iou-")


def _kind(number: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{number}").partition("[")[0]
    except FileNotFoundError:  # of the folder that was listed
        return "the folder"


@service.function
async def product(left: ag.Tensor, right: ag.Tensor) -> ag.Tensor:
    return left @ right


@service.function
async def process() -> int:
    return os.getpid()


@service.function
async def parent() -> int:
    return os.getppid()


@service.function
async def end(status: int) -> None:
    """End the process without a word."""
    os._exit(status)

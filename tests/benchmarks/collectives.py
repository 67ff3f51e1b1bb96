"""All-reduce over processes of one machine, beside torch's gloo over TCP, in the same processes and in turns.

aiograd's messages are authenticated and its sums are associated by rank; large frames travel in shared memory, everything else is encrypted. Gloo
does neither.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

import aiograd as ag
from aiograd import distributed as dist
from tests.benchmarks.harness import OURS, Settings, Table, goal_cells

#: operation -> float32 elements, repeats per round
OPERATIONS = {"1 kB": (256, 100), "1 MB": (250_000, 20), "100 MB": (25_000_000, 3)}
TARGETS = {"1 kB": 1.5, "1 MB": None, "100 MB": 1.0}

service = dist.Service()
_groups: dict[str, Any] = {}


@service.function
async def join(names: list[str], port: int) -> None:
    """Join a group, and torch's where `port` is not 0."""
    worker = dist.current_worker()
    _groups[OURS] = await dist.join_group(worker, names)
    if port:
        await asyncio.to_thread(_join_torch, port, names.index(worker.name), len(names))  # the import takes seconds


def _join_torch(port: int, rank: int, size: int) -> None:
    import torch
    import torch.distributed as td

    torch.set_num_threads(1)
    td.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    _groups["torch"] = td


@service.function
async def measure(side: str, elements: int, repeats: int) -> list[float]:
    """Seconds of each all-reduce."""
    array = np.ones(elements, np.float32)
    if side == OURS:
        group: dist.Group = _groups[OURS]
        seconds = []
        for _ in range(repeats + 1):
            await group.barrier()
            begun = time.perf_counter()
            await group.all_reduce([array])
            seconds.append(time.perf_counter() - begun)
        return seconds[1:]
    return await asyncio.to_thread(_torch, array, repeats)


def _torch(array: Any, repeats: int) -> list[float]:
    import torch
    import torch.distributed as td

    seconds = []
    for _ in range(repeats + 1):
        tensor = torch.from_numpy(array).clone()
        td.barrier()
        begun = time.perf_counter()
        td.all_reduce(tensor)
        seconds.append(time.perf_counter() - begun)
    return seconds[1:]


@service.function
async def leave() -> None:
    """Leave the groups."""
    await _groups.pop(OURS).aclose()
    if "torch" in _groups:
        _groups.pop("torch").destroy_process_group()


def run(settings: Settings) -> Iterator[Table]:
    """Two processes, then four."""
    for size in (2, 4)[: settings.of(2, 1)]:
        yield ag.run(_run(settings, size))


async def _run(settings: Settings, size: int) -> Table:
    sides = [OURS, *(peer for peer in settings.peers if peer == "torch")]
    times: dict[tuple[str, str], list[float]] = {(side, operation): [] for side in sides for operation in OPERATIONS}
    environment = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    os.environ.update(environment)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1] if "torch" in sides else 0
    patient = dist.Limits(missed_heartbeats=100)  # torch holds the loops up while it is imported
    async with dist.LocalCluster(size, service="tests.benchmarks.collectives:service", limits=patient) as cluster:
        driver, names = cluster.driver, list(cluster.workers)

        async def everywhere(function: str, *arguments: Any) -> list[Any]:
            return await asyncio.gather(*(driver.call(name, function, *arguments, timeout=300.0) for name in names))

        await everywhere("join", names, port)
        for _ in range(settings.of(4, 1)):
            for side in sides:
                for operation, (elements, repeats) in OPERATIONS.items():
                    elements, repeats = (min(elements, 1000), 2) if settings.tiny else (elements, repeats)
                    times[side, operation] += (await everywhere("measure", side, elements, repeats))[0]
        await everywhere("leave")
    table = Table(
        f"All-reduce over {size} processes of one machine",
        ["float32", *(f"{side} min/median" for side in sides), "ratio min", "target", "beyond", "verdict"],
        notes=["large frames in shared memory, the rest encrypted, against torch's gloo in the clear over loopback TCP; a thread each"],
    )
    for operation in OPERATIONS:
        found = [times[side, operation] for side in sides]
        cells = [f"{min(each) * 1e3:.2f}/{float(np.median(each)) * 1e3:.2f} ms" for each in found]
        ratio = min(found[0]) / min(found[1]) if len(found) > 1 else None
        shown = "" if ratio is None else f"{ratio:.2f} × torch"
        table.add(operation, *cells, shown, *goal_cells(None if settings.tiny else ratio, TARGETS[operation], None))
    return table

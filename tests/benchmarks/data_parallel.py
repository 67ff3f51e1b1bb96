"""A data-parallel training step over two processes of one machine, beside torch's DistributedDataParallel over gloo, in the same processes.

MLP 784-1024-1024-10, SGD, a thread each. aiograd's messages are authenticated; large frames travel in shared memory, everything else is encrypted.
Its sums are associated by rank, and a pass is committed on both or on none. Gloo does none of that.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

import aiograd as ag
from aiograd import distributed as dist
from aiograd.nn import functional as F
from tests.benchmarks.harness import OURS, DisagreementError, Settings, Table, goal_cells

WIDTHS = (784, 1024, 1024, 10)
BATCHES = (64, 256)
TARGET = 1.0
SIZE = 2

service = dist.Service()
_sides: dict[str, Any] = {}


def _arrays(widths: list[int]) -> list[Any]:
    random = np.random.default_rng(0)
    return [
        each
        for i, o in itertools.pairwise(widths)
        for each in (random.standard_normal((o, i)).astype(np.float32) / np.float32(np.sqrt(i)), np.zeros(o, np.float32))
    ]


def _batch(rank: int, rows: int, widths: list[int]) -> tuple[Any, Any]:
    random = np.random.default_rng([rank, rows])
    return random.standard_normal((rows, widths[0])).astype(np.float32), random.integers(0, widths[-1], rows)


@service.function
async def join(names: list[str], port: int, widths: list[int]) -> None:
    """Make the model on both sides; torch's where `port` is not 0."""
    worker = dist.current_worker()
    group = await dist.join_group(worker, names)
    layers: list[Any] = []
    arrays = iter(_arrays(widths))
    for i, o in itertools.pairwise(widths):
        linear = ag.nn.Linear(i, o)
        linear.load_state_dict({"weight": next(arrays), "bias": next(arrays)})
        layers += [linear, ag.nn.ReLU()]
    ddp = dist.DistributedDataParallel(ag.nn.Sequential(*layers[:-1]), group)
    await ddp.synchronize()
    _sides[OURS] = ddp, ag.optim.SGD(ddp.parameters(), lr=0.01)
    if port:
        _sides["torch"] = await asyncio.to_thread(_join_torch, port, names.index(worker.name), len(names), widths)  # the import takes seconds


def _join_torch(port: int, rank: int, size: int, widths: list[int]) -> Any:
    import torch
    import torch.distributed as td

    torch.set_num_threads(1)
    td.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    layers: list[Any] = []
    arrays = iter(_arrays(widths))
    for i, o in itertools.pairwise(widths):
        linear = torch.nn.Linear(i, o)
        linear.load_state_dict({"weight": torch.from_numpy(next(arrays)), "bias": torch.from_numpy(next(arrays))})
        layers += [linear, torch.nn.ReLU()]
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers[:-1]))
    return ddp, torch.optim.SGD(ddp.parameters(), lr=0.01)


@service.function
async def measure(side: str, rank: int, rows: int, widths: list[int], steps: int) -> tuple[list[float], list[float]]:
    """Seconds of each step, and the losses."""
    x, y = _batch(rank, rows, widths)
    if side != OURS:
        return await asyncio.to_thread(_torch, x, y, steps)
    ddp, optimizer = _sides[OURS]
    inputs, targets = ag.tensor(x), ag.tensor(y)
    seconds, losses = [], []
    for _ in range(steps + 1):
        begun = time.perf_counter()
        loss = F.cross_entropy(ddp(inputs), targets)
        await loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - begun)
        losses.append(loss.item())
    return seconds[1:], losses


def _torch(x: Any, y: Any, steps: int) -> tuple[list[float], list[float]]:
    import torch

    ddp, optimizer = _sides["torch"]
    inputs, targets = torch.from_numpy(x), torch.from_numpy(y)
    seconds, losses = [], []
    for _ in range(steps + 1):
        begun = time.perf_counter()
        loss = torch.nn.functional.cross_entropy(ddp(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - begun)
        losses.append(loss.item())
    return seconds[1:], losses


@service.function
async def leave() -> None:
    """Leave the groups."""
    await _sides.pop(OURS)[0].group.aclose()
    if "torch" in _sides:
        import torch.distributed as td

        _sides.pop("torch")
        td.destroy_process_group()


def run(settings: Settings) -> Iterator[Table]:
    """Two processes."""
    yield ag.run(_run(settings))


async def _run(settings: Settings) -> Table:
    sides = [OURS, *(peer for peer in settings.peers if peer == "torch")]
    widths = [settings.of(width, 10) for width in WIDTHS]
    times: dict[tuple[str, int], list[float]] = {(side, rows): [] for side in sides for rows in BATCHES}
    os.environ.update({"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"})
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1] if "torch" in sides else 0
    async with dist.LocalCluster(SIZE, service="tests.benchmarks.data_parallel:service") as cluster:
        driver, names = cluster.driver, list(cluster.workers)

        async def everywhere(function: str, *arguments: Any) -> list[Any]:
            return await asyncio.gather(*(driver.call(name, function, *arguments, timeout=300.0) for name in names))

        await everywhere("join", names, port, widths)
        for _ in range(settings.of(4, 1)):
            for rows in BATCHES:
                losses = {}
                for side in sides:
                    steps = settings.of(15, 2)
                    running = [driver.call(name, "measure", side, rank, rows, widths, steps, timeout=300.0) for rank, name in enumerate(names)]
                    found = await asyncio.gather(*running)
                    times[side, rows] += found[0][0]
                    losses[side] = [each[1] for each in found]
                if len(sides) > 1 and not np.allclose(losses[OURS], losses["torch"], rtol=1e-2):
                    raise DisagreementError(f"the losses differ: {losses}")
        await everywhere("leave")
    table = Table(
        f"A data-parallel step over {SIZE} processes of one machine, MLP {'-'.join(map(str, widths))}",
        ["rows each", *(f"{side} min/median" for side in sides), "ratio min", "target", "beyond", "verdict"],
        notes=["large frames in shared memory, the rest encrypted, against torch's gloo in the clear over loopback TCP; a thread each"],
    )
    for rows in BATCHES:
        cells = [f"{min(times[side, rows]) * 1e3:.2f}/{float(np.median(times[side, rows])) * 1e3:.2f} ms" for side in sides]
        ratio = min(times[OURS, rows]) / min(times["torch", rows]) if len(sides) > 1 else None
        shown = "" if ratio is None else f"{ratio:.2f} × torch"
        table.add(rows, *cells, shown, *goal_cells(None if settings.tiny else ratio, TARGET, None))
    return table

"""Training steps of whole networks, in turns with PyTorch eager on the same device."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import numpy as np

import aiograd as ag
from tests.benchmarks import networks
from tests.gpu.measuring import ROUNDS, Run, table


def run(run: Run) -> Iterator[str]:
    """The table, line by line."""
    full: dict[str, Callable[[], networks.Network]] = {
        "MLP, 512 rows, 1024-4096-4096-10": lambda: networks.mlp(512, (1024, 4096, 4096, 10)),
        "CNN, 128 images of 32×32, 32-64-128": lambda: networks.cnn(128, 32, (32, 64, 128)),
        "transformer, 8×512×768, 12 heads, 6 blocks": lambda: networks.transformer(8, 512, 768, 12, 6),
        "transformer, 2×64×64, 4 heads, 2 blocks": lambda: networks.transformer(2, 64, 64, 4, 2),
    }
    tiny: dict[str, Callable[[], networks.Network]] = {"MLP": lambda: networks.mlp(2, (3, 4, 2))}
    rows = (_compared(run, name, make()) for name, make in (tiny if run.tiny else full).items())
    return table("Training steps (forward, backward, SGD)", ("network", *_KINDS, "torch ms", "torch / aiograd", "torch / compiled"), rows)


_KINDS = "aiograd ms", "compiled ms"


def _compared(run: Run, name: str, network: networks.Network) -> tuple[Any, ...]:
    ours = {kind: _ours(network, compiled=kind == "compiled ms") for kind in _KINDS}
    theirs = None if run.torch is None else _theirs(run.torch, network)
    count = run.of(20, 1)
    found: dict[str, list[float]] = {kind: [] for kind in (*_KINDS, "torch")}

    async def main() -> None:
        for kind, steps in (*ours.items(), *ours.items()):
            started = time.perf_counter()
            await steps(2 if not run.tiny else 1)
            print(f"({name}: first steps, {kind.removesuffix(' ms')}, {time.perf_counter() - started:.1f} s)", flush=True)
        if theirs is not None:
            theirs(2)
        for _ in range(run.of(ROUNDS, 1)):
            for kind, steps in ours.items():
                started = time.perf_counter()
                await steps(count)
                found[kind].append((time.perf_counter() - started) / count)
            if theirs is not None:
                started = time.perf_counter()
                theirs(count)
                found["torch"].append((time.perf_counter() - started) / count)

    asyncio.run(main())
    times = [min(found[kind]) for kind in _KINDS]
    other = min(found["torch"], default=None)
    ratios = ["" if other is None else f"{other / mine:.2f}" for mine in times]
    return name, *[f"{mine * 1e3:.2f}" for mine in times], "" if other is None else f"{other * 1e3:.2f}", *ratios


def _ours(network: networks.Network, *, compiled: bool) -> Callable[[int], Awaitable[None]]:
    # labels are arguments of the loss that are not differentiated, and are read on the host
    data = [ag.tensor(value, device="cuda:0" if value.dtype.kind == "f" else None) for value in network.data]
    parameters = [ag.tensor(value, device="cuda:0", requires_grad=True) for value in network.parameters]
    optimizer = ag.optim.SGD(parameters, lr=1e-4)

    async def step() -> None:
        optimizer.zero_grad()
        await network.loss(ag.nn.functional, data, parameters).backward()
        optimizer.step()

    step = ag.compile(step) if compiled else step

    async def steps(count: int) -> None:
        for _ in range(count):
            await step()
        await ag.ready(parameters)
        await ag.cuda.synchronize()

    return steps


def _theirs(torch: Any, network: networks.Network) -> Callable[[int], None]:
    data = [torch.tensor(np.asarray(value), device="cuda") for value in network.data]
    parameters = [torch.tensor(value, device="cuda", requires_grad=True) for value in network.parameters]
    optimizer = torch.optim.SGD(parameters, lr=1e-4)

    def steps(count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            network.loss(torch.nn.functional, data, parameters).backward()
            optimizer.step()
        torch.cuda.synchronize()

    return steps

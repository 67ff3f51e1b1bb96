"""Torch modules as nodes: forward and backward beside torch alone in the same run, and how late the loop is beside a large wrapped backward."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np

import aiograd as ag
from tests.benchmarks.harness import Settings, Table, threads
from tests.benchmarks.loop_lag import lags_beside

#: microseconds of a call, forward and backward, over torch alone
OVERHEAD = 60.0
#: milliseconds of lag, 99th percentile
LAG = 3.0


def run(settings: Settings) -> Iterator[Table]:
    """Two tables; empty where torch is not installed or not asked for."""
    times = ["module", "torch µs", "wrapped µs", "over it µs", "target", "verdict"]
    for title, columns, measure in (
        ("A wrapped torch module, 1 thread: forward + backward + free", times, _calls),
        ("Lag of a 1 ms heartbeat beside a wrapped backward", ["module", "beats", "p99 ms", "max ms", "target", "verdict"], _lag),
    ):
        table = Table(title, columns)
        if "torch" in settings.peers:
            with threads(1):
                ag.run(measure(settings, table))
        else:
            table.notes.append("torch is not installed, or not asked for")
        yield table


def _modules(torch: Any, settings: Settings) -> dict[str, tuple[Any, Any]]:
    nn, width = torch.nn, settings.of(512, 8)
    rng = np.random.default_rng(0)
    small, large = (rng.normal(size=shape).astype(np.float32) for shape in ((8, 16), (settings.of(256, 4), width)))
    return {
        "Linear 16-16, batch 8": (nn.Linear(16, 16), small),
        "Linear, GELU, LayerNorm, Linear": (nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4)), small),
        f"{width}-{width}-{width}, batch {len(large)}": (nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)), large),
    }


async def _calls(settings: Settings, table: Table) -> None:
    import torch

    torch.set_num_threads(1)
    for name, (module, x) in _modules(torch, settings).items():
        layer = ag.interop.torch.wrap(module)
        ours, theirs = ag.asarray(x.copy()).requires_grad_(), torch.from_numpy(x.copy()).requires_grad_()
        seed = module(theirs).detach()
        gradient = ag.interop.torch.from_torch(seed)

        async def wrapped(layer: Any = layer, ours: Any = ours, gradient: Any = gradient, module: Any = module) -> None:
            await layer(ours).backward(gradient)
            module.zero_grad()
            ours.grad = None

        async def alone(module: Any = module, theirs: Any = theirs, seed: Any = seed) -> None:
            module(theirs).backward(seed)
            module.zero_grad()
            theirs.grad = None

        await wrapped()
        await alone()
        best = {alone: float("inf"), wrapped: float("inf")}
        for _ in range(settings.of(15, 1)):
            for step in best:
                count = settings.of(300, 2)
                began = time.perf_counter()
                for _ in range(count):
                    await step()
                best[step] = min(best[step], (time.perf_counter() - began) / count)
        over = (best[wrapped] - best[alone]) * 1e6
        judged = "" if settings.tiny else "met" if over <= OVERHEAD else "missed"
        table.add(name, f"{best[alone] * 1e6:.1f}", f"{best[wrapped] * 1e6:.1f}", f"{over:.1f}", f"≤ {OVERHEAD:g}", judged)


async def _lag(settings: Settings, table: Table) -> None:
    import torch

    width = settings.of(1024, 8)
    torch.set_num_threads(1)
    layer = ag.interop.torch.wrap(torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, width)))
    x = ag.asarray(np.random.default_rng(0).normal(size=(settings.of(256, 4), width)).astype(np.float32))
    loss = layer(x).sum()
    found = await lags_beside(lambda: loss.backward(retain_graph=True), settings.of(30, 1))
    p99, most = (float(np.quantile(found, q)) * 1e3 for q in (0.99, 1.0))
    judged = "" if settings.tiny else "met" if p99 <= LAG else "missed"
    table.add(f"{width}-{width}-{width}, batch {len(x)}", len(found), f"{p99:.2f}", f"{most:.2f}", f"≤ {LAG:g}", judged)

"""Training on a GPU without leaving the event loop: launches return at once, tensors are awaited, a heartbeat goes on beating.

Where there is no GPU the same kernels run in numba's simulator, which is slow and exact; the numbers printed are then about correctness only.

    python examples/gpu.py
"""

from __future__ import annotations

import asyncio
import os
import sys
import time

import numpy as np
from sklearn.datasets import load_iris

import aiograd as ag
from aiograd import nn
from aiograd.nn import functional as F


def data() -> tuple[np.ndarray, np.ndarray]:
    """150 flowers: four measures each, standardised, and which of three species they are."""
    iris = load_iris()
    measures = iris.data.astype(np.float32)
    return (measures - measures.mean(0)) / measures.std(0), iris.target.astype(np.int64)


def network(device: str) -> nn.Module:
    made = {"device": device, "generator": ag.Generator(0)}
    return nn.Sequential(nn.Linear(4, 16, **made), nn.GELU(), nn.Linear(16, 3, **made))


async def train(device: str, steps: int) -> tuple[list[float], list[np.ndarray], float]:
    """Losses, final weights and the share of flowers that are named correctly."""
    measures, species = data()
    model = network(device)
    optimizer = ag.optim.AdamW(model.parameters(), lr=0.05)
    batches = np.random.default_rng(1).integers(0, len(measures), (steps, 32))
    losses = []
    for rows in batches:
        x, y = ag.tensor(measures[rows], device=device), ag.tensor(species[rows], device=device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)  # launched, not computed yet
        await loss.backward()  # the device computes; the loop is free
        optimizer.step()
        losses.append((await loss).item())
    with ag.no_grad():
        answers = (await model(ag.tensor(measures, device=device))).to("cpu").numpy().argmax(1)
    weights = [(await p.detach()).to("cpu").numpy() for p in model.parameters()]
    return losses, weights, float((answers == species).mean())


async def heartbeat(beats: list[float]) -> None:
    """What a service would do meanwhile: note how long each turn of the loop took."""
    while True:
        before = time.perf_counter()
        await asyncio.sleep(0.001)
        beats.append(time.perf_counter() - before - 0.001)


async def main() -> None:
    simulated = os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"
    steps = 25 if simulated else 200
    beats: list[float] = []
    heart = asyncio.create_task(heartbeat(beats))
    started = time.perf_counter()
    losses, weights, accuracy = await train("cuda:0", steps)
    seconds = time.perf_counter() - started
    heart.cancel()
    statistics = ag.cuda.statistics()
    print(f"{steps} steps on cuda:0 in {seconds:.1f} s: loss {losses[0]:.3f} to {losses[-1]:.3f}, {accuracy:.1%} of the flowers named correctly")
    print(f"{statistics.commands / steps:.0f} commands a step; operations without a kernel: {statistics.fallbacks or 'none'}")
    if beats and not simulated:
        print(f"meanwhile the loop took {len(beats)} other turns, {1000 * float(np.median(beats)):.2f} ms late in the median")

    wanted, same, _ = await train("cpu", steps)
    worst = max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(weights, same, strict=True))
    print(f"against the host: losses differ by at most {np.abs(np.subtract(losses, wanted)).max():.1e}, weights by {worst:.1e} of the largest")
    again, weights2, _ = await train("cuda:0", steps)
    assert again == losses and all(np.array_equal(a, b) for a, b in zip(weights, weights2, strict=True))
    print("a second run on the device gave the same bits")
    assert accuracy > 0.85 and worst < 1e-3 and not statistics.fallbacks


if __name__ == "__main__":
    if not ag.cuda.is_available():
        print(f"There is no GPU to use: {ag.cuda.why_not()}")
        if "NUMBA_ENABLE_CUDASIM" in os.environ:
            sys.exit("Nor is there a simulator.")
        os.environ["NUMBA_ENABLE_CUDASIM"] = "1"  # before numba is imported: start again
        print("The kernels run in numba's simulator instead.\n", flush=True)
        os.execv(sys.executable, [sys.executable, *sys.argv])  # noqa: S606  # this program itself
    ag.run(main())

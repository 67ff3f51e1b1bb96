"""A mixture of experts over worker processes, one of which is killed while it trains.

    python examples/mixture_of_experts.py                # three worker processes on this machine, about ten seconds
    python examples/mixture_of_experts.py --steps 1000

Nine experts, three per process, read handwritten digits. The driver has the gate: it scores the places of a 3 × 3 grid, sends each image to the two
best experts and adds up what they answer. Images of a batch that go to the same expert travel in one request, and so do their gradients. Experts
learn by themselves from the gradients they get. When a process is killed, its experts are left out of the images that had asked for them, the
result says which, and training goes on; the process is started again with new experts.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import time
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # matrices this small gain nothing from more, and waiting for each other costs

import numpy as np
from sklearn.datasets import load_digits

import aiograd as ag
from aiograd import distributed as dist
from aiograd import nn
from aiograd.distributed import moe
from aiograd.nn import functional as F

GRID = (3, 3)
WORKERS = [f"row{i}" for i in range(GRID[0])]

# -------------------------------------------------------------------- what runs in the worker processes


def expert(i: int, j: int) -> moe.ExpertBackend:
    """The expert at a place of the grid, with the optimizer it learns with."""
    generator = ag.Generator(10 * i + j)
    module = nn.Sequential(nn.Linear(64, 48, generator=generator), nn.ReLU(), nn.Linear(48, 10, generator=generator))
    return moe.ExpertBackend(module, ag.optim.Adam(module.parameters(), lr=2e-3))


service = dist.Service()
moe.serve_experts(service, {f"reader.{i}.{j}": expert(i, j) for i in range(GRID[0]) for j in range(GRID[1])})


@service.function
async def die() -> None:
    """End this process at once, as a crash would."""
    os.kill(os.getpid(), signal.SIGKILL)


# -------------------------------------------------------------------- what runs here


async def main(steps: int, on: str) -> None:
    """Train, kill a process on the way, and print what came of it."""
    digits = load_digits()
    images, labels = (digits.data / 16).astype(np.float32), digits.target
    random = np.random.default_rng(0)
    order = random.permutation(len(labels))
    training, testing = order[:1437], order[1437:]

    async with dist.make_cluster(on, len(WORKERS), names=WORKERS, service="mixture_of_experts:service") as cluster:
        experts = {
            f"reader.{i}.{j}": moe.RemoteExpert(cluster.driver, worker, f"reader.{i}.{j}", timeout=10.0)
            for i, worker in enumerate(WORKERS) for j in range(GRID[1])
        }  # fmt: skip
        mixture = moe.RemoteMixtureOfExperts(64, GRID, experts, prefix="reader.", k_best=2, on_expert_loss="drop", k_min=0, allow_zero_outputs=True)
        optimizer = ag.optim.Adam(mixture.parameters(), lr=1e-2)

        requests: list[int] = []
        missed: list[Any] = []

        async def learn() -> tuple[float, int]:
            """One batch: its loss, and how many answers were lost."""
            rows = random.choice(training, 32, replace=False)
            optimizer.zero_grad()
            loss = F.cross_entropy(await mixture(ag.asarray(images[rows])), labels[rows])
            await loss.backward()
            optimizer.step()
            assert mixture.last is not None
            requests.append(mixture.last.requests)
            missed.extend(mixture.last.lost)
            return loss.item(), len(mixture.last.lost) + len(mixture.last.lost_in_backward)

        async def accuracy() -> float:
            with ag.no_grad():
                right = [(await mixture(ag.asarray(images[rows]))).numpy().argmax(axis=1) == labels[rows] for rows in np.array_split(testing, 6)]
            return float(np.concatenate(right).mean())

        print(f"Nine experts in {len(WORKERS)} processes: " + ", ".join(cluster.workers))
        started, half = time.perf_counter(), steps // 2
        losses = [(await learn())[0] for _ in range(half)]
        seconds = time.perf_counter() - started
        print(f"\n{half} batches of 32 images, {np.mean(requests):.1f} requests each way per batch, {seconds / half * 1e3:.0f} ms per batch:")
        print(f"    loss {np.mean(losses[:5]):.3f} -> {np.mean(losses[-5:]):.3f}, {await accuracy():.1%} of {len(testing)} test images")

        with contextlib.suppress(ag.errors.WorkerLostError):
            await cluster.driver.call(WORKERS[1], "die")
        outcomes = [await learn() for _ in range(5)]
        lost, loss = sum(count for _, count in outcomes), np.mean([loss for loss, _ in outcomes])
        print(f"\n{WORKERS[1]} is killed. Five more batches: {lost} of 320 answers lost and left out, loss {loss:.3f}")
        print(f"    the first one: sample {missed[0].sample} missed {missed[0].expert}: {type(missed[0].error).__name__}")
        print(f"    {await accuracy():.1%} of the test images with what is there")  # on Ray it may be back by now

        await cluster.restart(WORKERS[1])  # with --on join it is waited for: whatever started it has to start it again
        outcomes = [await learn() for _ in range(steps - half)]
        share = await accuracy()
        print(f"\n{WORKERS[1]} runs again with new experts. {steps - half} more batches: {sum(count for _, count in outcomes)} answers lost,")
        print(f"    loss {np.mean([loss for loss, _ in outcomes[-5:]]):.3f}, {share:.1%} of the test images")
        assert np.isfinite([loss for loss, _ in outcomes]).all()
        assert lost > 0 and (steps < 140 or share > 0.85)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--on", choices=("local", "ray", "join"), default="local", help="where the workers run (default: processes of this machine)")
    options = parser.parse_args()
    ag.run(main(options.steps, options.on))

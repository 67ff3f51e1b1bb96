"""Figures of `RayCluster`, each beside its peer in turns of one run: ``.venv-ray/bin/python -m tests.ray``.

A pass through two workers on two nodes, beside the same on two processes of a `LocalCluster`; and a worker that is asked for until it is ready,
beside an actor of Ray with nothing in it.

Wall time is to be believed on a quiet machine only: workers of a `LocalCluster` have sessions of their own and those of Ray have not, which Linux
schedules differently where processors are short. Processor time is comparable on any.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np

import aiograd as ag
import aiograd.distributed as dist
from tests.ray.nodes import running_nodes
from tests.ray.training import SERVICE

#: elements of the tensor, passes in a turn
PASSES = {"4 floats": (4, 100), "10 MB": (2_500_000, 5)}


class Bare:
    """An actor with nothing in it."""

    async def ping(self) -> int:
        """The number of its process."""
        return os.getpid()


def processor_seconds(*pids: int) -> float:
    """Processor time that these processes have used."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(each[11]) + int(each[12]) for each in fields) / os.sysconf("SC_CLK_TCK")


@dataclass
class Times:
    """Figures of one side: seconds of each run, and processor seconds of each turn per run."""

    wall: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)


async def passes(cluster: dist.LocalCluster | dist.RayCluster, elements: int, count: int, times: Times) -> None:
    """Passes forward through one worker and the other, and backward through both."""
    x = ag.asarray(np.ones(elements, np.float32)).requires_grad_()
    pids = os.getpid(), *cluster.pids.values()
    for number in range(count + 1):
        if number == 1:  # the first one warms up
            used = processor_seconds(*pids)
        began = time.perf_counter()
        async with cluster.driver.context() as ctx:
            await ctx.backward((await cluster.driver.call("worker0", "double_at", "worker1", x)).sum())
            assert float(ctx.grads[x][0].item()) == 2.0
        if number > 0:
            times.wall.append(time.perf_counter() - began)
    times.processor.append((processor_seconds(*pids) - used) / count)


async def bare_actor(times: Times) -> None:
    """Make an actor with nothing in it, and wait until it answers."""
    import ray

    began = time.perf_counter()
    actor = ray.remote(Bare).options(num_cpus=1).remote()
    pid = await actor.ping.remote()
    times.wall.append(time.perf_counter() - began)
    times.processor.append(processor_seconds(pid))
    ray.kill(actor)


async def worker(cluster: dist.RayCluster, times: Times) -> None:
    """Add a worker, and wait until it has been introduced to all."""
    began = time.perf_counter()
    await cluster.add("late")
    times.wall.append(time.perf_counter() - began)
    times.processor.append(processor_seconds(cluster.pids["late"]))
    await cluster.remove("late")


async def measure(rounds: int) -> None:
    """Print each figure: minimum and median of both sides, and what is between them."""
    async with dist.LocalCluster(2, service=SERVICE) as local, dist.RayCluster(2, service=SERVICE) as on_ray:
        assert on_ray.node_of("worker0") != on_ray.node_of("worker1")
        sides: dict[str, dist.LocalCluster | dist.RayCluster] = {"local": local, "on Ray": on_ray}
        for name, (elements, count) in PASSES.items():
            found = {side: Times() for side in sides}
            for number in range(rounds):
                for side in sorted(sides, reverse=number % 2 == 1):  # who begins in one round is second in the next
                    await passes(sides[side], elements, count, found[side])
            ours, peer = found["on Ray"], found["local"]
            print(
                f"a pass of {name} across two nodes, over LocalCluster (at most 1.05): minima {min(ours.wall) / min(peer.wall):.3f}, "
                f"medians {median(ours.wall) / median(peer.wall):.3f}, processor time {median(ours.processor) / median(peer.processor):.3f}; "
                f"best {min(ours.wall) * 1e3:.2f} and {min(peer.wall) * 1e3:.2f} ms",
                flush=True,
            )
        await worker(on_ray, Times())  # from now on there is a place for it
        ours, peer = Times(), Times()
        for _ in range(rounds):
            await bare_actor(peer)
            await worker(on_ray, ours)
        print(
            f"a worker is ready, over a bare actor (at most 0.5 s): minima {min(ours.wall) - min(peer.wall):.2f} s, "
            f"medians {median(ours.wall) - median(peer.wall):.2f} s, processor time {min(ours.processor) - min(peer.processor):.2f} s; "
            f"best {min(ours.wall):.2f} and {min(peer.wall):.2f} s"
        )


def main() -> None:
    """Start the nodes and measure."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    with running_nodes():
        ag.run(measure(options.rounds))


if __name__ == "__main__":
    main()

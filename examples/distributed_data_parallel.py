"""Data parallelism without a controller: every process runs this same program with its shard of the digits, as torchrun users know it.

Run it alone and it starts the processes of one machine::

    python examples/distributed_data_parallel.py --processes 3

Or start one process per rank yourself, on as many machines as you like, with the same variables as torchrun sets::

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 AIOGRAD_SECRET=... python examples/distributed_data_parallel.py

Rank r listens on port MASTER_PORT + r. The ranks of one machine share MASTER_ADDR; elsewhere give all addresses: HOSTS=10.0.0.1,10.0.0.2.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import socket
import subprocess
import sys

import numpy as np
from sklearn.datasets import load_digits

import aiograd as ag
from aiograd import distributed as dist
from aiograd.nn import functional as F

BATCH = 60


class Net(ag.nn.Module):
    """A small classifier of 8 x 8 images."""

    def __init__(self) -> None:
        self.layers = ag.nn.Sequential(ag.nn.Linear(64, 64), ag.nn.ReLU(), ag.nn.Linear(64, 10))

    def forward(self, x: ag.Tensor) -> ag.Tensor:
        """Scores of the ten digits."""
        return self.layers(x)


async def train(rank: int, size: int, steps: int) -> None:
    """The program of one rank."""
    address, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "29500"))
    hosts = os.environ.get("HOSTS", ",".join([address] * size)).split(",")
    names = [f"rank{each}" for each in range(size)]
    peers = {name: f"http://{host}:{port + number}" for number, (name, host) in enumerate(zip(names, hosts, strict=True)) if number != rank}
    secret = os.environ["AIOGRAD_SECRET"]
    digits = load_digits()
    images, targets = ag.tensor((digits.data / 16.0).astype(np.float32)), ag.tensor(digits.target)
    data = ag.data.DataLoader(ag.data.TensorDataset(images[:1400], targets[:1400]), BATCH, shuffle=True, generator=ag.Generator(0))
    async with dist.Worker(names[rank], host=hosts[rank], port=port + rank, peers=peers, secret=secret) as worker:
        async with await dist.join_group(worker, names) as group:
            ag.seed(rank)  # the weights are those of rank 0, whatever each begins with
            ddp = dist.DistributedDataParallel(Net(), group, data=data)
            optimizer = ag.optim.AdamW(ddp.parameters(), lr=3e-3)
            await ddp.synchronize()
            step = 0
            while step < steps:
                async for lease in data.leases(rank, size):  # the rows of this rank of the same batch
                    async with lease as (mine, wanted):
                        loss = F.cross_entropy(ddp(mine), wanted)
                        await loss.backward()
                        optimizer.step()
                        optimizer.zero_grad()
                    step += 1
                    if rank == 0 and step % 50 == 0:
                        print(f"step {step}: loss {loss.item():.3f}", flush=True)
                    if step == steps:
                        break
            weights = np.concatenate([p.detach().numpy().reshape(-1) for p in ddp.parameters()])
            everybody = await group.all_gather(weights)
            if rank == 0:
                scores = await ddp(images[1400:])
                right = float((scores.detach().numpy().argmax(1) == digits.target[1400:]).mean())
                equal = all(each.tobytes() == weights.tobytes() for each in everybody)
                print(f"accuracy {right:.2f}; the weights of all {size} ranks have the same bits: {equal}", flush=True)


def free_ports(count: int) -> int:
    """The first of `count` ports in a row that nobody uses."""
    while True:
        with contextlib.ExitStack() as stack:
            probes = [stack.enter_context(socket.socket()) for _ in range(count)]
            try:
                probes[0].bind(("127.0.0.1", 0))
                first: int = probes[0].getsockname()[1]
                for number, probe in enumerate(probes[1:], 1):
                    probe.bind(("127.0.0.1", first + number))
            except (OSError, OverflowError):
                continue
            return first


def main() -> int:
    """Run a rank, or start all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    if "RANK" in os.environ:
        ag.run(train(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), options.steps))
        return 0
    port = free_ports(options.processes)
    shared = {"WORLD_SIZE": str(options.processes), "MASTER_PORT": str(port), "AIOGRAD_SECRET": secrets.token_hex(32)}
    command = [sys.executable, __file__, "--steps", str(options.steps)]
    environments = [{**os.environ, **shared, "RANK": str(rank)} for rank in range(options.processes)]
    running = [subprocess.Popen(command, env=each) for each in environments]  # noqa: S603
    return max(process.wait() for process in running)


if __name__ == "__main__":
    sys.exit(main())

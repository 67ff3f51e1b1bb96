"""The program that the files beside this one start: a driver that trains a network across workers which come by themselves.

    python program.py --expect 2 --listen 127.0.0.1:7000                                   # the driver
    aiograd worker --join http://127.0.0.1:7000 --name w0 --service program:service         # one of its workers; another as w1

All of them need the cluster's key: `(umask 077; openssl rand -hex 32 > cluster.key)` and AIOGRAD_SECRET_FILE=cluster.key.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

import aiograd as ag
from aiograd import distributed as dist
from aiograd import nn

service = dist.Service()


@service.reference
class Block(nn.Module):
    """A layer of the network, on whichever worker it is made.

    Args:
        inputs, outputs: how many numbers go in and come out.
        seed: of the weights.
    """

    def __init__(self, inputs: int, outputs: int, seed: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs, generator=ag.Generator(seed))

    def forward(self, x: Any) -> Any:
        """Numbers between -1 and 1, shape (n, outputs), of x, shape (n, inputs)."""
        return self.linear(x).tanh()


async def main(expect: int, host: str, port: int, steps: int, *, allow_plaintext: bool, trusted_hosts: tuple[str, ...]) -> None:
    """Wait for the workers, train a chain of one block on each, and say goodbye."""
    async with dist.JoinCluster(expect, host=host, port=port, allow_plaintext=allow_plaintext, trusted_hosts=trusted_hosts) as cluster:
        print(f"joined: {', '.join(cluster.workers)}", flush=True)
        driver = cluster.driver
        blocks = [await driver.remote_module(name, "Block", 8, 8, i) for i, name in enumerate(cluster.workers)]
        optimizer = dist.DistributedOptimizer(driver, "Adam", blocks, lr=0.02)
        random = np.random.default_rng(0)
        x = ag.asarray(random.standard_normal((64, 8)).astype(np.float32))
        target = ag.asarray(np.tanh(random.standard_normal((64, 8))).astype(np.float32))
        first = last = 0.0
        for step in range(steps):
            async with driver.context() as ctx:
                y: Any = x
                for block in blocks:
                    y = await block(y)
                loss = ((y - target) ** 2).mean()
                await ctx.backward(loss)
                await optimizer.step(ctx)
            last = loss.item()
            first = first or last
            if step % max(steps // 5, 1) == 0:
                print(f"step {step:4}: loss {last:.4f}", flush=True)
        print(f"loss {first:.4f} -> {last:.4f} after {steps} steps over {len(blocks)} workers", flush=True)
        assert last < first


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--expect", type=int, default=2, help="how many workers to wait for")
    parser.add_argument("--listen", default="127.0.0.1:7000", metavar="HOST:PORT")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--allow-plaintext", action="store_true", help="listen beyond this machine without TLS; messages are encrypted all the same")
    parser.add_argument("--trusted-host", action="append", default=[], metavar="NAME", help="a name in workers' URLs for the driver")
    options = parser.parse_args()
    host, _, port = options.listen.rpartition(":")
    trusted = tuple(options.trusted_host)
    ag.run(main(options.expect, host, int(port), options.steps, allow_plaintext=options.allow_plaintext, trusted_hosts=trusted))

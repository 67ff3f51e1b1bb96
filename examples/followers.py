"""Three processes that serve one model: this one trains it, two follow, and one of them is killed and started again.

    python examples/followers.py                             # about ten seconds
    python examples/followers.py --rate 100 --seconds 4

Each answer names the version of the weights that made it. Followers get each version of the leader as a delta and compare its digest, so answers of a
version have the same bits in every process. A follower that has lost its leader goes on answering; one that starts gets the whole state once.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import signal
import sys
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # three processes share the cores
os.environ.setdefault("AIOGRAD_SECRET", secrets.token_hex(32))  # the followers inherit it

import numpy as np

import aiograd as ag
from aiograd import distributed as dist
from aiograd import serving
from aiograd.nn import functional as F

NAMES = ("left", "right")
ROWS = 50


class Net(ag.nn.Module):
    """Scores of the digits for images of 64 pixels."""

    def __init__(self) -> None:
        generator = ag.Generator(0)
        self.inner = ag.nn.Linear(64, 256, generator=generator)
        self.outer = ag.nn.Linear(256, 10, generator=generator)

    def forward(self, images: Any) -> Any:
        """The scores."""
        return self.outer(F.relu(self.inner(images)))


# -------------------------------------------------------------------- a follower's process


async def follow(name: str, url: str) -> None:
    """Serve what the leader serves, until this process is ended."""
    service = dist.Service()
    async with dist.Worker(name, service=service, peers={"leader": url}) as worker, serving.Follower(worker, "leader", Net()) as follower:

        @service.function
        async def classify(images: ag.Tensor) -> dict[str, Any]:
            answer = await follower.predict(images)
            return {"scores": answer.value, "version": answer.version, "digest": answer.digest}

        @service.function
        async def report() -> dict[str, Any]:
            return {"bytes": follower.bytes_received, "behind": float(np.median(follower.behind or [0.0]))}

        await asyncio.Event().wait()


# -------------------------------------------------------------------- the leader's process


class Leader:
    """The server that trains, and the processes of its followers.

    Args:
        server: the server.
        worker: the worker on which it leads.
        images, labels: digits that the model is not trained on.
    """

    def __init__(self, server: serving.Server, worker: dist.Worker, images: Any, labels: Any) -> None:
        self.server, self.worker = server, worker
        self.images, self.labels = images, labels
        self.processes: dict[str, asyncio.subprocess.Process] = {}

    async def start(self, name: str) -> None:
        """Start a follower, and wait until it has its first version."""
        self.processes[name] = await asyncio.create_subprocess_exec(sys.executable, __file__, "--follow", name, self.worker.url)
        while True:
            try:
                await self.compare(name)
                return
            except ag.errors.DistributedError:  # it is not there yet
                await asyncio.sleep(0.1)

    async def stop(self, name: str, how: signal.Signals) -> None:
        """End a follower's process."""
        process = self.processes.pop(name)
        process.send_signal(how)
        await process.wait()

    async def compare(self, name: str, version: int | None = None) -> None:
        """Have a follower classify digits, by `version` as soon as that serves there, and compare with the answer of the same version here."""
        theirs = await self.worker.call(name, "classify", self.images)
        while version is not None and theirs["version"] != version:
            theirs = await self.worker.call(name, "classify", self.images)
        own = await self.server.predict(self.images, version=theirs["version"])
        same = own.digest == theirs["digest"] and own.value.numpy().tobytes() == theirs["scores"].numpy().tobytes()
        right = float((theirs["scores"].numpy().argmax(1) == self.labels).mean())
        print(f"    {name:5} answers with version {theirs['version']:3}, {right:4.0%} right; the same bits as the leader's: {same}", flush=True)
        assert same

    async def train(self, seconds: float) -> None:
        """Let versions pass."""
        wanted = self.server.current.number + 5
        await asyncio.sleep(seconds)
        await self.server.predict(self.images, at_least=wanted)


async def main(rate: float, seconds: float) -> None:
    """Train, serve and lead."""
    from sklearn.datasets import load_digits  # followers need no data

    digits = load_digits()
    images, labels = (digits.data / 16).astype(np.float32), digits.target.astype(np.int64)
    model, service = Net(), dist.Service()
    buffer = serving.ReplayBuffer(len(labels))
    buffer.add(images[ROWS:], labels[ROWS:])

    async with serving.Server(model, precision="bfloat16", keep=100) as server, dist.Worker("leader", service=service) as worker:
        serving.lead(service, server)
        leader = Leader(server, worker, ag.asarray(images[:ROWS]), labels[:ROWS])
        optimizer = ag.optim.AdamW(model.parameters(), lr=1e-3)
        try:
            print("two followers start", flush=True)
            await asyncio.gather(*map(leader.start, NAMES))
            async with serving.Trainer(server, optimizer, lambda net, x, y: F.cross_entropy(net(x), y), buffer=buffer, rate=rate):
                print(f"the leader trains, {rate:g} versions a second", flush=True)
                await leader.train(seconds)
                await asyncio.gather(*map(leader.compare, NAMES))
                await leader.stop("right", signal.SIGKILL)
                print(f"right is killed at version {server.current.number}", flush=True)
                await leader.train(seconds)
                await leader.compare("left")
                print("right starts again", flush=True)
                await leader.start("right")
                await leader.train(seconds)
            last, back = server.current.number, server.rollback().number
            print(f"a rollback from version {last} to {back}", flush=True)
            await asyncio.gather(*(leader.compare(name, back) for name in NAMES))
            reports = {name: await worker.call(name, "report") for name in NAMES}
            for name, report in reports.items():
                print(f"    {name:5} has received {report['bytes']:,} bytes and is {1000 * report['behind']:.1f} ms behind (median)", flush=True)
        finally:
            await asyncio.gather(*(leader.stop(name, signal.SIGTERM) for name in list(leader.processes)))
        print(f"{server.current.number} versions of {server.current.nbytes:,} bytes; every answer had the bits of its version", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rate", type=float, default=50.0, help="steps per second (default 50)")
    parser.add_argument("--seconds", type=float, default=1.0, help="of training in each part (default 1)")
    parser.add_argument("--follow", nargs=2, metavar=("NAME", "URL"), help="be a follower")
    options = parser.parse_args()
    ag.run(follow(*options.follow) if options.follow else main(options.rate, options.seconds))

"""Split learning: four parties learn to read digits together, though each sees only a quarter of every image and shows it to nobody.

    python examples/split_learning.py                 # four worker processes on this machine, a few seconds
    python examples/split_learning.py --epochs 30

Every party is a worker process with its own quarter of the pixels and an encoder of its own. The driver has the labels and the last layers. For
each batch it asks all parties at once for their features, runs one backward pass that goes on through all of them, and lets every party update
its own encoder. What travels are 16 numbers per image and party, and their gradients.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # matrices this small gain nothing from more, and waiting for each other costs

import numpy as np
from sklearn.datasets import load_digits

import aiograd as ag
from aiograd import distributed as dist
from aiograd import nn
from aiograd.errors import RemoteError
from aiograd.nn import functional as F

#: the parties, and where their quarters of the images begin
PARTIES = {"north_west": (0, 0), "north_east": (0, 4), "south_west": (4, 0), "south_east": (4, 4)}
FEATURES = 16
BATCHES = 22

# -------------------------------------------------------------------- what runs in the processes of the parties

service = dist.Service()


@service.reference
class View(nn.Module):
    """A party's side: its quarter of every image, and the encoder that reads it. Others may call its public methods, and nothing else.

    Args:
        party: whose.
        limit: the largest gradient that the party takes, so that nobody can push its encoder about.
    """

    def __init__(self, party: str, limit: float = 10.0) -> None:
        super().__init__()
        top, left = PARTIES[party]
        generator = ag.Generator(list(PARTIES).index(party))
        self._pixels = (load_digits().images[:, top : top + 4, left : left + 4] / 16).reshape(-1, 16).astype(np.float32)
        self._limit = limit
        self.encoder = nn.Sequential(
            nn.Linear(16, 64, generator=generator), nn.ReLU(), nn.Linear(64, FEATURES, generator=generator), nn.Tanh()
        )  # fmt: skip

    def forward(self, rows: list[int]) -> Any:
        """Features of some images, (n, 16)."""
        features = self.encoder(ag.asarray(self._pixels[rows]))
        if features.requires_grad:
            features.register_hook(self._check)
        return features

    def _check(self, gradient: Any) -> None:
        if (largest := float(abs(gradient).max())) > self._limit:
            raise ValueError(f"a gradient of {largest:.3g} is more than this party takes ({self._limit:g})")


# -------------------------------------------------------------------- what runs here


class Reader:
    """A network whose first layers are spread over parties.

    Args:
        driver: the worker of this process.
        parties: whose views it reads.
    """

    def __init__(self, driver: dist.Worker, parties: list[str]) -> None:
        self.driver = driver
        self.parties = parties
        width = FEATURES * len(parties)
        generator = ag.Generator(100)
        self.head = nn.Sequential(nn.Linear(width, 64, generator=generator), nn.ReLU(), nn.Linear(64, 10, generator=generator))

    async def build(self) -> Reader:
        """Make the parties' encoders where they live."""
        refs = await asyncio.gather(*(self.driver.remote(party, View, party) for party in self.parties))
        self.views = [dist.RemoteModule(self.driver, party, ref) for party, ref in zip(self.parties, refs, strict=True)]
        self.optimizer = dist.DistributedOptimizer(self.driver, ag.optim.AdamW, [*self.views, self.head], lr=4e-3)
        return self

    async def forward(self, rows: Any) -> Any:
        """Scores of each digit, (n, 10): all parties are asked at once."""
        features = await asyncio.gather(*(view(rows.tolist()) for view in self.views))
        return self.head(ag.concat(features, axis=1))

    async def learn(self, rows: Any, labels: Any, scale: float = 1.0) -> float:
        """One batch; returns its loss. Where anything fails on any worker, none of them learns anything."""
        async with self.driver.context() as ctx:
            loss = F.cross_entropy(await self.forward(rows), labels) * scale
            await ctx.backward(loss)
            await self.optimizer.step(ctx)
        return loss.item()

    async def train(self, rows: Any, labels: Any, epochs: int) -> float:
        """Learn from `rows`; returns the mean loss of the last epoch."""
        for epoch in range(epochs):
            batches = np.array_split(np.random.default_rng(epoch).permutation(rows), BATCHES)
            losses = [await self.learn(batch, labels[batch]) for batch in batches]
        return float(np.mean(losses))

    async def accuracy(self, rows: Any, labels: Any) -> float:
        """Share of images that are read correctly."""
        with ag.no_grad():
            scores = await self.forward(rows)
        return float((scores.numpy().argmax(axis=1) == labels[rows]).mean())

    async def weights(self) -> list[bytes]:
        """All weights, bit for bit."""
        states = [self.head.state_dict(), *await asyncio.gather(*(view.state_dict() for view in self.views))]
        return [value.numpy().tobytes() for state in states for value in state.values()]


async def main(epochs: int, on: str) -> None:
    labels = load_digits().target
    order = np.random.default_rng(0).permutation(len(labels))
    training, testing = order[:1437], order[1437:]
    async with dist.make_cluster(on, len(PARTIES), names=list(PARTIES), service="split_learning:service") as cluster:
        driver = cluster.driver
        print("Parties, each with a quarter of every image:")
        for party in PARTIES:
            print(f"    {party:10}  {cluster.urls[party]}")

        started = time.perf_counter()
        alone = [await Reader(driver, [party]).build() for party in PARTIES]
        await asyncio.gather(*(reader.train(training, labels, epochs) for reader in alone))
        shares = await asyncio.gather(*(reader.accuracy(testing, labels) for reader in alone))
        print(f"\nEach party alone with the driver, four trainings at the same time ({time.perf_counter() - started:.1f} s):")
        for party, share in zip(PARTIES, shares, strict=True):
            print(f"    {party:10}  {share:5.1%} of {len(testing)} test images")

        before, started = driver.statistics(), time.perf_counter()
        together = await Reader(driver, list(PARTIES)).build()
        loss = await together.train(training, labels, epochs)
        seconds, share = time.perf_counter() - started, await together.accuracy(testing, labels)
        after = driver.statistics()
        count = epochs * BATCHES
        moved = after.bytes_in + after.bytes_out - before.bytes_in - before.bytes_out
        print(f"\nAll together, {count} batches in {seconds:.1f} s, each with four remote calls at once and one backward pass through them:")
        print(f"    {share:5.1%} of {len(testing)} test images, mean loss {loss:.4f}")
        print(f"    {seconds / count * 1e3:.1f} ms and {moved / count / 1e3:.1f} kB per batch of {len(training) // BATCHES} images")

        rows = training[:64]
        with ag.no_grad():
            first = time.perf_counter()
            for view in together.views:
                await view(order.tolist())
            second = time.perf_counter()
            await together.forward(order)
            third = time.perf_counter()
        in_turn, at_once = (second - first) * 1e3, (third - second) * 1e3
        print(f"    all {len(order)} images read: {in_turn:.1f} ms asking one party after the other, {at_once:.1f} ms asking them at once")

        print("\nA batch whose gradients are far too large for the parties:")
        weights = await together.weights()
        try:
            await together.learn(rows, labels[rows], scale=1e6)
        except RemoteError as error:
            print(f"    {type(error).__name__}: {error}")
            print(f"    raised on {error.worker} as {error.type_name}; its log has the traceback as {error.correlation_id}")
        unchanged = await together.weights() == weights
        print(f"    the weights of all four parties and of the driver {'have the same bits as before' if unchanged else 'HAVE CHANGED'}")
        print(f"    the next batch is learnt again: loss {await together.learn(rows, labels[rows]):.4f}")
        assert unchanged
        assert epochs < 5 or share > max(shares)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--on", choices=("local", "ray", "join"), default="local", help="where the workers run (default: processes of this machine)")
    options = parser.parse_args()
    ag.run(main(options.epochs, options.on))

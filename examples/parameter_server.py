"""The parameter server of PyTorch's RPC tutorials, ported: trainers in processes of their own learn one model, which lives on a server.

    python examples/parameter_server.py               # a server and three trainers on this machine, a few seconds
    python examples/parameter_server.py --trainers 5 --steps 200

Each trainer has data of its own. In every step it calls the model on the server, computes the loss, runs a backward pass that goes on there, in a
context of its own, and asks for the update. The server answers all trainers once it has taken one step with the gradients of all of them: in PyTorch
that is a `Future` and `rpc.functions.async_execution`, here an `async def` that awaits. The losses are those of one process, to the bit.

docs/guides/from-torch-rpc.md has the calls of `torch.distributed.rpc` and `torch.distributed.autograd` beside these.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # another number of threads rounds otherwise

import numpy as np

try:
    from sklearn.datasets import load_digits
except ImportError:
    sys.exit("this example needs scikit-learn: pip install '.[demo]'")

import aiograd as ag
from aiograd import distributed as dist
from aiograd import nn

BATCH = 32

# -------------------------------------------------------------------- what runs in the worker processes

service = dist.Service()


@service.reference
class ParameterServer(nn.Module):
    """The model, and the optimizer that trainers share.

    Args:
        trainers: how many there are.
    """

    def __init__(self, trainers: int) -> None:
        generator = ag.Generator(0)
        self.layers = nn.Sequential(nn.Linear(64, 32, generator=generator), nn.ReLU(), nn.Linear(32, 10, generator=generator))
        self.optimizer = ag.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        self.trainers = trainers
        self.gradients: dict[int, Any] = {}
        self.updated: asyncio.Future[None] | None = None

    def forward(self, images: Any) -> Any:
        """Scores of the digits, (n, 10)."""
        return self.layers(images)

    async def update(self, rank: int) -> None:
        """Return when a step has been taken with the gradients of all trainers; this one's are in its context."""
        context = dist.current_context()
        assert context is not None
        self.gradients[rank] = [context.grads[p] for p in self.parameters()]
        self.updated = self.updated or asyncio.get_running_loop().create_future()
        updated = self.updated
        if len(self.gradients) == self.trainers:
            self.step()
            updated.set_result(None)
        await updated

    def step(self) -> None:
        """Take a step with the mean of the gradients, added up in the order of the trainers."""
        self.optimizer.step([sum(grads) / self.trainers for grads in zip(*(self.gradients[rank] for rank in range(self.trainers)), strict=True)])
        self.gradients, self.updated = {}, None


@service.function
async def train(server: dist.RemoteRef, rank: int, trainers: int, steps: int) -> list[float]:
    """The program of a trainer; returns its losses."""
    losses = []
    worker = dist.current_worker()
    model = dist.RemoteModule(worker, server.owner, server)
    for images, labels in batches(rank, trainers, steps):
        async with worker.context() as ctx:
            loss = nn.functional.cross_entropy(await model(ag.asarray(images)), labels)
            await ctx.backward(loss)
            await server.call("update", rank)
        losses.append(loss.item())
    return losses


def batches(rank: int, trainers: int, steps: int) -> list[Any]:
    """The batches of a trainer, whose images no other trainer has."""
    digits, random = load_digits(), np.random.default_rng(rank)
    chosen = [random.choice(np.arange(rank, 1500, trainers), BATCH, replace=False) for _ in range(steps)]
    return [((digits.data[rows] / 16).astype(np.float32), digits.target[rows]) for rows in chosen]


# -------------------------------------------------------------------- what runs here


async def alone(trainers: int, steps: int) -> list[list[float]]:
    """The losses of one process that does the same in turn."""
    losses: list[list[float]] = []
    model = ParameterServer(trainers)
    for batch_of in zip(*(batches(rank, trainers, steps) for rank in range(trainers)), strict=True):
        losses.append([])
        for rank, (images, labels) in enumerate(batch_of):
            loss = nn.functional.cross_entropy(model(ag.asarray(images)), labels)
            model.gradients[rank] = await ag.grad(loss, list(model.parameters()))
            losses[-1].append(loss.item())
        model.step()
    return [list(each) for each in zip(*losses, strict=True)]


async def main(trainers: int, steps: int) -> None:
    """Let the trainers run at the same time, then compare with one process."""
    names = [f"trainer{rank}" for rank in range(trainers)]
    async with dist.LocalCluster(1 + trainers, names=["server", *names], service="parameter_server:service") as cluster:
        driver = cluster.driver
        server = await driver.remote("server", ParameterServer, trainers)
        losses = await asyncio.gather(*(driver.call(name, "train", server, rank, trainers, steps) for rank, name in enumerate(names)))
        digits = load_digits()
        scores = await server.call("forward", ag.asarray((digits.data[1500:] / 16).astype(np.float32)))
    right = (scores.detach().numpy().argmax(1) == digits.target[1500:]).mean()
    for step in range(0, steps, max(1, steps // 4)):
        print(f"    step {step:3}: losses " + " ".join(f"{each[step]:.3f}" for each in losses))
    same = losses == await alone(trainers, steps)
    print(f"{right:.0%} of new images right; the losses of all trainers {'are those' if same else 'ARE NOT THOSE'} of one process, to the bit")
    assert same


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trainers", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    ag.run(main(options.trainers, options.steps))

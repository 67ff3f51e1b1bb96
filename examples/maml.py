"""Meta-learning over four worker processes (MAML): a step of the learner is the gradient of what other gradients have led to, on other machines.

    python examples/maml.py                           # four worker processes on this machine, about ten seconds
    python examples/maml.py --steps 600

Each task is a sine wave, with ten points to learn from and ten to be examined on. A worker gets the weights, takes gradient steps on the first,
which it records, and answers with the error on the others: the backward pass of the driver meets second derivatives on every worker. One worker is
killed in the middle of a step; the step changes nothing, and is taken again by the other three. The weights have the bits of one process.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # another number of threads rounds otherwise

import numpy as np

import aiograd as ag
from aiograd import distributed as dist
from aiograd import nn
from aiograd.errors import WorkerLostError

NAMES = [f"worker{i}" for i in range(4)]
TASKS, POINTS, INNER_STEPS, INNER_RATE = 8, 10, 2, 0.02

# -------------------------------------------------------------------- what runs in the worker processes

service = dist.Service()


def network() -> nn.Module:
    """Two hidden layers."""
    g = ag.Generator(0)
    return nn.Sequential(nn.Linear(1, 40, generator=g), nn.Tanh(), nn.Linear(40, 40, generator=g), nn.Tanh(), nn.Linear(40, 1, generator=g))


NETWORK = network()


@service.function
def error(task: int, part: int, weights: list) -> ag.Tensor:
    """The error on the points of a task to learn from (part 0) or on those of the examination (part 1)."""
    random = np.random.default_rng(task)
    amplitude, phase = random.uniform(0.1, 5.0), random.uniform(0.0, np.pi)
    x = random.uniform(-5.0, 5.0, (2, POINTS, 1))[part].astype(np.float32)
    outputs = ag.functional_call(NETWORK, dict(zip(NETWORK.state_dict(), weights, strict=True)), (ag.asarray(x),))
    return nn.functional.mse_loss(outputs, (amplitude * np.sin(x + phase)).astype(np.float32))


async def examined(task: int, weights: list, error: Callable[..., Any]) -> ag.Tensor:
    """The error of the examination after gradient steps; ``error(task, part, weights)`` may be a call of a worker."""
    for _ in range(INNER_STEPS):
        grads = await ag.grad(await error(task, 0, weights), weights, create_graph=True)
        weights = [w - INNER_RATE * g for w, g in zip(weights, grads, strict=True)]
    return await error(task, 1, weights)


@service.function
async def examine(task: int, weights: list) -> ag.Tensor:
    """The same on the worker that has the task."""
    return await examined(task, weights, lambda *args: ag.offload(error, *args))


@service.function
def end() -> None:
    """Kill this worker, as the loss of a machine would."""
    os.kill(os.getpid(), signal.SIGKILL)


# -------------------------------------------------------------------- what runs here


class Learner:
    """Weights from which a few gradient steps lead far, and the optimizer that finds them."""

    def __init__(self) -> None:
        self.weights = list(network().parameters())
        self.optimizer = ag.optim.Adam(self.weights, lr=3e-3)

    async def mean_error(self, step: int, call: Callable[..., Any]) -> Any:
        """The mean error over the tasks of a step; ``call(place, task, weights)`` has one examined."""
        return ag.stack(await asyncio.gather(*(call(place, step * TASKS + place, self.weights) for place in range(TASKS)))).mean()

    async def step_with(self, driver: dist.Worker, names: list[str], step: int) -> float:
        """A step whose tasks are on workers."""
        async with driver.context() as ctx:
            mean = await self.mean_error(step, lambda place, *args: driver.call(names[place % len(names)], "examine", *args))
            await ctx.backward(mean)
            self.optimizer.step(ctx.grads)
        return float(mean.item())

    async def step_here(self, step: int) -> float:
        """The same step in this process; each task adds up the gradients of its own copy of the weights, as a worker does."""
        mean = await self.mean_error(step, lambda place, task, weights: examine(task, [w.clone() for w in weights]))
        self.optimizer.step(await ag.grad(mean, self.weights))
        return float(mean.item())


async def main(steps: int) -> None:
    """Learn with workers, one of which is killed, then in one process, and compare."""
    learner, alone, names, killing, errors = Learner(), Learner(), list(NAMES), None, []
    async with dist.LocalCluster(len(NAMES), names=NAMES, service="maml:service") as cluster:
        driver = cluster.driver
        async with driver.context():  # the inner gradients come here, are differentiated again, and go back
            crossing = await examined(0, learner.weights, lambda *args: driver.call(NAMES[0], "error", *args))
            found = await ag.grad(crossing, learner.weights)
        wanted = await ag.grad(await examine(0, learner.weights), learner.weights)
        furthest = max(float(abs(a - b).max()) for a, b in zip(found, wanted, strict=True))
        print(f"inner steps taken here, with the gradients of a worker: their gradient differs by at most {furthest:.0e} from one process")

        while len(errors) < steps:
            if len(errors) == steps // 3 and killing is None:
                killing = asyncio.ensure_future(driver.call(NAMES[1], "end"))
            try:
                errors.append(await learner.step_with(driver, names, len(errors)))
            except WorkerLostError as failure:
                names.remove(failure.worker)
                print(f"    {failure.worker} is lost in step {len(errors)}, which changed nothing; the others take it", flush=True)
                continue
            if len(errors) % max(1, steps // 4) == 0:
                print(f"    step {len(errors):3}: mean error {np.mean(errors[-20:]):.2f} after {INNER_STEPS} gradient steps", flush=True)
        await asyncio.gather(killing, return_exceptions=True)

    same = errors == [await alone.step_here(step) for step in range(steps)]
    same = same and all(a.detach().numpy().tobytes() == b.detach().numpy().tobytes() for a, b in zip(learner.weights, alone.weights, strict=True))
    print(f"the weights {'have the same bits as' if same else 'DIFFER FROM'} those of one process")
    assert same and len(names) == len(NAMES) - 1 and furthest < 1e-5


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=120)
    ag.run(main(parser.parse_args().steps))

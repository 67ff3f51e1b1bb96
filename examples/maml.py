"""Meta-learning over four worker processes (MAML): a step of the learner is the gradient of what other gradients have led to, on other machines.

    python examples/maml.py                           # four worker processes on this machine, about ten seconds
    python examples/maml.py --steps 600

Each task is a sine wave, of which a worker has ten points to learn from and ten to be examined on. A worker gets the weights, takes gradient steps
on the points of its task, which it records, and answers with the error on the others. The backward pass of the driver goes through these steps, so
it meets second derivatives on every worker. One worker is killed in the middle of a step; the step changes nothing, and is taken again by the other
three. The weights at the end have the bits of one process.
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


def network() -> nn.Module:
    """Two hidden layers."""
    g = ag.Generator(0)
    return nn.Sequential(nn.Linear(1, 40, generator=g), nn.Tanh(), nn.Linear(40, 40, generator=g), nn.Tanh(), nn.Linear(40, 1, generator=g))


# -------------------------------------------------------------------- what runs in the worker processes

service = dist.Service()
NETWORK = network()


@service.function
def error(task: int, part: int, weights: list) -> ag.Tensor:
    """The error on the points of a task to learn from (part 0) or on those of the examination (part 1)."""
    random = np.random.default_rng(task)
    amplitude, phase = random.uniform(0.1, 5.0), random.uniform(0.0, np.pi)
    x = random.uniform(-5.0, 5.0, (2, POINTS, 1))[part].astype(np.float32)
    outputs = ag.functional_call(NETWORK, dict(zip(NETWORK.state_dict(), weights, strict=True)), (ag.asarray(x),))
    return nn.functional.mse_loss(outputs, (amplitude * np.sin(x + phase)).astype(np.float32))


@service.function
async def examine(task: int, inner_steps: int, weights: list) -> ag.Tensor:
    """The error of the examination after gradient steps."""
    for _ in range(inner_steps):
        grads = await ag.grad(error(task, 0, weights), weights, create_graph=True)
        weights = [w - INNER_RATE * g for w, g in zip(weights, grads, strict=True)]
    return error(task, 1, weights)


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

    async def error(self, step: int, examined: Callable[..., Any]) -> Any:
        """The mean error over the tasks of a step; ``examined(place, task, inner_steps, weights)`` asks a worker."""
        calls = (examined(place, step * TASKS + place, INNER_STEPS, self.weights) for place in range(TASKS))
        return ag.stack(await asyncio.gather(*calls)).mean()

    async def step_with(self, driver: dist.Worker, names: list[str], step: int) -> float:
        """A step whose tasks are on workers."""
        async with driver.context() as ctx:
            mean = await self.error(step, lambda place, *args: driver.call(names[place % len(names)], "examine", *args))
            await ctx.backward(mean)
            self.optimizer.step([ctx.grads[w] for w in self.weights])
        return float(mean.item())

    async def step_here(self, step: int) -> float:
        """The same step in this process; each task adds up the gradients of its own copy of the weights, as a worker does."""
        mean = await self.error(step, lambda place, task, steps, weights: examine(task, steps, [w.clone() for w in weights]))
        self.optimizer.zero_grad()
        await mean.backward()
        self.optimizer.step()
        return float(mean.item())


async def inner_steps_across(driver: dist.Worker, name: str, task: int, weights: list[Any]) -> tuple[Any, ...]:
    """The gradient of one examination if this process takes the inner steps, with gradients that come from the worker and are differentiated again."""
    async with driver.context():
        adapted = weights
        for _ in range(INNER_STEPS):
            grads = await ag.grad(await driver.call(name, "error", task, 0, adapted), adapted, create_graph=True)
            adapted = [w - INNER_RATE * g for w, g in zip(adapted, grads, strict=True)]
        return await ag.grad(await driver.call(name, "error", task, 1, adapted), weights)


async def main(steps: int) -> None:
    """Learn with workers, one of which is killed, then in one process, and compare."""
    learner, names, killing, errors = Learner(), list(NAMES), None, []
    async with dist.LocalCluster(len(NAMES), names=NAMES, service="maml:service") as cluster:
        across = await inner_steps_across(cluster.driver, NAMES[0], 0, learner.weights)
        here = await ag.grad(await examine(0, INNER_STEPS, learner.weights), learner.weights)
        furthest = max(float(abs(a - b).max()) for a, b in zip(across, here, strict=True))
        print(f"gradients of gradients that came from a worker differ from those of one process by at most {furthest:.1e}")
        while len(errors) < steps:
            if len(errors) == steps // 3 and killing is None:
                killing = asyncio.ensure_future(cluster.driver.call(NAMES[1], "end"))
            try:
                errors.append(await learner.step_with(cluster.driver, names, len(errors)))
            except WorkerLostError as failure:
                names.remove(failure.worker)
                print(f"    {failure.worker} is lost in step {len(errors)}, which changed nothing; the others take it", flush=True)
                continue
            if len(errors) % max(1, steps // 5) == 0:
                print(f"    step {len(errors):3}: mean error {np.mean(errors[-20:]):.2f} after {INNER_STEPS} gradient steps", flush=True)
        await asyncio.gather(killing, return_exceptions=True)

    for text, weights in (("the weights at first", Learner().weights), ("the learnt weights", learner.weights)):
        means = [np.mean([(await examine(10**6 + task, count, weights)).item() for task in range(100)]) for count in (0, INNER_STEPS)]
        print(f"new tasks, {text}: error {means[0]:.2f}, and {means[1]:.2f} after {INNER_STEPS} gradient steps")
    alone = Learner()
    same = errors == [await alone.step_here(step) for step in range(steps)]
    same = same and all(a.detach().numpy().tobytes() == b.detach().numpy().tobytes() for a, b in zip(learner.weights, alone.weights, strict=True))
    print(f"the weights {'have the same bits as' if same else 'DIFFER FROM'} those of one process")
    assert same and len(names) == len(NAMES) - 1 and furthest < 1e-5


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    ag.run(main(parser.parse_args().steps))

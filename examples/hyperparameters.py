"""Find a penalty for each coefficient of a ridge regression by its gradient; the training data, and the solver, stay on another worker.

    python examples/hyperparameters.py                       # two worker processes, a few seconds
    python examples/hyperparameters.py --steps 60

A worker has the training rows and solves for the coefficients with LAPACK. Here are the rows of the validation, whose error the penalties are to make
small. `ag.implicit` gives the coefficients their derivatives by the equation that they solve, which also lives on the worker: no step of the solver
is recorded, and no training row travels. The worker is killed once, in the middle of a step; the step changes nothing, and is taken again with a
worker that has the same rows. The penalties at the end have the bits of one process.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # another number of threads rounds otherwise

import numpy as np

import aiograd as ag
from aiograd import distributed as dist
from aiograd.errors import WorkerLostError

NAMES = ("first", "spare")
ROWS, COEFFICIENTS, USEFUL = 60, 40, 6

# -------------------------------------------------------------------- what runs in the worker processes

service = dist.Service()


def rows(seed: int) -> tuple[Any, Any]:
    """Inputs and targets; the targets depend on a few of the inputs, the rest is noise."""
    random = np.random.default_rng(seed)
    inputs = random.normal(size=(ROWS, COEFFICIENTS))
    return inputs, inputs[:, :USEFUL].sum(axis=1) + random.normal(size=ROWS)


TRAINING, TARGETS = rows(seed=1)


@service.function
def solve(x: Any, penalties: Any) -> Any:
    """The coefficients that minimise ``|A x - b|^2 + sum(exp(p) x^2)``."""
    return ag.asarray(np.linalg.solve(TRAINING.T @ TRAINING + np.diag(np.exp(penalties.numpy())), TRAINING.T @ TARGETS))


@service.function
def slope(x: Any, penalties: Any) -> Any:
    """Half the gradient by x, zero at the solution."""
    return ag.asarray(TRAINING.T) @ (ag.asarray(TRAINING) @ x - ag.asarray(TARGETS)) + np.exp(penalties) * x


@service.function
def end() -> None:
    """Kill this worker, as the loss of a machine would."""
    os.kill(os.getpid(), signal.SIGKILL)


# -------------------------------------------------------------------- what runs here

VALIDATION, WANTED = map(ag.asarray, rows(seed=2))


class Search:
    """Gradient descent on the logarithms of the penalties."""

    def __init__(self) -> None:
        self.penalties = ag.zeros(COEFFICIENTS, dtype=np.float64, requires_grad=True)
        self.optimizer = ag.optim.Adam([self.penalties], lr=0.3)

    async def error(self, call: Any) -> Any:
        """The error on the validation rows of the coefficients for these penalties; ``call(name, *args)`` runs a function of the service."""

        @ag.implicit.root(lambda x, penalties: call("slope", x, penalties), solve="cg")
        async def coefficients(x: Any, penalties: Any) -> Any:
            return await call("solve", x, penalties)

        found = await coefficients(ag.zeros(COEFFICIENTS, dtype=np.float64), self.penalties)
        return ((VALIDATION @ found - WANTED) ** 2).mean()

    async def step_with(self, driver: dist.Worker, name: str) -> float:
        """A step whose solver and equation are a worker's; returns the error before it."""

        async def call(function: str, *args: Any) -> Any:
            return await driver.call(name, function, *args)

        async with driver.context() as ctx:
            error = await self.error(call)
            await ctx.backward(error)
            self.penalties.grad = ctx.grads[self.penalties]
        self.optimizer.step()
        return error.item()

    async def step_here(self) -> float:
        """The same step in this process."""

        async def call(function: str, *args: Any) -> Any:
            return {"slope": slope, "solve": solve}[function](*args)

        self.optimizer.zero_grad()
        error = await self.error(call)
        await error.backward()
        self.optimizer.step()
        return error.item()


async def main(steps: int) -> None:
    """Search with a worker that is killed, then in one process, and compare."""
    search, name, killing, number, lost = Search(), NAMES[0], None, 0, 0
    async with dist.make_cluster("local", len(NAMES), names=list(NAMES), service="hyperparameters:service") as cluster:
        while number < steps:
            if number == steps // 3 and killing is None:
                killing = asyncio.ensure_future(cluster.driver.call(name, "end"))
            before = search.penalties.detach().numpy().tobytes()
            try:
                error = await search.step_with(cluster.driver, name)
            except WorkerLostError as failure:
                assert search.penalties.detach().numpy().tobytes() == before
                name, lost = NAMES[1], lost + 1
                print(f"    {failure.worker} is lost in step {number}, which changed nothing; {name} takes it", flush=True)
                continue
            if number % max(1, steps // 6) == 0:
                print(f"    step {number:3}: error {error:.4f} on the validation rows", flush=True)
            number += 1
        await asyncio.gather(killing, return_exceptions=True)

    alone = Search()
    errors = [await alone.step_here() for _ in range(steps)]
    print(f"\n{steps} steps of {COEFFICIENTS} penalties: error {errors[0]:.4f} at first, {errors[-1]:.4f} at the end")
    found = np.exp(search.penalties.detach().numpy())
    print(f"median penalty of the {USEFUL} useful coefficients {np.median(found[:USEFUL]):.2g}, of the others {np.median(found[USEFUL:]):.2g}")
    same = search.penalties.detach().numpy().tobytes() == alone.penalties.detach().numpy().tobytes()
    print(f"the penalties {'have the same bits as' if same else 'DIFFER FROM'} those of one process")
    assert same and lost == 1 and errors[-1] < errors[0]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    ag.run(main(options.steps))

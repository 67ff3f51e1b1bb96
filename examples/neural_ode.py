"""Learn the law of a spiral: a neural network is the right side of an ODE, and gradients come from the adjoint equation.

    python examples/neural_ode.py                            # some seconds
    python examples/neural_ode.py --steps 300

The states of a trajectory are the root of one equation, in which each state is what the Runge-Kutta step makes of the one before. The solver steps
through time without a graph; `ag.implicit` records the equation once, all steps in one batch, and solves its transposed linear system, which is the
adjoint: sensitivities run back from the last state to the first. Gradients are compared with those of recording every step.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np

import aiograd as ag
from aiograd import nn

WINDOWS, TIMES, H = 16, 20, 0.025
SHAPE = (TIMES, WINDOWS, 2)


class Law(nn.Module):
    """How states change: (..., 2) to (..., 2)."""

    def __init__(self) -> None:
        super().__init__()
        generator = ag.Generator(0)
        self.layers = nn.Sequential(
            nn.Linear(2, 32, dtype=np.float64, generator=generator), nn.Tanh(), nn.Linear(32, 2, dtype=np.float64, generator=generator)
        )  # fmt: skip

    def forward(self, x: Any) -> Any:
        """The derivative by time."""
        return self.layers(x**3)


def spiral(x: Any) -> Any:
    """The law that is to be found."""
    return x**3 @ ag.asarray(np.array([[-0.1, 2.0], [-2.0, -0.1]]))


def step(law: Any, x: Any) -> Any:
    """The states after a time H, by the classical method of Runge and Kutta."""
    a = law(x)
    b = law(x + H / 2 * a)
    c = law(x + H / 2 * b)
    return x + H / 6 * (a + 2 * b + 2 * c + law(x + H * c))


def trajectory(law: Any, start: Any, times: int) -> Any:
    """The states that follow on `start`, (n, 2), one after the other: (times, n, 2)."""
    states = [start]
    for _ in range(times):
        states.append(step(law, states[-1]))
    return ag.stack(states[1:])


async def adjoint(matvec: Any, b: Any) -> Any:
    """The solution of the transposed system: each product carries the sensitivities back by one step, so TIMES of them are exact."""
    u = b
    for _ in range(TIMES):
        u = u + (b - await matvec(u))
    return u


class Training:
    """Fits a law to a trajectory, cut into windows; the first state of each is known.

    Args:
        start: first states, (WINDOWS, 2).
        observed: the states that follow, (TIMES, WINDOWS, 2).
    """

    def __init__(self, start: Any, observed: Any) -> None:
        self.start, self.observed = start, observed
        self.law = Law()
        self.optimizer = ag.optim.Adam(self.law.parameters(), lr=0.01)

        @ag.implicit.root(lambda x: x - step(self.law, ag.concat([start[None], x[:-1]])), solve=adjoint)
        def solve(x: Any) -> Any:
            return trajectory(self.law, start, TIMES)

        self.solve = solve

    def loss(self, states: Any) -> Any:
        """The mean distance from what was observed."""
        return np.abs(states - self.observed).mean()

    async def step(self) -> float:
        """One step of training; returns the loss before it."""
        self.optimizer.zero_grad()
        loss = self.loss(await self.solve(ag.zeros(SHAPE, dtype=np.float64)))
        await loss.backward()
        self.optimizer.step()
        return loss.item()

    async def compare(self) -> float:
        """The largest difference between the gradients of the adjoint and those of recording every step, relative."""
        parameters = list(self.law.parameters())
        found = await ag.grad(self.loss(await self.solve(ag.zeros(SHAPE, dtype=np.float64))), parameters)
        wanted = await ag.grad(self.loss(trajectory(self.law, self.start, TIMES)), parameters)
        return max(float(abs(f - w).max() / abs(w).max()) for f, w in zip(found, wanted, strict=True))


async def main(steps: int) -> None:
    """Train, and compare gradients on the way."""
    with ag.no_grad():
        whole = trajectory(spiral, ag.asarray(np.array([[2.0, 0.0]])), WINDOWS * TIMES + 1)[:, 0]
        windows = np.arange(WINDOWS) * TIMES
        training = Training(whole[windows], whole[windows + 1 + np.arange(TIMES)[:, None]])
    started = time.perf_counter()
    for number in range(steps):
        loss = await training.step()
        if number == 0:
            first = loss
        if number % max(1, steps // 6) == 0:
            print(f"    step {number:4}: loss {loss:.4f}", flush=True)
    seconds, difference = time.perf_counter() - started, await training.compare()
    print(f"{steps} steps in {seconds:.1f} s: loss {first:.4f} at first, {loss:.4f} at the end")
    print(f"gradients of the adjoint and of every step recorded differ by {difference:.1e}")
    assert loss < first and difference < 1e-8
    print("the adjoint gives the gradients of the unrolled solver")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=150)
    options = parser.parse_args()
    ag.run(main(options.steps))

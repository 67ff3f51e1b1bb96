"""Spots from two substances that react and diffuse, by Newton's method with sparse Jacobians.

    python examples/sparse_newton.py
    python examples/sparse_newton.py --side 64 --steps 60 --picture jacobian.svg

The activator u and the substrate v of Schnakenberg's model live on a square grid with periodic edges::

    du/dt = 0.04 Δu + 0.1 - u + u² v        dv/dt = 1.6 Δv + 0.9 - u² v

Diffusion is stiff, so time steps are implicit: each solves 2 side² equations by Newton's method, with a Jacobian of six entries in a row.
`ag.jacobian_plan` finds its pattern and colors once, from the rows that the residual runs; each iteration then takes as many products as there are
colors, all in one pass, and SciPy's sparse solver does the rest.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
from scipy.sparse.linalg import spsolve

import aiograd as ag

TOLERANCE = 1e-9


def laplacian(u: ag.Tensor, spacing: float) -> ag.Tensor:
    """Five-point stencil with periodic edges."""
    neighbours = ag.roll(u, 1, axis=0) + ag.roll(u, -1, axis=0) + ag.roll(u, 1, axis=1) + ag.roll(u, -1, axis=1)
    return (neighbours - 4 * u) / spacing**2


class ImplicitStep:
    """The equations of one implicit Euler step: ``new - old - dt * rate(new) = 0``."""

    def __init__(self, side: int, dt: float) -> None:
        self.shape = (2, side, side)
        self.dt = dt
        self.spacing = 8.0 / side
        numbers = np.random.default_rng(0)
        self.old = ag.tensor(np.stack([np.full((side, side), 1.0), np.full((side, side), 0.9)]) + 0.01 * numbers.normal(size=self.shape))

    def residual(self, state: ag.Tensor) -> ag.Tensor:
        """(2 * side²,) of the same: the activator first."""
        u, v = state.reshape(self.shape)
        growth = u * u * v
        rate = ag.stack([0.04 * laplacian(u, self.spacing) + 0.1 - u + growth, 1.6 * laplacian(v, self.spacing) + 0.9 - growth])
        return state - self.old.reshape(-1) - self.dt * rate.reshape(-1)


async def newton(step: ImplicitStep, plan: ag.sparse.plan.JacobianPlan) -> tuple[ag.Tensor, int]:
    """The state after the step, and the number of iterations."""
    state, iterations = step.old.reshape(-1), 0
    while np.abs((left := step.residual(state)).numpy()).max() > TOLERANCE:
        jacobian = await plan(state)
        state = state - ag.tensor(spsolve(jacobian.tocsc(), left.numpy()))
        iterations += 1
    return state, iterations


async def main() -> None:
    """Make spots out of noise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, default=32, help="grid points along a side")
    parser.add_argument("--steps", type=int, default=30, help="time steps")
    parser.add_argument("--dt", type=float, default=1.0, help="length of a time step")
    parser.add_argument("--picture", type=Path, help="where to write the pattern of the Jacobian, as SVG")
    options = parser.parse_args()

    step = ImplicitStep(options.side, options.dt)
    began = time.perf_counter()
    plan = await ag.jacobian_plan(step.residual, step.old.reshape(-1))
    unknowns = plan.pattern.shape[1]
    print(f"{unknowns} unknowns, {plan.pattern.nnz} entries: {plan.passes} products, not {unknowns}; planned in {time.perf_counter() - began:.2f} s")
    if options.picture:
        options.picture.write_text(plan.svg(), encoding="utf-8")

    total = 0
    for number in range(1, options.steps + 1):
        state, iterations = await newton(step, plan)
        step.old = state.reshape(step.shape)
        total += iterations
        if number % max(1, options.steps // 6) == 0:
            u = step.old[0].numpy()
            print(f"t = {number * options.dt:5.1f}: {iterations} Newton iterations, u from {u.min():.3f} to {u.max():.3f}")
    print(f"{total} Newton iterations in {time.perf_counter() - began:.1f} s, each step to a residual of {TOLERANCE:g}")

    for row in step.old[0].numpy()[:: max(1, options.side // 16)]:
        print("".join(" .:*#"[min(4, int(value / 0.8))] * 2 for value in row[:: max(1, options.side // 16)]))


if __name__ == "__main__":
    ag.run(main())

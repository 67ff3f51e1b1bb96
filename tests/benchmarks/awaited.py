"""How late a request handler is beside training steps that are awaited, that run in a thread, and that block the loop.

The handler is a coroutine that is called each millisecond on the loop on which the steps are taken, as those of a server are; its lag is how much
later it runs than it was due, as in `loop_lag`. A step is forward, loss, backward and an update by SGD. aiograd's forward is offloaded, and its
backward awaited; NumPy's step is written by hand; NumPy and torch run on the loop, or in a thread by ``asyncio.to_thread``. All have the same
arrays, as many threads for BLAS as the process gives them, and the same weights after a step.

Two models: a few large products, during which every library lets go of the interpreter's lock; and many small layers, where the time goes into
Python, so a thread competes with the loop for that lock. torch's backward is C++ throughout, and lets go of it.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import aiograd as ag
from aiograd import kernels
from tests.benchmarks.harness import DisagreementError, Settings, Table
from tests.benchmarks.loop_lag import Job, beside

COLUMNS = ["step", "beats", "lag ms p50", "p99", "max", "step ms", "p99 to awaited"]
RATE = np.float32(1e-3)

Weights = Callable[[], list[Any]]
Side = tuple[str, Job, Weights]


def run(settings: Settings) -> Iterator[Table]:
    """A table for each model."""
    if not settings.tiny:
        kernels.warm_up()
    large, small = ([6, 5, 4], [4] * 4) if settings.tiny else ([784, 1024, 1024, 10], [32] * 400)
    yield ag.run(_table(settings, f"{len(large) - 1} layers of up to {max(large)}, batch 256", large, settings.of(256, 4), settings.of(15, 2)))
    yield ag.run(_table(settings, f"{len(small) - 1} layers of {max(small)}, batch 16", small, settings.of(16, 2), settings.of(15, 2)))


async def _table(settings: Settings, title: str, widths: list[int], batch: int, rounds: int) -> Table:
    table = Table(f"Lag of a request handler beside training steps, {title}", COLUMNS)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(batch, widths[0])).astype(np.float32)
    weights = [(rng.normal(size=shape) / shape[0] ** 0.5).astype(np.float32) for shape in itertools.pairwise(widths)]
    awaited: float | None = None
    expected: list[Any] = []
    for name, job, found_weights in _sides(settings, x, weights):
        await job()
        mine = [np.array(each) for each in found_weights()]
        expected = expected or mine
        if not all(np.allclose(one, other, rtol=1e-3, atol=1e-5) for one, other in zip(mine, expected, strict=True)):
            raise DisagreementError(f"{name}: other weights than aiograd's after one step")
        lags: list[float] = []
        times: list[float] = []
        for _ in range(rounds):
            found, seconds = await beside(job)
            lags += found
            times.append(seconds)
        p50, p99, most = (float(np.percentile(lags, q)) * 1e3 for q in (50, 99, 100))
        awaited = p99 if awaited is None else awaited
        table.add(name, len(lags), f"{p50:.2f}", f"{p99:.2f}", f"{most:.2f}", f"{statistics.median(times) * 1e3:.1f}", f"{p99 / awaited:.1f}")
    return table


def _sides(settings: Settings, x: Any, weights: list[Any]) -> Iterator[Side]:
    """Each way to take steps: its name, a step, and the weights."""
    yield "aiograd, awaited", *_aiograd(x, weights)
    makers = {"NumPy by hand": _numpy} | ({"torch": _torch} if "torch" in settings.peers else {})
    for name, make in makers.items():
        step, found = make(x, weights)
        yield f"{name}, in a thread", functools.partial(asyncio.to_thread, step), found
        step, found = make(x, weights)
        yield f"{name}, on the loop", _on_the_loop(step), found


def _on_the_loop(step: Callable[[], None]) -> Job:
    async def job() -> None:
        step()

    return job


def _aiograd(x: Any, weights: list[Any]) -> tuple[Job, Weights]:
    leaves = [ag.tensor(weight, requires_grad=True) for weight in weights]
    optimizer, images = ag.optim.SGD(leaves, lr=float(RATE)), ag.tensor(x)

    def forward() -> Any:
        y = images
        for leaf in leaves[:-1]:
            y = (y @ leaf).relu()
        return ((y @ leaves[-1]) ** 2).mean()

    async def job() -> None:
        loss = await ag.offload(forward)
        await loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return job, lambda: [leaf.detach().numpy() for leaf in leaves]


def _numpy(x: Any, weights: list[Any]) -> tuple[Callable[[], None], Weights]:
    parameters = [weight.copy() for weight in weights]

    def step() -> None:
        inputs = [x]
        for weight in parameters[:-1]:
            inputs.append(np.maximum(inputs[-1] @ weight, 0))
        y = inputs[-1] @ parameters[-1]
        grad = y * np.float32(2 / y.size)
        for number in reversed(range(len(parameters))):
            of_weight = inputs[number].T @ grad
            if number:
                grad = (grad @ parameters[number].T) * (inputs[number] > 0)
            parameters[number] -= RATE * of_weight

    return step, lambda: parameters


def _torch(x: Any, weights: list[Any]) -> tuple[Callable[[], None], Weights]:
    import torch

    leaves = [torch.tensor(weight, requires_grad=True) for weight in weights]
    optimizer, images = torch.optim.SGD(leaves, lr=float(RATE)), torch.tensor(x)

    def step() -> None:
        y = images
        for leaf in leaves[:-1]:
            y = (y @ leaf).relu()
        ((y @ leaves[-1]) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, lambda: [leaf.detach().numpy() for leaf in leaves]

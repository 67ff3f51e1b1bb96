"""Large tensors on two threads: training steps of three networks, Adam on ten million parameters, and what a step needs in memory.

A step is forward, backward and an SGD update. aiograd's compiled kernels are warmed up first where numba is installed, as a service would do before
it serves; `AIOGRAD_KERNELS=numpy` shows what numpy alone does.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import aiograd as ag
from aiograd import kernels, optim
from tests.benchmarks import networks
from tests.benchmarks.child import forget_peak, in_child, peak, resident
from tests.benchmarks.harness import OURS, Settings, Side, Table, Workload, compare, goal_cells, sides, threads, training_side
from tests.benchmarks.networks import Model, Network
from tests.benchmarks.small_graphs import TIER

#: name -> how to build it full size and tiny, target, beyond
NETWORKS: dict[str, tuple[Callable[[bool], Network], float, float]] = {
    "MLP 784-1024-1024-10, batch 256": (
        lambda tiny: networks.mlp(8, (12, 16, 16, 10)) if tiny else networks.mlp(256, (784, 1024, 1024, 10)),
        0.90,
        0.80,
    ),
    "2 transformer blocks, d 256, 4 heads, seq 128, batch 8": (
        lambda tiny: networks.transformer(2, 5, 8, 2, 1) if tiny else networks.transformer(8, 128, 256, 4, 2),
        0.95,
        0.80,
    ),
    "CNN 1-32-64 3×3, pool, fc, 28×28, batch 64": (lambda tiny: networks.cnn(2, 8, (3, 4)) if tiny else networks.cnn(64, 28, (32, 64)), 1.0, 0.8),
}


def run(settings: Settings) -> Iterator[Table]:
    """Steps, Adam, memory."""
    kind = "numpy" if settings.tiny else kernels.warm_up()
    with threads(2):
        steps = ag.run(_steps(settings))
        steps.notes.append(f"aiograd's kernels: {kind}")
        yield steps
        yield ag.run(_adam(settings))
        yield _memory(settings)


# -------------------------------------------------------------------- steps


async def _steps(settings: Settings) -> Table:
    return await compare("Training step, 2 threads", steps_of_networks(settings), settings, rounds=12, pause=0.02)


def steps_of_networks(settings: Settings, *, compiled: bool = False) -> list[Workload]:
    """Training steps of the networks, with their forward compiled or not."""
    workloads = []
    for name, (build, target, beyond) in NETWORKS.items():
        network = build(settings.tiny)
        both = sides(settings, functools.partial(_ours, network, compiled), torch=functools.partial(_theirs, network))
        workloads.append(Workload(name, both, target, beyond, rtol=2e-3, atol=1e-5))
    return workloads


def _ours(network: Network, compiled: bool) -> Side:
    model = networks.on_aiograd(network)
    if not compiled:
        return _side(model, model.forward)
    data = [ag.tensor(value) for value in network.data]
    # the data are arguments: a function that has large arrays in its closure would run eagerly
    forward = ag.compile(lambda *data: network.loss(ag.nn.functional, data, model.parameters), tier=TIER)
    return _side(model, lambda: forward(*data))


def _theirs(network: Network) -> Side:
    model = networks.on_torch(network)
    return _side(model, model.forward)


def _side(model: Model, forward: Callable[[], Any]) -> Side:
    async def forward_backward() -> Any:
        loss = forward()
        done = loss.backward()
        if done is not None:
            await done
        return loss

    async def step() -> None:
        await forward_backward()
        model.optimizer.step()
        model.optimizer.zero_grad()

    return training_side(forward_backward, step, model.parameters)


# -------------------------------------------------------------------- Adam


async def _adam(settings: Settings) -> Table:
    each, count = settings.of(1_000_000, 10), 10
    rng = np.random.default_rng(0)
    values = [rng.normal(size=each).astype(np.float32) for _ in range(count)]
    grads = [rng.normal(size=each).astype(np.float32) for _ in range(count)]

    def ours() -> Side:
        parameters = [ag.tensor(value, requires_grad=True) for value in values]
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = ag.tensor(grad)
        return _optimizer_side(optim.Adam(parameters, lr=1e-3), parameters)

    def torch_side(**options: Any) -> Callable[[], Side]:
        def build() -> Side:
            import torch

            parameters = [torch.tensor(value, requires_grad=True) for value in values]
            for parameter, grad in zip(parameters, grads, strict=True):
                parameter.grad = torch.tensor(grad)
            return _optimizer_side(torch.optim.Adam(parameters, lr=1e-3, **options), parameters)

        return build

    name = f"Adam, {count} × {each:,} parameters"
    workloads = [
        Workload(f"{name}, × torch fused", sides(settings, ours, torch=torch_side(fused=True)), 1.0, 0.8),
        Workload(f"{name}, × torch foreach", sides(settings, ours, torch=torch_side(foreach=True))),
    ]
    return await compare("Optimizer step, 2 threads", workloads, settings, rounds=10, pause=0.02)


def _optimizer_side(optimizer: Any, parameters: Any) -> Side:
    def result() -> list[Any]:
        optimizer.step()
        return [parameter.detach().numpy().copy() for parameter in parameters]

    return Side(optimizer.step, result)


# -------------------------------------------------------------------- memory


def _memory(settings: Settings) -> Table:
    table = Table(
        "Peak memory of a step beyond what is held between steps, in a process of its own, the lower of two",
        ["workload", "aiograd MB", "torch MB", "ratio", "target", "beyond", "verdict"],
    )
    for name, (_, _, _) in NETWORKS.items():
        found = {side: _peak(settings, name, side) for side in (OURS, "torch") if side == OURS or side in settings.peers}
        ratio = found[OURS] / found["torch"] if found.get("torch") else None
        cells = [f"{found[side] / 1e6:.1f}" if side in found else "" for side in (OURS, "torch")]
        table.add(name, *cells, "" if ratio is None else f"{ratio:.2f}", *goal_cells(None if settings.tiny else ratio, 0.8, 0.7))
    return table


def _peak(settings: Settings, name: str, side: str) -> float:
    if settings.tiny:
        return float(peak_of(name, side, True)["bytes"])
    return min(float(in_child(peak_of, name=name, side=side, tiny=False)["bytes"]) for _ in range(2))


def peak_of(name: str, side: str, tiny: bool) -> dict[str, Any]:
    """Bytes that the process grows by in three steps, after one has made what the libraries keep (BLAS's buffers, threads, compiled code)."""
    build, _, _ = NETWORKS[name]
    if not tiny:
        kernels.warm_up()
    on_side = networks.on_aiograd if side == OURS else networks.on_torch

    async def steps() -> int:
        model = on_side(build(tiny))
        side_of_it = _side(model, model.forward)
        await side_of_it.step()
        forget_peak()
        before = resident()
        for _ in range(3):
            await side_of_it.step()
        return peak() - before

    return {"bytes": (ag.run if side == OURS else asyncio.run)(steps())}  # `ag.run` tunes the allocator, which is torch's too

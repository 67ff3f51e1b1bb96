"""Single layers of `nn` on one thread: forward and backward of a training step's layer, with the gradients of the input and of every parameter.

aiograd's compiled kernels are warmed up first where numba is installed, as a service would do before it serves; `AIOGRAD_KERNELS=numpy` shows
what numpy alone does. The last row differentiates twice.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

import aiograd as ag
from aiograd import kernels, nn
from tests.benchmarks.harness import Settings, Table, Workload, compare, sides, threads
from tests.benchmarks.small_graphs import aiograd_side, torch_side

Array = np.ndarray[Any, Any]
Shape = tuple[int, ...]


def run(settings: Settings) -> Iterator[Table]:
    """Time layers, then a step with second derivatives."""
    os.environ.setdefault("AIOGRAD_KERNEL_THREADS", "1")
    kind = "numpy" if settings.tiny else kernels.warm_up()
    with threads(1):
        table = ag.run(_run(settings))
        table.notes.append(f"aiograd's kernels: {kind}")
        yield table


async def _run(settings: Settings) -> Table:
    n, side, long = settings.of(16, 2), settings.of(28, 5), settings.of(50, 3)
    width = settings.of(256, 8)
    channels = settings.of(64, 4)
    images, pixels = f"batch {n}, {side}×{side}", (n, channels, side, side)

    def depthwise(stride: int) -> Callable[[Any], Any]:
        return lambda nn: nn.Conv2d(channels, channels, 3, stride, 1, groups=channels)

    workloads = [
        layer(settings, f"LSTM, {long} steps, batch {n}, 64 to 128", lambda nn: nn.LSTM(64, 128), (long, n, 64)),
        layer(settings, f"LSTM, {long} steps, batch 4, 16 to 16", lambda nn: nn.LSTM(16, 16), (long, 4, 16)),
        layer(settings, f"conv2d 3×3, 32 to {channels}, {images}", lambda nn: nn.Conv2d(32, channels, 3, padding=1), (n, 32, side, side)),
        layer(settings, f"conv2d 3×3, stride 2, 3 to 32, batch {n}", lambda nn: nn.Conv2d(3, 32, 3, 2, 1), (n, 3, 2 * side, 2 * side)),
        layer(settings, f"conv2d 1×1, {channels} to {channels}, {images}", lambda nn: nn.Conv2d(channels, channels, 1), pixels),
        layer(settings, f"depthwise 3×3, {channels}, {images}", depthwise(1), pixels),
        layer(settings, f"depthwise 3×3, stride 2, {channels}, {images}", depthwise(2), pixels),
        layer(settings, f"LayerNorm, {16 * n}×{width}", lambda nn: nn.LayerNorm(width), (n, 16, width)),
        layer(settings, f"LayerNorm, {128 * n}×{width}", lambda nn: nn.LayerNorm(width), (n, 128, width)),
        layer(settings, f"BatchNorm1d, {4 * n}×{width}", lambda nn: nn.BatchNorm1d(width), (4 * n, width)),
        layer(settings, f"BatchNorm2d, {channels}, {images}", lambda nn: nn.BatchNorm2d(channels), pixels),
        pinn(settings, n * 16),
    ]
    return await compare("Layers, 1 thread: forward + backward + free", workloads, settings, rounds=12)


def layer(settings: Settings, name: str, build: Callable[[Any], Any], shape: Shape) -> Workload:
    """A layer that ``build(nn)`` makes of either library's modules, on an input of `shape` that needs its gradient too."""
    rng = np.random.default_rng(5)
    data = rng.normal(size=shape).astype(np.float32)
    ours_layer = build(nn)
    state = {key: value.detach().numpy().copy() for key, value in ours_layer.state_dict().items()}

    def ours() -> Any:
        x = ag.tensor(data, requires_grad=True)

        async def pass_over() -> Any:
            loss = _loss(ours_layer(x), weights_ours)
            await loss.backward()
            return loss

        out = ours_layer(x)
        weights_ours = ag.tensor(_weights(_first(out).shape))
        return aiograd_side(pass_over, [x, *ours_layer.parameters()])

    def torch_() -> Any:
        import torch

        model = build(torch.nn)
        model.load_state_dict(_torch_state(state, model.state_dict()))
        x = torch.tensor(data, requires_grad=True)
        weights = torch.tensor(_weights(tuple(_first(model(x)).shape)))

        def pass_over() -> Any:
            loss = _loss(model(x), weights)
            loss.backward()
            return loss

        return torch_side(pass_over, [x, *model.parameters()])

    return Workload(name, sides(settings, ours, torch=torch_), 1.2, 1.0, rtol=1e-3, atol=1e-4)


def _first(out: Any) -> Any:
    return out[0] if isinstance(out, tuple) else out


def _loss(out: Any, weights: Any) -> Any:
    return (_first(out) * weights).sum()


def _weights(shape: Shape) -> Array:
    return np.random.default_rng(6).normal(size=shape).astype(np.float32)


def _torch_state(state: Mapping[str, Array], like: Mapping[str, Any]) -> dict[str, Any]:
    import torch

    return {key: torch.tensor(state[key]).reshape(value.shape).to(value.dtype) for key, value in like.items()}


def pinn(settings: Settings, points: int, *, compiled: bool = False) -> Workload:
    """A physics-informed step: the residual of ``u_t + u u_x = 0.01 u_xx``, by derivatives of a 2-32-32-1 network, and its gradient."""
    rng = np.random.default_rng(7)
    xs, ts = (rng.uniform(-1, 1, (points, 1)).astype(np.float32) for _ in range(2))
    widths = (2, 32, 32, 1)
    values: list[Array] = []
    for inputs, outputs in itertools.pairwise(widths):
        values += [(rng.normal(size=(outputs, inputs)) / np.sqrt(inputs)).astype(np.float32), np.zeros(outputs, np.float32)]

    def network(F: Any, h: Any, parameters: list[Any]) -> Any:
        for i in range(0, len(parameters) - 2, 2):
            h = F.linear(h, parameters[i], parameters[i + 1]).tanh()
        return F.linear(h, parameters[-2], parameters[-1])

    def ours() -> Any:
        x, t = (ag.tensor(value, requires_grad=True) for value in (xs, ts))
        parameters = [ag.tensor(value, requires_grad=True) for value in values]

        async def pass_over() -> Any:
            u = network(nn.functional, ag.concat([x, t], 1), parameters)
            u_x, u_t = await ag.grad(u.sum(), [x, t], create_graph=True)
            (u_xx,) = await ag.grad(u_x.sum(), [x], create_graph=True)
            residual = u_t + u * u_x - u_xx * 0.01
            loss = (residual * residual).mean()
            await loss.backward(inputs=parameters)
            return loss

        return aiograd_side(ag.compile(pass_over) if compiled else pass_over, parameters)

    def torch_() -> Any:
        import torch

        x, t = (torch.tensor(value, requires_grad=True) for value in (xs, ts))
        parameters = [torch.tensor(value, requires_grad=True) for value in values]

        def pass_over() -> Any:
            u = network(torch.nn.functional, torch.cat([x, t], 1), parameters)
            u_x, u_t = torch.autograd.grad(u.sum(), [x, t], create_graph=True)
            (u_xx,) = torch.autograd.grad(u_x.sum(), [x], create_graph=True)
            residual = u_t + u * u_x - u_xx * 0.01
            loss = (residual * residual).mean()
            loss.backward(inputs=parameters)
            return loss

        return torch_side(pass_over, parameters)

    return Workload(f"PINN step, {points} points, 2-32-32-1, second derivatives", sides(settings, ours, torch=torch_), 1.3, 1.0, rtol=1e-3, atol=1e-5)

"""Programs that run on any device: every row with its rules, and training steps of small models.

The simulator runs them and compares with the host (``test_programs.py``); the compiler runs them for the kernels that they would launch
(``python -m tests.ptx``); a device runs them for real (``tests/gpu``).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

import aiograd as ag
from aiograd import nn
from aiograd.nn import functional as F
from aiograd.ops import ROWS
from tests.cuda.samples import DOMAINS, NOT_ON_DEVICES
from tests.ops.traced import floating

__all__ = ["DOMAINS", "NOT_ON_DEVICES", "TRAINING", "differentiate"]


def wave(like: Any, phase: float = 1.0) -> Any:
    """A tensor of the same kind with values that are all different."""
    return ag.tensor(np.sin(phase + np.arange(like.size)).reshape(like.shape).astype(like.dtype), device=like.device)


async def differentiate(name: str, variety: int, device: str, dtype: Any = np.float32, *, second_order: bool = True) -> list[Any]:
    """A row's outputs, gradients and second gradients on a device."""
    domain, row = DOMAINS[name], ROWS[name]
    args, kwargs = domain.draw(np.random.default_rng([variety, 9]), variety)
    if domain.prepare is not None:
        args = domain.prepare(*args)
    given: list[Any] = []
    for i, arg in enumerate(args):
        if isinstance(arg, (np.ndarray, np.generic)) and (row.variadic or i < len(row.arrays)):
            if floating(arg) and arg.dtype.kind == "f" and np.dtype(dtype).name in domain.dtypes:
                arg = arg.astype(dtype)
            given.append(ag.tensor(arg, device=device, requires_grad=floating(arg)))
        else:
            given.append(arg)
    leaves = [arg for arg in given if isinstance(arg, ag.Tensor) and arg.requires_grad]
    result = row(*given, **kwargs)
    outputs = [result] if isinstance(result, ag.Tensor) else list(result)
    roots = [output for output in outputs if output.requires_grad]
    tensors = list(outputs)
    if roots:
        create_graph = domain.second_order and second_order
        first = await ag.grad(roots, leaves, [wave(root) for root in roots], create_graph=create_graph, allow_unused=True)
        tensors += first
        again = [grad for grad in first if grad is not None and grad.requires_grad]
        if again:
            tensors += await ag.grad(again, leaves, [wave(grad, 2.0) for grad in again], allow_unused=True)
    for tensor in tensors:
        if tensor is not None:
            await tensor
    return tensors


class Perceptron(nn.Module):
    """Two layers."""

    def __init__(self, features: int, hidden: int, classes: int, device: str | None) -> None:
        super().__init__()
        made = {"device": device, "generator": ag.Generator(1)}
        self.first, self.second = nn.Linear(features, hidden, **made), nn.Linear(hidden, classes, **made)

    def forward(self, x: Any) -> Any:
        return self.second(F.relu(self.first(x)))


class Convolutional(nn.Module):
    """Two convolutions with pooling and a layer."""

    def __init__(self, channels: int, side: int, classes: int, device: str | None) -> None:
        super().__init__()
        made = {"device": device, "generator": ag.Generator(1)}
        self.first = nn.Conv2d(1, channels, 3, padding=1, **made)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, **made)
        self.head = nn.Linear(channels * (side // 4) ** 2, classes, **made)

    def forward(self, x: Any) -> Any:
        x = F.max_pool2d(F.relu(self.first(x)), 2)
        x = F.avg_pool2d(F.gelu(self.second(x)), 2)
        return self.head(x.reshape(x.shape[0], -1))


class Block(nn.Module):
    """A transformer block over an embedding."""

    def __init__(self, words: int, width: int, heads: int, device: str | None) -> None:
        super().__init__()
        made = {"device": device, "generator": ag.Generator(1)}
        self.embedding = nn.Embedding(words, width, **made)
        self.attention = nn.MultiHeadAttention(width, heads, **made)
        self.norm1, self.norm2 = nn.LayerNorm(width, device=device), nn.RMSNorm(width, device=device)
        self.up, self.down = nn.Linear(width, 2 * width, **made), nn.Linear(2 * width, width, **made)
        self.head = nn.Linear(width, words, **made)

    def forward(self, tokens: Any) -> Any:
        x = self.embedding(tokens)
        y = self.norm1(x)
        attended = self.attention(y, y, y, need_weights=False, is_causal=True)
        x = x + (attended[0] if isinstance(attended, tuple) else attended)
        x = x + self.down(F.silu(self.up(self.norm2(x))))
        return self.head(x).reshape(-1, self.head.weight.shape[0])


class Recurrent(nn.Module):
    """An LSTM and a layer."""

    def __init__(self, features: int, hidden: int, classes: int, device: str | None) -> None:
        super().__init__()
        made = {"device": device, "generator": ag.Generator(1)}
        self.lstm, self.head = nn.LSTM(features, hidden, **made), nn.Linear(hidden, classes, **made)

    def forward(self, x: Any) -> Any:
        out, _ = self.lstm(x)
        return self.head(out[-1])


async def train(model: Any, optimizer: Any, x: Any, y: Any, steps: int) -> list[Any]:
    """Losses of some steps, then the parameters."""
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        await loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [await each for each in (*losses, *(p.detach() for p in model.parameters()))]


def _data(shape: tuple[int, ...], classes: int, rows: int, device: str | None) -> tuple[Any, Any]:
    rng = np.random.default_rng(3)
    return ag.tensor(rng.standard_normal(shape).astype(np.float32), device=device), ag.tensor(rng.integers(0, classes, rows), device=device)


async def perceptron(device: str | None, scale: int = 1) -> list[Any]:
    model = Perceptron(5 * scale, 6 * scale, 3 * scale, device)
    x, y = _data((4 * scale, 5 * scale), 3 * scale, 4 * scale, device)
    return await train(model, ag.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), x, y, 3)


async def convolutional(device: str | None, scale: int = 1) -> list[Any]:
    model = Convolutional(2 * scale, 8, 3, device)
    x, y = _data((2 * scale, 1, 8, 8), 3, 2 * scale, device)
    return await train(model, ag.optim.AdamW(model.parameters(), lr=0.01), x, y, 2)


async def transformer(device: str | None, scale: int = 1) -> list[Any]:
    model = Block(7 * scale, 4 * scale, 2, device)
    tokens = np.random.default_rng(4).integers(0, 7 * scale, (2, 3 * scale))
    y = ag.tensor(np.roll(tokens, -1, 1).reshape(-1), device=device)
    return await train(model, ag.optim.Adam(model.parameters(), lr=0.01, eps=1e-3), ag.tensor(tokens, device=device), y, 2)


async def recurrent(device: str | None, scale: int = 1) -> list[Any]:
    model = Recurrent(3 * scale, 4 * scale, 2, device)
    x, y = _data((3, 2 * scale, 3 * scale), 2, 2 * scale, device)
    return await train(model, ag.optim.SGD(model.parameters(), lr=0.1), x, y, 2)


#: training programs by name: ``await program(device, scale)`` gives losses and parameters
TRAINING: dict[str, Callable[..., Awaitable[list[Any]]]] = {
    "perceptron": perceptron, "convolutional": convolutional, "transformer": transformer, "recurrent": recurrent,
}  # fmt: skip

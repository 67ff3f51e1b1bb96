"""The networks of the benchmarks, each written once: PyTorch's functions and aiograd's have the same names and signatures.

A network is arrays (data and parameters) and an expression; `build` puts it on a side. ``F`` is ``torch.nn.functional`` or ``aiograd.nn.functional``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import aiograd as ag
from aiograd import nn, optim

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Network:
    """The computation to measure.

    Attributes:
        data: arrays without gradients; integers are labels.
        parameters: arrays with gradients.
        loss: ``loss(F, data, parameters)`` gives the scalar loss.
    """

    data: Sequence[Array]
    parameters: Sequence[Array]
    loss: Callable[[Any, Sequence[Any], Sequence[Any]], Any]


@dataclass(frozen=True, slots=True)
class Model:
    """A network on one side, with an optimizer."""

    parameters: Sequence[Any]
    forward: Callable[[], Any]
    optimizer: Any


def on_aiograd(network: Network, rate: float = 0.01) -> Model:
    """The network with aiograd's tensors, functions and SGD."""
    data = [ag.tensor(value) for value in network.data]
    parameters = [ag.tensor(value, requires_grad=True) for value in network.parameters]
    return Model(parameters, lambda: network.loss(nn.functional, data, parameters), optim.SGD(parameters, lr=rate))


def on_torch(network: Network, rate: float = 0.01) -> Model:
    """The network with torch's."""
    import torch
    import torch.nn.functional as F

    data = [torch.tensor(value) for value in network.data]
    parameters = [torch.tensor(value, requires_grad=True) for value in network.parameters]
    return Model(parameters, lambda: network.loss(F, data, parameters), torch.optim.SGD(parameters, lr=rate))


def _drawn(seed: int) -> Callable[..., Array]:
    """Draws float32 arrays: weights of a scale that keeps activations near 1, everything else standard normal."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int, weight: bool = False) -> Array:
        values = rng.normal(size=shape)
        return (values / np.sqrt(np.prod(shape[1:])) if weight else values).astype(np.float32)

    return draw


def mlp(batch: int, widths: Sequence[int]) -> Network:
    """Linear layers with relu between them, cross entropy."""
    draw = _drawn(2)
    labels = np.random.default_rng(3).integers(0, widths[-1], batch)
    parameters: list[Array] = []
    for inputs, outputs in itertools.pairwise(widths):
        parameters += [draw(outputs, inputs, weight=True), draw(outputs) * np.float32(0.1)]

    def loss(F: Any, data: Sequence[Any], parameters: Sequence[Any]) -> Any:
        h, target = data
        for i in range(0, len(parameters) - 2, 2):
            h = F.relu(F.linear(h, parameters[i], parameters[i + 1]))
        return F.cross_entropy(F.linear(h, parameters[-2], parameters[-1]), target)

    return Network((draw(batch, widths[0]), labels), parameters, loss)


def transformer(batch: int, length: int, width: int, heads: int, blocks: int) -> Network:
    """Blocks of layer norm, causal attention, layer norm, two linear layers with gelu between them; mean square of the result."""
    draw = _drawn(4)
    parameters: list[Array] = []
    for _ in range(blocks):
        parameters += [np.ones(width, np.float32), np.zeros(width, np.float32)]
        parameters += [draw(3 * width, width, weight=True), np.zeros(3 * width, np.float32)]
        parameters += [draw(width, width, weight=True), np.zeros(width, np.float32)]
        parameters += [np.ones(width, np.float32), np.zeros(width, np.float32)]
        parameters += [draw(4 * width, width, weight=True), np.zeros(4 * width, np.float32)]
        parameters += [draw(width, 4 * width, weight=True), np.zeros(width, np.float32)]

    def loss(F: Any, data: Sequence[Any], parameters: Sequence[Any]) -> Any:
        (x,) = data
        for i in range(blocks):
            n1, c1, wqkv, bqkv, wo, bo, n2, c2, w1, b1, w2, b2 = parameters[12 * i : 12 * i + 12]
            qkv = F.linear(F.layer_norm(x, (width,), n1, c1), wqkv, bqkv).reshape(batch, length, 3, heads, width // heads)
            q, k, v = (qkv[:, :, j].swapaxes(1, 2) for j in range(3))
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).swapaxes(1, 2).reshape(batch, length, width)
            x = x + F.linear(attended, wo, bo)
            x = x + F.linear(F.gelu(F.linear(F.layer_norm(x, (width,), n2, c2), w1, b1)), w2, b2)
        return (x * x).mean()

    return Network((draw(batch, length, width),), parameters, loss)


def cnn(batch: int, size: int, channels: Sequence[int]) -> Network:
    """3×3 convolutions with relu and 2×2 max pooling, a linear layer, cross entropy."""
    draw = _drawn(5)
    labels = np.random.default_rng(6).integers(0, 10, batch)
    parameters: list[Array] = []
    for inputs, outputs in zip((1, *channels), channels, strict=False):
        parameters += [draw(outputs, inputs, 3, 3, weight=True), draw(outputs) * np.float32(0.1)]
    features = channels[-1] * (size // 2 ** len(channels)) ** 2
    parameters += [draw(10, features, weight=True), draw(10) * np.float32(0.1)]

    def loss(F: Any, data: Sequence[Any], parameters: Sequence[Any]) -> Any:
        h, target = data
        for i in range(0, len(parameters) - 2, 2):
            h = F.max_pool2d(F.relu(F.conv2d(h, parameters[i], parameters[i + 1], padding=1)), 2)
        return F.cross_entropy(F.linear(h.reshape(batch, features), parameters[-2], parameters[-1]), target)

    return Network((draw(batch, 1, size, size), labels), parameters, loss)


def lstm(steps: int, hidden: int, batch: int) -> Network:
    """An LSTM unrolled from elementary operations; sum of squares of the last state."""
    draw = _drawn(3)
    data = [draw(batch, hidden) for _ in range(steps)] + [np.zeros((batch, hidden), np.float32)]
    parameters = [draw(hidden, 4 * hidden, weight=True), draw(hidden, 4 * hidden, weight=True), draw(4 * hidden) * np.float32(0.1)]

    def loss(F: Any, data: Sequence[Any], parameters: Sequence[Any]) -> Any:
        wx, wh, bias = parameters
        h = c = data[-1]
        for x in data[:-1]:
            gates = x @ wx + h @ wh + bias
            i, f, o = (gates[:, hidden * j : hidden * (j + 1)].sigmoid() for j in range(3))
            c = f * c + i * gates[:, 3 * hidden :].tanh()
            h = o * c.tanh()
        return (h * h).sum()

    return Network(data, parameters, loss)

"""Train four kinds of network on scikit-learn's handwritten digits, awaiting every backward pass.

    python examples/train.py                 # each of them, a few seconds each
    python examples/train.py cnn --epochs 20
    python examples/train.py mlp --save digits.safetensors

Beside the training a ticker runs on the same event loop and measures how late it gets its turn.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # matrices this small gain nothing from more, and waiting for each other costs

import numpy as np
from sklearn.datasets import load_digits
from tqdm import tqdm

import aiograd as ag
from aiograd import nn
from aiograd.nn import functional as F


def mlp(generator: ag.Generator) -> nn.Module:
    """64 pixels → 128 → 64 → 10 classes."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 128, generator=generator), nn.ReLU(), nn.Linear(128, 64, generator=generator), nn.ReLU(),
        nn.Linear(64, 10, generator=generator),
    )  # fmt: skip


def cnn(generator: ag.Generator) -> nn.Module:
    """Two convolutions on the 8×8 image, pooling, and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, generator=generator), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1, generator=generator),
        nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 10, generator=generator),
    )  # fmt: skip


class RowReader(nn.Module):
    """An LSTM that reads the image row by row."""

    def __init__(self, generator: ag.Generator) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 64, batch_first=True, generator=generator)
        self.head = nn.Linear(64, 10, generator=generator)

    def forward(self, images: Any) -> Any:
        states, _ = self.lstm(images[:, 0])
        return self.head(states[:, -1])


class Transformer(nn.Module):
    """Two blocks of self-attention over the 8 rows of the image."""

    def __init__(self, generator: ag.Generator, width: int = 32, heads: int = 4, blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width, generator=generator)
        self.place = nn.Parameter(generator.normal((8, width)) * 0.1)
        self.blocks = nn.ModuleList([Block(width, heads, generator) for _ in range(blocks)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10, generator=generator)

    def forward(self, images: Any) -> Any:
        x = self.embed(images[:, 0]) + self.place
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(axis=1))


class Block(nn.Module):
    """Attention and a two-layer perceptron, each after a normalisation and around a shortcut."""

    def __init__(self, width: int, heads: int, generator: ag.Generator) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = nn.MultiHeadAttention(width, heads, generator=generator)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width, generator=generator), nn.GELU(), nn.Linear(4 * width, width, generator=generator))

    def forward(self, x: Any) -> Any:
        normed = self.attention_norm(x)
        attended, _ = self.attention(normed, normed, normed, need_weights=False)
        x = x + attended
        return x + self.mlp(self.mlp_norm(x))


MODELS = {"mlp": (mlp, 20, 2e-3), "cnn": (cnn, 8, 4e-3), "lstm": (RowReader, 30, 8e-3), "transformer": (Transformer, 25, 4e-3)}


async def train(name: str, epochs: int | None, save: str | None) -> float:
    """Train one model; returns the share of test images it classifies correctly."""
    make, default_epochs, rate = MODELS[name]
    generator = ag.Generator(0)
    model = make(generator)
    optimizer = ag.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    digits = load_digits()
    images = (digits.images / 16).astype(np.float32)[:, None]
    order = np.random.default_rng(0).permutation(len(images))
    training, testing = order[:1437], order[1437:]
    epochs = epochs or default_epochs
    scheduler = ag.optim.CosineAnnealingLR(optimizer, epochs)

    lateness: list[float] = []
    ticker = asyncio.create_task(tick(lateness))
    started = time.perf_counter()
    bar = tqdm(range(epochs), desc=f"{name:12}", unit="epoch", leave=False)
    for epoch in bar:
        shuffled = np.random.default_rng(epoch).permutation(training)
        for batch in np.array_split(shuffled, len(shuffled) // 64):
            loss = F.cross_entropy(model(ag.asarray(images[batch])), digits.target[batch])
            optimizer.zero_grad()
            await loss.backward()
            optimizer.step()
        scheduler.step()
        bar.set_postfix(loss=f"{loss.item():.4f}")
    seconds = time.perf_counter() - started
    ticker.cancel()

    with ag.no_grad():
        predicted = model(ag.asarray(images[testing])).numpy().argmax(axis=1)
    accuracy = float((predicted == digits.target[testing]).mean())
    parameters = sum(parameter.size for parameter in model.parameters())
    print(
        f"{name:12} {parameters:6} parameters, {epochs} epochs in {seconds:.1f} s, last loss {loss.item():.4f}, test accuracy {accuracy:.1%}; "
        f"a 10 ms ticker beside it was late by {np.percentile(lateness or [0.0], 99):.1f} ms at most in 99 of 100 ticks"
    )
    if save:
        ag.save(model.state_dict(), save)
        print(f"{'':12} saved to {save}")
    return accuracy


async def tick(lateness: list[float]) -> None:
    """Measure, every 10 ms, how late the event loop is."""
    while True:
        wanted = time.perf_counter() + 0.01
        await asyncio.sleep(0.01)
        lateness.append((time.perf_counter() - wanted) * 1e3)


async def main(names: list[str], epochs: int | None, save: str | None) -> None:
    for name in names:
        accuracy = await train(name, epochs, save)
        assert epochs or accuracy > 0.95, f"{name} classifies only {accuracy:.1%} of the test images correctly"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="*", choices=[*MODELS, []], help="which to train (default: all)")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--save", metavar="FILE", help="write the weights as safetensors")
    options = parser.parse_args()
    ag.run(main(options.models or list(MODELS), options.epochs, options.save))

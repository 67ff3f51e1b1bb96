"""Networks of four kinds learn to read digits, awaiting every backward pass; the same seed gives the same bits.

Images of 8 x 8 pixels, 1,797 of them, 297 kept for testing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_digits
from threadpoolctl import threadpool_limits

import aiograd as ag
import aiograd.nn.functional as F
from aiograd import nn, optim
from aiograd.running.modes import no_grad
from aiograd.running.random import Generator, seed
from aiograd.saving.serialization import load, save

TRAIN = 1500


@pytest.fixture(autouse=True)
def _one_blas_thread() -> Iterator[None]:
    """The matrices are tiny: threads of BLAS that wait for a busy core would take longer than the work."""
    with threadpool_limits(1, "blas"):
        yield


@functools.cache
def digits() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Images (N, 8, 8) in float32, about mean 0, and classes, in an order of no meaning."""
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    return ((data.images[order] - 5.0) / 6.0).astype(np.float32), data.target[order]


class MLP(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


class CNN(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding="same"), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Dropout(0.1), nn.Linear(64, 10),
        )  # fmt: skip

    def forward(self, x: Any) -> Any:
        return super().forward(x.unsqueeze(1))


class Recurrent(nn.Module):
    """Reads the rows of an image one after the other; ``async def``, as a network that asks others would be."""

    def __init__(self) -> None:
        self.lstm = nn.LSTM(8, 32, batch_first=True)
        self.norm = nn.RMSNorm(32)
        self.head = nn.Linear(32, 10)

    async def forward(self, x: Any) -> Any:
        _, (hidden, _) = self.lstm(x)
        return self.head(self.norm(hidden[-1]))


class Transformer(nn.Module):
    """Attends among the rows of an image; which row it is, it learns as an embedding."""

    def __init__(self) -> None:
        self.rows = nn.Linear(8, 32)
        self.places = nn.Embedding(8, 32)
        self.layers = nn.Sequential(
            *(nn.TransformerEncoderLayer(32, 4, 64, dropout=0.05, activation="gelu", batch_first=True, norm_first=True) for _ in range(2))
        )
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Any) -> Any:
        return self.head(self.norm(self.layers(self.rows(x) + self.places(np.arange(8)))).mean(1))


Make = Callable[[Any], optim.Optimizer]
#: what is trained, with what, for how many epochs, and the accuracy on images it has not seen
CASES: dict[str, tuple[Callable[[], nn.Module], Make, int, float]] = {
    "mlp": (MLP, lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True), 6, 0.96),
    "cnn": (CNN, lambda p: optim.Adam(p, lr=0.01), 4, 0.94),
    "lstm": (Recurrent, lambda p: optim.AdamW(p, lr=0.01), 5, 0.94),
    "transformer": (Transformer, lambda p: optim.AdamW(p, lr=0.005, weight_decay=0.01), 5, 0.95),
}


async def train(model: nn.Module, optimizer: optim.Optimizer, epochs: int, *, order: Generator, batch: int = 32, limit: int = TRAIN) -> list[float]:
    """Train on the first `limit` images with a warm-up and a falling rate; returns the losses."""
    images, classes = digits()
    steps = epochs * -(-limit // batch)
    warm_up = optim.LinearLR(optimizer, 0.1, 1.0, 10)
    schedule = optim.SequentialLR(optimizer, [warm_up, optim.CosineAnnealingLR(optimizer, steps - 10)], [10])
    losses = []
    model.train()
    for _ in range(epochs):
        places = order.permutation(limit).numpy()
        for start in range(0, limit, batch):
            chosen = places[start : start + batch]
            optimizer.zero_grad()
            loss = F.cross_entropy(await model(ag.tensor(images[chosen])), classes[chosen], label_smoothing=0.02)
            await loss.backward()
            optim.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
    return losses


async def accuracy(model: nn.Module) -> float:
    """Of the images kept for testing, the part that is read rightly."""
    images, classes = digits()
    model.eval()
    with no_grad():
        scores = await model(ag.tensor(images[TRAIN:]))
    return float((scores.numpy().argmax(1) == classes[TRAIN:]).mean())


def bits(model: nn.Module) -> dict[str, bytes]:
    return {name: value.numpy().tobytes() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("name", CASES)
async def test_it_learns_to_read_digits(name: str) -> None:
    make, make_optimizer, epochs, wanted = CASES[name]
    seed(0)
    model = make()
    before = await accuracy(model)
    losses = await train(model, make_optimizer(model.parameters()), epochs, order=Generator(1))
    assert before < 0.3
    assert np.mean(losses[-20:]) < 0.5 * np.mean(losses[:5])
    assert await accuracy(model) >= wanted


@pytest.mark.parametrize("name", CASES)
async def test_the_same_seed_gives_the_same_bits(name: str) -> None:
    make, make_optimizer, _, _ = CASES[name]
    runs = []
    for number in (3, 3, 4):
        seed(number)
        model = make()
        losses = await train(model, make_optimizer(model.parameters()), 2, order=Generator(number), limit=256)
        runs.append((losses, bits(model)))
    assert runs[0] == runs[1]
    assert runs[0][1] != runs[2][1]


@pytest.mark.parametrize("name", CASES)
async def test_a_checkpoint_continues_to_the_bit(name: str, tmp_path: Any) -> None:
    make, make_optimizer, _, _ = CASES[name]
    seed(5)
    model = make()
    optimizer = make_optimizer(model.parameters())
    await train(model, optimizer, 1, order=Generator(0), limit=384)
    save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "checkpoint.safetensors")
    twin = make()
    other = make_optimizer(twin.parameters())
    checkpoint = load(tmp_path / "checkpoint.safetensors")
    twin.load_state_dict(checkpoint["model"])
    other.load_state_dict(checkpoint["optimizer"])
    continued = []
    for network, rule in ((model, optimizer), (twin, other)):
        seed(6)  # dropout draws from the default generator
        continued.append((await train(network, rule, 1, order=Generator(1), limit=384), bits(network)))
    assert continued[0] == continued[1]

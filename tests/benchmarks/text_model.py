"""A small character transformer and its text, for benchmarks of training."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import aiograd as ag
from aiograd import nn
from aiograd.nn import functional as F

BATCH, CONTEXT = 16, 64
#: of the optimizer: the learning rate, and the part of it at the end
RATE, LAST = 3e-3, 0.02


@dataclass(frozen=True, slots=True)
class Text:
    """The characters of numpy's own modules as numbers: nine tenths in windows that begin every `stride` characters, the rest held out."""

    train: Any
    held_out: Any
    characters: int
    stride: int = 16

    @classmethod
    def read(cls, limit: int) -> Text:
        """Read at most so many characters."""
        paths = sorted(Path(np.__file__).parent.rglob("*.py"))
        random.Random(0).shuffle(paths)
        text = "".join(path.read_text(encoding="utf-8") for path in paths)[:limit]
        text = "".join(each if each.isascii() and (each.isprintable() or each == "\n") else "?" for each in text)
        characters, numbers = np.unique(np.array(list(text)), return_inverse=True)
        end = len(numbers) * 9 // 10
        return cls(numbers[:end].astype(np.int64), numbers[end:].astype(np.int64), len(characters))

    def __len__(self) -> int:
        return (len(self.train) - CONTEXT - 1) // self.stride

    def __getitem__(self, index: int) -> Any:
        return self.train[index * self.stride : index * self.stride + CONTEXT + 1]

    def windows(self, count: int) -> Any:
        """Windows of the held-out text, evenly spaced."""
        begins = np.linspace(0, len(self.held_out) - CONTEXT - 1, count).astype(np.int64)
        return self.held_out[begins[:, None] + np.arange(CONTEXT + 1)]


class Block(nn.Module):
    """Causal attention and a two-layer perceptron, each after a normalisation and around a shortcut."""

    def __init__(self, width: int, heads: int, generator: ag.Generator) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attend = nn.Linear(width, 3 * width, generator=generator)
        self.project = nn.Linear(width, width, generator=generator)
        self.mix = nn.Sequential(nn.Linear(width, 4 * width, generator=generator), nn.ReLU(), nn.Linear(4 * width, width, generator=generator))

    def forward(self, x: Any) -> Any:
        batch, length, width = x.shape
        both = self.attend(self.norms[0](x)).reshape(batch, length, 3, self.heads, width // self.heads)
        q, k, v = (both[:, :, index].swapaxes(1, 2) for index in range(3))
        x = x + self.project(F.scaled_dot_product_attention(q, k, v, is_causal=True).swapaxes(1, 2).reshape(batch, length, width))
        return x + self.mix(self.norms[1](x))


class Predictor(nn.Module):
    """A transformer that predicts the next character."""

    def __init__(self, characters: int, width: int = 32, heads: int = 2, blocks: int = 2) -> None:
        super().__init__()
        generator = ag.Generator(0)
        self.embed = nn.Embedding(characters, width, generator=generator)
        self.place = nn.Parameter(generator.normal((CONTEXT, width)) * 0.1)
        self.blocks = nn.ModuleList([Block(width, heads, generator) for _ in range(blocks)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, characters, generator=generator)

    def forward(self, windows: Any) -> Any:
        x = self.embed(windows[:, :-1]) + self.place
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), windows[:, 1:].reshape(-1))


class Learner(nn.Module):
    """The predictor, compiled, with the batches of a text."""

    def __init__(self, text: Text) -> None:
        super().__init__()
        self.predictor = ag.compile(Predictor(text.characters))
        self.text = text

    def data(self) -> Any:
        return ag.data.DataLoader(self.text, batch_size=BATCH, shuffle=True, drop_last=True, generator=ag.Generator(1))

    async def loss(self, windows: Any) -> Any:
        return self.predictor(windows)


class DecayingAdamW(ag.optim.AdamW):
    """AdamW with a learning rate that falls with a cosine to `LAST` of it in `total` steps; None: it stays."""

    def __init__(self, params: Any, lr: float = RATE, total: int | None = None) -> None:
        super().__init__(params, lr=lr)
        self._peak, self._total, self._taken = lr, total, 0

    def step(self, *args: Any, **options: Any) -> Any:
        if self._total is not None:
            rate = LAST + (1 - LAST) * (1 + math.cos(math.pi * min(1.0, self._taken / self._total))) / 2
            self.param_groups[0]["lr"] = self._peak * rate
        self._taken += 1
        return super().step(*args, **options)

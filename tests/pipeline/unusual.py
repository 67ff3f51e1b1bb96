"""A model whose stages give each other values past their neighbours, take arguments of the batch and have losses of their own, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import aiograd as ag
from aiograd import distributed as dist
from aiograd.pipeline import Stage
from tests.pipeline.models import SIZE, chunks, mean_square
from tests.pipeline.remote import service

F = ag.nn.functional


class _Layered(ag.nn.Module):
    """A module with one layer, the same each time."""

    def __init__(self, index: int) -> None:
        generator = ag.Generator(index)
        self.layer = ag.nn.Linear(SIZE, SIZE, generator=generator)


@service.reference
class Down(_Layered):
    """Gives its inner features, and its weight."""

    def forward(self, x: Any) -> Any:
        features = self.layer(x).tanh()
        return features * 0.5, features, self.layer.weight


@service.reference
class Middle(_Layered):
    """Takes labels and a scale, gives a loss of its own, and its output for two later stages."""

    def forward(self, x: Any, scale: float = 1.0, labels: Any = None) -> Any:
        y = self.layer(x).tanh() * scale
        return y, y, None if labels is None else mean_square(y, labels)


@service.reference
class Up(_Layered):
    """Takes features and what the middle gives, and gives a loss."""

    def forward(self, x: Any, features: Any, middle: Any) -> Any:
        y = self.layer(x + features).tanh()
        return y + middle, (y * y).mean()


@service.reference
class Top(_Layered):
    """Takes the weight of the first stage, and everything else."""

    def forward(self, x: Any, features: Any, middle: Any, tied: Any, mask: Any = None) -> Any:
        y = F.linear(x + features * 0.25, tied) + middle
        return self.layer(y if mask is None else y * mask)


@service.reference
class TopWithLoss(Top):
    """Computes the loss itself."""

    def forward(self, x: Any, target: Any = None, *, features: Any, middle: Any, tied: Any, mask: Any = None) -> Any:  # type: ignore[override]
        y = super().forward(x, features, middle, tied, mask)
        return y if target is None else mean_square(y, target)


KINDS = (Down, Middle, Up, Top)
OPTIONS: tuple[dict[str, Any], ...] = (
    {"gives": ("features", "tied")},
    {"takes": ("scale", "labels"), "gives": ("middle", "loss")},
    {"takes": ("features", "middle"), "gives": ("loss",)},
    {"takes": ("features", "middle", "tied", "mask")},
)


def modules(kinds: Sequence[Any] = KINDS) -> list[Any]:
    """The modules of the model."""
    return [kind(index) for index, kind in enumerate(kinds)]


async def place(driver: dist.Worker, homes: Sequence[str | None], kinds: Sequence[Any] = KINDS) -> list[Any]:
    """The modules on workers by name, or here where there is none."""
    return [
        kind(index) if home is None else await driver.remote_module(home, kind, index)
        for index, (home, kind) in enumerate(zip(homes, kinds, strict=True))
    ]


def stages(items: Sequence[Any], **options: Any) -> list[Stage]:
    """Stages of the modules."""
    return [Stage(item, **each, **options) for item, each in zip(items, OPTIONS, strict=True)]


def arguments(rows: int) -> dict[str, Any]:
    """The arguments of stages other than the first."""
    rng = np.random.default_rng(11)
    mask = (rng.random((rows, SIZE)) > 0.3).astype(np.float32)
    return {"labels": ag.tensor(rng.normal(size=(rows, SIZE)).astype(np.float32)), "scale": 0.75, "mask": ag.tensor(mask)}


def model(items: Sequence[Any], x: Any, labels: Any, scale: float, mask: Any) -> tuple[Any, list[Any]]:
    """The output and the losses of the stages, in one graph."""
    down, middle, up, top = items
    h, features, tied = down(x)
    h, between, first = middle(h, scale=scale, labels=labels)
    h, second = up(h, features=features, middle=between)
    return top(h, features=features, middle=between, tied=tied, mask=mask), [first, second]


async def alone(
    items: Sequence[Any], microbatches: int, x: Any, target: Any, *, labels: Any, scale: float, mask: Any, replicas: int = 1
) -> list[float]:
    """Microbatches one after the other in one graph each; gradients go to ``grad``. Returns the losses.

    With several replicas the gradients of each are added up first, as if each had as many rows as the others.
    """
    parts = list(zip(*(chunks(each, microbatches * replicas) for each in (x, target, labels, mask)), strict=True))
    losses: list[float] = []
    if replicas > 1:
        parameters = [parameter for item in items for parameter in item.parameters()]
        sums: list[Any] = []
        for first in range(0, len(parts), microbatches):
            for parameter in parameters:
                parameter.grad = None
            losses += await _in_turn(items, parts[first : first + microbatches], scale, 1 / len(parts))
            found = [parameter.grad for parameter in parameters]
            sums = [have + grad for have, grad in zip(sums, found, strict=True)] if sums else found
        for parameter, grad in zip(parameters, sums, strict=True):
            parameter.grad = grad
        return losses
    return await _in_turn(items, parts, scale, 1 / microbatches)


async def _in_turn(items: Sequence[Any], parts: Sequence[tuple[Any, ...]], scale: float, seed: float) -> list[float]:
    losses = []
    for part, wanted, label, masked in parts:
        output, others = model(items, part, label, scale, masked)
        loss = mean_square(output, wanted)
        for each in others:
            loss = loss + each
        await loss.backward(ag.tensor(np.full(loss.shape, seed, loss.dtype)))
        losses.append(loss.item())
    return losses

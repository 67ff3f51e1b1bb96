"""Training as a script does it: a module, batches, an optimizer with a schedule, passes, a checkpoint."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, assert_type

import numpy as np

import aiograd as ag
from aiograd import nn, optim
from aiograd.data import DataLoader, TensorDataset


class Classifier(nn.Module):
    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, 8, generator=ag.Generator(0))
        self.rest = nn.Sequential(nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, classes, generator=ag.Generator(1)))

    def forward(self, x: ag.Tensor) -> ag.Tensor:
        hidden: ag.Tensor = self.rest(self.first(x))
        return hidden.log_softmax(-1)


async def epoch(model: Classifier, batches: DataLoader, optimizer: optim.Optimizer) -> float:
    total = 0.0
    async for rows, classes in batches:
        optimizer.zero_grad()
        loss = nn.functional.nll_loss(model.forward(rows), classes)
        assert_type(loss, ag.Tensor)
        assert_type(await loss.backward(), None)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total += loss.item()
    return total


async def main() -> None:
    rng = np.random.default_rng(0)
    rows = ag.tensor(rng.normal(size=(32, 4)).astype(np.float32))
    classes = ag.argmax(rows, axis=1)
    model = Classifier(4, 4)
    optimizer = optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.01)
    schedule = optim.CosineAnnealingLR(optimizer, 5)
    batches = DataLoader(TensorDataset(rows, classes), batch_size=8, shuffle=True, generator=ag.Generator(0))
    losses: list[float] = []
    for _ in range(5):
        losses.append(await epoch(model, batches, optimizer))
        schedule.step()
    assert losses[-1] < losses[0]

    assert_type(model.first.weight, nn.Parameter)
    assert_type(model.first.weight.shape, tuple[int, ...])
    assert_type(model.first.bias, nn.Parameter | None)
    assert_type(model.first.in_features, int)
    for name, parameter in model.named_parameters():
        assert_type(name, str)
        assert parameter.requires_grad
    with TemporaryDirectory() as folder:
        ag.save(model.state_dict(), Path(folder) / "model.safetensors")
        model.load_state_dict(ag.load(Path(folder) / "model.safetensors"))

    with ag.no_grad():
        scores = model.eval().forward(rows)
    assert not scores.requires_grad
    right = ag.mean(ag.equal(scores.argmax(1), classes).float())
    assert_type(right, ag.Tensor)
    assert_type(1.0 - right, ag.Tensor)
    assert_type(right >= 0.5, ag.Tensor)
    values: np.ndarray[Any, Any] = right.numpy()
    assert values.shape == ()


if __name__ == "__main__":
    ag.run(main())

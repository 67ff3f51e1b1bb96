"""The network of the task in torch, for the systems that train with it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.faults import task


def network() -> Any:
    """The network, with the weights that training begins with; one thread computes."""
    torch.set_num_threads(1)
    inputs, hidden, outputs = task.SIZES
    model = nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))
    model.load_state_dict({name: torch.from_numpy(each) for name, each in zip(model.state_dict(), task.weights(), strict=True)})
    return model


class Samples:
    """The samples at positions."""

    def __init__(self) -> None:
        self._inputs, self._classes = map(torch.from_numpy, task.data())

    def loss(self, model: Any, first: int, count: int) -> Any:
        """The mean loss of a run of samples."""
        rows = torch.from_numpy(task.rows(first, count))
        return nn.functional.cross_entropy(model(self._inputs[rows]), self._classes[rows])


def seen(model: Any, step: int) -> list[Any]:
    """The weights, in the steps in which they are hashed."""
    return [each.detach().numpy() for each in model.parameters()] if step % task.SEEN == 0 else []

"""Split learning with PyTorch: two parties train one model together, and neither sends its data or its labels to the other.

    pip install '.[torch]'
    python examples/torch_split_learning.py           # two worker processes on this machine, a few seconds

The clinic has measurements of patients and an encoder that reads them; the laboratory has the diagnoses and the layers that learn them. Both are
torch modules with torch optimizers of their own. What travels are eight numbers per patient, and their gradients: the driver, which starts the
passes, has neither data nor labels, and the laboratory answers with a loss. The loss is that of torch in one process that has everything.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # matrices this small gain nothing from more

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer

import aiograd as ag
from aiograd import distributed as dist
from aiograd import nn

FEATURES, BATCH = 8, 64


def table() -> tuple[Any, Any]:
    """Measurements, scaled, and diagnoses; in reality each party reads its own file."""
    found = load_breast_cancer()
    return ((found.data - found.data.mean(0)) / found.data.std(0)).astype(np.float32), found.target


def encoder() -> torch.nn.Module:
    """The clinic's model."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(30, 32), torch.nn.ReLU(), torch.nn.Linear(32, FEATURES), torch.nn.Tanh())


def head() -> torch.nn.Module:
    """The laboratory's model."""
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(FEATURES, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))


# -------------------------------------------------------------------- what runs in the processes of the parties

service = dist.Service()


class Party(nn.Module):
    """A torch model and its optimizer, which steps with the gradients of the running context."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = ag.interop.torch.wrap(model)
        self._optimizer = ag.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)

    async def learn(self) -> None:
        """Take a step; the party decides if it does."""
        context = dist.current_context()
        assert context is not None
        self._optimizer.step(context.grads)


@service.reference
class Clinic(Party):
    """Has the measurements."""

    def __init__(self) -> None:
        super().__init__(encoder())
        self._measurements = table()[0]

    def forward(self, patients: list[int]) -> Any:
        """Features of some patients, (n, 8)."""
        return self.model(ag.asarray(self._measurements[patients]))


@service.reference
class Laboratory(Party):
    """Has the diagnoses."""

    def __init__(self) -> None:
        super().__init__(head())
        self._diagnoses = table()[1]
        self._measure = ag.interop.torch.wrap(torch.nn.CrossEntropyLoss())

    def forward(self, features: Any, patients: list[int]) -> Any:
        """The loss of the diagnoses that follow from the features."""
        return self._measure(self.model(features), ag.asarray(self._diagnoses[patients]))

    def right(self, features: Any, patients: list[int]) -> float:
        """The share of diagnoses that are right."""
        with ag.no_grad():
            return float((self.model(features).numpy().argmax(1) == self._diagnoses[patients]).mean())


# -------------------------------------------------------------------- what runs here


def orders(steps: int) -> list[list[int]]:
    """The patients of each step, by number."""
    return [np.random.default_rng(step).choice(569, BATCH, replace=False).tolist() for step in range(steps)]


async def main(steps: int) -> None:
    """Train across the parties, then by torch in one process."""
    losses = []
    async with dist.LocalCluster(2, names=["clinic", "laboratory"], service="torch_split_learning:service") as cluster:
        driver = cluster.driver
        clinic = await driver.remote_module("clinic", Clinic)
        laboratory = await driver.remote_module("laboratory", Laboratory)
        for step, patients in enumerate(orders(steps)):
            async with driver.context() as ctx:
                loss = await laboratory(await clinic(patients), patients)
                await ctx.backward(loss)
                await clinic.ref.call("learn")
                await laboratory.ref.call("learn")
            losses.append(loss.item())
            if step % max(1, steps // 4) == 0:
                print(f"    step {step:3}: loss {losses[-1]:.4f}")
        everybody = list(range(569))
        with ag.no_grad():
            right = await laboratory.ref.call("right", await clinic(everybody), everybody)
    furthest = max(abs(a - b) for a, b in zip(losses, alone(steps), strict=True))
    print(f"{right:.1%} of the diagnoses right; the losses differ by at most {furthest:.1e} from those of torch with everything in one process")
    assert furthest < 1e-6 and right > 0.9


def alone(steps: int) -> list[float]:
    """The losses of torch in one process."""
    measurements, diagnoses = table()
    model = torch.nn.Sequential(encoder(), head())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    losses = []
    for patients in orders(steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(torch.from_numpy(measurements[patients])), torch.from_numpy(diagnoses[patients]))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=40)
    ag.run(main(parser.parse_args().steps))

"""One network on four worker processes that exchange little: each takes many steps on its own, then all change one base together.

    python examples/local_steps.py                           # processes of this machine, about ten seconds
    python examples/local_steps.py --epochs 60 --steps 15

Every round carries the largest sixteenth of what the members have changed, in four bits each. One process is killed on the way and left out: its
batches are read by others. Another one joins beside the running rounds. At the end all members have the same bits, and every batch was read once.
(Workers on other machines need a connection to this process only, which they may open themselves.)
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # several processes share the cores

import numpy as np
from sklearn.datasets import load_digits

import aiograd as ag
from aiograd import distributed as dist
from aiograd import nn
from aiograd.errors import WorkerLostError
from aiograd.nn import functional as F

NAMES = [f"home{i}" for i in range(5)]
AT_FIRST = 4

# -------------------------------------------------------------------- what runs in the worker processes

service = dist.Service()


def digits() -> tuple[Any, Any]:
    """Images of 64 pixels and their digits."""
    found = load_digits()
    return (found.data / 16).astype(np.float32), found.target


@service.reference
class Digits(nn.Module):
    """Scores of the digits for images."""

    def __init__(self) -> None:
        generator = ag.Generator(0)
        self.layers = nn.Sequential(nn.Linear(64, 128, generator=generator), nn.ReLU(), nn.Linear(128, 10, generator=generator))

    def data(self) -> ag.data.DataLoader:
        """The whole data set, alike on all members."""
        images, labels = digits()
        return ag.data.DataLoader(list(zip(images[:1408], labels[:1408], strict=True)), batch_size=16, shuffle=True, generator=ag.Generator(1))

    def forward(self, images: Any) -> Any:
        """The scores."""
        return self.layers(images)

    def loss(self, images: Any, labels: Any) -> Any:
        """The mean loss of a batch."""
        return F.cross_entropy(self(images), labels)


@service.function
def end() -> None:
    """Kill this worker, as the loss of a machine would."""
    os.kill(os.getpid(), signal.SIGKILL)


# -------------------------------------------------------------------- what runs here


async def main(epochs: int, steps: int) -> None:
    """Train across processes, with one lost and one joining."""
    async with dist.LocalCluster(len(NAMES), names=NAMES, service="local_steps:service") as cluster:
        options: dict[str, Any] = {"optimizer": ag.optim.AdamW, "optimizer_options": {"lr": 3e-3}, "compress": dist.TopK(1 / 16, bits=4)}
        async with await dist.LocalSteps.create(cluster.driver, NAMES[:AT_FIRST], Digits, steps=steps, **options) as training:
            read: list[tuple[int, int]] = []
            async for record in training.rounds(epochs):
                read += [batch for name in record.members for batch in record.batches[name]]
                members = f"{len(record.members)} member{'s' * (len(record.members) != 1)}"
                print(f"    round {record.number:3}: loss {record.loss:.4f}, {members}, lost {', '.join(record.lost) or 'none'}")
                if record.number == 5:
                    with contextlib.suppress(WorkerLostError):
                        await cluster.driver.call(NAMES[1], "end")
                if record.number == 10:
                    await training.add(NAMES[4])
            model, figures = Digits(), training.statistics()
            model.load_state_dict(await training.state_dict())
            alike = set((await training.digests()).values()) == {training.digest}
            names = training.names
    images, labels = digits()
    accuracy = float((model(ag.asarray(images[1437:])).numpy().argmax(axis=1) == labels[1437:]).mean())
    dense = sum(parameter.size for parameter in model.parameters()) * 4
    print(f"\n{figures.rounds} rounds of {steps} steps, at the end on {', '.join(names)}; {accuracy:.1%} of {len(images) - 1437} test images")
    print(f"{(figures.bytes_sent + figures.bytes_received) / figures.rounds / 1000:.0f} kB a round; the parameters have {dense / 1000:.0f} kB")
    print(f"every batch was read once: {sorted(read) == [(epoch, number) for epoch in range(epochs) for number in range(88)]}")
    print(f"all members have the same bits: {alike}")
    assert alike and NAMES[1] not in names and NAMES[4] in names


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--steps", type=int, default=10, help="local steps of a member between two rounds")
    arguments = parser.parse_args()
    ag.run(main(arguments.epochs, arguments.steps))

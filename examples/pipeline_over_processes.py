"""A network cut into four stages, one per worker process, trained by a zero-bubble pipeline over HTTP.

    python examples/pipeline_over_processes.py               # four worker processes on this machine, about fifteen seconds
    python examples/pipeline_over_processes.py --schedule 1F1B --output pictures

Each process has one stage. A batch of digits is cut into eight microbatches that follow each other through the stages; values go from worker to
worker, and backward is split into gradients of inputs, which the stage before waits for, and gradients of weights, which fill the gaps. All
gradients of a step are committed together, on every worker or on none. What the schedule promises is simulated first, beside 1F1B, and drawn.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # four processes share the cores

import numpy as np
from sklearn.datasets import load_digits

import aiograd as ag
from aiograd import distributed as dist
from aiograd import nn, pipeline
from aiograd.nn import functional as F

WIDTHS = [64, 128, 128, 128, 10]
STAGES, MICROBATCHES, BATCH = 4, 8, 128
NAMES = [f"stage{i}" for i in range(STAGES)]

# -------------------------------------------------------------------- what runs in the worker processes

service = dist.Service()


@service.reference
class Block(nn.Module):
    """One stage: a residual layer and one that may change the width.

    Args:
        index: which.
    """

    def __init__(self, index: int) -> None:
        super().__init__()
        generator = ag.Generator(index)
        width = WIDTHS[index]
        self.inner = nn.Linear(width, width, generator=generator)
        self.outer = nn.Linear(width, WIDTHS[index + 1], generator=generator)
        self._is_last = index == STAGES - 1
        self._optimizer = ag.optim.Adam(self.parameters(), lr=3e-3)

    def forward(self, x: Any) -> Any:
        """Values for the next stage; scores of the digits from the last one."""
        y = self.outer(x + F.relu(self.inner(x)))
        return y if self._is_last else F.relu(y)

    def learn(self) -> None:
        """Take an optimizer step with the gradients that the pipeline has put into ``grad``."""
        self._optimizer.step()
        self._optimizer.zero_grad()


# -------------------------------------------------------------------- what runs here


async def main(schedule_name: str, epochs: int, output: Path, on: str) -> None:
    """Train across processes, then compare with one process."""
    digits = load_digits()
    images, labels = (digits.data / 16).astype(np.float32), digits.target
    order = np.random.default_rng(0).permutation(len(labels))
    training, testing = order[:1408], order[1437:]
    batches = [rows for epoch in range(epochs) for rows in np.random.default_rng(epoch).permutation(training).reshape(-1, BATCH)]

    schedule = pipeline.make_schedule(schedule_name, STAGES, MICROBATCHES)
    print(f"{schedule_name}, each column a rank, F forward, I gradients of inputs, W of weights, B both:\n{schedule}\n")
    print(f"{simulate(schedule, output)}\n")

    async with dist.make_cluster(on, STAGES, names=NAMES, service="pipeline_over_processes:service") as cluster:
        driver = cluster.driver
        modules = [dist.RemoteModule(driver, name, await driver.remote(name, Block, i)) for i, name in enumerate(NAMES)]
        async with pipeline.Pipeline(modules, schedule, loss_fn=F.cross_entropy) as pipe:
            started = time.perf_counter()
            for number, rows in enumerate(batches):
                losses = await pipe.step(ag.asarray(images[rows]), labels[rows])
                await asyncio.gather(*(module.ref.call("learn") for module in modules))
                if number % (len(batches) // 5) == 0:
                    print(f"    step {number:3}: loss {np.mean([loss.item() for loss in losses]):.4f}")
            seconds = time.perf_counter() - started
            scores = await pipe.eval(ag.asarray(images[testing]))
            accuracy = float((scores.numpy().argmax(axis=1) == labels[testing]).mean())
        states = [await module.state_dict() for module in modules]

    same = await alone(images, labels, batches, states)
    print(f"\n{len(batches)} steps of {BATCH} images in {seconds:.1f} s, {seconds / len(batches) * 1e3:.1f} ms per step")
    print(f"{accuracy:.1%} of {len(testing)} test images")
    print(f"the weights of all stages {'have the same bits as' if same else 'DIFFER FROM'} those of one process that runs the microbatches in turn")
    assert same
    assert epochs < 10 or accuracy > 0.93


def simulate(schedule: pipeline.Schedule, output: Path) -> str:
    """Draw the schedule as it would be if its computations took equally long; returns a line on how long ranks would be idle."""
    costs = pipeline.Costs(forward=1, input_backward=1, weight_backward=1)
    rates = {}
    for each in (schedule, pipeline.make_schedule("1F1B", STAGES, MICROBATCHES)):
        timeline = pipeline.simulate(each, costs)
        rates[each.name] = f"{timeline.bubble_rate:.1%} of the time ({each.name}, {timeline.cost:g} units)"
        if each is schedule:
            output.mkdir(parents=True, exist_ok=True)
            (output / f"{each.name}.svg").write_text(timeline.svg())
            print(f"    drawn in {output / each.name}.svg")
    return "ranks are idle for " + ", ".join(rates.values())


async def alone(images: Any, labels: Any, batches: Any, states: Any) -> bool:
    """Whether training in one process ends with the same bits."""
    blocks = [Block(i) for i in range(STAGES)]
    for rows in batches:
        for part in np.split(rows, MICROBATCHES):
            y = ag.asarray(images[part])
            for block in blocks:
                y = block(y)
            await (F.cross_entropy(y, labels[part]) / MICROBATCHES).backward()
        for block in blocks:
            block.learn()
    mine = [block.state_dict() for block in blocks]
    return all(np.array_equal(theirs[name].numpy(), own[name].detach().numpy()) for own, theirs in zip(mine, states, strict=True) for name in own)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--schedule", default="ZB-H1")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--output", type=Path, default=Path("out"))
    parser.add_argument("--on", choices=("local", "ray", "join"), default="local", help="where the workers run (default: processes of this machine)")
    options = parser.parse_args()
    ag.run(main(options.schedule, options.epochs, options.output, options.on))

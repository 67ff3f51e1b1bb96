"""A PyTorch transformer cut into four stages, one per process, trained by a zero-bubble pipeline over HTTP, beside the same model in one process.

    pip install '.[torch]'
    python examples/torch_pipeline.py                 # four worker processes on this machine, about fifteen seconds

The stages are ordinary torch modules with torch optimizers. ``interop.torch.wrap`` makes each of them one node of aiograd's graph: a batch is cut
into microbatches that follow each other through the processes, backward is split into gradients of inputs and gradients of weights, and all
gradients of a step are committed together, into ``grad`` of the torch parameters. Then the same model is trained by torch alone.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # five processes share the cores

import numpy as np
import torch

import aiograd as ag
from aiograd import distributed as dist
from aiograd import nn, pipeline

STAGES, MICROBATCHES, BATCH = 4, 8, 32
LENGTH, TOKENS, WIDTH = 12, 16, 32
NAMES = [f"stage{i}" for i in range(STAGES)]


# -------------------------------------------------------------------- the torch model


class Start(torch.nn.Module):
    """Tokens and their places as vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = torch.nn.Embedding(TOKENS, WIDTH), torch.nn.Embedding(LENGTH, WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.tokens(tokens) + self.places.weight


class End(torch.nn.Module):
    """Scores of the tokens, and the loss where there are targets."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = torch.nn.Linear(WIDTH, TOKENS)

    def forward(self, x: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        scores = self.scores(x)
        return scores if targets is None else torch.nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


class Part(torch.nn.Module):
    """One stage of the transformer.

    Args:
        index: which.
    """

    def __init__(self, index: int) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.start = Start() if index == 0 else torch.nn.Identity()
        self.block = torch.nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.end = End() if index == STAGES - 1 else None

    def forward(self, x: torch.Tensor, *targets: torch.Tensor) -> torch.Tensor:
        x = self.block(self.start(x))
        return x if self.end is None else self.end(x, *targets)


def optimizer_of(part: Part) -> torch.optim.Optimizer:
    """The optimizer of a stage."""
    return torch.optim.AdamW(part.parameters(), lr=1e-2)


# -------------------------------------------------------------------- what runs in the worker processes

service = dist.Service()


@service.reference
class Stage(nn.Module):
    """A stage of the pipeline: a torch module, wrapped, and its torch optimizer.

    Args:
        index: which.
    """

    def __init__(self, index: int) -> None:
        super().__init__()
        part = Part(index)
        self.part = ag.interop.torch.wrap(part)
        self._optimizer = optimizer_of(part)

    def forward(self, *args: Any) -> Any:
        """Values for the next stage; the loss from the last one."""
        return self.part(*args)

    def learn(self) -> None:
        """Take an optimizer step with the gradients that the pipeline has put into ``grad``."""
        self._optimizer.step()
        self._optimizer.zero_grad()


# -------------------------------------------------------------------- what runs here


def batches(steps: int) -> list[tuple[Any, Any]]:
    """Sequences of tokens; the target at each place is the token before."""
    rng = np.random.default_rng(0)
    found = [rng.integers(0, TOKENS, (BATCH, LENGTH)) for _ in range(steps)]
    return [(tokens, np.roll(tokens, 1, axis=1)) for tokens in found]


async def across_processes(data: list[tuple[Any, Any]], schedule_name: str, on: str) -> list[float]:
    """The loss of each step of the pipeline."""
    schedule = pipeline.make_schedule(schedule_name, STAGES, MICROBATCHES)
    found = []
    async with dist.make_cluster(on, STAGES, names=NAMES, service="torch_pipeline:service") as cluster:
        driver = cluster.driver
        modules = [dist.RemoteModule(driver, name, await driver.remote(name, Stage, i)) for i, name in enumerate(NAMES)]
        async with pipeline.Pipeline(modules, schedule) as pipe:
            for number, (tokens, targets) in enumerate(data):
                losses = await pipe.step(ag.asarray(tokens), ag.asarray(targets))
                await asyncio.gather(*(module.ref.call("learn") for module in modules))
                found.append(float(np.mean([loss.item() for loss in losses])))
                if number % max(1, len(data) // 5) == 0:
                    print(f"    step {number:3}: loss {found[-1]:.4f}")
    return found


def alone(data: list[tuple[Any, Any]]) -> list[float]:
    """The loss of each step of torch alone, in this process, which runs the microbatches in turn."""
    parts = [Part(i) for i in range(STAGES)]
    optimizers = [optimizer_of(part) for part in parts]
    found = []
    for tokens, targets in data:
        losses = []
        for rows in np.split(np.arange(BATCH), MICROBATCHES):
            x = torch.from_numpy(tokens[rows])
            for part in parts[:-1]:
                x = part(x)
            loss = parts[-1](x, torch.from_numpy(targets[rows]))
            (loss / MICROBATCHES).backward()
            losses.append(loss.item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        found.append(float(np.mean(losses)))
    return found


async def main(steps: int, schedule_name: str, on: str) -> None:
    """Train across processes, then by torch alone."""
    data = batches(steps)
    print(f"{STAGES} processes, {schedule_name}, {MICROBATCHES} microbatches:")
    ours, theirs = await across_processes(data, schedule_name, on), alone(data)
    furthest = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    print(f"after {steps} steps: loss {ours[-1]:.6f}, by torch alone {theirs[-1]:.6f}; the losses of all steps differ by at most {furthest:.1e}")
    assert furthest < 1e-6 and ours[-1] < ours[0]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--schedule", default="ZB-H1")
    parser.add_argument("--on", choices=("local", "ray", "join"), default="local", help="where the workers run (default: processes of this machine)")
    options = parser.parse_args()
    ag.run(main(options.steps, options.schedule, options.on))

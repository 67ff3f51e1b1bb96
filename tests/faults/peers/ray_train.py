"""Ray Train: a group of workers with torch's DistributedDataParallel; a lost worker ends the group, which starts again from the last checkpoint."""

from __future__ import annotations

import os
import tempfile
import time
from typing import Any

import ray
import ray.train
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn

from tests.faults import task

EVERY = 20


def train(config: dict[str, Any]) -> None:
    """The loop of a worker."""
    context = ray.train.get_context()
    rank, replicas = context.get_world_rank(), context.get_world_size()
    torch.set_num_threads(1)
    lines = task.Lines(config["lines"], f"rank{rank}")
    lines.runs(f"rank{rank}", os.getpid())
    inputs, classes = map(torch.from_numpy, task.data())
    model = nn.Sequential(nn.Linear(task.SIZES[0], task.SIZES[1]), nn.ReLU(), nn.Linear(task.SIZES[1], task.SIZES[2]))
    model.load_state_dict({name: torch.from_numpy(each) for name, each in zip(model.state_dict(), task.weights(), strict=True)})
    step, checkpoint = 0, ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            state = torch.load(os.path.join(folder, "state"))
        step = state["step"]
        model.load_state_dict(state["model"])
    parallel = prepare_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=task.LR)
    while True:
        began = time.monotonic()
        first, count = task.share(step, rank, replicas)
        rows = torch.from_numpy(task.rows(first, count))
        time.sleep(config["work"])
        optimizer.zero_grad()
        nn.functional.cross_entropy(parallel(inputs[rows]), classes[rows]).backward()
        optimizer.step()
        weights = [each.detach().numpy() for each in model.parameters()] if rank == 0 and step % task.SEEN == 0 else ()
        lines.step(began, step, first, count, weights)
        step += 1
        if step % EVERY == 0:
            with tempfile.TemporaryDirectory() as folder:
                torch.save({"model": model.state_dict(), "step": step}, os.path.join(folder, "state"))
                ray.train.report({}, checkpoint=Checkpoint.from_directory(folder) if rank == 0 else None)


def main() -> None:
    """Train until the process is ended."""
    options = task.options(__doc__ or "")
    variables = {"PYTHONPATH": os.environ["PYTHONPATH"]}
    ray.init(num_cpus=options.replicas + 1, logging_level="error", runtime_env={"env_vars": variables})
    trainer = TorchTrainer(
        train, train_loop_config={"lines": options.lines, "work": options.work},
        scaling_config=ScalingConfig(num_workers=options.replicas),
        run_config=RunConfig(storage_path=options.lines + ".run", failure_config=FailureConfig(max_failures=-1)),
    )  # fmt: skip
    trainer.fit()


if __name__ == "__main__":
    main()

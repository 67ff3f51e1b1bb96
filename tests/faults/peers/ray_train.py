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

from tests.faults import task
from tests.faults.peers.torch_network import Samples, network, seen

EVERY = 20


def train(config: dict[str, Any]) -> None:
    """The loop of a worker."""
    context = ray.train.get_context()
    rank, replicas = context.get_world_rank(), context.get_world_size()
    lines = task.Lines(config["lines"], f"rank{rank}")
    lines.runs(f"rank{rank}", os.getpid())
    model, samples = network(), Samples()
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
        time.sleep(config["work"])
        optimizer.zero_grad()
        samples.loss(parallel, first, count).backward()
        optimizer.step()
        lines.step(began, step, first, count, seen(model, step) if rank == 0 else ())
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

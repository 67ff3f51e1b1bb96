"""DistributedDataParallel under torchrun: a lost process ends the others, all start again from the last checkpoint (every 20 steps, by rank 0)."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.faults import task
from tests.faults.peers.torch_network import Samples, network, seen

EVERY = 20


def load(model: Any, path: str) -> int:
    """Load the checkpoint, where there is one; the step to go on with."""
    if not os.path.exists(path):
        return 0
    checkpoint = torch.load(path)
    model.load_state_dict(checkpoint["model"])
    return int(checkpoint["step"])


def save(model: Any, step: int, path: str) -> None:
    """Replace the checkpoint by this one."""
    torch.save({"model": model.state_dict(), "step": step}, path + ".new")
    os.replace(path + ".new", path)


def main() -> None:
    """Train until the process is ended."""
    options = task.options(__doc__ or "")
    rank, replicas = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    is_shared = os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True"
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=rank == 0 and not is_shared, wait_for_workers=False)
    if is_shared:
        store = dist.PrefixStore(f"attempt{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)  # gloo finds the keys of the attempt before otherwise
    dist.init_process_group("gloo", store=store, rank=rank, world_size=replicas, timeout=timedelta(seconds=5))
    lines = task.Lines(options.lines, f"rank{rank}")
    lines.runs(f"rank{rank}", os.getpid())
    model, samples = network(), Samples()
    path = options.lines + ".checkpoint"
    step = load(model, path)
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=task.LR)
    while True:
        began = time.monotonic()
        first, count = task.share(step, rank, replicas)
        time.sleep(options.work)
        optimizer.zero_grad()
        samples.loss(parallel, first, count).backward()
        optimizer.step()
        lines.step(began, step, first, count, seen(model, step) if rank == 0 else ())
        step += 1
        if rank == 0 and step % EVERY == 0:
            save(model, step, path)


if __name__ == "__main__":
    main()

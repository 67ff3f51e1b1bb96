"""torchft: a process per replica, with a manager each and one lighthouse; a lost process is started again and gets the state of a living one."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

from tests.faults import task


def main() -> None:
    """Train until the process is ended."""
    options = task.options(__doc__ or "")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1", TORCHFT_LIGHTHOUSE=options.meet)
    torch.set_num_threads(1)
    lines = task.Lines(options.lines, f"replica{options.rank}")
    inputs, classes = map(torch.from_numpy, task.data())
    model = nn.Sequential(nn.Linear(task.SIZES[0], task.SIZES[1]), nn.ReLU(), nn.Linear(task.SIZES[1], task.SIZES[2]))
    model.load_state_dict({name: torch.from_numpy(each) for name, each in zip(model.state_dict(), task.weights(), strict=True)})
    inner = torch.optim.SGD(model.parameters(), lr=task.LR)

    def load_state(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)), min_replica_size=1, replica_id=f"replica{options.rank}", timeout=timedelta(seconds=30),
        load_state_dict=load_state, state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        store_addr="127.0.0.1", store_port=store.port, rank=0, world_size=1,
    )  # fmt: skip
    parallel = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, inner)
    lines.runs(f"replica{options.rank}", os.getpid())
    while True:
        began = time.monotonic()
        optimizer.zero_grad()
        step = manager.current_step()
        first, count = task.share(step, options.rank, options.replicas)
        rows = torch.from_numpy(task.rows(first, count))
        time.sleep(options.work)
        nn.functional.cross_entropy(parallel(inputs[rows]), classes[rows]).backward()
        takes_part = manager.is_participating()
        optimizer.step()
        if manager.current_step() > step and takes_part:
            lines.step(began, step, first, count, [each.detach().numpy() for each in model.parameters()] if step % task.SEEN == 0 else ())


if __name__ == "__main__":
    main()

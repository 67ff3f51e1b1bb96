"""torchft: a process per replica, with a manager each and one lighthouse; a lost process is started again and gets the state of a living one."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import torch
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

from tests.faults import task
from tests.faults.peers.torch_network import Samples, network, seen


def main() -> None:
    """Train until the process is ended."""
    options = task.options(__doc__ or "")
    os.environ.update(MASTER_ADDR=options.host, MASTER_PORT="0", RANK="0", WORLD_SIZE="1", TORCHFT_LIGHTHOUSE=f"http://{options.meet}")
    lines = task.Lines(options.lines, f"replica{options.rank}")
    model, samples = network(), Samples()
    inner = torch.optim.SGD(model.parameters(), lr=task.LR)

    def load_state(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    store = torch.distributed.TCPStore(options.host, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)), min_replica_size=1, replica_id=f"replica{options.rank}", timeout=timedelta(seconds=30),
        load_state_dict=load_state, state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        store_addr=options.host, hostname=options.host, store_port=store.port, rank=0, world_size=1,
    )  # fmt: skip
    parallel = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, inner)
    lines.runs(f"replica{options.rank}", os.getpid())
    while True:
        began = time.monotonic()
        optimizer.zero_grad()
        part, parts = manager.participating_rank(), manager.num_participants()  # waits for the quorum; None: it gets the state in this step
        step = manager.current_step()
        first, count = task.share(step, part or 0, parts)
        time.sleep(options.work)
        samples.loss(parallel, first, count).backward()
        takes_part = manager.is_participating()
        optimizer.step()
        if manager.current_step() > step and takes_part:
            lines.step(began, step, first, count, seen(model, step))


if __name__ == "__main__":
    main()

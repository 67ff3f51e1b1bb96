"""hivemind: a process per peer; each adds samples to the global batch, and peers average their gradients when it is full. No coordinator."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import hivemind
import torch

from tests.faults import task
from tests.faults.peers.torch_network import Samples, network


def addresses(path: str) -> list[str]:
    """The addresses of all peers so far."""
    lines = [json.loads(line) for line in Path(path).read_bytes().rpartition(b"\n")[0].splitlines()]
    return [address for line in lines if line["kind"] == "listens" for address in line["addresses"]]


def main() -> None:
    """Train until the process is ended."""
    options = task.options(__doc__ or "")
    lines = task.Lines(options.lines, f"peer{options.rank}")
    while options.rank and not addresses(options.lines):
        time.sleep(0.05)
    dht = hivemind.DHT(initial_peers=addresses(options.lines), host_maddrs=[f"/ip4/{options.host}/tcp/0"], start=True)
    lines.write("listens", addresses=[str(each) for each in dht.get_visible_maddrs()])
    model, samples = network(), Samples()
    count = task.BATCH // options.replicas
    optimizer = hivemind.Optimizer(
        dht=dht, run_id="faults", batch_size_per_step=count, target_batch_size=task.BATCH, params=model.parameters(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=task.LR),
        matchmaking_time=0.3, averaging_timeout=5.0, allreduce_timeout=3.0, load_state_timeout=5.0,
        tracker_opts={"min_refresh_period": 0.05, "default_refresh_period": 0.1, "max_refresh_period": 0.3},
    )  # fmt: skip
    optimizer.load_state_from_peers()
    lines.runs(f"peer{options.rank}", os.getpid())
    step, waiting, began = optimizer.local_epoch, [], time.monotonic()
    while True:
        first, _ = task.share(step, options.rank % options.replicas, options.replicas)
        time.sleep(options.work)
        optimizer.zero_grad()
        samples.loss(model, first, count).backward()
        epoch = optimizer.local_epoch
        optimizer.step()
        waiting.append(first)
        if optimizer.local_epoch > epoch:
            for first in waiting:
                lines.step(began, epoch, first, count)
            waiting, began = [], time.monotonic()
        step = max(step + 1, optimizer.local_epoch)


if __name__ == "__main__":
    main()

"""`examples/parameter_server.py` as it is written with `torch.distributed.rpc`: prints the losses of the trainers as JSON.

    python tests/interop/rpc_parameter_server.py weights.npz 3 20

The weights that the server begins with are those of the file. The rank after the trainers is the server.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import nn

from examples.parameter_server import batches


class ParameterServer(nn.Module):
    """The model, and the optimizer that trainers share."""

    def __init__(self, weights: str, trainers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        self.load_state_dict({name: torch.from_numpy(value) for name, value in np.load(weights).items()})
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        self.trainers = trainers
        self.gradients: dict[int, Any] = {}
        self.updated: torch.futures.Future[None] = torch.futures.Future()
        self.lock = threading.Lock()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.layers(images)
        return scores

    @staticmethod
    @rpc.functions.async_execution
    def update(server: rpc.RRef[ParameterServer], context_id: int, rank: int) -> torch.futures.Future[None]:
        """A Future that is ready when a step has been taken with the gradients of all trainers."""
        self = server.local_value()
        gradients = dist_autograd.get_gradients(context_id)
        with self.lock:
            updated = self.updated
            self.gradients[rank] = [gradients[p] for p in self.parameters()]
            if len(self.gradients) == self.trainers:
                for number, p in enumerate(self.parameters()):
                    p.grad = sum(self.gradients[each][number] for each in range(self.trainers)) / self.trainers
                self.optimizer.step()
                self.gradients, self.updated = {}, torch.futures.Future()
                updated.set_result(None)
        return updated


def train(server: rpc.RRef[ParameterServer], rank: int, trainers: int, steps: int) -> list[float]:
    """The program of a trainer; returns its losses."""
    losses = []
    for images, labels in batches(rank, trainers, steps):
        with dist_autograd.context() as context_id:
            loss = nn.functional.cross_entropy(server.rpc_sync().forward(torch.from_numpy(images)), torch.from_numpy(labels))
            dist_autograd.backward(context_id, [loss])
            rpc.rpc_sync(server.owner(), ParameterServer.update, args=(server, context_id, rank))
        losses.append(loss.item())
    return losses


def main(rank: int, weights: str, trainers: int, steps: int, port: int) -> None:
    """The program of a process."""
    name = "server" if rank == trainers else f"trainer{rank}"
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}", num_worker_threads=4 * trainers)
    rpc.init_rpc(name, rank=rank, world_size=trainers + 1, rpc_backend_options=options)
    if rank == trainers:
        server = rpc.RRef(ParameterServer(weights, trainers))
        running = [rpc.rpc_async(f"trainer{each}", train, args=(server, each, trainers, steps)) for each in range(trainers)]
        print(json.dumps(torch.futures.wait_all(running)), flush=True)
    rpc.shutdown()


if __name__ == "__main__":
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
    mp.spawn(main, args=(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), free), nprocs=int(sys.argv[2]) + 1)

"""Train a model whose parts live in Ray actors, with data from Ray tasks, and go on when an actor dies.

    pip install '.[ray]'
    python examples/ray_training.py                          # starts a Ray on this machine, or uses the one of RAY_ADDRESS

What you will see: (1) Ray tasks make batches while the step before them runs, since an ObjectRef can be awaited as a gradient can; (2) two actors
hold the halves of a network, and one distributed backward pass goes through both; (3) an actor is killed in the middle, Ray makes it again, and
training goes on from the last step, to the same bits as without the loss.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np

import aiograd as ag
from aiograd import distributed as dist
from aiograd import nn
from aiograd.errors import DistributedError
from aiograd.nn import functional as F

if importlib.util.find_spec("ray") is None:
    print("this example needs Ray: pip install '.[ray]'")
    sys.exit()
import ray

STEPS, BATCH = 20, 64
OPTIONS: dict[str, Any] = {"lr": 1e-2}

# 1. The halves of the model: classes that the actors may make ----------------------------------------------------------------------------------

service = dist.Service()


@service.reference
class Half(nn.Module):
    """Features of images of 64 pixels, or the scores of ten digits.

    Args:
        inputs, outputs: the widths.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        self.layer = nn.Linear(inputs, outputs, generator=ag.Generator(outputs))

    def forward(self, x: Any) -> Any:
        """The values for the other half, or the scores."""
        return self.layer(F.tanh(x))


# 2. The data: a Ray task for each batch, on whichever node has room ---------------------------------------------------------------------------


@ray.remote
def batch(step: int) -> tuple[Any, Any]:
    """Images with noise, and their digits."""
    from sklearn.datasets import load_digits

    digits, rng = load_digits(), np.random.default_rng(step)
    rows = rng.integers(0, len(digits.target), BATCH)
    return (digits.data[rows] / 8 - 1 + rng.normal(0, 0.1, (BATCH, 64))).astype(np.float32), digits.target[rows]


# 3. Training: one context for each step, and a checkpoint in this process ----------------------------------------------------------------------


async def train(cluster: dist.RayCluster, kill_at: int | None) -> list[bytes]:
    """Train from the beginning; returns the weights. Where an actor is lost, go back to the state after the last whole step."""
    lower, upper = cluster.workers
    saved: Any = None
    done = 0
    while done < STEPS:
        try:
            halves = [await cluster.driver.remote_module(lower, Half, 64, 32), await cluster.driver.remote_module(upper, Half, 32, 10)]
            optimizer = dist.DistributedOptimizer(cluster.driver, ag.optim.Adam, halves, **OPTIONS)
            if saved is not None:
                for half, state in zip(halves, saved[0], strict=True):
                    await half.load_state_dict(state)
                await optimizer.load_state_dict(saved[1])
            coming = batch.remote(done)
            while done < STEPS:
                images, digits = await coming  # Ray's
                coming = batch.remote(done + 1)
                if done == kill_at:
                    kill_at = None
                    print(f"step {done:2}: kills {upper}, process {cluster.pids[upper]}")
                    os.kill(cluster.pids[upper], signal.SIGKILL)
                async with cluster.driver.context() as ctx:
                    loss = F.cross_entropy(await halves[1](await halves[0](ag.tensor(images))), digits)
                    await ctx.backward(loss)  # through both actors; commits on both or on none
                    await optimizer.step(ctx)
                saved, done = ([await half.state_dict() for half in halves], await optimizer.state_dict()), done + 1
                if done % 5 == 0:
                    print(f"step {done:2}: loss {loss.item():.3f}")
        except DistributedError as error:
            print(f"step {done:2}: {type(error).__name__}; Ray makes the actor again")
            await asyncio.gather(*map(cluster.wait_running, cluster.workers))
            print(f"step {done:2}: goes on from the checkpoint, {upper} is process {cluster.pids[upper]}")
    return [value.numpy().tobytes() for state in saved[0] for value in state.values()]


async def main() -> None:
    """Train without a loss and with one, and compare."""
    here = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    runtime_env = {"env_vars": {"PYTHONPATH": os.pathsep.join(here)}}  # nodes on other machines need {"working_dir": ...}
    options: dict[str, Any] = {"names": ["lower", "upper"], "resources": {"num_cpus": 0.5}, "runtime_env": runtime_env}  # tasks need a CPU, too
    async with dist.RayCluster(2, service="ray_training:service", **options) as cluster:
        whole = await train(cluster, None)
        with_loss = await train(cluster, STEPS // 2)
    print("the weights", "have the same bits as" if with_loss == whole else "DIFFER FROM", "those of the training without a loss")
    assert with_loss == whole


if __name__ == "__main__":
    ag.run(main())
